"""What the reader of a question-answering benchmark returns, and how it finds official files.

A benchmark is a set of questions, most of them on a picture; few have sources to answer from. The
readers are in `benchmarks/`, a file each.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import ONE_A_LINE, parse_json
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes
from mmqa_jax.data.schema import Question, Source

# Keys of Question.extra that several benchmarks have: a description of the picture, and the names
# of objects in it; {answer: weight}, where the ten answers are absent; whether the benchmark shows
# a picture with the question, which may be absent from the disk, and whether it has a hint (part of
# the question in LLaVA's conversations); whether it does not count in the direct-answer score, and
# why an answer is right.
CAPTION, TAGS = "caption", "tags"
SOFT_LABELS = "soft_labels"
HAS_PICTURE, HAS_HINT = "has_picture", "has_hint"
DIFFICULT, RATIONALES = "difficult_direct_answer", "rationales"
_LONGEST_LINE = 64 * 2**20  # bytes of a line when unpacked; MultimodalQA's longest has 60 KB


@dataclasses.dataclass(frozen=True)
class BenchmarkFiles:
    """A benchmark's official files as the schema's types.

    Attributes:
      questions: of all splits that were found; `image` is set only where the picture can be read.
      counts: what was found, such as `{"val questions": 1145}`; printed in this order.
      published: the published figures for some or all of `counts`.
      files: the files that were read.
      missing: optional file that was not found -> what is therefore absent.
      read_picture: encoded bytes of a picture of a question or source; None where there are none.
      inputs: identifies the picture files, see records.write_records.
      sources: what the questions may be answered from, if that is part of the benchmark.
    """

    questions: list[Question]
    counts: Mapping[str, int]
    published: Mapping[str, int]
    files: list[Path]
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_picture: Callable[[str], bytes] | None = None
    inputs: str | None = None
    sources: Sequence[Source] = ()

    def origin(self) -> dict[str, object]:
        """What the manifest keeps about the files."""
        return {
            "files": [str(path) for path in self.files],
            "missing_files": dict(self.missing),
            "published_counts": {
                what: {"published": self.published[what], "found": found}
                for what, found in self.counts.items()
                if what in self.published
            },
            "other_counts": {k: n for k, n in self.counts.items() if k not in self.published},
        }


class Pictures(Protocol):
    """Picture files that are read by name."""

    def __call__(self, name: str) -> bytes:
        """Returns an encoded picture."""

    def signature(self, names: Iterable[str]) -> str:
        """Identifies the files of these names."""


class OfficialFiles:
    """Files below a folder by their official names; remembers which were found and which not.

    Attributes:
      folder: where they are looked for.
      found: the files that were found, in the order of the requests.
      missing: optional file name -> what is absent without it.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "no such folder"
            raise UserError(
                f"{folder}: {problem}, a folder with the benchmark's official files was expected; "
                "check the path."
            )
        self.folder = folder
        self.found: list[Path] = []
        self.missing: dict[str, str] = {}

    def content(
        self,
        questions: list[Question],
        counts: Mapping[str, int],
        published: Mapping[str, int],
        pictures: Pictures,
        names: Sequence[str],
        sources: Sequence[Source] = (),
    ) -> BenchmarkFiles:
        """Returns what was read of these files, with the `pictures` of these names, if any."""
        return BenchmarkFiles(
            questions,
            counts,
            published,
            files=self.found,
            missing=self.missing,
            read_picture=pictures if names else None,
            inputs=pictures.signature(names) if names else None,
            sources=sources,
        )

    def required(self, *names: str, remedy: str) -> Path:
        """The first of these files that exists; UserError with `remedy` if there is none.

        Args:
          names: relative to the folder, the official name first.
        """
        path = self._first(names)
        if path is None:
            raise UserError(f"{self.folder / names[0]}: no such file; {remedy}.")
        return path

    def optional(self, *names: str, without: str) -> Path | None:
        """The first of these files that exists, or None; `without` says what is then absent."""
        path = self._first(names)
        if path is None:
            self.missing[names[0]] = without
        return path

    def _first(self, names: Iterable[str]) -> Path | None:
        for name in names:
            if (self.folder / name).is_file():
                self.found.append(self.folder / name)
                return self.folder / name
        return None


class PictureFolders:
    """Picture files by name in any of several folders below one; folders may be absent.

    Args:
      folder: the raw folder.
      below: folders in it, relative; `.` is the folder itself.
    """

    def __init__(self, folder: Path, below: Iterable[str]):
        self._paths: dict[str, Path] = {}
        for place in (folder / name for name in below):
            if place.is_dir():
                with os.scandir(place) as entries:
                    for entry in filter(os.DirEntry.is_file, entries):
                        self._paths.setdefault(entry.name, Path(entry.path))

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def __call__(self, name: str) -> bytes:
        """Encoded bytes of a picture; PictureError where its file is too large or unreadable."""
        try:
            check_bytes(self._paths[name].stat().st_size, str(self._paths[name]))
            return self._paths[name].read_bytes()
        except OSError as error:
            raise PictureError(f"{self._paths[name]}: {error.strerror}; fetch it again.") from error

    def signature(self, names: Iterable[str]) -> str:
        """Identifies the files of these names in their present state."""
        facts = []
        for name in names:
            status = self._paths[name].stat()
            facts.append(f"{self._paths[name].resolve()} {status.st_size} {status.st_mtime_ns}")
        return "\n".join(facts)


def one_file(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether `path` is a single official file with one of these suffixes, not a folder."""
    return path.is_file() and path.suffix in suffixes


def object_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of each line of a .jsonl or .jsonl.gz, read one at a time."""
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                where = f"{path}, line {number}"
                if len(line) == _LONGEST_LINE:
                    raise UserError(
                        f"{where}: is longer than {_LONGEST_LINE:,} bytes; fetch the file again."
                    )
                if not line.strip():
                    continue
                row = parse_json(line, where, remedy=ONE_A_LINE)
                if not isinstance(row, dict):
                    raise UserError(f"{where}: an object was expected; fetch the file again.")
                yield where, row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: is damaged after line {number} ({error}); fetch it again."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file.") from error


# Picture files of a benchmark, each looked for at several places below one folder.


class PictureFiles(PictureFolders):
    """The pictures of `places` that lie below a folder; calling it reads one.

    Args:
      folder: the raw folder.
      places: a picture's name -> the paths where it may lie, relative to `folder`.
    """

    def __init__(self, folder: Path, places: Mapping[str, Sequence[str]]):
        super().__init__(folder, ())
        for name, paths in places.items():
            for path in map(PurePosixPath, paths):
                if path.is_absolute() or ".." in path.parts:
                    raise UserError(
                        f"{folder}: picture {name!r} is said to lie at {str(path)!r}, outside that "
                        "folder; fetch the benchmark's files again."
                    )
            # os.path.isfile says no of a name that is too long, where Path.is_file raises.
            file = next((folder / path for path in paths if os.path.isfile(folder / path)), None)
            if file is not None:
                self._paths[name] = file
