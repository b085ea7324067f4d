"""Two-hop retrieval: the second query knows the title of what the first one found.

A two-hop question ("Which anthem has the country whose capital is X?") names its second source
only through the first. The second query is the question followed by the first hit's title.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from mmqa_jax.core.errors import UserError

# (texts, top_k) -> (rows int[n, top_k], scores float[n, top_k]), best first.
SearchFn = Callable[[list[str], int], tuple[np.ndarray, np.ndarray]]
Merge = Literal["interleave", "score"]


def two_pass_search(
    search: SearchFn,
    questions: Sequence[str],
    titles: Sequence[str],
    top_k: int,
    *,
    num_titles: int = 1,
    merge: Merge = "interleave",
    first: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Searches with the question, then with the question and the title of what was found.

    Args:
      search: any search over the corpus; called once per pass. The second call's texts lie
        question by question, `num_titles` each.
      questions: n questions.
      titles: title of every row of the corpus ("" where a source has none).
      top_k: sources to return per question.
      num_titles: how many distinct titles of the first pass are followed, best first. Hits
        without a title are passed over; with no title at all the question is asked again.
      merge: how the passes become one list. "interleave" (default): the first pass's best, the
        second pass's best, the first pass's second, and so on; it compares no scores, so it
        suits BM25, whose scores grow with the query. "score": by the higher of the source's
        scores; for similarities of normalised embeddings.
      first: results of the first pass, where the caller has them already or made them in
        another way (a question with a picture): [n, >= top_k].

    Returns:
      (rows int32[n, top_k], scores float32[n, top_k]), best first, no row twice. Scores are
      1 / rank for "interleave", the search's own for "score".
    """
    if num_titles < 1:
        raise UserError(f"two-pass search: num_titles={num_titles} must be at least 1.")
    if merge not in ("interleave", "score"):
        raise UserError(f'two-pass search: merge={merge!r} must be "interleave" or "score".')
    rows, scores = search(list(questions), top_k) if first is None else first
    texts = []
    for question, found in zip(questions, rows, strict=True):
        followed = _distinct_titles(found, titles, num_titles)
        second = [f"{question} {title}" for title in followed] or [question]
        texts += second + [second[0]] * (num_titles - len(second))
    shape = (len(questions), num_titles, top_k)
    second_rows, second_scores = (part.reshape(shape) for part in search(texts, top_k))

    merged_rows = np.zeros((len(questions), top_k), np.int32)
    merged_scores = np.zeros((len(questions), top_k), np.float32)
    for number in range(len(questions)):
        row_lists = [rows[number][:top_k], *second_rows[number]]
        if merge == "interleave":
            merged = _interleave(row_lists, top_k)
        else:
            merged = _by_score(row_lists, [scores[number][:top_k], *second_scores[number]], top_k)
        merged_rows[number] = [row for row, _ in merged]
        merged_scores[number] = [score for _, score in merged]
    return merged_rows, merged_scores


def _distinct_titles(rows: np.ndarray, titles: Sequence[str], count: int) -> list[str]:
    found: dict[str, None] = {}
    for row in rows:
        title = titles[row].strip()
        if title:
            found[title] = None
        if len(found) == count:
            break
    return list(found)


def _interleave(row_lists: Sequence[np.ndarray], top_k: int) -> list[tuple[int, float]]:
    order = dict.fromkeys(
        int(row) for same_rank in zip(*row_lists, strict=True) for row in same_rank
    )
    return [(row, 1.0 / rank) for rank, row in enumerate(list(order)[:top_k], start=1)]


def _by_score(
    row_lists: Sequence[np.ndarray], score_lists: Sequence[np.ndarray], top_k: int
) -> list[tuple[int, float]]:
    best: dict[int, float] = {}
    for rows, scores in zip(row_lists, score_lists, strict=True):
        for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
            best[row] = max(score, best.get(row, score))
    # sorted() is stable: equal scores stay in the order in which the passes found them.
    return sorted(best.items(), key=lambda item: -item[1])[:top_k]
