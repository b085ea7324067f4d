"""A JSON body of OpenAI's API, read key by key: what is wrong or unknown is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError

_REQUIRED: Any = object()
_SHOWN = 60  # characters of a wrong value in a message


class WrongField(UserError):
    """A body that cannot be served, and the key that is wrong in it; None: no single one is."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class Fields:
    """The keys of a body, each of which is taken once."""

    def __init__(self, body: Mapping[str, Any]):
        self._left = dict(body)

    def names(self) -> set[str]:
        """The keys that were given, with another value than null."""
        return {key for key, value in self._left.items() if value is not None}

    def take(self, key: str, kinds: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """A value of one of some types (a bool is no number); null, or none, is the default."""
        value = self._left.pop(key, None)
        if value is None:
            if default is _REQUIRED:
                raise WrongField(f"{key} is missing; give it.", param=key)
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise wrong(key, value, f"expected {names}")
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """A number within bounds."""
        value = self.take(key, (int, float), default)
        if not least <= value <= most:
            raise wrong(key, value, f"expected {least:g} to {most:g}")
        return float(value)

    def whole(self, key: str, default: Any, least: int, most: int) -> Any:
        """An integer within bounds, or the default."""
        value = self.take(key, int, default)
        if value is not default and not least <= value <= most:
            raise wrong(key, value, f"expected {least:,} to {most:,}")
        return value

    def only(self, key: str, *values: Any, why: str = "is not supported here") -> None:
        """A key that may be given, but changes nothing: one of these values, or none."""
        value = self._left.pop(key, None)
        if value is not None and value not in values:
            raise WrongField(f"{key} {why}; leave it out.", param=key)

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing about the answer."""
        for key in keys:
            self._left.pop(key, None)

    def end(self) -> None:
        """WrongField for a key that nobody took."""
        for key in self._left:
            raise WrongField(f"{key} is no key that is known here; leave it out.", param=key)


def wrong(key: str, value: Any, expected: str) -> WrongField:
    """The refusal of a key's value."""
    quoted = json.dumps(value, default=str)
    quoted = quoted if len(quoted) <= _SHOWN else f"{quoted[:_SHOWN]}..."
    return WrongField(f"{key} is {quoted}, {expected}.", param=key)


def strings(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def token_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(item) is int for item in value)
