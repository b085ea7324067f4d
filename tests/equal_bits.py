"""Engines of drawn weights, and prompts to which they are to give the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from tests.drawn_weights import drawn

# Wide enough for XLA on a CPU to choose other kernels by the number of rows.
_MODEL = LlamaConfig(
    vocab_size=1500, hidden=192, layers=2, heads=6, kv_heads=2, mlp=512, positions=512, unroll=1
)
_STDDEV = 0.1
_SAMPLING = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
)


def requests(count: int) -> list[Request]:
    """The first of many prompts, a third of them greedy; two thirds begin with the same tokens."""
    rng = np.random.default_rng(1)
    head, made = rng.integers(0, 1500, 200), []
    for n in range(count):
        prompt = (*head[: n % 3 * 100], *rng.integers(0, 1500, 5 + 13 * (n % 9)))
        made.append(Request(n, prompt, 6, logprobs=True, seed=n, **_SAMPLING[n % 3]))
    return made


def scorings(count: int) -> list[Scoring]:
    """The first of many prompts with continuations."""
    rng = np.random.default_rng(2)
    return [
        Scoring(
            ("scored", n),
            rng.integers(0, 1500, 40 + 30 * n),
            [rng.integers(0, 1500, 1 + k) for k in range(3)],
        )
        for n in range(count)
    ]


def engine(dtype: str, *, tied: bool = True, mesh: Mesh | None = None, **sizes: Any) -> Engine:
    """An engine of drawn weights."""
    config = dataclasses.replace(_MODEL, dtype=dtype, tied=tied)
    model = drawn(lambda: Llama(config, rngs=nnx.Rngs()), 3, _STDDEV, mesh)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    return Engine(model, config=EngineConfig(**{"length": 384, **sizes}), mesh=mesh)


def answers(served: Engine, *asked: Request | Scoring) -> dict[Any, Any]:
    """Tokens and log-probabilities by request, those of scored ones by continuation."""
    results = {}
    for result in served.serve(asked):
        if isinstance(result.id, tuple):
            results[result.id] = [score.logprobs for score in result.scores]
        else:
            drawn = result.candidates[0]
            results[result.id] = drawn.tokens, drawn.logprobs
    return results
