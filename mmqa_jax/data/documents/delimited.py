"""Tables as text: values divided by commas, semicolons, tabs or bars (.csv, .tsv)."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter

from mmqa_jax.data.documents.document import Document, DocumentError, decoded, letters, one_line
from mmqa_jax.data.documents.office import MOST_CELLS, Reading

# Tabs and semicolons first: commas stand in figures and sentences, too.
_DELIMITERS = "\t;|,"
_SAMPLE = 2**16  # characters by which the delimiter is chosen
_LONGEST_VALUE = 2**17  # characters, as the csv module bounds it
_STATED = re.compile(r"sep=(.)\n")  # Excel's own first line


def read_delimited(data: bytes, delimiter: str = "") -> Document:
    """The rows of a table, with their places as a spreadsheet names them (`A2:C2`).

    The text is UTF-8, or UTF-16 with its mark, as Excel writes "Unicode text".

    Args:
      delimiter: between values; "": the one by which most lines have equally many values.
    """
    text = _decoded(data)
    reading = Reading()
    reading.held = letters(one_line(text))
    if stated := _STATED.match(text):
        delimiter = stated[1]
        reading.left_out["names of delimiters"] = letters("sep")
        text = "\n" + text[stated.end() :]  # rows keep their numbers
    rows: dict[int, dict[int, str]] = {}
    for number, values in enumerate(_records(text, delimiter or _delimiter(text)), start=1):
        row = {column: one_line(value) for column, value in enumerate(values) if value.strip()}
        if any(row.values()):
            rows[number] = row
    reading.sheet("", rows, {})
    return reading.document()


def _decoded(data: bytes) -> str:
    if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return decoded(data)
    try:
        return data.decode("utf-16").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DocumentError("its UTF-16 is damaged; save the file as UTF-8") from error


def _records(text: str, delimiter: str) -> list[list[str]]:
    """The values of each line; quotation marks are letters where they do not come in pairs."""
    csv.field_size_limit(_LONGEST_VALUE)  # of the module, for all: others may have raised it
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        records, cells = [], 0
        try:
            for values in csv.reader(io.StringIO(text, ""), delimiter=delimiter, quoting=quoting):
                cells += len(values)
                if cells > MOST_CELLS:
                    raise DocumentError(f"more than {MOST_CELLS:,} cells; split it")
                records.append(values)
            return records
        except csv.Error as error:
            reason = one_line(str(error))
    raise DocumentError(f"no table of values that can be read ({reason})")


def _delimiter(text: str) -> str:
    """The delimiter by which most lines at the beginning have equally many values, above one."""
    sample = text[:_SAMPLE]

    def score(delimiter: str) -> tuple[int, int]:
        counts = Counter(len(values) for values in _records(sample, delimiter))
        return max(((lines, count) for count, lines in counts.items() if count > 1), default=(0, 0))

    return max(_DELIMITERS, key=score)
