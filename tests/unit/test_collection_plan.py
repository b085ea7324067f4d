"""`mmqa plan --sources`: what so many sources take to embed, to hold and to search."""

import dataclasses
import sys

import numpy as np
import pytest
from cli_runs import done

from mmqa_jax.core.chips import GIB
from mmqa_jax.plan import row
from mmqa_jax.plan.program import compile_program, trace_program
from mmqa_jax.plan.row import read_sizes
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.index import build_index, index_sizes
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]
CONFIG = "--config=configs/atlas/contrastive.py:runlocal"


def traced(program, placement):
    """In place of compiling, which takes the TPU's compiler 3 s for a search, 12 for an encoder."""
    known = dataclasses.replace(program, floor_bytes=program.floor_bytes or 0.0)
    return trace_program(known, placement)


def test_numbers():
    assert read_sizes("250000, 10M,1.5b,2k") == [250_000, 10_000_000, 1_500_000_000, 2_000]
    for text in ("", "0", "ten", "10T", "3B", "10M,,1B", "9" * 400, "9" * 5000 + "B"):
        refuses(f"--sources={text}: .* is not a number of sources", read_sizes, text)


def test_scann_holds_what_its_index_has_on_disk(tmp_path):
    rows, dim = 12_000, 64
    vectors = np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    build_index(Embeddings(vectors, "model", "corpus"), "scann").save(tmp_path / "index")
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    (planned,) = (one for one in index_sizes(rows, dim) if one.kind == "scann")
    assert planned.held == pytest.approx(on_disk, rel=0.02)


def test_wikipedia_in_shards_of_scann_fits_a_small_host():
    sizes = {one.kind: one for one in index_sizes(21_000_000, 768)}
    assert sizes["scann"].held > 75 * GIB
    shards = sizes["scann_shards"]
    assert 0.7 * GIB < shards.held < 0.8 * GIB
    assert shards.shared
    assert shards.read == pytest.approx(21 * shards.held)
    assert "scann_shards" not in {one.kind for one in index_sizes(1_000_000, 768)}


def test_a_collection_on_these_devices():
    plan = done("plan", CONFIG, "--sources=1k,100k")
    few, many = plan["collections"]
    assert (few["sources"], many["sources"]) == (1_000, 100_000)
    assert many["embed"]["hours_bound"] == pytest.approx(100 * few["embed"]["hours_bound"])
    kinds = {one["kind"]: one for one in many["indexes"]}
    assert sorted(kinds) == ["exact", "mesh", "mesh_approx", "milvus", "scann"]
    vectors = 100_000 * many["dim"] * 4 / GIB
    assert kinds["exact"]["held_gib"] == kinds["exact"]["read_gib"] == vectors
    assert kinds["mesh"]["held_gib"] == pytest.approx(vectors, rel=0.35)  # padded to whole blocks
    assert kinds["mesh_approx"]["held_gib"] == pytest.approx(
        kinds["mesh"]["held_gib"] / 2, rel=0.01
    )
    assert kinds["mesh"]["device_gib"] > kinds["mesh"]["held_gib"]
    assert kinds["mesh"]["fits"]
    assert kinds["mesh"]["devices_needed"] == 1
    assert vectors < kinds["scann"]["held_gib"] < 1.3 * vectors
    assert kinds["scann"]["read_gib"] < 0.05 * vectors < kinds["mesh"]["held_gib"]
    assert kinds["mesh"]["seconds_bound"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_what_does_not_fit_says_how_many_devices_would_hold_it(monkeypatch):
    def compiled(program, placement):
        compile_or_trace = traced if program.name == "embed" else compile_program
        return compile_or_trace(program, placement)

    monkeypatch.setattr(row, "compile_program", compiled)
    plan = done("plan", CONFIG, "--topology=v5e:2x2", "--sources=1B")
    kinds = {one["kind"]: one for one in plan["collections"][0]["indexes"]}
    held = 1e9 * plan["collections"][0]["dim"] * 4 / GIB
    assert not kinds["mesh"]["fits"]
    assert kinds["mesh"]["seconds_bound"] is None
    assert kinds["mesh"]["devices_needed"] == pytest.approx(held / 15.75, abs=1.5)


def test_only_encoders_embed_sources(refused):
    message = "--sources: the config trains no encoder of sources"
    refused("plan", "--config=configs/atlas/rerank.py", "--sources=1k", message=message)
    refused("plan", CONFIG, "--sources=many", message="'many' is not a number of sources")


@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_sources_are_embedded_on_each_host_of_a_slice(monkeypatch):
    """Two of eight chips, each with its share."""
    monkeypatch.setattr(row, "compile_program", traced)
    alone, together = (
        done("plan", CONFIG, f"--topology=v5e:{shape}", "--sources=1k")["collections"][0]["embed"]
        for shape in ("2x4", "4x4")
    )
    assert together["hours_bound"] == alone["hours_bound"] / 2
