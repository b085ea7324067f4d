"""`python -m tests.bench llm`: both sides answer alike, and the rows say what they should."""

import json
import math

import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from tests.bench import Options, llm, llm_total
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

TINY = LlamaConfig(
    vocab_size=64, hidden=32, layers=1, heads=4, kv_heads=2, mlp=48, positions=128, tied=True,
    init_stddev=0.3,
)  # fmt: skip
# Prompts of one chunk, of the engine's smallest bucket.
LOAD = llm.Load(prompts=5, prompt=30, new=2, shared=24, batch=4, decode=4, text=96)


def tiny_model(size: str, dtype: str | None = None) -> Llama:
    assert dtype in (None, "bfloat16")
    config = TINY if dtype is None else LlamaConfig(**{**vars(TINY), "dtype": dtype})
    return drawn(lambda: Llama(config, rngs=nnx.Rngs()), 0, config.init_stddev)


@pytest.fixture(scope="module")
def result(short_readings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "load_model", tiny_model)
        # Several threads would wait for each other longer than they compute.
        patch.setattr("tests.bench.torch_reference.threads", lambda: 1)
        patch.setattr(llm, "_WINDOW", 32)
        text = np.random.default_rng(0).integers(0, 64, 5 * 30).tolist()
        patch.setattr(llm, "_text", lambda size, load: text)
        yield llm.run_load("small", LOAD, Options(rounds=1))


def test_both_sides_answer_alike(result):
    rows = {row["name"]: row for row in result["rows"]}
    assert tuple(rows) == llm.ROWS
    for name in ("few_shot", "different", "prefill", "decode"):
        assert rows[name]["same_answers"] == 1.0, name
        assert rows[name]["ratio"] > 0
        assert rows[name]["peer_bfloat16"] > 0
    for name in ("decode", "int8_cache", "int8_weights"):  # timed apart from the prompts
        assert min(rows[name]["ours"], rows[name]["peer"]) > 0, name
    decode = rows["decode"]
    assert decode["of_floor"] == pytest.approx(decode["ours"] / decode["floor"], abs=0.01)
    assert json.dumps(result)


def test_int8_changes_the_perplexity_a_little(result):
    rows = {row["name"]: row for row in result["rows"]}
    for name in ("perplexity_int8_cache", "perplexity_int8_weights"):
        ours, plain = rows[name]["ours"], rows[name]["peer"]
        assert 1 < plain < math.inf
        assert ours != plain
        assert abs(math.log(ours / plain)) < 0.05


def test_totals_are_measured_when_asked_for_and_of_the_small_model(tmp_path):
    with pytest.raises(UserError, match="--only=total_400: is measured with --size=small"):
        llm.run_load("full", LOAD, Options(only=("total_400",)))
    llm_total._write_prompts(tmp_path / "x.txt", 400)
    lines = (tmp_path / "x.txt").read_text().splitlines()
    assert len(set(lines)) == len(lines) == 400
    for side, texts in (("ours", ["a ", "b"]), ("peer", ["a", "c"])):
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"x.{side}.jsonl").write_text("\n".join(lines))
    assert llm_total._same(tmp_path, "x") == 0.5
