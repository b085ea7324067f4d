"""A job in chunks: each is computed alone, and its rows are committed as one file (core.job_files).

Which items a chunk has depends on the job alone. So the rows are the same to the bit whether one
process computes all chunks or many share them (`--shard=I/N`: the chunks I, I + N, I + 2N, ...),
whatever N was before, and however often they are killed: a file is written whole or not at all, and
a restart computes what is missing. Processes of several hosts need a common folder, nothing else.
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
from typing import Any, Protocol, Self

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import no_empty_folders
from mmqa_jax.core.job_files import (
    JOB_FILE,
    MOST_PARTS,
    JobRecord,
    Part,
    missing_parts,
    part_files,
    part_path,
    read_about,
    read_job,
    read_part,
    read_parts,
    write_job,
    write_part,
)
from mmqa_jax.core.locks import Busy, alone, hold, nobody_else
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.core.progress import Progress, duration, within
from mmqa_jax.core.shards import WHOLE, Shard

_PACKAGES = ("mmqa-jax", "jax", "jaxlib")

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
        self._undo = contextlib.ExitStack()

    @property
    def shared(self) -> bool:
        """Whether several processes share the job."""
        return self.shard.count > 1

    def __enter__(self) -> Self:
        if self._engine is not None and self._engine.is_worker:
            if (self.folder / JOB_FILE).exists():
                self._adopt(read_job(self.folder))
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
        own = range(self.shard.index, len(self.spans), self.shard.count)
        missing = set(self.missing())
        for number in own:  # a damaged part is named before hours of work, not after them
            if number not in missing:
                read_part(self.folder, self._record, number)
        todo = [number for number in own if number in missing]
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
                # Processes that deal out the chunks by another N may have come first.
                if not (self.shared and part_path(self.folder, number).exists()):
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
        return missing_parts(self.folder, self._record)

    def parts(self) -> list[Part] | None:
        """The parts of all chunks in order; None while other shards have not finished theirs.

        Raises:
          UserError: a part of another job, or a damaged one.
        """
        return None if self.missing() else read_parts(self.folder, self._record)

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
            remove_tree(self.folder)

    def waiting(self) -> dict[str, Any]:
        """Says, and returns for --json, that other shards have not finished."""
        left = len(self.missing())
        print(
            f"Shard {self.shard} is done; {left} of {len(self.spans)} parts are missing from the "
            f"other shards: {self.folder}"
        )
        return {"waiting_for_other_shards": True, "missing_parts": left}

    def _claim(self) -> None:
        """Makes the folder this job's, or checks that it is."""
        found = read_job(self.folder) if (self.folder / JOB_FILE).exists() else None
        if found is not None and self._adopt(found):
            if found != self._record._replace(complete=found.complete):
                write_job(self.folder, self._record._replace(complete=found.complete))
            return
        if found is not None and not found.complete and (self.shared or found.shards > 1):
            theirs = {**found.what, "code": found.code}
            ours = {**self._record.what, "code": self._record.code}
            key = next(key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key))
            raise UserError(
                f"{self.folder}: holds unfinished parts of another job: {key} is "
                f"{theirs.get(key)!r} there and {ours.get(key)!r} here; finish that job, "
                "or delete the folder to start over."
            )
        self._claimed = True
        for file in part_files(self.folder):
            if found is not None or not self._made(file):
                file.unlink()
        write_job(self.folder, self._record)

    def _adopt(self, found: JobRecord) -> bool:
        """Whether a job that was found is this one, however many shared it; its name is kept."""
        if found.what != self._record.what:
            return False
        same_code = found.code in (None, self._record.code)
        if not same_code and (self.shared or found.shards > 1):
            return False
        self._record = self._record._replace(job=found.job)
        return True

    def _made(self, file: Path) -> bool:
        """Whether a part is this job's, of which job.json was deleted."""
        with contextlib.suppress(UserError):
            about = read_about(file)
            ours = (self._record.digest, self._record.code)
            return (about["job"], about.get("code")) == ours
        return False

    def _commit(self, number: int, part: Part, began: float) -> None:
        about = {
            "job": self._record.digest,
            "chunk": number,
            "items": len(self.spans[number]),
            "code": self._record.code,
            "shard": str(self.shard),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "began": began,
            "ended": time.time(),
        }
        write_part(part_path(self.folder, number), about, part)


def check_chunk(chunk: int) -> None:
    """UserError for a --chunk below 1."""
    if chunk < 1:
        raise UserError(f"--chunk={chunk}: at least 1 was expected; give a larger number.")


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
