"""`python -m tests.bench rerank`: its rows follow from what was measured, its arithmetic from the models."""

import dataclasses
import json

import jax
import pytest
from flax import nnx

from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.vlp.network import VLP, VLPConfig
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from tests.bench import Options, rerank

pytestmark = pytest.mark.slow

TRUNK = BertConfig(
    vocab_size=60, hidden=16, layers=2, heads=2, mlp=32, positions=256, types=6, eps=1e-5,
    dropout=0.0, attention_dropout=0.0, unroll=1,
)  # fmt: skip
LOAD = rerank.Load(
    VLPConfig(TRUNK, 6, 5, (8,)), joint_layers=(2,), plain=2, sources=2, questions=3,
    alone=(4, 5), together=(2, 3), matmul=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def result(short_readings):
    """The measured rows; the operations of a batch, which are traced, are those of the test after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rerank, "flops", lambda model, method, *given: 3e6)
        return rerank.run_load(LOAD, Options(rounds=1))


def test_the_projection_is_that_of_the_cost_model(result):
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "cached_2"]
    pairs = 7540 * 934_239
    assert result["job"]["pairs"] == pairs
    for row in rows.values():
        seconds = (
            934_239 * row["source_ms"] / 1e3
            + 7540 * row["question_ms"] / 1e3
            + pairs * row["pair_us"] / 1e6
        )
        assert row["days"] == pytest.approx(seconds / 86_400, rel=2e-3)
        assert row["years"] == pytest.approx(row["days"] / 365.25, rel=2e-3)
        assert row["ours"] == pytest.approx(pairs / seconds, rel=2e-3)
        assert row["floor"] == pytest.approx(
            result["matmul_gflops"] * 1e3 / row["mflop_per_pair"], rel=2e-3
        )
        assert row["of_peak"] == pytest.approx(row["ours"] / row["floor"], abs=2e-3)
        assert row["paper"] == "~3 years"
    plain = rows["plain"]
    assert plain["mflop_per_pair"] == pytest.approx(3 / LOAD.plain)
    assert plain["source_ms"] == plain["question_ms"] == 0
    assert plain["peer"] is plain["ratio"] is None
    cached = rows["cached_2"]
    assert cached["peer"] == plain["ours"]
    assert cached["ratio"] == pytest.approx(cached["ours"] / plain["ours"], rel=2e-3)
    assert cached["source_ms"] > 0
    json.dumps(result)


@pytest.mark.parametrize(("joint", "match_type"), [(1, None), (3, 1)])
def test_operations_are_those_of_the_products(joint, match_type):
    """XLA counts additions of norms and softmax too: a few per cent at this width."""
    width, mlp, layers = 256, 1024, 3
    trunk = dataclasses.replace(TRUNK, hidden=width, layers=layers, heads=4, mlp=mlp)
    config, sides = VLPConfig(trunk, 64, 48, (96,)), TwoSides(joint, 5, match_type)
    two = nnx.eval_shape(lambda: TwoSidedVLP(config, sides, rngs=nnx.Rngs()))
    regions, text, question = 10, 20, 12

    def layer(columns: int, rows: int, seen: int) -> float:
        """Keys and values of `columns` tokens; all else of `rows` tokens that see `seen`."""
        after = rows * (2 * width**2 + 4 * width * mlp)  # output projection and MLP
        return 4 * columns * width**2 + rows * (2 * width**2 + 4 * width * seen) + after

    def encoded(name: str, *sizes: int):
        run = lambda state, x: getattr(nnx.merge(graphdef, state), name)(x)  # noqa: E731
        return jax.eval_shape(run, state, rerank._inputs(config, *sizes))

    graphdef, state = nnx.split(two)
    memory = encoded("encode_sources", 8, regions, text, 0)
    states = encoded("encode_questions", 16, 0, 0, question)
    found = rerank.flops(two, "pair_logits", memory, states) / (8 * 16)
    source, tokens = 2 + regions + text, 1 + question
    # The question's keys, values and queries of the first joint layer are kept.
    seen = source + tokens * (1 if match_type is None else 2)
    if joint == 1:
        expected = layer(0, 1, seen) - 2 * width**2
    else:
        expected = layer(0, tokens, seen) - tokens * 2 * width**2
        expected += (joint - 2) * layer(tokens, tokens, source + tokens)
        expected += layer(tokens, 1, source + tokens)
    assert found == pytest.approx(expected, rel=0.08)
    if joint == 1:  # the others do the same
        visual = regions * 2 * (64 * 96 + 96 * width + 48 * width)
        source_flops = visual + 2 * layer(source, source, source) + layer(source, 0, 0)
        inputs = rerank._inputs(config, 4, regions, text, 0)
        assert rerank.flops(two, "encode_sources", inputs) / 4 == pytest.approx(
            source_flops, rel=0.08
        )
        length = 2 + question
        question_flops = 2 * layer(length, length, length) + 2 * width**2 * (2 * tokens + 1)
        inputs = rerank._inputs(config, 4, 0, 0, question)
        assert rerank.flops(two, "encode_questions", inputs) / 4 == pytest.approx(
            question_flops, rel=0.08
        )
        # Plain VLP: the last layer for [CLS] alone.
        packed = source + question
        vlp = nnx.eval_shape(lambda: VLP(config, rngs=nnx.Rngs()))
        plain_flops = visual + 2 * layer(packed, packed, packed) + layer(packed, 1, packed)
        inputs = rerank._inputs(config, 4, regions, text, question)
        assert rerank.flops(vlp, "source_logits", inputs) / 4 == pytest.approx(
            plain_flops, rel=0.08
        )
