"""Excel's workbooks: readers of .xlsx to compare (`CANDIDATES`), and files (`SAMPLES`)."""

from __future__ import annotations

import io
from collections.abc import Callable

from tests.bench.parsers.docx import by_docling, by_markitdown


def _openpyxl(data: bytes) -> str:
    import openpyxl

    book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    rows = (row for sheet in book for row in sheet.iter_rows(values_only=True))
    return "\n".join(" | ".join(str(value) for value in row if value is not None) for row in rows)


def _calamine(data: bytes) -> str:
    from python_calamine import CalamineWorkbook

    book = CalamineWorkbook.from_filelike(io.BytesIO(data))
    rows = (row for name in book.sheet_names for row in book.get_sheet_by_name(name).iter_rows())
    return "\n".join(" | ".join(str(value) for value in row if value != "") for row in rows)


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "openpyxl": _openpyxl,
    "python-calamine": _calamine,
    "markitdown": by_markitdown(".xlsx"),
    "docling-slim": by_docling("msexcel_backend", "MsExcelDocumentBackend", "XLSX"),
}


def SAMPLES() -> dict[str, bytes]:
    """A workbook with formatted and merged cells and a comment, and one of 100,000 cells."""
    import datetime

    import openpyxl
    from openpyxl.comments import Comment

    small = openpyxl.Workbook()
    fees = small.active
    fees.append(["Berth", "From", "Share", "Fee"])
    fees.append(["North", datetime.date(2024, 3, 5), 0.25, 1234.5])
    fees.append([None, datetime.date(2024, 3, 6), 0.5, 7])
    fees.merge_cells("A2:A3")
    fees["C2"].number_format, fees["D2"].number_format = "0%", "#,##0.00 [$€-407]"
    fees["D2"].comment = Comment("Too low", "")
    pieces = io.BytesIO()
    small.save(pieces)
    workbook = openpyxl.Workbook(write_only=True)
    sheet = workbook.create_sheet("Ledger")
    sheet.append(["Name", "City", "Amount", "Share", "Note"])
    for number in range(20_000):
        name, note = f"Person {number}", f"note {number % 97} of the ledger"
        sheet.append([name, "Berlin", number * 1.5, number / 20_000, note])
    packed = io.BytesIO()
    workbook.save(packed)
    return {"pieces.xlsx": pieces.getvalue(), "long.xlsx": packed.getvalue()}
