"""Jobs in chunks: shards, kills, what is refused, and how far a job is."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import squares_job
from hypothesis import given, settings
from hypothesis import strategies as st
from squares_job import run, square

from mmqa_jax.core import chunks
from mmqa_jax.core.chunks import (
    WHOLE,
    Part,
    Shard,
    parse_shard,
    part_notes,
    read_job,
    read_parts,
    write_job,
)
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.store import HEAD, Store, chunk_files
from mmqa_jax.runs.jobs import find_job, job_status
from tests.refusals import refuses

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("MMQA_PROGRESS", "off")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out.jsonl.parts"


ROWS = square(range(23)).rows


def merge(folder: Path) -> list:
    """The rows that are put together from the files alone."""
    return [row for part in read_parts(folder, read_job(folder)) for row in part.rows]


class Counting:
    """Computes, and keeps which chunks; a call of number `fail_at` raises."""

    def __init__(self, fail_at: int = -1, error: type[BaseException] = KeyboardInterrupt):
        self.chunks, self.fail_at, self.error = [], fail_at, error

    def __call__(self, chunk: range) -> Part:
        if len(self.chunks) == self.fail_at:
            raise self.error("stopped")
        self.chunks.append(chunk.start // 5)
        return square(chunk)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_give_what_one_process_gives(folder, count):
    for index in reversed(range(count)):
        compute = Counting()
        rows = run(folder, Shard(index, count), compute)
        assert compute.chunks == list(range(index, 5, count))
        assert (rows is None) == (index > 0 and count > 1)
    assert rows == ROWS
    # One that starts once more has nothing to do, and puts the same together.
    if count > 1:
        assert run(folder, Shard(1, count), Counting(fail_at=0)) == ROWS
    else:
        assert not folder.exists()


def test_a_stopped_job_goes_on_behind_its_last_chunk(folder):
    with pytest.raises(KeyboardInterrupt):
        run(folder, compute=Counting(fail_at=3))
    rest = Counting()
    assert run(folder, compute=rest) == ROWS
    assert rest.chunks == [3, 4]


def test_a_job_without_a_finished_chunk_leaves_nothing(tmp_path):
    for error in (UserError, RunError, KeyboardInterrupt):
        with pytest.raises(error):
            run(tmp_path / "new" / "parts", compute=Counting(0, error))
        assert not (tmp_path / "new").exists()


def test_another_job_of_one_process_replaces_what_was_left(folder):
    with pytest.raises(KeyboardInterrupt):
        run(folder, compute=Counting(fail_at=3))
    other = Counting()
    assert run(folder, compute=other, model="m2") == ROWS
    assert other.chunks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shard", "changes", "message"),
    [
        (Shard(1, 2), {"model": "m2"}, r"model is 'm1' there and 'm2' here"),
        (Shard(1, 3), {"model": "m2"}, r"model is 'm1' there and 'm2' here"),
        (WHOLE, {"model": "m2"}, r"model is 'm1' there and 'm2' here"),
        (Shard(1, 2), {"chunk": 4}, r"chunk is 5 there and 4 here"),
        (Shard(1, 2), {"items": 22}, r"items is 23 there and 22 here"),
    ],
)
def test_parts_of_another_job_are_refused(folder, shard, changes, message):
    assert run(folder, Shard(0, 2)) is None
    before = [path.read_bytes() for path in chunk_files(folder)]
    refuses(rf"holds unfinished parts of another job: {message}", run, folder, shard, **changes)
    assert [path.read_bytes() for path in chunk_files(folder)] == before
    assert run(folder, Shard(1, 2)) == ROWS
    # A finished job makes room for another.
    assert run(folder, Shard(0, 2), model="m2") is None
    assert len(chunk_files(folder)) == 3


def test_more_parts_than_a_folder_holds(folder):
    with pytest.raises(UserError, match=r"^--chunk=2: 5,000,000 items .* parts; give a larger num"):
        squares_job.job(folder, items=5_000_000, chunk=2)
    assert not folder.exists()


@pytest.mark.parametrize(
    "value", [3, [], {"rows": 3, "notes": {}}, {"rows": [], "notes": None}, {}]
)
def test_a_part_without_rows(folder, value):
    """Its checksums are right: it may come from somebody else."""
    for index in range(2):
        run(folder, Shard(index, 2))
    record = read_job(folder)
    Store(folder, record.job).add({"00001": value}, alone=True)
    message = r"\.parts: part 1 does not hold rows; delete the folder and start the job again"
    refuses(message, read_parts, folder, record)


def test_hosts_with_other_code_or_versions_are_refused(folder, monkeypatch):
    run(folder, Shard(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "_code", lambda: "other")
        with pytest.raises(UserError, match=r"job: code is '[0-9a-f]{16}' there and 'other'"):
            run(folder, Shard(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "_version", lambda package: "0.1")
        with pytest.raises(UserError, match=r"another job: mmqa-jax is '.*' there and '0\.1' here"):
            run(folder, Shard(1, 2))
    assert run(folder, Shard(1, 2)) == ROWS


def test_merging_names_what_is_missing_or_foreign(folder, tmp_path):
    assert run(folder, Shard(0, 3)) is None
    refuses(r"3 of 5 parts are missing: 1, 2, 4; .*--shard=1, 2 of 3", merge, folder)
    run(folder, Shard(1, 3))
    run(folder, Shard(2, 3))
    assert merge(folder) == ROWS
    third = folder / "00003.jsonl"
    kept = third.read_bytes()
    # A part of another run.
    for index in range(3):
        run(tmp_path / "other", Shard(index, 3), model="m2")
    third.write_bytes((tmp_path / "other" / third.name).read_bytes())
    refuses(r"00003\.jsonl: is a part of another run", merge, folder)
    # A part of another chunk of this run, and one that lost a row.
    third.write_bytes((folder / "00000.jsonl").read_bytes())
    refuses(r"00003\.jsonl: is a part of another run, or of another", merge, folder)
    third.write_bytes(kept.rpartition(b'{"item"')[0])
    again = r"delete it and start --shard=0 of 3 again, which computes it again\."
    refuses(rf"00003\.jsonl: is damaged \(its SHA-256.*; {again}", merge, folder)
    third.write_bytes(b"\x00" * 9)
    refuses(rf"00003\.jsonl: is damaged \(a line is not .*; {again}", merge, folder)
    third.unlink()
    rest = Counting()
    assert run(folder, Shard(0, 3), rest) == ROWS
    assert rest.chunks == [3]


def test_a_damaged_part_is_named_before_work_begins(folder):
    with pytest.raises(KeyboardInterrupt):
        run(folder, compute=Counting(fail_at=3))
    part = folder / "00001.jsonl"
    part.write_bytes(part.read_bytes().replace(b'"square": 36', b'"square": 37'))
    rest = Counting()
    refuses(r"00001\.jsonl: is damaged .*SHA-256.*delete it .*the", run, folder, compute=rest)
    assert rest.chunks == []
    part.unlink()
    assert run(folder, compute=rest) == ROWS
    assert rest.chunks == [1, 3, 4]


def test_a_deleted_job_file_loses_no_part(folder):
    with pytest.raises(KeyboardInterrupt):
        run(folder, compute=Counting(fail_at=3))
    (folder / HEAD).write_bytes((folder / HEAD).read_bytes()[:-9])
    refuses(r"job\.json: is damaged; delete it, and the next start", run, folder)
    (folder / HEAD).unlink()
    rest = Counting()
    assert run(folder, compute=rest) == ROWS
    assert rest.chunks == [3, 4]


@pytest.mark.parametrize("later", [[(0, 2), (1, 2)], [(0, 1)], [(4, 5), (2, 3), (0, 2), (1, 2)]])
def test_another_number_of_shards_goes_on_from_the_finished_chunks(folder, later):
    assert run(folder, Shard(0, 3)) is None  # chunks 0 and 3
    with pytest.raises(KeyboardInterrupt):
        run(folder, Shard(1, 3), Counting(fail_at=1))  # chunk 1, of 1 and 4
    computed = []
    for index, count in later:
        compute = Counting()
        rows = run(folder, Shard(index, count), compute)
        computed += compute.chunks
    assert sorted(computed) == [2, 4]
    assert rows == ROWS
    assert folder.exists() == (later != [(0, 1)])


def test_one_process_is_continued_by_shards(folder):
    with pytest.raises(KeyboardInterrupt):
        run(folder, compute=Counting(fail_at=3))
    assert run(folder, Shard(1, 2)) is None
    rest = Counting()
    assert run(folder, Shard(0, 2), rest) == ROWS
    assert rest.chunks == [4]


def test_shards_by_two_counts_at_once(folder):
    """Shard 0 of 2 is at work when shards of 3 do its chunks too: each file stays whole."""
    at_work = start(folder, 0, 2, kill_at=-2)
    assert at_work.stdout.readline() == "0\n"
    for index in range(3):
        rows = run(folder, Shard(index, 3))
    assert rows == ROWS
    assert at_work.communicate("go" * 3)[0].split()[-1] == "done"
    assert merge(folder) == ROWS
    assert run(folder, Shard(1, 2), Counting(fail_at=0)) == ROWS


def test_parts_of_older_versions_are_refused(folder, tmp_path):
    """Whose files began otherwise; those of a finished job make room."""
    assert run(folder, Shard(0, 2)) is None
    record = read_job(folder)
    for path in chunk_files(folder):
        path.write_text('{"job": "0", "chunk": 0, "items": 5, "rows": 1, "notes": {}}\n{}\n')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for read in (
        lambda: run(folder, Shard(1, 2)),
        lambda: run(folder),
        lambda: merge(folder),
        lambda: job_status(find_job(tmp_path / "out.jsonl")),
    ):
        refuses(r"\.parts: .* an older version .*, or dele", read)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after | {HEAD: b"", ".claim": b"", ".lock": b""} == before | {
        HEAD: b"", ".claim": b"", ".lock": b"",
    }  # fmt: skip
    write_job(folder, record._replace(complete=True))
    assert run(folder, model="m2") == ROWS


def start(folder: Path, index: int, count: int, kill_at: int = -1) -> subprocess.Popen:
    """A process of its own."""
    arguments = (squares_job.__file__, folder, index, count, kill_at)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_processes_at_once_and_kill_9(folder):
    first, killed = start(folder, 0, 2), start(folder, 1, 2, kill_at=3)
    assert first.communicate()[0].split() == ["0", "2", "4", "waits"]
    assert killed.communicate()[0].split() == ["1", "3"]
    assert killed.returncode == -signal.SIGKILL
    assert start(folder, 1, 2).communicate()[0].split() == ["3", "done"]
    assert merge(folder) == ROWS


def test_a_job_of_one_process_is_alone(folder):
    at_work = start(folder, 0, 1, kill_at=-2)
    assert at_work.stdout.readline() == "0\n"
    for shard in (WHOLE, Shard(0, 2)):
        refuses(rf"process {at_work.pid} on .* is at work there", run, folder, shard)
    at_work.kill()
    at_work.communicate()
    assert run(folder) == ROWS  # a killed process holds no lock


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        ("0/1", {}, (0, 1)),
        ("7/8", {}, (7, 8)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, (3, 8)),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "5",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            (2, 3),
        ),
        ("auto", {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4"}, (2, 4)),
        ("auto/4", {"JOB_COMPLETION_INDEX": "2"}, (2, 4)),
        ("auto/9", {"SLURM_ARRAY_TASK_ID": "8"}, (8, 9)),
    ],
)
def test_which_shard(text, environment, shard):
    assert parse_shard(text, environment) == shard


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("2/2", {}, r"--shard=2/2: I/N with I from 0 to N - 1"),
        ("auto", {}, r"SLURM_ARRAY_TASK_ID is not set"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3"}, r"SLURM_ARRAY_TASK_COUNT is not set"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, r"JOB_COMPLETIONS is not set"),
        ("auto", {"JOB_COMPLETION_INDEX": "x", "JOB_COMPLETIONS": "4"}, r"INDEX is 'x'"),
        ("auto/2", {"JOB_COMPLETION_INDEX": "2"}, r"the environment says 2/2"),
        ("auto/a", {"JOB_COMPLETION_INDEX": "2"}, r"I/N with I from 0"),
        ("automatic", {}, r"I/N with I from 0"),
        ("x/8", {}, r"I/N with I from 0"),
        ("0/" + "8" * 5000, {}, r"I/N with I from 0"),
        ("auto/2", {"JOB_COMPLETION_INDEX": "1" * 5000}, r"INDEX is '1"),
    ],
)
def test_shards_that_there_are_not(text, environment, message):
    refuses(message, parse_shard, text, environment)


def test_how_far_a_job_is(folder, tmp_path):
    run(folder, Shard(0, 2), items=25)  # chunks 0, 2, 4: 15 of 25 items
    run(folder, Shard(1, 2), Counting(), items=25)
    (folder / "00003.jsonl").unlink()
    write_job(folder, read_job(folder)._replace(complete=False))
    for number, (began, ended) in {0: (0, 10), 2: (10, 15), 4: (100, 105), 1: (0, 2)}.items():
        key, store = f"{number:05d}", Store(folder, read_job(folder).job)
        notes = part_notes(folder, read_job(folder))[number] | {"began": began, "ended": ended}
        store.add({key: store[key]}, alone=True, notes=notes)
    place = find_job(tmp_path / "out.jsonl")
    assert place.folder == folder
    status = job_status(place, now=130.0)
    first, second = status.pop("shards")
    assert (first["rate"], first["last"], first["items_done"]) == (15 / 20, 25.0, 15)
    assert (second["rate"], second["last"], second["items_done"]) == (5 / 2, 128.0, 5)
    assert (first["shard"], first["parts"], first["parts_done"]) == ("0/2", 3, 3)
    assert first["host"] == part_notes(folder, read_job(folder))[0]["host"]
    assert status == {
        "folder": str(folder), "complete": False, "items": 25, "items_done": 20, "parts": 5,
        "parts_done": 4, "missing": [3], "rate": 15 / 20 + 5 / 2, "seconds_left": 2.0,
    }  # fmt: skip
    refuses("nowhere: is not there, nor are parts of a job", find_job, tmp_path / "nowhere")


def test_clocks_that_jump_change_no_result(folder, tmp_path, monkeypatch):
    """Hours back and forth while chunks are computed: the same rows, no negative times."""
    clock = itertools.cycle([5e9, 1e9, 3e9])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert run(folder, Shard(0, 2)) is None
    status = job_status(find_job(tmp_path / "out.jsonl"), now=2e9)
    assert status["items_done"] == 13
    assert all(value is None or value >= 0 for value in (status["rate"], status["seconds_left"]))
    assert status["shards"][0]["last"] == 0.0
    assert run(folder, Shard(1, 2)) == ROWS


def test_parts_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    refuses(r"file/parts: cannot be written or locked", run, tmp_path / "file" / "parts")
    assert os.listdir(tmp_path) == ["file"]


class Stopped(Exception):
    """In place of a kill between two chunks."""


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_any_shards_in_any_order_make_the_same_rows(data):
    """However many items, chunks and shards there are, and wherever a shard stopped before."""
    items, chunk = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 8))
    count = data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(count)))
    stops = [data.draw(st.integers(0, 9)) for _ in order]
    computed: list[int] = []

    def stopping(after: int):
        def compute(numbers: range) -> Part:
            nonlocal after
            if after == 0:
                raise Stopped
            after -= 1
            computed.extend(numbers)
            return square(numbers)

        return compute

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "out.jsonl.parts"
        changes = {"items": items, "chunk": chunk}
        for index, stop in zip(order, stops, strict=True):
            shard = Shard(index, count)
            try:
                rows = run(folder, shard, stopping(stop), **changes)
            except Stopped:
                rows = run(folder, shard, stopping(-1), **changes)
    assert rows == square(range(items)).rows  # the last one's: the others did not have all
    assert sorted(computed) == list(range(items))  # each once
