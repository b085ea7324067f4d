"""Several adapters over one base in the engine, beside the model that each is merged into."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tiny_llm import END, MODEL, SIZES, by_id, tiny_llama

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Result, Scoring
from mmqa_jax.models.lora import Additions

pytestmark = pytest.mark.slow

# Beside each other: another rank, other projections.
RANKS = {"cook": (4, ("q", "v", "down")), "poet": (2, MODEL.linears)}
PROMPTS = [[8 + n % 45 for n in range(length)] for length in (3, 40, 70)]  # each begins the next


def additions_of(seed: int, rank: int, targets: tuple[str, ...]) -> Additions:
    rng = np.random.default_rng(seed)
    layers = tiny_llama().layers

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    shapes = {name: getattr(layers, name).kernel.shape for name in targets}
    matrices = {
        name: (draw(count, inputs, rank), draw(count, rank, outputs))
        for name, (count, inputs, outputs) in shapes.items()
    }
    return Additions(2.0, matrices)


ADAPTERS = {name: additions_of(n, *RANKS[name]) for n, name in enumerate(RANKS)}


def merged(name: str):
    """The base with an adapter in its kernels: W + alpha / r A B."""
    model = tiny_llama()
    if name:
        factor, matrices = ADAPTERS[name]
        for target, (a, b) in matrices.items():
            kernel = getattr(model.layers, target).kernel
            kernel.set_value(kernel.get_value() + factor * np.einsum("lir,lro->lio", a, b))
    return model


def requests(adapters) -> list[Request | Scoring]:
    """Of each adapter the same, in any order: greedy, drawn, beams, and scores."""
    asked = []
    for name in adapters:
        for number, prompt in enumerate(PROMPTS):
            asked += [
                Request((name, number, "greedy"), prompt, 12, adapter=name),
                Request((name, number, "drawn"), prompt, 6, temperature=1.0, n=2, adapter=name),
                Scoring((name, number, "score"), prompt, [[9, 10], [11]], adapter=name),
            ]
        asked.append(Request((name, "beams"), PROMPTS[0], 5, beams=2, adapter=name))
    order = np.random.default_rng(1).permutation(len(asked))
    return [asked[n] for n in order]


def answers(engine: Engine, asked) -> dict:
    """(tokens, log-probability) of the candidates of each request, in the order of the tokens, and
    the log-probability of each continuation."""
    found = {}
    for key, result in by_id(engine.serve(asked)).items():
        if isinstance(result, Result):
            found[key] = sorted((one.tokens, one.total) for one in result.candidates)
        else:
            found[key] = [((), score.total) for score in result.scores]
    return found


@pytest.mark.parametrize("scan", [False, True])
def test_a_mixed_batch_answers_as_each_merged_model(scan):
    """Prompts that begin alike share a prefix with their own adapter's alone; where layers are not
    scanned, the base's answers are the same bits as those of an engine without adapters."""
    sizes = dataclasses.replace(SIZES, scan_layers=scan)
    options = {"end_ids": [END], "config": sizes}
    mixed = Engine(tiny_llama(), **options, adapters=ADAPTERS)
    got = answers(mixed, requests(["", *ADAPTERS]))
    assert mixed.throughput.reused_tokens
    greedy = set()
    for name in ("", *ADAPTERS):
        alone = [dataclasses.replace(one, adapter="") for one in requests([name])]
        for key, want in answers(Engine(merged(name), **options), alone).items():
            assert [tokens for tokens, _ in got[key]] == [tokens for tokens, _ in want], key
            within = 3e-4 if name or scan else 0  # of sums of up to 30
            totals = [[total for _, total in one] for one in (got[key], want)]
            np.testing.assert_allclose(*totals, rtol=0, atol=within)
        greedy.add(str(got[name, 2, "greedy"][0][0]))
    assert len(greedy) == 3  # the adapters change what is answered


def test_an_adapter_that_the_engine_lacks_is_refused():
    engine = Engine(tiny_llama(), end_ids=[END], config=SIZES, adapters=ADAPTERS)
    message = r"request 0: adapter is 'painter', and the engine has cook, poet; name one of its own"
    for request in (
        Request(0, [9], adapter="painter"),
        Scoring(0, [9], [[10]], adapter="painter"),
    ):
        with pytest.raises(UserError, match=message):
            engine.tokenized(request)
