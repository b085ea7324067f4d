"""A disk that takes no more: every library's exception for it, and the sentence that is said."""

import contextlib
import errno
import io
import logging
import os
import re
import sqlite3
import sys
import threading
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from small_disk import small_disk

from mmqa_jax import cli
from mmqa_jax.core.errors import (
    RunError,
    UserError,
    find_disk_failure,
    report_disk_once,
    report_full_disk,
)
from mmqa_jax.core.files import atomic_write, write_json
from tests.refusals import refuses

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/run/.scores.json.host-1.77.tmp")
TENSORSTORE = ValueError(
    'RESOURCE_EXHAUSTED: Error writing "kernel/0.0" in OCDBT database at local file '
    '"/data/run/checkpoints/1.orbax-checkpoint-tmp/params/": Failed writing '
    "[source locations='tensorstore/internal/os/file_util.cc'] [os_error_code='28']"
)


def caused(outer, inner):
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "code", "path"),
    [
        (FULL, errno.ENOSPC, FULL.filename),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/a"), errno.EDQUOT, "/a"),
        (OSError(errno.EROFS, "Read-only file system", "/a"), errno.EROFS, "/a"),
        (OSError(errno.EFBIG, "File too large"), errno.EFBIG, None),
        (OSError(errno.EIO, "Input/output error", "/a"), errno.EIO, "/a"),
        (TENSORSTORE, errno.ENOSPC, "/data/run/checkpoints/1.orbax-checkpoint-tmp/params/"),
        (ValueError("x [os_error_code='122']"), errno.EDQUOT, None),
        (RuntimeError("write() failed: No space left on device"), errno.ENOSPC, None),
        (sqlite3.OperationalError("database or disk is full"), errno.ENOSPC, None),
        (OSError("80 requested and 24 written"), errno.ENOSPC, None),
        (caused(UserError("a: cannot be locked; name another."), FULL), errno.ENOSPC, FULL.filename),
        (ExceptionGroup("two", [KeyError(1), caused(OSError("b"), FULL)]), errno.ENOSPC, None),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a"), None, None),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"), None, None),
        (ValueError("x [os_error_code='2']"), None, None),
        (UserError("a: is no file; name another."), None, None),
    ],
)  # fmt: skip
def test_what_each_library_raises_is_recognized(error, code, path):
    found = find_disk_failure(error)
    assert (found and found.code) == code
    if code is not None and path is not None:
        assert found.path == path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_the_sentence_names_the_file_and_what_to_do(number, tmp_path):
    name = str(tmp_path / ".scores.json.host-1.77.tmp")
    said = find_disk_failure(OSError(number, os.strerror(number), name)).sentence()
    assert said.startswith(f"{tmp_path / 'scores.json'}: cannot be written, because ")
    assert "what was finished before is kept: " in said
    assert said.endswith("and start the same command again, which continues.")
    assert ("are free there now" in said) == (number == errno.ENOSPC)


def fill_with_python(folder):
    write_json(folder / "value.json", ["x" * 2**20])


def fill_with_numpy(folder):
    with atomic_write(folder / "rows.npy", "wb") as file:
        np.save(file, np.zeros(2**20))


def fill_with_sqlite(folder):
    with contextlib.closing(sqlite3.connect(folder / "cache")) as connection:
        connection.execute("CREATE TABLE a (b)")
        for _ in range(64):
            connection.execute("INSERT INTO a VALUES (?)", ("x" * 2**14,))
            connection.commit()


def fill_with_pyarrow(folder):
    values = np.random.default_rng(0).random(2**18)
    pq.write_table(pa.table({"a": values}), folder / "a.parquet")


def fill_with_array_record(folder):
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for _ in range(64):
        writer.write(os.urandom(2**14))
    writer.close()


FILLERS = (
    fill_with_python, fill_with_numpy, fill_with_sqlite, fill_with_pyarrow, fill_with_array_record,
)  # fmt: skip


@pytest.mark.parametrize("fill", FILLERS)
def test_a_disk_that_is_really_full(fill, tmp_path):
    with small_disk(tmp_path / "disk", 256 * 2**10) as disk:
        said = r"the disk is full \(.* of 256\.0 KiB are free"
        with pytest.raises(RunError, match=said), report_full_disk(disk.folder):
            fill(disk.folder)
        assert not [*disk.folder.glob("*.tmp")]


def test_threads_and_libraries_are_silent_about_it(capsys):
    """What TensorStore's callbacks print before Orbax logs why, and what follows until the end."""
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    log = logging.getLogger("absl")
    filters, handler = list(log.filters), logging.StreamHandler(said := io.StringIO())
    log.addHandler(handler)

    def logged(error):
        log.error("a thread failed", exc_info=(type(error), error, None))

    def failing(error):
        raise error

    def run():
        sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
        logged(TENSORSTORE)
        thread = threading.Thread(target=failing, args=(RuntimeError("after shutdown"),))
        thread.start()
        thread.join()
        raise TENSORSTORE

    try:
        with pytest.raises(ValueError, match="RESOURCE"), report_disk_once():
            run()
        logged(RuntimeError("cannot schedule new futures after shutdown"))
        log.error("a plain word")
        assert said.getvalue() == "a plain word\n"
        assert capsys.readouterr().err == ""
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        log.removeHandler(handler)
        for one in set(log.filters) - set(filters):
            log.removeFilter(one)


def lost(message):
    """What sys.unraisablehook gets of a callback in C++: nobody's exception."""
    error = RuntimeError(message)
    return types.SimpleNamespace(
        exc_type=RuntimeError, exc_value=error, exc_traceback=None, err_msg=None, object=None
    )


def test_a_callback_that_fails_before_the_disks_error_is_known_is_silent(monkeypatch, capsys):
    """TensorStore's callbacks find Orbax's event loop closed, before Orbax says why."""
    monkeypatch.setattr(sys, "unraisablehook", show_unraisable)

    @report_disk_once()
    def save():
        sys.unraisablehook(lost("Event loop is closed"))
        raise FULL

    refuses("No space left", save, error=OSError)
    assert capsys.readouterr().err == ""


def show_unraisable(told):
    print(f"RuntimeError: {told.exc_value}", file=sys.stderr)


def test_other_failures_are_shown_as_they_were(monkeypatch, capsys):
    # A library, or pytest, may have set its own.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", show_unraisable)
    before = sys.excepthook, threading.excepthook, sys.unraisablehook
    with report_disk_once():
        sys.excepthook(RuntimeError, RuntimeError("a callback failed"), None)
        sys.unraisablehook(lost("a promise"))
    shown = capsys.readouterr().err
    assert "RuntimeError: a callback failed" in shown
    assert "RuntimeError: a promise" in shown
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == before


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 2, "/a/b: permission denied;"),
        (FULL, 1, "/data/run/scores.json: cannot be written, because the disk is full"),
        (caused(UserError("x; name another."), FULL), 1, "because the disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), 1, "W: cannot be written, because its fi"),
    ],
)
def test_exit_code_and_sentence(error, code, said, monkeypatch, capsys):
    def run(arguments):
        raise error

    monkeypatch.setattr(cli.command("report"), "run", run)
    assert cli.main(["report", "--workdir=W"]) == code
    printed = capsys.readouterr().err
    assert re.fullmatch(r"mmqa: [^\n]+\.\n", printed)
    assert said in printed
