"""Office's documents: each piece of a file that a person sees is read, the others are counted."""

from __future__ import annotations

import dataclasses
import io
import zipfile

import pytest
from document_files import picture

from mmqa_jax.data.documents.delimited import read_delimited
from mmqa_jax.data.documents.document import DocumentError
from mmqa_jax.data.documents.docx import read_docx
from mmqa_jax.data.documents.odf import read_odf
from mmqa_jax.data.documents.pptx import read_pptx
from mmqa_jax.data.documents.xlsx import read_xlsx, shown_by

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006"
NAMESPACES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "r": OFFICE,
    "a": f"{DRAWING}/main",
    "c": f"{DRAWING}/chart",
    "dgm": f"{DRAWING}/diagram",
    "pic": f"{DRAWING}/picture",
    "wp": f"{DRAWING}/wordprocessingDrawing",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "v": "urn:schemas-microsoft-com:vml",
    "p": "http://schemas.openxmlformats.org/presentationml/2006/main",
    "x": "http://schemas.openxmlformats.org/spreadsheetml/2006/main",
    "xdr": f"{DRAWING}/spreadsheetDrawing",
    **{
        prefix: f"urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"
        for prefix, name in (
            ("o", "office"),
            ("text", "text"),
            ("table", "table"),
            ("draw", "drawing"),
            ("svg", "svg-compatible"),
            ("style", "style"),
            ("presentation", "presentation"),
        )
    },
    "dc": "http://purl.org/dc/elements/1.1/",
    "xlink": "http://www.w3.org/1999/xlink",
}
DECLARED = " ".join(f'xmlns:{prefix}="{name}"' for prefix, name in NAMESPACES.items())


def root(name: str, content: str, more: str = "") -> str:
    """The XML of a part, its root element by name."""
    return f"<{name} {DECLARED} {more}>{content}</{name}>"


def related(*targets: tuple[str, str]) -> str:
    """Relationships rId1, rId2, ... of (type, target)."""
    lines = "".join(
        f'<Relationship Id="rId{number}" Type="{OFFICE}/{kind}" Target="{target}"/>'
        for number, (kind, target) in enumerate(targets, start=1)
    )
    name = "http://schemas.openxmlformats.org/package/2006/relationships"
    return f'<Relationships xmlns="{name}">{lines}</Relationships>'


def zipped(parts: dict[str, str | bytes]) -> bytes:
    """A file of Office of these parts."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return packed.getvalue()


def is_balanced(document) -> bool:
    """Whether the letters that the file holds are those that were read and left out, to the letter."""
    more = dataclasses.replace(document, letters=document.letters + 1000)
    return (document.missing, more.missing) == (0, 1000)


def texts(document):
    return [paragraph.text for paragraph in document.paragraphs]


def rows(document):
    return [(p.header, p.text) for p in document.paragraphs if p.is_row]


# Word

STYLES = root(
    "w:styles",
    '<w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    '<w:style w:styleId="Own"><w:name w:val="My own"/><w:basedOn w:val="berschrift1"/></w:style>'
    '<w:style w:styleId="Part"><w:name w:val="Part"/><w:pPr><w:outlineLvl w:val="1"/></w:pPr></w:style>'
    '<w:style w:styleId="Cap"><w:name w:val="caption"/></w:style>'
    '<w:style w:styleId="Loop"><w:name w:val="Loop"/><w:basedOn w:val="Loop"/></w:style>',
)
CHART = root(
    "c:chartSpace",
    "<c:chart><c:title><a:p><a:r><a:t>Catches</a:t></a:r></a:p></c:title><c:ser><c:tx><c:strCache>"
    '<c:pt idx="0"><c:v>Herring</c:v></c:pt></c:strCache></c:tx><c:cat><c:strCache><c:pt idx="0">'
    '<c:v>May</c:v></c:pt><c:pt idx="1"><c:v>June</c:v></c:pt></c:strCache></c:cat><c:val><c:numCache>'
    '<c:pt idx="0"><c:v>4.2999999999999998</c:v></c:pt><c:pt idx="1"><c:v>7</c:v></c:pt>'
    "</c:numCache></c:val></c:ser></c:chart>",
)
DIAGRAM = root(
    "dgm:dataModel",
    "<dgm:ptLst><dgm:pt><dgm:t><a:p><a:r><a:t>Moor the boat</a:t></a:r></a:p></dgm:t></dgm:pt></dgm:ptLst>",
)


def word(body: str, **parts: str) -> bytes:
    """A document of this body, with notes, headers and drawings as they are given."""
    return zipped({
        "_rels/.rels": related(("officeDocument", "word/document.xml")),
        "word/document.xml": root("w:document", f"<w:body>{body}</w:body>"),
        "word/_rels/document.xml.rels": related(
            ("styles", "styles.xml"), ("image", "media/a.png"), ("chart", "charts/c.xml"),
            ("diagramData", "diagrams/d.xml"), ("aFChunk", "page.html"),
            *((kind, f"{kind}.xml") for kind in parts),
        ),
        "word/styles.xml": STYLES,
        "word/media/a.png": picture(),
        "word/charts/c.xml": CHART,
        "word/diagrams/d.xml": DIAGRAM,
        "word/page.html": "<h2>Old</h2><p>From the old page.</p>",
        **{f"word/{kind}.xml": content for kind, content in parts.items()},
    })  # fmt: skip


def t(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def para(inner: str, style: str = "") -> str:
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{properties}{inner}</w:p>"


def cell(inner: str, properties: str = "") -> str:
    return (
        f"<w:tc><w:tcPr>{properties}</w:tcPr>{inner if '<w:p>' in inner else para(t(inner))}</w:tc>"
    )


def table(*lines: str, properties: str = "") -> str:
    return f"<w:tbl><w:tblPr>{properties}</w:tblPr>{''.join(f'<w:tr>{line}</w:tr>' for line in lines)}</w:tbl>"


LOOK = '<w:tblLook w:firstRow="0"/>'
BOX = f"<w:txbxContent>{para(t('Boxed'))}</w:txbxContent>"
FIELD = '<w:r><w:fldChar w:fldCharType="%s"/></w:r>'
ALT = '<wp:docPr id="1" name="P" descr="A red hull"/>'
PIECES = {
    "run": (para(t("Plain")), ["Plain"]),
    "tab, break, hyphen": (
        para("<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t><w:noBreakHyphen/><w:t>d</w:t></w:r>"),
        ["a b c-d"],
    ),
    "tracked insertion": (para(t("a ") + f"<w:ins>{t('new')}</w:ins>"), ["a new"]),
    "moved text": (para(f"<w:moveFrom>{t('M')}</w:moveFrom>") + para(f"<w:moveTo>{t('M')}</w:moveTo>"), ["M"]),
    "inserted block": (f"<w:ins>{para(t('Block'))}</w:ins>", ["Block"]),
    "deleted end of a paragraph": (
        f"<w:p><w:pPr><w:rPr><w:del/></w:rPr></w:pPr>{t('One ')}</w:p>" + para(t("line")),
        ["One line"],
    ),
    "content control of a run": (para(f"<w:sdt><w:sdtPr/><w:sdtContent>{t('Control')}</w:sdtContent></w:sdt>"), ["Control"]),
    "content control of a block": (f"<w:sdt><w:sdtContent>{para(t('Block'))}</w:sdtContent></w:sdt>", ["Block"]),
    "content control of a cell": (
        table(f"{cell('x')}<w:sdt><w:sdtContent>{cell('y')}</w:sdtContent></w:sdt>", cell("z")),
        ["x | y", "z"],
    ),
    "content control of a row": (
        "<w:tbl><w:sdt><w:sdtContent><w:tr>" + cell("x") + cell("y") + "</w:tr></w:sdtContent></w:sdt></w:tbl>",
        ["x | y"],
    ),
    "custom XML, smart tag": (para(f"<w:customXml><w:smartTag>{t('Tagged')}</w:smartTag></w:customXml>"), ["Tagged"]),
    "hyperlink": (para(f"<w:hyperlink>{t('Linked')}</w:hyperlink>"), ["Linked"]),
    "simple field": (para(f'<w:fldSimple w:instr="DATE">{t("5 May")}</w:fldSimple>'), ["5 May"]),
    "complex field": (
        para(FIELD % "begin" + "<w:r><w:instrText>REF x</w:instrText></w:r>" + t("code") + FIELD % "separate" + t("Result") + FIELD % "end"),
        ["Result"],
    ),
    "damaged field": (para(FIELD % "begin" + FIELD % "begin") + para(t("goes on")), ["goes on"]),
    "list of a form": (
        para('<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="Cod"/>'
             '<w:listEntry w:val="Eel"/></w:ddList></w:ffData></w:fldChar></w:r>' + FIELD % "end"),
        ["Eel"],
    ),
    "formula": (para(t("p is ") + "<m:oMath><m:r><m:t>ρgh</m:t></m:r></m:oMath>"), ["p is ρgh"]),
    "display formula": (para("<m:oMathPara><m:oMath><m:f><m:num><m:r><m:t>a</m:t></m:r></m:num></m:f></m:oMath></m:oMathPara>"), ["a"]),
    "ruby": (para("<w:r><w:ruby><w:rt>" + t("かん") + "</w:rt><w:rubyBase>" + t("漢") + "</w:rubyBase></w:ruby></w:r>"), ["(かん)漢"]),
    "text box": (para(t("Anchor") + f"<w:r><w:drawing><wps:txbx>{BOX}</wps:txbx></w:drawing></w:r>"), ["Anchor", "Boxed"]),
    "old text box": (para(f"<w:r><w:pict><v:shape><v:textbox>{BOX}</v:textbox></v:shape></w:pict></w:r>"), ["Boxed"]),
    "letters as a drawing": (para('<w:r><w:pict><v:shape><v:textpath string="Draft"/></v:shape></w:pict></w:r>'), ["Draft"]),
    "alternate content once": (
        para(f"<mc:AlternateContent><mc:Choice><w:r><w:drawing><wps:txbx>{BOX}</wps:txbx></w:drawing></w:r></mc:Choice>"
             f"<mc:Fallback><w:r><w:pict><v:textbox>{BOX}</v:textbox></w:pict></w:r></mc:Fallback></mc:AlternateContent>"),
        ["Boxed"],
    ),
    "nested table": (
        table(cell("Pump") + cell(para(t("Parts")) + table(cell("Seal") + cell("9"), cell("Rod") + cell("2"))), cell("Fan") + cell("None"),
              properties=LOOK),
        ["Pump | Parts", "Seal | 9", "Rod | 2", "Fan | None"],
    ),
    "table around text": (table(cell(para(t("Framed")) + para(t("text")))), ["Framed", "text"]),
    "chart": (para('<w:r><w:drawing><c:chart r:id="rId3"/></w:drawing></w:r>'), ["Catches", "May | 4.3", "June | 7"]),
    "SmartArt": (para('<w:r><w:drawing><dgm:relIds r:dm="rId4"/></w:drawing></w:r>'), ["Moor the boat"]),
    "alternative text of what is no picture": (para(f"<w:r><w:drawing>{ALT}</w:drawing></w:r>"), ["A red hull"]),
    "page that is taken in": ('<w:altChunk r:id="rId5"/>', ["From the old page."]),
    "heading with nothing below it": (para(t("Alone"), "berschrift1") + para(t("Next"), "berschrift1") + para(t("x")), ["Alone", "x"]),
    "deep content controls": ("<w:sdt><w:sdtContent>" * 100 + para(t("Deep")) + "</w:sdtContent></w:sdt>" * 100, ["Deep"]),
}  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_pieces_of_a_word_file(piece):
    body, expected = PIECES[piece]
    document = read_docx(word(body + para(t("End."))))
    read = [line for p in document.paragraphs for line in (p.header, p.text) if line]
    assert [line for line in dict.fromkeys(read) if line != "| Herring"] == [*expected, "End."]
    assert is_balanced(document)


def test_all_pieces_of_one_word_file():
    document = read_docx(
        word("".join(para(t(piece)) + body for piece, (body, _) in PIECES.items()))
    )
    read = {line for p in document.paragraphs for line in (p.header, p.text, p.heading)}
    missing = [piece for piece, (_, lines) in PIECES.items() if not read.issuperset(lines)]
    # The deleted end of a paragraph joins it to the next one, which is the same here.
    assert missing == []
    assert is_balanced(document)


NOTED = para(
    t("Fees")
    + '<w:r><w:footnoteReference w:id="2"/></w:r><w:r><w:endnoteReference w:id="3"/></w:r>'
    + '<w:r><w:commentReference w:id="4"/></w:r>'
    + t(" rise.")
) + para(t("End."))


def test_notes_headers_and_footers():
    document = read_docx(
        word(
            NOTED,
            footnotes=root(
                "w:footnotes", f'<w:footnote w:id="2">{para(t("In 2024."))}</w:footnote>'
            ),
            endnotes=root("w:endnotes", f'<w:endnote w:id="3">{para(t("By law."))}</w:endnote>'),
            comments=root(
                "w:comments",
                f'<w:comment w:id="4">{para(t("Check."))}</w:comment><w:comment w:id="5">{para(t("Lost."))}</w:comment>',
            ),
            header=root("w:hdr", para(t("Harbour office"))),
            footer=root("w:ftr", para(t("7"))),
        )
    )
    assert texts(document) == [
        "Harbour office", "Fees rise.", "In 2024.", "By law.", "Check.", "End.", "Lost.",
    ]  # fmt: skip
    assert document.left_out == {"page numbers": 1}
    assert is_balanced(document)


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
    assert is_balanced(document)


def test_headings_and_captions_of_word():
    shown = f'<w:r><w:drawing>{ALT}<a:blip r:embed="rId2"/></w:drawing></w:r>'
    document = read_docx(
        word(
            para(t("Boats"), "berschrift1") + para(t("a"), "Loop") + para(t("Sails"), "Part") + para(t("b"))
            + para(t("Ropes"), "Own") + para(shown) + para(t("Red boat"), "Cap") + para(shown)
            + "<w:p><w:pPr><w:outlineLvl w:val='0'/></w:pPr>" + t("Oars") + "</w:p>" + para(t("c"))
        )
    )  # fmt: skip
    assert [(p.heading, p.text) for p in document.paragraphs] == [
        ("Boats", "a"), ("Boats > Sails", "b"), ("Ropes", "Red boat"), ("Oars", "c"),
    ]  # fmt: skip
    assert [(f.caption, f.heading, f.picture) for f in document.figures] == [
        ("Red boat", "Ropes", picture()), ("A red hull", "Ropes", picture()),
    ]  # fmt: skip


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
    document = read_docx(word(table(merged[0], *[merged[1]] * 5_000)))
    assert [text for _, text in rows(document)] == ["Group | p"] * 5_001


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (word("<w:p>"), r"no \.docx that can be read \(Opening and ending tag mismatch"),
        (zipped({"_rels/.rels": related(("officeDocument", "a.xml"))}), "it names no document"),
        (zipped({"_rels/.rels": related(("officeDocument", "a.xml")), "a.xml": "<a/>"}), "it has no body"),
        (word("<w:txbxContent>" * 9_000 + "</w:txbxContent>" * 9_000), "too deeply|depth"),
        (
            zipped({
                "_rels/.rels": related(("officeDocument", "a.xml")),
                "a.xml": '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><a>&c;</a>',
            }),
            "a.xml declares entities",
        ),
    ],
)  # fmt: skip
def test_damaged_word_files(data, reason):
    with pytest.raises(DocumentError, match=reason):
        read_docx(data)


def test_xml_counts_whatever_its_name_ends_with():
    spaces = root("w:document", "<w:body>" + " " * (3 * 2**23) + "</w:body>")
    data = zipped({
        "_rels/.rels": related(("officeDocument", "word/document.bin")),
        "word/document.bin": spaces,
    })  # fmt: skip
    with pytest.raises(DocumentError, match=r"unpacks to 25,\d+,\d+ bytes of text"):
        read_docx(data)


def test_merged_cells_do_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr("mmqa_jax.data.documents.office.MOST_TEXT", 10_000)
    long = table(cell("x" * 900, MERGED) + cell("1"), *[cell("", "<w:vMerge/>") + cell("2")] * 20)
    with pytest.raises(DocumentError, match="says more than 10,000 characters; split it"):
        read_docx(word(long))


# PowerPoint


def deck(*slides: str, more: tuple[tuple[str, str], ...] = (), **parts: str) -> bytes:
    """A presentation of these slides, whose relationships are the chart, a picture and `more`."""
    numbers = range(1, len(slides) + 1)
    ids = "".join(
        f'<p:sldId id="{250 + number}" r:id="rId{number}"/>' for number in reversed(numbers)
    )
    beside = related(
        ("chart", "../charts/c.xml"),
        ("image", "../media/a.png"),
        ("diagramData", "../diagrams/d.xml"),
        *more,
    )
    return zipped({
        "_rels/.rels": related(("officeDocument", "ppt/presentation.xml")),
        "ppt/presentation.xml": root("p:presentation", f"<p:sldIdLst>{ids}</p:sldIdLst>"),
        "ppt/_rels/presentation.xml.rels": related(*(("slide", f"slides/s{number}.xml") for number in numbers)),
        **{f"ppt/slides/s{number}.xml": slide for number, slide in enumerate(slides, start=1)},
        **{f"ppt/slides/_rels/s{number}.xml.rels": beside for number in numbers},
        "ppt/charts/c.xml": CHART,
        "ppt/media/a.png": picture(),
        "ppt/diagrams/d.xml": DIAGRAM,
        **{f"ppt/{name}.xml": content for name, content in parts.items()},
    })  # fmt: skip


def slide(*shapes: str, more: str = "") -> str:
    return root("p:sld", f"<p:cSld><p:spTree>{''.join(shapes)}</p:spTree></p:cSld>", more)


def shape(inner: str, placeholder: str = "", about: str = "") -> str:
    place = f'<p:ph type="{placeholder}"/>' if placeholder else ""
    return (
        f'<p:sp><p:nvSpPr><p:cNvPr id="1" name="s" {about}/><p:nvPr>{place}</p:nvPr></p:nvSpPr>'
        f"<p:txBody><a:p>{inner}</a:p></p:txBody></p:sp>"
    )


def run(text: str) -> str:
    return f"<a:r><a:t>{text}</a:t></a:r>"


def drawn_row(*cells: str) -> str:
    cells = (
        c if c.startswith("<") else f"<a:tc><a:txBody><a:p>{run(c)}</a:p></a:txBody></a:tc>"
        for c in cells
    )
    return f"<a:tr>{''.join(cells)}</a:tr>"


NORTH = f'<a:tc rowSpan="2"><a:txBody><a:p>{run("North")}</a:p></a:txBody></a:tc>'
COVERED = "<a:tc vMerge='1'><a:txBody><a:p/></a:txBody></a:tc>"
SHAPES = {
    "text box": (shape(run("Two") + "<a:br/>" + run("lines")), ["Two lines"]),
    "field": (shape("<a:fld type='datetime'><a:t>5 May</a:t></a:fld>"), ["5 May"]),
    "formula": (shape(f"<mc:AlternateContent><mc:Choice><m:oMath><m:r><m:t>ρgh</m:t></m:r></m:oMath></mc:Choice><mc:Fallback>{run('x')}</mc:Fallback></mc:AlternateContent>"), ["ρgh"]),
    "alternate shape once": (f"<mc:AlternateContent><mc:Choice>{shape(run('Once'))}</mc:Choice><mc:Fallback>{shape(run('Once'))}</mc:Fallback></mc:AlternateContent>", ["Once"]),
    "groups": (f"<p:grpSp><p:grpSp>{shape(run('Inner'))}</p:grpSp></p:grpSp>", ["Inner"]),
    "shape of an alternative text alone": (shape("", about='descr="An arrow"'), ["An arrow"]),
    "table": (
        f"<p:graphicFrame><a:tbl>{drawn_row('Berth', 'Fee')}{drawn_row(NORTH, '1')}{drawn_row(COVERED, '3')}</a:tbl></p:graphicFrame>",
        ["Berth | Fee", "North | 1", "North | 3"],
    ),
    "chart": ('<p:graphicFrame><c:chart r:id="rId1"/></p:graphicFrame>', ["Catches", "| Herring", "May | 4.3", "June | 7"]),
    "SmartArt": ('<p:graphicFrame><dgm:relIds r:dm="rId3"/></p:graphicFrame>', ["Moor the boat"]),
}  # fmt: skip


@pytest.mark.parametrize("piece", SHAPES)
def test_shapes_of_slides(piece):
    drawn, expected = SHAPES[piece]
    document = read_pptx(deck(slide(drawn, shape(run("End.")))))
    read = dict.fromkeys(line for p in document.paragraphs for line in (p.header, p.text) if line)
    assert list(read) == [*expected, "End."]
    assert is_balanced(document)


def test_slides_of_a_presentation():
    pic = '<p:pic><p:nvPicPr><p:cNvPr id="3" name="" descr="A red hull"/></p:nvPicPr><a:blip r:embed="rId2"/></p:pic>'
    notes = root("p:notes", shape(run("Speak slowly."), "body") + shape(run("3"), "sldNum"))
    comments = root("p:cmLst", "<p:cm><p:text>Check the fee.</p:text></p:cm>")
    document = read_pptx(
        deck(
            slide(shape(run("No title here"))),
            slide(
                shape(run("Body")), shape(run("Fees"), "ctrTitle"), pic, shape(run("ACME"), "ftr")
            ),
            slide(shape(run("Secret")), more='show="0"'),
            more=(("notesSlide", "../notes.xml"), ("comments", "../comments.xml")),
            notes=notes,
            comments=comments,
        )
    )
    beside = ["Speak slowly.", "Check the fee."]
    assert [(p.page, p.places[0].name, p.heading, p.text) for p in document.paragraphs] == [
        (2, "slide 2", "Fees", "Body"),
        *((2, "slide 2", "Fees", text) for text in beside),
        (3, "slide 3", "", "No title here"),
        *((3, "slide 3", "", text) for text in beside),
    ]
    assert [(f.caption, f.page, f.heading, f.picture) for f in document.figures] == [
        ("A red hull", 2, "Fees", picture())
    ]
    assert document.left_out == {"hidden slides": 6, "footers and numbers of slides": 6}


# Excel


def book(
    rows: str, *, sheets: str = "", more: str = "", styles: str = "", about: str = "", **parts: str
) -> bytes:
    """A workbook whose first sheet, `Fees 24`, has these rows; the second one is `sheets`."""
    return zipped({
        "_rels/.rels": related(("officeDocument", "xl/workbook.xml")),
        "xl/workbook.xml": root(
            "x:workbook",
            f'{about}<x:sheets><x:sheet name="Fees 24" r:id="rId1"/>'
            + ('<x:sheet name="Back" r:id="rId2" state="hidden"/>' if sheets else "") + "</x:sheets>",
        ),
        "xl/_rels/workbook.xml.rels": related(
            ("worksheet", "a.xml"), ("worksheet", "b.xml"), ("sharedStrings", "strings.xml"), ("styles", "styles.xml")
        ),
        "xl/a.xml": root("x:worksheet", f"{more}<x:sheetData>{rows}</x:sheetData>{parts.pop('after', '')}"),
        "xl/b.xml": root("x:worksheet", f"<x:sheetData>{sheets}</x:sheetData>"),
        "xl/_rels/a.xml.rels": related(*((kind, f"{kind}.xml") for kind in parts)),
        "xl/strings.xml": root("x:sst", "<x:si><x:t>Berth</x:t></x:si><x:si><x:r><x:t>Fe</x:t></x:r><x:r><x:t>e</x:t></x:r><x:rPh><x:t>no</x:t></x:rPh></x:si>"),
        "xl/styles.xml": root("x:styleSheet", f"{styles}<x:cellXfs><x:xf numFmtId='0'/><x:xf numFmtId='9'/><x:xf numFmtId='164'/></x:cellXfs>"),
        **{f"xl/{kind}.xml": content for kind, content in parts.items()},
    })  # fmt: skip


def line(number: int, *cells: tuple[str, str] | str, more: str = "") -> str:
    """A row of shared strings (0, 1), texts, or (value, attributes) in columns A, B, ..."""
    written = ""
    for column, content in zip("ABCDEF", cells, strict=False):
        if isinstance(content, str):
            written += (
                f'<x:c r="{column}{number}" t="inlineStr"><x:is><x:t>{content}</x:t></x:is></x:c>'
            )
        else:
            written += f'<x:c r="{column}{number}" {content[1]}>{content[0]}</x:c>'
    return f'<x:row r="{number}" {more}>{written}</x:row>'


def v(value: str, more: str = "") -> tuple[str, str]:
    return f"<x:v>{value}</x:v>", more


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
    assert [
        (p.places[0].name if p.places else "", p.header, p.text) for p in document.paragraphs
    ] == [
        ("'Fees 24'!A1", "", "Harbour fees"),
        ("'Fees 24'!A3:D3", header, "North | 12.5 | 25% | TRUE"),
        ("'Fees 24'!B3", "", "Too low"),
        ("'Fees 24'!A4:C4", header, "North | 7 | #N/A"),
        ("'Fees 24'!A9:B9", "", "Alone | 5. March 2024"),
        ("'Fees 24'!Z50", "", "Far off"),
        ("", "", "Boxed"),
    ]
    assert {p.heading for p in document.paragraphs} == {"Fees 24"}
    assert document.left_out == {
        "hidden rows": 4,
        "hidden sheets": 6,
        "formulas without a value": 3,
    }
    assert is_balanced(document)


def test_hidden_columns_and_cells_without_names():
    nameless = "<x:row><x:c t='str'><x:v>a</x:v></x:c><x:c t='str'><x:v>gone</x:v></x:c><x:c><x:v>3</x:v></x:c></x:row>"
    document = read_xlsx(
        book(nameless, more='<x:cols><x:col min="2" max="2" hidden="1"/></x:cols>')
    )
    assert places_and_texts(document) == [("'Fees 24'!A1:C1", "", "a | 3")]
    assert document.left_out == {"hidden columns": 4}


def test_cells_far_apart_cost_nothing():
    far = line(1, "a") + '<x:row r="1048576"><x:c r="XFD1048576" t="str"><x:v>b</x:v></x:c></x:row>'
    assert places_and_texts(read_xlsx(book(far))) == [
        ("'Fees 24'!A1", "", "a"),
        ("'Fees 24'!XFD1048576", "", "b"),
    ]


def test_a_workbook_of_too_many_cells(monkeypatch):
    for module in ("xlsx", "delimited"):
        monkeypatch.setattr(f"mmqa_jax.data.documents.{module}.MOST_CELLS", 3)
    with pytest.raises(DocumentError, match="more than 3 cells; split it"):
        read_xlsx(book(line(1, "a", "b") + line(2, "c", "d")))
    with pytest.raises(DocumentError, match="more than 3 cells; split it"):
        read_delimited(b"a,b\nc,d\n")


def test_a_workbook_without_its_sheet():
    with pytest.raises(DocumentError, match="sheet 'Fees 24' is not in the file"):
        read_xlsx(book("").replace(b"xl/a.xml", b"xl/c.xml"))


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

FORMULA = '<math xmlns="http://www.w3.org/1998/Math/MathML"><semantics><mi>ρ</mi><mi>g</mi><annotation>%rho g</annotation></semantics></math>'
HIDDEN = '<style:style style:name="Off"><style:p table:display="false" presentation:visibility="hidden"/></style:style>' \
         '<style:style style:name="P1" style:parent-style-name="Title"/>'  # fmt: skip


def opened(kind: str, content: str, **parts: str) -> bytes:
    """A file of OpenDocument with this content of its body."""
    written = f"<o:automatic-styles>{HIDDEN}</o:automatic-styles><o:body><o:{kind}>{content}</o:{kind}></o:body>"
    return zipped({
        "content.xml": root("o:document-content", written),
        "Object 1/content.xml": FORMULA,
        "Pictures/a.png": picture(),
        **{f"{name}.xml": part for name, part in parts.items()},
    })  # fmt: skip


def tp(text: str) -> str:
    return f"<text:p>{text}</text:p>"


def tc(text: str, more: str = "") -> str:
    return f"<table:table-cell {more}>{tp(text) if text else ''}</table:table-cell>"


def tr(*cells: str, more: str = "") -> str:
    return f"<table:table-row {more}>{''.join(cells)}</table:table-row>"


OPEN_PIECES = {
    "spaces": (tp("a<text:s text:c='2'/>b<text:tab/>c<text:line-break/>d"), ["a b c d"]),
    "spans and links": (tp("a <text:span>b <text:a>c</text:a></text:span> d"), ["a b c d"]),
    "list": (f"<text:list><text:list-item>{tp('one')}</text:list-item></text:list>", ["one"]),
    "section": (f"<text:section>{tp('in')}</text:section>", ["in"]),
    "note": (tp(f"Fees<text:note><text:note-citation>1</text:note-citation><text:note-body>{tp('In 2024.')}</text:note-body></text:note> rise"), ["Fees rise", "In 2024."]),
    "comment": (tp(f"x<o:annotation><dc:creator>Me</dc:creator>{tp('Check')}</o:annotation>"), ["x", "Check"]),
    "text box": (tp(f"x<draw:frame><draw:text-box>{tp('Boxed')}</draw:text-box></draw:frame>"), ["x", "Boxed"]),
    "shape": (f"<draw:g><draw:custom-shape>{tp('Shaped')}</draw:custom-shape></draw:g>", ["Shaped"]),
    "formula": (tp('p is<draw:frame><draw:object xlink:href="./Object 1"/><draw:image xlink:href="x"/></draw:frame>'), ["p is", "ρg"]),
    "ruby": (tp("<text:ruby><text:ruby-base>漢</text:ruby-base><text:ruby-text>かん</text:ruby-text></text:ruby>"), ["漢(かん)"]),
    "table": (
        f"<table:table><table:table-header-rows>{tr(tc('1'), tc('2'))}</table:table-header-rows>"
        + tr(tc("North", 'table:number-rows-spanned="2"'), tc("a")) + tr("<table:covered-table-cell/>", tc("b")) + "</table:table>",
        ["1 | 2", "North | a", "North | b"],
    ),
    "nested table": (
        f"<table:table>{tr(tc('1'), '<table:table-cell>' + tp('2') + '<table:table>' + tr(tc('3'), tc('4')) + '</table:table></table:table-cell>')}</table:table>",
        ["1 | 2", "3 | 4"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("piece", OPEN_PIECES)
def test_pieces_of_an_odt(piece):
    content, expected = OPEN_PIECES[piece]
    document = read_odf(opened("text", content + tp("End.")), ".odt")
    read = dict.fromkeys(line for p in document.paragraphs for line in (p.header, p.text) if line)
    assert list(read) == [*expected, "End."]
    assert is_balanced(document)


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
    assert [(f.caption, f.picture) for f in document.figures] == [("A red hull", picture())]
    assert document.title == "Boats of old"
    assert document.left_out == {
        "deleted text": 4,
        "hidden sections": 6,
        "hidden text": 4,
        "repeated headers and footers": 1,
    }
    assert is_balanced(document)


def test_sheets_of_an_ods():
    empty = tr(
        '<table:table-cell table:number-columns-repeated="16384"/>',
        more='table:number-rows-repeated="1048000"',
    )
    fees = (
        '<table:table-column table:number-columns-repeated="3"/><table:table-column table:visibility="collapse"/>'
        + tr(tc("Berth"), tc("Fee"), tc("Open"))
        + tr(
            tc("North"),
            tc("12,50 €"),
            f"<table:table-cell>{tp('yes')}<o:annotation>{tp('Sure?')}</o:annotation></table:table-cell>",
            tc("gone"),
        )
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
    document = read_odf(
        opened(
            "presentation", shown + f'<draw:page draw:style-name="Off">{tp("secret")}</draw:page>'
        ),
        ".odp",
    )
    assert [(p.page, p.places[0].name, p.heading, p.text) for p in document.paragraphs] == [
        (1, "slide 1", "", "First"), (2, "slide 2", "Fees", "Body"), (2, "slide 2", "Fees", "Slowly"),
    ]  # fmt: skip
    assert document.left_out == {"footers and numbers of slides": 4, "hidden slides": 6}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (zipped({"a.xml": "<a/>"}), r"no \.odt: it holds no content.xml"),
        (zipped({"content.xml": "<a/>"}), "it has no body"),
        (zipped({"content.xml": "<a>"}), r"no \.odt that can be read"),
        (zipped({"content.xml": "<a/>", "META-INF/manifest.xml": "<m:encryption-data/>"}), "encrypted"),
        (opened("text", "<text:list>" * 3_000 + "</text:list>" * 3_000), "too deeply|depth"),
    ],
)  # fmt: skip
def test_damaged_opendocument_files(data, reason):
    with pytest.raises(DocumentError, match=reason):
        read_odf(data, ".odt")


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
    document = read_delimited(('a,b\n1,"x\n' + "y,z\n" * 40_000).encode())
    assert len(document.paragraphs) == 40_001
    assert places_and_texts(document)[0] == ("A2:B2", "a | b", '1 | "x')


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_of_tables(encoding):
    data = "Berth;Fee;Note\nNorth;1,5;x\nSouth;2;é\n".encode(encoding)
    assert places_and_texts(read_delimited(data)) == BERTHS


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("Straße;Fee\n".encode("cp1252"), "not UTF-8 text .* save the file as UTF-8"),
        (b"\xff\xfea", "its UTF-16 is damaged"),
        (b"x" * 200_000, "no table of values that can be read .*field larger"),
    ],
)
def test_damaged_tables(data, reason):
    with pytest.raises(DocumentError, match=reason):
        read_delimited(data)
