"""The two ways a command fails: the user's input is wrong, or the run itself fails.

Every function that reads what a user wrote (a file, a flag, a key) may raise `UserError`; the
docstrings name other exceptions alone.
"""

from collections.abc import Iterable


class UserError(Exception):
    """The user's input is wrong (exit code 2).

    The message is one sentence that names the file, line, flag or key, says what was
    expected, and what to do about it. The command line prints it without a traceback.
    """


class RunError(Exception):
    """The run itself failed: non-finite loss, too many broken pictures (exit code 1)."""


def first_names(names: Iterable[str], most: int = 5) -> str:
    """The first few names, for a message: `a, b, c, d, e, ...`."""
    names = list(names)
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])
