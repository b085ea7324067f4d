"""One shard of BM25's index on disk: the inverted index of some consecutive sources.

A posting is a source that holds a word, and how often. A word's postings lie twice:

- all of them in the order of rows, in which a source's count is found by bisection;
- those of a common word that score highest, at most a quarter, also in the order of their impact,
  in tiers. An impact is f / (f + norm), what a count f gives before the idf; see `Norms`.

Whoever searches reads the first tiers alone, and bounds what the postings behind them can add
(bm25/on_disk.py). Arrays are memory-mapped .npy files. What the shards' common statistics decide
(the number of sources, the mean length, document frequencies) is not in them, so that a shard is
finished before the next is read.
"""

import bisect
import dataclasses
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.text_analysis import Analyzer, Vocabulary
from mmqa_jax.retrieval.bm25.in_memory import Norms
from mmqa_jax.retrieval.manifest import read_manifest, replace_folder

SHARD_WHAT = "a shard of a BM25 index"
_VERB = "mmqa index --kind=bm25"
# A posting while a shard is made, in 64 bits: word, row, count, from the highest bits on.
_ROW_BITS, _COUNT_BITS = 21, 20
_LEVELS = 32  # steps of impact, 0 to 1; a tier has those postings of a word that share one
_SAMPLED = 64  # of so many sorted words one is kept in memory, where the search for a word begins
_PIECE = 1 << 22  # postings that are unpacked at a time
_ROUNDED = np.float32(1 + 1e-6)  # float32 rounds a bound that must not be too small


@dataclasses.dataclass(frozen=True)
class ShardLimits:
    """How large a shard may grow, and so how much memory making one takes."""

    rows: int = 1 << 20  # sources
    postings: int = 1 << 26  # 8 bytes each while the shard is read, twice that while it is written
    words: int = 1 << 22  # distinct ones, about 150 bytes each
    tiered: int = 256  # postings from which a word has tiers
    # Sources whose words are counted together; a shard may exceed its limits by them.
    block: int = 4096


class ShardBuilder:
    """Holds the postings of the sources that are added in memory until they are written; the
    analyzer makes words of texts."""

    def __init__(self, analyzer: Analyzer, limits: ShardLimits):
        self.limits = limits
        self.rows, self.words, self._postings = 0, 0, 0
        self._lengths: list[np.ndarray] = []
        self._blocks: list[np.ndarray] = []
        self._vocabulary = Vocabulary(analyzer)

    def is_full(self) -> bool:
        """Whether the shard is to be written before more is added."""
        return (
            self.rows >= self.limits.rows
            or self._postings >= self.limits.postings
            or len(self._vocabulary) >= self.limits.words
        )

    def add(self, texts: Sequence[str]) -> None:
        """Counts the words of further sources."""
        numbers, rows = self._vocabulary.numbered(texts)
        self._lengths.append(np.bincount(rows, minlength=len(texts)).astype(np.uint32))
        self._blocks.append(self._count(numbers, rows))
        self._postings += len(self._blocks[-1])
        self.rows += len(texts)
        self.words += len(rows)

    def _count(self, numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The postings of some sources, packed."""
        pairs = (numbers << _ROW_BITS) | (rows + self.rows)
        pairs.sort()
        first = np.flatnonzero(np.r_[True, pairs[1:] != pairs[:-1]][: len(pairs)])
        counts = np.diff(np.append(first, len(pairs)))
        if len(counts) and counts.max() >> _COUNT_BITS:
            word = self._vocabulary.names[int(pairs[first[counts.argmax()]]) >> _ROW_BITS]
            raise UserError(
                f"BM25: a source repeats the word {word[:40]!r} {counts.max():,} times, more than "
                f"{(1 << _COUNT_BITS) - 1:,}; split it into several."
            )
        return (pairs[first].astype(np.uint64) << np.uint64(_COUNT_BITS)) | counts.astype(np.uint64)

    def write(self, folder: Path, manifest: dict[str, Any], norms: tuple[float, float]) -> None:
        """Writes the shard, whole or not at all, with what else its manifest says; nothing can be
        added any more. Tiers are made by the norms' k1 and b."""
        lengths = np.concatenate(self._lengths)
        postings = np.concatenate(self._blocks)
        self._blocks.clear()
        postings.sort()
        names = self._vocabulary.names
        # In the order of code points, which is that of their bytes in UTF-8.
        order = sorted(range(len(names)), key=names.__getitem__)
        words, numbers = [names[number] for number in order], np.array(order, np.int64)
        self._vocabulary.clear()
        sizes = np.zeros(len(words), np.int64)
        for piece in _pieces(postings):
            sizes += np.bincount(_word(piece), minlength=len(words))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        mean = max(self.words, 1) / self.rows
        facts = {"rows": self.rows, "words": self.words, "mean_length": mean}
        with replace_folder(folder, {**manifest, "what": SHARD_WHAT, **facts}) as filled:
            joined = "".join(words)
            (filled / "words.bin").write_bytes(joined.encode("utf-8", "surrogatepass"))
            size = len if joined.isascii() else _bytes_of
            ends = np.cumsum(np.fromiter(map(size, words), np.int64, len(words)))
            np.save(filled / "word_ends.npy", ends.astype(np.uint32))
            np.save(filled / "word_numbers.npy", numbers.astype(np.uint32))
            np.save(filled / "lengths.npy", lengths)
            np.save(filled / "starts.npy", starts.astype(np.uint32))
            most = max((int(_counts(piece).max()) for piece in _pieces(postings)), default=0)
            rows, counts = map(_row, _pieces(postings)), map(_counts, _pieces(postings))
            _write_postings(filled, "", rows, counts, most)
            _write_tiers(filled, postings, starts, lengths, Norms(*norms, mean), self.limits.tiered)


def _bytes_of(word: str) -> int:
    return len(word.encode("utf-8", "surrogatepass"))


def _word(postings: np.ndarray) -> np.ndarray:
    return (postings >> np.uint64(_ROW_BITS + _COUNT_BITS)).astype(np.int64)


def _row(postings: np.ndarray) -> np.ndarray:
    return ((postings >> np.uint64(_COUNT_BITS)) & np.uint64((1 << _ROW_BITS) - 1)).astype(
        np.uint32
    )


def _counts(postings: np.ndarray) -> np.ndarray:
    return (postings & np.uint64((1 << _COUNT_BITS) - 1)).astype(np.uint32)


def _pieces(postings: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(postings), _PIECE):
        yield postings[start : start + _PIECE]


def _write_postings(
    folder: Path, name: str, rows: Iterable[np.ndarray], counts: Iterable[np.ndarray], most: int
) -> None:
    """Rows and counts, piece by piece, as NAMErows.npy and NAMEcounts.npy.

    A count has a byte where all are below 256, as those of passages are, else four.
    """
    _write_column(folder / f"{name}rows.npy", rows, np.uint32)
    _write_column(folder / f"{name}counts.npy", counts, np.uint8 if most < 256 else np.uint32)


def _write_column(path: Path, pieces: Iterable[np.ndarray], dtype: type) -> None:
    size = 0
    with open(path, "wb") as file:
        for again in (False, True):  # the header says how much follows, and has one length for all
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (size,)}
            np.lib.format.write_array_header_1_0(file, header)
            if again:
                return
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, dtype).data)
                size += len(piece)
            file.seek(0)


def _write_tiers(
    folder: Path,
    postings: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    norms: Norms,
    tiered: int,
) -> None:
    """The best postings of common words by impact, and where each word's tiers begin and end.

    `tier_starts[word]` is the first tier of a word. A tier's end counts from the beginning of
    top_rows.npy; the last tier of a word is all of its other postings and has no end of its own.
    """
    norm_of = norms.of(lengths).astype(np.float32)
    common = np.flatnonzero(np.diff(starts) >= tiered)
    numbers, impacts, ends, best = [], [], [], []
    done = 0
    for group in _groups(common, starts):
        # Whole words, in pieces that fit memory.
        group_postings = np.concatenate(
            [postings[starts[word] : starts[word + 1]] for word in group]
        )
        sizes = starts[group + 1] - starts[group]
        word = np.repeat(np.arange(len(group)), sizes)
        rows, counts = _row(group_postings), _counts(group_postings)
        count = counts.astype(np.float32)
        impact = count / (count + norm_of[rows])
        level = np.minimum((impact * _LEVELS).astype(np.int64), _LEVELS - 1)
        per_level = np.bincount(word * _LEVELS + level, minlength=len(group) * _LEVELS)
        above = np.cumsum(per_level.reshape(-1, _LEVELS)[:, ::-1], axis=1)[:, ::-1]
        cut = (above > sizes[:, None] // 4).sum(axis=1)  # the lowest level of a tier of its own
        top = level >= cut[word]
        tier = word * (_LEVELS + 1) + np.where(top, _LEVELS - 1 - level, _LEVELS)
        highest = np.zeros(len(group) * (_LEVELS + 1), np.float32)
        np.maximum.at(highest, tier, impact)
        filled = np.bincount(tier, minlength=len(highest))
        filled_top = np.where(np.arange(len(highest)) % (_LEVELS + 1) == _LEVELS, 0, filled)
        filled_tiers = np.flatnonzero(filled)
        numbers.append(group[filled_tiers // (_LEVELS + 1)])
        impacts.append(np.minimum(highest[filled_tiers] * _ROUNDED, 1))
        ends.append(done + np.cumsum(filled_top)[filled_tiers])
        order = np.argsort(tier[top], kind="stable")  # rows of a tier stay ascending
        best.append((rows[top][order], counts[top][order]))
        done += len(order)
    of_word = np.concatenate([*numbers, np.zeros(0, np.int64)])
    per_word = np.bincount(of_word, minlength=len(starts) - 1)
    np.save(folder / "tier_starts.npy", np.concatenate([[0], np.cumsum(per_word)]).astype("u4"))
    np.save(folder / "tier_impacts.npy", np.concatenate([*impacts, np.zeros(0, np.float32)]))
    np.save(folder / "tier_ends.npy", np.concatenate([*ends, np.zeros(0, np.int64)]).astype("u4"))
    most = max((int(counts.max()) for _, counts in best if len(counts)), default=0)
    _write_postings(
        folder, "top_", (rows for rows, _ in best), (counts for _, counts in best), most
    )


def _groups(common: np.ndarray, starts: np.ndarray) -> Iterator[np.ndarray]:
    """Words in runs of about `_PIECE` postings, each at least one word."""
    if len(common):
        sizes = np.cumsum(starts[common + 1] - starts[common])
        yield from np.split(common, np.flatnonzero(np.diff(sizes // _PIECE)) + 1)


class Shard:
    """A written shard, memory-mapped.

    Attributes:
      job: hash of the index's job that it was written for.
      start: row of its first source in the index.
    """

    def __init__(self, folder: Path):
        manifest = read_manifest(folder, SHARD_WHAT, _VERB)
        self.job, self.start = manifest.get("job"), manifest.get("start")
        self.rows: int = manifest["rows"]  # how many sources it has; they are numbered from 0 here
        self.mean_length: float = manifest["mean_length"]
        self.lengths = _mapped(folder / "lengths.npy")  # of them, in words
        self._words = _SortedWords(folder)
        self._starts = _mapped(folder / "starts.npy")
        self._rows, self._counts = _mapped(folder / "rows.npy"), _mapped(folder / "counts.npy")
        self._top_rows = _mapped(folder / "top_rows.npy")
        self._top_counts = _mapped(folder / "top_counts.npy")
        self._tier_starts = _mapped(folder / "tier_starts.npy")
        self._tier_impacts = _mapped(folder / "tier_impacts.npy")
        self._tier_ends = _mapped(folder / "tier_ends.npy")

    def release(self) -> None:
        """Lets go of the pages that were read; they stay in the system's cache.

        Else all shards' pages would count as this process's memory.
        """
        large = (self._rows, self._counts, self._top_rows, self._top_counts)
        for array in large:
            array.base.base.madvise(mmap.MADV_DONTNEED)

    def number(self, word: str) -> int:
        """The word's number in this shard, -1 if no source has it."""
        return self._words.number(word)

    def frequency(self, number: int) -> int:
        """How many sources have a word."""
        return int(self._starts[number + 1]) - int(self._starts[number])

    def postings(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """All sources that have a word, ascending, and their counts."""
        span = slice(int(self._starts[number]), int(self._starts[number + 1]))
        return self._rows[span], self._counts[span]

    def tiers(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tiers of several words: whose each is, its highest impact and its postings.

        The last tier of a word is all postings that are not in the others; a word without tiers
        has one of impact 1.
        """
        first, last = (self._tier_starts[at].astype(np.int64) for at in (numbers, numbers + 1))
        per_word = np.maximum(last - first, 1)
        words = np.repeat(np.arange(len(numbers)), per_word)
        begin = np.cumsum(per_word) - per_word
        tiered = np.flatnonzero((last > first)[words])
        first = first[words[tiered]]
        at = first + tiered - begin[words[tiered]]
        impacts = np.ones(len(words), np.float32)
        impacts[tiered] = self._tier_impacts[at]
        ends = np.zeros(len(words), np.int64)
        # Ends count from the first word's tiers on: this word's begin where the one's before end.
        ends[tiered] = self._tier_ends[at] - np.where(first > 0, self._tier_ends[first - 1], 0)
        ends[begin + per_word - 1] = self._starts[numbers + 1] - self._starts[numbers]
        sizes = np.diff(ends, prepend=0)
        sizes[begin] = ends[begin]
        return words, impacts, sizes

    def top_postings(self, number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `size` postings by impact, of a word's tiers but the last, and their counts."""
        start = self._top_start(int(self._tier_starts[number]))
        span = slice(start, start + size)
        return self._top_rows[span], self._top_counts[span]

    def counts(self, number: int, rows: np.ndarray) -> np.ndarray:
        """How often each of some sources has a word."""
        holders, counts = self.postings(number)
        at = np.minimum(np.searchsorted(holders, rows), len(holders) - 1)
        return np.where(holders[at] == rows, counts[at], 0)

    def _top_start(self, tier: int) -> int:
        """Where the tiers of a word begin that starts with this one: where those before it end."""
        return int(self._tier_ends[tier - 1]) if tier else 0


class _SortedWords:
    """The words of a shard, sorted by their bytes, to be found by bisection."""

    def __init__(self, folder: Path):
        with open(folder / "words.bin", "rb") as file:
            empty = not (folder / "words.bin").stat().st_size
            self._bytes = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = _mapped(folder / "word_ends.npy")
        self._numbers = _mapped(folder / "word_numbers.npy")
        self._sampled = [self[place] for place in range(0, len(self), _SAMPLED)]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> bytes:
        start = int(self._ends[place - 1]) if place else 0
        return self._bytes[start : int(self._ends[place])]

    def number(self, word: str) -> int:
        wanted = word.encode("utf-8", "surrogatepass")
        first = max(bisect.bisect_right(self._sampled, wanted) - 1, 0) * _SAMPLED
        place = bisect.bisect_left(self, wanted, first, min(first + _SAMPLED, len(self)))
        is_there = place < len(self) and self[place] == wanted
        return int(self._numbers[place]) if is_there else -1


def _mapped(path: Path) -> np.ndarray:
    """A memory-mapped array, as a plain one: slices of np.memmap cost ten times as much."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
