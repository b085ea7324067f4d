"""predictions.jsonl: one Prediction a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.data.schema import Prediction


def prediction_row(prediction: Prediction) -> dict[str, Any]:
    """A line of predictions.jsonl: all but the trace, which has a file of its own."""
    row = dataclasses.asdict(prediction)
    del row["trace"]
    return row


def prediction_of(row: Mapping[str, Any]) -> Prediction:
    """The prediction of `prediction_row`'s line, with its trace if there is one."""
    names = {field.name for field in dataclasses.fields(Prediction)}
    known = {name: value for name, value in row.items() if name in names}
    return Prediction(**{n: v if n == "trace" else _tuples(v) for n, v in known.items()})


def read_predictions(path: Path, source_ids: Container[str] | None = None) -> list[Prediction]:
    """Reads predictions; `question_id` is required, all else may be absent.

    Args:
      source_ids: the corpus's source ids; None: cited sources are not checked.

    Raises:
      UserError: names file and line of a malformed row or an unknown source.
    """
    predictions = []
    for number, row in read_jsonl(path):
        if not isinstance(row, dict) or not isinstance(row.get("question_id"), str):
            raise UserError(
                f'{path}, line {number}: expected an object with a text "question_id"; correct '
                "that line."
            )
        if not isinstance(row.get("answer", ""), str):
            raise UserError(f'{path}, line {number}: "answer" must be text; correct that line.')
        choice = row.get("choice")
        if choice is not None and type(choice) is not int:
            raise UserError(
                f'{path}, line {number}: "choice" must be the number of an option, counted from 0, '
                "or null; correct that line."
            )
        sources = row.get("sources", [])
        if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
            raise UserError(
                f'{path}, line {number}: "sources" must be a list of id strings; correct that line.'
            )
        for name in sources:
            if source_ids is not None and name not in source_ids:
                raise UserError(
                    f"{path}, line {number}: source {name!r} is not in the corpus; the file "
                    "belongs to another corpus."
                )
        predictions.append(prediction_of({**row, "trace": {}}))
    return predictions


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
