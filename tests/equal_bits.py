"""Engines of drawn weights, and prompts to which they are to give the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import EXACT_ON_CPU, batch_sharding
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.policy_scores import policy_logprobs
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import Additions
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llava.network import Llava, LlavaConfig
from mmqa_jax.models.two_towers.config import VisionConfig
from tests.drawn_weights import drawn

# Wide enough for XLA on a CPU to choose other kernels by the number of rows; heads of a size whose
# products it then sums in another order.
_DENSE = LlamaConfig(
    vocab_size=1500, hidden=192, layers=2, heads=6, kv_heads=2, mlp=512, positions=512, unroll=1
)
_WINDOWED = dataclasses.replace(
    _DENSE,
    family="gemma3_text",
    windows=(50, 0),
    local=(True, False),
    local_theta=30.0,
    qk_norm="head",
    norms="both",
    unit_norms=True,
    attention_cap=30.0,
    logit_cap=20.0,
)
_EXPERTS = dataclasses.replace(
    _DENSE, family="qwen3_moe", mlp=128, experts=8, active_experts=2, normed_experts=True
)
_VISION = VisionConfig(
    image_size=28, patch_size=14, width=48, layers=2, heads=2, mlp_width=64, embed_dim=16
)
_PICTURE = -200  # the placeholder
_STDDEV = 0.1
_SAMPLING = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What serves: a model, how its engine holds it, and what prompts have beside text.

    Attributes:
      sizes: of EngineConfig.
      adapters: the additions' ranks and projections by name.
    """

    model: LlamaConfig = _DENSE
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapters: Mapping[str, tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    pictured: bool = False


KINDS = {
    "dense": Kind(),
    "int8 weights": Kind(sizes={"weights": "int8"}),
    "int8 cache": Kind(sizes={"cache_dtype": "int8"}),
    "adapters": Kind(adapters={"cook": (4, ("q", "v", "down")), "poet": (8, _DENSE.linears)}),
    "windows": Kind(_WINDOWED),
    "experts": Kind(_EXPERTS),
    "pictures": Kind(pictured=True),
}


def requests(count: int, kind: str = "dense") -> list[Request]:
    """The first of many prompts, a third of them greedy; two thirds begin with the same tokens."""
    rng = np.random.default_rng(1)
    shown = np.random.default_rng(3).integers(0, 256, (4, 28, 28, 3)).astype(np.uint8)
    head, made = rng.integers(0, 1500, 200), []
    for n in range(count):
        prompt = (*head[: n % 3 * 100], *rng.integers(0, 1500, 5 + 13 * (n % 9)))
        more = dict(_SAMPLING[n % 3])
        if KINDS[kind].adapters:
            more["adapter"] = ("", *KINDS[kind].adapters)[n % 3]
        if KINDS[kind].pictured:
            more["images"] = [shown[n % 3], shown[3]][: 1 + n % 2]
            prompt = (*prompt[:3], *[_PICTURE] * len(more["images"]), *prompt[3:])
        made.append(Request(n, prompt, 6, logprobs=True, seed=n, **more))
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


def _has_amx() -> bool:
    """Whether this machine multiplies matrices of bfloat16 by Intel's AMX."""
    cpus = Path("/proc/cpuinfo")
    return cpus.is_file() and "amx_bf16" in cpus.read_text()


def drawn_model(
    dtype: str, kind: str = "dense", *, tied: bool | None = None, mesh: Mesh | None = None
) -> Llama | Llava:
    """Drawn weights; of bfloat16 with a tied head, unless said."""
    if dtype == "bfloat16" and _has_amx():
        pytest.skip("rows of bfloat16 products by AMX depend on their number (ENGINE.md)")
    tied = dtype == "bfloat16" if tied is None else tied
    config = dataclasses.replace(KINDS[kind].model, dtype=dtype, tied=tied)

    def build() -> Llama | Llava:
        if KINDS[kind].pictured:
            return Llava(LlavaConfig(_VISION, config, image_token=_PICTURE), rngs=nnx.Rngs())
        return Llama(config, rngs=nnx.Rngs())

    model = drawn(build, 3, _STDDEV, mesh)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    return model


def engine(
    dtype: str,
    kind: str = "dense",
    *,
    tied: bool | None = None,
    mesh: Mesh | None = None,
    model: Llama | None = None,
    **sizes: Any,
) -> Engine:
    """An engine of the model; of `drawn_model` unless there is one."""
    model = model or drawn_model(dtype, kind, tied=tied, mesh=mesh)
    of_kind = KINDS[kind]
    adapters = {name: _additions(model.config, *one) for name, one in of_kind.adapters.items()}
    sizes = {"length": 384, **of_kind.sizes, **sizes}
    return Engine(model, config=EngineConfig(**sizes), mesh=mesh, adapters=adapters)


def _additions(config: LlamaConfig, rank: int, targets: tuple[str, ...]) -> Additions:
    layers = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs())).layers
    rng, matrices = np.random.default_rng(rank), {}
    for name in targets:
        count, inputs, outputs = getattr(layers, name).kernel.shape
        shapes = (count, inputs, rank), (count, rank, outputs)
        matrices[name] = tuple(rng.normal(0, _STDDEV, x).astype(np.float32) for x in shapes)
    return Additions(2.0, matrices)


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


def assert_same(expected: Mapping[Any, Any], answered: Mapping[Any, Any], what: Any = None) -> None:
    """Every answer is there and has the bits of the expected one; `what` is for the message."""
    assert answered, what
    assert [key for key in answered if answered[key] != expected[key]] == [], what


@dataclasses.dataclass(frozen=True)
class PolicyStep:
    """What GRPO's first step computes of answers that were drawn; arrays [B, L - 1] but tokens.

    Attributes:
      answered: bool, which tokens were drawn.
      drawn, logprobs: their log-probabilities by the engine, and by `policy_logprobs`.
      ratios: of the probabilities.
      gradient: of the ratios' sum, as the engine's model.
    """

    tokens: np.ndarray
    answered: np.ndarray
    drawn: np.ndarray
    logprobs: np.ndarray
    ratios: np.ndarray
    gradient: nnx.State


def policy_step(
    dtype: str, kind: str = "dense", mesh: Mesh | None = None, **sizes: Any
) -> PolicyStep:
    """A policy's first step on answers of 8 prompts."""
    model = drawn_model(dtype, kind, mesh=mesh)
    served = engine(dtype, kind, mesh=mesh, model=model, **sizes)
    asked = requests(8, kind)
    written = answers(served, *asked)
    rows = [(*one.prompt, *written[one.id][0]) for one in asked]
    # As many rows as two for each of eight copies; the others are padding.
    tokens = np.zeros((16, max(map(len, rows))), np.int32)
    lengths = np.ones(16, np.int32)
    answered = np.zeros((16, tokens.shape[1] - 1), bool)
    drawn = np.zeros(answered.shape, np.float32)
    for n, (row, one) in enumerate(zip(rows, asked, strict=True)):
        tokens[n, : len(row)], lengths[n] = row, len(row)
        answered[n, len(one.prompt) - 1 : len(row) - 1] = True
        drawn[n, answered[n]] = written[one.id][1]
    graphdef, state = nnx.split(model)

    def loss(state: nnx.State, tokens: jax.Array, lengths: jax.Array):
        policy = nnx.merge(graphdef, state)
        logprobs = policy_logprobs(policy, tokens, lengths, served.config, mesh)
        ratios = jnp.exp(jnp.where(answered, logprobs - drawn, 0))
        return -jnp.where(answered, ratios, 0).sum(), (logprobs, ratios)

    inputs = tokens, lengths
    if mesh is not None:
        inputs = jax.device_put(inputs, batch_sharding(mesh))
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=EXACT_ON_CPU)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        (_, computed), gradient = step(state, *inputs)
    return PolicyStep(tokens, answered, drawn, *map(np.asarray, computed), gradient)
