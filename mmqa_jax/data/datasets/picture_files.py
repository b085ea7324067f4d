"""Picture files of a benchmark, each looked for at several places below one folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mmqa_jax.data.images import PictureError


class PictureFiles:
    """The pictures of `names` that lie below a folder; calling it reads one.

    Args:
      folder: the raw folder.
      names: a picture's name -> the places where it may lie, relative to `folder`.
    """

    def __init__(self, folder: Path, names: Mapping[str, Iterable[str]]):
        self._paths: dict[str, Path] = {}
        for name, places in names.items():
            path = next((folder / p for p in places if (folder / p).is_file()), None)
            if path is not None:
                self._paths[name] = path

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __call__(self, name: str) -> bytes:
        """Encoded bytes of a picture; PictureError where its file cannot be read."""
        try:
            return self._paths[name].read_bytes()
        except OSError as error:
            raise PictureError(f"{self._paths[name]}: {error.strerror}; fetch it again.") from error

    def signature(self) -> str:
        """Identifies the files in their present state, see records.write_records."""
        facts = []
        for path in self._paths.values():
            status = path.stat()
            facts.append(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}")
        return "\n".join(facts)
