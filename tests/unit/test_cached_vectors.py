"""Kept embeddings: found by content, kept block by block."""

import numpy as np
import pytest

from mmqa_jax.retrieval.embeddings import cached_vectors

TEXTS = [f"text {n:0{1 + n % 5}}" for n in range(50)]


def vector(text: str) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).normal(size=3).astype(np.float32)


class Embedding:
    def __init__(self, calls: int = 1_000):
        self.left, self.rows = calls, []

    def __call__(self, rows):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.rows += rows.tolist()
        return np.stack([vector(TEXTS[row]) for row in rows])


def test_an_interrupted_run_continues(tmp_path):
    first, second, third = Embedding(calls=3), Embedding(), Embedding(calls=0)
    with pytest.raises(KeyboardInterrupt):
        cached_vectors(tmp_path, "model", TEXTS, first, block=8)
    found = cached_vectors(tmp_path, "model", TEXTS, second, block=8)
    np.testing.assert_array_equal(found, [vector(text) for text in TEXTS])
    assert len(first.rows) == 24
    assert sorted(first.rows + second.rows) == list(range(len(TEXTS)))
    again = cached_vectors(tmp_path, "model", TEXTS, third, block=8)
    np.testing.assert_array_equal(again, found)


def test_a_damaged_block_is_computed_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        cached_vectors(tmp_path, "model", TEXTS, Embedding(calls=3), block=8)
    (file,) = tmp_path.glob("*/[0-9]*.jsonl")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    second = Embedding()
    found = cached_vectors(tmp_path, "model", TEXTS, second, block=8)
    np.testing.assert_array_equal(found, [vector(text) for text in TEXTS])
    assert len(second.rows) == len(TEXTS) - 16


def test_texts_of_similar_length_are_embedded_together(tmp_path):
    embedding = Embedding()
    cached_vectors(tmp_path, "model", TEXTS, embedding, block=8)
    lengths = [len(TEXTS[row]) for row in embedding.rows]
    assert lengths == sorted(lengths)


def test_few_are_embedded_as_they_come(tmp_path):
    embedding = Embedding()
    cached_vectors(tmp_path, "model", TEXTS, embedding)
    assert embedding.rows == list(range(len(TEXTS)))


def test_other_models_and_contents_are_kept_apart(tmp_path):
    cached_vectors(tmp_path, "model", TEXTS, Embedding())
    for fingerprint, contents in (("other", TEXTS), ("model", TEXTS[::-1]), ("model", TEXTS[1:])):
        embedding = Embedding()
        cached_vectors(tmp_path, fingerprint, contents, embedding)
        assert len(embedding.rows) == len(contents)


@pytest.mark.parametrize(("count", "shown"), [(1_999, False), (2_000, True)])
def test_progress_of_many(tmp_path, capsys, monkeypatch, count, shown):
    """One for all blocks; what an earlier run kept counts."""
    monkeypatch.delenv("MMQA_PROGRESS", raising=False)
    texts = [str(n) for n in range(count)]

    def embed(rows):
        if 1_500 in rows and not kept:
            raise KeyboardInterrupt
        return np.zeros((len(rows), 2), np.float32)

    kept = []
    with pytest.raises(KeyboardInterrupt):
        cached_vectors(tmp_path, "model", texts, embed, unit="pictures", block=500)
    capsys.readouterr()
    kept.append(True)
    cached_vectors(tmp_path, "model", texts, embed, unit="pictures", block=500)
    said = f"Embedding pictures: {count} pictures (1500 of them earlier) in 0:00"
    assert (said in capsys.readouterr().err) == shown


def test_nothing_to_embed(tmp_path):
    found = cached_vectors(tmp_path, "model", [], lambda rows: np.zeros((len(rows), 2), np.float32))
    assert found.shape == (0, 2)


def test_only_the_groups_that_change_are_computed_again(tmp_path):
    groups = [f"file {n // 20}" for n in range(len(TEXTS))]
    first, second = Embedding(), Embedding()
    found = cached_vectors(tmp_path, "model", TEXTS, first, block=30, groups=groups)
    np.testing.assert_array_equal(found, [vector(text) for text in TEXTS])
    assert first.left == 1_000 - 2  # groups of 20, 20 and 10: two together, and the last one

    changed = [*TEXTS[:25], "another", *TEXTS[26:]]

    def embed(rows):
        second.rows += rows.tolist()
        return np.stack([vector(changed[row]) for row in rows])

    found = cached_vectors(tmp_path, "model", changed, embed, block=30, groups=groups)
    np.testing.assert_array_equal(found, [vector(text) for text in changed])
    assert second.rows == list(range(20, 40))
