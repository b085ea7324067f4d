"""Documents: what is read of each format, and how paragraphs become chunks."""

import dataclasses
import io
import re
import zipfile

import pytest
from document_files import docx, docx_bomb, pdf, picture
from PIL import Image

from mmqa_jax.data.documents.chunks import ChunkOptions, TokenLimit, chunks
from mmqa_jax.data.documents.document import DocumentError, Paragraph, Place
from mmqa_jax.data.documents.docx import read_docx
from mmqa_jax.data.documents.pdf import MOST_PIXELS, page_pictures, read_pdf
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.retrieval.embedder import token_limit
from tests.refusals import refuses


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


def test_a_chunk_is_of_one_page():
    """Of `cases/doc_17`: pages without a full stop are not repeated on the next one."""
    prices = ["Berth 7: 340 euros per night", "Berth 9: 410 euros per night", "Berth 11: 95 euros"]
    paragraphs = [Paragraph(text, "", number) for number, text in enumerate(prices, start=1)]
    packed = chunks(paragraphs, ChunkOptions(words=10, overlap=6))
    assert [(chunk.page, chunk.text) for chunk in packed] == list(enumerate(prices, start=1))


# A sentence of each script, and the size of its chunks before tokens counted: up to 1,300 tokens.
SENTENCES = {
    "english": "The filter of the pump is cleaned every fourteen days with a soft brush. ",
    "russian": "Фильтр насоса очищается каждые четырнадцать дней мягкой щёткой и чистой водой. ",
    "greek": "Το φίλτρο της αντλίας καθαρίζεται κάθε δεκατέσσερις ημέρες με μαλακή βούρτσα. ",
    "chinese": "水泵的过滤器每十四天用软刷和清水清洗一次。",
    "japanese": "ポンプのフィルターは十四日ごとに柔らかいブラシと水で洗浄します。",
    "korean": "펌프 필터는 십사 일마다 부드러운 솔과 깨끗한 물로 청소합니다. ",
    "arabic": "يتم تنظيف مرشح المضخة كل أربعة عشر يوما بفرشاة ناعمة وماء نظيف. ",
    "hindi": "पंप के फ़िल्टर को हर चौदह दिन में नरम ब्रश और साफ पानी से साफ किया जाता है। ",
    "numbers": "P-307.14 9120.33 P-881.02 417.90 P-112.55 2044.18 ",
    "codes": "6f3a9c01d2e4b857 90ffab12cd34ef56 77aa00bb11cc22dd ",
    "one_word": "6f3a9c01d2e4b857-",
}


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.parametrize("overlap", [0, 89])
def test_a_chunk_is_no_longer_than_the_encoder_reads(name, overlap):
    tokenizer, title = minilm_tokenizer(), "Cleaning the pump's filter"
    limit = token_limit(tokenizer, 254)
    text = (SENTENCES[name] * 60).strip()
    paragraphs = [Paragraph(text), Paragraph(text, "A heading")]
    packed = list(chunks(paragraphs, ChunkOptions(90, overlap, limit), title))
    read = limit.count([f"{chunk.heading or title} {chunk.text}" for chunk in packed])
    assert max(read) <= 254
    assert sum(n > 60 for n in read) > len(read) / 2  # and no shorter than need be
    assert max(len(chunk.text.split()) for chunk in packed) <= 90
    if not overlap:
        whole = "".join(chunk.text for chunk in packed)
        assert whole.replace(" ", "") == 2 * text.replace(" ", "")
    if name not in ("numbers", "codes", "one_word") and not overlap:
        (stop,) = {chunk.text[-1] for chunk in packed}
        assert stop == text[-1]


# Examples of Unicode's TR 29, section 5 (rules SB6 to SB11 and figure 3), `|` where it breaks.
@pytest.mark.parametrize(
    "text",
    [
        "c.d|", "3.4|", "U.S.|", "the resp. leaders are|", "He said, “Are you going?” |John shook his head.|",
        "“Are you going?” |John asked.|", "etc.)’ ‘(the|", "Is it?! |Yes.|",
        "यह है। |वह है।|", "一。|二！|「三。」|四|",
    ],
)  # fmt: skip
def test_sentences_end_as_unicode_says(text):
    sentences = [part for part in text.split("|") if part]
    paragraph = Paragraph(text.replace("|", ""))
    single = TokenLimit(20, "", lambda texts: [20 * bool(text) for text in texts])
    packed = [chunk.text for chunk in chunks([paragraph], ChunkOptions(20, 0, single))]
    assert packed == [sentence.strip() for sentence in sentences]


def test_chunks_of_a_table_begin_with_its_header_and_cut_no_row():
    header = ("Prices", 1, True, "Place | Price")
    rows = [Paragraph(f"Berth {n} | {n} euros", *header) for n in range(9)]
    rows[4] = dataclasses.replace(rows[4], text="Berth 4 | " + "free of charge, " * 9 + "free")
    around = [Paragraph("All prices.", "Prices", 1), *rows, Paragraph("Without tax.", "Prices", 1)]
    packed = [chunk.text for chunk in chunks(around, ChunkOptions(words=20, overlap=5))]
    assert (packed[0], packed[-1]) == ("All prices.", "Without tax.")
    lines = [chunk.split("\n") for chunk in packed[1:-1]]
    assert {header for header, *_ in lines} == {"Place | Price"}
    assert [row for _, *own in lines for row in own] == [row.text for row in rows]
    assert len(lines) > 3


def test_a_chunk_has_the_places_of_its_letters():
    text = "One two three four. Five six seven eight. Nine ten eleven."
    words = [Place(m.start(), m.end(), m[0]) for m in re.finditer(r"\S+", text)]
    repeated = [Paragraph("Same.", places=(Place(0, 5, name),)) for name in "ab"]
    row = Paragraph("Berth 7", header="Place", is_row=True, places=(Place(0, 7, "Sheet1!A2"),))
    paragraphs = [Paragraph(text, places=tuple(words)), *repeated, row]
    packed = list(chunks(paragraphs, ChunkOptions(10, 4)))
    assert len(packed) == 3
    for chunk in packed[:2]:
        for place in chunk.places:
            shown = chunk.text[place.start : place.end]
            assert shown == (place.name if len(place.name) > 1 else "Same.")
        assert len(chunk.places) == len(chunk.text.split())
    assert packed[2].places == (Place(6, 13, "Sheet1!A2"),)


@pytest.mark.parametrize("text", ["x" * 100_000, "字" * 20_000, "word " * 5_000])
def test_text_without_sentences_is_cut(text):
    packed = list(chunks([Paragraph(text.strip())], ChunkOptions(words=50, overlap=5)))
    assert all(len(chunk.text) <= 50 * 8 + 50 for chunk in packed)
    assert sum(len(chunk.text.replace(" ", "")) for chunk in packed) >= len(text.replace(" ", ""))


@pytest.mark.parametrize(("words", "message"), [(3, "--chunk_words=3"), (15, "--chunk_overlap=20")])
def test_sizes_of_chunks_are_checked(words, message):
    refuses(message, ChunkOptions, words=words)


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


def zipped(encrypted: bool) -> bytes:
    """A ZIP file with a file that is none of Word's."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("note.txt", "Text.")
    data = bytearray(packed.getvalue())
    data[data.index(b"PK\x01\x02") + 8] |= encrypted
    return bytes(data)


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


@pytest.mark.parametrize(
    ("read", "data", "reason"),
    [
        (read_docx, zipped(encrypted=True), "encrypted; save it without a password"),
        (read_docx, zipped(encrypted=False), r"no \.docx that can be read: it names no document"),
        (read_docx, b"PK\x03\x04 and nothing", "no .docx"),
        (read_docx, b"\xd0\xcf\x11\xe0" + bytes(600), "encrypted, or Office's old format"),
        (read_docx, docx()[:-2000], "no .docx"),
        (read_docx, docx_bomb(3 * 2**23), r"unpacks to 25,\d+,\d+ bytes of text, more than the 14,"),
        (read_pdf, pdf([[(10, 700, "Secret.")]], encrypted=True), "encrypted; save it without a"),
        (read_pdf, b"%PDF-1.4\nnothing", "no PDF that can be read"),
        (read_pdf, pdf([[(10, 700, "Text.")]])[:60], "no PDF that can be read"),
        (read_pdf, pdf([[]]).replace(b"/Count 1", b"/Count 90000"), r"claims 90,000 pages in \d\d\d bytes"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(read, data, reason):
    refuses(reason, read, data, *[64] * (read is read_pdf), error=DocumentError)


def test_how_much_documents_may_hold(monkeypatch):
    word = docx(lambda document: document.add_picture(io.BytesIO(picture())))
    monkeypatch.setattr("mmqa_jax.data.documents.office.MOST_BYTES", 9_000)
    with pytest.raises(DocumentError, match=r"unpacks to \d+,\d+ bytes, more than 9,000; split it"):
        read_docx(word)
    monkeypatch.setattr("mmqa_jax.data.documents.pdf.MOST_CHARACTERS", 4)
    with pytest.raises(DocumentError, match="page 2 has 5 characters, more than 4"):
        read_pdf(pdf([[(10, 700, "Text")], [(10, 700, "Text.")]]), 64)
