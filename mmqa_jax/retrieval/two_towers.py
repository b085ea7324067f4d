"""A published CLIP or SigLIP as a dual encoder whose captioned pictures are their pixels alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import state_shardings
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_converted


def load_two_towers(folder: str | os.PathLike, name: str, mesh: Mesh | None) -> Any:
    """The model in a folder of `mmqa convert`, or in one of transformers.

    Args:
      name: of the architecture, `clip` or `siglip`.
      mesh: where the parameters go; None: the default device.
    """
    if not is_converted(Path(folder)):
        return load_published(name, folder, mesh=mesh)
    check_kind(folder, name)
    return load_converted(folder, mesh=mesh)


def check_kind(folder: str | os.PathLike, name: str) -> None:
    """UserError for a folder of `mmqa convert` with a model of another architecture."""
    if not is_converted(Path(folder)):
        return
    found = read_record(folder).architecture.name
    if found != name:
        raise UserError(
            f"{folder}: holds a model of kind {found!r}, {name} was expected; convert one with "
            f"`mmqa convert --model={name}`."
        )


def as_dual_encoder(
    towers: nnx.Module, config: DualEncoderConfig, mesh: Mesh | None
) -> tuple[nnx.GraphDef, nnx.State]:
    """`nnx.split` of the dual encoder with these towers, on the mesh that they are on."""
    model = nnx.eval_shape(lambda: DualEncoder(config, rngs=nnx.Rngs()))
    nnx.update(model, nnx.state(towers))
    model.picture_gate.set_value(jnp.ones(()))  # of the fusion `mean` alone
    graphdef, state = nnx.split(model)
    if mesh is not None:  # the gate, too
        state = jax.device_put(state, state_shardings(state, mesh))
    return graphdef, state
