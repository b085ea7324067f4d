"""PowerPoint's presentations: readers of .pptx to compare (`CANDIDATES`), and files (`SAMPLES`)."""

from __future__ import annotations

import io
from collections.abc import Callable

from tests.bench.parsers.docx import by_docling, by_markitdown


def _python_pptx(data: bytes) -> str:
    import pptx

    lines = []
    for slide in pptx.Presentation(io.BytesIO(data)).slides:
        for shape in slide.shapes:
            if shape.has_text_frame:
                lines.append(shape.text_frame.text)
            if getattr(shape, "has_table", False):
                lines += [c.text for row in shape.table.rows for c in row.cells]
    return "\n".join(lines)


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "python-pptx": _python_pptx,
    "markitdown": by_markitdown(".pptx"),
    "docling-slim": by_docling("mspowerpoint_backend", "MsPowerpointDocumentBackend", "PPTX"),
}


def SAMPLES() -> dict[str, bytes]:
    """A slide for each piece that a slide may hold, and 300 plain slides."""
    from office_files import SHAPES, deck, run, shape, slide

    plain = [
        slide(
            shape(run(f"Slide {number}"), "title"),
            *[shape(run(f"Pump {number} is cleaned every {n} days.")) for n in range(8)],
        )
        for number in range(300)
    ]
    return {
        "pieces.pptx": deck(*[slide(drawn) for drawn, _ in SHAPES.values()]),
        "long.pptx": deck(*plain),
    }
