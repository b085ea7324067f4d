"""Picture files of a benchmark, each looked for at several places below one folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.benchmark import PictureFolders


class PictureFiles(PictureFolders):
    """The pictures of `places` that lie below a folder; calling it reads one.

    Args:
      folder: the raw folder.
      places: a picture's name -> the paths where it may lie, relative to `folder`.

    Raises:
      UserError: a path leads out of the folder by `..` or is absolute: the names are data. Symbolic
        links, which the user has made, are followed.
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
            found = next((folder / path for path in paths if (folder / path).is_file()), None)
            if found is not None:
                self._paths[name] = found
