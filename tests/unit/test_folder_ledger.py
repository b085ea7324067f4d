"""The ledger: whatever the format, no letter that a file holds vanishes without being counted."""

import csv
import dataclasses
import email.message
import html
import io
import json
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable

import pytest
from document_files import docx, pdf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from office_files import LAYOUT, behind, deck, root, run, shape, slide

from mmqa_jax.data.documents.document import CODE, READERS, Document, letters
from mmqa_jax.data.folder import FolderOptions, Ledger, read_folder
from mmqa_jax.runs.prepare import folder_notes

pytestmark = pytest.mark.slow

Take = Callable[[], str]  # the next text of the file
_SCRIPTS = "abcXYZ019éßŁжЯωΔאבعربहिन्दीไทย漢字カナ한글"
_MOST = 40  # texts of a file


def plain(take: Take) -> bytes:
    return "\n\n".join(take() for _ in range(3)).encode()


def markdown(take: Take) -> bytes:
    return (
        f"---\ntitle: {take()}\n---\n\n# {take()}\n\n{take()}\n{take()}\n\n- {take()}\n- {take()}\n\n"
        f"| {take()} | {take()} |\n|---|---|\n| {take()} | {take()} |\n\n```\n{take()}\n```\n\n"
        f"> {take()}\n\n![{take()}](a.png) [{take()}](b.md) **{take()}** `{take()}`\n\n"
        f"<!-- {take()} -->\n\n<div>{take()}</div>\n\n## {take()}\n"
    ).encode()


def page(take: Take) -> str:
    def text() -> str:
        return html.escape(take())

    return (
        f"<!doctype html><meta charset=utf-8><title>{text()}</title><style>p {{}}</style>"
        f"<nav>{text()}</nav><h1>{text()}</h1>{text()}<p>{text()}<b>{text()}</b><br>{text()}"
        f"<table><caption>{text()}</caption><tr><th>{text()}<th>{text()}<tr><td rowspan=2>{text()}"
        f"<td>{text()}<tr><td>{text()}</table><ul><li>{text()}<li>{text()}</ul>"
        f"<img src=a.png alt='{text()}'><figure><img src=b.png alt='{text()}'><figcaption>{text()}</figcaption></figure>"
        f"<textarea>{text()}</textarea><select><option>{text()}</select><noscript>{text()}</noscript>"
        f"<details><summary>{text()}</summary>{text()}</details><p hidden>{text()}</p>"
        f"<math alttext='{text()}'><mi>{text()}</mi></math><footer>{text()}</footer>"
        f"<!--{text()}--><template>{text()}</template><svg><text>{text()}</text></svg><h2>{text()}</h2>"
    )


def word(take: Take) -> bytes:
    def fill(made) -> None:
        made.core_properties.title = take()
        made.add_heading(take(), 1)
        made.add_paragraph(take()).add_run(take()).bold = True
        table = made.add_table(2, 2)
        for cell in table._cells:
            cell.text = take()
        table.cell(0, 0).merge(table.cell(0, 1))
        made.sections[0].header.paragraphs[0].text = take()
        made.sections[0].footer.paragraphs[0].text = take()
        made.add_paragraph(take()).runs[0].font.hidden = True
        for style in ("List Number", "List Number", "List Bullet", "List Number 2"):
            made.add_paragraph(take(), style)
        made.add_heading(take(), 2)

    return docx(fill)


def pages(take: Take) -> bytes:
    def text() -> str:
        return "".join(c for c in take() if c.isascii()) or "x"

    first = [(20, 700), (10, 660), (10, 648), (10, 500), (9, 30)]
    lines = [(size, height, text()) for size, height in first]
    return pdf([lines, [(10, 750, text()), (10, 700, text()), (9, 30, "Page 2 of 2")], []])


def table(delimiter: str) -> Callable[[Take], bytes]:
    def made(take: Take) -> bytes:
        written = io.StringIO()
        csv.writer(written, delimiter=delimiter).writerows([[take(), take()] for _ in range(4)])
        return written.getvalue().encode()

    return made


def record(take: Take) -> dict[str, object]:
    first, second = f"{take()} 1", f"{take()} 2"  # no key twice
    return {first: take(), second: [take(), {take(): take()}, 12, None, True]}


def notebook(take: Take) -> bytes:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": [f"# {take()}\n", take()]},
        {"cell_type": "raw", "metadata": {}, "source": take()},
        {
            "cell_type": "code", "metadata": {}, "execution_count": 1, "source": f"# {take()}",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": [take()]},
                *(
                    {"output_type": "execute_result", "execution_count": 1, "metadata": {},
                     "data": {kind: [take()]}}
                    for kind in ("text/plain", "text/html", "text/markdown")
                ),
                {"output_type": "display_data", "metadata": {},
                 "data": {"text/plain": take(), "text/html": take()}},
                {"output_type": "error", "ename": take(), "evalue": take(), "traceback": [take()]},
            ],
        },
    ]  # fmt: skip
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}).encode()


def restructured(take: Take) -> bytes:
    title = take()
    return (
        f"{title}\n{'=' * 4 * len(title)}\n\n{take()}\n\n- {take()}\n- {take()}\n\n.. note:: {take()}\n\n"
        f".. {take()}\n\n::\n\n    {take()}\n\n.. image:: a.png\n   :alt: {take()}\n\n.. figure:: b.png\n   :alt: {take()}\n\n   {take()}\n\n"
        f".. [1] {take()}\n"
    ).encode()


def tex(take: Take) -> bytes:
    return (
        f"\\documentclass{{article}}\n\\title{{{take()}}}\n\\begin{{document}}\n\\maketitle\n"
        f"\\section{{{take()}}}\n{take()} \\emph{{{take()}}}\\footnote{{{take()}}}\n\n% {take()}\n"
        f"\\begin{{itemize}}\\item {take()} \\item {take()}\\end{{itemize}}\n$x = {take()}$\n\n"
        f"\\begin{{tabular}}{{ll}}{take()} & {take()} \\\\ \\end{{tabular}}\n"
        f"\\begin{{figure}}\\caption{{{take()}}}\\end{{figure}}\n\\unknown{{{take()}}}\n\\end{{document}}\n"
    ).encode()


def mail(take: Take) -> bytes:
    message = email.message.EmailMessage()
    message["Subject"], message["From"], message["To"] = take(), "a@b.org", "c@d.org"
    message.set_content(take())
    message.add_alternative(page(take), subtype="html")
    message.add_attachment(take().encode(), "text", "plain", filename="note.txt")
    return bytes(message)


def book(take: Take) -> bytes:
    packed = io.BytesIO()
    xhtml = (
        '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>{}</title></head>'
        "<body><h1>{}</h1><p>{}</p></body></html>"
    )
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        container = (
            '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
        )
        archive.writestr("META-INF/container.xml", container)
        items = "".join(
            f'<item id="c{n}" href="c{n}.xhtml" media-type="application/xhtml+xml"/>'
            for n in range(3)
        )
        package = (
            '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata '
            f'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{html.escape(take())}</dc:title>'
            f'</metadata><manifest>{items}</manifest><spine><itemref idref="c0"/>'
            '<itemref idref="c1"/><itemref idref="c2" linear="no"/></spine></package>'
        )
        archive.writestr("book.opf", package)
        for n in range(3):
            archive.writestr(f"c{n}.xhtml", xhtml.format(*(html.escape(take()) for _ in range(3))))
    return packed.getvalue()


def presentation(take: Take) -> bytes:
    def said(placeholder: str = "") -> str:
        return shape(run(html.escape(take())), placeholder)

    slides = [slide(said("title"), said(), said("ftr"), more=f'show="{shown}"') for shown in (1, 0)]
    notes = root("p:notes", said("body"))
    parts = behind(said() + said("title"), said() + said("dt"))
    return deck(*slides, more=(("notesSlide", "../notes.xml"), LAYOUT), notes=notes, **parts)


def workbook(take: Take) -> bytes:
    from openpyxl import Workbook
    from openpyxl.comments import Comment

    made = Workbook()
    sheet = made.active
    for first in (take(), take(), None):
        sheet.append([first, take(), 12.5])
    sheet.merge_cells("A2:A3")
    sheet["B2"].comment = Comment(take(), "somebody")
    hidden = made.create_sheet("Other")
    hidden.append([take()])
    hidden.sheet_state = "hidden"
    sheet.row_dimensions[3].hidden = True
    packed = io.BytesIO()
    made.save(packed)
    return packed.getvalue()


def open_document(body: str) -> Callable[[Take], bytes]:
    names = ("office", "text", "table", "drawing", "presentation")
    spaces = " ".join(
        f'xmlns:{name.removesuffix("ing")}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for name in names
    )

    def made(take: Take) -> bytes:
        pieces = [html.escape(take()) for _ in range(body.count("{}"))]
        content = (
            f'<office:document-content {spaces} office:version="1.3"><office:body>'
            f"{body.format(*pieces)}</office:body></office:document-content>"
        )
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
            archive.writestr("content.xml", content)
        return packed.getvalue()

    return made


_NOTE = '<text:note text:note-class="footnote"><text:note-body><text:p>{}</text:p></text:note-body></text:note>'
_ROWS = (
    '<table:table table:name="T"><table:table-row><table:table-cell><text:p>{}</text:p></table:table-cell>'
    "<table:table-cell><text:p>{}</text:p></table:table-cell></table:table-row></table:table>"
)

MAKE: dict[str, Callable[[Take], bytes]] = {
    ".txt": plain,
    **dict.fromkeys((".py", ".toml"), plain),
    ".md": markdown,
    ".html": lambda take: page(take).encode(),
    ".htm": lambda take: page(take).encode("utf-16"),
    ".docx": word,
    ".pdf": pages,
    ".csv": table(","),
    ".tsv": table("\t"),
    ".json": lambda take: json.dumps([record(take), record(take)]).encode(),
    ".jsonl": lambda take: b"".join(json.dumps(record(take)).encode() + b"\n" for _ in range(2)),
    ".ipynb": notebook,
    ".rst": restructured,
    ".tex": tex,
    ".eml": mail,
    ".epub": book,
    ".pptx": presentation,
    ".xlsx": workbook,
    ".odt": open_document(
        "<office:text><text:h text:outline-level='1'>{}</text:h><text:p>{}" + _NOTE + "</text:p>"
        + _ROWS + "<text:p>{}</text:p></office:text>"
    ),
    ".ods": open_document(f"<office:spreadsheet>{_ROWS}</office:spreadsheet>"),
    ".odp": open_document(
        "<office:presentation><draw:page draw:name='p'><draw:frame><draw:text-box><text:p>{}</text:p>"
        "</draw:text-box></draw:frame><presentation:notes><draw:frame><draw:text-box><text:p>{}</text:p>"
        "</draw:text-box></draw:frame></presentation:notes></draw:page></office:presentation>"
    ),
}  # fmt: skip
_BY_HAND = {".msg", *CODE}  # whose reader has files of its own in tests, or is .py's


def test_every_format_is_tried():
    assert READERS.keys() <= MAKE.keys() | _BY_HAND


def read_of(document: Document) -> Counter[str]:
    """All letters that a document says, as often as it says them."""
    texts = [document.title, *(figure.caption for figure in document.figures)]
    for paragraph in (*document.paragraphs, *document.figures):
        texts.append(paragraph.heading)
    texts += [text for p in document.paragraphs for text in (p.text, p.header)]
    return letters_of(texts)


def letters_of(texts: list[str]) -> Counter[str]:
    composed = (unicodedata.normalize("NFC", text) for text in texts)
    return Counter(letter for text in composed for letter in text if letter.isalnum())


_WORDS = st.lists(st.text(_SCRIPTS, min_size=1, max_size=8), min_size=1, max_size=4).map(" ".join)


@pytest.mark.parametrize("ending", sorted(MAKE.keys() & READERS.keys()))
@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(texts=st.lists(_WORDS, min_size=_MOST, max_size=_MOST))
def test_no_letter_vanishes_without_being_counted(ending, texts):
    written: list[str] = []

    def take() -> str:
        written.append(unicodedata.normalize("NFC", texts[len(written) % _MOST]))
        return written[-1]

    document = READERS[ending].read(MAKE[ending](take))
    if ending == ".pdf":
        written = ["".join(filter(str.isascii, text)) for text in written]
    unread = letters_of(written) - read_of(document)
    counted = sum(document.left_out.values()) + document.missing
    assert unread.total() <= counted, (unread, dict(document.left_out), document.missing)
    assert document.letters >= sum(map(letters, written))


def test_the_report_names_what_was_not_read(tmp_path):
    """Per file in the record; in the lines of `ask` and on the page the files and causes."""
    (tmp_path / "raw").mkdir()
    shown, hidden = "Shown words 12.", "Hidden words."
    data = f"<p>{shown}</p><p hidden>{hidden}</p>".encode()
    (tmp_path / "raw" / "a.html").write_bytes(data)
    (tmp_path / "raw" / "b.txt").write_text("Plain.")
    report = read_folder(tmp_path / "raw", tmp_path / "kept", FolderOptions()).report
    assert {file: (row.read, row.held, row.missing) for file, row in report.ledger.items()} == {
        "a.html": (letters(shown), letters(shown) + letters(hidden), 0),
        "b.txt": (5, 5, 0),
    }
    assert folder_notes(dataclasses.asdict(report)) == [
        "11 letters of documents are left out on purpose: hidden (11)"
    ]
    lost = Ledger(read=900, held=1100, left_out={"running heads": 50}, missing=150)
    report.ledger["c.pdf"] = lost
    assert folder_notes(dataclasses.asdict(report)) == [
        "150 letters of documents were not read: c.pdf (150 of 1,100)",
        "61 letters of documents are left out on purpose: running heads (50), hidden (11)",
    ]
