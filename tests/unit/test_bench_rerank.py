"""`python -m tests.bench rerank`: its rows follow from what was measured, its arithmetic from the models."""

import json

import pytest

from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.vlp.network import VLPConfig
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
