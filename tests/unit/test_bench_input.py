"""`python -m tests.bench input`: both sides decode the same pictures, and waiting is what a run waits."""

import json

import numpy as np
import pytest

from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.pictures.decode import decode_to_pixels
from mmqa_jax.training import loop
from mmqa_jax.training.loop import read_section
from tests.bench import Options
from tests.bench import input as bench

pytestmark = pytest.mark.slow

SIZES = {
    **{"pictures": 3, "batch": 1, "batches": 1, "steps": 3},
    **{"demo_snippets": 40, "demo_pictures": 20, "demo_questions": 60},
}


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    return bench._web_corpus(tmp_path_factory.mktemp("bench") / "web", 4)


@pytest.fixture(autouse=True)
def own_cache(cli_cache, monkeypatch):
    monkeypatch.setenv("MMQA_CACHE", str(cli_cache))


def test_pillow_alone_makes_the_same_pixels(web):
    corpus = open_corpus(web)
    assert len(corpus.questions("train")) == 4
    for row in range(4):
        data = corpus.picture(row)
        ours = decode_to_pixels(data, 224, "crop", alpha="white")
        np.testing.assert_array_equal(bench._decoded(data, 224), ours)


def driven(config, *, objective, batches, mesh, workdir, seed):
    """In place of the loop, which test_bench_train.py times: asks for a batch for every step."""
    assert workdir.is_dir()
    start = batches.get_state()
    for _ in range(read_section(config).steps):
        next(batches)
    assert batches.get_state() != start


def test_rows(web, short_readings, monkeypatch):
    monkeypatch.setattr(loop, "train", driven)
    only = ("records", "pictures", "pictures_scaled", "workers_0", "wait_contrastive")
    found = bench.run_sizes(SIZES, Options(rounds=1, only=only), "runlocal")
    rows = {row["name"]: row for row in found["rows"]}
    assert tuple(rows) == only
    assert all(
        row["ours"] > 0 and {"peer", "ratio", "unit", "floor"} <= row.keys()
        for row in rows.values()
    )
    assert rows["pictures"]["pillow_resized"] < rows["pictures"]["peer"]  # it does more
    waiting = rows["wait_contrastive"]
    assert 0 < waiting["ours"] < 100
    assert (waiting["steps"], waiting["required"]) == (1, 2.0)  # the first of its shape compiled
    json.dumps(found)
