"""Picture files of a benchmark, each looked for at several places below one folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mmqa_jax.data.datasets.benchmark import PictureFolders


class PictureFiles(PictureFolders):
    """The pictures of `places` that lie below a folder; calling it reads one.

    Args:
      folder: the raw folder.
      places: a picture's name -> the paths where it may lie, relative to `folder`.
    """

    def __init__(self, folder: Path, places: Mapping[str, Iterable[str]]):
        super().__init__(folder, ())
        for name, paths in places.items():
            found = next((folder / path for path in paths if (folder / path).is_file()), None)
            if found is not None:
                self._paths[name] = found
