"""The weights folder: Orbax arrays in `weights/`, and `model.json`, which says what they are.

`mmqa convert` and training write it, a training run beside its own files. `load_converted` opens
either on any mesh; each device reads its own shards, so that no host holds the whole model.
SHA256SUMS beside the arrays and beside model.json are checked before either is used.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.checkpoints.checksums import check_sums, files_below, write_sums
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.core.hosts.distributed import barrier
from mmqa_jax.core.mesh import state_shardings
from mmqa_jax.core.paths import absolute, copy_file, in_store
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.trees import flatten_named, unflatten_named
from mmqa_jax.weights.adapters import Adapter, is_peft, open_peft
from mmqa_jax.weights.config_json import config_to_json
from mmqa_jax.weights.formats.orbax_reader import read_weights, stored_specs
from mmqa_jax.weights.keymap import abstract_of, load_into, traced_model
from mmqa_jax.weights.record import (
    DAMAGED,
    FORMAT,
    RECORD,
    RUN_FILES,
    WEIGHTS,
    is_converted,
    is_weights_folder,
    read_metadata,
    record_file,
)
from mmqa_jax.weights.registry import Architecture, architecture, architecture_of, model_of

MIB = 1 << 20
_CHUNK = 1 << 22  # bytes that are hashed at once
_SHOWN = 5  # offenders listed of each kind


@dataclasses.dataclass(frozen=True)
class Description:
    """What a weights folder says of itself."""

    architecture: Architecture  # the registry's entry
    config: Any  # the model's
    dtype: str  # of all parameters
    # The whole model.json, e.g. `source` and `token_ids` of a conversion, `task` and `step` of a
    # training run.
    record: Mapping[str, Any]


def describe_model(architecture: Architecture, config: Any, dtype: str) -> dict[str, Any]:
    """The entries of model.json that `read_record` needs."""
    return {
        "format": FORMAT,
        "model": architecture.name,
        "dtype": dtype,
        "config": config_to_json(config),
    }


def read_record(folder: str | os.PathLike) -> Description:
    """Reads model.json."""
    file = record_file(Path(folder))
    record = read_metadata(folder)
    if record.get("format") != FORMAT:
        raise UserError(
            f"{file}: format is {record.get('format')!r}, expected {FORMAT!r}; give a folder of "
            "`mmqa convert` or of a training run, or convert the model again."
        )
    entry = architecture(str(record.get("model")), f"{file}: model", trained=True)
    config = entry.read_config(record.get("config"), f"{file}, key config")
    dtype = record.get("dtype")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(
            f"{file}: dtype is {dtype!r}, expected 'float32' or 'bfloat16'; copy the folder again, "
            "or train or convert the model again."
        )
    return Description(entry, config, dtype, record)


def load_converted(
    folder: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    param_dtype: str | None = None,
    config: Any = None,
) -> nnx.Module:
    """Opens a converted or trained model.

    Args:
      folder: as `mmqa convert` wrote it, or the workdir of a finished training run.
      mesh: where the parameters go; each device reads its own shards. None is the default
        device.
      param_dtype: of the parameters; None keeps the stored one.
      config: instead of the stored one (`read_record(folder).config`), with other values of what
        the weights do not decide: dtype, attention, remat.
    """
    description = read_record(folder)
    config = description.config if config is None else config
    adapter = Adapter.of(description.record, record_file(Path(folder)))
    if adapter is not None:
        return _load_adapted(Path(folder), description, adapter, mesh, param_dtype, config)
    dtype = param_dtype or description.dtype
    graphdef, state = abstract_of(description.architecture.build, config, mesh, dtype)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in flatten_named(state).values())
    with Progress(f"Loading {Path(folder).name}", total // MIB, "MiB") as progress:
        state = load_weights(folder, state, on_bytes=in_mebibytes(progress))
    return nnx.merge(graphdef, state)


def _load_adapted(
    folder: Path,
    description: Description,
    adapter: Adapter,
    mesh: Mesh | None,
    param_dtype: str | None,
    config: Any,
) -> nnx.Module:
    """The base of a LoRA run with what was trained in its kernels."""
    path = _base_of(adapter, folder)
    options = {"mesh": mesh, "param_dtype": param_dtype or description.dtype}
    if is_weights_folder(path):
        base = load_converted(path, config=config, **options)
    else:
        from mmqa_jax.weights.published import load_published  # which needs all key maps

        base = load_published(description.architecture.name, path, **options)
        base = nnx.merge(traced_model(description.architecture.build, config)[0], nnx.state(base))

    def read(state: nnx.State) -> nnx.State:
        stored = stored_specs(folder / WEIGHTS)
        leaves = [
            (path, leaf)
            for path, leaf in nnx.to_flat_state(state)
            if "/".join(map(str, path)) in stored
        ]
        wanted = nnx.from_flat_state(leaves)
        shardings = () if mesh is None else (state_shardings(wanted, mesh),)

        def abstract(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return load_weights(folder, jax.tree.map(abstract, wanted, *shardings))

    return description.architecture.additions.merged(base, adapter, read)


def load_additions(folder: Path, base: Path, fingerprint: str, model: str, config: Any) -> Any:
    """Reads an adapter, to be served beside others over one base; a `lora.Additions`.

    Args:
      folder: the workdir of a LoRA run or its folder best, a converted adapter, or PEFT's folder.
      base: where the base's weights lie, with the hash `fingerprint` (`weights_hash`).
      model, config: the base's architecture and config.
    """
    source, entry = None, architecture(model)
    if is_peft(folder):
        adapter, source = open_peft(folder, entry.additions.peft_linears())
        trained_on, architecture_name = _hash_at_hand(adapter, folder, base), model_of(folder)
    else:
        record = read_record(folder)
        adapter = Adapter.of(record.record, record_file(folder))
        if adapter is None:
            raise UserError(
                f"{folder}: holds a whole model, and an adapter was expected; name it as --model, "
                "or give the folder of a LoRA run, or of PEFT."
            )
        trained_on, architecture_name = adapter.fingerprint, record.architecture.name
        more = [name for name in stored_specs(folder / WEIGHTS) if "/lora_" not in name]
        if more:
            raise UserError(
                f"{folder}: changes more of its base than additions ({more[0]}), and cannot share "
                "it with others; serve it by itself, as --model."
            )
    if architecture_name != model or trained_on not in ("", fingerprint):
        raise UserError(
            f"{folder}: is an adapter of another model ({adapter.base}) than {base} holds; serve "
            "it over the base of its training."
        )
    wanted = entry.additions.abstract_additions(entry.build, config, adapter)
    if source is not None:
        state = load_into(wanted, entry.additions.peft_map(config, adapter.targets), source)
    else:
        state = load_weights(folder, wanted)
    return entry.additions.served(adapter, state)


def _hash_at_hand(adapter: Adapter, folder: Path, base: Path) -> str:
    """`weights_hash` of what PEFT's folder names as its base; "" where that is `base` itself, or is
    not on this machine, so that the shapes alone can tell."""
    try:
        named = adapter.base_path(folder)
    except UserError:
        return ""
    return "" if named.resolve() == base.resolve() else weights_hash(named)


def load_weights(
    folder: str | os.PathLike,
    abstract: Any,
    *,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> Any:
    """Reads the arrays of a weights folder.

    Args:
      folder: as `mmqa convert` or training wrote it.
      abstract: pytree of jax.ShapeDtypeStructs or arrays, with the dtype and the sharding that
        each array shall have (without one: the default device).
      on_bytes: called with the size of each array that is read.
    """
    folder = Path(folder)
    read_metadata(folder)
    check_sums(folder / WEIGHTS, remedy=DAMAGED)
    target = flatten_named(abstract)
    _check_same_arrays(folder, target)
    arrays = read_weights(folder / WEIGHTS, target, on_bytes=on_bytes)
    return unflatten_named(abstract, arrays)


def save_trained(
    folder: str | os.PathLike, model: nnx.Module | None, params: Any, metadata: Mapping[str, Any]
) -> None:
    """Writes the weights of a training run: `weights/`, checksums and, last, `model.json`.

    Args:
      folder: gets them; older ones in it are replaced. The RUN_FILES that it holds are part of it.
      model: the module; a kind that the registry lacks is stored without a description.
      params: pytree of its parameters.
      metadata: JSON values, for model.json.
    """
    from mmqa_jax.weights.formats.orbax import save_arrays  # takes long to import

    folder = absolute(folder)
    primary = jax.process_index() == 0
    if primary:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).unlink(missing_ok=True)
    named = flatten_named(params)
    save_arrays(folder / WEIGHTS, named)
    if primary:
        entry = architecture_of(model)
        dtype = next(iter(named.values())).dtype.name
        described = describe_model(entry, model.config, dtype) if entry else {}
        record = json.dumps({**described, **metadata}, indent=2, ensure_ascii=False) + "\n"
        write_sums(folder / WEIGHTS)
        write_run_sums(folder, coming={RECORD: record.encode()})
        with atomic_write(folder / RECORD) as file:
            file.write(record)


def write_run_sums(folder: Path, coming: Mapping[str, bytes] | None = None) -> None:
    """Writes the checksums of the RUN_FILES of a training run; `coming` as of `write_sums`."""
    write_sums(folder, [name for name in RUN_FILES if (folder / name).exists()], coming=coming)


def write_converted_sums(folder: Path) -> None:
    """Writes the checksums of a folder of `mmqa convert`, whose files are all there."""
    write_sums(folder / WEIGHTS)
    names = files_below(folder)
    write_sums(folder, [name for name in names if not name.startswith(f"{WEIGHTS}/")])


def replace_trained(
    folder: str | os.PathLike,
    model: nnx.Module | None,
    params: Any,
    metadata: Mapping[str, Any],
    companions: Iterable[Path] = (),
) -> None:
    """Saves as `save_trained`; the folder holds nothing else and is written whole or not.

    A kill leaves the old folder or the new one; between two renames neither, for a moment. In an
    object store, which cannot rename, there is neither while it is written: model.json, without
    which a folder holds no weights, goes first and comes last. All processes call it; one writer at
    a time.

    `companions`: files to copy into it, such as config.json and tokenizer.json.
    """
    folder = absolute(folder)
    primary = jax.process_index() == 0
    if in_store(folder):
        if primary:
            (folder / RECORD).unlink(missing_ok=True)
            for file in companions:
                copy_file(file, folder / file.name)
        barrier("files beside the weights")
        save_trained(folder, model, params, metadata)
        barrier("weights in their folder")
        return
    new, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    if primary:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        new.mkdir(parents=True)
        for file in companions:
            shutil.copyfile(file, new / file.name)
    barrier("a folder for weights")
    save_trained(new, model, params, metadata)
    if primary:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    barrier("weights in their folder")


def weights_hash(path: Path) -> str:
    """Hashes what a model's answers depend on: a run's folder holds much else."""
    if not is_weights_folder(path):
        return content_hash(path)
    digest = content_hash(path / WEIGHTS) + content_hash(path / RECORD)
    adapter = Adapter.of(read_metadata(path), record_file(path))
    if adapter is not None:
        return digest + weights_hash(_base_of(adapter, path))
    return content_hash(path) if is_converted(path) else digest


def _base_of(adapter: Adapter, folder: Path) -> Path:
    """Where an adapter's base lies."""
    path = adapter.base_path(folder)
    if adapter.fingerprint and weights_hash(path) != adapter.fingerprint:
        raise UserError(
            f"{folder}: is an adapter of another model than {path} holds (its files have "
            "changed since); put the base of the training there."
        )
    return path


def content_hash(path: str | os.PathLike) -> str:
    """SHA-256 over names and bytes of a file, or of all files of a folder (hidden ones aside)."""
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _shown(file, path))
    total = sum(file.stat().st_size for file in files)
    digest = hashlib.sha256()
    with Progress(f"Reading {path.name}", total // MIB, "MiB") as progress:
        on_bytes = in_mebibytes(progress)
        for file in files:
            # A single file is the same weights under any name.
            name = str(file.relative_to(path)) if file != path else ""
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as opened:
                while chunk := opened.read(_CHUNK):
                    digest.update(chunk)
                    on_bytes(len(chunk))
    return digest.hexdigest()


def _shown(file: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)


def in_mebibytes(progress: Progress) -> Callable[[int], None]:
    """A function that takes numbers of bytes and advances `progress` by whole MiB."""
    done = 0

    def on_bytes(size: int) -> None:
        nonlocal done
        progress.advance((done + size) // MIB - done // MIB)
        done += size

    return on_bytes


def _check_same_arrays(folder: Path, target: Mapping[str, Any]) -> None:
    weights = folder / WEIGHTS
    stored = stored_specs(weights)
    problems = [f"{name} is missing" for name in target if name not in stored]
    problems += [f"{name} is not in the model" for name in stored if name not in target]
    problems += [
        f"{name} is {list(stored[name].shape)}, the model's is {list(leaf.shape)}"
        for name, leaf in target.items()
        if name in stored and tuple(stored[name].shape) != tuple(leaf.shape)
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(
            f"{weights}: the weights of another model than the config's: "
            f"{'; '.join(problems[:_SHOWN])}{more}; use the config that they were trained or "
            "converted with."
        )
