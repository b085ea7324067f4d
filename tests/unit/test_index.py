"""Dense search: exact against plain numpy, ScaNN against exact, manifests."""

import jax
import numpy as np
import pytest
from small_disk import small_disk

from mmqa_jax.core.checkpoints.checksums import write_sums
from mmqa_jax.core.errors import UserError, find_disk_failure
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.retrieval.embeddings import Embeddings, cached_vectors
from mmqa_jax.retrieval.indexes import exact as exact_room
from mmqa_jax.retrieval.indexes import index as index_room
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.index import (
    ScannIndex,
    ScannParameters,
    build_index,
    is_current,
    load_index,
    scann_available,
)
from tests.refusals import refuses

needs_scann = pytest.mark.skipif(not scann_available(), reason="ScaNN cannot be imported here")
KINDS = [pytest.param("scann", marks=needs_scann), "exact"]
TREE = ScannParameters(leaves=70, leaves_to_search=35)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def clustered(count, dim=128, queries=200, clusters=50, seed=0):
    """Unit vectors around centers, and queries near some of them."""
    rng = np.random.default_rng(seed)
    centers = unit(rng.standard_normal((clusters, dim)))
    spread = 0.6 * unit(rng.standard_normal((count, dim)))
    vectors = unit(centers[rng.integers(clusters, size=count)] + spread)
    near = vectors[rng.integers(count, size=queries)]
    return (
        Embeddings(vectors, "model-1", "corpus-1"),
        unit(near + 0.6 * unit(rng.standard_normal((queries, dim)))),
    )


def plain_search(vectors, queries, top_k, allowed=None):
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    best = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
    rows = np.take_along_axis(best, order, axis=1)
    return rows, np.take_along_axis(scores, rows, axis=1)


def recall(found, expected):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, expected, strict=True)])


@pytest.mark.parametrize("block_rows", [100, 333, 65_536])
def test_exact_equals_numpy_in_blocks_of_any_size(block_rows):
    embeddings, queries = clustered(1000, dim=32, queries=37)
    index = ExactIndex(embeddings, block_rows=block_rows, query_batch=16)
    for top_k in (1, 20, 150):
        rows, scores = index.search(queries, top_k)
        expected_rows, expected_scores = plain_search(embeddings.vectors, queries, top_k)
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    one_row, _ = index.search(queries[:1], 5)
    np.testing.assert_array_equal(one_row, expected_rows[:1, :5])
    assert index.search(queries[:0], 5)[0].shape == (0, 5)


def test_equal_vectors_come_in_row_order():
    vectors = np.tile(unit(np.ones((1, 8))), (50, 1))
    index = ExactIndex(Embeddings(vectors, "m", "c"), block_rows=7)
    assert index.search(vectors[:1], 20)[0].tolist() == [list(range(20))]


@pytest.mark.parametrize(
    ("room", "copied"), [(np.inf, [3, 0]), (8 * 2 * 17 * 4, [3, 1]), (0, [3, 3])]
)
def test_blocks_stay_on_the_device_while_they_fit(room, copied, monkeypatch):
    """Of 50 rows in three blocks of 17, by what a quarter of the free memory holds."""
    embeddings, queries = clustered(50, dim=8, queries=1)
    put, blocks = jax.device_put, []
    monkeypatch.setattr(exact_room, "free_bytes", lambda device: 4 * room)
    monkeypatch.setattr(jax, "device_put", lambda x: [blocks.append(np.shape(x)), put(x)][1])
    index = ExactIndex(embeddings, block_rows=20)
    for count in copied:
        blocks.clear()
        rows, _ = index.search(queries, 30)
        assert blocks.count((17, 8)) == count
        np.testing.assert_array_equal(rows, plain_search(embeddings.vectors, queries, 30)[0])


def test_a_cpu_scores_the_array_of_the_host(tmp_path):
    """Kept vectors, and those in a file, are not copied."""
    vectors = clustered(100, dim=16)[0].vectors
    contents = [str(row) for row in range(100)]
    kept = cached_vectors(tmp_path / "kept", "m", contents, lambda rows: vectors[rows], block=30)
    np.testing.assert_array_equal(kept, vectors)
    np.save(tmp_path / "file.npy", vectors)
    for held in (kept, np.load(tmp_path / "file.npy", mmap_mode="r")):
        index = ExactIndex(Embeddings(held, "m", "c"), block_rows=30)
        for start in (0, 25, 75):
            assert index._block(start).unsafe_buffer_pointer() == held[start:].ctypes.data


def test_exact_allowed_rows_across_blocks():
    embeddings, queries = clustered(500, dim=16, queries=10)
    allowed = np.zeros(500, bool)
    allowed[[3, 150, 151, 400, 499]] = True
    index = ExactIndex(embeddings, block_rows=64)
    rows, _ = index.search(queries, 5, allowed)
    np.testing.assert_array_equal(rows, plain_search(embeddings.vectors, queries, 5, allowed)[0])
    refuses("5 sources are available", index.search, queries, 6, allowed)


@pytest.fixture(scope="module", params=[ScannParameters(), TREE], ids=["brute force", "tree-AH"])
def scann(request):
    """Embeddings, queries and an index."""
    embeddings, queries = clustered(5000)
    return embeddings, queries, ScannIndex.build(embeddings, request.param)


@needs_scann
def test_scann_recall(scann):
    embeddings, queries, index = scann
    expected, expected_scores = plain_search(embeddings.vectors, queries, 20)
    rows, scores = index.search(queries, 20)
    assert recall(rows, expected) >= 0.99
    same = rows == expected  # reordering is exact: equal rows have equal scores
    np.testing.assert_allclose(scores[same], expected_scores[same], atol=1e-5)
    np.testing.assert_array_equal(index.search(queries[:1], 20)[0], rows[:1])


@needs_scann
def test_scann_large_top_k_is_full():
    embeddings, queries = clustered(5000, queries=20)
    index = ScannIndex.build(embeddings, ScannParameters(leaves=70, leaves_to_search=1))
    expected, _ = plain_search(embeddings.vectors, queries, 1000)
    rows, scores = index.search(queries, 1000)
    assert all(len(set(row)) == 1000 for row in rows.tolist())
    assert np.isfinite(scores).all()
    assert (np.diff(scores, axis=1) <= 1e-6).all()
    assert recall(rows, expected) >= 0.8


@needs_scann
def test_scann_allowed_rows(scann):
    embeddings, queries, index = scann
    half = np.arange(5000) % 2 == 0
    rows, _ = index.search(queries, 20, half)
    assert half[rows].all()
    assert recall(rows, plain_search(embeddings.vectors, queries, 20, half)[0]) >= 0.99
    # The modality gap: nothing that is allowed is near; filtering alone would come back empty.
    far = np.zeros(5000, bool)
    far[np.argsort(embeddings.vectors @ queries[0])[:25]] = True
    rows, _ = index.search(queries[:1], 20, far)
    np.testing.assert_array_equal(rows, plain_search(embeddings.vectors, queries[:1], 20, far)[0])


def test_parameters_by_size():
    assert ScannParameters.for_rows(19_999).leaves == 0
    million = ScannParameters.for_rows(934_000)
    assert (million.leaves, million.leaves_to_search, million.training_rows) == (1933, 40, 193_300)
    small, huge = ScannParameters.for_rows(20_000), ScannParameters.for_rows(10**8)
    assert (small.leaves, small.leaves_to_search) == (283, 70)
    assert (huge.leaves, huge.leaves_to_search) == (20_000, 417)


@needs_scann
def test_the_chosen_parameters_find_the_top_20():
    embeddings, queries = clustered(20_000, dim=32, clusters=200)
    index = ScannIndex.build(embeddings)
    assert index.parameters.leaves
    expected, _ = plain_search(embeddings.vectors, queries, 20)
    assert recall(index.search(queries, 20)[0], expected) >= 0.99


@pytest.mark.parametrize("kind", [*KINDS, "mesh", "mesh_approx"])
def test_save_and_load(tmp_path, kind):
    embeddings, queries = clustered(1500, dim=32)
    parameters = ScannParameters(leaves=20, leaves_to_search=10)
    index = build_index(embeddings, kind, parameters)
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index", embeddings, "model-1")
    assert loaded.kind == kind
    assert loaded.is_exact == index.is_exact == (kind not in ("scann", "mesh_approx"))
    (rows, scores), (found, again) = index.search(queries, 10), loaded.search(queries, 10)
    np.testing.assert_array_equal(rows, found)
    # ScaNN's own scores differ in their last bit from one search of an index to the next.
    last_bit = np.spacing(np.float32(1)) if kind == "scann" else 0
    np.testing.assert_allclose(scores, again, rtol=0, atol=last_bit)
    with pytest.raises(UserError, match=r"model_fingerprint is 'model-1' but 'model-2'"):
        load_index(tmp_path / "index", embeddings, "model-2")
    other = Embeddings(embeddings.vectors, "model-1", "corpus-2")
    refuses("corpus_fingerprint", load_index, tmp_path / "index", other, "model-1")
    fewer = Embeddings(embeddings.vectors[:-1], "model-1", "corpus-1")
    refuses("rows is 1500 but 1499", load_index, tmp_path / "index", fewer)


@needs_scann
def test_damaged_indexes_are_refused(tmp_path):
    embeddings, _ = clustered(1500, dim=32)
    index = build_index(embeddings, "scann")
    index.save(tmp_path / "index")
    (tmp_path / "index" / "scann_docids.pkl").write_bytes(b"")
    refuses("pickles are not loaded", load_index, tmp_path / "index", embeddings)
    (tmp_path / "index" / "scann_docids.pkl").unlink()
    (tmp_path / "index" / "dataset.npy").unlink()
    refuses("mmqa index", load_index, tmp_path / "index", embeddings)
    manifest = read_json(tmp_path / "index" / "manifest.json")
    write_json(tmp_path / "index" / "manifest.json", {**manifest, "what": "a cake"})
    refuses("not the manifest of a dense index", load_index, tmp_path / "index", embeddings)
    refuses("run `mmqa index` first", load_index, tmp_path / "none", embeddings)


@needs_scann
@pytest.mark.parametrize("broken", ["scann_config.pb", "manifest.json"])
def test_what_scann_cannot_open_is_refused(tmp_path, broken):
    """As that of another version, whose checksums are right."""
    embeddings, _ = clustered(50, dim=8)
    build_index(embeddings, "scann").save(tmp_path)
    if broken == "manifest.json":
        manifest = read_json(tmp_path / broken)
        write_json(tmp_path / broken, manifest | {"parameters": {"trees": 2}})
    else:
        (tmp_path / broken).write_bytes(b"another version's")
    write_sums(tmp_path)
    refuses(r"ScaNN cannot open this index \(.+\); delete the", load_index, tmp_path, embeddings)


@pytest.mark.parametrize(
    ("kind", "more"), [("mesh", "--kind=mesh_approx"), ("mesh_approx", "ScaNN")]
)
def test_more_rows_than_the_devices_hold_are_refused(monkeypatch, kind, more):
    embeddings, _ = clustered(1000, dim=8)
    held = {"bytes_limit": 3 << 10, "bytes_in_use": 1 << 10}
    monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda self: held)
    said = rf"index: 1,000 rows of 8 need .* GiB on each of \d+ devices, .* free; .*, {more}"
    refuses(said, build_index, embeddings, kind)


def test_without_scann(monkeypatch, capsys):
    def fail():
        raise ImportError("no scann")

    embeddings, _ = clustered(50, dim=8)
    monkeypatch.setattr(index_room, "_scann", fail)
    assert build_index(embeddings, "auto").kind == "exact"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "searching exactly" in captured.err
    refuses("ScaNN cannot be imported", build_index, embeddings, "scann")


@pytest.mark.parametrize("kind", [*KINDS, "mesh"])
def test_bad_input(kind):
    embeddings, queries = clustered(100, dim=8)
    index = build_index(embeddings, kind)
    for top_k in (0, 101):
        refuses(f"top_k={top_k} is out of range", index.search, queries, top_k)
    refuses("do not fit the index's dimension 8", index.search, queries[:, :4], 1)
    refuses("mask of allowed rows", index.search, queries, 1, np.ones(99, bool))
    with pytest.raises(UserError, match="corpus is empty"):
        build_index(Embeddings(np.zeros((0, 8), np.float32), "m", "c"), kind)
    refuses("'faiss' is not known", build_index, embeddings, "faiss")


def test_restricted_search():
    embeddings, queries = clustered(100, dim=8, queries=3)
    index = build_index(embeddings, "exact")
    candidates = [[5, 90, 17], [], [40, 41, 42, 43, 44]]
    rows, scores = index.search_within(queries, candidates, 4)
    similarity = queries @ embeddings.vectors.T
    assert rows[0].tolist() == [*sorted([5, 90, 17], key=lambda row: -similarity[0, row]), -1]
    assert rows[1].tolist() == [-1] * 4
    assert rows[2].tolist() == sorted(range(40, 45), key=lambda row: -similarity[2, row])[:4]
    np.testing.assert_allclose(scores[2], similarity[2][rows[2]], rtol=1e-5)
    assert scores[0, 3] == -np.inf
    refuses("another corpus", index.search_within, queries, [[0], [1], [100]], 2)
    refuses("one list of candidate rows", index.search_within, queries, [[0]], 2)


@pytest.mark.parametrize("kind", [*KINDS, "mesh"])
def test_an_index_is_current_until_something_differs(tmp_path, kind):
    embeddings, _ = clustered(100, dim=8)
    folder = tmp_path / "index"
    assert not is_current(folder, embeddings, kind)
    build_index(embeddings, kind).save(folder)
    assert is_current(folder, embeddings, kind)
    assert not is_current(folder, embeddings, "exact" if kind == "scann" else "scann")
    assert not is_current(folder, Embeddings(embeddings.vectors, "model-2", "corpus-1"), kind)
    assert not is_current(folder, Embeddings(embeddings.vectors, "model-1", "corpus-2"), kind)
    if kind == "scann":
        other = ScannParameters(leaves=10, leaves_to_search=5)
        assert not is_current(folder, embeddings, kind, other)


@needs_scann
def test_many_queries_are_searched_in_batches(monkeypatch):
    embeddings, queries = clustered(3000, dim=16, queries=50)
    allowed = np.arange(3000) % 3 == 0
    index = ScannIndex.build(embeddings, ScannParameters())
    whole = index.search(queries, 7, allowed)
    monkeypatch.setattr(index_room, "_QUERY_BATCH", 7)  # the last batch is one query
    for a, b in zip(index.search(queries, 7, allowed), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert index.search(queries[:0], 5)[0].shape == (0, 5)


@needs_scann
@pytest.mark.parametrize("left", [0, 4096])
def test_a_full_disk_is_told_although_scann_does_not(left, tmp_path):
    embeddings = Embeddings(np.eye(300, 8, dtype=np.float32) + 1, "m", "c")
    index = build_index(embeddings, "scann")
    with small_disk(tmp_path / "disk") as disk:
        disk.leave(left)
        with pytest.raises(OSError, match="No space left") as full:
            index.save(disk.folder / "index")
        failure = find_disk_failure(full.value)
        assert failure.sentence().startswith(f"{disk.folder / 'index'}: cannot be written")
