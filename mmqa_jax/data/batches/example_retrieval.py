"""Training batches of a retriever of examples: questions, candidates and what each helped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.feed import FeedConfig, Table, feed_batches
from mmqa_jax.data.batches.reading import Batches
from mmqa_jax.data.batches.sampling import PlannedBatch
from mmqa_jax.data.example_scores import ExampleScores
from mmqa_jax.data.packing import Bucket, Packed
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import TokenTable, WordPiece, text_inputs


def example_retrieval_batches(
    tokenizer: WordPiece,
    questions: Mapping[str, Question],
    rows: Sequence[ExampleScores],
    text_of: Callable[[Question], str],
    feed: FeedConfig,
    *,
    length: int,
    candidates: int,
) -> Batches:
    """Questions with `candidates` of their examples each, drawn anew in every epoch.

    A batch of B questions with m candidates each: query_ids int32 and query_mask bool
    [B, length], candidate_ids and candidate_mask [B, m, length], scores float32[B, m]; index
    int32[B]: of `rows`; truncated int32[B]: tokens lost.

    Args:
      questions: by id, those of `rows` and their candidates.
      rows: judged questions; one with fewer than `candidates` is left out.
      text_of: what is embedded of a question.
      length: tokens, [CLS] and [SEP] among them; longer texts lose their tail.
      candidates: m.
    """
    kept = [row for row, found in enumerate(rows) if len(found.scores) >= candidates]
    if not kept:
        raise UserError(
            f"config key batches.candidates={candidates}: no judged question has so many; lower "
            "it, or run `mmqa judge` with a larger judge.candidates."
        )
    named = sorted(
        {name for row in kept for name in (rows[row].question_id, *rows[row].candidates)}
    )
    place = {name: i for i, name in enumerate(named)}
    tokens = TokenTable(tokenizer, [text_of(questions[name]) for name in named])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((15, feed.seed, epoch))
        drawn = [rng.permutation(len(rows[row].scores))[:candidates] for row in kept]
        return {
            "row": np.array(kept),
            "drawn": np.stack(drawn),
            "bucket": np.zeros(len(kept), np.int64),
        }

    def inputs(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return text_inputs([tokens[place[name]] for name in names], length, tokenizer)

    def make(planned: PlannedBatch, table: Table) -> Packed:
        found = [rows[row] for row in table["row"]]
        drawn = [(row, i) for row, own in zip(found, table["drawn"], strict=True) for i in own]
        scores = np.array([row.scores[i] for row, i in drawn], np.float32)
        query_ids, query_mask, query_lost = inputs([row.question_id for row in found])
        candidate_ids, candidate_mask, lost = inputs([row.candidates[i] for row, i in drawn])
        return {
            "query_ids": query_ids,
            "query_mask": query_mask,
            "candidate_ids": candidate_ids.reshape(len(found), candidates, length),
            "candidate_mask": candidate_mask.reshape(len(found), candidates, length),
            "scores": scores.reshape(-1, candidates),
            "index": table["row"].astype(np.int32),
            "truncated": query_lost + lost.reshape(-1, candidates).sum(axis=1, dtype=np.int32),
        }

    return feed_batches(sample, [Bucket(0, length)], make, feed)
