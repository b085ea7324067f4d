"""Keeps control characters of foreign texts off the terminal: they are shown escaped.

Answers, questions, titles, names of files and replies of servers may hold escape sequences, which
a terminal obeys: it erases what was printed, takes a link or another title. Marks of direction show
a text in another order than it has.

`print` escapes by the streams here; rich, which writes escape sequences of its own, by
`core.progress.Screen`.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

# C0 but for tab and newline, DEL, C1, embedded, overridden and isolated directions.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """The text with its control characters written out: `\\x1b`, `\\u202e`.

    Those that JSON may hold in its strings are written as JSON's escapes: it stays JSON.
    """
    return _CONTROL.sub(_escape, text)


def _escape(character: re.Match[str]) -> str:
    number = ord(character[0])
    return f"\\x{number:02x}" if number < 0x20 else f"\\u{number:04x}"


def json_line(value: Any) -> str:
    """One line of JSON that stdout's encoding can hold: in others than UTF-8 in ASCII."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # Python's own escapes are not all JSON's
        return json.dumps(value)
    return text


class EscapingStream:
    """A text stream that writes `escaped` texts; all else is the stream's."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text; returns the number of its characters."""
        self._stream.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    @property
    def unescaped(self) -> Any:
        """The stream itself."""
        return self._stream


def escape_streams() -> None:
    """Lets all that is printed to stdout and stderr from now on be escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, EscapingStream):
            setattr(sys, name, EscapingStream(stream))


@contextlib.contextmanager
def libraries_bars() -> Iterator[None]:
    """Lets a library show its own progress on stderr in the block, which moves the cursor."""
    with contextlib.redirect_stderr(getattr(sys.stderr, "unescaped", sys.stderr)):
        yield
