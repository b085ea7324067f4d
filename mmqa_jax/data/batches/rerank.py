"""Training batches of the source selector: (question, candidate) pairs."""

from __future__ import annotations

import dataclasses
import math
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
    check_shares,
    example_rng,
    feed_batches,
    mixed,
    nest_inputs,
)
from mmqa_jax.data.batches.packing import Packed, Packer, RawExample, batch, clean
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import TokenTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSampling:
    """How an epoch draws its pairs.

    Attributes:
      choices_per_question: sources of a question at most, gold ones first.
      alike_share: of them in the gold sources' modality, the rest in the other one (the baseline:
        16 and 16).
      second_hop_prob: how often a question is followed by the title of one of its gold sources, as
        in the reranker's second hop.
    """

    choices_per_question: int = at_least(1, 8)
    alike_share: float = 0.5
    second_hop_prob: float = 0.0

    def __post_init__(self):
        check_shares(self, "alike_share", "second_hop_prob")


def rerank_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    packer: Packer,
    feed: FeedConfig,
    sampling: PairSampling = PairSampling(),
    members: Sequence[int] = (),
) -> Batches:
    """(question, candidate) pairs for the source head, pictures and snippets apart.

    Every epoch shows all gold sources of a question and a new draw of its hard negatives. Batches
    mix the pairs of all questions. `members`: of a mixture (`feed.mixture`), the corpus of every
    question.

    A batch has the arrays of packing.INPUT_FIELDS (see FeedConfig.inputs) and, each [B]:
    labels int32 (1 = relevant), weights float32 (proportional to 1 / choices of the question, 1
    in the mean over an epoch: the mean over the epoch's weighted pairs is the mean over its
    questions of the mean over their choices), index (into `questions`) and truncated (tokens and
    regions lost) int32.
    """
    corpus = reader.corpus
    usable = [i for i, q in enumerate(questions) if q.positives]
    if not usable:
        raise UserError("rerank training: no question lists a gold source; check the split.")
    golds = {i: np.array(corpus.positive_rows(questions[i])) for i in usable}
    negatives = {i: np.array(corpus.negative_rows(questions[i]), np.int64) for i in usable}
    question_tokens = TokenTable(reader.tokenizer, [clean(q.question) for q in questions])
    title_tokens = TokenTable(reader.tokenizer, [source.title for source in corpus.sources])
    choices, second_hop_prob = sampling.choices_per_question, sampling.second_hop_prob
    same = math.ceil(choices * sampling.alike_share)

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((12, feed.seed, epoch))
        # first_hops: the source whose title follows the question, -1: none.
        chosen, sizes, first_hops = [], [], []
        for i in usable:
            gold, pool = golds[i], rng.permutation(negatives[i])
            alike = reader.is_image[pool] == reader.is_image[gold[0]]
            near = pool[alike][: max(0, same - len(gold))]
            far = pool[~alike][: choices - same]
            chosen += [gold, near, far]
            sizes.append(len(gold) + len(near) + len(far))
            second = second_hop_prob and rng.random() < second_hop_prob
            first_hops.append(rng.choice(gold) if second else -1)
        sizes, rows = np.array(sizes), np.concatenate(chosen)  # [questions], [pairs]
        question, first_hop = np.repeat(usable, sizes), np.repeat(first_hops, sizes)  # [pairs]
        relevant = np.concatenate([np.full(len(c), k % 3 == 0) for k, c in enumerate(chosen)])
        text = reader.text_length(rows[:, None]) + question_tokens.lengths[question] + feed.slack
        text = text + np.where(first_hop >= 0, title_tokens.lengths[first_hop], 0)
        return {
            "question": question,
            "row": rows,
            "first_hop": first_hop,
            "label": relevant,
            "weight": np.repeat(sizes.mean() / sizes, sizes),
            "bucket": packer.config.bucket_indices(reader.is_image[rows], text, 2),
        }

    def make(planned: PlannedBatch, table: Table) -> Packed:
        packed = []
        reader.look_ahead(table["row"])
        for b, i in enumerate(table["question"]):
            record = questions[i]
            query = record.question
            if table["first_hop"][b] >= 0:
                query += " " + corpus.sources[table["first_hop"][b]].title
            raw = RawExample(query, (reader.raw(table["row"][b]),), record=record)
            raw = augmented(raw, feed, planned, b)
            unchanged = raw.question == record.question
            known = question_tokens[i] if unchanged else None
            example = reader.example(raw, known, ())
            rng = example_rng(feed, planned, b, 1)
            packed.append(packer.pack_for_selection(example, planned.bucket, rng))
        arrays = batch(packed)
        arrays["labels"] = table["label"].astype(np.int32)
        arrays["weights"] = table["weight"].astype(np.float32)
        arrays["index"] = table["question"].astype(np.int32)
        return nest_inputs(arrays, feed)

    return feed_batches(
        mixed(sample, members, feed), packer.config.buckets, make, feed, reader.broken
    )
