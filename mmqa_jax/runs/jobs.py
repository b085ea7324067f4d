"""Jobs in parts (core.chunks, embeddings, records of pictures): where they are, and how far."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmqa_jax.core import chunks
from mmqa_jax.core.chunks import PARTS, Unfinished
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import check_store
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
    """How far one shard is."""

    shard: str
    # parts, parts_done, items, items_done: what it has to do, and what of it is done.
    parts: int = 0
    parts_done: int = 0
    items: int = 0
    items_done: int = 0
    rate: float | None = None  # items per second of its work so far; None: not known yet
    last: float | None = None  # seconds since its last part; None: there is none
    host: str = ""  # of the last part; "": not known


def job_status(place: Place, now: float | None = None) -> dict[str, Any]:
    """How far a job is.

    `now`: seconds since the epoch.

    Returns:
      `items`, `items_done`, `parts`, `parts_done`, `missing` (numbers of parts), `shards` (the
      fields of ShardStatus), `rate` (items per second of all shards that have done a part, as if
      all were at work), `seconds_left` (of the last shard, at the rates so far; None: not known),
      `complete` (the results are written).
    """
    now = time.time() if now is None else now
    readers = {
        "rows": chunks.read_unfinished,
        "embeddings": embeddings.read_unfinished,
        "records": record_shards.read_unfinished,
    }
    unfinished = readers[place.parts](place.folder) or Unfinished(0, [], complete=True)
    shards = [_status(unfinished, index, now) for index in range(unfinished.count)]
    rates = [shard.rate for shard in shards if shard.rate]
    usual = sum(rates) / len(rates) if rates else None
    left = [
        (shard.items - shard.items_done) / (shard.rate or usual) if usual else None
        for shard in shards
        if shard.items > shard.items_done
    ]
    return {
        "folder": str(place.folder),
        "complete": unfinished.complete,
        **{
            name: sum(getattr(shard, name) for shard in shards)
            for name in ("items", "items_done", "parts", "parts_done")
        },
        "missing": unfinished.missing,
        "rate": sum(rates) if rates else None,
        "seconds_left": None if None in left else max(left, default=0.0),
        "shards": [dataclasses.asdict(shard) for shard in shards],
    }


def _status(unfinished: Unfinished, index: int, now: float) -> ShardStatus:
    """Counts the parts that a shard has to do and has done."""
    parts = unfinished.parts[index :: unfinished.count]
    done = sorted((part for part in parts if part.ended is not None), key=lambda part: part.ended)
    items_done = sum(part.items for part in done)
    shard = ShardStatus(f"{index}/{unfinished.count}", len(parts), len(done))
    shard.items, shard.items_done = sum(part.items for part in parts), items_done
    if not done:
        return shard
    shard.last = max(now - done[-1].ended, 0.0)  # clocks of hosts may differ, or be set
    shard.host = done[-1].host
    if None not in (part.began for part in done):
        seconds = _covered([(part.began, part.ended) for part in done])
    else:  # when the first was begun is not known
        seconds, items_done = done[-1].ended - done[0].ended, items_done - done[0].items
    shard.rate = items_done / seconds if seconds > 0 else None
    return shard


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans was: workers of one shard may overlap."""
    covered, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return covered
