"""The program of `mmqa evaluate webqa --bart`, as it makes it; see programs.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import make_mesh, on_shardings, state_shardings
from mmqa_jax.evaluation.fluency import longest_text, make_likelihoods, tokens_per_batch
from mmqa_jax.models.bart import Bart
from mmqa_jax.models.bart_config import BartConfig
from mmqa_jax.plan.program import Program, shard_bytes, tree_bytes

FLUENCY = "fluency"
# BARTs whose sizes are known without their weights.
BARTS: Mapping[str, Callable[[], BartConfig]] = {"bart_large_cnn": BartConfig}


def fluency_program(model: str, devices: Sequence[jax.Device]) -> Program:
    """BARTScore of a batch of the longest texts, which needs the most memory.

    Scores are computed on the first device of a process.

    Args:
      model: a name of BARTS.
    """
    config, mesh = BARTS[model](), make_mesh({"data": 1}, devices[:1])
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Bart(config, rngs=nnx.Rngs(0))))
    state = on_shardings(state, state_shardings(state, mesh))
    length = longest_text(config)
    pairs = max(1, tokens_per_batch(devices[0].platform) // length)
    texts = jax.ShapeDtypeStruct((pairs, length), np.int32)
    lengths = jax.ShapeDtypeStruct((pairs,), np.int32)
    batch = (texts, lengths, texts, lengths)
    return Program.of(
        FLUENCY,
        make_likelihoods(graphdef),
        (state, *batch),
        mesh,
        parameters=shard_bytes(state),
        examples=pairs,
        unit="pairs",
        input_bytes=tree_bytes(batch),
    )
