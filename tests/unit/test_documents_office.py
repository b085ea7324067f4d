"""Office's documents: each piece of a file that a person sees is read, the others are counted."""

import dataclasses

import pytest
from document_files import picture
from office_files import (
    ALT,
    FIELD,
    LAYOUT,
    LOOK,
    OPEN_PIECES,
    PIECES,
    SHAPES,
    behind,
    book,
    cell,
    deck,
    line,
    opened,
    para,
    related,
    root,
    run,
    shape,
    slide,
    t,
    table,
    tc,
    tp,
    tr,
    v,
    word,
    zipped,
)

from mmqa_jax.data.documents.document import DocumentError
from mmqa_jax.data.documents.docx import read_docx
from mmqa_jax.data.documents.odf import read_odf
from mmqa_jax.data.documents.plain import read_delimited
from mmqa_jax.data.documents.pptx import read_pptx
from mmqa_jax.data.documents.xlsx import read_xlsx, shown_by
from tests.refusals import refuses


def is_balanced(document) -> bool:
    """Whether the letters that the file holds are those that were read and left out, to the letter."""
    more = dataclasses.replace(document, letters=document.letters + 1000)
    return (document.missing, more.missing) == (0, 1000)


def texts(document):
    assert is_balanced(document)
    return [paragraph.text for paragraph in document.paragraphs]


def lines_of(document):
    """The headers and texts, each once."""
    assert is_balanced(document)
    lines = (line for p in document.paragraphs for line in (p.header, p.text))
    return [line for line in dict.fromkeys(lines) if line]


def read_odt(data: bytes):
    return read_odf(data, ".odt")


def rows(document):
    return [(p.header, p.text) for p in document.paragraphs if p.is_row]


def figures(document):
    return [(f.caption, f.heading, f.picture) for f in document.figures]


# Word


@pytest.mark.parametrize("piece", PIECES)
def test_pieces_of_a_word_file(piece):
    body, expected = PIECES[piece]
    read = lines_of(read_docx(word(body + para(t("End.")))))
    assert [line for line in read if line != "| Herring"] == [*expected, "End."]


def test_all_pieces_of_one_word_file():
    document = read_docx(word("".join(para(t(name)) + body for name, (body, _) in PIECES.items())))
    read = {*lines_of(document), *(p.heading for p in document.paragraphs)}
    # The deleted end of a paragraph joins it to the next one, which is the same here.
    assert [name for name, (_, lines) in PIECES.items() if not read.issuperset(lines)] == []


NOTED = para(
    t("Fees")
    + '<w:r><w:footnoteReference w:id="2"/></w:r><w:r><w:endnoteReference w:id="3"/></w:r>'
    + '<w:r><w:commentReference w:id="4"/></w:r>'
    + t(" rise.")
) + para(t("End."))


def test_notes_headers_and_footers():
    comments = f'<w:comment w:id="4">{para(t("Check."))}</w:comment><w:comment w:id="5">{para(t("Lost."))}</w:comment>'
    document = read_docx(
        word(
            NOTED,
            footnotes=root("w:footnotes", f'<w:footnote w:id="2">{para(t("In 2024."))}</w:footnote>'),
            endnotes=root("w:endnotes", f'<w:endnote w:id="3">{para(t("By law."))}</w:endnote>'),
            comments=root("w:comments", comments),
            header=root("w:hdr", para(t("Harbour office"))),
            header2=root("w:hdr", para(t("Harbour office"))),
            footer=root("w:ftr", para(t("7"))),
        )
    )  # fmt: skip
    assert texts(document) == [
        "Harbour office", "Fees rise.", "In 2024.", "By law.", "Check.", "End.", "Lost.",
    ]  # fmt: skip
    assert document.left_out == {"page numbers": 1, "repeated headers and footers": 13}


@pytest.mark.parametrize(
    ("body", "cause", "count"),
    [
        (para(f"<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>{t('x')}"), "deleted text", 4),
        (f"<w:moveFrom>{para(t('gone'))}</w:moveFrom>", "deleted text", 4),
        (f"<w:tbl><w:tr><w:trPr><w:del/></w:trPr>{cell('gone')}</w:tr><w:tr>{cell('x')}</w:tr></w:tbl>", "deleted text", 4),
        (para("<w:r><w:rPr><w:vanish/></w:rPr><w:t>gone</w:t></w:r>"), "hidden text", 4),
        (para(FIELD % "begin" + t("gone") + FIELD % "separate" + t("x") + FIELD % "end"), "codes of fields", 4),
    ],
)  # fmt: skip
def test_what_word_does_not_show_is_counted(body, cause, count):
    document = read_docx(word(body + para(t("End."))))
    assert "gone" not in " ".join(texts(document))
    assert document.left_out == {cause: count}


def test_headings_and_captions_of_word():
    red, blue = (
        f'<w:r><w:drawing>{ALT}<a:blip r:embed="{part}"/></w:drawing></w:r>'
        for part in ("rId2", "rId6")
    )
    document = read_docx(
        word(
            para(t("Boats"), "berschrift1") + para(t("a"), "Loop") + para(t("Sails"), "Part") + para(t("b"))
            + para(t("Ropes"), "Own") + para(red) + para(t("Red boat"), "Cap") + para(blue) + para(red)
            + "<w:p><w:pPr><w:outlineLvl w:val='0'/></w:pPr>" + t("Oars") + "</w:p>" + para(t("c"))
        )
    )  # fmt: skip
    assert [(p.heading, p.text) for p in document.paragraphs] == [
        ("Boats", "a"), ("Boats > Sails", "b"), ("Ropes", "Red boat"), ("Oars", "c"),
    ]  # fmt: skip
    assert figures(document) == [
        ("Red boat", "Ropes", picture()), ("A red hull", "Ropes", picture("blue")),
    ]  # fmt: skip
    # The same picture again is none; of the first one, the caption stands for the alternative text.
    assert document.left_out == {"alternative texts": 16}
    assert is_balanced(document)


MERGED = '<w:vMerge w:val="restart"/>'
HEADED = cell("Berth") + cell("Fee") + cell("Draught")


@pytest.mark.parametrize(
    ("lines", "properties", "expected"),
    [
        ([HEADED, cell("B7") + cell("12") + cell("4 m")], "", [("Berth | Fee | Draught", "B7 | 12 | 4 m")]),
        # Merged downwards: in each row that it covers; without a cell above it, a cell of its own.
        (
            [HEADED, cell("North", MERGED) + cell("1") + cell("2"), cell("", "<w:vMerge/>") + cell("3") + cell("4")],
            "",
            [("Berth | Fee | Draught", "North | 1 | 2"), ("Berth | Fee | Draught", "North | 3 | 4")],
        ),
        ([cell("a", MERGED) + cell("b"), cell("", "<w:vMerge/>") + cell("c")], "", [("", "a | b"), ("", "a | c")]),
        ([cell("a", "<w:vMerge/>") + cell("1"), cell("b") + cell("2")], "", [("", "a | 1"), ("", "b | 2")]),
        # Merged to the right, beyond all bounds too, and a row that begins in the second column.
        (
            [cell("Wide", '<w:gridSpan w:val="2000000000"/>') + cell("x"), cell("a") + cell("1")],
            LOOK,
            [("", "Wide | | x"), ("", "a | 1")],
        ),
        # Empty cells keep their place; figures are no header, nor is what Word says is none.
        ([HEADED, cell("B7") + cell("") + cell("4 m")], "", [("Berth | Fee | Draught", "B7 | | 4 m")]),
        ([cell("1") + cell("2"), cell("3") + cell("4")], "", [("", "1 | 2"), ("", "3 | 4")]),
        ([HEADED, HEADED], LOOK, [("", "Berth | Fee | Draught"), ("", "Berth | Fee | Draught")]),
        (
            ["<w:trPr><w:tblHeader/></w:trPr>" + cell("1") + cell("2")] * 2 + [cell("3") + cell("4")],
            "",
            [("1 | 2; 1 | 2", "3 | 4")],
        ),
    ],
)  # fmt: skip
def test_tables_of_word(lines, properties, expected):
    assert rows(read_docx(word(table(*lines, properties=properties)))) == expected


def test_merged_rows_are_read_in_linear_time():
    merged = cell("Group", MERGED) + cell("p"), cell("", "<w:vMerge/>") + cell("p")
    document = read_docx(word(table(merged[0], *[merged[1]] * 2_000)))
    assert [text for _, text in rows(document)] == ["Group | p"] * 2_001


# PowerPoint


@pytest.mark.parametrize("piece", SHAPES)
def test_shapes_of_slides(piece):
    drawn, expected = SHAPES[piece]
    assert lines_of(read_pptx(deck(slide(drawn, shape(run("End.")))))) == [*expected, "End."]


def test_slides_of_a_presentation():
    pic = '<p:pic><p:nvPicPr><p:cNvPr id="3" name="" descr="A red hull"/></p:nvPicPr><a:blip r:embed="rId2"/></p:pic>'
    notes = root("p:notes", shape(run("Speak slowly."), "body") + shape(run("3"), "sldNum"))
    comments = root("p:cmLst", "<p:cm><p:text>Check the fee.</p:text></p:cm>")
    second = shape(run("Body")), shape(run("Fees"), "ctrTitle"), pic, shape(run("ACME"), "ftr")
    document = read_pptx(
        deck(
            slide(shape(run("No title here"))), slide(*second),
            slide(shape(run("Secret")), more='show="0"'),
            more=(("notesSlide", "../notes.xml"), ("comments", "../comments.xml")),
            notes=notes, comments=comments,
        )
    )  # fmt: skip
    beside = ["Speak slowly.", "Check the fee."]
    assert [(p.page, p.places[0].name, p.heading, p.text) for p in document.paragraphs] == [
        (2, "slide 2", "Fees", "Body"),
        *((2, "slide 2", "Fees", text) for text in beside),
        (3, "slide 3", "", "No title here"),
        *((3, "slide 3", "", text) for text in beside),
    ]
    assert figures(document) == [("A red hull", "Fees", picture())]
    assert document.figures[0].page == 2
    assert document.left_out == {"hidden slides": 6, "footers and numbers of slides": 6}


@pytest.mark.parametrize(
    ("of_slides", "of_layout", "expected", "edges"),
    [
        ("", "", ["Body", "Draft", "For members only", "More"], 4 + 2),
        ("", 'showMasterSp="0"', ["Body", "Draft", "More"], 4),
        ('showMasterSp="0"', "", ["Body", "More"], 0),
    ],
)
def test_what_masters_show_is_read_once(of_slides, of_layout, expected, edges):
    number = "<a:fld type='slidenum'><a:t>12</a:t></a:fld>"
    layout = shape(run("Draft")) + shape(run("Click here"), "title") + shape(run("ACME"), "ftr")
    logo = "<p:pic><p:nvPicPr><p:cNvPr id='3' name='' descr='Logo'/></p:nvPicPr></p:pic>"
    master = shape(run("For members only")) + shape(number) + logo
    slides = [slide(shape(run(text)), more=of_slides) for text in ("More", "Body")]
    document = read_pptx(deck(*slides, more=(LAYOUT,), **behind(layout, master, of_layout)))
    assert texts(document) == expected
    assert {p.page for p in document.paragraphs if p.text in ("Draft", "For members only")} <= {1}
    counts = {"prompts of placeholders": 9, "footers and numbers of slides": edges}
    assert document.left_out == (counts if edges else {})


# Excel


def places_and_texts(document):
    return [(p.places[0].name, p.header, p.text) for p in document.paragraphs]


def test_sheets_of_a_workbook():
    document = read_xlsx(
        book(
            line(1, "Harbour fees")
            + line(2, v("0", 't="s"'), v("1", 't="s"'), "Share", "Open")
            + line(3, "North", v("12.5"), v("0.25", 's="1"'), v("1", 't="b"'))
            + line(4, ("", ""), v("7"), v("#N/A", 't="e"'), ("<x:f>NOW()</x:f>", ""))
            + line(5, "away", more='hidden="1"')
            + line(9, "Alone", v("45356", 's="2"')),
            sheets=line(1, "Secret"),
            more='<x:cols><x:col min="6" max="16384" hidden="1"/></x:cols>',
            after='<x:mergeCells><x:mergeCell ref="A3:A4"/><x:mergeCell ref="B9:B1048576"/></x:mergeCells>',
            styles='<x:numFmts><x:numFmt numFmtId="164" formatCode="d. mmmm yyyy"/></x:numFmts>',
            comments=root("x:comments", '<x:comment ref="B3"><x:text><x:t>Too low</x:t></x:text></x:comment>'
                          '<x:comment ref="Z50"><x:text><x:t>[Threaded comment] old</x:t></x:text></x:comment>'),
            threadedComment=root("x:ThreadedComments", '<x:threadedComment ref="Z50"><x:text>Far off</x:text></x:threadedComment>'),
            drawing=root("xdr:wsDr", f"<xdr:oneCellAnchor><xdr:sp>{'<xdr:txBody><a:p>' + run('Boxed') + '</a:p></xdr:txBody>'}</xdr:sp></xdr:oneCellAnchor>"),
        )
    )  # fmt: skip
    header = "Berth | Fee | Share | Open"
    places = [(p.places[0].name if p.places else "", p.header, p.text) for p in document.paragraphs]
    assert places == [
        ("'Fees 24'!A1", "", "Harbour fees"),
        ("'Fees 24'!A3:D3", header, "North | 12.5 | 25% | TRUE"),
        ("'Fees 24'!B3", "", "Too low"),
        ("'Fees 24'!A4:C4", header, "North | 7 | #N/A"),
        ("'Fees 24'!A9:B9", "", "Alone | 5. March 2024"),
        ("'Fees 24'!Z50", "", "Far off"),
        ("", "", "Boxed"),
    ]
    assert {p.heading for p in document.paragraphs} == {"Fees 24"}
    hidden = {"hidden rows": 4, "hidden sheets": 6}
    assert document.left_out == {**hidden, "formulas without a value": 3}
    assert is_balanced(document)


def test_hidden_columns_and_cells_without_names():
    nameless = "<x:row><x:c t='str'><x:v>a</x:v></x:c><x:c t='str'><x:v>gone</x:v></x:c><x:c><x:v>3</x:v></x:c></x:row>"
    hidden = '<x:cols><x:col min="2" max="2" hidden="1"/></x:cols>'
    document = read_xlsx(book(nameless, more=hidden))
    assert places_and_texts(document) == [("'Fees 24'!A1:C1", "", "a | 3")]
    assert document.left_out == {"hidden columns": 4}


def test_cells_far_apart_cost_nothing():
    far = line(1, "a") + '<x:row r="1048576"><x:c r="XFD1048576" t="str"><x:v>b</x:v></x:c></x:row>'
    last = ("'Fees 24'!XFD1048576", "", "b")
    assert places_and_texts(read_xlsx(book(far))) == [("'Fees 24'!A1", "", "a"), last]


@pytest.mark.parametrize(
    ("value", "code", "shown"),
    [
        # What LibreOffice 7.4 writes of such cells as CSV (as shown), and Excel shows.
        ("45356.573", "d-mmm-yy", "5-Mar-24"),
        ("45356.573", "dddd, d mmmm yyyy", "Tuesday, 5 March 2024"),
        ("45356.573", "yyyy-mm-dd hh:mm:ss", "2024-03-05 13:45:07"),
        ("45356.573", "dd.mm.yyyy", "05.03.2024"),
        ("45356.573", "h:mm AM/PM", "1:45 PM"),
        ("45356.573", 'yyyy"年"m"月"d"日"', "2024年3月5日"),
        ("12.5", "[h]:mm:ss", "300:00:00"),
        ("0.573", "mm:ss", "45:07"),
        ("0.25", "0.00%", "25.00%"),
        ("1234.567", "#,##0", "1,235"),
        ("-1234567.891", "#,##0.00;(#,##0.00)", "(1,234,567.89)"),
        ("-1234567.891", '"$"#,##0.00', "-$1,234,567.89"),
        ("1234.567", "#,##0.00 [$€-407]", "1,234.57 €"),
        ("0", '0;-0;"zero";@', "zero"),
        ("123456789012", '0.0,,"M"', "123456.8M"),
        ("1234.567", "00000", "01235"),
        ("12.5", "000-00-0000", "000-00-0013"),
        ("-1", '[>=100]"big";[<0]"neg";0.0', "neg"),
        ("12.5", '[>=100]"big";[<0]"neg";0.0', "12.5"),
        ("1234.567", "0.00E+00", "1.23E+03"),
        ("5", "#.##", "5"),
        ("1234.567", "\\a0", "a1235"),
        ("-0.2", "0", "0"),
        ("0.30000000000000004", "General", "0.3"),
        ("0.125", "0.00", "0.13"),
        # Excel alone has a day before 1 January 1900 and takes that year for a leap year.
        ("1", "yyyy-mm-dd", "1900-01-01"),
        ("61", "yyyy-mm-dd", "1900-03-01"),
        # What no format can show is shown as it is.
        ("-1", "yyyy-mm-dd", "-1"),
        ("1e308", "0%%%%", "1E+308"),
        ("inf", "0.0", "INF"),
        ("word", "0.0", "word"),
        ("2.5", "0" * 300, "2.5"),
        ("1234.5", "# ?/?", "1234.5"),
    ],
)
def test_figures_are_shown_by_their_formats(value, code, shown):
    assert " ".join(shown_by(value, code).split()) == shown


def test_days_from_1904():
    styles = '<x:numFmts><x:numFmt numFmtId="164" formatCode="yyyy-mm-dd"/></x:numFmts>'
    data = book(line(1, v("0", 's="2"')), styles=styles, about='<x:workbookPr date1904="1"/>')
    assert texts(read_xlsx(data)) == ["1904-01-01"]


# OpenDocument


@pytest.mark.parametrize("piece", OPEN_PIECES)
def test_pieces_of_an_odt(piece):
    content, expected = OPEN_PIECES[piece]
    document = read_odt(opened("text", content + tp("End.")))
    assert lines_of(document) == [*expected, "End."]


def test_headings_edges_and_what_an_odt_does_not_show():
    page = f"<o:master-styles><style:master-page><style:header>{tp('Office')}</style:header><style:footer>{tp('7')}</style:footer></style:master-page></o:master-styles>"
    figure = "<draw:frame><draw:image xlink:href='Pictures/a.png'/><svg:desc>A red hull</svg:desc></draw:frame>"
    document = read_odf(
        opened(
            "text",
            f"<text:tracked-changes><text:deletion>{tp('gone')}</text:deletion></text:tracked-changes>"
            '<text:p text:style-name="P1">Boats</text:p><text:h text:outline-level="2">Sails</text:h>'
            + tp("a" + figure) + f'<text:section text:display="none">{tp("hidden")}</text:section>'
            + tp('b<text:span text:style-name="Off">away</text:span>'),
            styles=root("o:document-styles", page),
            meta=root("o:document-meta", "<o:meta><dc:title>Boats of old</dc:title></o:meta>"),
        ),
        ".odt",
    )  # fmt: skip
    assert [(p.heading, p.text) for p in document.paragraphs] == [
        ("", "Office"),
        ("Boats > Sails", "a"),
        ("Boats > Sails", "b"),
    ]
    assert figures(document) == [("A red hull", "Boats > Sails", picture())]
    assert document.title == "Boats of old"
    hidden = {"deleted text": 4, "hidden sections": 6, "hidden text": 4}
    assert document.left_out == {**hidden, "page numbers": 1}
    assert is_balanced(document)


def test_sheets_of_an_ods():
    repeated = '<table:table-cell table:number-columns-repeated="16384"/>'
    empty = tr(repeated, more='table:number-rows-repeated="1048000"')
    noted = f"<table:table-cell>{tp('yes')}<o:annotation>{tp('Sure?')}</o:annotation></table:table-cell>"
    fees = (
        '<table:table-column table:number-columns-repeated="3"/><table:table-column table:visibility="collapse"/>'
        + tr(tc("Berth"), tc("Fee"), tc("Open"))
        + tr(tc("North"), tc("12,50 €"), noted, tc("gone"))
        + tr(tc("away"), more='table:visibility="filter"')
        + empty
        + tr(tc("far", 'table:number-columns-repeated="2000000000"'))
    )
    sheets = f'<table:table table:name="Fees">{fees}</table:table><table:table table:name="Back" table:style-name="Off">{tr(tc("secret"))}</table:table>'
    document = read_odf(opened("spreadsheet", sheets), ".ods")
    header = "Berth | Fee | Open"
    assert places_and_texts(document)[:2] == [
        ("Fees!A2:C2", header, "North | 12,50 € | yes"), ("Fees!C2", "", "Sure?"),
    ]  # fmt: skip
    last = document.paragraphs[-1]
    assert last.places[0].name.startswith("Fees!A1048004:")
    assert last.text.startswith("far | far")
    assert len(last.text) < 3_000
    assert document.left_out == {"hidden columns": 4, "hidden rows": 4, "hidden sheets": 6}


def test_slides_of_an_odp():
    title = f'<draw:frame presentation:class="title"><draw:text-box>{tp("Fees")}</draw:text-box></draw:frame>'
    edge = f'<draw:frame presentation:class="footer"><draw:text-box>{tp("ACME")}</draw:text-box></draw:frame>'
    shown = f"<draw:page>{tp('First')}</draw:page><draw:page>{tp('Body')}{title}{edge}<presentation:notes>{tp('Slowly')}</presentation:notes></draw:page>"
    hidden = f'<draw:page draw:style-name="Off">{tp("secret")}</draw:page>'
    document = read_odf(opened("presentation", shown + hidden), ".odp")
    assert [(p.page, p.places[0].name, p.heading, p.text) for p in document.paragraphs] == [
        (1, "slide 1", "", "First"), (2, "slide 2", "Fees", "Body"), (2, "slide 2", "Fees", "Slowly"),
    ]  # fmt: skip
    assert document.left_out == {"footers and numbers of slides": 4, "hidden slides": 6}


# Values divided by commas and others

BERTHS = [
    ("A2:C2", "Berth | Fee | Note", "North | 1,5 | x"),
    ("A3:C3", "Berth | Fee | Note", "South | 2 | é"),
]


@pytest.mark.parametrize(
    ("data", "delimiter", "expected"),
    [
        ("Berth;Fee;Note\nNorth;1,5;x\nSouth;2;é\n", "", BERTHS),
        ('Berth,Fee,Note\r\nNorth,"1,5",x\r\nSouth,2,é', "", BERTHS),
        ("Berth\tFee\tNote\nNorth\t1,5\tx\nSouth\t2\té\n", "", BERTHS),
        ("Berth|Fee|Note\nNorth|1,5|x\nSouth|2|é\n", "\t", [("A1", "", "Berth|Fee|Note"), ("A2", "", "North|1,5|x"), ("A3", "", "South|2|é")]),
        ("Berth|Fee|Note\nNorth|1,5|x\nSouth|2|é\n", "", BERTHS),
        # Excel's own line names the delimiter; a title, an empty line and another table.
        ("sep=,\nx;y,z\n", "", [("A2:B2", "", "x;y | z")]),
        ("Fees\na,b\nc,d\n\n1,2\n", "", [("A1", "", "Fees"), ("A3:B3", "a | b", "c | d"), ("A5:B5", "", "1 | 2")]),
        # A value of two lines.
        ('a,b\n1,"x\ny"\n', "", [("A2:B2", "a | b", "1 | x y")]),
    ],
)  # fmt: skip
def test_tables_as_text(data, delimiter, expected):
    document = read_delimited(data.encode(), delimiter)
    assert places_and_texts(document) == expected
    assert is_balanced(document)


def test_a_quotation_mark_without_its_pair_is_a_letter():
    document = read_delimited(('a,b\n1,"x\n' + "y,zzzzzzzzzzzzzz\n" * 9_000).encode())
    assert len(document.paragraphs) == 9_001
    assert places_and_texts(document)[0] == ("A2:B2", "a | b", '1 | "x')


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_of_tables(encoding):
    data = "Berth;Fee;Note\nNorth;1,5;x\nSouth;2;é\n".encode(encoding)
    assert places_and_texts(read_delimited(data)) == BERTHS


NAMED = related(("officeDocument", "a.xml"))
ENTITIES = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><a>&c;</a>'
SPACES = root("w:document", "<w:body>" + " " * (3 * 2**23) + "</w:body>")
LONG = table(cell("x" * 900, MERGED) + cell("1"), *[cell("", "<w:vMerge/>") + cell("2")] * 20)
SHARED = "".join(line(number, v("1", 't="s"')) for number in range(1, 5001))
AREAS = "<x:mergeCells>" + "<x:mergeCell ref='A1:A90'/>" * 30 + "</x:mergeCells>"
NUMBERS = "".join(line(number, v("1")) for number in range(1, 91))


# The reader, its limits that are lowered, the file, and why it is not read.
@pytest.mark.parametrize(
    ("read", "limits", "data", "reason"),
    [
        (read_docx, {}, word("<w:p>"), r"no \.docx that can be read \(XMLSyntaxError: Opening and ending tag"),
        (read_docx, {}, zipped({"_rels/.rels": NAMED}), "it names no document"),
        (read_docx, {}, zipped({"_rels/.rels": NAMED, "a.xml": "<a/>"}), "it has no body"),
        (read_docx, {}, word("<w:txbxContent>" * 9_000 + "</w:txbxContent>" * 9_000), "too deep|depth"),
        (read_docx, {}, zipped({"_rels/.rels": NAMED, "a.xml": ENTITIES}), "a.xml declares entities"),
        # XML counts whatever its name ends with.
        (read_docx, {}, zipped({"_rels/.rels": related(("officeDocument", "word/document.bin")), "word/document.bin": SPACES}), r"unpacks to 25,\d+,\d+ bytes of text"),
        (read_docx, {"office.MOST_REPEATED": 10_000}, word(LONG), "its merged cells repeat more than 10,000 characters; split it"),
        (read_docx, {"office.MOST_TEXT": 10_000}, word(para(t("x" * 900)) * 20), "more than 10,000 characters; split it"),
        (read_xlsx, {"xlsx.MOST_TEXT": 10_000}, book(SHARED), "more than 10,000 characters; split it"),
        (read_xlsx, {"xlsx.MOST_CELLS": 1_000}, book(NUMBERS, after=AREAS), "more than 1,000 cells; split it"),
        (read_xlsx, {"xlsx.MOST_CELLS": 3}, book(line(1, "a", "b") + line(2, "c", "d")), "more than 3 cells; split it"),
        (read_xlsx, {}, book("").replace(b"xl/a.xml", b"xl/c.xml"), "sheet 'Fees 24' is not in the file"),
        (read_odt, {}, zipped({"a.xml": "<a/>"}), r"no \.odt: it holds no content.xml"),
        (read_odt, {}, zipped({"content.xml": "<a/>"}), "it has no body"),
        (read_odt, {}, zipped({"content.xml": "<a>"}), r"no \.odt that can be read"),
        (read_odt, {}, zipped({"content.xml": "<a/>", "META-INF/manifest.xml": "<m:encryption-data/>"}), "encrypted"),
        (read_odt, {}, opened("text", "<text:list>" * 3_000 + "</text:list>" * 3_000), "too deep|depth"),
        (read_delimited, {"plain.MOST_CELLS": 3}, b"a,b\nc,d\n", "more than 3 cells; split it"),
        (read_delimited, {}, "Straße;Fee\n".encode("cp1252"), "not UTF-8 text .* save the file as UTF-8"),
        (read_delimited, {}, b"\xff\xfea", "its UTF-16 is damaged"),
        (read_delimited, {}, b"x" * 200_000, "no table of values that can be read .*field larger"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(read, limits, data, reason, monkeypatch):
    for limit, value in limits.items():
        monkeypatch.setattr(f"mmqa_jax.data.documents.{limit}", value)
    refuses(reason, read, data, error=DocumentError)
