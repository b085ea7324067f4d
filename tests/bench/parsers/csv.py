"""Tables as text: readers of .csv to compare (`CANDIDATES`), and files (`SAMPLES`)."""

from __future__ import annotations

import io
from collections.abc import Callable

from tests.bench.parsers.docx import by_docling, by_markitdown


def _standard_library(data: bytes) -> str:
    import csv

    text = data.decode()
    dialect = csv.Sniffer().sniff(text[:4096])
    return "\n".join(" | ".join(row) for row in csv.reader(io.StringIO(text, ""), dialect))


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "csv with its sniffer": _standard_library,
    "markitdown": by_markitdown(".csv"),
    "docling-slim": by_docling("csv_backend", "CsvDocumentBackend", "CSV"),
}


def SAMPLES() -> dict[str, bytes]:
    """Values divided by semicolons with commas in figures, and 100,000 values."""
    lines = (f"Person {n};Berlin;{n},50;note {n % 97} of the ledger;x" for n in range(20_000))
    return {
        "semicolons.csv": "Berth;Fee;Note\nNorth;1,5;x\nSouth;2,5;é\n".encode(),
        "long.csv": "\n".join(["Name;City;Amount;Note;Mark", *lines]).encode(),
    }
