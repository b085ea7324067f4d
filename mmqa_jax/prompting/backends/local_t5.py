"""Opens a T5's weights on this machine as a backend."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mmqa_jax import __version__
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES, make_mesh, platform
from mmqa_jax.core.serving import AUTO
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.decoding.t5_engine import T5Engine, T5EngineConfig
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5
from mmqa_jax.prompting.backends.t5 import T5Backend
from mmqa_jax.prompting.text_tokenizer import TextTokenizer

_TAKEN = ("slots", "length", "buckets")  # of the section `engine`
_SLOTS, _TOKENS = (16, 128), (4096, 16384)  # of a batch: on a CPU, on another device
_SHORTEST = 64


def open_t5_backend(
    path: Path,
    shape: T5Config,
    text: TextTokenizer,
    *,
    dtype: str,
    mesh: Mapping[str, Any],
    devices: Sequence[jax.Device],
    engine: Mapping[str, Any],
    weights_hash: str,
    load: Callable[[Mesh | None], T5],
    flag: str,
) -> T5Backend:
    """A T5 as a backend; its weights are loaded on first use.

    Args:
      path: of the weights.
      shape: the model's config.
      text: its tokenizer.
      dtype: of parameters and arithmetic.
      mesh: size of each mesh axis, or "auto": a copy of the weights on each device.
      devices: that the mesh is made of.
      engine: values of the section `engine`, some of them "auto".
      weights_hash: see local_model.
      load: mesh -> the model.
      flag: that named the model, for messages.
    """
    sizes = engine_sizes(engine, on_cpu=platform() == "cpu")
    placed = mesh_of(mesh, devices)
    if text.vocab_size > shape.vocab_size:
        raise UserError(
            f"{flag}={path}: its tokenizer has {text.vocab_size:,} tokens, the model "
            f"{shape.vocab_size:,}; name the model's own by --tokenizer."
        )
    parts = ["t5", weights_hash, text.fingerprint, [dtype, platform(), __version__]]

    def make_engine() -> T5Engine:
        count = 1 if placed is None else placed.size
        print(
            f"{path.name}: {count} device{'s' * (count > 1)}, batches of up to {sizes.slots:,} "
            f"sequences and {sizes.tokens:,} tokens of prompts, of up to {sizes.length:,} tokens",
            file=sys.stderr,
        )
        return T5Engine(load(placed), text, end_ids=text.end_ids, config=sizes)

    return T5Backend(
        make_engine,
        text,
        length=sizes.length,
        fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
    )


def engine_sizes(engine: Mapping[str, Any], *, on_cpu: bool) -> T5EngineConfig:
    """The sizes that the section `engine` gives, and for "auto" those of the platform."""
    for name, value in engine.items():
        if name not in _TAKEN and value not in (AUTO, getattr(EngineConfig, name)):
            raise UserError(
                f"config key engine.{name}={value}: a T5 is served in batches without a shared "
                f"cache, which has {', '.join(_TAKEN)} alone; leave it out."
            )
    given = {name: engine[name] for name in _TAKEN if engine.get(name, AUTO) != AUTO}
    length = given.get("length", T5EngineConfig.length)
    lengths = [_SHORTEST]
    while lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    chosen = {"slots": _SLOTS[not on_cpu], "length": length, "buckets": tuple(lengths)}
    return T5EngineConfig(**{**chosen, **given}, tokens=_TOKENS[not on_cpu])


def mesh_of(mesh: Mapping[str, Any], devices: Sequence[jax.Device]) -> Mesh | None:
    """The mesh of a T5, "auto" for `data` being what remains; None: the default device."""
    sizes = {axis: mesh.get(axis, AUTO) for axis in MESH_AXES}
    shape = {axis: 1 if size == AUTO else size for axis, size in sizes.items()}
    if sizes["data"] == AUTO:
        shape["data"] = -1
    elif math.prod(shape.values()) == 1:
        devices = devices[:1]
    made = make_mesh(shape, devices)
    return made if made.size > 1 else None
