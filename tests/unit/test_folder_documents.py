"""Documents: what is read of each format, and how paragraphs become chunks."""

from __future__ import annotations

import io
import re
import zipfile

import pytest
from document_files import docx, docx_bomb, pdf, picture
from PIL import Image

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.chunks import ChunkOptions, chunks
from mmqa_jax.data.documents.document import DocumentError, Paragraph
from mmqa_jax.data.documents.docx import read_docx
from mmqa_jax.data.documents.pages import MOST_PIXELS, page_pictures
from mmqa_jax.data.documents.pdf import read_pdf


def texts(document):
    return [(paragraph.heading, paragraph.text) for paragraph in document.paragraphs]


# Chunks


def test_chunks_end_with_sentences_overlap_and_stay_below_their_heading():
    sentences = [f"Sentence {n} has a few words in it." for n in range(20)]  # 8 words each
    paragraphs = [Paragraph(" ".join(sentences[:10]), "A", 1), Paragraph(sentences[10], "B", 2)]
    packed = list(chunks(paragraphs, ChunkOptions(words=30, overlap=10)))
    assert [chunk.heading for chunk in packed] == ["A"] * (len(packed) - 1) + ["B"]
    assert packed[0].text == " ".join(sentences[:3])
    assert packed[1].text == " ".join(sentences[2:5])  # 8 words are repeated, 16 would be too many
    assert packed[-2].text.endswith(sentences[9])
    assert packed[-1] == Paragraph(sentences[10], "B", 2)


def test_a_chunk_is_of_one_page_and_repeats_a_sentence_that_goes_on():
    pages = ["One two three. Four.", "Five. The pump is", "on the left."]
    paragraphs = [Paragraph(text, "", number) for number, text in enumerate(pages, start=1)]
    packed = chunks(paragraphs, ChunkOptions(words=10, overlap=3))
    assert [(chunk.page, chunk.text) for chunk in packed] == [
        (1, "One two three. Four."), (2, "Five. The pump is"), (3, "The pump is on the left."),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["x" * 100_000, "字" * 20_000, "word " * 5_000])
def test_text_without_sentences_is_cut(text):
    packed = list(chunks([Paragraph(text.strip())], ChunkOptions(words=50, overlap=5)))
    assert all(len(chunk.text) <= 50 * 8 + 50 for chunk in packed)
    assert sum(len(chunk.text.replace(" ", "")) for chunk in packed) >= len(text.replace(" ", ""))


def test_sizes_of_chunks_are_checked():
    with pytest.raises(UserError, match="--chunk_words=3"):
        ChunkOptions(words=3)
    with pytest.raises(UserError, match="--chunk_overlap=15"):
        ChunkOptions(words=15)


# Word


def test_docx():
    def fill(document):
        document.add_heading("Manual", 0)
        document.add_heading("Cleaning", 1)
        document.add_paragraph("Wash it weekly.")
        table = document.add_table(2, 2)
        for cell, text in zip(table._cells, ("Part", "Days", "Filter", "7"), strict=True):
            cell.text = text
        document.add_picture(io.BytesIO(picture()))
        document.add_paragraph("Figure 1. The filter.", style="Caption")
        document.add_picture(io.BytesIO(picture("blue")))
        document.inline_shapes[1]._inline.docPr.set("descr", "A blue pump")

    document = read_docx(docx(fill))
    assert texts(document) == [
        ("Manual > Cleaning", "Wash it weekly."),
        ("Manual > Cleaning", "Filter | 7"),
        ("Manual > Cleaning", "Figure 1. The filter."),
    ]
    assert document.paragraphs[1].header == "Part | Days"
    assert [(f.caption, f.heading, f.picture) for f in document.figures] == [
        ("Figure 1. The filter.", "Manual > Cleaning", picture()),
        ("A blue pump", "Manual > Cleaning", picture("blue")),
    ]


def test_a_zip_bomb_is_not_unpacked():
    bomb = docx_bomb(3 * 2**23)
    assert len(bomb) < 100_000
    with pytest.raises(
        DocumentError, match=r"unpacks to 25,\d+,\d+ bytes of text, more than the 14,"
    ):
        read_docx(bomb)


def test_how_much_documents_may_hold(monkeypatch):
    word = docx(lambda document: document.add_picture(io.BytesIO(picture())))
    monkeypatch.setattr("mmqa_jax.data.documents.office.MOST_BYTES", 9_000)
    with pytest.raises(DocumentError, match=r"unpacks to \d+,\d+ bytes, more than 9,000; split it"):
        read_docx(word)
    monkeypatch.setattr("mmqa_jax.data.documents.pdf.MOST_CHARACTERS", 4)
    with pytest.raises(DocumentError, match="page 2 has 5 characters, more than 4"):
        read_pdf(pdf([[(10, 700, "Text")], [(10, 700, "Text.")]]), 64)
    with pytest.raises(DocumentError, match=r"claims 90,000 pages in \d\d\d bytes"):
        read_pdf(pdf([[(10, 700, "Text")]]).replace(b"/Count 1", b"/Count 90000"), 64)


def zipped(encrypted: bool) -> bytes:
    """A ZIP file with a file that is none of Word's."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("note.txt", "Text.")
    data = bytearray(packed.getvalue())
    data[data.index(b"PK\x01\x02") + 8] |= encrypted
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (zipped(encrypted=True), "encrypted; save it without a password"),
        (zipped(encrypted=False), r"no \.docx that can be read: it names no document"),
        (b"PK\x03\x04 and nothing", "no .docx"),
        (b"\xd0\xcf\x11\xe0" + bytes(600), "encrypted, or Office's old format"),
        (docx()[:-2000], "no .docx"),
    ],
)
def test_damaged_docx(data, reason):
    with pytest.raises(DocumentError, match=reason):
        read_docx(data)


# PDF


def test_pdf():
    jpeg = picture(form="JPEG")
    pages = [
        [(20, 700, "Cleaning"), (10, 660, "Wash the filter every"), (10, 648, "seven days."),
         (10, 610, "A second paragraph."), (9, 300, "Figure 3. The filter from above."),
         (9, 30, "1")],
        [(10, 700, "Text of the next page."), (9, 30, "Page 2 of 2")],
    ]  # fmt: skip
    document = read_pdf(pdf(pages, {0: (320, jpeg)}), 64)
    assert [(p.text, p.heading, p.page) for p in document.paragraphs] == [
        ("Wash the filter every seven days.", "Cleaning", 1),
        ("A second paragraph.", "Cleaning", 1),
        ("Figure 3. The filter from above.", "Cleaning", 1),
        ("Text of the next page.", "Cleaning", 2),
    ]
    (figure,) = document.figures
    assert (figure.caption, figure.page) == ("Figure 3. The filter from above.", 1)
    assert figure.picture == jpeg  # as it is embedded
    assert document.scanned_pages == ()


def test_a_figure_that_is_repeated_or_small_is_left_out():
    pages = [[(10, 700, "Text.")]] * 3
    jpeg, small = picture(form="JPEG"), picture(size=(20, 20), form="JPEG")
    document = read_pdf(pdf(pages, {0: (320, jpeg), 1: (320, jpeg), 2: (320, small)}), 64)
    assert [figure.page for figure in document.figures] == [1]


def test_scanned_and_blank_pages():
    scan = picture(form="JPEG")
    document = read_pdf(pdf([[(10, 700, "Text.")], [], []], {2: (100, scan)}), 64)
    assert document.scanned_pages == (3,)
    assert [p.page for p in document.paragraphs] == [1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf([[(10, 700, "Secret.")]], encrypted=True), "encrypted; save it without a password"),
        (b"%PDF-1.4\nnothing", "no PDF that can be read"),
        (pdf([[(10, 700, "Text.")]])[:60], "no PDF that can be read"),
    ],
)
def test_pdf_that_cannot_be_read(data, reason):
    with pytest.raises(DocumentError, match=reason):
        read_pdf(data, 64)


# Pages as pictures


def test_pages_are_drawn_as_pdfium_shows_them():
    red = picture("red", (40, 30), form="JPEG")
    drawn = list(page_pictures(pdf([[(20, 700, "Text.")], []], {1: (100, red)})))
    assert [(page.number, page.problem) for page in drawn] == [(1, ""), (2, "")]
    first, second = (Image.open(io.BytesIO(page.picture)) for page in drawn)
    assert first.mode == second.mode == "RGB"
    # 8.5 x 11 inches, within the bound and no sharper than 144 dots an inch.
    assert first.size[0] * first.size[1] <= MOST_PIXELS * 1.01
    assert abs(first.size[0] / first.size[1] - 8.5 / 11) < 0.01
    scale = second.size[0] / 612
    place = (int((72 + 100) * scale), int((792 - 100 - 75) * scale))  # in the picture's middle
    assert second.getpixel(place)[0] > 200 > 60 > second.getpixel(place)[1]
    assert second.getpixel((5, 5)) == (255, 255, 255)


def test_a_page_of_any_size_is_bounded():
    data = pdf([[(10, 10, "Text.")]])
    large = data.replace(b"[0 0 612 792]", b"[0 0 90000 90000]")
    (page,) = page_pictures(large)
    width, height = Image.open(io.BytesIO(page.picture)).size
    assert 0.98 * MOST_PIXELS < width * height < 1.02 * MOST_PIXELS
    (thin,) = page_pictures(data.replace(b"[0 0 612 792]", b"[0 0 0.001 99]"))
    assert thin.picture is None
    assert re.fullmatch("page 1: .* points, too long and thin", thin.problem)
    (outside,) = page_pictures(pdf([[]], box="0 0 612 792] /CropBox [700 900 800 1000"))
    assert (outside.picture, outside.problem) == (None, "page 1: 0 x 0 points")
    with pytest.raises(DocumentError, match="encrypted"):
        list(page_pictures(pdf([[(10, 700, "Secret.")]], encrypted=True)))
