"""Training batches of retrievers: questions, gold sources, hard negatives, scores; of texts, and of
the dual encoder, which sees pictures."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl, write_jsonl
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.feed import (
    Batches,
    BatchesSection,
    FeedConfig,
    PlannedBatch,
    Table,
    augmented,
    feed_batches,
    mixed,
)
from mmqa_jax.data.batches.packing import Bucket, Packed, RawExample
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer, Tokens, TokenTable, cut, text_inputs


def example_retrieval_batches(
    tokenizer: Tokenizer,
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
    usable = [row for row, judged in enumerate(rows) if len(judged.scores) >= candidates]
    if not usable:
        raise UserError(
            f"config key batches.candidates={candidates}: no judged question has so many; lower "
            "it, or run `mmqa judge` with a larger judge.candidates."
        )
    named = sorted(
        {name for row in usable for name in (rows[row].question_id, *rows[row].candidates)}
    )
    place = {name: i for i, name in enumerate(named)}
    tokens = TokenTable(tokenizer, [text_of(questions[name]) for name in named])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((15, feed.seed, epoch))
        drawn = [rng.permutation(len(rows[row].scores))[:candidates] for row in usable]
        return {
            "row": np.array(usable),
            "drawn": np.stack(drawn),
            "bucket": np.zeros(len(usable), np.int64),
        }

    def inputs(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return text_inputs([tokens[place[name]] for name in names], length, tokenizer)

    def make(planned: PlannedBatch, table: Table) -> Packed:
        judged = [rows[row] for row in table["row"]]
        drawn = [
            (row, i) for row, columns in zip(judged, table["drawn"], strict=True) for i in columns
        ]
        scores = np.array([row.scores[i] for row, i in drawn], np.float32)
        query_ids, query_mask, query_lost = inputs([row.question_id for row in judged])
        candidate_ids, candidate_mask, lost = inputs([row.candidates[i] for row, i in drawn])
        return {
            "query_ids": query_ids,
            "query_mask": query_mask,
            "candidate_ids": candidate_ids.reshape(len(judged), candidates, length),
            "candidate_mask": candidate_mask.reshape(len(judged), candidates, length),
            "scores": scores.reshape(-1, candidates),
            "index": table["row"].astype(np.int32),
            "truncated": query_lost + lost.reshape(-1, candidates).sum(axis=1, dtype=np.int32),
        }

    return feed_batches(sample, [Bucket(0, length)], make, feed)


# How much each candidate example helped a language model with a question, as a file.
#
# One JSON object a line: `question_id`, `alone` (the model's score without any example) and
# `candidates`, a list of `{"id", "similarity", "score"}`, most similar first. A score is the
# log-probability of the right option among the question's options, at most 0.


FILE = "example_scores.jsonl"


class ExampleScores(NamedTuple):
    """A question's candidates."""

    question_id: str
    alone: float | None  # the score without examples; None: it has none
    candidates: tuple[str, ...]  # ids of examples
    # similarities, scores: one for each.
    similarities: tuple[float, ...]
    scores: tuple[float, ...]


def write_example_scores(path: str | os.PathLike, rows: Iterable[ExampleScores]) -> None:
    """Writes the file, whole or not at all."""
    write_jsonl(
        path,
        (
            {
                "question_id": row.question_id,
                "alone": None if row.alone is None else round(row.alone, 6),
                "candidates": [
                    {"id": name, "similarity": round(similarity, 6), "score": round(score, 6)}
                    for name, similarity, score in zip(
                        row.candidates, row.similarities, row.scores, strict=True
                    )
                ],
            }
            for row in rows
        ),
    )


def read_example_scores(path: str | os.PathLike) -> list[ExampleScores]:
    """Reads the file."""
    if Path(path).is_dir():
        path = Path(path) / FILE
    return [_row(value, f"{path}, line {number}") for number, value in read_jsonl(path)]


def judged_questions(path: str | os.PathLike, corpus: Corpus, split: str) -> list[ExampleScores]:
    """The rows of a split's questions."""
    split_of = {question.id: question.split for question in corpus.questions()}
    judged = read_example_scores(path)
    for row in judged:
        for name in (row.question_id, *row.candidates):
            if name not in split_of:
                raise UserError(
                    f"{path}: names the question {name}, which data.dir does not hold; judge the "
                    "examples of this data."
                )
    rows = [row for row in judged if split_of[row.question_id] == split]
    if not rows:
        raise UserError(
            f"{path}: holds no question of split {split}; name it in data.splits of `mmqa judge`."
        )
    return rows


def _row(value: Any, place: str) -> ExampleScores:
    try:
        candidates = value["candidates"]
        alone = value["alone"]
        row = ExampleScores(
            str(value["question_id"]),
            None if alone is None else float(alone),
            tuple(str(candidate["id"]) for candidate in candidates),
            tuple(float(candidate["similarity"]) for candidate in candidates),
            tuple(float(candidate["score"]) for candidate in candidates),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{place}: not a line of `mmqa judge` (question_id, alone, candidates with id, "
            f"similarity and score were expected: {type(error).__name__} {error}); write the file "
            "again."
        ) from error
    if not all(map(math.isfinite, row.scores)):
        raise UserError(f"{place}: a score is not finite; write the file again.")
    return row


SCORES = "scores"  # key of Question.extra: source id -> a teacher's score


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverBatches(BatchesSection):
    """The section `batches`."""

    # Columns of the questions, special tokens included, here and below.
    query_length: int = at_least(3)
    # Columns of the sources; a batch has the first that holds all of its sources.
    source_lengths: tuple[int, ...]
    num_negatives: int = at_least(0, 1)  # hard negatives of a question


class EncodedSide(Protocol):
    """The tokens of one side, questions or sources."""

    lengths: np.ndarray  # of every text, special tokens included

    def rows(self, texts: Sequence[int], length: int) -> Mapping[str, np.ndarray]:
        """Arrays [n, ...] by name: ids int32, mask (attended columns) and scored bool,
        [n, length] each, and what the encoder sees of pictures."""


class RetrievalExample(NamedTuple):
    """A question as rows of the corpus."""

    # golds, negatives: rows.
    golds: np.ndarray
    negatives: np.ndarray
    scores: Mapping[int, float]  # a teacher's, by row; empty: there are none


def read_examples(path: str | os.PathLike, corpus: Corpus) -> list[Question]:
    """Questions of a file with lines `{"query", "positives", "negatives", "scores"}`.

    Positives and negatives are ids of sources; scores are a teacher's of the positives and then of
    the negatives. The last two keys may be absent.
    """
    questions = []
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        known = {"query", "positives", "negatives", "scores"}
        if not isinstance(row, dict) or not {"query", "positives"} <= row.keys() <= known:
            raise UserError(
                f"{where}: an object with query, positives and, if there are any, negatives and "
                "scores was expected; correct the line."
            )
        positives, negatives = row["positives"], row.get("negatives", [])
        if (
            not isinstance(row["query"], str)
            or not positives
            or not all(
                isinstance(names, list) and all(isinstance(name, str) for name in names)
                for names in (positives, negatives)
            )
        ):
            raise UserError(
                f"{where}: query must be a text, positives and negatives lists of ids of sources "
                "with one positive at least; correct the line."
            )
        names = [*positives, *negatives]
        if missing := next((name for name in names if name not in corpus.row), None):
            raise UserError(
                f"{where}: source {missing!r} is not in the corpus; name ids of data.dir, or "
                "prepare the corpus with it."
            )
        extra = {}
        if "scores" in row:
            scores = row["scores"]
            numbers = isinstance(scores, list) and all(
                isinstance(score, int | float) and math.isfinite(score) for score in scores
            )
            if not numbers or len(scores) != len(names):
                raise UserError(
                    f"{where}: {len(names)} finite scores were expected, of the positives and then "
                    "of the negatives; correct the line."
                )
            extra = {SCORES: dict(zip(names, map(float, scores), strict=True))}
        questions.append(
            Question(
                f"line {number}",
                "train",
                row["query"],
                positives=tuple(positives),
                negatives=tuple(negatives),
                extra=extra,
            )
        )
    return questions


def retrieval_examples(
    questions: Sequence[Question], corpus: Corpus, *, scored: bool
) -> dict[int, RetrievalExample]:
    """The questions that can be learned from, by their number.

    `scored`: a teacher's scores are learned: golds and negatives are those with a score.
    """
    examples = {}
    for number, question in enumerate(questions):
        golds, negatives = corpus.positive_rows(question), corpus.negative_rows(question)
        scores: dict[int, float] = {}
        if scored:
            of_question = question.extra.get(SCORES, {})
            scores = {corpus.row[name]: score for name, score in of_question.items()}
            golds = [row for row in golds if row in scores]
            negatives = [row for row in negatives if row in scores]
        if len(golds) and (len(negatives) or not scored):
            rows = np.array(golds, np.int64), np.array(negatives, np.int64)
            examples[number] = RetrievalExample(*rows, scores)
    return examples


def draw_sources(
    rng: np.random.Generator, example: RetrievalExample, count: int, sources: int, *, scored: bool
) -> np.ndarray:
    """A gold source of a question and `count` others: rows [1 + count].

    Args:
      sources: of the corpus, which give what the example's negatives lack.
      scored: none is drawn without a score; a few are drawn twice where there are too few.
    """
    gold, pool = rng.choice(example.golds), example.negatives
    if scored:
        more = rng.choice(pool, max(count - len(pool), 0))
        return np.array([gold, *rng.permutation(pool)[:count], *more])
    return np.array([gold, *draw_negatives(rng, pool, count, sources, example.golds)])


class RetrieverRows:
    """Makes batches of examples.

    A batch of B questions has S = B * (1 + n) sources, each question's gold source followed by its
    negatives:
      query_ids int32, query_mask and query_scored bool [B, Lq]
      source_ids, source_mask and source_scored, the same [S, Ls], and others of EncodedSide
      positive int32 [B], source_rows int32 [S], gold_rows int32 [B, G]: see contrastive_losses
      scores float32 [B, 1 + n], if a teacher's are learned
      index int32 [B]: of the questions; truncated int32 [B]: tokens lost

    Args:
      examples: by the number of their question.
      queries, sources: the tokens of all questions and sources.
      section: their shapes.
      scored: whether a batch has scores.
    """

    def __init__(
        self,
        examples: Mapping[int, RetrievalExample],
        queries: EncodedSide,
        sources: EncodedSide,
        section: RetrieverBatches,
        *,
        scored: bool,
    ):
        self.examples, self._queries, self._sources = examples, queries, sources
        self._section, self._scored = section, scored
        self.numbers = np.array(list(examples))
        self.lengths = sorted(section.source_lengths)
        self._golds = max(len(example.golds) for example in examples.values())

    def draw(
        self, rng: np.random.Generator, number: int, negatives: np.ndarray | None = None
    ) -> np.ndarray:
        """A gold source of a question and `num_negatives` others: rows [1 + n].

        negatives: that are drawn from; None: the example's own.
        """
        example, count = self.examples[number], self._section.num_negatives
        if negatives is not None:
            example = example._replace(negatives=negatives)
        sources = len(self._sources.lengths)
        return draw_sources(rng, example, count, sources, scored=self._scored)

    def bucket(self, rows: np.ndarray) -> np.ndarray:
        """The number of the smallest length that holds sources, rows [..., 1 + n]."""
        longest = self._sources.lengths[rows].max(axis=-1)
        return np.searchsorted(self.lengths, longest).clip(max=len(self.lengths) - 1)

    def batch(
        self, numbers: np.ndarray, rows: np.ndarray, length: int, first: np.ndarray
    ) -> Packed:
        """The arrays of questions [B] with sources [B, 1 + n], of `length` columns.

        first: int [B], the questions' rows in the global batch.
        """
        section = self._section
        queries = self._queries.rows(numbers, section.query_length)
        sources = self._sources.rows(rows.ravel(), length)
        gold_rows = np.full((len(numbers), self._golds), -1, np.int32)
        for row, number in enumerate(numbers):
            golds = self.examples[number].golds
            gold_rows[row, : len(golds)] = golds
        lost = np.maximum(self._queries.lengths[numbers] - section.query_length, 0)
        lost = lost + np.maximum(self._sources.lengths[rows] - length, 0).sum(axis=1)
        arrays = {
            **{f"query_{key}": array for key, array in queries.items()},
            **{f"source_{key}": array for key, array in sources.items()},
            "source_rows": rows.ravel().astype(np.int32),
            "positive": (rows.shape[1] * first).astype(np.int32),
            "gold_rows": gold_rows,
            "index": numbers.astype(np.int32),
            "truncated": lost.astype(np.int32),
        }
        if self._scored:
            scores = (self.examples[number].scores for number in numbers)
            arrays["scores"] = np.array(
                [
                    [known[row] for row in of_one]
                    for known, of_one in zip(scores, rows, strict=True)
                ],
                np.float32,
            )
        return arrays


def retriever_batches(
    made: RetrieverRows, feed: FeedConfig, members: Sequence[int] = ()
) -> Batches:
    """Batches of examples whose negatives are drawn anew in every epoch.

    members: of a mixture (`feed.mixture`), the corpus of every question.
    """

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((31, feed.seed, epoch))
        rows = np.stack([made.draw(rng, number) for number in made.numbers])
        return {"question": made.numbers, "rows": rows, "bucket": made.bucket(rows)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        length = made.lengths[planned.bucket]
        return made.batch(table["question"], table["rows"], length, planned.rows)

    shapes = [Bucket(0, length) for length in made.lengths]
    return feed_batches(mixed(sample, members, feed), shapes, make, feed)


def question_batches(numbers: np.ndarray, feed: FeedConfig, members: Sequence[int] = ()) -> Batches:
    """Batches of questions alone: their numbers, `question` [B], and places in the whole batch."""

    def sample(epoch: int) -> Table:
        return {"question": numbers, "bucket": np.zeros(len(numbers), np.int64)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        return {"question": np.asarray(table["question"]), "rows": np.asarray(planned.rows)}

    return feed_batches(mixed(sample, members, feed), [Bucket(0, 3)], make, feed)


# Training batches of the dual encoder: questions against gold sources and hard negatives.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastSampling:
    """Shapes of questions and sources, and what a question is contrasted with."""

    # Columns of the questions ([CLS] and [SEP] counted, here and below).
    query_length: int = at_least(3)
    # Columns of the sources, one static shape each. A single length mixes short captions with long
    # snippets, which is the better contrast.
    source_lengths: tuple[int, ...]
    num_negatives: int = at_least(0, 1)  # hard negatives of a question
    # Half of the examples with several gold sources are second-hop queries, as retrieval makes
    # them: the question followed by the title of one gold source, with another as the target. The
    # others target their first gold source.
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
