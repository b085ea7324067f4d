"""Documents that users add to a server's folder, as many as `--uploads` allows."""

from __future__ import annotations

from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.data.documents.document import READERS, check_libraries, ending_of
from mmqa_jax.data.folder import PICTURES
from mmqa_jax.serve.systems import Asking, Parts, Turn

ENDINGS = (*READERS, *PICTURES)
_LONGEST = 120  # characters of a name


class Uploads:
    """Takes documents into the first folder of a server.

    Args:
      parts: that answer from the folder.
      most: documents that are taken while the server runs.
    """

    def __init__(self, parts: Parts, most: int):
        self._parts = parts
        self.left = 0 if parts.growing is None else most

    def add(self, name: str, data: bytes) -> Asking:
        """Begins to add a file and to read it; the future has its name and how many sources it
        gave. UserError where it cannot be taken: nothing of it stays in the folder."""
        _check_name(name)
        if not data:
            raise UserError(f"{name}: is empty; send a file with content.")

        def answer(turn: Turn) -> dict[str, Any]:
            with turn():  # one after the other, while nobody searches
                return self._taken(name, data)

        return self._parts.threads.start(answer)

    def _taken(self, name: str, data: bytes) -> dict[str, Any]:
        growing = self._parts.growing
        if growing is None or not self.left:
            raise UserError("this server takes no more documents (--uploads).")
        path = growing.folder / name
        if path.exists():
            raise UserError(f"{name}: the folder has a file of this name; rename yours.")
        with atomic_write(path, "wb") as file:
            file.write(data)
        try:
            answerer = growing.reopen()
            if reason := answerer.corpus.manifest["origin"]["bad"].get(name):
                raise UserError(f"{name}: {reason}; mend the file and send it again.")
        except BaseException:
            path.unlink()
            raise
        self.left -= 1
        self._parts.renew(answerer)
        count = sum(source.extra.get("file") == name for source in answerer.corpus.sources)
        return {"file": name, "sources": count, "left": self.left}


def _check_name(name: str) -> None:
    """UserError for a name that could lead elsewhere, or of a kind that is not read."""
    if not name.isprintable() or "/" in name or "\\" in name or len(name) > _LONGEST:
        raise UserError(
            f"{name!r:.80}: is no plain name of a file (of at most {_LONGEST} characters, without "
            "folders); rename the file."
        )
    if name.startswith((".", "~$")) or ending_of(name) not in ENDINGS:
        raise UserError(f"{name}: is of no kind that is read: {' '.join(ENDINGS)}.")
    check_libraries([name])
