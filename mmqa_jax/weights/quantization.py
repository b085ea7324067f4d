"""What the `quantization_config` of a published config.json says, read or refused by name.

It names the method that rounded the checkpoint's matrices; `formats.quantized` makes them whole as
they are read, or gives their codes. Activations, which some of these methods round as well, stay as
they are.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.quantized import (
    BITSANDBYTES,
    FLOAT8,
    Layout,
    awq,
    float4,
    gptq,
    packed,
    plain,
    whole_matrices,
)
from mmqa_jax.weights.formats.safetensors import TensorSource

_DTYPES = ("bfloat16", "float16", "float32")  # of what is read
_NOTES = ("quant_method", "modules_to_not_convert", "ignore", "kv_cache_scheme", "producer")


def _fp8(settings: Mapping[str, Any], where: str) -> list[Layout]:
    check_keys(
        settings,
        where,
        read=kinds(list_or_null="weight_block_size"),
        harmless=(*_NOTES, "activation_scheme", "modules_to_convert", "ignored_layers",
                  "dequantize", "activation_scale_ub"),
        fixed={
            "fmt": ("e4m3", "float8_e4m3fn"),
            "scale_fmt": ("float", "ue8m0"),
            "expert_dtype": ("fp8",),
        },
    )  # fmt: skip
    block = settings.get("weight_block_size")
    ends = ("_scale_inv", "_scale")
    if block is None:
        return [plain((0, 0), ends), plain((1, 0), ends)]
    return [plain(_block(block, f"{where}: weight_block_size"), ends)]


def _block(block: Any, where: str) -> tuple[int, int]:
    fits = isinstance(block, list) and len(block) == 2
    if not fits or not all(isinstance(size, int) and size > 0 for size in block):
        raise UserError(
            f"{where} is {block!r}, expected two whole numbers from 1; fetch the file again."
        )
    return tuple(block)


_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED, _NVFP4, _MXFP4 = (f"{name}pack-quantized" for name in ("", "nvfp4-", "mxfp4-"))


def _compressed_tensors(settings: Mapping[str, Any], where: str) -> list[Layout]:
    check_keys(
        settings,
        where,
        read=kinds(object="config_groups", name_or_null="format", object_or_null="sparsity_config"),
        harmless=(*_NOTES, "quantization_status", "global_compression_ratio", "version"),
        fixed={"transform_config": ({},)},  # it turns activations
    )
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise UserError(
            f"{where}: sparsity_config.format is {sparse!r}, which is not read (only dense); use a "
            "checkpoint without it."
        )
    layouts = {}
    for name, group in settings.get("config_groups", {}).items():
        of_group = f"{where}, config_groups.{name}"
        if not isinstance(group, Mapping):
            raise UserError(f"{of_group} is {group!r}, expected an object; fetch the file again.")
        weights = group.get("weights")
        if weights:
            layout = _of_group(
                weights, group.get("format") or settings.get("format"), f"{of_group}.weights"
            )
            layouts[repr(sorted(weights.items()))] = layout
    return [*layouts.values()]


def _of_group(weights: Any, kind: Any, where: str) -> Layout:
    """The layout of one group's weights; `kind` is the name of its format."""
    if not isinstance(weights, Mapping):
        raise UserError(f"{where} is {weights!r}, expected an object; fetch the file again.")
    check_keys(
        weights,
        where,
        read=kinds(
            size_or_null="group_size", name="strategy type", size="num_bits",
            list_or_null="block_structure", flag="symmetric",
        ),
        harmless=("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"),
        fixed={"dynamic": (False,)},
    )  # fmt: skip
    strategy, bits = weights.get("strategy"), weights.get("num_bits")
    blocks = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, weights.get("group_size") or 0),
        "tensor_group": (1, weights.get("group_size") or 0),
        "block": weights.get("block_structure"),
    }
    if strategy not in blocks:
        raise UserError(
            f"{where}: strategy is {strategy!r}, expected one of {', '.join(blocks)}; use another "
            "checkpoint."
        )
    block = _block([*blocks[strategy]], where) if strategy == "block" else blocks[strategy]
    symmetric = weights.get("symmetric", True)
    of_numbers = weights.get("type", "int"), bits
    if kind in _PLAIN and of_numbers in (("float", 8), ("int", 8)):
        layout = plain(block, dtypes=FLOAT8 if of_numbers[0] == "float" else ("int8",))
        needed = ("scale",) if symmetric else ("scale", "zero")
        return dataclasses.replace(layout, needed=needed)
    if kind == _PACKED and of_numbers in (("int", 2), ("int", 4), ("int", 8)) and block[0] == 1:
        return packed(bits, block[1], symmetric=symmetric)
    if kind == _NVFP4 and of_numbers == ("float", 4) and block == (1, 16) and symmetric:
        return float4(16, "weight_packed", "weight_global_scale", divides=True)
    if kind == _MXFP4 and of_numbers == ("float", 4) and block == (1, 32) and symmetric:
        return float4(32, "weight_packed")
    raise UserError(
        f"{where}: {of_numbers[0]} of {bits} bits by {strategy} in the format {kind!r} is not read "
        f"({', '.join(_PLAIN)} of 8 bits, {_PACKED} of 2, 4 and 8, {_NVFP4} and {_MXFP4} are); use "
        "another checkpoint."
    )


def _mxfp4(settings: Mapping[str, Any], where: str) -> list[Layout]:
    """gpt-oss's experts."""
    check_keys(settings, where, read=(), harmless=(*_NOTES, "dequantize"))
    return [float4(32, "_blocks", scale="_scales")]


def _modelopt(settings: Mapping[str, Any], where: str) -> list[Layout]:
    algorithms = {
        "FP8": [plain((0, 0))],
        "NVFP4": [float4(16, "weight", "weight_scale_2"), plain((0, 0))],
    }
    algorithm = settings.get("quant_algo")
    check_keys(
        settings,
        where,
        read=kinds(name="quant_algo"),
        harmless=(*_NOTES, "config_groups", "kv_cache_quant_algo"),
    )
    if algorithm not in algorithms:
        raise UserError(
            f"{where}: quant_algo is {algorithm!r}, expected {' or '.join(algorithms)}; use "
            "another checkpoint."
        )
    return algorithms[algorithm]


_RECIPE = (  # how a matrix was rounded, by which tool, and what is to multiply it
    *("sym", "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "meta"),
    *("model_name_or_path", "model_file_base_name", "act_group_aware", "mse", "backend", "lm_head"),
    *("tokenizer", "dataset", "batch_size", "model_seqlen", "pad_token_id", "max_input_length"),
    *("block_name_to_quantize", "modules_in_block_to_quantize", "cache_block_outputs"),
    *("module_name_preceding_first_block", "use_exllama", "disable_exllama", "exllama_config"),
    *("use_cuda_fp16", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
)


def _awq(settings: Mapping[str, Any], where: str) -> list[Layout]:
    check_keys(
        settings,
        where,
        read=kinds(integer="group_size", name_or_null="version format"),
        harmless=(*_NOTES, *_RECIPE, "desc_act"),
        fixed={"bits": (4,), "zero_point": (True,), "pack_dtype": ("int32",)},
    )
    version = settings.get("version") or settings.get("format") or "gemm"
    if version.lower() != "gemm":
        raise UserError(f"{where}: version is {version!r}, expected gemm; use another checkpoint.")
    return [awq(settings.get("group_size", 128))]


def _gptq(settings: Mapping[str, Any], where: str) -> list[Layout]:
    names = ("checkpoint_format", "format")
    check_keys(
        settings,
        where,
        read={**kinds(size="bits", flag="desc_act", integer="group_size"),
              **dict.fromkeys(("dynamic", *names), "any")},
        harmless=(*_NOTES, *_RECIPE),
        fixed={"pack_dtype": ("int32",), "is_marlin_format": (False,)},
    )  # fmt: skip
    bits, checks = settings.get("bits"), [settings[name] for name in names if settings.get(name)]
    version = checks[0] if checks else "gptq"
    if bits not in (2, 4, 8) or version not in ("gptq", "gptq_v2"):
        raise UserError(
            f"{where}: bits is {bits!r} in the format {version!r}, expected 2, 4 or 8 bits of gptq "
            "or gptq_v2; use another checkpoint."
        )
    others = [name for name in settings.get("dynamic") or () if not name.startswith("-:")]
    if others:
        raise UserError(
            f"{where}: dynamic has other settings for {others[0]!r}, which is not read; use a "
            "checkpoint whose layers are alike."
        )
    desc_act = settings.get("desc_act", False)
    shift = int(version == "gptq")
    group = settings.get("group_size", 128)
    return [gptq(bits, group, shift, needs_g_idx=desc_act)]


def _bitsandbytes(settings: Mapping[str, Any], where: str) -> list[Layout]:
    check_keys(
        settings,
        where,
        read=("load_in_4bit", "load_in_8bit"),
        harmless=(
            *_NOTES,
            *(f"bnb_4bit_{name}" for name in ("compute_dtype", "quant_type", "use_double_quant")),
            *(f"llm_int8_{name}" for name in ("enable_fp32_cpu_offload", "has_fp16_weight",
                                              "skip_modules", "threshold")),
        ),
        fixed={"bnb_4bit_quant_storage": ("uint8",)},
    )  # fmt: skip
    return [*BITSANDBYTES]


METHODS: Mapping[str, Callable[[Mapping[str, Any], str], list[Layout]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}

_part: contextvars.ContextVar[str] = contextvars.ContextVar("part", default="whole")


@contextlib.contextmanager
def reading(part: str) -> Iterator[None]:
    """Within it checkpoints are opened for a `part` of their matrices, see `whole_matrices`: what
    renames, splits and stacks whole matrices does the same to codes, scales and zeros."""
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)


def read_rounding(published: Any, where: str) -> tuple[Any, Callable[[TensorSource], TensorSource]]:
    """What a config.json says of rounded matrices.

    Args:
      published: its content.
      where: what messages call the file.

    Returns:
      The content without `quantization_config`; and what makes of the checkpoint's tensors those
      that an unrounded one has: each matrix is read and made whole when it is asked for, in the
      type that the config names, or bfloat16. Without the key both stay as they are.
    """
    settings = published.get("quantization_config") if isinstance(published, Mapping) else None
    if settings is None or settings == {}:
        return published, lambda source: source
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(
            f"{where}: quantization_config is {str(settings)[:60]!r}, its quant_method {method!r}; "
            f"expected one of {', '.join(METHODS)}: use a checkpoint of one of these, or one "
            "without it."
        )
    where = f"{where}, quantization_config"
    layouts = METHODS[method](settings, where)
    text = published.get("text_config")
    named = {**(text if isinstance(text, Mapping) else {}), **published}
    dtype = named.get("dtype") or named.get("torch_dtype")
    dtype = np.dtype(dtype if dtype in _DTYPES else "bfloat16")
    whole = {key: value for key, value in published.items() if key != "quantization_config"}
    return whole, functools.partial(
        whole_matrices, layouts=layouts, dtype=dtype, where=where, part=_part.get()
    )
