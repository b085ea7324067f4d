"""Jobs in parts (core.chunks, embeddings, records of pictures): where they are, and how far."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmqa_jax.core.chunks import PARTS, part_notes, read_job
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import check_store
from mmqa_jax.core.shards import Unfinished
from mmqa_jax.core.store import HEAD
from mmqa_jax.data.records import record_shards
from mmqa_jax.data.records.grid_records import GRIDS
from mmqa_jax.data.region_records import REGIONS
from mmqa_jax.retrieval import embeddings
from mmqa_jax.retrieval.manifest import EMBEDDINGS, MANIFEST


class Place(NamedTuple):
    """A folder of parts, and what they are: rows, embeddings or records of pictures."""

    folder: Path
    parts: Literal["rows", "embeddings", "records"]


def find_job(path: Path) -> Place:
    """The job whose --workdir, --out or folder of parts `path` is; UserError if there is none."""
    check_store(path)
    for folder in (path, path / PARTS, path.with_name(f"{path.name}.parts")):
        if (folder / HEAD).is_file():
            return Place(folder, "rows")
    for folder in (path, path / EMBEDDINGS):
        if (folder / MANIFEST).is_file() and folder.name == EMBEDDINGS:
            return Place(folder, "embeddings")
    finished = REGIONS.is_at(path) or GRIDS.is_at(path)
    if finished or (path / record_shards.PROGRESS).is_file():
        return Place(path, "records")
    if not path.exists():
        raise UserError(f"{path}: is not there, nor are parts of a job beside it; check the path.")
    raise UserError(
        f"{path}: holds no parts of a job; name the --workdir of `mmqa run` or the --out of "
        "another verb, one that is not finished or was started with --shard."
    )


@dataclasses.dataclass
class ShardStatus:
    """How far one shard is.

    Attributes:
      parts, parts_done, items, items_done: what it has to do, and what of it is done.
      rate: items per second of its work so far; None: not known yet.
      last: seconds since its last part; None: there is none.
      host: of the last part; "": not known.
    """

    shard: str
    parts: int = 0
    parts_done: int = 0
    items: int = 0
    items_done: int = 0
    rate: float | None = None
    last: float | None = None
    host: str = ""


def job_status(place: Place, now: float | None = None) -> dict[str, Any]:
    """How far a job is.

    Args:
      now: seconds since the epoch.

    Returns:
      `items`, `items_done`, `parts`, `parts_done`, `missing` (numbers of parts), `shards` (the
      fields of ShardStatus), `rate` (items per second of all shards that have done a part, as if
      all were at work), `seconds_left` (of the last shard, at the rates so far; None: not known),
      `complete` (the results are written).
    """
    now = time.time() if now is None else now
    if place.parts == "rows":
        shards, missing, complete = _of_chunks(place.folder, now)
    else:
        module = embeddings if place.parts == "embeddings" else record_shards
        shards, missing, complete = _of_files(module.read_unfinished(place.folder), now)
    rates = [shard.rate for shard in shards if shard.rate]
    usual = sum(rates) / len(rates) if rates else None
    left = [
        (shard.items - shard.items_done) / (shard.rate or usual) if usual else None
        for shard in shards
        if shard.items > shard.items_done
    ]
    return {
        "folder": str(place.folder),
        "complete": complete,
        **{
            name: sum(getattr(shard, name) for shard in shards)
            for name in ("items", "items_done", "parts", "parts_done")
        },
        "missing": missing,
        "rate": sum(rates) if rates else None,
        "seconds_left": None if None in left else max(left, default=0.0),
        "shards": [dataclasses.asdict(shard) for shard in shards],
    }


def _of_chunks(folder: Path, now: float) -> tuple[list[ShardStatus], list[int], bool]:
    record = read_job(folder)
    job, count = record.job, record.shards
    finished = part_notes(folder, record)
    starts = range(0, job["items"], job["chunk"])
    sizes = [min(job["chunk"], job["items"] - start) for start in starts]
    shards = _dealt(sizes, finished, count)
    for index, shard in enumerate(shards):
        of_shard = [about for number, about in finished.items() if number % count == index]
        if of_shard:
            seconds = _covered([(about["began"], about["ended"]) for about in of_shard])
            shard.rate = shard.items_done / seconds if seconds > 0 else None
            newest = max(of_shard, key=lambda about: about["ended"])
            shard.last, shard.host = max(now - newest["ended"], 0.0), newest["host"]
    missing = [number for number in range(len(sizes)) if number not in finished]
    return shards, missing, record.complete


def _of_files(
    unfinished: Unfinished | None, now: float
) -> tuple[list[ShardStatus], list[int], bool]:
    if unfinished is None:
        return [], [], True
    sizes = [size for size, _ in unfinished.parts]
    finished = {n: at for n, (_, at) in enumerate(unfinished.parts) if at is not None}
    shards = _dealt(sizes, finished, unfinished.count)
    for index, shard in enumerate(shards):
        own = sorted((at, sizes[n]) for n, at in finished.items() if n % unfinished.count == index)
        if own:
            shard.last = max(now - own[-1][0], 0.0)  # clocks of hosts may differ, or be set
        if len(own) > 1 and own[-1][0] > own[0][0]:  # when the first was begun is not known
            shard.rate = sum(size for _, size in own[1:]) / (own[-1][0] - own[0][0])
    return shards, unfinished.missing, False


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans was: workers of one shard may overlap."""
    covered, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return covered


def _dealt(sizes: Sequence[int], finished: Any, count: int) -> list[ShardStatus]:
    """What every shard has to do and has done; `sizes` are of the parts, `finished` those done."""
    shards = [ShardStatus(f"{index}/{count}") for index in range(count)]
    for number, size in enumerate(sizes):
        shard = shards[number % count]
        shard.parts, shard.items = shard.parts + 1, shard.items + size
        if number in finished:
            shard.parts_done, shard.items_done = shard.parts_done + 1, shard.items_done + size
    return shards
