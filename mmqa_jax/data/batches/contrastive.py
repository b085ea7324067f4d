"""Training batches of the dual encoder: questions against gold sources and hard negatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.feed import (
    Batches,
    FeedConfig,
    PlannedBatch,
    Table,
    augmented,
    feed_batches,
    mixed,
)
from mmqa_jax.data.batches.packing import Bucket, Packed, RawExample
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokens, TokenTable, cut, text_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastSampling:
    """Shapes of questions and sources, and what a question is contrasted with.

    Attributes:
      query_length: columns of the questions ([CLS] and [SEP] counted, here and below).
      source_lengths: columns of the sources, one static shape each. A single length mixes short
        captions with long snippets, which is the better contrast.
      num_negatives: hard negatives of a question.
      second_hop: half of the examples with several gold sources are second-hop queries, as
        retrieval makes them: the question followed by the title of one gold source, with another
        as the target. The others target their first gold source.
    """

    query_length: int = at_least(3)
    source_lengths: tuple[int, ...]
    num_negatives: int = at_least(0, 1)
    second_hop: bool = False


def contrastive_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    feed: FeedConfig,
    sampling: ContrastSampling,
    members: Sequence[int] = (),
) -> Batches:
    """Questions against one gold source each and `num_negatives` hard negatives.

    Snippets keep the question's order, pictures are shuffled. `members`: of a mixture
    (`feed.mixture`), the corpus of every question.

    A batch of B questions has S = B * (1 + num_negatives) sources, each question's target
    followed by its negatives:
      query_ids int32[B, query_length], query_mask bool; positive int32[B]: column of the
      target among the sources of all processes
      source_ids int32[S, Ls], source_mask bool, pixels uint8[S, size, size, 3], has_image bool[S]
      source_rows int32[S]: corpus rows, the same twice = a false negative
      gold_rows int32[B, G]: all gold sources of each question, padded with -1
      index int32[B]: indices into `questions`; truncated int32[B]: tokens lost
    """
    corpus, tokenizer = reader.corpus, reader.tokenizer
    query_length, second_hop = sampling.query_length, sampling.second_hop
    num_negatives = sampling.num_negatives
    usable = [i for i, q in enumerate(questions) if q.positives]
    if not usable:
        raise UserError("contrastive training: no question lists a gold source; check the split.")
    golds = {i: np.array(corpus.positive_rows(questions[i])) for i in usable}
    negatives = {i: np.array(corpus.negative_rows(questions[i]), np.int64) for i in usable}
    most_golds = max(map(len, golds.values()))
    question_tokens = TokenTable(tokenizer, [q.question for q in questions])
    shapes = [Bucket(0, length) for length in sorted(sampling.source_lengths)]
    group = 1 + num_negatives

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((11, feed.seed, epoch))
        # first_hop: the source whose title follows the question, -1: none.
        rows, first_hop = np.zeros((len(usable), group), np.int64), np.full(len(usable), -1)
        for n, i in enumerate(usable):
            gold = golds[i]
            if reader.is_image[gold].any() or not second_hop:
                gold = rng.permutation(gold)
            rows[n, 0] = gold[0]
            if second_hop and len(gold) > 1 and rng.random() < 0.5:
                first_hop[n], rows[n, 0] = gold[0], gold[1 + rng.integers(len(gold) - 1)]
            rows[n, 1:] = draw_negatives(rng, negatives[i], num_negatives, len(corpus), golds[i])
        longest = reader.table.lengths[rows].max(axis=1) + 2 + feed.slack
        buckets = np.searchsorted([s.text for s in shapes], longest).clip(max=len(shapes) - 1)
        return {
            "question": np.array(usable),
            "rows": rows,
            "first_hop": first_hop,
            "bucket": buckets,
        }

    def make(planned: PlannedBatch, table: Table) -> Packed:
        size = reader.pictures.size if reader.pictures else 0
        count = len(planned.rows)
        pixels = np.zeros((count * group, size, size, 3), np.uint8)
        has_image = np.zeros(count * group, bool)
        gold_rows = np.full((count, most_golds), -1, np.int32)
        queries, texts = [], []
        reader.look_ahead(table["rows"].flat)
        for b, i in enumerate(table["question"]):
            hop = table["first_hop"][b]
            source_rows = [*table["rows"][b], *([hop] if hop >= 0 else [])]
            sources = tuple(reader.raw(int(row)) for row in source_rows)
            raw = RawExample(questions[i].question, sources, record=questions[i])
            raw = augmented(raw, feed, planned, b)
            query = question_tokens[i]
            if raw.question != questions[i].question:
                query = tokenizer.encode(raw.question)
            if hop >= 0:
                title = tokenizer.encode(raw.sources[-1].title)
                query = _second_hop_query(query, title, query_length)
            queries.append(query)
            for k, source in enumerate(raw.sources[:group]):
                texts.append(reader.tokens(source))
                if source.pixels is not None:
                    pixels[b * group + k] = source.pixels
                    has_image[b * group + k] = True
            gold_rows[b, : len(golds[i])] = golds[i]
        query_ids, query_mask, query_lost = text_inputs(queries, query_length, tokenizer)
        source_ids, source_mask, source_lost = text_inputs(
            texts, shapes[planned.bucket].text, tokenizer
        )
        return {
            "query_ids": query_ids,
            "query_mask": query_mask,
            "source_ids": source_ids,
            "source_mask": source_mask,
            "pixels": pixels,
            "has_image": has_image,
            "source_rows": table["rows"].reshape(-1).astype(np.int32),
            "positive": (group * planned.rows).astype(np.int32),
            "gold_rows": gold_rows,
            "index": table["question"].astype(np.int32),
            "truncated": query_lost + source_lost.reshape(count, group).sum(axis=1, dtype=np.int32),
        }

    return feed_batches(mixed(sample, members, feed), shapes, make, feed, reader.broken)


def _second_hop_query(question: Tokens, title: Tokens, length: int) -> np.ndarray:
    """Tokens of a second-hop query: the question, then the first hop's title.

    Where both do not fit in `length` (with [CLS] and [SEP]), the question loses its tail.
    """
    title = cut(title, (length - 2) // 2, None)
    question = cut(question, length - 2 - len(title), None)
    return np.concatenate([np.asarray(question, np.int32), np.asarray(title, np.int32)])


def draw_negatives(
    rng: np.random.Generator, pool: np.ndarray, count: int, rows: int, golds: np.ndarray
) -> np.ndarray:
    """`count` of `pool` without replacement; any shortfall comes from the whole corpus."""
    drawn = rng.permutation(pool)[:count]
    others = rows > len(np.unique(golds))
    while len(drawn) < count:
        more = rng.integers(rows, size=count)
        more = more[~np.isin(more, golds)] if others else more
        drawn = np.append(drawn, more)[:count]
    return drawn
