"""The files of a job in chunks (core.chunks): what they hold, and that they are whole.

    OUT.parts/job.json      what the job is
    OUT.parts/00003.jsonl   chunk 3: a line about it, its rows, and the SHA-256 of both

They are data: nothing in them is executed, and no name in them is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.core.paths import in_store
from mmqa_jax.core.sealed import Damaged, open_bytes, read_sealed, seal_bytes, write_sealed

JOB_FILE = "job.json"
PARTS = "parts"  # in the workdir of a run; beside a file OUT it is OUT.parts
MOST_PARTS = 1_000_000  # files of one folder
# In the first line of a part: its job (a hash) and chunk, how many items and rows it has, who
# computed it, from when to when (seconds since the epoch), and the part's notes.
_ABOUT = {"job", "chunk", "items", "rows", "shard", "host", "process", "began", "ended", "notes"}
_BY_LAUNCH = ("shards", "code")  # of a job, but not of what its rows are; older files mix them in


class Part(NamedTuple):
    """What a chunk became.

    Attributes:
      rows: JSON values.
      notes: more about the chunk as a whole.
    """

    rows: Sequence[Any]
    notes: Mapping[str, Any] = {}


class JobRecord(NamedTuple):
    """The content of job.json.

    Attributes:
      job: all that the rows depend on; `items` and `chunk` are among it.
      shards: how many processes share the job, as the last of them to start knew.
      code: hash of the package that computed the parts; None: not known.
      complete: whether its results are written.
    """

    job: dict[str, Any]
    shards: int = 1
    code: str | None = None
    complete: bool = False

    @property
    def what(self) -> dict[str, Any]:
        """What a process compares with its own job."""
        return {name: value for name, value in self.job.items() if name not in _BY_LAUNCH}

    @property
    def digest(self) -> str:
        """Names the job in its parts."""
        return digest_of(self.job)

    @property
    def parts(self) -> int:
        """How many parts the job has."""
        return -(-self.job["items"] // self.job["chunk"])

    def owners(self, chunks: Sequence[int]) -> str:
        """Who computes these chunks, as it is started."""
        if self.shards == 1:
            return "the command"
        return f"--shard={named(sorted({n % self.shards for n in chunks}))} of {self.shards}"


def digest_of(job: Mapping[str, Any]) -> str:
    """A job's hash: hex digits."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def read_job(folder: Path) -> JobRecord:
    """The job of a folder.

    Raises:
      UserError: job.json is damaged, or is not a job's.
    """
    path = folder / JOB_FILE
    check_file(path)
    again = "delete it, and the next start of the job writes it again and keeps whole parts"
    record = read_sealed(path, again)
    job = record.get("job")
    shards = record.get("shards", job.get("shards", 1) if isinstance(job, dict) else None)
    code = record.get("code", job.get("code") if isinstance(job, dict) else None)
    complete = record.get("complete")
    if not (
        isinstance(job, dict)
        and _is_count(job.get("items"), 0, 1 << 60)
        and _is_count(job.get("chunk"), 1, 1 << 60)
        and _is_count(shards, 1, MOST_PARTS)
        and isinstance(complete, bool)
        and (code is None or isinstance(code, str))
        and JobRecord(job).parts <= MOST_PARTS
    ):
        raise UserError(f"{path}: is not a job's; {again}.")
    return JobRecord(job, shards, code, complete)


def write_job(folder: Path, record: JobRecord) -> None:
    """Writes job.json, whole or not at all."""
    write_sealed(folder / JOB_FILE, record._asdict())


def part_path(folder: Path, number: int) -> Path:
    """The file of a part."""
    return folder / f"{number:05d}.jsonl"


def part_files(folder: Path) -> list[Path]:
    """The parts in a folder, in order."""
    return sorted(folder.glob("[0-9]*.jsonl"))


def write_part(path: Path, about: Mapping[str, Any], part: Part) -> None:
    """Writes a part, whole or not at all.

    Args:
      about: all of the first line but `rows` and `notes`.
    """
    first = {**about, "rows": len(part.rows), "notes": part.notes, "sealed": True}
    lines = (json.dumps(line, ensure_ascii=False) for line in (first, *part.rows))
    data = "".join(f"{line}\n" for line in lines).encode()
    with atomic_write(path, "wb") as file:
        file.write(data + seal_bytes(data))


def read_about(path: Path) -> dict[str, Any]:
    """The first line of a part: what is said about it.

    Raises:
      UserError: it is damaged.
    """
    check_file(path)
    with path.open("rb") as file:
        line = file.readline()
    try:
        return _about(line)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: is damaged; delete it, and the next start of its shard computes it again."
        ) from error


def read_part(folder: Path, record: JobRecord, number: int) -> Part:
    """A part of a job.

    Raises:
      UserError: it is damaged, or another job's or chunk's.
    """
    path = part_path(folder, number)
    check_file(path)
    again = f"delete it and start {record.owners([number])} again, which computes it again"
    data = path.read_bytes()
    try:
        about = _about(data.partition(b"\n")[0])
        content = open_bytes(data, sealed=bool(about.get("sealed"))).decode()
        rows = [json.loads(line) for line in content.split("\n")[1:] if line.strip()]
    except (ValueError, AttributeError, RecursionError) as error:
        said = f" ({error})" if isinstance(error, Damaged) else ""
        raise UserError(f"{path}: is damaged{said}; {again}.") from error
    if (about["job"], about["chunk"]) != (record.digest, number):
        raise UserError(f"{path}: is a part of another run, or of another chunk; {again}.")
    if len(rows) != about["rows"]:
        raise UserError(f"{path}: has {len(rows)} of {about['rows']} rows; {again}.")
    return Part(rows, about["notes"])


def missing_parts(folder: Path, record: JobRecord) -> list[int]:
    """The numbers of the parts that are not there."""
    names = {path.name for path in part_files(folder)}
    numbers = range(record.parts)
    return [number for number in numbers if part_path(folder, number).name not in names]


def read_parts(folder: Path, record: JobRecord) -> list[Part]:
    """All parts of a job in order.

    Raises:
      UserError: as of `read_part`; or parts are missing.
    """
    if missing := missing_parts(folder, record):
        raise UserError(
            f"{folder}: {len(missing)} of {record.parts} parts are missing: {named(missing)}; "
            f"start {record.owners(missing)} again."
        )
    return [read_part(folder, record, number) for number in range(record.parts)]


def check_no_link(path: Path) -> None:
    """Refuses a symbolic link in place of a file of a job, which would lead out of its folder."""
    if not in_store(path) and path.is_symlink():
        raise UserError(
            f"{path}: is a symbolic link, which a job's folder never holds; put the file itself "
            "there."
        )


def check_file(path: Path) -> None:
    """Refuses what is no file in a job's folder: links, and pipes, which are waited for forever."""
    check_no_link(path)
    if not in_store(path) and path.exists() and not path.is_file():
        raise UserError(f"{path}: is no file; delete it, and the job writes it again.")


def named(numbers: Sequence[int]) -> str:
    """`3, 7, 9 and 12 more`."""
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more


def _about(line: bytes) -> dict[str, Any]:
    about = json.loads(line)
    if not about.keys() >= _ABOUT:
        raise ValueError
    return about


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
