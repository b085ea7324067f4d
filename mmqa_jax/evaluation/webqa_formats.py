"""Prediction files of WebQA: the official output TSV, the leaderboard's and the baseline's JSON.

    output TSV    Guid, Qcate, Q, A (JSON list), Keywords_A, Output_conf, Output (JSON list);
                  references and predictions in one file (read by WebQA_Baseline vlp/eval_1022.py)
    leaderboard   {Guid: {"sources": [image_id | snippet_id], "answer": text}} (EvalAI)
    end to end    {Guid: {"predicted sources", "predicted answers", "answer confidence"}}, as the
                  baseline's released outputs

data.datasets.webqa writes and parses the leaderboard's file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, read_text
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.data.datasets.webqa import parse_submission
from mmqa_jax.data.schema import WEBQA_CATEGORIES, Prediction, Question
from mmqa_jax.data.table_files import real_number

if TYPE_CHECKING:
    from mmqa_jax.data.corpus import Corpus

COLUMNS = ("Guid", "Qcate", "Q", "A", "Keywords_A", "Output_conf", "Output")
_NEEDED = tuple(name for name in COLUMNS if name != "Output_conf")
_ANSWERS, _SOURCES, _CONFIDENCE = "predicted answers", "predicted sources", "answer confidence"


class OutputTsv(NamedTuple):
    """An official output TSV."""

    questions: list[Question]
    predictions: list[Prediction]


def read_output_tsv(path: str | os.PathLike) -> OutputTsv:
    """Reads an official output TSV, which contains its own references.

    Columns are identified by the header. Lines are split at every tab and quotes are not special,
    as in the official script; the first of a line's outputs is the answer.
    """
    lines = read_text(path).split("\n")
    header = lines[0].strip().split("\t")
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise UserError(
            f"{path}, line 1: no column {', '.join(missing)}; an official output TSV starts with "
            f"the header {', '.join(COLUMNS)}, separated by tabs."
        )
    questions: dict[str, Question] = {}
    predictions = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        values = line.strip().split("\t")
        if len(values) != len(header):
            raise UserError(
                f"{where}: {len(values)} columns, but the header has {len(header)}; fix that line "
                "or download the file again."
            )
        row = dict(zip(header, values, strict=True))
        guid, category = row["Guid"], row["Qcate"]
        if guid in questions:
            raise UserError(f"{where}: Guid {guid} is repeated; remove one line.")
        if category not in WEBQA_CATEGORIES:
            raise UserError(
                f"{where}: Qcate is {category!r}; expected one of {', '.join(WEBQA_CATEGORIES)}."
            )
        outputs = _strings(row["Output"], "Output", where)
        if not outputs:
            raise UserError(f"{where}: Output holds no answer; at least one was expected.")
        questions[guid] = Question(
            guid,
            "val",
            row["Q"],
            answers=tuple(_strings(row["A"], "A", where)),
            keywords=row["Keywords_A"],
            category=category,
        )
        beams = _beams(outputs, row.get("Output_conf", ""))
        predictions.append(Prediction(guid, outputs[0], beams=beams))
    return OutputTsv(list(questions.values()), predictions)


def is_output_tsv(path: str | os.PathLike) -> bool:
    """Whether a file is named `.tsv`."""
    return str(path).lower().endswith(".tsv")


def read_prediction_json(path: str | os.PathLike, corpus: Corpus | None = None) -> list[Prediction]:
    """Reads the leaderboard's JSON or the baseline's end-to-end JSON, recognized by their keys.

    Args:
      corpus: its source ids replace the snippet ids of the questions' own lists.
    """
    data = read_json(path, unique_keys=True)
    if isinstance(data, dict) and any(
        isinstance(row, dict) and _ANSWERS in row for row in data.values()
    ):
        beams = {}
        for guid, row in data.items():
            where = f"{path}, Guid {guid}"
            answers = row.get(_ANSWERS) if isinstance(row, dict) else None
            if not _is_strings(answers):
                raise UserError(f"{where}: {_ANSWERS!r} must be a list of strings; correct it.")
            beams[guid] = _beams(answers, row.get(_CONFIDENCE))
            data[guid] = {"sources": row.get(_SOURCES), "answer": answers[0] if answers else ""}
        predictions = parse_submission(data, path, corpus)
        return [
            Prediction(p.question_id, p.answer, p.sources, beams=beams[p.question_id])
            for p in predictions
        ]
    return parse_submission(data, path, corpus)


def unknown_sources(predictions: Sequence[Prediction], corpus: Corpus) -> list[tuple[str, str]]:
    """Citations of sources that a corpus lacks: (question id, source id), in order.

    The authors' own submissions hold such ids ("dummy", CLIP_encodings.ipynb, cell 40).
    """
    return [
        (prediction.question_id, name)
        for prediction in predictions
        for name in prediction.sources
        if name not in corpus.row
    ]


def _beams(answers: list[str], confidence: Any) -> tuple[tuple[str, float], ...]:
    """Answers with their log-probabilities; empty if the file does not have them.

    The released files contain the list as a string, which is quoted once more in the TSV.
    """
    for _ in range(2):
        if isinstance(confidence, str):
            try:
                confidence = parse_json(confidence, _CONFIDENCE)
            except UserError:
                return ()
    if not isinstance(confidence, list) or len(confidence) != len(answers):
        return ()
    values = [value for x in confidence if (value := real_number(x)) is not None]
    return tuple(zip(answers, values, strict=True)) if len(values) == len(answers) else ()


def _strings(text: str, column: str, where: str) -> list[str]:
    try:
        values = parse_json(text, where)
    except UserError:
        values = None
    if not _is_strings(values):
        raise UserError(
            f"{where}: {column} is {text[:40]!r}, not a JSON list of strings; fix that line."
        )
    return values


def _is_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
