"""Training batches of the reader: questions, their sources and partly masked answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least, mapping
from mmqa_jax.data.batches.feed import (
    Batches,
    FeedConfig,
    PlannedBatch,
    Table,
    augmented,
    check_shares,
    example_rng,
    feed_batches,
    nest_inputs,
)
from mmqa_jax.data.batches.packing import MaskingConfig, Packed, Packer, RawExample, batch, clean
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.schema import Question, category_modality
from mmqa_jax.data.tokenizers import TokenTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSampling:
    """How an epoch draws the sources that a question is shown with, and the answer that is learned.

    Attributes:
      max_sources: gold sources shown at most, the first ones. Of the pictures among them, those
        beyond the largest bucket's are left out with their captions (SourceReader.readable).
      distractor_prob: with this probability a question with fewer gold sources than
        `max_sources` also gets one of its hard negatives (robustness to wrong sources).
      shuffle_sources: random order of the sources; off, the question's order.
      no_source_prob: with this probability a question gets no source at all; 1 trains the
        question-only model.
      shares: category -> the share of its questions that an epoch shows, drawn anew for each;
        categories that are not named are shown whole.
      wording: which of a question's reference answers is learned: the first, as in the baseline
        (webqa_loader.py l.149, l.322), or in every epoch a random one.
    """

    max_sources: int = at_least(0, 2)
    distractor_prob: float = 0.0
    shuffle_sources: bool = True
    no_source_prob: float = 0.0
    shares: Mapping[str, float] = mapping(dict[str, float])
    wording: Literal["first", "random"] = "random"

    def __post_init__(self):
        check_shares(self, "distractor_prob", "no_source_prob")


def answer_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    packer: Packer,
    masking: MaskingConfig,
    feed: FeedConfig,
    sampling: AnswerSampling = AnswerSampling(),
    *,
    route_by_category: bool = False,
) -> Batches:
    """Questions with their gold sources and partly masked answers, for masked-LM training.

    Args:
      route_by_category: WebQA's picture questions are shown pictures alone and laid out with
        region slots even if none is shown, text questions snippets alone (the baseline has a
        data set for each, webqa_loader.py l.143 and l.316).

    A batch has the arrays of packing.INPUT_FIELDS (see FeedConfig.inputs), masked_ids,
    masked_positions int32 and masked_weights float32 [B, max_pred], index (into `questions`)
    and truncated int32[B].
    """
    usable = [i for i, q in enumerate(questions) if q.answers]
    if not usable:
        raise UserError("answer training: no question has a reference answer; check the split.")
    max_sources, wording = sampling.max_sources, sampling.wording
    distractor_prob, no_source_prob = sampling.distractor_prob, sampling.no_source_prob
    shares = sampling.shares
    _check_shares(shares, {questions[i].category for i in usable})
    corpus, tokenizer = reader.corpus, reader.tokenizer
    with_source = [] if no_source_prob == 1 else usable
    wanted = [category_modality(q.category) if route_by_category else None for q in questions]
    most = packer.config.max_pictures

    def readable(i: int, rows: Sequence[int]) -> list[int]:
        return reader.readable(rows, most, wanted[i])

    golds = {
        i: np.array(readable(i, corpus.positive_rows(questions[i]))[:max_sources], int)
        for i in with_source
    }
    negatives = {i: corpus.negative_rows(questions[i]) for i in with_source if distractor_prob}
    question_tokens = TokenTable(tokenizer, [clean(q.question) for q in questions])
    keyword_tokens = TokenTable(tokenizer, [clean(q.keywords) for q in questions])
    usable_shares = np.array([shares.get(questions[i].category, 1.0) for i in usable])
    num_answers = [len(questions[i].answers) for i in usable]
    first_answer = np.cumsum([0, *num_answers])[:-1]  # in the table of all answers
    answer_tokens = TokenTable(
        tokenizer, [clean(answer) for i in usable for answer in questions[i].answers]
    )

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((13, feed.seed, epoch))
        taken = np.flatnonzero(rng.random(len(usable)) < usable_shares)
        rows = np.full((len(usable), max_sources), -1)
        for n, i in enumerate(usable):
            if no_source_prob and rng.random() < no_source_prob:
                continue
            chosen = golds[i]
            room = len(chosen) < max_sources and distractor_prob and len(negatives[i])
            if room and rng.random() < distractor_prob:
                chosen = np.array(readable(i, [*chosen, rng.choice(negatives[i])]), int)
            if sampling.shuffle_sources:
                chosen = rng.permutation(chosen)
            rows[n, : len(chosen)] = chosen
        choice = rng.integers(num_answers if wording == "random" else [1] * len(usable))
        answer_lengths = masking.columns(answer_tokens.lengths[first_answer + choice])
        text = reader.text_length(rows) + question_tokens.lengths[usable] + answer_lengths
        pictures = ((rows >= 0) & reader.is_image[rows]).sum(axis=1)
        table = {
            "question": np.array(usable),
            "rows": rows,
            "choice": choice,
            "answer": first_answer + choice,
            "bucket": packer.config.bucket_indices(pictures, text + feed.slack, 3),
        }
        return {name: column[taken] for name, column in table.items()}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        packed = []
        reader.look_ahead(table["rows"].flat)
        for b, i in enumerate(table["question"]):
            record = questions[i]
            answer = record.answers[table["choice"][b]]
            sources = tuple(reader.raw(int(row)) for row in table["rows"][b] if row >= 0)
            raw = RawExample(record.question, sources, answer, record, record.keywords)
            raw = augmented(raw, feed, planned, b)
            example = reader.example(
                raw,
                question_tokens[i] if raw.question == record.question else None,
                answer_tokens[table["answer"][b]] if raw.answer == answer else None,
                keyword_tokens[i] if raw.keywords == record.keywords else None,
            )
            example = example._replace(about_pictures=wanted[i] == "image")
            rng = example_rng(feed, planned, b, 1)
            packed.append(masking.pack(packer, example, planned.bucket, rng))
        arrays = batch(packed)
        arrays["index"] = table["question"].astype(np.int32)
        return nest_inputs(arrays, feed)

    return feed_batches(sample, packer.config.buckets, make, feed, reader.broken)


def _check_shares(shares: Mapping[str, float], categories: set[str]) -> None:
    for name, value in shares.items():
        if name not in categories:
            raise UserError(
                f"config key batches.shares.{name}: no question is of this category; use one of "
                f"{', '.join(sorted(categories))}."
            )
        if not 0 < value <= 1:
            raise UserError(
                f"config key batches.shares.{name}={value}: a share above 0 and at most 1 was "
                "expected; change it."
            )
