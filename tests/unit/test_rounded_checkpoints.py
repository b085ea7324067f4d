"""Checkpoints in 4 and 8 bits are read as whole ones: each method's packing, and what is refused.

The packers here write the published layouts number by number; libraries' own tensors are in KNOWN.
"""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import unstack_layers
from mmqa_jax.models.llama.quantize import load_in_codes
from mmqa_jax.weights.formats.quantized import Matrix
from mmqa_jax.weights.formats.safetensors import ArraySource
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.quantization import read_rounding, reading
from tests.refusals import refuses

OUT, IN = 48, 64
FP8 = ml_dtypes.float8_e4m3fn


def whole(settings, arrays, dtype="float32"):
    """All tensors of a checkpoint, by name."""
    published = {"quantization_config": settings, "dtype": dtype, "model_type": "x"}
    config, make_whole = read_rounding(published, "config.json")
    assert config == {"dtype": dtype, "model_type": "x"}
    source = make_whole(ArraySource(arrays))
    tensors = {key: source.read(key) for key in source.specs()}
    for key, spec in source.specs().items():
        assert (tensors[key].shape, tensors[key].dtype) == (spec.shape, spec.dtype), key
    if dtype == "float32":
        check_parts(published, arrays, tensors)
    return tensors


def check_parts(published, arrays, tensors):
    """The codes, scales and zeros of matrices that may stay in codes make the same matrices."""
    parts = {}
    for part in ("codes", "scale", "zero"):
        with reading(part):
            source = read_rounding(published, "config.json")[1](ArraySource(arrays))
        parts[part] = {key: source.read(key) for key in source.specs()}
        specs = source.specs()
        assert all(
            specs[key] == jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in parts[part].items()
        )
    for key, wanted in tensors.items():
        codes, scale, zero = (parts[part][key] for part in parts)
        if codes.dtype == wanted.dtype:  # is whole
            np.testing.assert_array_equal(codes, wanted)
            continue
        has_zero = zero.dtype == np.int8
        numbers = codes.astype(np.float32)
        axis = -2 if scale.shape[-2] < codes.shape[-2] else -1
        spread = lambda x: np.repeat(x.astype(np.float32), codes.shape[axis] // x.shape[axis], axis)  # noqa: B023, E731
        numbers = (numbers - (spread(zero) if has_zero else 0)) * spread(scale)
        np.testing.assert_array_equal(numbers, wanted)


def in_words(numbers, bits, order=None):
    """Unsigned numbers [.., n] in words of 32 bits along the last axis; `order`: their places."""
    per = 32 // bits
    numbers = np.asarray(numbers, np.int64)
    words = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] // per)), np.uint32)
    for place in range(numbers.shape[-1]):
        column = place // per * per + (order[place % per] if order else place % per)
        words[..., place // per] |= (numbers[..., column] << bits * (place % per)).astype(np.uint32)
    return words.view(np.int32)


def matrix(codes, scale, zero, block, g_idx=None):
    """(code - zero) * scale of each number, one by one; codes [out, in]."""
    numbers = np.zeros(codes.shape, np.float32)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            at = row // block[0], column // block[1] if g_idx is None else g_idx[column]
            of_zero = np.float32(0 if zero is None else zero[at])
            numbers[row, column] = (np.float32(codes[row, column]) - of_zero) * scale[at]
    return numbers


def drawn(seed, low, high, grid, zeros=None):
    """Codes [OUT, IN], scales and zeros of a grid."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(low, high, (OUT, IN))
    scale = rng.uniform(0.01, 0.2, grid).astype(np.float32)
    return codes, scale, None if zeros is None else rng.integers(*zeros, grid)


def groups(weights, kind):
    """A quantization_config of compressed-tensors."""
    of_all = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": of_all},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
        "global_compression_ratio": 1.9, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def weights(bits, strategy, kind="int", **more):
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
        "group_size": None, "block_structure": None, "observer": "minmax", "actorder": None,
    } | more  # fmt: skip


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_BLOCKS |= {"weight_block_size": [32, 24], "modules_to_not_convert": ["lm_head"]}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
INT = {"bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "version": "gemm", "zero_point": True, **INT}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False, "checkpoint_format": "gptq", **INT}
BNB = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
}  # fmt: skip
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def fp8(seed, grid, block):
    """FP8 codes, their scales, and the matrix."""
    codes, scale, _ = drawn(seed, 0, 120, grid)
    codes = (codes + 128 * (codes % 2)).astype(np.uint8).view(FP8)
    values = np.vectorize(float)(codes)
    return codes, scale, matrix(values, scale, None, block)


def test_fp8_blocks():
    """Also of rows and columns that blocks do not divide, of a stack, of scales in bfloat16."""
    codes, scale, want = fp8(0, (2, 3), (32, 24))
    plain = np.ones(OUT, np.float32)
    arrays = {"a.weight": codes, "a.weight_scale_inv": scale, "norm.weight": plain}
    tensors = whole(FP8_BLOCKS, arrays)
    assert tensors.keys() == {"a.weight", "norm.weight"}
    np.testing.assert_array_equal(tensors["a.weight"], want)
    got = whole(FP8_BLOCKS, arrays, "bfloat16")["a.weight"]
    np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))
    stack = {"gate_up_proj": np.stack([codes, codes[::-1]])}
    others = np.stack([scale, 2 * scale]).astype(ml_dtypes.bfloat16)
    got = whole(FP8_BLOCKS, {**stack, "gate_up_proj_scale_inv": others})["gate_up_proj"]
    for part in range(2):
        values, scales = (np.vectorize(float)(x[part]) for x in (stack["gate_up_proj"], others))
        want = matrix(values, np.float32(scales), None, (32, 24))
        np.testing.assert_array_equal(got[part], want)


def test_fp8_scales_that_are_exponents():
    codes, _, _ = fp8(1, (2, 3), (32, 24))
    exponents = np.array([[120, 127, 130], [125, 110, 128]], np.uint8).view(
        np.dtype("float8_e8m0fnu")
    )
    scale = 2.0 ** (exponents.view(np.uint8).astype(np.float32) - 127)
    want = matrix(np.vectorize(float)(codes), np.float32(scale), None, (32, 24))
    for kept in (exponents, exponents.view(np.uint8)):
        arrays = {"a.weight": codes, "a.weight_scale_inv": kept}
        got = whole(FP8_BLOCKS | {"scale_fmt": "ue8m0"}, arrays)["a.weight"]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("shape", "end", "settings"),
    [
        ((), "_scale_inv", FP8_TENSOR),
        ((1,), "_scale", FP8_TENSOR),
        ((OUT, 1), "_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        ((OUT,), "_scale", FP8_TENSOR),
        (
            (),
            "_scale",
            {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "x"}},
        ),
        ((1,), "_scale", groups(weights(8, "tensor", "float"), "float-quantized")),
        ((OUT, 1), "_scale", groups(weights(8, "channel", "float"), "naive-quantized")),
    ],
)
def test_fp8_of_whole_matrices_and_rows(shape, end, settings):
    rows = OUT if OUT in shape else 1
    codes, scale, want = fp8(2, (rows, 1), (OUT // rows, IN))
    arrays = {"a.weight": codes, f"a.weight{end}": scale.reshape(shape)}
    arrays |= {"a.input_scale": np.ones((), np.float32), "a.k_scale": np.ones((), np.float32)}
    tensors = whole(settings, arrays)
    assert tensors.keys() == {"a.weight"}
    np.testing.assert_array_equal(tensors["a.weight"], want)


@pytest.mark.parametrize(
    ("block", "of_weights"),
    [
        ((1, IN), weights(8, "channel")),
        ((1, 16), weights(8, "group", group_size=16)),
        ((16, 32), weights(8, "block", block_structure=[16, 32])),
        ((OUT, IN), weights(8, "tensor")),
    ],
)
@pytest.mark.parametrize("zeros", [None, (-9, 9)], ids=["symmetric", "asymmetric"])
def test_compressed_tensors_of_eight_bits(block, of_weights, zeros):
    grid = OUT // block[0], IN // block[1]
    codes, scale, zero = drawn(3, -128, 128, grid, zeros)
    arrays = {"a.weight": codes.astype(np.int8), "a.weight_scale": scale}
    if zeros:
        arrays["a.weight_zero_point"] = zero.astype(np.int8)
    settings = groups(of_weights | {"symmetric": not zeros}, "int-quantized")
    want = matrix(codes, scale, zero, block)
    np.testing.assert_array_equal(whole(settings, arrays)["a.weight"], want)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "plain"])
@pytest.mark.parametrize("order", [False, True], ids=["in order", "by g_idx"])
def test_compressed_tensors_packed(bits, zeros, order):
    half = 2 ** (bits - 1)
    codes, scale, zero = drawn(4, -half, half, (OUT, 4), None if zeros == "none" else (-half, half))
    g_idx = np.random.default_rng(0).permutation(np.arange(IN) // 16).astype(np.int32)
    arrays = {
        "a.weight_packed": in_words(codes + half, bits),
        "a.weight_scale": scale.astype(ml_dtypes.bfloat16),
        "a.weight_shape": np.array([OUT, IN]),
    }
    if zeros == "packed":
        arrays["a.weight_zero_point"] = np.ascontiguousarray(in_words(zero.T + half, bits).T)
    elif zeros == "plain":
        arrays["a.weight_zero_point"] = zero.astype(np.int8)
    if order:
        arrays["a.weight_g_idx"] = g_idx
    of_weights = weights(bits, "group", group_size=16, symmetric=zeros == "none")
    got = whole(groups(of_weights, "pack-quantized"), arrays)["a.weight"]
    scale = arrays["a.weight_scale"].astype(np.float32)
    want = matrix(codes, scale, zero, (1, 16), g_idx if order else None)
    np.testing.assert_array_equal(got, want)


def test_groups_of_several_kinds():
    """Which group a matrix is of, its tensors show."""
    four = {"targets": ["re:.*mlp.*"], "weights": weights(4, "group", group_size=16)}
    eight = {"targets": ["re:.*attn.*"], "weights": weights(8, "channel", "float"),
             "format": "float-quantized"}  # fmt: skip
    cache = {"targets": ["LlamaAttention"], "weights": None}
    settings = groups(None, "pack-quantized")
    settings["config_groups"] = {"group_0": four, "group_1": eight, "group_2": cache}
    codes, scale, _ = drawn(5, -8, 8, (OUT, 4))
    of_attention, of_rows, want = fp8(6, (OUT, 1), (1, IN))
    tensors = whole(
        settings,
        {
            "mlp.weight_packed": in_words(codes + 8, 4), "mlp.weight_scale": scale,
            "attn.weight": of_attention, "attn.weight_scale": of_rows,
        },
    )  # fmt: skip
    np.testing.assert_array_equal(tensors["mlp.weight"], matrix(codes, scale, None, (1, 16)))
    np.testing.assert_array_equal(tensors["attn.weight"], want)


@pytest.mark.parametrize("size", [16, -1])
def test_awq(size):
    """Codes of eight outputs of an input are in a word, in an order of AWQ's own."""
    per = IN if size == -1 else size
    codes, scale, zero = drawn(7, 0, 16, (OUT, IN // per), (0, 16))
    arrays = {
        "a.qweight": in_words(codes.T, 4, AWQ_ORDER),
        "a.qzeros": in_words(zero.T, 4, AWQ_ORDER),
        "a.scales": scale.T.astype(np.float16),
    }
    got = whole(AWQ | {"group_size": size}, arrays)["a.weight"]
    half = scale.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, matrix(codes, half, zero, (1, per)))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("order", [False, True], ids=["in order", "desc_act"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits, order, version):
    """Version 1 keeps zeros less one."""
    low = int(version == "gptq")
    codes, scale, zero = drawn(8, 0, 2**bits, (OUT, 4), (low, 2**bits))
    g_idx = np.arange(IN, dtype=np.int32) // 16
    if order:
        g_idx = np.random.default_rng(0).permutation(g_idx)
    arrays = {
        "a.qweight": np.ascontiguousarray(in_words(codes, bits).T),
        "a.qzeros": in_words(zero.T - low, bits),
        "a.scales": scale.T.astype(np.float16),
        "a.g_idx": g_idx,
        "a.bias": np.ones(OUT, np.float16),
    }
    settings = GPTQ | {"bits": bits, "desc_act": order, "checkpoint_format": version}
    tensors = whole(settings | {"dynamic": {"-:.*lm_head": {}}}, arrays)
    assert tensors.keys() == {"a.weight", "a.bias"}
    half = scale.astype(np.float16).astype(np.float32)
    want = matrix(codes, half, zero, (1, 16), g_idx)
    np.testing.assert_array_equal(tensors["a.weight"], want)


_FOUR = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("kind", ["nvfp4", "modelopt", "mxfp4"])
def test_floats_of_four_bits(kind):
    per = 32 if kind == "mxfp4" else 16
    codes, _, _ = drawn(9, 0, 16, (1, 1))
    of_bytes = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    exponents = np.random.default_rng(1).integers(118, 128, (OUT, IN // per)).astype(np.uint8)
    if kind == "mxfp4":
        of_weights, scale = weights(4, "group", "float", group_size=32), exponents
        of_grid = 2.0 ** (exponents.astype(np.float32) - 127)
    else:
        of_weights = weights(4, "tensor_group", "float", group_size=16)
        scale = exponents.view(FP8)
        of_all = np.float32(37.0) if kind == "nvfp4" else np.float32(0.03)
        of_grid = scale.astype(np.float32)
        of_grid = of_grid / of_all if kind == "nvfp4" else of_grid * of_all
    if kind == "modelopt":
        settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        arrays = {"a.weight": of_bytes, "a.weight_scale": scale, "a.weight_scale_2": of_all}
    else:
        settings = groups(of_weights, f"{kind}-pack-quantized")
        arrays = {"a.weight_packed": of_bytes, "a.weight_scale": scale}
        arrays |= {"a.weight_global_scale": np.array([of_all])} if kind == "nvfp4" else {}
    values = np.array(_FOUR, np.float32)[codes]
    want = matrix(values, np.float32(of_grid), None, (1, per))
    np.testing.assert_array_equal(whole(settings, arrays)["a.weight"], want)


def state(**more):
    """bitsandbytes' notes of a matrix."""
    notes = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [OUT, IN]} | more
    return np.frombuffer(json.dumps(notes).encode(), np.uint8)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_of_four_bits(nested):
    rng = np.random.default_rng(10)
    codes, values = rng.integers(0, 16, OUT * IN), np.sort(rng.normal(size=16)).astype(np.float32)
    absmax = rng.uniform(0.1, 1, OUT).astype(np.float32)
    key = "a.weight.quant_state.bitsandbytes__nf4"
    arrays = {
        "a.weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "a.weight.absmax": absmax, "a.weight.quant_map": values, key: state(),
    }  # fmt: skip
    if nested:
        of_scales = rng.integers(0, 256, OUT).astype(np.uint8)
        further, of_blocks = rng.normal(size=256).astype(np.float32), np.float32([0.5, 0.7, 1.1])
        arrays |= {
            "a.weight.absmax": of_scales, "a.weight.nested_absmax": of_blocks,
            "a.weight.nested_quant_map": further, key: state(nested_blocksize=20, nested_offset=0.25),
        }  # fmt: skip
        absmax = np.array([further[x] * of_blocks[n // 20] + np.float32(0.25)
                           for n, x in enumerate(of_scales)], np.float32)  # fmt: skip
    want = (values[codes].reshape(OUT, 64) * absmax[:, None]).reshape(OUT, IN)
    tensors = whole(BNB, arrays)
    assert tensors.keys() == {"a.weight"}
    np.testing.assert_array_equal(tensors["a.weight"], want)


def test_bitsandbytes_of_eight_bits():
    codes, _, _ = drawn(11, -127, 128, (1, 1))
    largest = np.random.default_rng(2).uniform(1, 2, OUT).astype(np.float32)
    arrays = {"a.weight": codes.astype(np.int8), "a.SCB": largest, "a.weight_format": np.uint8(0)}
    got = whole({"quant_method": "bitsandbytes", "load_in_8bit": True}, arrays)["a.weight"]
    np.testing.assert_allclose(got, codes * largest[:, None] / 127, rtol=1e-6)


def test_a_matrix_is_made_whole_in_blocks(monkeypatch):
    """Blocks of a few rows give what one block gives."""
    monkeypatch.setattr("mmqa_jax.weights.formats.quantized._BLOCK", 1)
    codes, scale, zero = drawn(12, 0, 4, (OUT, 4), (1, 4))
    seen = []
    original = Matrix._spread
    monkeypatch.setattr(
        Matrix, "_spread", lambda self, grid, rows: seen.append(rows) or original(self, grid, rows)
    )
    arrays = {
        "a.qweight": np.ascontiguousarray(in_words(codes, 2).T), "a.qzeros": in_words(zero.T - 1, 2),
        "a.scales": scale.T,
    }  # fmt: skip
    got = whole(GPTQ | {"bits": 2}, arrays)["a.weight"]
    assert {rows.stop - rows.start for rows in seen} == {1}
    np.testing.assert_array_equal(got, matrix(codes, scale, zero, (1, 16)))


# Tensors that the libraries wrote: pack_to_int32 of compressed-tensors 0.20.1 for [[-8, 7, 3, -1, 0,
# 5, -4, 2], [1, 2, 3, 4, 5, 6, 7, -8]] and zeros [[1], [-3]]; quantize_4bit of bitsandbytes 0.50.2
# for linspace(-1, 1, 64) in two rows times 0.5 and 2, whose dequantize_4bit begins with -0.5 and
# ends with 2.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_OF_NF4 = "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff"
KNOWN = {
    "compressed-tensors": (
        groups(weights(4, "channel", symmetric=False), "pack-quantized"),
        {
            "a.weight_packed": np.array([[-1529316368], [267242409]], np.int32),
            "a.weight_zero_point": np.array([[89]], np.int32),
            "a.weight_scale": np.array([[0.5], [2]], np.float32),
        },
        [[-4.5, 3, 1, -1, -0.5, 2, -2.5, 0.5], [8, 10, 12, 14, 16, 18, 20, -10]],
    ),
    # AutoAWQ awq/modules/linear/gemm.py packs column ORDER[n] in the n-th four bits.
    "awq": (
        AWQ | {"group_size": 2},
        {
            "a.qweight": np.array([[0x75316420], [0x75316420]], np.int32),
            "a.qzeros": np.array([[0x11111111]], np.int32),
            "a.scales": np.ones((1, 8), np.float16),
        },
        [[number - 1] * 2 for number in range(8)],
    ),
    "gptq": (
        GPTQ | {"group_size": -1},
        {
            "a.qweight": np.full((1, 8), 0x76543210, np.int32),
            "a.qzeros": np.array([[0x77777777]], np.int32),  # stands for 8
            "a.scales": np.ones((1, 8), np.float16),
        },
        [[number - 8 for number in range(8)]] * 8,
    ),
    "bitsandbytes": (
        BNB,
        {
            "a.weight": np.frombuffer(bytes.fromhex(_OF_NF4), np.uint8)[:, None],
            "a.weight.absmax": np.array([0.5, 2.0], np.float32),
            "a.weight.quant_map": np.array(_NF4, np.float32),
            "a.weight.quant_state.bitsandbytes__nf4": state(blocksize=32, shape=[2, 32]),
        },
        np.array(_NF4)[[int(code, 16) for code in _OF_NF4]].reshape(2, 32) * [[0.5], [2.0]],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_tensors_of_the_libraries(name):
    settings, arrays, want = KNOWN[name]
    np.testing.assert_allclose(whole(settings, arrays)["a.weight"], want, rtol=1e-6)


BLOCKS, _, _ = fp8(0, (2, 3), (32, 24))
SCALES = np.ones((2, 3), np.float32)
WORDS = {
    "a.weight_packed": np.zeros((OUT, IN // 8), np.int32),
    "a.weight_scale": np.ones((OUT, 4), np.float32),
}
FOUR = groups(weights(4, "group", group_size=16), "pack-quantized")
OF_GPTQ = {
    "a.qweight": np.zeros((IN // 8, OUT), np.int32),
    "a.qzeros": np.zeros((4, OUT // 8), np.int32),
    "a.scales": np.ones((4, OUT), np.float16),
}
NOTES = "a.weight.quant_state.bitsandbytes__nf4"
OF_BNB = {
    "a.weight": np.zeros((OUT * IN // 2, 1), np.uint8),
    "a.weight.absmax": np.ones(OUT, np.float32),
    "a.weight.quant_map": np.ones(16, np.float32),
    NOTES: state(),
}
EIGHT = {"group_1": {"weights": weights(8, "group", group_size=8)}}
REFUSED = {
    "another method": ({"quant_method": "hqq"}, {}, "its quant_method 'hqq'; expected one of fp8"),
    "no method": ({"bits": 4}, {}, r"quantization_config is .* its quant_method None"),
    "no object": ([1], {}, r"quantization_config is '\[1\]'"),
    "a key": (FP8_BLOCKS | {"spin": 1}, {}, r"quantization_config: the key 'spin' \(1\)"),
    "fp8: a format": (FP8_BLOCKS | {"fmt": "e5m2fnuz"}, {}, "fmt is 'e5m2fnuz'"),
    "fp8: blocks": (FP8_BLOCKS | {"weight_block_size": [128]}, {}, r"weight_block_size is \[128\]"),
    "fp8: no scale": (
        FP8_BLOCKS, {"a.weight": BLOCKS}, "a.weight has no tensor _scale_inv or _scale beside it",
    ),
    "fp8: scales of other blocks": (
        FP8_BLOCKS, {"a.weight": BLOCKS, "a.weight_scale_inv": SCALES[:1]},
        r"a.weight_scale_inv has the shape \(1, 3\), expected \(2, 3\)",
    ),
    "fp8: whole matrices": (
        FP8_BLOCKS, {"a.weight": SCALES}, "says that matrices are rounded, and none of",
    ),
    "compressed: a format": (
        groups(weights(4, "group", group_size=16), "marlin-24"), {},
        "int of 4 bits by group in the format 'marlin-24' is not read",
    ),
    "compressed: bits": (
        groups(weights(3, "group", group_size=16), "pack-quantized"), {}, "int of 3 bits by group",
    ),
    "compressed: a strategy": (groups(weights(8, "token"), "int-quantized"), {}, "strategy is 'to"),
    "compressed: sparse": (
        FOUR | {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparse-24-bitmask",
    ),
    "compressed: turned": (FOUR | {"transform_config": {"R1": {}}}, {}, "transform_config is"),
    "compressed: no scale": (
        FOUR, {"a.weight_packed": WORDS["a.weight_packed"]}, "no tensor weight_scale beside",
    ),
    "compressed: another shape": (
        FOUR, WORDS | {"a.weight_shape": np.array([OUT, 60])}, r"is \(48, 60\), not \(48, 64\)",
    ),
    "compressed: groups that are not there": (
        FOUR, WORDS | {"a.weight_g_idx": np.full(IN, 4, np.int32)}, "beyond the 4 that there are",
    ),
    "compressed: no zeros": (
        groups(weights(4, "group", group_size=16, symmetric=False), "pack-quantized"), WORDS,
        "no tensor weight_zero_point beside",
    ),
    "compressed: two groups": (
        FOUR | {"config_groups": FOUR["config_groups"] | EIGHT}, WORDS, "of several config_groups",
    ),
    "compressed: a type that no group has": (
        FOUR, WORDS | {"b.weight": BLOCKS}, "b.weight is float8_e4m3fn, which .* does not name",
    ),
    "mxfp4: a key": ({"quant_method": "mxfp4", "block": 16}, {}, "the key 'block'"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8"}, {}, "quant_algo is 'W4A8'"),
    "awq: bits": (AWQ | {"bits": 3}, {}, "bits is 3"),
    "awq: another packing": (AWQ | {"version": "gemv"}, {}, "version is 'gemv', expected gemm"),
    "awq: symmetric": (AWQ | {"zero_point": False}, {}, "zero_point is False"),
    "gptq: bits": (GPTQ | {"bits": 3}, {}, "bits is 3 in the format 'gptq'"),
    "gptq: another packing": (GPTQ | {"checkpoint_format": "marlin"}, {}, "format 'marlin'"),
    "gptq: layers that differ": (GPTQ | {"dynamic": {"+:x": {"bits": 8}}}, {}, r"for '\+:x'"),
    "gptq: no order": (GPTQ | {"desc_act": True}, OF_GPTQ, "a.qweight has no tensor g_idx"),
    "gptq: scales of other groups": (
        GPTQ, OF_GPTQ | {"a.scales": np.ones((2, OUT), np.float16)}, "a.scales has the shape",
    ),
    "gptq: twice": (GPTQ, OF_GPTQ | {"a.weight": SCALES}, "a.weight is there twice"),
    "bitsandbytes: storage": (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, {}, "quant_storage is"),
    "bitsandbytes: notes": (
        BNB, OF_BNB | {NOTES: np.zeros(3, np.uint8)}, "is not what bitsandbytes writes",
    ),
    "bitsandbytes: scales": (
        BNB, OF_BNB | {"a.weight.absmax": np.ones(3, np.float32)}, "absmax has the shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_or_does_not_fit_is_refused(name):
    settings, arrays, message = REFUSED[name]
    refuses(message, whole, settings, arrays)


def test_a_key_without_a_method_changes_nothing():
    source = ArraySource({"a": SCALES})
    for published in ({}, {"quantization_config": None}, {"quantization_config": {}}, [1]):
        config, make_whole = read_rounding(published, "config.json")
        assert config is published
        assert make_whole(source) is source


def test_a_llama_of_four_bits_opens_as_its_whole_matrices(tmp_path):
    """The two checkpoints give the same logits."""
    config = LlamaConfig(
        vocab_size=19, hidden=IN, layers=1, heads=4, kv_heads=4, mlp=OUT, tied=True
    )
    rng, arrays, want = np.random.default_rng(0), {}, {}
    layer, names = "model.layers.0.", [f"self_attn.{x}_proj" for x in "qkvo"]
    for name in (*names, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        out = OUT if name in ("mlp.gate_proj", "mlp.up_proj") else IN
        codes = rng.integers(0, 16, (out, OUT if name == "mlp.down_proj" else IN))
        stem = f"{layer}{name}."
        arrays[f"{stem}qweight"] = np.ascontiguousarray(in_words(codes, 4).T)
        arrays[f"{stem}qzeros"] = np.full((codes.shape[1] // 16, out // 8), 0x77777777, np.int32)
        arrays[f"{stem}scales"] = np.full((codes.shape[1] // 16, out), 0.125, np.float16)
        want[f"{stem}weight"] = (codes - 8) * np.float32(0.125)
    rest = {f"{layer}{norm}.weight": IN for norm in ("input_layernorm", "post_attention_layernorm")}
    for name, size in ({**rest, "model.norm.weight": IN}).items():
        want[name] = arrays[name] = rng.normal(size=size).astype(np.float32)
    table = rng.normal(size=(19, IN)).astype(np.float32)
    want["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"] = table
    for folder, tensors, more in (
        ("rounded", arrays, {"quantization_config": GPTQ, "torch_dtype": "float16"}),
        ("whole", want, {}),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        published = json.dumps(config.to_hf() | more)
        (tmp_path / folder / "config.json").write_text(published)
    ours, theirs = (
        load_published("llama", tmp_path / name, unroll=1) for name in ("rounded", "whole")
    )
    tokens = np.arange(12)[None]
    np.testing.assert_array_equal(ours(tokens), theirs(tokens))
    in_codes = load_in_codes("llama", tmp_path / "rounded", unroll=1)
    np.testing.assert_array_equal(in_codes(tokens), theirs(tokens))
    whole_layer, of_codes = (
        load("llama", tmp_path / name, unroll=1, layers_apart=True).layers[0]
        for load, name in ((load_published, "whole"), (load_in_codes, "rounded"))
    )
    unstack_layers(in_codes)
    for name in config.linears:
        linears = [getattr(one, name) for one in (whole_layer, of_codes, in_codes.layers[0])]
        assert [x.kernel.dtype for x in linears] == ["float32", "int4", "int4"]
        x = rng.normal(size=(2, 3, linears[0].kernel.shape[1])).astype(np.float32)
        wanted, *got = (linear(x) for linear in linears)
        for one in got:
            np.testing.assert_array_equal(one, wanted)
