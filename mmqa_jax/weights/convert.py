"""`mmqa convert`: published checkpoints to Orbax, and back to safetensors.

To Orbax, one tensor (of a stack of layers: one layer) is in memory at a time. An export reads
the model into memory once and writes one tensor at a time.
"""

import dataclasses
import hashlib
import importlib.metadata
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.host import peak_rss_mib
from mmqa_jax.core.progress import Progress
from mmqa_jax.weights import keymap, output_folder
from mmqa_jax.weights.adapters import Adapter, is_peft, open_peft, write_peft
from mmqa_jax.weights.config_json import with_changes
from mmqa_jax.weights.folder import (
    MIB,
    describe_model,
    in_mebibytes,
    load_converted,
    read_record,
    weights_hash,
    write_converted_sums,
)
from mmqa_jax.weights.formats.orbax import StreamedArray, write_weights
from mmqa_jax.weights.formats.orbax_reader import read_weights, stored_specs
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import KeyMap, abstract_of, all_zero, load_into, model_source
from mmqa_jax.weights.layouts import require_given
from mmqa_jax.weights.published import with_fresh, write_published
from mmqa_jax.weights.record import RECORD, WEIGHTS, is_weights_folder
from mmqa_jax.weights.registry import Architecture, architecture, model_of

DTYPES = ("bfloat16", "float32")
EXPORTS = ("hf", "peft")
PREPROCESSING = ("openai", "transformers")
_PACKAGES = ("mmqa-jax", "jax", "flax", "orbax-checkpoint", "safetensors", "numpy")


def convert(
    model: str,
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    export: str | None = None,
    overwrite: bool = False,
    changes: Sequence[str] = (),
    clip: Path | None = None,
    preprocessing: str | None = None,
    write_more: Callable[[Path, Path], list[str]] | None = None,
) -> dict[str, Any]:
    """Converts a checkpoint.

    Args:
      model: name of a registry entry.
      source: a published checkpoint, an adapter of PEFT, or (for an export) a folder that this
        function or a finished training run wrote.
      out: folder to write; it appears when it is complete.
      dtype: of the parameters; None keeps a converted folder's own, keeps bfloat16 where all of
        the source is bfloat16, and is float32 otherwise.
      export: None writes Orbax weights, `hf` safetensors as transformers has them, `peft` the
        additions of a LoRA run as PEFT has them.
      overwrite: replace what an earlier conversion wrote to `out`.
      changes: `FIELD=VALUE` of the config, where the checkpoint does not decide.
      clip: folder of the CLIP that a LLaVA was trained with, where it has no vision tower.
      preprocessing: of a CLIP, whose code prepares texts and pictures (`PREPROCESSING`); None
        leaves it to the source's layout, see data/published_tokenizers.py.
      write_more: writes files of a published source to a folder, and names them: the tokenizer
        that a GGUF file holds.

    Returns:
      What the command prints as JSON.

    Raises:
      RunError: the disk has not enough space left; where it fills up later, see
        core.errors.
    """
    began = time.monotonic()
    entry = architecture(model)
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype={dtype}: unknown; use one of {', '.join(DTYPES)}.")
    if export not in (None, *EXPORTS):
        raise UserError(f"--export={export}: unknown; use {' or '.join(EXPORTS)}.")
    if clip is not None and not entry.takes_clip:
        raise UserError(f"--clip={clip}: a {entry.name} takes no CLIP; leave it out.")
    if preprocessing not in (None, *PREPROCESSING):
        raise UserError(
            f"--preprocessing={preprocessing}: unknown; use one of {', '.join(PREPROCESSING)}."
        )
    if preprocessing is not None and (not entry.takes_preprocessing or export):
        raise UserError(
            "--preprocessing: is kept with a CLIP's converted weights alone; leave it out."
        )
    with output_folder.name_paths(source), jax.default_device(jax.devices("cpu")[0]):
        output_folder.check_paths(source, out, overwrite)
        if is_weights_folder(source):
            made = _export_converted(entry, source, out, dtype, export, changes)
        elif is_peft(source):
            made = _convert_adapter(entry, source, out, export)
        else:
            made = _convert_published(
                entry, source, out, dtype, export, changes, clip, preprocessing, write_more
            )
    return {
        "model": entry.name,
        "out": str(out),
        "export": export,
        **made,
        "seconds": round(time.monotonic() - began, 2),
        "peak_rss_mib": peak_rss_mib(),
    }


def _convert_published(
    entry: Architecture,
    path: Path,
    out: Path,
    dtype: str | None,
    export: str | None,
    changes: Sequence[str],
    clip: Path | None,
    preprocessing: str | None,
    write_more: Callable[[Path, Path], list[str]] | None,
) -> dict[str, Any]:
    checkpoint = entry.open(path, clip)
    require_given(checkpoint, [change.partition("=")[0] for change in changes])
    config = with_changes(checkpoint.config, changes)
    if checkpoint.check is not None:
        checkpoint.check(checkpoint.source, config)
    specs = checkpoint.source.specs()
    dtype = dtype or _own_dtype(specs)

    def build() -> nnx.Module:
        return entry.build(config, rngs=nnx.Rngs(0))

    _, state = abstract_of(entry.build, config, param_dtype=dtype)
    key_map = checkpoint.key_map(config)
    state = with_fresh(state, build, key_map, checkpoint.source)
    total = sum(_bytes(spec) for spec in specs.values())
    source = _ObservedSource(checkpoint.source)
    arrays = _streamed(state, key_map, source)  # strict: raises before a byte is written
    size = sum(array.nbytes for array in arrays.values())
    folder_of = path if path.is_dir() else path.parent
    facts = {
        "layout": checkpoint.layout,
        "dtype": dtype,
        "parameters": sum(math.prod(array.shape) for array in arrays.values()),
        "bytes": size,
    }
    with output_folder.whole_folder(out, size) as folder:
        copied = output_folder.copy_companions(folder_of, folder)
        if write_more is not None:
            copied += write_more(path, folder)
        with Progress(f"Converting {path.name}", total // MIB, "MiB") as progress:
            source.on_bytes = in_mebibytes(progress)
            if export is None:
                write_weights(folder / WEIGHTS, arrays)
            else:
                del arrays
                state = load_into(state, key_map, source)
        facts["source"] = {"path": str(path.absolute()), "sha256": source.fingerprint()}
        tokens = _token_ids(folder_of) if checkpoint.layout == "transformers" else {}
        if export is None:
            versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
            more = {
                **facts,
                "token_ids": tokens,
                output_folder.WRITTEN_BY: _writer(),
                "versions": versions,
            }
            if preprocessing is not None:
                more["preprocessing"] = preprocessing
            write_json(folder / RECORD, {**describe_model(entry, config, dtype), **more})
            write_converted_sums(folder)
        else:
            _write_hf(folder, f"Writing {out.name}", entry, config, state, tokens)
    if source.zeros:
        print(
            f"{path}: {len(source.zeros)} tensors hold nothing but zeros "
            f"({first_names(source.zeros)}); if they were trained, the file is damaged: fetch it "
            "again.",
            file=sys.stderr,
        )
    return {**facts, "files": copied, "zero_tensors": source.zeros}


def _convert_adapter(
    entry: Architecture, path: Path, out: Path, export: str | None
) -> dict[str, Any]:
    """PEFT's folder as a weights folder of additions."""
    if not entry.peft or export is not None:
        raise UserError(
            f"--source={path}: is an adapter of PEFT; convert it with --model={model_of(path)} and "
            "without --export (--export=hf of what that writes merges it with its base)."
        )
    adapter, source = open_peft(path, entry.additions.peft_linears())
    base = adapter.base_path(path)
    adapter = dataclasses.replace(adapter, fingerprint=weights_hash(base))
    if is_weights_folder(base):
        config = read_record(base).config
    else:
        config = entry.open(base).config

    additions = entry.additions.abstract_additions(entry.build, config, adapter)
    key_map = entry.additions.peft_map(config, adapter.targets)
    arrays = _streamed(additions, key_map, source)
    facts = {"layout": "peft", "dtype": "float32", "bytes": sum(a.nbytes for a in arrays.values())}
    with output_folder.whole_folder(out, facts["bytes"]) as folder:
        copied = output_folder.copy_companions(base if base.is_dir() else base.parent, folder)
        copied += output_folder.copy_companions(path, folder)
        write_weights(folder / WEIGHTS, arrays)
        more = {
            "adapter": dataclasses.asdict(adapter),
            **facts,
            output_folder.WRITTEN_BY: _writer(),
        }
        write_json(folder / RECORD, {**describe_model(entry, config, "float32"), **more})
        write_converted_sums(folder)
    return {**facts, "base": str(base), "files": sorted(set(copied))}


def _export_adapter(path: Path, out: Path) -> dict[str, Any]:
    """The additions of a LoRA run as PEFT's folder."""
    description = read_record(path)
    adapter = Adapter.of(description.record, path / RECORD)
    if adapter is None or not description.architecture.peft:
        raise UserError(
            f"--export=peft: {path} holds no additions to a LLaMA; --export=hf writes whole models."
        )
    specs = {name: x for name, x in stored_specs(path / WEIGHTS).items() if "/lora_" in name}
    size = sum(_bytes(spec) for spec in specs.values())
    arrays = read_weights(path / WEIGHTS, specs)
    state = nnx.from_flat_state(
        [(tuple(name.split("/")), nnx.Param(array)) for name, array in arrays.items()]
    )
    with output_folder.whole_folder(out, size) as folder:
        copied = output_folder.copy_companions(path, folder)
        parts = description.architecture.additions
        published = model_source(state, parts.peft_map(description.config, adapter.targets))
        copied += write_peft(folder, adapter, published, parts.peft_linears(description.config))
    return {"layout": "orbax", "dtype": "float32", "bytes": size, "files": copied}


def _export_converted(
    entry: Architecture,
    path: Path,
    out: Path,
    dtype: str | None,
    export: str | None,
    changes: Sequence[str],
) -> dict[str, Any]:
    if export is None:
        raise UserError(
            f"--source={path}: is converted already; open it with load_converted, or add "
            "--export=hf to export it."
        )
    description = read_record(path)
    if description.architecture.name != entry.name:
        name, layouts = description.architecture.name, description.architecture.layouts
        remedy = "name that" if layouts else "that has no published layout"
        raise UserError(f"--model={entry.name}: {path} holds a {name}; {remedy}.")
    if export == "peft":
        return _export_adapter(path, out)
    config = with_changes(description.config, changes)
    dtype = dtype or description.dtype
    _, whole = abstract_of(description.architecture.build, description.config)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(whole))
    size = parameters * np.dtype(dtype).itemsize
    with output_folder.whole_folder(out, size) as folder:
        copied = output_folder.copy_companions(path, folder)
        state = nnx.state(load_converted(path, param_dtype=dtype))
        tokens = description.record.get("token_ids", {})
        _write_hf(folder, f"Writing {out.name}", entry, config, state, tokens)
    facts = {"layout": "orbax", "dtype": dtype, "parameters": parameters, "bytes": size}
    return {**facts, "source": description.record.get("source"), "files": copied}


def _write_hf(
    folder: Path,
    title: str,
    entry: Architecture,
    config: Any,
    state: nnx.State,
    tokens: Mapping[str, Any],
) -> None:
    published = entry.publish(config, state)
    total = sum(_bytes(spec) for spec in published.source.specs().values())
    more = {**tokens, output_folder.WRITTEN_BY: _writer()}
    # What the config itself says (BART's pad, CLIP's end of text) takes precedence.
    more = {key: value for key, value in more.items() if key not in published.config}
    with Progress(title, total // MIB, "MiB") as progress:
        write_published(folder, published, more=more, on_bytes=in_mebibytes(progress))


def _own_dtype(specs: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    kinds = {spec.dtype.name for spec in specs.values() if jnp.issubdtype(spec.dtype, jnp.floating)}
    return "bfloat16" if kinds == {"bfloat16"} else "float32"


def _bytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _streamed(state: nnx.State, key_map: KeyMap, source: TensorSource) -> dict[str, StreamedArray]:
    """The model's arrays, each to be made from the source's tensors while it is written."""
    leaves = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    plan = keymap.plan_loading(leaves, key_map, source)
    return {
        name: _streamed_array(leaf.get_value(), plan.get(name), source)
        for name, leaf in leaves.items()
    }


def _streamed_array(value: Any, assignments: Any, source: TensorSource) -> StreamedArray:
    dtype = np.dtype(value.dtype)
    if not assignments:  # fresh
        return StreamedArray(value.shape, dtype, False, lambda: [((), np.asarray(value))])

    def slices():
        for assignment in assignments:
            tensor = keymap.read_assigned(assignment, source)
            yield (*assignment.slot, ...), tensor.astype(dtype, copy=False)

    return StreamedArray(value.shape, dtype, assignments[0].slot != (), slices)


class _ObservedSource:
    """A source whose reads count as progress and are hashed."""

    def __init__(self, source: TensorSource):
        self.name = source.name
        self._source = source
        self.on_bytes: Callable[[int], None] | None = None  # None: not yet, planning reads too
        self.zeros: list[str] = []  # matrices without a value, as a file has that was never filled
        self._digests: dict[str, bytes] = {}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the source's specs."""
        return self._source.specs()

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""
        tensor = self._source.read(key)
        if self.on_bytes is not None and key not in self._digests:
            head = f"{key} {tensor.dtype} {tensor.shape}".encode()
            plain = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            self._digests[key] = hashlib.sha256(head + hashlib.sha256(plain).digest()).digest()
            self.on_bytes(tensor.nbytes)
            if tensor.ndim > 1 and all_zero(tensor):
                self.zeros.append(key)
        return tensor

    def fingerprint(self) -> str:
        """SHA-256 over name, type, shape and bytes of every tensor that was read, by name."""
        digests = [digest for _, digest in sorted(self._digests.items())]
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _token_ids(folder: Path) -> dict[str, Any]:
    """Token ids of transformers' config.json, which our configs do not use."""
    published = read_json(folder / "config.json")
    return {key: value for key, value in published.items() if key.endswith("_token_id")}


def _writer() -> str:
    return f"mmqa convert {importlib.metadata.version('mmqa-jax')}"
