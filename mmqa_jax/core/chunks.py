"""A job in chunks: each is computed alone, and its rows are committed as one part (core.store).

Processes share it by `--shard=I/N`.

    OUT.parts/job.json      what the job is
    OUT.parts/00003.jsonl   chunk 3: its part

They are data: nothing in them is executed, and no name in them is opened.

Which items a chunk has depends on the job alone. So the rows are the same to the bit whether one
process computes all chunks or many share them (`--shard=I/N`: the chunks I, I + N, I + 2N, ...),
whatever N was before, and however often they are killed: a file is written whole or not at all, and
a restart computes what is missing. Processes of several hosts need a common folder, nothing else.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from mmqa_jax.core.errors import UserError, decimal_number
from mmqa_jax.core.files import no_empty_folders
from mmqa_jax.core.locks import LOCK, Busy, alone, hold, nobody_else
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.core.progress import Progress, duration, within
from mmqa_jax.core.store import (
    HEAD,
    Chunk,
    Store,
    chunk_files,
    chunks_of,
    digest_of,
    read_head,
    write_head,
)

# Slurm's of a job array, whose indices may begin above 0 and have a step.
_SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
# Kubernetes sets the index of an Indexed Job; the manifest has to give the count.
_KUBERNETES = ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")


class Shard(NamedTuple):
    """Share `index`, from 0, of a job that `count` processes share."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(0, 1)


class PartState(NamedTuple):
    """How far a part of a job is."""

    items: int  # of it
    # ended, began: when it was written and begun (seconds since the epoch); None: it is not there,
    # or not known.
    ended: float | None
    began: float | None = None
    host: str = ""  # that wrote it; "": not known


class Unfinished(NamedTuple):
    """How far a job is that `count` processes share; `complete`: its results are written."""

    count: int
    parts: list[PartState]
    complete: bool = False

    @property
    def missing(self) -> list[int]:
        """The parts that are not there."""
        return [number for number, part in enumerate(self.parts) if part.ended is None]


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """The value of `--shard`.

    `text`: `I/N`; `auto`: from the variables of a Slurm array or of a Kubernetes Indexed Job;
    `auto/N`: only I from there.
    """
    index, slash, count = text.partition("/")
    if index == "auto":
        shard = _of_environment(text, count if slash else None, environment)
    else:
        numbers = decimal_number(index), decimal_number(count)
        shard = Shard(0, 0) if None in numbers else Shard(*numbers)
    if not shard.index < shard.count:
        source = "" if index != "auto" else f" (the environment says {shard})"
        raise UserError(
            f"--shard={text}: I/N with I from 0 to N - 1 was expected, such as 0/8, or "
            f"auto{source}."
        )
    return shard


def launched_shard() -> Shard:
    """Returns this process's share among the processes that JAX joined to one launch."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return WHOLE
    return Shard(jax.process_index(), jax.process_count())


def _of_environment(text: str, count: str | None, environment: Mapping[str, str]) -> Shard:
    def number(name: str, default: str | None = None) -> int:
        value = environment.get(name) or default
        if value is None or (parsed := decimal_number(value)) is None:
            problem = "is not set" if value is None else f"is {value!r}"
            raise UserError(
                f"--shard={text}: the environment variable {name} {problem}; start the command in "
                "a Slurm job array or a Kubernetes Indexed Job (with JOB_COMPLETIONS set to its "
                "completions), or give --shard=I/N."
            )
        return parsed

    def total(name: str) -> int:
        if count is None:
            return number(name)
        return decimal_number(count) or 0

    if _KUBERNETES[0] in environment and _SLURM[0] not in environment:
        return Shard(number(_KUBERNETES[0]), total(_KUBERNETES[1]))
    task = number(_SLURM[0])
    first, step = number("SLURM_ARRAY_TASK_MIN", "0"), number("SLURM_ARRAY_TASK_STEP", "1")
    return Shard((task - first) // max(step, 1), total(_SLURM[1]))


PARTS = "parts"  # in the workdir of a run; beside a file OUT it is OUT.parts
MOST_PARTS = 1_000_000  # files of one folder
_PACKAGES = ("mmqa-jax", "jax", "jaxlib")

# What is said about a part: how many items it has, who computed it with which code, from when to
# when (seconds since the epoch).
_NOTES = {"items", "code", "shard", "host", "process", "began", "ended"}
_OLDER = b'{"job": '  # how a part of an older version begins


class Part(NamedTuple):
    """The results of a chunk: a JSON value for each item, and facts about the chunk as a whole."""

    rows: Sequence[Any]
    notes: Mapping[str, Any] = {}


Compute = Callable[[range], Part]  # the items of a chunk -> its part


class JobRecord(NamedTuple):
    """The content of job.json."""

    job: dict[str, Any]  # all that the rows depend on; `items` and `chunk` are among it
    shards: int = 1  # how many processes share the job, as the last of them to start knew
    code: str | None = None  # hash of the package that computed the parts; None: not known
    complete: bool = False  # whether its results are written

    @property
    def parts(self) -> int:
        """How many parts the job has."""
        return -(-self.job["items"] // self.job["chunk"])

    def owners(self, chunks: Sequence[int]) -> str:
        """Who computes these chunks, as it is started."""
        if self.shards == 1:
            return "the command"
        return f"--shard={named(sorted({n % self.shards for n in chunks}))} of {self.shards}"

    def again(self, file: str) -> str:
        """Returns the advice for a damaged part."""
        number = file.partition(".")[0]
        owners = self.owners([int(number)]) if number.isdecimal() else "the command"
        return f"delete it and start {owners} again, which computes it again"


class Engine(Protocol):
    """Computes chunks in place of this process."""

    is_worker: bool  # whether it computes what another process hands out, which holds the locks

    def compute(
        self, numbers: Sequence[int], open_one: Callable[[], Callable[[int], None]]
    ) -> None:
        """Computes and commits chunks, given what opens a function that does so with one."""


class Job:
    """A job in chunks, or this process's share of it. Use it as a context manager.

    Args:
      folder: of the parts.
      what: all that the rows depend on, as JSON values by name; nothing that differs between the
        processes of one job.
      items: how many there are.
      chunk: items of a chunk, the most that a kill can lose.
      shard: this process's share.
      engine: None: this process computes.

    Raises (on entering):
      UserError: the folder holds unfinished parts of another job, or another process works there on
        its own.
    """

    def __init__(
        self,
        folder: Path,
        what: Mapping[str, Any],
        items: int,
        *,
        chunk: int,
        shard: Shard = WHOLE,
        engine: Engine | None = None,
    ):
        check_chunk(chunk)
        if -(-items // chunk) > MOST_PARTS:
            raise UserError(
                f"--chunk={chunk}: {items:,} items would be more than {MOST_PARTS:,} parts; give a "
                "larger number."
            )
        self.folder, self.shard = folder, shard
        versions = {name: _version(name) for name in _PACKAGES}
        job = json.loads(json.dumps({**what, "items": items, "chunk": chunk, **versions}))
        # The hosts' checkouts may differ.
        self._record = JobRecord(job, shards=shard.count, code=_code())
        self.spans = [range(at, min(at + chunk, items)) for at in range(0, items, chunk)]
        self._engine = engine
        self._claimed = False
        self._store: Store | None = None
        self._undo = contextlib.ExitStack()

    @property
    def shared(self) -> bool:
        """Whether several processes share the job."""
        return self.shard.count > 1

    def __enter__(self) -> Self:
        if self._engine is not None and self._engine.is_worker:
            return self
        with contextlib.ExitStack() as undo:
            undo.enter_context(no_empty_folders(self.folder))
            lock = undo.enter_context(locked_folder(self.folder, shared=self.shared))

            @undo.push
            def leave_nothing_in_vain(kind: type | None, *_: object) -> None:
                # Where the input was refused, its correction would be refused as another job.
                holds = {file.name for file in self.folder.glob("[!.]*")}
                if kind and self._claimed and holds == {HEAD} and nobody_else(lock):
                    with contextlib.suppress(OSError):
                        remove_tree(self.folder)

            with alone(self.folder / ".claim"):
                self._claim()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._store is not None:
            self._store.close()
        self._undo.__exit__(*error)

    def run(self, open_compute: Callable[[], Compute], title: str = "", unit: str = "") -> None:
        """Computes and commits the chunks of this share that are missing.

        Args:
          open_compute: loads what computes a chunk; called if a chunk is missing.
          title, unit: of the progress that is shown; "": `compute` shows its own.
        """
        numbers = range(self.shard.index, len(self.spans), self.shard.count)
        store = self._opened()
        todo = [number for number in numbers if _key(number) not in store]
        store.check(map(_key, numbers))  # damage is named here, not after hours of work
        if not todo:
            return
        if self._engine is not None:
            self._engine.compute(todo, lambda: self._committing(open_compute()))
            return
        compute = open_compute()
        total = sum(len(self.spans[number]) for number in numbers)
        start = total - sum(len(self.spans[number]) for number in todo)
        with Progress(title, total, unit, start=start, quiet=None if title else True) as progress:
            for turn, number in enumerate(todo):
                began = time.time()
                more = within(_turn(turn, len(todo), progress))
                # Processes that deal out the chunks by another N may have come first.
                if not (self.shared and _key(number) in self._opened()):
                    with contextlib.nullcontext() if title or len(todo) == 1 else more:
                        part = compute(self.spans[number])
                    self._commit(number, part, began)
                progress.advance(len(self.spans[number]))

    def _committing(self, compute: Compute) -> Callable[[int], None]:
        def compute_chunk(number: int) -> None:
            began = time.time()
            self._commit(number, compute(self.spans[number]), began)

        return compute_chunk

    def missing(self) -> list[int]:
        """The chunks of all shards that are not committed."""
        return missing_parts(self._opened(), self._record)

    def parts(self) -> list[Part] | None:
        """The parts of all chunks in order; None while other shards have not finished theirs."""
        if self.missing():
            return None
        store = self._opened()
        return [_part(store, number) for number in range(len(self.spans))]

    def rows(self) -> list[Any] | None:
        """The rows of all parts in order; None and UserError as of `parts`."""
        parts = self.parts()
        return None if parts is None else [row for part in parts for row in part.rows]

    def done(self) -> None:
        """Marks the job as complete: what it was to write is written.

        The parts of a job of one process are removed. Those of a shared one stay, so that a shard
        that is started once more has nothing to do.
        """
        if self.shared:
            with alone(self.folder / ".claim"):
                write_job(self.folder, self._record._replace(complete=True))
        else:
            self._opened().remove()

    def waiting(self) -> dict[str, Any]:
        """Says, and returns for --json, that other shards have not finished."""
        left = len(self.missing())
        print(
            f"Shard {self.shard} is done; {left} of {len(self.spans)} parts are missing from the "
            f"other shards: {self.folder}"
        )
        return {"waiting_for_other_shards": True, "missing_parts": left}

    def _opened(self) -> Store:
        """Opens the store of the parts committed so far."""
        if self._store is None:
            self._store = open_parts(self.folder, self._record)
        else:
            self._store.refresh()
        return self._store

    def _claim(self) -> None:
        """Makes the folder this job's, or checks that it is."""
        recorded = read_job(self.folder) if (self.folder / HEAD).exists() else None
        if recorded is not None and self._is_same(recorded):
            if recorded != self._record._replace(complete=recorded.complete):
                write_job(self.folder, self._record._replace(complete=recorded.complete))
            return
        if recorded is not None and not recorded.complete and (self.shared or recorded.shards > 1):
            theirs = {**recorded.job, "code": recorded.code}
            ours = {**self._record.job, "code": self._record.code}
            key = next(key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key))
            raise UserError(
                f"{self.folder}: holds unfinished parts of another job: {key} is "
                f"{theirs.get(key)!r} there and {ours.get(key)!r} here; finish that job, "
                "or delete the folder to start over."
            )
        self._claimed = True
        for file in chunk_files(self.folder):
            if recorded is not None or not self._made(file):
                file.unlink()
        write_job(self.folder, self._record)

    def _is_same(self, recorded: JobRecord) -> bool:
        """Whether a recorded job is this one, however many shared it."""
        if recorded.job != self._record.job:
            return False
        same_code = recorded.code in (None, self._record.code)
        return same_code or not (self.shared or recorded.shards > 1)

    def _made(self, file: Path) -> bool:
        """Whether a part belongs to this job, whose job.json was deleted."""
        with contextlib.suppress(UserError):
            ours = (digest_of(self._record.job), self._record.code)
            return all((chunk.job, chunk.notes.get("code")) == ours for chunk in chunks_of(file))
        return False

    def _commit(self, number: int, part: Part, began: float) -> None:
        notes = {
            "items": len(self.spans[number]),
            "code": self._record.code,
            "shard": str(self.shard),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "began": began,
            "ended": time.time(),
        }
        value = {"rows": list(part.rows), "notes": part.notes}
        self._opened().add({_key(number): value}, alone=True, notes=notes)


def locked_folder(folder: Path, *, shared: bool = False) -> Any:
    """Makes a job's folder, and holds its lock until the returned handle is closed (locks.hold)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return hold(folder / LOCK, shared=shared)
    except Busy as owner:
        raise UserError(
            f"{folder}: {owner} is at work there; wait until it ends, or name another place."
        ) from owner
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written or locked ({error.strerror}); name another place, or "
            "copy the folder there."
        ) from error


def read_job(folder: Path) -> JobRecord:
    """The job of a folder."""
    record = read_head(folder)
    job, shards = record.get("job"), record.get("shards", 1)
    code, complete = record.get("code"), record.get("complete", False)
    if not (
        isinstance(job, dict)
        and _is_count(job.get("items"), 0, 1 << 60)
        and _is_count(job.get("chunk"), 1, 1 << 60)
        and _is_count(shards, 1, MOST_PARTS)
        and isinstance(complete, bool)
        and (code is None or isinstance(code, str))
        and JobRecord(job).parts <= MOST_PARTS
    ):
        raise UserError(
            f"{folder / HEAD}: is not a job's; delete it, and the next start of the job writes it "
            "again and keeps whole parts."
        )
    return JobRecord(job, shards, code, complete)


def write_job(folder: Path, record: JobRecord) -> None:
    """Writes job.json, whole or not at all."""
    more = record._asdict()
    write_head(folder, more.pop("job"), **more)


def open_parts(folder: Path, record: JobRecord) -> Store:
    """The store of a job's parts, by the numbers of their chunks."""
    check_version(folder)
    return Store(folder, record.job, others="refuse", remedy=record.again)


def missing_parts(store: Store, record: JobRecord) -> list[int]:
    """The numbers of the parts that are not there."""
    return [number for number in range(record.parts) if _key(number) not in store]


def read_parts(folder: Path, record: JobRecord) -> list[Part]:
    """All parts of a job in order."""
    with open_parts(folder, record) as store:
        if missing := missing_parts(store, record):
            raise UserError(
                f"{folder}: {len(missing)} of {record.parts} parts are missing: {named(missing)}; "
                f"start {record.owners(missing)} again."
            )
        return [_part(store, number) for number in range(record.parts)]


def part_notes(folder: Path, record: JobRecord) -> dict[int, dict[str, Any]]:
    """Returns the notes on each finished part: `items`, `shard`, `host`, `began`, `ended` ..."""
    check_version(folder)
    chunks = [chunk for file in chunk_files(folder) for chunk in chunks_of(file)]
    return {int(chunk.keys[0]): chunk.notes for chunk in chunks if _is_part(chunk, record)}


def read_unfinished(folder: Path) -> Unfinished:
    """How far the job of a folder is."""
    record = read_job(folder)
    notes, parts = part_notes(folder, record), []
    for number, start in enumerate(range(0, record.job["items"], record.job["chunk"])):
        items = min(record.job["chunk"], record.job["items"] - start)
        about = notes.get(number, {})
        times = about.get("ended"), about.get("began")
        parts.append(PartState(items, *times, about.get("host", "")))
    return Unfinished(record.shards, parts, record.complete)


def check_version(folder: Path) -> None:
    """Refuses parts of an older version."""
    for file in chunk_files(folder)[:1]:
        with file.open("rb") as opened:
            if opened.read(len(_OLDER)) == _OLDER:
                raise UserError(
                    f"{folder}: holds parts of an older version of mmqa-jax; finish the job with "
                    "that version, or delete the folder to start over."
                )


def _key(number: int) -> str:
    return f"{number:05d}"


def _part(store: Store, number: int) -> Part:
    value = store[_key(number)]
    try:
        rows, notes = value["rows"], value["notes"]
        if not isinstance(rows, list) or not isinstance(notes, dict):
            raise TypeError
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{store.folder}: part {number} does not hold rows; delete the folder and start the "
            "job again."
        ) from error
    return Part(rows, notes)


def _is_part(chunk: Chunk, record: JobRecord) -> bool:
    return (
        chunk.job == digest_of(record.job)
        and chunk.notes.keys() >= _NOTES
        and len(chunk.keys) == 1
        and chunk.keys[0].isdecimal()
    )


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def named(numbers: Sequence[int]) -> str:
    """`3, 7, 9 and 12 more`."""
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more


def check_chunk(chunk: int) -> None:
    """UserError for a --chunk below 1."""
    if chunk < 1:
        raise UserError(f"--chunk={chunk}: at least 1 was expected; give a larger number.")


def _turn(turn: int, turns: int, progress: Progress) -> Callable[[float | None], str]:
    """Returns the text that one chunk's progress line adds about all chunks."""

    def text(left: float | None) -> str:
        rest = progress.active_seconds() / turn * (turns - turn - 1) if turn else None
        known = "" if rest is None or left is None else f", {duration(rest + left)} left of all"
        return f"chunk {turn + 1} of {turns}{known}"

    return text


@functools.cache
def _code() -> str:
    """16 hex digits of this package's source files."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "unknown"
