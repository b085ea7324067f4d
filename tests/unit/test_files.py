"""Files and folders that appear whole or not at all, on a disk that several hosts share."""

import os
import subprocess
import sys

import pytest

from mmqa_jax.core import files
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, check_text, read_text, unfinished
from mmqa_jax.weights.output_folder import whole_folder
from tests.refusals import refuses


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "new" / "rows.txt"
    with atomic_write(path) as file:
        file.write("old")

    def fail():
        with atomic_write(path) as file:
            file.write("half")
            raise RuntimeError("disk")

    refuses("disk", fail, error=RuntimeError)
    assert path.read_text() == "old"
    assert [*path.parent.iterdir()] == [path]


def test_a_text_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "a.txt"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/a\.txt: cannot be read \(Not a directory\); check"):
        read_text(tmp_path / "file" / "a.txt")
    path.symlink_to(path)
    refuses(r"a\.txt: cannot be read \(Too many .*\); check the path", read_text, path)


def test_half_a_character_is_named_with_its_place():
    check_text({"a": "\U0001f600"}, "prompt")
    with pytest.raises(UserError, match=r"^prompt: holds '\\ud83d', half of a .*; write it whole"):
        check_text({"a": ["\ud83d"]}, "prompt")


def test_hosts_with_processes_of_one_number_do_not_meet(tmp_path, monkeypatch):
    path = tmp_path / "rows.txt"
    with atomic_write(path) as here:
        here.write("here")
        with monkeypatch.context() as patch:
            patch.setattr(files, "_HOST", "there")
            with atomic_write(path) as there:
                there.write("there")
        assert path.read_text() == "there"
    assert path.read_text() == "here"
    assert [*tmp_path.iterdir()] == [path]


def test_only_what_this_host_left_is_removed(tmp_path, monkeypatch):
    """Whether a process of another host lives cannot be asked."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    out = tmp_path / "out"
    here = unfinished(out, process=gone.pid)
    monkeypatch.setattr(files, "_HOST", "there")
    there = unfinished(out, process=gone.pid)
    monkeypatch.undo()
    for folder in (here, there):
        folder.mkdir()
    with whole_folder(out, 0) as folder:
        (folder / "config.json").write_text("{}")
    assert sorted(tmp_path.iterdir()) == sorted([there, out])


def test_a_killed_write_leaves_nothing_once_it_is_repeated(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from mmqa_jax.core.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    file.write('half')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "rows [1].txt"
    subprocess.run([sys.executable, "-c", code, str(path)])
    (left,) = tmp_path.iterdir()
    at_work = unfinished(path, process=os.getppid())
    at_work.touch()
    with atomic_write(path) as file:
        file.write("whole")
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([at_work, path])
