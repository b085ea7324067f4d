"""ScaNN in shards: what is found is scored exactly and merged; resumed, and refused when damaged."""

import shutil

import numpy as np
import pytest

from mmqa_jax.core.files import read_json
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes import index as index_room
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.index import (
    ScannParameters,
    build_shards,
    load_index,
    scann_available,
)
from tests.refusals import refuses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not scann_available(), reason="ScaNN cannot be imported here"),
]
# All partitions are searched, and more candidates scored exactly than there are near rows.
ALL = ScannParameters(leaves=10, leaves_to_search=10, reorder=300)


def unit(rows, dim=16, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def embeddings():
    vectors = unit(5_000)
    vectors[4_000:4_010] = vectors[10:20]  # ties over two shards
    return Embeddings(vectors, "model", "corpus")


@pytest.fixture(scope="module", params=[ALL, ScannParameters()], ids=["tree-AH", "brute force"])
def folder(request, embeddings, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_room, "LEAST_ROWS", 100)
        folder = tmp_path_factory.mktemp("shards") / "index"
        assert build_shards(folder, embeddings, 1_500, request.param)
    return folder


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(index_room, "LEAST_ROWS", 100)


def test_shards_find_what_exact_search_finds(folder, embeddings):
    index, exact = load_index(folder, embeddings, "model"), ExactIndex(embeddings)
    assert [len(span) for span in index.spans] == [1_250] * 4
    queries = np.concatenate([unit(40, seed=1), embeddings.vectors[10:20]])
    allowed = np.random.default_rng(2).random(5_000) < 0.3
    few = np.zeros(5_000, bool)
    few[[3, 2_000, 4_999]] = True
    for mask, top_k in ((None, 20), (allowed, 20), (few, 3)):
        rows, scores = index.search(queries, top_k, mask)
        wanted = exact.search(queries, top_k, mask)
        np.testing.assert_allclose(scores, wanted[1], atol=1e-6)
        shared = [len({*a} & {*b}) for a, b in zip(rows, wanted[0], strict=True)]
        assert np.mean(shared) > 0.999 * top_k
        assert (np.diff(scores) <= 0).all()
    del index._exact  # only queries with fewer candidates than top_k are searched exactly
    rows = index.search(embeddings.vectors[10:12], 2)[0]
    assert rows.tolist() == [[10, 4_000], [11, 4_001]]
    assert index.search(queries[:0], 2)[0].shape == (0, 2)
    own = index.search_within(queries[:1], [[5, 4_500]], 2)[0]
    assert set(own[0].tolist()) == {5, 4_500}


def test_without_scann(folder, embeddings, monkeypatch, capsys):
    """What was built elsewhere is searched exactly; building is refused."""

    def fail():
        raise ImportError("no scann")

    monkeypatch.setattr(index_room, "_scann", fail)
    found = load_index(folder, embeddings, "model").search(embeddings.vectors[:3], 1)[0]
    assert found.tolist() == [[0], [1], [2]]
    assert "searching exactly instead" in capsys.readouterr().err
    refuses(r"--shard_rows: ScaNN .*; install `scan", build_shards, folder, embeddings, 1_500)


def test_killed_it_goes_on_and_a_damaged_shard_is_refused(folder, embeddings, tmp_path):
    copy = tmp_path / "index"
    for place in (folder, *folder.parent.glob("index-shards-*")):
        shutil.copytree(place, tmp_path / place.name)
    (shards,) = tmp_path.glob("index-shards-*")
    before = (shards / "00001/manifest.json").stat().st_mtime_ns
    shutil.rmtree(shards / "00002")
    (copy / "manifest.json").unlink()
    refuses("not found, a dense index was expected", load_index, copy, embeddings)
    held = ScannParameters(**read_json(shards / "00000/manifest.json")["parameters"])
    assert build_shards(copy, embeddings, 1_500, held)
    assert (shards / "00001/manifest.json").stat().st_mtime_ns == before
    assert not build_shards(copy, embeddings, 1_500, held)
    file = max((shards / "00001").glob("*.npy"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refuses(rf"00001: {file.name} is damaged", load_index, copy, embeddings)
    assert build_shards(copy, embeddings, 1_500, held)
    other = Embeddings(embeddings.vectors, "model", "other")
    refuses("corpus_fingerprint is 'corpus' but 'other' was expected", load_index, copy, other)
    assert build_shards(copy, embeddings, 2_500, held)
    assert len(list(tmp_path.glob("index-shards-*"))) == 1
    refuses("--shard_rows=99: a shard of ScaNN has at least", build_shards, copy, embeddings, 99)
