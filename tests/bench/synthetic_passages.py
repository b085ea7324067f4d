"""Generated passages in the format and of the size of DPR's psgs_w100.tsv.

A passage has 100 words. The word of rank k is drawn with the probability ln(1 + 1 / k) / ln(V + 1) of
V words, Zipf's law but for the first few. An article has 1 to 12 passages, 6.5 on average, as the 21,015,324
passages of 3.2 million articles have.

A passage depends on its number and the seed alone: a longer file begins with the shorter one.

    .venv/bin/python -c "
    from pathlib import Path
    from tests.bench.synthetic_passages import write_passages
    write_passages(Path('psgs_w100.tsv'), 1_000_000)"
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.bench.retrieval_data import vocabulary

DPR_PASSAGES = 21_015_324
WORDS = 100
_VOCABULARY = 1_000_000
_MOST_IN_ARTICLE = 12
_BLOCK = 20_000  # passages that are drawn at a time
_HEADER = b"id\ttext\ttitle\n"


def write_passages(path: Path, count: int, seed: int = 0) -> None:
    """Writes `count` passages as DPR's file has them: header, then id, quoted text and title.

    About 0.63 GB a million. Ids count from 1.
    """
    with open(path, "wb") as file:
        file.write(_HEADER)
        for block in _blocks(count, seed):
            file.write(block)


def _blocks(count: int, seed: int) -> Iterator[bytes]:
    """The lines of the file, some thousands at a time."""
    words = np.array([f"{word} ".encode() for word in vocabulary(_VOCABULARY)])
    width = words.dtype.itemsize
    bytes_of = words.view(np.uint8).reshape(len(words), width)
    lengths = np.count_nonzero(bytes_of, axis=1)
    for number, start in enumerate(range(0, count, _BLOCK)):
        rng = np.random.default_rng([seed, number])
        # All of a block is drawn, so that the last block of a shorter file begins as a whole one.
        ranks = _zipf(rng, _BLOCK * WORDS)
        titles = _titles(rng, words, number)
        drawn = bytes_of[ranks]
        text = drawn[drawn > 0].tobytes()
        ends = np.cumsum(lengths[ranks]).reshape(_BLOCK, WORDS)[:, -1].tolist()
        starts = [0, *ends[:-1]]
        rows = range(min(_BLOCK, count - start))
        yield b"".join(
            b'%d\t"%b"\t%b\n' % (start + row + 1, text[starts[row] : ends[row] - 1], titles[row])
            for row in rows
        )


def _zipf(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ranks from 0, log-uniform: the inverse of the distribution function, without a table."""
    drawn = np.exp(rng.random(count, np.float32) * np.float32(np.log(_VOCABULARY + 1)))
    return np.minimum(drawn.astype(np.int32), _VOCABULARY) - 1


def _titles(rng: np.random.Generator, words: np.ndarray, number: int) -> list[bytes]:
    """The titles of a block's passages: two words and the article's number, which makes it unique."""
    sizes = rng.integers(1, _MOST_IN_ARTICLE + 1, _BLOCK)
    articles = np.repeat(np.arange(_BLOCK), sizes)[:_BLOCK].tolist()
    ranks = _zipf(rng, 2 * _BLOCK).reshape(_BLOCK, 2)
    names = [
        b"%b%b%d" % (first, second, number * _BLOCK + article)
        for article, (first, second) in enumerate(words[ranks].tolist()[: articles[-1] + 1])
    ]
    return [names[article].capitalize() for article in articles]
