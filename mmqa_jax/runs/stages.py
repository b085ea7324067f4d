"""Answers questions in chunks: each chunk's results are JSON values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.chunks import WHOLE, Compute, Engine, Job, Shard
from mmqa_jax.core.chunks import Part as ChunkPart
from mmqa_jax.data.schema import Prediction, Question, Ranking, prediction_of
from mmqa_jax.retrieval.rankings import ranking_of, ranking_row
from mmqa_jax.runs.part import OpenedParts, Part
from mmqa_jax.runs.parts import LLMS, PARTS

# The parts of a row that rank sources -> the file of retrieval/ that their rankings go to.
_RANKS = {name: part.ranks for name, part in PARTS.items() if part.ranks}

# The questions of a chunk and the opened parts -> what is kept of the chunk.
Answer = Callable[[Sequence[Question], Mapping[str, Any]], ChunkPart]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A task on questions: a function of papers/ or extensions/, and the parts it takes.

    `mmqa run` makes one of a row, the verbs `search`, `rerank` and `answer` of their flags.
    """

    what: Mapping[str, Any]  # all that the answers depend on, see core.chunks.Job
    parts: Mapping[str, Part]  # opened when a chunk is to be computed
    answer: Answer  # calls the function
    # Values that `answer` gets with the parts, one for each question.
    along: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    # UserError for files that do not fit the questions; called with the opened parts that are
    # files, before models load.
    check: Callable[[Mapping[str, Any]], None] | None = None


@contextlib.contextmanager
def answering(
    stage: Stage,
    folder: Path,
    questions: Sequence[Question],
    opened: OpenedParts,
    *,
    chunk: int,
    shard: Shard = WHOLE,
    engine: Engine | None = None,
    title: str = "",
    unit: str = "",
) -> Iterator[Job]:
    """Answers the questions in chunks, in a folder, as Job does; yields the job when this process
    has done its share. Without title and unit of the progress the parts show their own."""
    with Job(folder, stage.what, len(questions), chunk=chunk, shard=shard, engine=engine) as job:
        try:
            job.run(lambda: _computing(stage, questions, opened), title, unit)
        finally:
            opened.close()
        yield job


def _computing(stage: Stage, questions: Sequence[Question], opened: OpenedParts) -> Compute:
    """Opens the parts; returns what answers a chunk of the questions."""
    parts = open_parts(stage, questions, opened)

    def compute(chunk: range) -> ChunkPart:
        span = slice(chunk.start, chunk.stop)
        along = {name: values[span] for name, values in stage.along.items()}
        return stage.answer(questions[span], {**parts, **along})

    return compute


def open_parts(stage: Stage, questions: Sequence[Question], opened: OpenedParts) -> dict[str, Any]:
    """The parts in use, in their turn."""
    opened.new_row()
    files = {name: part for name, part in stage.parts.items() if part.turn == "file"}
    parts = {name: opened.part(name, part) for name, part in files.items()}
    if "heuristics" in parts:
        parts["heuristics"] = parts["heuristics"].of_split(questions)
    if stage.check is not None:
        stage.check(parts)
    for turn in ("model", "llm", "last"):
        for name, part in stage.parts.items():
            if part.turn == turn:
                parts[name] = opened.part(name, part)
    return parts


@dataclasses.dataclass(frozen=True)
class Answered:
    """A row's answers to all questions."""

    predictions: list[Prediction]
    # `candidates` of the retriever and `relevance` of the reranker, if the row has them.
    rankings: dict[str, list[Ranking]]
    seconds: dict[str, float]  # question id -> seconds that the parts spent on it
    # What the answers of its language models cost (`Work` of prompting/backends/cache.py); empty
    # without one.
    llm: dict[str, int]
    # Its last devices and sizes; None: a server, or all answers were kept ones.
    engine: dict[str, Any] | None = None
    # Of the other models (OpenedParts.serving), as JSON, where they ran last.
    serving: dict[str, Any] = dataclasses.field(default_factory=dict)
    unscored: int = 0  # pairs of question and source that a language model gave no score

    @classmethod
    def of(cls, chunks: Sequence[ChunkPart]) -> Answered:
        """Joins the chunks that `keeping` made, in order."""
        rows = [row for chunk in chunks for row in chunk.rows]
        if rows and not set(rows[0]["rankings"]) <= set(_RANKS.values()):
            raise ValueError("rankings of unknown names")  # which would become names of files
        predictions = [prediction_of(row["prediction"]) for row in rows]
        rankings = {
            name: [ranking_of(row["rankings"][name]) for row in rows]
            for name in (rows[0]["rankings"] if rows else ())
        }
        seconds = {
            prediction.question_id: row["seconds"]
            for prediction, row in zip(predictions, rows, strict=True)
        }
        llm: Counter[str] = Counter()
        serving: dict[str, Any] = {}
        for chunk in chunks:
            llm.update(chunk.notes["llm"])
            serving.update(chunk.notes.get("serving") or {})
        engines = [chunk.notes["engine"] for chunk in chunks if chunk.notes.get("engine")]
        engine = engines[-1] if engines else None
        unscored = sum(row.get("unscored", 0) for row in rows)
        return cls(predictions, rankings, seconds, dict(llm), engine, serving, unscored)


def keeping(
    predict: Callable[[Sequence[Question], Mapping[str, Any]], Sequence[Prediction]],
    opened: OpenedParts,
) -> Answer:
    """Makes what answers a chunk of a row by `predict`, of its questions and the opened parts, and
    keeps what `Answered` is made of."""

    def answer(questions: Sequence[Question], parts: Mapping[str, Any]) -> ChunkPart:
        opened.seconds.clear()
        llm = parts.get("llm")
        llms = [parts[name] for name in LLMS if name in parts]
        before = _work(llms)
        names = [question.id for question in questions]
        recorded = {name: _Recorded(parts[name], names) for name in _RANKS if name in parts}
        predictions = predict(questions, {**parts, **recorded})
        rankings = {_RANKS[name]: part.rankings for name, part in recorded.items()}
        rows = [
            {
                "prediction": dataclasses.asdict(prediction),
                "rankings": {name: ranking_row(of[i]) for name, of in rankings.items() if of},
                "seconds": opened.seconds.get(prediction.question_id, 0.0),
                "unscored": opened.unscored[prediction.question_id],
            }
            for i, prediction in enumerate(predictions)
        ]
        notes = {
            "llm": {key: n - before[key] for key, n in _work(llms).items()},
            "engine": None if llm is None else llm.sizes(),
            "serving": {key: serving.to_json() for key, serving in opened.serving.items()},
        }
        return ChunkPart(rows, notes)

    return answer


def _work(llms: Sequence[Any]) -> dict[str, int]:
    """Sums up the cost so far of all language models of a row."""
    each = [dataclasses.asdict(llm.work) for llm in llms]
    return {key: sum(work[key] for work in each) for key in (each[0] if each else ())}


class _Recorded:
    """A retriever or reranker that keeps the last rankings it returned, for retrieval scores.

    Rankings of other questions than these `names`, such as a model's own queries, are not kept.
    """

    def __init__(self, part: Any, names: Sequence[str]):
        self._part, self._names = part, list(names)
        self.rankings: list[Ranking] = []

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        return self._keep(self._part.search(questions, top_k))

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        return self._keep(self._part.search_within(questions, candidates))

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        return self._keep(self._part.score(questions, candidates))

    def _keep(self, rankings: list[Ranking]) -> list[Ranking]:
        if [ranking.question_id for ranking in rankings] == self._names:
            self.rankings = rankings
        return rankings
