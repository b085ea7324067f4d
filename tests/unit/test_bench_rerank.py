"""`mmqa bench rerank`: its rows follow from what was measured, its arithmetic from the models."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from cli_runs import compiled_quickly
from flax import nnx

from mmqa_jax.bench import Options, rerank, show
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.two_sided_vlp import TwoSidedVLP, TwoSides
from mmqa_jax.models.vlp import VLPConfig

TRUNK = BertConfig(
    vocab_size=60, hidden=16, layers=2, heads=2, mlp=32, positions=256, types=6, eps=1e-5,
    dropout=0.0, attention_dropout=0.0, unroll=1,
)  # fmt: skip
LOAD = rerank.Load(
    VLPConfig(TRUNK, 6, 5, (8,)), joint_layers=(1, 2), plain=2, sources=2, questions=3,
    alone=(4, 5), together=(2, 3), matmul=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def result():
    with compiled_quickly():
        return rerank.measure(LOAD, Options(rounds=1))


def test_the_projection_is_that_of_the_cost_model(result):
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "cached_1", "cached_2"]
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
    assert plain["source_ms"] == plain["question_ms"] == 0
    assert plain["peer"] is plain["ratio"] is None
    for name in ("cached_1", "cached_2"):
        assert rows[name]["peer"] == plain["ours"]
        assert rows[name]["ratio"] == pytest.approx(rows[name]["ours"] / plain["ours"], rel=2e-3)
        assert rows[name]["source_ms"] > 0
    json.dumps(result)


def test_the_table_names_the_paper(result, capsys):
    show(result)
    assert "~3 years" in capsys.readouterr().out


@pytest.mark.parametrize(("joint", "match_type"), [(1, None), (3, 1)])
def test_operations_are_those_of_the_compiled_programs(joint, match_type):
    """XLA counts additions of norms and softmax too: a few per cent at this width."""
    trunk = dataclasses.replace(TRUNK, hidden=256, layers=3, heads=4, mlp=1024, unroll=True)
    config, sides = VLPConfig(trunk, 64, 48, (96,)), TwoSides(joint, 5, match_type)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: TwoSidedVLP(config, sides, rngs=nnx.Rngs(0)))
    )

    def counted(method: str, pieces: int, *given) -> float:
        call = jax.jit(lambda state, *x: getattr(nnx.merge(graphdef, state), method)(*x))
        return call.lower(state, *given).compile().cost_analysis()["flops"] / pieces

    shapes = functools.partial(rerank._inputs, config)
    encoded = {
        name: jax.eval_shape(
            lambda state, x, name=name: getattr(nnx.merge(graphdef, state), name)(x), state, inputs
        )
        for name, inputs in (
            ("encode_sources", shapes(8, 10, 20, 0)),
            ("encode_questions", shapes(16, 0, 0, 12)),
        )
    }
    found = counted("pair_logits", 8 * 16, *encoded.values())
    assert found == pytest.approx(rerank.pair_flops(config, sides, 10, 20, 12), rel=0.08)
    if joint == 1:  # the others do the same
        found = counted("encode_questions", 4, shapes(4, 0, 0, 12))
        assert found == pytest.approx(rerank.question_flops(config, sides, 12), rel=0.08)
        found = counted("encode_sources", 4, shapes(4, 10, 20, 0))
        assert found == pytest.approx(rerank.source_flops(config, 10, 20), rel=0.08)


def test_sides_that_compute_something_else_stop_the_bench():
    rerank._agree(np.array([0.3, 0.1]), np.array([0.4, 0.2001]), LOAD)  # the same odds
    with pytest.raises(
        RunError, match=r"cached and masked log-odds differ by 0\.1, at most 0\.001"
    ):
        rerank._agree(np.array([0.3, 0.1]), np.array([0.4, 0.1]), LOAD)


def test_an_unknown_row_is_refused():
    with pytest.raises(UserError, match="--only=cached_3: no such row; use one of plain, cached_1"):
        rerank.measure(LOAD, Options(only=("cached_3",)))
