"""Published checkpoints opened as models, and models written back as they are published."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.files import write_json
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.formats.safetensors import SHARD_BYTES, TensorSource, write_sharded
from mmqa_jax.weights.keymap import KeyMap, abstract_of, check_fits, load_into
from mmqa_jax.weights.layouts import Checkpoint, Published, require_given
from mmqa_jax.weights.registry import architecture


def load_published(
    model: str,
    path: str | os.PathLike,
    *,
    clip: str | os.PathLike | None = None,
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
    layers_apart: bool = False,
    **changes: Any,
) -> nnx.Module:
    """Reads a published checkpoint of any layout that `mmqa convert` reads.

    Args:
      model: name of the architecture (registry.names).
      path: file or folder.
      clip: folder of the CLIP that a LLaVA was trained with, where it has no vision tower.
      mesh: where the parameters go, each tensor straight onto its shards; None is the default
        device.
      param_dtype: of the parameters; bfloat16 halves memory where nothing is trained.
      layers_apart: a LLaMA as `unstack_layers` leaves it, without the stacks in between: each
        tensor is read into the array that stays.
      changes: fields of the config, and of the configs in it, that the checkpoint does not decide
        (dtype, attention, remat, unroll, dropouts).
    """
    entry = architecture(model)
    checkpoint = entry.open(Path(path), None if clip is None else Path(clip))
    convert = f"open what `mmqa convert --model={model} --source={path} --out=DIR {{flags}}` makes"
    require_given(checkpoint, changes, convert)
    config = replace_fields(checkpoint.config, **changes)
    build = entry.build
    if layers_apart:
        build, checkpoint = entry.part("layers_apart")(checkpoint)
    return load_checkpoint(build, checkpoint, config, mesh, param_dtype)


def load_checkpoint(
    model: Callable[..., nnx.Module],
    checkpoint: Checkpoint,
    config: Any,
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
) -> nnx.Module:
    """A new module with a checkpoint's parameters; see `load_published`.

    Only parameters that the checkpoint lacks (`KeyMap.fresh`) are initialized.
    """

    if checkpoint.check is not None:
        checkpoint.check(checkpoint.source, config)
    graphdef, state = abstract_of(model, config, mesh, param_dtype)
    key_map = checkpoint.key_map(config)
    state = with_fresh(state, lambda: model(config, rngs=nnx.Rngs(0)), key_map, checkpoint.source)
    return nnx.merge(graphdef, load_into(state, key_map, checkpoint.source))


def with_fresh(
    state: nnx.State, build: Callable[[], nnx.Module], key_map: KeyMap, source: TensorSource
) -> nnx.State:
    """The abstract state with its fresh parameters, and only those, initialized."""
    names = [
        name
        for name in flatten_named(state)
        if any(re.search(pattern, name) for pattern in key_map.fresh)
    ]
    if not names:
        return state
    check_fits(state, key_map, source)

    def initial():  # XLA drops what is not returned
        made = flatten_named(nnx.state(build()))
        return {name: made[name] for name in names}

    made = jax.jit(initial)()
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        name = "/".join(map(str, path))
        if name in made:
            wanted = leaf.get_value()
            array = made[name].astype(wanted.dtype)
            leaf = leaf.replace(jax.device_put(array, wanted.sharding))
        filled.append((path, leaf))
    return nnx.from_flat_state(filled)


def write_published(
    folder: str | os.PathLike,
    published: Published,
    *,
    more: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes the weights (see `write_sharded`), preprocessor_config.json if there is one, and then
    config.json: a folder with it is complete.

    Args:
      folder: made if absent.
      published: the model.
      more: further entries of config.json (bos_token_id, eos_token_id, ...).
      shard_bytes, on_bytes: see `write_sharded`.
    """
    write_sharded(folder, published.source, shard_bytes=shard_bytes, on_bytes=on_bytes)
    if published.processor is not None:
        write_json(Path(folder) / "preprocessor_config.json", published.processor)
    dtype = np.dtype(next(iter(published.source.specs().values())).dtype).name
    entries = {**published.config, "torch_dtype": dtype, **(more or {})}
    write_json(Path(folder) / "config.json", entries)
