"""BM25 from disk: for collections whose inverted index outgrows memory.

`build_bm25` reads the sources once and writes a shard (bm25/shard.py) of each million or so;
killed, it goes on behind the last whole one. `DiskBM25` finds in the memory-mapped shards what
`BM25` finds in memory: the same rows with the same scores to the bit, since the statistics are
those of all shards and the terms of a score are computed and added in bm25s's order.

It does not read what cannot matter (MaxScore: Turtle and Flood, "Query evaluation: strategies and
optimizations", 1995, here over tiers of impact). The k-th best score so far is a floor. Of each
word only so many tiers are read that what all others could add together stays below it. A source
that is in none of those read cannot rise above the floor; of the others those whose bound does are
looked up, word by word, in the postings that were not read. Some shards are searched as one
(`ShardGroup`), all queries in one group before the next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from mmqa_jax.core.checkpoints.checksums import check_sums, find_damage, read_sealed, write_sealed
from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.locks import alone
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.data.text_analysis import VERSION, Analyzer
from mmqa_jax.retrieval.bm25.in_memory import BM25, Norms, idf_of, word_scores
from mmqa_jax.retrieval.bm25.shard import SHARD_WHAT, Shard, ShardBuilder, ShardLimits
from mmqa_jax.retrieval.manifest import MANIFEST, check_manifest, read_manifest
from mmqa_jax.retrieval.rankings import candidate_rows, check_top_k

_WHAT = "a BM25 index"
_VERB = "mmqa index --kind=bm25"
_ANALYZER = Analyzer()
_REMEDY = f"delete the folder and run `{_VERB}` again"
_BLOCK_CHARACTERS = 1 << 22  # that are split into words at a time
_SLACK = np.float32(1 - 1e-4)  # sums of float32 in another order are as far apart at most
_TOGETHER = 5  # shards of a group
_FIRST = 1 << 14  # postings of a word that are read for a first floor at most
_DENSE = 16  # sources per posting read, below which all sums of a shard are looked through


def build_bm25(
    folder: Path,
    texts_from: Callable[[int], Iterable[str]],
    rows: int,
    corpus_fingerprint: str,
    *,
    k1: float = 1.5,
    b: float = 0.75,
    analyzer: Analyzer = _ANALYZER,
    limits: ShardLimits | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Writes an index, or what is missing of it.

    Two shards are in memory at most, one that is read and one that is sorted and written.

    Args:
      folder: of the index; an index of another corpus in it is replaced when this one is whole.
      texts_from: the texts of all sources from a row on, one a source.
      rows: how many sources there are.
      k1, b, analyzer: as BM25.
      on_progress: called with (rows done, rows).

    Returns:
      Whether there was something to do.
    """
    if rows < 1:
        raise UserError("BM25: the corpus is empty, at least one source was expected.")
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "what": _WHAT,
        "rows": rows,
        "corpus_fingerprint": corpus_fingerprint,
        "k1": k1,
        "b": b,
        "analyzer": analyzer.to_json(),
    }
    with alone(folder / ".lock"):
        if _is_complete(folder, job):
            return False
        place, limits = _shards(folder, job), limits or ShardLimits()
        shards = _build_shards(place, job, texts_from, analyzer, limits, on_progress)
        if not sum(shard["words"] for shard in shards):
            raise UserError(
                f"BM25: none of the {rows} sources contains a word; check their text fields."
            )
        write_sealed(folder / MANIFEST, {**job, "shards": shards})
        for old in folder.glob("shards-*"):
            if old != _shards(folder, job):
                with contextlib.suppress(OSError):
                    remove_tree(old)
    return True


def _build_shards(
    folder: Path,
    job: dict[str, Any],
    texts_from: Callable[[int], Iterable[str]],
    analyzer: Analyzer,
    limits: ShardLimits,
    on_progress: Callable[[int, int], None] | None,
) -> list[dict[str, int]]:
    """Writes the missing shards; returns how many rows and words each has."""
    shards = list(_whole_shards(folder, job))
    done, rows = sum(shard["rows"] for shard in shards), job["rows"]
    blocks = _blocks(itertools.islice(texts_from(done), rows - done), limits.block)
    with ThreadPoolExecutor(1) as writer:
        writing: Future | None = None
        builder = ShardBuilder(analyzer, limits)
        for block in blocks:
            builder.add(block)
            done += len(block)
            if builder.is_full() or done == rows:
                if writing is not None:
                    writing.result()
                shard = {"rows": builder.rows, "words": builder.words}
                about = {"job": _name(job), "start": done - builder.rows}
                place = folder / f"{len(shards):05d}"
                writing = writer.submit(builder.write, place, about, (job["k1"], job["b"]))
                shards.append(shard)
                builder = ShardBuilder(analyzer, limits)
            if on_progress is not None:
                on_progress(done, rows)
        if writing is not None:
            writing.result()
    if done != rows:
        raise UserError(f"BM25: the corpus ended after {done} of {rows} sources; prepare it again.")
    return shards


def _blocks(texts: Iterable[str], most: int) -> Iterator[list[str]]:
    """The texts in lists of bounded size, in texts and in characters."""
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if len(block) == most or size >= _BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _whole_shards(folder: Path, job: dict[str, Any]) -> Iterator[dict[str, int]]:
    """The shards that are there, up to the first that is missing or damaged."""
    start = 0
    for number in itertools.count():
        place = folder / f"{number:05d}"
        try:
            manifest = read_manifest(place, SHARD_WHAT, _VERB)
        except UserError:
            return
        same = (manifest.get("job"), manifest.get("start")) == (_name(job), start)
        if not same or find_damage(place) is not None:
            return
        yield {"rows": manifest["rows"], "words": manifest["words"]}
        start += manifest["rows"]


def _is_complete(folder: Path, job: dict[str, Any]) -> bool:
    try:
        manifest = read_sealed(folder / MANIFEST, _REMEDY)
    except UserError:
        return False
    shards = manifest.pop("shards", None)
    return manifest == job and list(_whole_shards(_shards(folder, job), job)) == shards


def _name(job: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(job, sort_keys=True).encode(), digest_size=8).hexdigest()


def _shards(folder: Path, job: dict[str, Any]) -> Path:
    return folder / f"shards-{_name(job)}"


@dataclasses.dataclass(frozen=True)
class _Query:
    """A query's words, those that a source has."""

    words: list[str]  # each once
    order: list[int]  # index into `words` of every word of the query, repetitions included
    idfs: np.ndarray  # of `words`, float64
    weights: np.ndarray  # idf times how often a word is in the query, float32


class DiskBM25:
    """BM25 over an index that `build_bm25` wrote, with BM25's methods.

    Args:
      folder: of the index.
      corpus_fingerprint: of the corpus that is searched; None: not compared.
      text_of: the text of a row, which `search_within` reads.
      analyzer: that the index must be of; None: whichever it states.
      asks: as BM25.
    """

    def __init__(
        self,
        folder: Path,
        corpus_fingerprint: str | None = None,
        text_of: Callable[[int], str] | None = None,
        *,
        analyzer: Analyzer | None = None,
        asks: bool = False,
    ):
        read_manifest(folder, _WHAT, _VERB)
        job = read_sealed(folder / MANIFEST, _REMEDY)
        stated = job.get("analyzer", {})  # of older programs none
        if stated.get("version") != VERSION:
            raise UserError(f"{folder}: its words are those of another version; {_REMEDY}.")
        of_queries = None if analyzer is None else analyzer.to_json()
        expected = {"corpus_fingerprint": corpus_fingerprint, "analyzer": of_queries}
        check_manifest(folder, job, expected, _VERB)
        self._analyzer = Analyzer(**{k: v for k, v in stated.items() if k != "version"})
        self._asks = asks
        sizes = job.pop("shards")
        places = [_shards(folder, job) / f"{number:05d}" for number in range(len(sizes))]
        for place in places:
            check_sums(place, remedy=_REMEDY)
        self._shards = [Shard(place) for place in places]
        starts = itertools.accumulate((size["rows"] for size in sizes), initial=0)
        written = [
            (_name(job), start, size["rows"]) for start, size in zip(starts, sizes, strict=False)
        ]
        if [(shard.job, shard.start, shard.rows) for shard in self._shards] != written:
            raise UserError(f"{folder}: its shards are not those that were written; {_REMEDY}.")
        self._k1, self._b = job["k1"], job["b"]
        self._rows = sum(size["rows"] for size in sizes)
        self._norms = Norms(self._k1, self._b, sum(size["words"] for size in sizes) / self._rows)
        self._text_of = text_of
        self._groups = [
            ShardGroup(self._shards[first : first + _TOGETHER], self._norms)
            for first in range(0, len(places), _TOGETHER)
        ]
        self._starts = np.cumsum([0, *(group.rows for group in self._groups)])
        self._rooms = _Rooms(max(group.rows for group in self._groups))

    def __len__(self) -> int:
        return self._rows

    def search(
        self, queries: Sequence[str], top_k: int, allowed: np.ndarray | None = None
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """The best `top_k` rows of every query, as `BM25.search`.

        A group of shards is searched for all queries before the next, and the pages of one group
        at most are this process's memory.
        """
        check_several(queries, "BM25.search")
        check_top_k(top_k, len(self), allowed, "BM25")
        rows = np.full((len(queries), top_k), -1, np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        asked, numbers = self._read(queries)
        room = self._rooms.take()
        for place, group in enumerate(self._groups):
            start = int(self._starts[place])
            mask = None if allowed is None else allowed[start : start + group.rows]
            of_words = _words_of(group, place, numbers)
            for query, best_rows, best in zip(asked, rows, scores, strict=True):
                here = {i: of_words[w] for i, w in enumerate(query.words) if w in of_words}
                new_rows, new_scores = _search_group(group, query, here, best, mask, room)
                if len(new_rows):
                    all_rows = np.concatenate([best_rows, new_rows.astype(np.int64) + start])
                    all_scores = np.concatenate([best, new_scores])
                    # Places that nothing has filled yet come last; those found are in row order.
                    order = np.argsort(-all_scores, kind="stable")[:top_k]
                    best_rows[:], best[:] = all_rows[order], all_scores[order]
            group.release()
        self._rooms.give_back(room)
        return rows, scores

    def search_within(
        self, query: str, rows: Sequence[int], top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches as `BM25.search_within`: the rows' texts are read again, as their own corpus."""
        candidates = candidate_rows(rows, len(self), "BM25")
        texts = [self._text_of(int(row)) for row in candidates]
        if not any(map(self._analyzer.words, texts)):
            return candidates[:0], np.zeros(0, np.float32)
        bm25 = BM25(texts, self._k1, self._b, analyzer=self._analyzer, asks=self._asks)
        best, scores = bm25.search_within(query, range(len(texts)), top_k)
        return candidates[best], scores

    def scores(self, query: str, rows: Sequence[int]) -> np.ndarray:
        """The scores that `search` gives the rows."""
        all_rows = np.asarray(rows, np.int64)
        scores = np.zeros(len(all_rows), np.float32)
        (asked,), numbers = self._read([query])
        ascending = np.argsort(all_rows, kind="stable")
        of_group = np.searchsorted(self._starts, all_rows[ascending], side="right") - 1
        for place in np.unique(of_group).tolist():
            mine, group = ascending[of_group == place], self._groups[place]
            group_rows = (all_rows[mine] - self._starts[place]).astype(np.uint32)
            of_words = _words_of(group, place, numbers)
            norms = group.norms_of(group_rows)
            terms = {
                i: word_scores(
                    asked.idfs[i], group.counts(of_words[word].numbers, group_rows), norms
                )
                for i, word in enumerate(asked.words)
                if word in of_words
            }
            scores[mine] = _total(asked, terms, len(group_rows))
        return scores

    def _read(self, queries: Sequence[str]) -> tuple[list[_Query], dict[str, list[int]]]:
        """The queries, and the number of each of their words in every shard (-1: not there)."""
        words_of = self._analyzer.question_words if self._asks else self._analyzer.words
        split = list(map(words_of, queries))
        numbers, idfs = {}, {}
        for word in dict.fromkeys(itertools.chain.from_iterable(split)):
            in_shards = [shard.number(word) for shard in self._shards]
            frequency = sum(
                shard.frequency(number)
                for shard, number in zip(self._shards, in_shards, strict=True)
                if number >= 0
            )
            if frequency:
                numbers[word] = in_shards
                idfs[word] = np.float32(idf_of(len(self), frequency))  # as bm25s keeps it
        asked = []
        for words in split:
            counts = collections.Counter(word for word in words if word in numbers)
            place = {word: i for i, word in enumerate(counts)}
            word_idfs = np.array([idfs[word] for word in counts], np.float64)
            weights = (word_idfs * np.array(list(counts.values()), np.float64)).astype(np.float32)
            order = [place[word] for word in words if word in place]
            asked.append(_Query(list(counts), order, word_idfs, weights))
        return asked, numbers


@dataclasses.dataclass(frozen=True)
class _Word:
    """A word in a group of shards, and its number in each of them."""

    numbers: Sequence[int]
    tiers: Tiers


class _Room:
    """Room for two numbers of each row of a group: sums, which are 0 before and after a search, and
    the places of rows in a shorter array (anything for other rows)."""

    def __init__(self, rows: int):
        self.sums = np.zeros(rows, np.float32)
        self.places = np.zeros(rows, np.int32)

    def absent(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Which of the rows, whose places are set, are not among the others."""
        absent = np.ones(len(rows), bool)
        if len(rows):
            at = np.minimum(self.places[others], len(rows) - 1)
            absent[at[rows[at] == others]] = False
        return absent


class _Rooms:
    """Rooms that searches have left, one for each that runs at once: new pages cost much."""

    def __init__(self, rows: int):
        self._rows, self._free = rows, collections.deque()

    def take(self) -> _Room:
        """A room for one search alone."""
        try:
            return self._free.pop()
        except IndexError:
            return _Room(self._rows)

    def give_back(self, room: _Room) -> None:
        """Leaves it to the next search; not after an error, its sums may not be 0."""
        self._free.append(room)


def _words_of(group: ShardGroup, place: int, numbers: dict[str, list[int]]) -> dict[str, _Word]:
    """The words that a group has, the index's group number `place`."""
    span = slice(place * _TOGETHER, (place + 1) * _TOGETHER)
    here = {
        word: in_shards[span] for word, in_shards in numbers.items() if max(in_shards[span]) >= 0
    }
    if not here:
        return {}
    tiers = group.tiers(list(here.values()))
    return {word: _Word(here[word], in_shards) for word, in_shards in zip(here, tiers, strict=True)}


def _search_group(
    group: ShardGroup,
    query: _Query,
    here: dict[int, _Word],
    best: np.ndarray,
    allowed: np.ndarray | None,
    room: _Room,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a group that may be among the best, ascending, and their scores. `here`
    has those of the query's words that the group has, by their place in it; the best scores so far
    are 0 where there is none."""
    floor, top_k = best[-1] * _SLACK, len(best)
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.float32)
    if not here:
        return nothing

    def read(i: int, taken: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a word's first tiers, and what it adds to their scores."""
        rows, counts = group.postings(here[i].numbers, here[i].tiers, taken)
        if allowed is not None:
            is_allowed = allowed[rows]
            rows, counts = rows[is_allowed], counts[is_allowed]
        count = counts.astype(np.float32)
        return rows, query.weights[i] * (count / (count + group.norms[rows]))

    tiers = {i: word.tiers for i, word in here.items()}
    if floor <= 0:
        for i, taken in _first_tiers(tiers, top_k):
            floor = _raised(floor, read(i, taken)[1], top_k)
    chosen = _choose_tiers(list(tiers.values()), query.weights[list(tiers)], floor)
    if not any(chosen):
        return nothing
    # What the tiers read give, less what the same word was allowed to add where it was not.
    behind, touched = {}, dict.fromkeys(tiers, nothing[0])
    for i, taken in zip(tiers, chosen, strict=True):
        behind[i] = query.weights[i] * tiers[i].behind(taken)
        if taken:
            touched[i], added = read(i, taken)
            room.sums[touched[i]] += added - behind[i]
    left = sum(behind.values(), np.float32(0))
    need = max(floor - left, np.float32(1e-30))
    rows, sums = _take_above(room.sums, list(touched.values()), need, group.rows)
    floor = _raised(floor, sums, top_k)
    candidates = np.flatnonzero(sums + left >= floor)
    candidates = candidates[np.argsort(rows[candidates])]
    rows, upper = rows[candidates], sums[candidates] + left
    room.places[rows] = np.arange(len(rows))
    unread = {i: room.absent(rows, touched[i]) for i in behind if behind[i] > 0}
    rows = _looked_up(group, query, here, rows, upper, unread, behind, floor, top_k)
    norms = group.norms_of(rows)
    terms = {
        i: word_scores(query.idfs[i], group.counts(here[i].numbers, rows), norms) for i in here
    }
    scores = _total(query, terms, len(rows))
    return rows[scores > 0], scores[scores > 0]


def _looked_up(
    group: ShardGroup,
    query: _Query,
    here: dict[int, _Word],
    rows: np.ndarray,
    upper: np.ndarray,
    unread: dict[int, np.ndarray],
    behind: dict[int, np.float32],
    floor: np.float32,
    top_k: int,
) -> np.ndarray:
    """Returns the rows, ascending, that stay above the floor whatever the unread words add: `upper`
    is what they can have at most, `unread` has the rows that were not in the postings read of a
    word, and `behind` what it was allowed to add to these."""
    left = sum((behind[i] for i in unread), np.float32(0))
    for i in sorted(unread, key=behind.get, reverse=True):
        asked = np.flatnonzero(unread[i])
        count = group.counts(here[i].numbers, rows[asked]).astype(np.float32)
        added = query.weights[i] * (count / (count + group.norms[rows[asked]]))
        upper[asked] += added - behind[i]
        left -= behind[i]
        floor = _raised(floor, upper - left, top_k)
        may_rank = upper >= floor
        rows, upper = rows[may_rank], upper[may_rank]
        unread = {j: tier_counts[may_rank] for j, tier_counts in unread.items()}
    return rows


def _first_tiers(tiers: dict[int, Tiers], top_k: int) -> Iterator[tuple[int, int]]:
    """Counts, for each word, the tiers that hold `top_k` sources, which give a first floor.

    Words are left out that have fewer, or of which too much would be read.
    """
    for i, of_word in tiers.items():
        ends = np.cumsum(of_word.sizes)
        taken = int(np.searchsorted(ends, top_k)) + 1
        if taken <= len(ends) and ends[taken - 1] <= _FIRST:
            yield i, taken


def _take_above(
    sums: np.ndarray, touched: Sequence[np.ndarray], need: np.float32, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows whose sum is at least `need`, each once, and their sums; all sums become 0."""
    if sum(map(len, touched)) * _DENSE > rows:
        above = np.flatnonzero(sums[:rows] >= need).astype(np.uint32)
        values = sums[above]
        sums[:rows] = 0
        return above, values
    taken, values = [], []
    for rows_of_word in touched:
        taken.append(rows_of_word[sums[rows_of_word] >= need])
        values.append(sums[taken[-1]])
        sums[rows_of_word] = 0  # what is in the lists that follow too is not taken again
    return np.concatenate(taken), np.concatenate(values)


def _choose_tiers(tiers: Sequence[Tiers], weights: np.ndarray, floor: np.float32) -> list[int]:
    """How many tiers of each word are read, so that the others together stay below the floor.

    Those come first whose bound falls most for a posting read.
    """
    if floor <= 0:
        return [len(of_one_word.bounds) for of_one_word in tiers]
    total = sum(
        float(w * of_one_word.bounds[0]) for w, of_one_word in zip(weights, tiers, strict=True)
    )
    if total < floor:
        return [0] * len(tiers)
    of_word = np.repeat(np.arange(len(tiers)), [len(of_one_word.bounds) for of_one_word in tiers])
    weight = weights[of_word]
    order = np.argsort(
        -weight * np.concatenate([of_one_word.worth for of_one_word in tiers]), kind="stable"
    )
    drops = weight * np.concatenate([of_one_word.drops for of_one_word in tiers])
    behind = total - np.cumsum(drops[order], dtype=np.float64)
    count = int(np.count_nonzero(behind >= floor)) + 1
    return np.bincount(of_word[order[:count]], minlength=len(tiers)).tolist()


def _raised(floor: np.float32, lower: np.ndarray, top_k: int) -> np.float32:
    """The floor, or the k-th best of what different rows have at least, if that is higher."""
    higher = lower[lower > floor]  # few, where the floor is good: a partition is slow
    if len(higher) < top_k:
        return floor
    return max(floor, np.partition(higher, len(higher) - top_k)[len(higher) - top_k] * _SLACK)


def _total(query: _Query, terms: dict[int, np.ndarray], rows: int) -> np.ndarray:
    """The sum in the order of the query's words, a repeated word repeatedly, as bm25s adds it."""
    scores = np.zeros(rows, np.float32)
    for i in query.order:
        if i in terms:
            scores += terms[i]
    return scores


# Some consecutive shards of BM25's index on disk, searched as one.
#
# What a query costs in a shard is mostly the same few steps on short arrays, so that several
# shards together take little more time than one. A group's rows are numbered from 0 through its
# shards; what a word adds at most is bounded by the statistics of all shards.


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of a word in all shards of a group, those first that can add most.

    So the first few are some of the first tiers of each shard, and the next one bounds the rest.
    """

    bounds: np.ndarray  # what the postings of each add at most, before the idf, falling
    sizes: np.ndarray  # postings of each
    owners: np.ndarray  # the shard of each, by its place in the group
    drops: np.ndarray  # how much the bound falls behind each, at last to 0
    # The drop for a posting read, never rising: a tier shares the drop of the next ones where that
    # is larger for their size, since it is read for theirs.
    worth: np.ndarray

    def behind(self, taken: int) -> float:
        """What a word adds at most to a source that is in none of its first `taken` tiers."""
        return self.bounds[taken] if taken < len(self.bounds) else np.float32(0)


class ShardGroup:
    """Shards one behind another, with the norms of all their sources, float32. A word is given by
    its numbers, one a shard, -1 where the shard has none."""

    def __init__(self, shards: Sequence[Shard], norms: Norms):
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.rows for shard in shards)]).tolist()
        self._norms = norms
        self._shard_norms = [
            dataclasses.replace(norms, mean_length=shard.mean_length) for shard in shards
        ]
        self.rows: int = self._starts[-1]
        self._lengths = np.concatenate([shard.lengths for shard in shards])
        self.norms: np.ndarray = norms.of(self._lengths).astype(np.float32)

    def release(self) -> None:
        """Lets go of the pages that were read, as `Shard.release`."""
        for shard in self._shards:
            shard.release()

    def norms_of(self, rows: np.ndarray) -> np.ndarray:
        """The norms of some sources, float64."""
        return self._norms.of(self._lengths[rows])

    def tiers(self, numbers: Sequence[Sequence[int]]) -> list[Tiers]:
        """The tiers of several words, each of which at least one of the shards has."""
        of_shards = np.array(numbers)
        tiers = []
        for owner, (shard, norms) in enumerate(zip(self._shards, self._shard_norms, strict=True)):
            present = np.flatnonzero(of_shards[:, owner] >= 0)
            words, impacts, sizes = shard.tiers(of_shards[present, owner])
            bounds = self._norms.bounds(impacts, norms)
            tiers.append((present[words], bounds, sizes, np.full(len(sizes), owner)))
        words, bounds, sizes, owners = map(np.concatenate, zip(*tiers, strict=True))
        order = np.lexsort((-bounds, words))  # stable: tiers of a shard stay in order
        bounds, sizes, owners = bounds[order], sizes[order], owners[order]
        edges = np.cumsum(np.bincount(words, minlength=len(of_shards)))
        behind = np.append(bounds[1:], np.float32(0))
        behind[edges - 1] = 0
        drops = bounds - behind
        columns = (bounds, sizes, owners, drops)
        spans = map(slice, [0, *edges[:-1].tolist()], edges.tolist())
        return [
            Tiers(*(column[span] for column in columns), _worth(drops[span], sizes[span]))
            for span in spans
        ]

    def postings(
        self, numbers: Sequence[int], tiers: Tiers, taken: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows and counts of a word's first `taken` tiers."""
        sizes = np.bincount(tiers.owners[:taken], tiers.sizes[:taken]).astype(np.int64).tolist()
        rows, counts = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint8)]
        for owner, size in enumerate(sizes):
            if size:
                shard, number = self._shards[owner], numbers[owner]
                everything = size == shard.frequency(number)
                postings = (
                    shard.postings(number) if everything else shard.top_postings(number, size)
                )
                rows.append(postings[0] + np.uint32(self._starts[owner]))
                counts.append(postings[1])
        return np.concatenate(rows), np.concatenate(counts)

    def counts(self, numbers: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """How often each of some sources has a word; uint32 rows, ascending."""
        counts = np.zeros(len(rows), np.uint32)
        edges = np.searchsorted(rows, self._starts).tolist()
        for owner, number in enumerate(numbers):
            first, last = edges[owner], edges[owner + 1]
            if number >= 0 and first < last:
                shard_rows = rows[first:last] - np.uint32(self._starts[owner])
                counts[first:last] = self._shards[owner].counts(number, shard_rows)
        return counts


def _worth(drops: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The slopes of the convex hull below the bounds, one a tier."""
    slopes: list[tuple[float, int, int]] = []  # drop, postings, tiers
    for drop, size in zip(drops.tolist(), sizes.tolist(), strict=True):
        tiers = 1
        while slopes and drop * slopes[-1][1] >= slopes[-1][0] * size:
            above = slopes.pop()
            drop, size, tiers = drop + above[0], size + above[1], tiers + above[2]
        slopes.append((drop, size, tiers))
    return np.repeat([drop / size for drop, size, _ in slopes], [tiers for *_, tiers in slopes])
