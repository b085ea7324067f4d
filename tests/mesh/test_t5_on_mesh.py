"""A T5 on meshes of eight devices: answers, scores and a training step as on one device."""

import functools

import jax
import numpy as np
import pytest
from compare import LAYER, load_on_mesh
from random_weights import publish
from steps import MESHES, same_step, take_step

from mmqa_jax.data.batches.texts import PairSize, TokenExample, pair_batch
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.t5_engine import T5Engine, T5EngineConfig
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.tasks.seq2seq import Seq2SeqObjective
from mmqa_jax.weights.published import load_published

CONFIG = T5Config(
    vocab_size=64, hidden=32, head_size=10, heads=4, mlp=48, encoder_layers=2, decoder_layers=2,
    buckets=12, farthest=20, activation="gelu_new", gated=True, tied=False, scaled=False,
    dropout=0.0, unroll=1,
)  # fmt: skip
NEW = 9


class Numbers:
    """Tokens as their numbers."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def requests():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 64, length).tolist() for length in (30, 3, 17, 9, 24)]
    yield from (Request(f"greedy {n}", ids, NEW, logprobs=True) for n, ids in enumerate(prompts))
    yield from (
        Request(f"beams {n}", ids, NEW, beams=3, n=2, length_penalty=1.0)
        for n, ids in enumerate(prompts)
    )
    yield Request("drawn", prompts[0], NEW, temperature=1.5, n=3, seed=4, logprobs=True)
    yield Scoring("scored", prompts[1], [[5, 9, 11], [7], [9, 9]])


def test_answers_and_scores(tmp_path):
    folder = publish("t5", CONFIG, tmp_path)
    _, spread, whole = load_on_mesh(functools.partial(load_published, "t5", folder, unroll=1))
    up = spread.decoder.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)

    def answers(model):
        sizes = T5EngineConfig(slots=12, length=32, buckets=(32,))
        engine = T5Engine(model, Numbers(), end_ids=[1], config=sizes)
        return {result.id: result for result in engine.serve(requests())}

    got, wanted = answers(spread), answers(whole)
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        if name == "scored":
            for one, other in zip(got[name].scores, want.scores, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, **LAYER)
            continue
        for one, other in zip(got[name].candidates, want.candidates, strict=True):
            assert one.tokens == other.tokens, name
            np.testing.assert_allclose(one.total, other.total, rtol=0, atol=1e-4)
    assert len({result.candidates[0].tokens for name, result in got.items() if "g" in name}) > 3


def make_batch():
    rng = np.random.default_rng(2)
    examples = [
        TokenExample(rng.integers(2, 64, prompt + answer).astype(np.int32), prompt)
        for prompt, answer in zip(rng.integers(3, 17, 16), rng.integers(1, 9, 16), strict=True)
    ]
    return pair_batch(examples, PairSize(24, 8))


@pytest.mark.parametrize("mean", ["tokens", "questions"])
def test_a_step_is_that_of_one_device(mean):
    objective, batch = Seq2SeqObjective(CONFIG, mean=mean), make_batch()
    alone = take_step(objective, batch, {}, jax.devices()[:1])
    same_step(
        take_step(objective, batch, MESHES["all"], None, accumulate=2, start=alone.start), alone
    )
