"""predictions.jsonl: one Prediction a line; evaluation/prediction_lines.py reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
