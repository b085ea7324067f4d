"""Results of finished batches on disk, so that a killed job repeats one batch at most."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.sealed import open_line, seal_line


class Journal:
    """A growing file of `{"key": ..., "value": ..., "sha256": ...}` lines, read back by a restart.

    A last line cut short by a kill is dropped; any other damage is refused. Results of other inputs
    (another model or corpus, told by the fingerprint in the first line) are discarded.

    Args:
      path: the file; made by the first `add`.
      fingerprint: of everything that the results depend on besides their keys.
    """

    def __init__(self, path: str | os.PathLike, fingerprint: str):
        self.path, self._fingerprint = Path(path), fingerprint
        self._values: dict[str, Any] = {}
        self._file: Any = None
        self._read()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, values: Mapping[str, Any]) -> None:
        """Keeps the results of one batch; they are on disk when this returns."""
        if self._file is None:
            self._open()
        lines = (seal_line({"key": key, "value": value}) for key, value in values.items())
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._values.update(values)

    def close(self) -> None:
        """Closes the file; the journal can be read and added to afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> None:
        if not self.path.exists():
            return
        # Split before decoding: a kill may cut the last line within a character.
        whole, newline, _ = self.path.read_bytes().rpartition(b"\n")
        if not newline:
            return
        try:
            head, *rows = whole.split(b"\n")
            if open_line(head, {"fingerprint"})["fingerprint"] == self._fingerprint:
                kept = (open_line(row, {"key", "value"}) for row in rows)
                self._values = {row["key"]: row["value"] for row in kept}
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{self.path}: is damaged ({error}); remove it, and its work is done again."
            ) from error

    def _open(self) -> None:
        """Opens the file behind its last whole line, or starts it anew for other inputs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._values:
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115
            self._file.write(seal_line({"fingerprint": self._fingerprint}) + "\n")
            return
        with open(self.path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
