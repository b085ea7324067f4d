"""Checks that the configs of several models share; `name` is the config key that the user set.

All raise UserError: `model.heads is 5: expected a divisor of model.hidden = 36; change one of the
two.`
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.config_json import MOST_LAYERS

_MOST_BLOCKS = 200


def check_divides(name: str, count: int, whole_name: str, whole: int) -> None:
    """Checks that `count` (heads) divides `whole` (their total width)."""
    if count < 1 or whole % count:
        raise UserError(
            f"{name} is {count}: expected a divisor of {whole_name} = {whole}; change one of the "
            "two."
        )


def check_layers(config: Any, name: str, *fields: str) -> None:
    """Checks that a config has no more layers than a program can be made of.

    Args:
      name: of the config, such as `model`.
      fields: with numbers of layers.
    """
    for field in fields:
        if getattr(config, field) > MOST_LAYERS:
            raise UserError(
                f"{name}.{field} is {getattr(config, field)}: expected at most {MOST_LAYERS:,}; "
                "correct it."
            )


def check_stages(name: str, blocks: Sequence[int]) -> None:
    """Checks how many blocks the four stages of a ResNet have: readers go through them all."""
    if len(blocks) != 4 or not all(1 <= count <= _MOST_BLOCKS for count in blocks):
        raise UserError(
            f"{name}: blocks {blocks}; give four numbers from 1 to {_MOST_BLOCKS}, one a stage."
        )


def check_rate(name: str, rate: float) -> None:
    """Checks a dropout rate."""
    if not 0.0 <= rate < 1.0:
        raise UserError(f"{name} is {rate}: expected a rate from 0 to below 1; change it.")


def check_known(name: str, value: Any, known: Iterable[Any]) -> None:
    """Checks that a value is one of the known choices."""
    known = list(known)
    if value not in known:
        raise UserError(
            f"{name} is {value!r}: expected one of {', '.join(map(str, known))}; use one of these."
        )


def check_length(length: int, positions: int) -> None:
    """Checks that a batch is no longer than the model has positions."""
    if length > positions:
        raise UserError(
            f"a batch is {length} tokens long: expected at most model.positions = {positions}; use "
            "shorter buckets."
        )


def with_fields(config: Any, changes: Mapping[str, Any]) -> Any:
    """The config with other values of some fields, as a config file has them."""
    # Read from a config file a tuple is a list, which is no part of a hash.
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in changes.items()}
    return dataclasses.replace(config, **values)


def published_sizes(key: str, name: str, presets: Mapping[str, Callable[..., Any]]) -> Any:
    """The published sizes that the config key `key` names."""
    if name not in presets:
        raise UserError(f"config key {key}={name}: unknown; use one of {', '.join(presets)}.")
    return presets[name]()
