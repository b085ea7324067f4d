"""Columns of the tables that other libraries hand over: pandas, polars, pyarrow, `datasets`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError


def columns_of(table: Any) -> dict[str, list[Any]] | None:
    """A table's columns as lists, missing values as None; None: the value is no table."""
    names = getattr(table, "column_names", None)  # of pyarrow and datasets
    if names is None and hasattr(table, "to_dict"):  # of pandas and polars
        names = getattr(table, "columns", None)
    if names is None or isinstance(table, Mapping):
        return None
    return {str(name): _values(table[name]) for name in names}


def take_column(columns: Mapping[str, list[Any]], names: tuple[str, ...], where: str) -> list[Any]:
    """The first column of these names that a table has; UserError if it has none of them."""
    for name in names:
        if name in columns:
            return columns[name]
    raise UserError(
        f"{where}: the table has no column {' or '.join(names)} (its columns are "
        f"{', '.join(columns) or 'none'}); rename the one that is meant."
    )


def _values(column: Any) -> list[Any]:
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    return [None if isinstance(v, float) and math.isnan(v) else v for v in values]
