"""The two ways a command fails: the user's input is wrong, or the run itself fails.

Every function that reads what a user wrote (a file, a flag, a key) may raise `UserError`; the
docstrings name other exceptions alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

EXIT_HANGING = 75  # of sysexits.h: a temporary failure, launchers try again


class UserError(Exception):
    """The user's input is wrong (exit code 2).

    The message is one sentence that names the file, line, flag or key, says what was
    expected, and what to do about it. The command line prints it without a traceback.
    """


class RunError(Exception):
    """The run itself failed: non-finite loss, too many broken pictures (exit code 1)."""


def import_optional(module: str, what: str, extra: str, package: str = "") -> Any:
    """Imports a module that only `what` needs; UserError where its package is missing.

    `extra`, of pyproject.toml, has the package, whose name may differ from the module's.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs the package {package or module.partition('.')[0]}; install it with "
            f"`pip install 'mmqa-jax[{extra}]'`."
        ) from error


def first_names(names: Iterable[str], most: int = 5) -> str:
    """The first few names, for a message: `a, b, c, d, e, ...`."""
    names = list(names)
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])


# Checks of arguments: one text where several are expected, numbers with too many digits.


def check_several(values: Any, where: str, what: str = "texts") -> None:
    """TypeError for one text in place of a sequence: as a sequence it is its letters.

    Args:
      where: the call, which begins the sentence.
      what: was expected.
    """
    if isinstance(values, str | bytes):
        raise TypeError(
            f"{where}: one text was given, {values!r:.60}, and a sequence of {what} was expected; "
            "put it into a list."
        )


def decimal_number(text: str) -> int | None:
    """The number that a text of decimal digits is; None for any other text, and from 10^18 on.

    Python ends with a traceback at more than 4,300 digits.
    """
    return int(text) if len(text) <= 18 and text.isdecimal() else None


def check_questions(questions: Sequence[Any], where: str) -> None:
    """TypeError unless these are Questions, or a sequence of them to all appearances."""
    check_several(questions, where, "Questions")
    first = next(iter(questions), None) if isinstance(questions, Sequence) else None
    if isinstance(first, str | bytes):
        raise TypeError(
            f"{where}: texts were given, the first is {first!r:.60}, and Questions were expected; "
            'make them with mmqa_jax.data.schema.Question(id, "test", text).'
        )
