"""A row's answers in parts: chunks of questions in, JSON values out, and back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import Compute, Part
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.predictions import prediction_of
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.retrieval.rankings import ranking_of, ranking_row
from mmqa_jax.runs.opened_parts import OpenedParts
from mmqa_jax.runs.settings import check_inputs, known_systems, run_setting

# The parts of a row whose rankings are kept -> the file of retrieval/ that they go to.
_RANKED = {"retriever": "candidates", "reranker": "relevance"}
_FILES = ("heuristics", "finished", "captions")  # parts that need no model


def answering(
    config: ConfigDict, questions: Sequence[Question], corpus: Corpus, opened: OpenedParts
) -> Compute:
    """Opens a row's parts; returns what executes its setting on a chunk of the questions."""
    parts, system = _open_parts(config, questions, opened), known_systems()[config.system]
    serving = {key: one.to_json() for key, one in opened.serving.items()}

    def answer(chunk: range) -> Part:
        asked = questions[chunk.start : chunk.stop]
        opened.seconds.clear()
        before = _work(parts)
        predictions = run_setting(system, config.setting, asked, corpus, parts, config.options)
        rankings = {
            name: parts[part].rankings
            for part, name in _RANKED.items()
            if part in parts and parts[part].rankings
        }
        rows = [
            {
                "prediction": dataclasses.asdict(prediction),
                "rankings": {name: ranking_row(of[i]) for name, of in rankings.items()},
                "seconds": opened.seconds.get(prediction.question_id, 0.0),
            }
            for i, prediction in enumerate(predictions)
        ]
        work = {k: n - before[k] for k, n in _work(parts).items()}
        llm = parts.get("llm")
        engine = None if llm is None else llm.sizes()
        return Part(rows, {"llm": work, "engine": engine, "serving": serving})

    return answer


def _open_parts(
    config: ConfigDict, questions: Sequence[Question], opened: OpenedParts
) -> dict[str, Any]:
    """A row's parts; files come first and the language model last: wrong files are refused soon."""
    sections = dict(config.parts)
    parts = opened.of_row({name: sections.pop(name) for name in _FILES if name in sections})
    if "heuristics" in parts:
        parts["heuristics"] = parts["heuristics"].of_split(questions)
    check_inputs(known_systems()[config.system], config.setting, questions, config.options, parts)
    last = sorted(sections, key=lambda name: name == "llm")
    return parts | opened.of_row({name: sections[name] for name in last})


@dataclasses.dataclass(frozen=True)
class Answered:
    """A row's answers to all questions.

    Attributes:
      rankings: `candidates` of the retriever and `relevance` of the reranker, if the row has them.
      seconds: question id -> seconds that the parts spent on it.
      llm: what the language model's answers cost (prompting.cache.Work); empty without one.
      engine: its last devices and sizes; None: a server, or all answers were kept ones.
      serving: of the other models (OpenedParts.serving), as JSON, where they ran last.
    """

    predictions: list[Prediction]
    rankings: dict[str, list[Ranking]]
    seconds: dict[str, float]
    llm: dict[str, int]
    engine: dict[str, Any] | None = None
    serving: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Answered:
        """Of the parts of `answering`, in order."""
        rows = [row for part in parts for row in part.rows]
        if rows and not set(rows[0]["rankings"]) <= set(_RANKED.values()):
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
        for part in parts:
            llm.update(part.notes["llm"])
            serving.update(part.notes.get("serving") or {})
        engines = [part.notes["engine"] for part in parts if part.notes.get("engine")]
        engine = engines[-1] if engines else None
        return cls(predictions, rankings, seconds, dict(llm), engine, serving)


def _work(parts: dict[str, Any]) -> dict[str, int]:
    llm = parts.get("llm")
    return {} if llm is None else dataclasses.asdict(llm.work)
