"""Stored vectors of tokens, and search by MaxSim over them."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

from mmqa_jax.core.errors import UserError
from mmqa_jax.retrieval import embeddings
from mmqa_jax.retrieval.embeddings import (
    EmbeddedRows,
    Embeddings,
    EncodedTokens,
    TokenFormat,
    TokenVectors,
    open_embeddings,
    pool_tokens,
    write_embeddings,
)
from mmqa_jax.retrieval.indexes import index as index_room
from mmqa_jax.retrieval.indexes import max_sim
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.index import build_index, is_current, load_index
from mmqa_jax.retrieval.indexes.max_sim import MaxSimIndex, pack_queries
from tests.refusals import refuses

pytestmark = pytest.mark.slow

DIM, FIXED = 24, 6
ERROR = {"float16": 3e-4, "int8": 3e-3}


def unit(rng, *shape):
    vectors = rng.normal(size=shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def sources(rng, rows=150):
    """Tokens of sources, one of them without any."""
    counts = [0, *rng.integers(1, 90, rows - 1)]
    return [unit(rng, count, DIM) for count in counts]


def stored(tokens, form):
    ends = np.cumsum(list(map(len, tokens)))
    return TokenVectors(form.encode(np.concatenate(tokens)), ends, DIM, form)


@pytest.mark.parametrize("pool", [1, 2, 5, 1000])
def test_pooling_is_that_of_sentence_transformers(pool):
    from sentence_transformers.multi_vector_encoder.modules.token_pooling import (
        HierarchicalTokenPooling,
    )

    theirs = HierarchicalTokenPooling(pool)
    for vectors in (unit(np.random.default_rng(3), 61, DIM), unit(np.random.default_rng(4), 2, 3)):
        want = theirs.pool_one(torch.from_numpy(vectors)).numpy()
        np.testing.assert_allclose(pool_tokens(vectors, pool), want, atol=1e-6)


@pytest.mark.parametrize("precision", ERROR)
def test_stored_vectors_are_near(precision):
    form, vectors = TokenFormat(precision), unit(np.random.default_rng(0), 40, DIM)
    codes = form.encode(vectors)
    assert codes.shape == (40, form.width(DIM))
    decoded = np.asarray(max_sim.decoded(form, codes, DIM))
    np.testing.assert_allclose(decoded, vectors, atol=ERROR[precision])
    assert np.abs(decoded - vectors).max() > ERROR[precision] / 20  # they are rounded


def test_binary_vectors_are_signs():
    vectors = unit(np.random.default_rng(0), 40, DIM)
    form = TokenFormat("binary")
    decoded = max_sim.decoded(form, form.encode(vectors), DIM)
    np.testing.assert_allclose(decoded, np.where(vectors > 0, 1, -1) / np.sqrt(DIM), rtol=1e-6)


@pytest.mark.parametrize("precision", ["float16", "int8", "binary"])
@pytest.mark.parametrize(("mean", "one_cpu"), [(False, True), (True, True), (False, False)])
def test_every_source_by_max_sim(precision, mean, one_cpu, monkeypatch):
    """As one CPU computes it, and as other devices do."""
    monkeypatch.setattr(max_sim, "_is_one_cpu", lambda: one_cpu)
    rng = np.random.default_rng(1)
    tokens, form = sources(rng), TokenFormat(precision)
    vectors = stored(tokens, form)
    queries = [unit(rng, count, DIM) for count in (3, 17, 1)]
    index = MaxSimIndex(
        ExactIndex(Embeddings(unit(rng, 150, FIXED), "m", "c")), vectors, exhaustive=True
    )
    packed = pack_queries(unit(rng, 3, FIXED), queries, mean)
    want = np.full((3, 150), -np.inf)
    for row, of_source in enumerate(tokens):
        if len(of_source):
            decoded = np.asarray(max_sim.decoded(form, form.encode(of_source), DIM))
            for number, query in enumerate(queries):
                best = (query @ decoded.T).max(1)
                want[number, row] = best.mean() if mean else best.sum()
    allowed = rng.random(150) < 0.5
    for mask in (None, allowed):
        rows, scores = index.search(packed, 12, mask)
        ranked = want if mask is None else np.where(mask, want, -np.inf)
        order = np.argsort(-ranked, axis=1, kind="stable")[:, :12]
        np.testing.assert_array_equal(rows, order)
        np.testing.assert_allclose(scores, np.take_along_axis(ranked, order, 1), rtol=1e-5)
    own = [[5, 9, 0, 77], [], [149]]
    rows, scores = index.search_within(packed, own, 5)
    assert rows[0].tolist() == [*sorted(own[0], key=lambda row: -want[0, row]), -1]
    assert rows[1:].tolist() == [[-1] * 5, [149] + [-1] * 4]
    np.testing.assert_allclose(scores[2, 0], want[2, 149], rtol=1e-5)


def test_a_tpu_scores_in_bfloat16_and_the_best_again(monkeypatch):
    """Its kernel is run by Python here; four times as many as are asked for are scored again."""
    rng = np.random.default_rng(8)
    tokens, queries = sources(rng, 40), [unit(rng, count, DIM) for count in (9, 30)]
    fixed = Embeddings(unit(rng, 40, FIXED), "m", "c")
    index = MaxSimIndex(ExactIndex(fixed), stored(tokens, TokenFormat()), exhaustive=True)
    packed = pack_queries(unit(rng, 2, FIXED), queries, mean=False)
    want = index.search(packed, 40)
    rounded = functools.partial(max_sim._rounded_scores, interpret=True)
    monkeypatch.setattr(max_sim, "platform", lambda: "tpu")
    monkeypatch.setattr(max_sim, "_rounded_scores", rounded)
    rows, scores = index.search(packed, 10)
    np.testing.assert_array_equal(rows, want[0][:, :10])
    np.testing.assert_allclose(scores, want[1][:, :10], rtol=1e-6)
    few = np.arange(40) % 9 == 0
    assert {*index.search(packed, 5, few)[0].flat} == {*np.flatnonzero(few)}
    for _, codes, counts in index._all_blocks():
        block = rounded(index._mesh, index._split(packed)[1], codes, counts, TokenFormat(), DIM)
        exact = max_sim._score(index._split(packed)[1], codes, counts, TokenFormat(), DIM)
        np.testing.assert_allclose(block, exact, rtol=2e-2)
        assert np.abs(np.asarray(block)[:, counts > 0] - exact[:, counts > 0]).max() > 1e-4


def test_candidates_of_another_index_are_ranked_by_max_sim():
    """What nobody stored is encoded when it is a candidate, and once."""
    rng = np.random.default_rng(2)
    tokens = [unit(rng, count, DIM) for count in rng.integers(1, 9, 300)]
    fixed = Embeddings(unit(rng, 300, FIXED), "m", "c")
    queries = pack_queries(unit(rng, 2, FIXED), [unit(rng, 4, DIM)] * 2, mean=False)
    encoded = []

    def encode(rows):
        encoded.extend(rows)
        return [tokens[row] for row in rows]

    index = MaxSimIndex(ExactIndex(fixed), EncodedTokens(encode, DIM))
    rows, scores = index.search(queries, 10)
    candidates, _ = ExactIndex(fixed).search(queries[:, :FIXED], 32)
    assert sorted(encoded) == np.unique(candidates).tolist()
    want = index.search_within(queries, candidates, 10)
    np.testing.assert_array_equal(rows, want[0])
    np.testing.assert_array_equal(scores, want[1])
    assert len(encoded) == len(set(encoded))
    kept = MaxSimIndex(ExactIndex(fixed), stored(tokens, TokenFormat("float16")))
    np.testing.assert_array_equal(kept.search_within(queries, candidates, 10)[0], want[0])


def test_queries_have_few_lengths():
    """A program is compiled for each."""
    rng = np.random.default_rng(6)
    widths = {
        pack_queries(unit(rng, 1, FIXED), [unit(rng, count, DIM)], mean=False).shape[1]
        for count in (1, 3, 31, 32)
    }
    assert widths == {FIXED + 32 * DIM}


def test_few_encoded_sources_stay(monkeypatch):
    monkeypatch.setattr(embeddings, "_HELD", 5)
    encoded = []

    def encode(rows):
        encoded.extend(rows)
        return [np.full((1, DIM), row, np.float32) for row in rows]

    tokens = EncodedTokens(encode, DIM)
    for rows in ([0, 1, 2], range(3, 9), [8], [0]):
        codes = tokens.rows(rows)
        assert [int(x.view("<f2")[0, 0]) for x in codes] == [*rows]
    assert encoded == [*range(9), 0]


class Killed(Exception):
    pass


def write(folder, *, form=TokenFormat(), stop_at=None, tokens=True):  # noqa: B008
    rng = np.random.default_rng(5)
    of_sources = sources(rng, 20)
    fixed = unit(rng, 20, FIXED)

    def embed_rows(rows):
        if stop_at is not None and rows.start >= stop_at:
            raise Killed
        if not tokens:
            return fixed[rows.start : rows.stop]
        part = of_sources[rows.start : rows.stop]
        counts = np.array(list(map(len, part)), np.int64)
        return EmbeddedRows(
            fixed[rows.start : rows.stop], form.encode(np.concatenate(part)), counts
        )

    stored_tokens = (form, DIM) if tokens else None
    embeddings = write_embeddings(
        folder,
        embed_rows,
        rows=20,
        dim=FIXED,
        model_fingerprint="m",
        corpus_fingerprint="c",
        tokens=stored_tokens,
        shard_rows=6,
    )
    return embeddings, of_sources


def test_a_killed_job_goes_on(tmp_path):
    whole, tokens = write(tmp_path / "whole")
    with pytest.raises(Killed):
        write(tmp_path / "killed", stop_at=12)
    (shard, *_) = sorted((tmp_path / "killed").glob("shards-*/00000.jsonl"))
    shard.write_bytes(shard.read_bytes()[:-30])  # a damaged shard is computed again
    again, _ = write(tmp_path / "killed")
    np.testing.assert_array_equal(again.tokens.codes, whole.tokens.codes)
    np.testing.assert_array_equal(again.tokens.ends, np.cumsum(list(map(len, tokens))))
    np.testing.assert_array_equal(again.vectors, whole.vectors)
    form = whole.tokens.format
    for row, codes in zip((7, 0, 19), whole.tokens.rows([7, 0, 19]), strict=True):
        np.testing.assert_array_equal(codes, form.encode(tokens[row]))
    build_index(whole, "maxsim").save(tmp_path / "index")
    assert load_index(tmp_path / "index", whole).is_exact


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokens.npy").write_bytes(b"x"), r"tokens\.npy: missing or damaged"),
        (lambda f: flip(f / "tokens.npy"), r"tokens\.npy is damaged"),
        (lambda f: (f / "token_ends.npy").unlink(), r"token_ends\.npy: missing or damaged"),
        (lambda f: claim(f, "precision", "int4"), "--tokens=int4: is no precision"),
        (lambda f: claim(f, "number", 5), "does not fit"),
        (lambda f: claim(f, "size", 5), "a precision, pool, dim and number"),
    ],
)
def test_damaged_files_are_refused(damage, message, tmp_path):
    write(tmp_path)
    damage(tmp_path)
    refuses(message, open_embeddings, tmp_path)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def claim(folder, key, value):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokens"][key] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("other", [{"form": TokenFormat("binary")}, {"tokens": False}])
def test_a_job_with_other_tokens_is_refused(other, tmp_path):
    write(tmp_path)
    refuses("holds embeddings with tokens", write, tmp_path, **other)


def test_an_index_needs_tokens(tmp_path):
    embeddings, _ = write(tmp_path, tokens=False)
    refuses("--kind=maxsim needs the vectors of tokens", build_index, embeddings, "maxsim")
    with pytest.raises(UserError, match="index: the queries: row 0 of 1 is not finite"):
        MaxSimIndex(
            ExactIndex(embeddings), stored(sources(np.random.default_rng(0), 20), TokenFormat())
        ).search(np.full((1, FIXED + DIM), np.nan, np.float32), 1)
    with pytest.raises(UserError, match=r"queries of shape \(1, 9\)"):
        MaxSimIndex(
            ExactIndex(embeddings), stored(sources(np.random.default_rng(0), 20), TokenFormat())
        ).search(np.zeros((1, 9), np.float32), 1)


@pytest.mark.parametrize("given", [{"precision": "int4"}, {"pool": 0}])
def test_formats_that_are_refused(given):
    refuses(r"--(tokens=int4|pool=0)", TokenFormat, **given)


def test_sources_of_near_tokens_are_candidates(tmp_path, monkeypatch):
    rng = np.random.default_rng(7)
    topics = unit(rng, 40, DIM)  # a source's tokens are near to some of them
    tokens = [
        unit(rng, count, DIM) / 4 + topics[rng.integers(0, 40, count)] for count in [0, *[6] * 799]
    ]
    tokens = [vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) for vectors in tokens]
    fixed = Embeddings(unit(rng, 800, FIXED), "m", "c", stored(tokens, TokenFormat()))
    asked = [topics[rng.integers(0, 40, 5)] for _ in range(20)]
    packed = pack_queries(unit(rng, 20, FIXED), asked, mean=False)
    monkeypatch.setattr(index_room, "_MANY", 500)
    monkeypatch.setattr(max_sim, "_CANDIDATES", 200)
    made = build_index(fixed)
    assert made.kind == "tokens"
    best = build_index(fixed, "maxsim").search(packed, 10)[0]
    found, scores = made.search(packed, 10)
    assert np.mean([np.isin(*pair).mean() for pair in zip(found, best, strict=True)]) > 0.9
    made.save(tmp_path)
    assert is_current(tmp_path, fixed)
    assert not is_current(tmp_path, fixed, "maxsim")
    np.testing.assert_array_equal(load_index(tmp_path, fixed).search(packed, 10)[0], found)
    few = np.arange(800) % 100 == 3  # too few are hit: all of them are ranked
    assert {*made.search(packed, 8, few)[0].flat} == {*np.flatnonzero(few)}
    within = made.search_within(packed, found, 10)
    np.testing.assert_array_equal(within[0], found)
    np.testing.assert_array_equal(within[1], scores)
    refuses(
        "--kind=tokens needs the vectors",
        build_index,
        Embeddings(fixed.vectors, "m", "c"),
        "tokens",
    )
