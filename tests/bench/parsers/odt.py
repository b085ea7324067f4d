"""Texts of OpenDocument: readers of .odt to compare (`CANDIDATES`), and files (`SAMPLES`)."""

from __future__ import annotations

import io
from collections.abc import Callable


def _odfdo(data: bytes) -> str:
    import odfdo

    return odfdo.Document(io.BytesIO(data)).get_formatted_text()


def _odfpy(data: bytes) -> str:
    from odf import opendocument, teletype, text

    document = opendocument.load(io.BytesIO(data))
    return "\n".join(
        teletype.extractText(element)
        for kind in (text.H, text.P)
        for element in document.getElementsByType(kind)
    )


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "odfdo": _odfdo,
    "odfpy": _odfpy,
}


def SAMPLES() -> dict[str, bytes]:
    """A text of all pieces that a file may hold, and a long one of plain sections."""
    from office_files import OPEN_PIECES, opened, tc, tp, tr

    section = "".join(
        f'<text:h text:outline-level="1">Section {number}</text:h>'
        + tp(f"The filter of pump {number} is cleaned every {number % 30} days.") * 5
        + "<table:table>" + "".join(tr(tc(f"Seal {n}"), tc(str(n))) for n in range(5)) + "</table:table>"
        for number in range(300)
    )  # fmt: skip
    pieces = "".join(content for content, _ in OPEN_PIECES.values())
    # Libraries ask for the kind of the file, its manifest and its styles.
    about = {
        "META-INF/manifest": '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0">'
        '<manifest:file-entry manifest:full-path="/" manifest:media-type="application/vnd.oasis.opendocument.text"/>'
        '<manifest:file-entry manifest:full-path="content.xml" manifest:media-type="text/xml"/></manifest:manifest>',
    }
    return {
        "pieces.odt": opened("text", pieces, **about),
        "long.odt": opened("text", section, **about),
    }
