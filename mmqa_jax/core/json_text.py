"""JSON text as values: one parser, so that every reader refuses the same damage alike."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from mmqa_jax.core.errors import UserError

# Levels of lists and objects. Data of this field have fewer than ten; what walks or writes values
# in Python ends at about a thousand.
DEEPEST = 100
_TOO_DEEP = f"lists or objects nested more than {DEEPEST} deep"
_SHORTEN = "shorten it or fetch the file again"
REPAIR = "repair that line or fetch the file again"
_NUMBER = r"(?<![\w\".+-])-?\d{%d,}"
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# Escapes of a string in order: a pair, one half (group 1), any other.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\(u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def parse_json(
    text: str | bytes,
    place: str,
    *,
    line: int | None = None,
    remedy: str = REPAIR,
    unique_keys: bool = False,
) -> Any:
    """The value of JSON text; a mark of byte order before it is dropped.

    NaN and Infinity are read, as Python and pandas write them; who needs a number that is finite
    checks it.

    Args:
      text: the whole text of one value; bytes are UTF-8.
      place: begins the sentence of an error: a file, a row of one, a server's reply.
      line: number of the line of the file `place` that `text` begins at; the error then names line
        and column. None: `place` says enough.
      remedy: ends the sentence about text that is no JSON.
      unique_keys: refuse a key that appears twice in an object; else the last one counts.
    """

    def refused(what: str, position: int, end: str = remedy) -> UserError:
        if line is None:
            return UserError(f"{place}: {what}; {end}.")
        number = line + text.count("\n", 0, position)
        column = position - text.rfind("\n", 0, position)
        return UserError(f"{place}, line {number}, column {column}: {what}; {end}.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise UserError(f"{place}: key {twice!r} appears twice in one object; remove one.")
        return result

    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 text (byte {error.start}); {remedy}.") from error
    text = text.removeprefix("\ufeff")
    try:
        value = json.loads(text, object_pairs_hook=unique if unique_keys else None)
    except json.JSONDecodeError as error:
        raise refused(f"not valid JSON ({error.msg})", error.pos) from error
    except RecursionError as error:
        raise refused(_TOO_DEEP, _deep_position(text), _SHORTEN) from error
    except ValueError as error:  # an integer of too many digits
        digits = sys.get_int_max_str_digits()
        found = re.search(_NUMBER % (digits + 1), text)
        what = f"an integer of more than {digits:,} digits"
        raise refused(what, found.start() if found else 0, _SHORTEN) from error
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise refused(_TOO_DEEP, _deep_position(text), _SHORTEN)
    if _HALF.search(text) and (half := next(filter(_first_group, _ESCAPE.finditer(text)), None)):
        end = "write it whole or take it out"
        raise refused(f"holds '\\{half[1].lower()}', half of a character", half.start(), end)
    return value


def _first_group(match: re.Match) -> str | None:
    return match[1]


def _is_deep(value: Any) -> bool:
    """Whether a parsed value has more than DEEPEST levels; level by level, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            one
            for outer in level
            for one in (outer.values() if type(outer) is dict else outer)
            if type(one) is dict or type(one) is list
        ]
        if not level:
            return False
    return True


def _deep_position(text: str) -> int:
    """Where the first bracket of more than DEEPEST open ones stands."""
    depth = 0
    for match in _BRACKET.finditer(text):
        if match[1] or match[2]:
            depth += 1 if match[1] else -1
        if depth > DEEPEST:
            return match.start()
    return 0
