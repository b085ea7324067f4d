"""A job in chunks: each is computed alone, and its rows are committed as one file.

    OUT.parts/job.json      what the job is, and the command that it belongs to
    OUT.parts/00003.jsonl   chunk 3: a line about it, then its rows

Which items a chunk has depends on the job alone. So the rows are the same to the bit whether one
process computes all chunks or many share them (`--shard=I/N`: the chunks I, I + N, I + 2N, ...),
and however often they are killed: a file is written whole or not at all, and a restart computes
what is missing. Processes of several hosts need a common folder, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import no_empty_folders, read_json, read_jsonl, write_json, write_jsonl
from mmqa_jax.core.locks import Busy, alone, hold, nobody_else
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.core.progress import Progress, duration, within
from mmqa_jax.core.shards import WHOLE, Shard

JOB_FILE = "job.json"
PARTS = "parts"  # in the workdir of a run; beside a file OUT it is OUT.parts
_PACKAGES = ("mmqa-jax", "jax", "jaxlib")
# In the first line of a part: its job (a hash) and chunk, how many items and rows it has, who
# computed it, from when to when (seconds since the epoch), and the part's notes.
_ABOUT = {"job", "chunk", "items", "rows", "shard", "host", "process", "began", "ended", "notes"}


class Part(NamedTuple):
    """What a chunk became.

    Attributes:
      rows: JSON values.
      notes: more about the chunk as a whole.
    """

    rows: Sequence[Any]
    notes: Mapping[str, Any] = {}


Compute = Callable[[range], Part]  # the items of a chunk -> its part


class Engine(Protocol):
    """What computes chunks instead of this process.

    Attributes:
      is_worker: whether it computes what another process hands out, which holds the locks.
    """

    is_worker: bool

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
      shard: this process's share; None: it computes nothing, and only puts the parts together.
      command: what `mmqa merge` starts; kept in job.json.
      engine: None: this process computes.

    Raises (on entering):
      UserError: the folder holds unfinished parts of another job, or of one with another number of
        shards; or another process works there on its own.
    """

    def __init__(
        self,
        folder: Path,
        what: Mapping[str, Any],
        items: int,
        *,
        chunk: int,
        shard: Shard | None = WHOLE,
        command: Mapping[str, Any] | None = None,
        engine: Engine | None = None,
    ):
        check_chunk(chunk)
        self.folder, self.shard = folder, shard
        shards = _shards_of(folder) if shard is None else shard.count
        versions = {name: _version(name) for name in _PACKAGES}
        if shards > 1:  # the hosts' checkouts may differ
            versions["code"] = _code()
        self.what = json.loads(
            json.dumps({"shards": shards, **what, "items": items, "chunk": chunk, **versions})
        )
        self.spans = [range(at, min(at + chunk, items)) for at in range(0, items, chunk)]
        self._digest = hashlib.sha256(json.dumps(self.what, sort_keys=True).encode()).hexdigest()
        self._command, self._engine = command, engine
        self._claimed = False
        self._undo = contextlib.ExitStack()

    @property
    def shared(self) -> bool:
        """Whether several processes share the job."""
        return self.what["shards"] > 1

    def __enter__(self) -> Self:
        if self._engine is not None and self._engine.is_worker:
            return self
        with contextlib.ExitStack() as undo:
            undo.enter_context(no_empty_folders(self.folder))
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = undo.enter_context(hold(self.folder / ".lock", shared=self.shared))
            except Busy as owner:
                raise UserError(
                    f"{self.folder}: {owner} is at work there; wait until it ends, or name another "
                    "place for the results."
                ) from owner
            except OSError as error:
                raise UserError(
                    f"{self.folder}: cannot be written or locked ({error.strerror}); name another "
                    "place for the results."
                ) from error

            @undo.push
            def leave_nothing_in_vain(kind: type | None, *_: object) -> None:
                # Where the input was refused, its correction would be refused as another job.
                holds = {file.name for file in self.folder.glob("[!.]*")}
                if kind and self._claimed and holds == {JOB_FILE} and nobody_else(lock):
                    with contextlib.suppress(OSError):
                        remove_tree(self.folder)

            with alone(self.folder / ".claim"):
                self._claim()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)

    def run(self, open_compute: Callable[[], Compute], title: str = "", unit: str = "") -> None:
        """Computes and commits the chunks of this share that are missing.

        Args:
          open_compute: loads what computes a chunk; called if a chunk is missing.
          title, unit: of the progress that is shown; "": `compute` shows its own.
        """
        if self.shard is None:
            return
        own = range(self.shard.index, len(self.spans), self.shard.count)
        todo = [number for number in own if not self._path(number).exists()]
        if not todo:
            return
        if self._engine is not None:
            self._engine.compute(todo, lambda: self._committing(open_compute()))
            return
        compute = open_compute()
        total = sum(len(self.spans[number]) for number in own)
        start = total - sum(len(self.spans[number]) for number in todo)
        with Progress(title, total, unit, start=start, quiet=None if title else True) as progress:
            for turn, number in enumerate(todo):
                began = time.time()
                more = within(_turn(turn, len(todo), progress))
                with contextlib.nullcontext() if title or len(todo) == 1 else more:
                    part = compute(self.spans[number])
                self._commit(number, part, began)
                progress.advance(len(self.spans[number]))

    def _committing(self, compute: Compute) -> Callable[[int], None]:
        def one(number: int) -> None:
            began = time.time()
            self._commit(number, compute(self.spans[number]), began)

        return one

    def missing(self) -> list[int]:
        """The chunks of all shards that are not committed."""
        return [number for number in range(len(self.spans)) if not self._path(number).exists()]

    def parts(self) -> list[Part] | None:
        """The parts of all chunks in order; None while other shards have not finished theirs.

        Raises:
          UserError: a part of another job, or a damaged one; or parts are missing, and this process
            is only to put them together.
        """
        if missing := self.missing():
            if self.shard is not None:
                return None
            raise UserError(
                f"{self.folder}: {len(missing)} of {len(self.spans)} parts are missing: "
                f"{named(missing)}; start {self._owners(missing)} again."
            )
        return [self._read(number) for number in range(len(self.spans))]

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
                write_json(self.folder / JOB_FILE, self._record(complete=True))
        else:
            remove_tree(self.folder)

    def waiting(self) -> dict[str, Any]:
        """Says, and returns for --json, that other shards have not finished."""
        left = len(self.missing())
        print(
            f"Shard {self.shard} is done; {left} of {len(self.spans)} parts are missing from the "
            f"other shards: {self.folder}"
        )
        return {"waiting_for_other_shards": True, "missing_parts": left}

    def _record(self, *, complete: bool) -> dict[str, Any]:
        return {"job": self.what, "command": self._command, "complete": complete}

    def _claim(self) -> None:
        """Makes the folder this job's, or checks that it is."""
        found = read_job(self.folder) if (self.folder / JOB_FILE).exists() else None
        if found is not None and found["job"] == self.what:
            return
        if found is not None and not found["complete"]:
            theirs = found["job"]
            if self.shared or theirs.get("shards", 1) > 1:
                keys = dict.fromkeys([*self.what, *theirs])
                key = next(key for key in keys if theirs.get(key) != self.what.get(key))
                raise UserError(
                    f"{self.folder}: holds unfinished parts of another job: {key} is "
                    f"{theirs.get(key)!r} there and {self.what.get(key)!r} here; finish that job, "
                    "or delete the folder to start over."
                )
        if self.shard is None:
            raise UserError(
                f"{self.folder}: the model, the data or a setting has changed since these parts "
                "were made; change it back, or start the shards again."
            )
        self._claimed = True
        for file in part_files(self.folder):
            file.unlink()
        write_json(self.folder / JOB_FILE, self._record(complete=False))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.jsonl"

    def _commit(self, number: int, part: Part, began: float) -> None:
        about = {
            "job": self._digest,
            "chunk": number,
            "items": len(self.spans[number]),
            "rows": len(part.rows),
            "shard": str(self.shard),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "began": began,
            "ended": time.time(),
            "notes": part.notes,
        }
        write_jsonl(self._path(number), [about, *part.rows])

    def _read(self, number: int) -> Part:
        path = self._path(number)
        lines = [row for _, row in read_jsonl(path)]
        about = read_about(path)
        if (about["job"], about["chunk"]) != (self._digest, number):
            raise UserError(
                f"{path}: is a part of another run, or of another chunk; delete it and start "
                f"{self._owners([number])} again."
            )
        if len(lines) != 1 + about["rows"]:
            raise UserError(
                f"{path}: has {len(lines) - 1} of {about['rows']} rows; delete it and start "
                f"{self._owners([number])} again."
            )
        return Part(lines[1:], about["notes"])

    def _owners(self, chunks: Sequence[int]) -> str:
        shards = self.what["shards"]
        if shards == 1:
            return "the command"
        return f"--shard={named(sorted({number % shards for number in chunks}))} of {shards}"


def check_chunk(chunk: int) -> None:
    """UserError for a --chunk below 1."""
    if chunk < 1:
        raise UserError(f"--chunk={chunk}: at least 1 was expected; give a larger number.")


def read_job(folder: Path) -> dict[str, Any]:
    """The content of a folder's job.json: `job`, `command`, `complete`.

    Raises:
      UserError: it is not one.
    """
    record = read_json(folder / JOB_FILE)
    if not isinstance(record, dict) or not isinstance(record.get("job"), dict):
        raise UserError(f"{folder / JOB_FILE}: is not a job's; delete the folder to start over.")
    return record


def part_files(folder: Path) -> list[Path]:
    """The parts in a folder, in order."""
    return sorted(folder.glob("[0-9]*.jsonl"))


def read_about(path: Path) -> dict[str, Any]:
    """The first line of a part: what is said about it.

    Raises:
      UserError: it is damaged.
    """
    with path.open("rb") as file:
        line = file.readline()
    try:
        about = json.loads(line)
        if not about.keys() >= _ABOUT:
            raise ValueError
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: is damaged; delete it and start its shard again.") from error
    return about


def named(numbers: Sequence[int]) -> str:
    """`3, 7, 9 and 12 more`."""
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more


def _shards_of(folder: Path) -> int:
    if not (folder / JOB_FILE).exists():
        raise UserError(f"{folder}: holds no parts of a job; name the --out of a sharded command.")
    return read_job(folder)["job"].get("shards", 1)


def _turn(turn: int, turns: int, progress: Progress) -> Callable[[float | None], str]:
    """What the progress of one chunk says of all of them."""

    def text(left: float | None) -> str:
        rest = progress.active_seconds() / turn * (turns - turn - 1) if turn else None
        known = "" if rest is None or left is None else f", {duration(rest + left)} left of all"
        return f"chunk {turn + 1} of {turns}{known}"

    return text


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
