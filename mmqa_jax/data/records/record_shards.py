"""Writes what becomes of pictures as ArrayRecord, by picture: shard by shard, resumable, shared.

    <folder>/manifest.json   what the records are, and the pictures by record, once all are written
    <folder>/<dataset>/      the TFDS dataset: shards, and its metadata
    <folder>/shards/         while the job runs: what each complete shard holds (core.store)
    <folder>/progress.json   while the job runs: its size, for `mmqa status`

A kill loses only the shard that was being written. Several processes, on hosts with a shared disk,
may write the shards of one job; the last to finish writes the manifest.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.checkpoints.checksums import read_sealed, write_sealed
from mmqa_jax.core.chunks import WHOLE, PartState, Shard, Unfinished
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.locks import alone
from mmqa_jax.data.pictures.decode import BrokenPictures, PictureError
from mmqa_jax.data.records import picture_records
from mmqa_jax.data.records.corpus_records import column_of, open_records

MANIFEST = "manifest.json"
PROGRESS = "progress.json"

_SPLIT = "pictures"


class FeatureError(UserError):
    """This picture has no readable features; others may have."""


@dataclasses.dataclass(frozen=True)
class RecordKind:
    """A kind of records."""

    what: str  # names it in the manifest
    title: str  # names it in messages
    dataset: str  # folder of the TFDS dataset
    column: str  # of a record's bytes
    verb: str  # that writes it
    module: str  # see DatasetFiles

    @property
    def again(self) -> str:
        """Returns the advice for damaged records."""
        return f"delete the folder and run `{self.verb}` again"

    def is_at(self, folder: str | os.PathLike) -> bool:
        """Whether a folder holds finished records of this kind."""
        file = Path(folder) / MANIFEST
        if not file.is_file():
            return False
        manifest = read_json(file)
        return isinstance(manifest, dict) and manifest.get("what") == self.what

    def manifest(self, folder: str | os.PathLike) -> dict[str, Any]:
        """The manifest of finished records; UserError where it is missing or damaged."""
        if not self.is_at(folder):
            raise UserError(
                f"{folder}: holds no finished {self.title}; name a folder of `{self.verb}`, or let "
                "that end."
            )
        return read_sealed(Path(folder) / MANIFEST, self.again)


class RecordFiles:
    """The bytes of finished records, by number.

    Args:
      folder: as `write_records` finished it.
      kind: of its records.
    """

    def __init__(self, folder: str | os.PathLike, kind: RecordKind):
        self.folder, self.kind = Path(folder), kind
        # What was said about them; `pictures` are the pictures by record.
        self.manifest = kind.manifest(self.folder)
        self._source: Any = None

    def read(self, number: int) -> tuple[str, bytes]:
        """Picture and bytes of a record."""
        try:
            if self._source is None:
                self._source = open_records(self.folder / self.kind.dataset, _SPLIT)
            record = self._source[number]
            picture, content = column_of(record, "id").decode(), column_of(record, self.kind.column)
        except (UserError, RunError):
            raise
        except Exception as error:  # TFDS and ArrayRecord have no common error
            raise self.unreadable(error) from error
        expected = str(self.manifest["pictures"][number])
        if picture != expected:
            raise UserError(
                f"{self.folder}: holds picture {picture} in place of {expected}: its files "
                f"are damaged; {self.kind.again}."
            )
        return picture, content

    def unreadable(self, error: Exception) -> UserError:
        """Returns the error for a record with unexpected content."""
        return UserError(
            f"{self.folder}: its {self.kind.title} cannot be read "
            f"({' '.join(str(error).split())}); {self.kind.again}."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}


def write_records(
    folder: Path,
    kind: RecordKind,
    pictures: Mapping[Any, str],
    encode: Callable[[Sequence[str]], Sequence[bytes | PictureError]],
    *,
    about: Mapping[str, Any],
    broken: BrokenPictures,
    facts: Sequence[Any],
    shard: int,
    part: Shard = WHOLE,
    advance: Callable[[int], None] = lambda count: None,
    overwrite: bool = True,
) -> bool:
    """Runs a job or the rest of it; a finished job stays as it is.

    Args:
      pictures: id of a picture (a number or name) -> its name.
      encode: names -> each one's record, or why there is none; called once a shard. It says itself
        how far it is.
      about: more of the manifest.
      broken: counts the pictures that cannot be decoded.
      facts: what the records depend on besides the ids (JSON); with others the job starts over.
      shard: pictures per file.
      part: this process's share of the shards.
      advance: called with the number of pictures that need no `encode`.
      overwrite: replace records of another job.

    Returns:
      Whether the records are complete; otherwise other processes have not finished their shards.

    Raises:
      RunError: too many broken pictures.
    """
    ids = list(pictures)
    signature = picture_records.inputs_signature([str(i) for i in ids], *facts, shard)
    parts = [ids[start : start + shard] for start in range(0, len(ids), shard)]
    shard_numbers = range(part.index, len(parts), part.count)

    def finished() -> bool:
        return kind.is_at(folder) and kind.manifest(folder)["inputs"] == signature

    def count(note: Mapping[str, Any]) -> None:
        for name, reason in note["broken"].items():
            broken.add(name, reason)

    def all_kept() -> bool:
        advance(sum(len(parts[number]) for number in shard_numbers))
        return True

    if finished():
        return all_kept()
    _check_place(folder, kind, signature, overwrite)
    shared = part.count > 1
    with picture_records.unfinished_folder(
        folder, signature, finished if shared else None
    ) as complete:
        if complete:
            return all_kept()
        files = picture_records.DatasetFiles(
            folder / kind.dataset, kind.column, text=False, module=kind.module
        )
        shard_notes = picture_records.ShardNotes(folder)
        size = {"pictures": len(ids), "shard": shard, "processes": part.count}
        write_json(folder / PROGRESS, size)
        notes = {
            number: shard_notes.read(number, files.path(_SPLIT, number)) for number in shard_numbers
        }
        advance(sum(len(parts[number]) for number in shard_numbers if notes[number]))
        for number in shard_numbers:
            if (note := notes[number]) is None:
                names = {i: pictures[i] for i in parts[number]}
                note = notes[number] = _write_shard(files, number, names, encode)
                shard_notes.write(number, files.path(_SPLIT, number), note)
            count(note)
        with alone(folder / ".claim") if shared else contextlib.nullcontext():
            if shared and finished():  # by the last of the other processes
                return True
            for number in set(range(len(parts))) - set(shard_numbers):
                note = shard_notes.read(number, files.path(_SPLIT, number))
                if note is None:
                    return False
                notes[number] = note
            in_order = [notes[number] for number in range(len(parts))]
            files.finish(
                {
                    _SPLIT: [
                        picture_records.ShardSize(len(n["pictures"]), n["bytes"]) for n in in_order
                    ]
                }
            )
            manifest = {
                "what": kind.what,
                **about,
                "inputs": signature,
                "broken": {name: why for n in in_order for name, why in n["broken"].items()},
                "pictures": [image_id for n in in_order for image_id in n["pictures"]],
            }
            write_sealed(folder / MANIFEST, manifest)
            (folder / PROGRESS).unlink()
            picture_records.finish_folder(folder)
    return True


def read_unfinished(folder: Path) -> Unfinished | None:
    """How far the job in `folder` is; None: its records are complete."""
    if (folder / MANIFEST).is_file() and picture_records.recorded_inputs(folder) is None:
        return None
    size = read_json(folder / PROGRESS)
    names = ("pictures", "shard", "processes")
    sizes = [size.get(name) for name in names] if isinstance(size, dict) else []
    if not all(isinstance(value, int) and value >= 1 for value in sizes) or not sizes:
        raise UserError(f"{folder / PROGRESS}: is damaged; start the job again, which writes it.")
    pictures, shard, processes = sizes
    notes = picture_records.ShardNotes(folder)
    parts = [
        PartState(min(shard, pictures - start), notes.written(number))
        for number, start in enumerate(range(0, pictures, shard))
    ]
    return Unfinished(processes, parts)


def _check_place(folder: Path, kind: RecordKind, signature: str, overwrite: bool) -> None:
    """UserError if starting here would remove what nobody meant to lose."""
    if not folder.is_dir() or not any(folder.glob("[!.]*")):
        return
    recorded = picture_records.recorded_inputs(folder)
    if recorded is None and not kind.is_at(folder):
        raise UserError(
            f"{folder}: holds other files than {kind.title}; name a folder that is empty or not "
            "there."
        )
    if recorded != signature and not overwrite:
        raise UserError(
            f"{folder}: holds {kind.title} of other pictures, another model or other options; name "
            "another folder, or give --overwrite."
        )


def _write_shard(
    files: picture_records.DatasetFiles,
    number: int,
    pictures: Mapping[Any, str],
    encode: Callable[[Sequence[str]], Sequence[bytes | PictureError]],
) -> dict[str, Any]:
    written, broken = [], {}
    with files.open_shard(_SPLIT, number) as out:
        encoded = encode(list(pictures.values()))
        for (image_id, name), record in zip(pictures.items(), encoded, strict=True):
            if isinstance(record, PictureError):
                broken[name] = str(record)
                continue
            out.add(str(image_id), record)
            written.append(image_id)
    return {"pictures": written, "broken": broken, "bytes": out.size.bytes}
