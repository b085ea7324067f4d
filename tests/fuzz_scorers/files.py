"""Files for code that reads files."""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def written(**contents: Any) -> Iterator[list[Path]]:
    """Paths of files in a folder that is deleted afterwards, NAME.json of each content."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.json") for name in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            path.write_text(json.dumps(content), encoding="utf-8")
        yield paths


def lines(rows: Iterable[Any]) -> str:
    """The text of a file of JSON lines."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)
