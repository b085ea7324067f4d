"""Hard negatives: 16 snippets and 16 pictures for every question.

Snippets are ranked by tf-idf overlap with question and answer, with a bonus for the same
country and for the same field of other countries; pictures by caption overlap and by how
much they look like the gold flag. A train question gets sources of train countries only.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np
from scipy import sparse

from mmqa_jax.data.atlas.pictures import COLORS, color_map, decode
from mmqa_jax.data.atlas.questions import SPLITS, Draft, Subject
from mmqa_jax.data.atlas.snippets import Snippet

NEGATIVES = 16  # per modality and question
_EMOJI_NEGATIVES = 4  # of the 16 pictures for a question about a flag
_BATCH = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The sources of one modality.

    Attributes:
      texts: snippet or caption of every row.
      kind: field of a snippet, `flag` or `emoji` of a picture, per row.
      group: country code or picture key, per row.
      split: position of the row's split in SPLITS; a question may have it as negative if its own
        split is the same or a later one.
      identity: equal for rows that are the same source (equal pixels, equal text).
      look: [row, feature] unit vectors of how pictures look, None for snippets.
    """

    texts: list[str]
    kind: np.ndarray
    group: np.ndarray
    split: np.ndarray
    identity: np.ndarray
    look: np.ndarray | None = None


def snippet_pool(snippets: list[Snippet], split: Mapping[str, str]) -> Pool:
    """The pool of all snippets; `split` is by country."""
    return Pool(
        texts=[s.text for s in snippets],
        kind=np.array([s.kind for s in snippets]),
        group=np.array([s.country for s in snippets]),
        split=np.array([SPLITS.index(split[s.country]) for s in snippets]),
        identity=np.arange(len(snippets)),
    )


def picture_pool(subjects: list[Subject], split: Mapping[str, str]) -> Pool:
    """The pool of all flags and emoji; `split` is by group."""
    return Pool(
        texts=[s.picture.caption for s in subjects],
        kind=np.array([s.picture.kind for s in subjects]),
        group=np.array([s.group for s in subjects]),
        split=np.array([SPLITS.index(split[s.group]) for s in subjects]),
        identity=np.unique([s.picture.digest for s in subjects], return_inverse=True)[1],
        look=_looks([s.picture.png for s in subjects]),
    )


def _words(text: str) -> list[str]:
    """Lower-case words and numbers of a text."""
    return re.findall(r"[^\W_]+", text.lower())


def _looks(pngs: list[bytes]) -> np.ndarray:
    """[picture, feature] unit vectors: colors on an 8 x 5 grid and over the whole picture."""
    rows = []
    for png in pngs:
        colors = color_map(decode(png))
        height, width = colors.shape
        ys, xs = np.linspace(0, height, 6).astype(int), np.linspace(0, width, 9).astype(int)
        cells = [
            np.bincount(colors[ys[j] : ys[j + 1], xs[i] : xs[i + 1]].ravel() + 1,
                        minlength=len(COLORS) + 1)[1:]
            for j in range(5) for i in range(8)
        ]  # fmt: skip
        grid = np.array(cells, np.float32).ravel()
        whole = np.array(cells, np.float32).sum(0)
        vector = [v / max(np.linalg.norm(v), 1e-6) for v in (grid, whole)]
        rows.append(np.concatenate(vector) / np.sqrt(2))
    return np.array(rows, np.float32)


def mine(
    drafts: list[Draft],
    pool: Pool,
    modality: str,
    rng: np.random.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Rows of the hard negatives of every draft, [draft, 16] int32, hardest first.

    Every row of the pool is some question's negative or positive afterwards, so that the
    official files, which define the corpus by the facts they list, hold the whole corpus.
    """
    idf = _idf(pool.texts)
    matrix = _vectors(pool.texts, idf).T
    of_kind, of_group, of_identity = (
        {value: np.flatnonzero(column == value) for value in np.unique(column)}
        for column in (pool.kind, pool.group, pool.identity)
    )
    allowed = {name: pool.split <= level for level, name in enumerate(SPLITS)}
    alike = None if pool.look is None else pool.look @ pool.look.T  # [row, row]
    noise = rng.random(len(pool.texts), dtype=np.float32) * 1e-3
    chosen = np.zeros((len(drafts), NEGATIVES), np.int32)
    forbidden: list[np.ndarray] = []
    for start in range(0, len(drafts), _BATCH):
        batch = drafts[start : start + _BATCH]
        queries = _vectors([f"{d.question} {d.answers[0]}" for d in batch], idf)
        scores = (queries @ matrix).toarray() + noise
        for i, draft in enumerate(batch):
            gold = [row for m, row in draft.positives if m == modality]
            for group in draft.group:
                scores[i, of_group.get(group, [])] += 0.2
            for row in gold if modality == "t" else ():
                scores[i, of_kind[pool.kind[row]]] += 0.25
            if alike is not None and gold:
                scores[i] += alike[gold].max(axis=0)
            out = [of_identity[pool.identity[row]] for row in gold]
            out.append(np.array([r for m, r in draft.banned if m == modality], np.int64))
            forbidden.append(np.unique(np.concatenate(out)).astype(np.int32))
            scores[i, forbidden[-1]] = -np.inf
            scores[i, ~allowed[draft.split]] = -np.inf
            chosen[start + i] = _top(scores[i], pool, draft, modality)
        if progress is not None:
            progress(min(start + _BATCH, len(drafts)), len(drafts))
    _cover(chosen, drafts, pool, modality, forbidden, allowed, rng)
    return chosen


def _top(scores: np.ndarray, pool: Pool, draft: Draft, modality: str) -> np.ndarray:
    if modality == "t" or draft.topic == "emoji":
        return _best(scores, NEGATIVES)
    flags = np.where(pool.kind == "flag", scores, -np.inf)
    emoji = np.where(pool.kind == "emoji", scores, -np.inf)
    few = min(_EMOJI_NEGATIVES, int(np.isfinite(emoji).sum()))
    few = max(few, NEGATIVES - int(np.isfinite(flags).sum()))
    return np.concatenate([_best(flags, NEGATIVES - few), _best(emoji, few)])


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    rows = np.argpartition(-scores, count - 1)[:count]
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    assert np.isfinite(scores[rows]).all(), "LEAST_COUNTRIES leave enough sources"
    return rows


def _idf(texts: list[str]) -> dict[str, float]:
    """Weight of every word, without those in more than a tenth of the texts."""
    counts = collections.Counter(word for text in texts for word in set(_words(text)))
    most = 0.1 * len(texts)
    return {w: np.log(len(texts) / counts[w]) for w in sorted(counts) if counts[w] <= most}


def _vectors(texts: list[str], idf: dict[str, float]) -> sparse.csr_matrix:
    """[text, word] unit vectors."""
    column = {word: i for i, word in enumerate(idf)}
    data, columns, starts = [], [], [0]
    for text in texts:
        words = sorted(idf.keys() & set(_words(text)))
        weights = np.array([idf[word] for word in words])
        data.append(weights / max(np.linalg.norm(weights), 1e-6))
        columns.extend(column[word] for word in words)
        starts.append(len(columns))
    values = np.concatenate(data).astype(np.float32)
    return sparse.csr_matrix((values, columns, starts), shape=(len(texts), len(idf)))


def _cover(
    chosen: np.ndarray,
    drafts: list[Draft],
    pool: Pool,
    modality: str,
    forbidden: list[np.ndarray],
    allowed: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> None:
    """Replaces some question's easiest negative by each row that no question lists."""
    uses = np.bincount(chosen.ravel(), minlength=len(pool.texts))
    listed = uses > 0
    for draft in drafts:
        listed[[row for m, row in draft.positives if m == modality]] = True
    order = rng.permutation(len(drafts))
    position = 0
    for row in np.flatnonzero(~listed):
        for step in range(len(order)):
            index = order[(position + step) % len(order)]
            last = NEGATIVES - 1
            if (
                uses[chosen[index, last]] > 1
                and allowed[drafts[index].split][row]
                and row not in forbidden[index]
                and row not in chosen[index]
            ):
                uses[chosen[index, last]] -= 1
                uses[row] += 1
                chosen[index, last] = row
                position = (position + step + 1) % len(order)
                break
