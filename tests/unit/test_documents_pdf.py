"""PDFs as a person sees them: order, tables, running heads, forms, notes, scans, places."""

import io
from collections.abc import Sequence

import pypdfium2
import pytest
from document_files import pdf_of
from PIL import Image, ImageDraw, ImageFont

from mmqa_jax.data.documents import ocr
from mmqa_jax.data.documents.chunks import ChunkOptions
from mmqa_jax.data.documents.document import Document, letters
from mmqa_jax.data.documents.pdf import read_pdf
from tests.bench.rectangles import placed

LEFT = ["The north pier was built in 1907", "from granite blocks that ships"]
LEFT += ["brought from Bornholm."]
RIGHT = ["The south pier is younger than it", "and it is closed to all visitors"]
RIGHT += ["from October to March."]
ROWS = (("Pump", "Flow", "Power"), ("P-11", "40 l/s", "3 kW"), ("P-12", "55 l/s", "7 kW"))


def write(x: float, y: float, text: str, size: float = 10, font: str = "F") -> str:
    return f"BT /{font} {size} Tf 1 0 0 1 {x} {y} Tm ({text}) Tj ET\n"


def texts(document: Document) -> list[str]:
    return [paragraph.text for paragraph in document.paragraphs]


def reads(*pages: str, **options) -> Document:
    document = read_pdf(pdf_of([(page, "") for page in pages], **options), 64)
    assert document.missing == 0
    return document


def table(by_row: bool) -> str:
    cells = [(x, y) for x in range(3) for y in range(3)]
    cells.sort(key=lambda cell: cell[::-1] if by_row else cell)
    return "".join(write(72 + 120 * x, 700 - 16 * y, ROWS[y][x]) for x, y in cells)


def columns(by_row: bool) -> str:
    lines = [(column, number) for column in (0, 1) for number in range(3)]
    lines.sort(key=lambda line: line[::-1] if by_row else line)
    return "".join(
        write(72 + 248 * column, 700 - 13 * number, (LEFT, RIGHT)[column][number])
        for column, number in lines
    )


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_columns_are_read_one_after_the_other(by_row, rotation):
    """However the file orders their lines, and however the page is turned."""
    title = write(
        72, 740, "A title that goes over both of the columns of this page, as it does", 10
    )
    document = reads(title + columns(by_row), rotation=rotation)
    assert texts(document)[1:] == [" ".join(LEFT), " ".join(RIGHT)]


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("turn", ["1 0 0 1 0 0", "0 1 -1 0 800 0", "0 -1 1 0 0 800"])
def test_tables_are_read_row_by_row(by_row, turn):
    document = reads(f"q {turn} cm\n{table(by_row)}Q\n")
    assert texts(document) == ["P-11 | 40 l/s | 3 kW", "P-12 | 55 l/s | 7 kW"]
    assert {p.header for p in document.paragraphs if p.is_row} == {"Pump | Flow | Power"}


def test_headers_and_headings_that_stand_again_are_counted_where_they_begin():
    """The test's other pages have no head of this size."""
    pages = [
        write(72, y, "Pumps", 20) + f"1 0 0 1 0 {y - 720} cm\n" + table(True) for y in (600, 500)
    ]
    document = reads(*pages)
    assert len({(p.heading, p.header) for p in document.paragraphs}) == 1
    assert (document.letters_read, document.left_out) == (document.letters, {})


def test_cells_of_rows_of_several_widths():
    """A merged cell of the header, and cells nearer to each other than those of other rows."""
    rows = (("Region", 72), ("2023", 120), ("2024", 180)), (("Q1", 120), ("Q2", 145), ("Q1", 180))
    rows += ((("North", 72), ("1", 120), ("2", 145), ("3", 180)),)
    page = "".join(write(x, 700 - 18 * y, text) for y, row in enumerate(rows) for text, x in row)
    assert texts(reads(page)) == ["Region | 2023 | 2024", "Q1 | Q2 | Q1", "North | 1 | 2 | 3"]


def test_three_columns_whose_lines_stand_at_different_heights():
    columns = [[*(f"This is line {n} of column {c}" for n in range(5)), "It ends."] for c in "ABC"]
    page = "".join(
        write(40 + 180 * x, 700 - 13 * y - 4 * x, text)
        for x, lines in enumerate(columns)
        for y, text in enumerate(lines)
    )
    assert texts(reads(page)) == [" ".join(lines) for lines in columns]


def test_the_sign_of_an_item_is_no_heading():
    page = write(40, 500, "*", 14) + write(60, 500, "An item whose sign is larger than it")
    page += write(60, 487, "and that goes on.")
    assert texts(reads(page)) == ["* An item whose sign is larger than it and that goes on."]


def test_a_cell_of_two_lines_is_one_cell():
    page = "".join(write(72 + 120 * x, 700, cell) for x, cell in enumerate(("Lamp", "4 W")))
    page += write(72, 680, "Pump") + write(192, 680, "40 l/s in June") + write(192, 668, "and May")
    page += write(72, 640, "Text below the table, which no gap parts.")
    page += write(72, 750, "A row is no list:") + write(72, 730, "1.") + write(92, 730, "Water")
    page += write(72, 717, "2.") + write(92, 717, "Air")
    rows = [p.text for p in reads(page).paragraphs if p.is_row]
    assert rows == ["Lamp | 4 W", "Pump | 40 l/s in June and May"]


def test_running_heads_are_left_out_and_counted():
    """Pages of a handbook: its name in large letters above, a line with the page's number below."""
    said = ["The radiator is flushed.", "Its water is checked.", "The muffler is new."]
    pages = [
        write(72, 760, "Handbook of engines", 18)
        + write(72, 700, text)
        + write(72, 30, f"Rev. 7 - 2024 - page {number}", 9)
        for number, text in enumerate(said, start=1)
    ]
    document = reads(*pages)
    assert [(p.heading, p.text) for p in document.paragraphs] == [("", text) for text in said]
    heads = [f"Handbook of engines Rev. 7 - 2024 - page {n}" for n in (1, 2, 3)]
    assert document.left_out == {"running heads": sum(map(letters, heads))}


def test_watermarks_and_turned_pages():
    """What stands across each page is no text; a turned page has its head at the turned edge."""
    across = "q .7 .7 -.7 .7 200 200 cm " + write(0, 0, "DRAFT", 60) + "Q\n"
    head = write(72, 760, "Rules of the harbour") + write(500, 760, "{}")
    pages = [
        f"{across}q 0 1 -1 0 792 0 cm {head.format(n)}{write(72, 600, text)}Q\n"
        for n, text in ((7, "The first rule is short."), (8, "The second one is shorter."))
    ]
    document = reads(*pages)
    assert texts(document) == ["The first rule is short.", "The second one is shorter."]
    assert document.left_out == {"running heads": 2 * letters("DRAFT Rules of the harbour 7")}


def test_lines_that_differ_by_more_than_the_pages_number_are_text():
    """A list of prices, one a page: nothing of it runs, though every page looks alike."""
    prices = ["Berth 1: 340 euros", "Berth 2: 340 euros", "Berth 3: 410 euros"]
    assert texts(reads(*(write(72, 740, price) for price in prices))) == prices
    chapters = [
        write(72, 740, f"Chapter {n}", 20) + write(72, 600, f"This is what part {n} says.")
        for n in (1, 2, 3)
    ]
    assert [p.heading for p in reads(*chapters).paragraphs] == [
        "Chapter 1",
        "Chapter 2",
        "Chapter 3",
    ]


def test_a_foot_between_two_halves_of_a_sentence():
    first = write(72, 60, "The lock gate is moved by", 12) + write(72, 28, "Harbour rules 2024", 9)
    second = write(72, 770, "Chapter 2", 9) + write(72, 740, "two hydraulic rams of steel.", 12)
    assert texts(reads(first, second)) == [
        "The lock gate is moved by",
        "two hydraulic rams of steel.",
    ]


def test_hebrew_is_read_from_the_right():
    """The font's letters a, b, ... are alef, bet, ...; the page shows each line's last letter left."""
    words = ["abc", "de", "1907", "fgh"]
    right_columns = (500, 340), (500, 340)
    page = ""
    for row, columns in enumerate(right_columns):
        for column, edge in enumerate(columns):
            x = edge
            for word in [*words, "ijkl"[2 * row + column] * 3]:
                x -= 6 * len(word) + 5
                page += write(x, 700 - 16 * row, word if word.isdigit() else word[::-1], 10)
    hebrew = {chr(97 + n): chr(0x5D0 + n) for n in range(26)}
    document = read_pdf(pdf_of([(page, "")], unicode=hebrew), 64)
    said = " ".join(words).translate(str.maketrans(hebrew))
    ends = [3 * hebrew[letter] for letter in "ijkl"]
    rows = [f"{said} {ends[0]} | {said} {ends[1]}", f"{said} {ends[2]} | {said} {ends[3]}"]
    assert texts(document) == rows


def widget(kind: str, box: Sequence[int], rest: str) -> str:
    return f"<< /Type /Annot /Subtype {kind} /Rect [{' '.join(map(str, box))}] {rest} >>"


def test_forms_and_notes_are_read_where_they_stand():
    page = write(72, 704, "Vessel:") + write(72, 664, "Shore power:") + write(72, 624, "Crane:")
    page += write(72, 500, "The plan follows.")
    added = [
        widget("/Widget", (220, 700, 420, 716), "/FT /Tx /T (a) /V (Morning Heron)"),
        widget("/Widget", (220, 660, 236, 676), "/FT /Btn /T (b) /V /Yes /AS /Yes"),
        widget("/Widget", (220, 620, 236, 636), "/FT /Btn /T (c) /V /Off /AS /Off"),
        widget("/FreeText", (72, 560, 300, 590), "/Contents (The sluice opens at 5.20)"),
        widget("/Text", (72, 400, 90, 418), "/Contents (See the other plan.)"),
        widget("/Text", (72, 300, 90, 318), "/F 2 /Contents (Nobody sees it)"),
        widget("/Popup", (72, 300, 90, 318), "/Contents (See the other plan.)"),
    ]
    document = read_pdf(pdf_of([(page, "\n".join(added))], is_form=True), 64)
    assert texts(document) == [
        "Vessel: | Morning Heron",
        "Shore power: | ☑ checked",
        "Crane: | ☐",
        "The sluice opens at 5.20",
        "The plan follows.",
        "See the other plan.",
    ]
    assert document.missing == 0
    assert document.left_out == {"hidden notes": letters("Nobody sees it")}


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_places_are_where_pdfium_finds_the_words(rotation):
    """PDFium reads the text of a line again in its box alone."""
    data = pdf_of([(columns(True) + "1 0 0 1 0 -99 cm\n" + table(True), "")], rotation=rotation)
    boxes = []
    for paragraph in read_pdf(data, 64).paragraphs:
        assert paragraph.places[-1].end == len(paragraph.text)
        boxes += [(paragraph.text[p.start : p.end], p.box) for p in paragraph.places]
    assert len(boxes) == 6 + 6
    with pypdfium2.PdfDocument(data) as document:
        page = document[0]
        width, height = page.get_size()
        for text, (left, top, right, bottom) in boxes:
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            x, y = (left + right) / 2, (top + bottom) / 2
            unturned = {0: (x, 792 - y), 90: (y, x), 180: (612 - x, y), 270: (612 - y, 792 - x)}
            x, y = unturned[rotation]
            half = max(right - left, bottom - top) / 2
            read = page.get_textpage().get_text_bounded(x - half - 1, y - 5, x + half + 1, y + 5)
            assert read.strip() == text


PROSE = (
    "The pier is old. It was built in 1907 from gran-",
    "ite blocks. Ships brought them. It is closed, and all who come to see it stand at the",
    "gate and read the notice, which says that the keeper has the key and that he lives in",
    "the white house above the dunes, where he has kept the lamp and the log and the large",
    "brass bell of the first lightship for more than thirty years, and the flags and lines of",
    "all the pilots who came after it, whose names are cut into the wall beside the stairs so",
    "that their children find them there. He opens at noon. Ask him.",
)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("turn", ["1 0 0 1 0 0", "0 1 -1 0 800 0"])
def test_passages_that_part_lines_have_the_rectangles_of_their_letters(rotation, turn):
    """Also within a long sentence, and behind a broken word, which PDFium joins if unturned."""
    lines = "".join(write(72, 700 - 12 * y, line) for y, line in enumerate(PROSE))
    data = pdf_of([(f"q {turn} cm\n{lines}Q\n", "")], rotation=rotation)
    found = list(placed(data, ChunkOptions(words=10, overlap=0)))
    texts = [" ".join(p.text for p, _ in found), " ".join(PROSE)]
    assert len({text.replace("gran- ite", "granite") for text in texts}) == 1
    assert len(found) > 6
    assert [passage.text for passage, is_exact in found if not is_exact] == []


def test_letters_of_scripts_without_spaces_have_rectangles_too():
    chinese = {chr(97 + n): chr(0x4E00 + n) for n in range(25)} | {"z": "。"}
    lines = ["abcdefghz" + "ijklmnopqrstuvwxy" * 2, *["abcdefg" * 10] * 3]
    page = "".join(write(72, 700 - 12 * y, line) for y, line in enumerate(lines))
    found = list(placed(pdf_of([(page, "")], unicode=chinese), ChunkOptions(words=10, overlap=0)))
    assert len(found) > 6
    assert all(is_exact for _, is_exact in found)


def scan(*lines: str) -> bytes:
    """A page of text as a picture of 100 dots an inch."""
    picture = Image.new("RGB", (850, 1100), "white")
    drawn = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        drawn.text((100, 120 + 40 * number), line, fill="black", font=ImageFont.load_default(22))
    packed = io.BytesIO()
    picture.save(packed, "JPEG")
    return packed.getvalue()


STAMP = write(72, 30, "HARBOUR-0001 received 3 May", 9)


@pytest.mark.parametrize("over", ["", write(300, 30, "17"), STAMP])
def test_pages_that_are_pictures_are_counted(over, monkeypatch):
    monkeypatch.setattr(ocr, "is_installed", lambda: False)
    data = pdf_of([("q 612 0 0 792 0 0 cm /I Do Q\n" + over, "")], picture=scan("The crane"))
    document = read_pdf(data, 64)
    assert document.scanned_pages == (1,)
    assert document.figures == ()


def test_a_page_of_outlines_is_counted(monkeypatch):
    """Programs for drawing save letters as curves."""
    monkeypatch.setattr(ocr, "is_installed", lambda: False)
    frame = "10 10 592 772 re S\n"
    letters_drawn = "".join(f"{72 + 9 * n} 700 m {76 + 9 * n} 710 l S\n" for n in range(60))
    document = read_pdf(pdf_of([(frame, ""), (letters_drawn, "")]), 64)
    assert document.scanned_pages == (2,)


def test_a_figure_with_a_caption_is_no_scan():
    page = "q 612 0 0 700 0 92 cm /I Do Q\n" + write(72, 60, "Figure 3: The crane.")
    document = read_pdf(pdf_of([(page, "")], picture=scan("The crane")), 64)
    assert document.scanned_pages == ()
    assert [figure.caption for figure in document.figures] == ["Figure 3: The crane."]


def test_the_only_text_of_a_page_is_the_caption_of_its_picture():
    picture = "q 300 0 0 200 72 300 cm /I Do Q\n"
    pages = [
        write(72, 600, "The crane in 1907") + picture,
        write(72, 600, "Prose. " * 40) + picture,
    ]
    for page, caption in zip(pages, ("The crane in 1907", ""), strict=True):
        document = read_pdf(pdf_of([(page, "")], picture=scan("The crane")), 64)
        assert [figure.caption for figure in document.figures] == [caption]


def test_a_picture_that_is_placed_often_is_decoded_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "mmqa_jax.data.documents.pdf.check_pixels", lambda *picture: seen.append(picture)
    )
    page = "q 200 0 0 150 72 400 cm /I Do Q\n" * 40 + write(72, 700, "Text.")
    assert len(read_pdf(pdf_of([(page, "")] * 3, picture=scan("The crane")), 64).figures) == 1
    assert len(seen) == 1


def test_scans_are_read_with_a_box_for_each_word():
    lines = ("The crane is repaired every 17 weeks.", "Ask the harbour master.")
    data = pdf_of([("q 612 0 0 792 0 0 cm /I Do Q\n" + STAMP, "")], picture=scan(*lines))
    document = read_pdf(data, 64)
    assert document.scanned_pages == ()
    assert document.missing == 0
    read = [paragraph for paragraph in document.paragraphs if "HARBOUR" not in paragraph.text]
    assert " ".join(p.text for p in read) == " ".join(lines)
    words = {
        paragraph.text[place.start : place.end]: place.box
        for paragraph in read
        for place in paragraph.places
    }
    left, top, right, bottom = words["harbour"]
    height = 72 * 22 / 100  # of a line of the picture
    assert 72 <= left < right < 306
    assert abs((top + bottom) / 2 - 72 * (160 + 13) / 100) < height / 2
