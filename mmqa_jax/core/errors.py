"""The two ways a command fails: the user's input is wrong, or the run itself fails.

Every function that reads what a user wrote (a file, a flag, a key) may raise `UserError`; the
docstrings name other exceptions alone.

A disk that takes no more is recognized in any exception and said once: Python, SQLite, NumPy,
PyArrow, TensorStore and ArrayRecord raise exceptions of their own for the same few errors of the
operating system, some of them as text alone.
"""

import contextlib
import errno
import importlib
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


# What may be wrong, and what to do before the same command is started again.
_KINDS = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space or have the quota raised"),
    errno.EFBIG: ("a file may not grow that large there", "raise the limit (`ulimit -f`)"),
    errno.EROFS: ("its file system is read-only", "have it mounted for writing"),
    errno.EIO: ("its disk does not read or write (input/output error)", "have the disk checked"),
}
_TEXTS = {
    **{os.strerror(code): code for code in _KINDS},
    "database or disk is full": errno.ENOSPC,  # SQLite
    "disk I/O error": errno.EIO,  # SQLite
}
_NUMPY = re.compile(r"^\d+ requested and \d+ written$")  # ndarray.tofile, np.save
_TENSORSTORE = re.compile(r"os_error_code='(\d{1,9})'")
_PATH = re.compile(r"[\"'](/[^\"'\n]+)[\"']")
# See core.files.unfinished; a folder's may lack host and process.
_UNFINISHED = re.compile(r"\.(.+?)(?:\.[\w-]+\.\d+)?\.tmp")
_PROBE = bytes(64 * 1024)
_ORBAX = ".orbax-checkpoint-tmp"


class DiskFailure(NamedTuple):
    """A refusal by a disk."""

    code: int  # of the operating system (errno)
    path: str | None  # of the file, if the exception names it

    def sentence(self, places: Iterable[str | os.PathLike] = ()) -> str:
        """Says which file (or one of `places`), what is wrong, what is free and what to do."""
        path = self.path or next(map(str, places), None)
        wrong, remedy = _KINDS[self.code]
        named = f"{_shown(path)}: cannot be written, because " if path else ""
        room = _room(path) if path and self.code == errno.ENOSPC else ""
        return (
            f"{named}{wrong}{room}; what was finished before is kept: {remedy} and start the same "
            "command again, which continues."
        )


def find_disk_failure(error: BaseException) -> DiskFailure | None:
    """The failure of a disk that an exception, or one that led to it, tells of; else None."""
    code, path = None, None
    for cause in _chain(error):
        errno_of_cause = _code_of(cause)
        if errno_of_cause is None:
            continue
        code = errno_of_cause if code is None else code
        path = path or _path_of(cause)
    return None if code is None else DiskFailure(code, path)


def try_disk(folder: str | os.PathLike) -> None:
    """OSError if nothing can be written there: for libraries that do not tell what went wrong."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(folder)
        raise


@contextlib.contextmanager
def report_full_disk(folder: str | os.PathLike) -> Iterator[None]:
    """Turns what tells of a failed disk, while `folder` is written, into a RunError."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        failure = find_disk_failure(error)
        if failure is None:
            raise
        raise RunError(failure.sentence([folder])) from error


@contextlib.contextmanager
def report_disk_once() -> Iterator[None]:
    """While the block runs, threads and libraries are silent about a disk that fails.

    Orbax logs each thread's traceback, hundreds of lines, TensorStore's callbacks print theirs, and
    so do threads that go on until the process ends. Where the block itself ends with such a
    failure, which the caller reports, they stay silent.
    """
    silence = _Silence()
    logger, hooks = logging.getLogger("absl"), _Hooks()
    logger.addFilter(silence)
    held: list[tuple] = []  # TensorStore tells its callbacks' errors before Orbax says why

    def lost(details: Any) -> None:
        if not silence.let_pass(details.exc_value):
            return
        if details.object is None:  # of a callback in C++, which is nobody's
            held.append((hooks.lost, details))
        else:
            hooks.lost(details)

    def uncaught(*details: Any) -> None:
        if silence.let_pass(details[1]):
            held.append((hooks.uncaught, *details))

    threading.excepthook = lambda details: (
        silence.let_pass(details.exc_value) and hooks.thread(details)
    )
    sys.unraisablehook, sys.excepthook = lost, uncaught
    try:
        yield
    except BaseException as error:
        silence.let_pass(error)
        raise
    finally:
        if not silence.failed:
            logger.removeFilter(silence)
            hooks.restore()
            for hook, *details in held:
                hook(*details)


class _Hooks:
    """The functions that Python calls for exceptions that nobody catches."""

    def __init__(self) -> None:
        self.uncaught, self.thread = sys.excepthook, threading.excepthook
        self.lost = sys.unraisablehook

    def restore(self) -> None:
        sys.excepthook, threading.excepthook = self.uncaught, self.thread
        sys.unraisablehook = self.lost


class _Silence(logging.Filter):
    """Hides every traceback of a failed disk, and every traceback after the first such one."""

    failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        return self.let_pass(record.exc_info[1] if record.exc_info else None)

    def let_pass(self, error: BaseException | None) -> bool:
        """Whether an exception may be shown; None always may."""
        if error is None:
            return True
        self.failed = self.failed or find_disk_failure(error) is not None
        return not self.failed


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Returns an exception and its causes, the last first."""
    waiting, seen = [error], set()
    while waiting:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        before = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        waiting += [before] if before is not None else []
        waiting += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()


def _code_of(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _KINDS else None
    text = str(error)
    if match := _TENSORSTORE.search(text):
        return int(match[1]) if int(match[1]) in _KINDS else None
    if isinstance(error, OSError) and _NUMPY.match(text):
        return errno.ENOSPC
    return next((code for words, code in _TEXTS.items() if words in text), None)


def _path_of(error: BaseException) -> str | None:
    name = getattr(error, "filename", None)
    if isinstance(name, str | os.PathLike) and name:
        return os.fspath(name)
    match = _PATH.search(str(error))
    return match[1] if match else None


def _shown(path: str) -> str:
    """The file that the user knows, of one that is written under another name first."""
    parts = Path(path.partition(_ORBAX)[0]).parts
    return str(Path(*(match[1] if (match := _UNFINISHED.fullmatch(p)) else p for p in parts)))


def _room(path: str) -> str:
    """` (12.0 KiB of 1.0 GiB are free there now)`; "" where that cannot be told."""
    place = Path(path).absolute()
    try:
        while not place.exists():
            place = place.parent
        usage, free = shutil.disk_usage(place), os.statvfs(place).f_favail
    except OSError:
        return ""
    files = ", and it holds no more files" if free == 0 else ""
    return f" ({_size(usage.free)} of {_size(usage.total)} are free there now{files})"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
