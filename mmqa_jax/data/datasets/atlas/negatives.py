"""Hard negatives: 16 snippets and 16 pictures for every question.

Snippets are ranked by tf-idf overlap with question and answer, with a bonus for the same
country and for the same field of other countries; pictures by caption overlap and by how
much they look like the gold flag. A train question only meets sources of train countries.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable

import numpy as np
from scipy import sparse

from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.pictures import COLORS, color_map, decode

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
      splits: splits whose questions may have the row as negative.
      identity: equal for rows that must never be told apart (equal pixels, equal text).
      look: [row, feature] unit vectors of how pictures look, None for snippets.
    """

    texts: list[str]
    kind: np.ndarray
    group: np.ndarray
    splits: list[frozenset[str]]
    identity: np.ndarray
    look: np.ndarray | None = None


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text."""
    return re.findall(r"[^\W_]+", text.lower())


def looks(pngs: list[bytes]) -> np.ndarray:
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
    matrix, vocabulary, idf = _tf_idf(pool.texts)
    of_kind = {k: np.flatnonzero(pool.kind == k) for k in np.unique(pool.kind)}
    of_group = {g: np.flatnonzero(pool.group == g) for g in np.unique(pool.group)}
    of_identity = {i: np.flatnonzero(pool.identity == i) for i in np.unique(pool.identity)}
    allowed = {
        s: np.array([s in splits for splits in pool.splits]) for s in ("train", "val", "test")
    }
    alike = None if pool.look is None else pool.look @ pool.look.T  # [row, row]
    noise = rng.random(len(pool.texts), dtype=np.float32) * 1e-3
    chosen = np.zeros((len(drafts), NEGATIVES), np.int32)
    forbidden: list[np.ndarray] = []
    for start in range(0, len(drafts), _BATCH):
        batch = drafts[start : start + _BATCH]
        queries = _vectors([f"{d.question} {d.answers[0]}" for d in batch], vocabulary, idf)
        scores = np.asarray((queries @ matrix.T).todense(), np.float32) + noise
        for i, draft in enumerate(batch):
            gold = [row for m, row in draft.positives if m == modality]
            for group in draft.group:
                scores[i, of_group.get(group, [])] += 0.2
            for row in gold:
                if modality == "t":
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
    if count <= 0:
        return np.zeros(0, np.int64)
    rows = np.argpartition(-scores, count - 1)[:count]
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    if not np.isfinite(scores[rows]).all():
        raise ValueError(f"fewer than {count} sources are left to be negatives")
    return rows


def _tf_idf(texts: list[str]) -> tuple[sparse.csr_matrix, dict[str, int], np.ndarray]:
    counts = collections.Counter(word for text in texts for word in set(words(text)))
    vocabulary = {word: i for i, word in enumerate(sorted(counts))}
    # Words in more than a tenth of the texts say nothing and make the product slow.
    idf = np.array(
        [np.log(len(texts) / counts[w]) if counts[w] <= 0.1 * len(texts) else 0 for w in vocabulary]
    )
    return _vectors(texts, vocabulary, idf), vocabulary, idf


def _vectors(texts: list[str], vocabulary: dict[str, int], idf: np.ndarray) -> sparse.csr_matrix:
    data, columns, starts = [], [], [0]
    for text in texts:
        found = sorted({vocabulary[w] for w in words(text) if w in vocabulary})
        found = [column for column in found if idf[column] > 0]
        weights = idf[found]
        data.append(weights / max(np.linalg.norm(weights), 1e-6))
        columns.extend(found)
        starts.append(len(columns))
    values = np.concatenate(data) if data else np.zeros(0)
    shape = (len(texts), len(vocabulary))
    return sparse.csr_matrix((values.astype(np.float32), columns, starts), shape=shape)


def _cover(
    chosen: np.ndarray,
    drafts: list[Draft],
    pool: Pool,
    modality: str,
    forbidden: list[np.ndarray],
    allowed: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> None:
    """Puts rows that no question lists in the place of some question's easiest negative."""
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
