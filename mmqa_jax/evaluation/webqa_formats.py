"""Prediction files of WebQA: the official output TSV, the leaderboard's and the baseline's JSON.

    output TSV    Guid, Qcate, Q, A (JSON list), Keywords_A, Output_conf, Output (JSON list);
                  holds references and predictions (WebQA_Baseline vlp/eval_1022.py reads it)
    leaderboard   {Guid: {"sources": [image_id | snippet_id], "answer": text}} (EvalAI)
    end to end    {Guid: {"predicted sources", "predicted answers", "answer confidence"}}, as the
                  baseline's released outputs

The leaderboard's file is written and read in data.datasets.webqa.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_text
from mmqa_jax.data.datasets.webqa import parse_submission, read_unique_json
from mmqa_jax.data.schema import WEBQA_CATEGORIES, Prediction, Question

if TYPE_CHECKING:
    from mmqa_jax.data.corpus import Corpus

COLUMNS = ("Guid", "Qcate", "Q", "A", "Keywords_A", "Output_conf", "Output")
_NEEDED = tuple(name for name in COLUMNS if name != "Output_conf")
_ANSWERS, _SOURCES, _CONFIDENCE = "predicted answers", "predicted sources", "answer confidence"


class OutputTsv(NamedTuple):
    """An official output TSV."""

    questions: list[Question]
    predictions: list[Prediction]


def read_output_tsv(path: str | os.PathLike, output_idx: int = 0) -> OutputTsv:
    """Reads an official output TSV, which holds its own references.

    Columns are found by the header's names. Lines are cut at every tab and quotes mean nothing,
    as in the official script.

    Args:
      output_idx: which of a line's outputs is the answer, as in the official script.

    Raises:
      UserError: names the line of a missing column, bad JSON, an unknown category, a missing
        output or a Guid that stands twice.
    """
    lines = read_text(path).split("\n")
    header = lines[0].strip().split("\t")
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise UserError(
            f"{path}, line 1: no column {', '.join(missing)}; an official output TSV begins with "
            f"the names {', '.join(COLUMNS)}, separated by tabs."
        )
    questions: dict[str, Question] = {}
    predictions = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        values = line.strip().split("\t")
        if len(values) != len(header):
            raise UserError(
                f"{place}: {len(values)} columns, the header names {len(header)}; repair that "
                "line or fetch the file again."
            )
        row = dict(zip(header, values, strict=True))
        guid, category = row["Guid"], row["Qcate"]
        if guid in questions:
            raise UserError(f"{place}: Guid {guid} stands twice; remove one line.")
        if category not in WEBQA_CATEGORIES:
            raise UserError(
                f"{place}: Qcate is {category!r}; expected one of {', '.join(WEBQA_CATEGORIES)}."
            )
        outputs = _strings(row["Output"], "Output", place)
        if output_idx >= len(outputs):
            raise UserError(
                f"{place}: Output holds {len(outputs)} answers, number {output_idx} (from 0) was "
                "asked for; give a smaller number or a file with more."
            )
        questions[guid] = Question(
            guid,
            "val",
            row["Q"],
            answers=tuple(_strings(row["A"], "A", place)),
            keywords=row["Keywords_A"],
            category=category,
        )
        beams = _beams(outputs, row.get("Output_conf", ""))
        predictions.append(Prediction(guid, outputs[output_idx], beams=beams))
    return OutputTsv(list(questions.values()), predictions)


def is_output_tsv(path: str | os.PathLike) -> bool:
    """Whether a file's name says that it is a TSV."""
    return str(path).lower().endswith(".tsv")


def read_prediction_json(path: str | os.PathLike, corpus: Corpus | None = None) -> list[Prediction]:
    """Reads the leaderboard's JSON or the baseline's end-to-end JSON, told apart by their keys.

    Args:
      corpus: its source ids take the place of the snippet ids by which a question lists them.

    Raises:
      UserError: names the file and the Guid of a malformed row.
    """
    data = read_unique_json(path)
    if isinstance(data, dict) and any(
        isinstance(row, dict) and _ANSWERS in row for row in data.values()
    ):
        beams = {}
        for guid, row in data.items():
            place = f"{path}, Guid {guid}"
            answers = row.get(_ANSWERS) if isinstance(row, dict) else None
            if not _is_strings(answers):
                raise UserError(f"{place}: {_ANSWERS!r} must be a list of strings; correct it.")
            beams[guid] = _beams(answers, row.get(_CONFIDENCE))
            data[guid] = {"sources": row.get(_SOURCES), "answer": answers[0] if answers else ""}
        predictions = parse_submission(data, path, corpus)
        return [
            Prediction(p.question_id, p.answer, p.sources, beams=beams[p.question_id])
            for p in predictions
        ]
    return parse_submission(data, path, corpus)


def _beams(answers: list[str], confidence: Any) -> tuple[tuple[str, float], ...]:
    """Answers with their log-probabilities; none where the file does not say them.

    The released files have the list as text, in the TSV in quotes besides.
    """
    for _ in range(2):
        if isinstance(confidence, str):
            try:
                confidence = json.loads(confidence)
            except ValueError:
                return ()
    if not isinstance(confidence, list) or len(confidence) != len(answers):
        return ()
    if not all(isinstance(value, int | float) for value in confidence):
        return ()
    return tuple(zip(answers, map(float, confidence), strict=True))


def _strings(text: str, column: str, place: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not _is_strings(values):
        raise UserError(
            f"{place}: {column} is {text[:40]!r}, not a JSON list of strings; repair that line."
        )
    return values


def _is_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
