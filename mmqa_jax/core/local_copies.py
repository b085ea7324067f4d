"""Copies of objects on this host, for what reads files: record readers, tokenizers, memory maps."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmqa_jax.core import paths
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.locks import alone
from mmqa_jax.core.progress import Progress

REGION_CACHE = "region_cache"  # in a run's workdir, what its detector has found (tasks.vlp)

IN_STORE = "in_store.json"  # in a folder of a copy: its shards -> the object and its size in bytes

_AT_ONCE = 8
# Of a run's workdir, what other verbs do not read, or have copies of their own of.
_NOT_COPIED = re.compile(rf"(?:checkpoints|{REGION_CACHE}|.*\.lock|.*\.claim)/|.*events\.out\.")
# What is read a record at a time, by data.records.corpus_records; texts are in memory as a whole.
_SHARD = re.compile(r"((?:.*/)?(?:pictures|regions|grids))/([^/]+\.array_record-\d+)")


def local_copy(place: str | os.PathLike, *, stream: bool = False) -> Path:
    """Returns a path in the file system: of a copy, if `place` is in an object store.

    The copy is kept in the cache folder ($MMQA_CACHE/store); what has changed in the store since
    is copied again. Processes of one host share it. Of a run's workdir neither the checkpoints nor
    the folder `best` are copied, which is a place of its own.

    `stream`: leaves records of pictures in the store that are not copied yet; IN_STORE says where.

    Raises:
      RunError: the disk has no room for it.
    """
    path = paths.as_path(place)
    if not paths.in_store(path):
        return path
    name = os.fspath(path)
    objects = paths.listing(name)
    if not objects:
        paths.check_store(name)
        raise UserError(f"{name}: no such object, and none below it; check the name.")
    wanted = {
        key: about
        for key, about in objects.items()
        if not _NOT_COPIED.match(key) and not ("model.json" in objects and key.startswith("best/"))
    }
    # Each place has a folder of its own: places may lie within each other.
    folder = cache_dir() / "store" / hashlib.sha256(name.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "copy" / paths.key_of(name).rpartition("/")[2]
    with alone(folder / "lock"):
        _update(name, copy, wanted, folder / "objects.json", stream)
    return copy


def with_local_copies(config: Any, *, stream: bool = False) -> Any:
    """The config (ConfigDict), with copies (`local_copy`) in place of the places in a store that it
    names."""
    from ml_collections import ConfigDict

    def local(value: Any) -> Any:
        if isinstance(value, str):
            return str(local_copy(value, stream=stream)) if paths.in_store(value) else value
        if isinstance(value, Mapping):
            return {key: local(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(local, value))
        return value

    places = config.to_dict()
    local_config = local(places)
    return config if local_config == places else ConfigDict(local_config)


def _update(
    name: str, copy: Path, wanted: Mapping[str, tuple[int, str]], record: Path, stream: bool
) -> None:
    """Makes the copy hold these objects, by what follows `name`, and nothing else.

    Args:
      wanted: name -> size and version.
      record: file that keeps size and version of what a finished copy holds.
      stream: see local_copy.
    """
    known = read_json(record) if record.exists() else {}
    todo = {
        key: size
        for key, (size, version) in wanted.items()
        if known.get(key) != [size, version] or not (copy / key).is_file()
    }
    shards = {key: match for key in wanted if stream and (match := _SHARD.fullmatch(key))}
    left = todo.keys() & shards.keys()
    todo = {key: size for key, size in todo.items() if key not in left}
    places: dict[str, dict[str, tuple[str, int]]] = {
        f"{shards[key][1]}/{IN_STORE}": {} for key in left
    }
    for key, match in shards.items():
        if (files := places.get(f"{match[1]}/{IN_STORE}")) is not None:
            files[match[2]] = (f"{name.rstrip('/')}/{key}", wanted[key][0])
    for file in [file for file in copy.rglob("*") if file.is_file()]:
        key = file.relative_to(copy).as_posix()
        if not (key in wanted or key in places or _NOT_COPIED.match(key)):
            file.unlink()
    for key, files in places.items():
        write_json(copy / key, files)
    if not todo:
        return
    total, free = sum(todo.values()), shutil.disk_usage(record.parent).free
    if total > free:
        raise RunError(
            f"{name}: its copy takes {total / 2**30:.1f} GiB, {record.parent} has "
            f"{free / 2**30:.1f} GiB left; name a folder on a larger disk with MMQA_CACHE."
        )
    record.unlink(missing_ok=True)  # until all are there

    def fetch(key: str) -> int:
        target = copy / key
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.part")
        with paths.named_errors(name, RunError):
            paths.filesystem(name).get_file(f"{name.rstrip('/')}/{key}".rstrip("/"), str(temporary))
        os.replace(temporary, target)
        return todo[key]

    done = 0
    with (
        Progress(f"Copying {name}", total >> 20, "MiB") as progress,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        for size in pool.map(fetch, todo):
            progress.advance(((done + size) >> 20) - (done >> 20))
            done += size
    write_json(record, {key: list(about) for key, about in wanted.items() if key not in left})
