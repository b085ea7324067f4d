"""The files that sources were read from, as long as they are what was read."""

import functools
import hashlib
import threading
from pathlib import Path
from typing import NamedTuple

from mmqa_jax.core.box import Box, Failed, OverBudget
from mmqa_jax.core.errors import UserError
from mmqa_jax.data import boxed_documents
from mmqa_jax.data.documents.document import DocumentError, budget_of_scans
from mmqa_jax.data.folder import known_checksums, read_file

_KEPT_PAGES = 32  # pictures of pages that are held, of at most 2 MiB or so


class PagePicture(NamedTuple):
    """A page of a PDF as it is shown: PNG, and its size in points."""

    png: bytes
    width: float
    height: float


class Originals:
    """The files of a folder of documents.

    Args:
      folder: that was read.
      read: the folder of what was read of its files.
    """

    def __init__(self, folder: Path, read: Path):
        self._folder, self._checksums = folder, known_checksums(read)
        self._box: Box | None = None
        self._lock = threading.Lock()
        self._page = functools.lru_cache(_KEPT_PAGES)(self._drawn)

    def read(self, name: str) -> bytes:
        """The bytes of a file; UserError where it is gone, or has changed since it was read."""
        if name not in self._checksums:
            raise UserError(f"{name}: no file of this name was read; ask again.")
        try:
            if not (self._folder / name).resolve().is_relative_to(self._folder.resolve()):
                raise DocumentError("lies outside the folder, by a symbolic link")
            data = read_file(self._folder, name)
        except (DocumentError, OSError) as error:
            raise UserError(f"{name}: {error}; put the file back that was read.") from error
        if hashlib.sha256(data).hexdigest() != self._checksums[name]:
            raise UserError(
                f"{name} has changed since it was read, so that its places no longer hold; start "
                "mmqa again, which reads it anew."
            )
        return data

    def page(self, name: str, number: int) -> PagePicture:
        """A page of a PDF, from 1, drawn in a process of its own."""
        data = self.read(name)
        return self._page(name, number, data)

    def _drawn(self, name: str, number: int, data: bytes) -> PagePicture:
        with self._lock:
            self._box = self._box or Box(Path(boxed_documents.__file__))
        budget = budget_of_scans(1, len(data))
        try:
            content, pictures = self._box.call_on(data, budget, "scans", numbers=[number])
        except (OverBudget, Failed) as error:
            raise UserError(f"{name}: its page {number} cannot be drawn: {error}.") from error
        if not pictures:
            reason = content.get("bad", "there is no such page, or it is damaged")
            raise UserError(f"{name}: its page {number} cannot be drawn: {reason}.")
        ((_, width, height),) = content["sizes"]
        return PagePicture(pictures[0], width, height)
