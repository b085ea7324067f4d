"""Files of Office for tests, written by hand: a file of each kind, and the pieces that it may hold."""

import io
import zipfile

from document_files import picture

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
TYPES = {
    "word/document.xml": "wordprocessingml.document.main",
    "word/styles.xml": "wordprocessingml.styles",
    "word/footnotes.xml": "wordprocessingml.footnotes",
    "word/endnotes.xml": "wordprocessingml.endnotes",
    "word/comments.xml": "wordprocessingml.comments",
    "word/header.xml": "wordprocessingml.header",
    "word/footer.xml": "wordprocessingml.footer",
    "word/charts/": "drawingml.chart",
    "word/diagrams/": "drawingml.diagramData",
    "ppt/presentation.xml": "presentationml.presentation.main",
    "ppt/slides/s": "presentationml.slide",
    "ppt/layout.xml": "presentationml.slideLayout",
    "ppt/master.xml": "presentationml.slideMaster",
    "ppt/notes.xml": "presentationml.notesSlide",
    "ppt/charts/": "drawingml.chart",
    "xl/workbook.xml": "spreadsheetml.sheet.main",
    "xl/a.xml": "spreadsheetml.worksheet",
    "xl/b.xml": "spreadsheetml.worksheet",
    "xl/strings.xml": "spreadsheetml.sharedStrings",
    "xl/styles.xml": "spreadsheetml.styles",
    "xl/comments.xml": "spreadsheetml.comments",
    "xl/drawing.xml": "drawing",
}  # the beginning of a part's name -> the last words of its type
TYPES_OF_ENDINGS = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Default Extension="xml" ContentType="application/xml"/>'
    '<Default Extension="png" ContentType="image/png"/>'
    '<Default Extension="html" ContentType="text/html"/>'
)
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
    if "_rels/.rels" in parts:
        types = "".join(
            f'<Override PartName="/{name}" ContentType="application/vnd.openxmlformats-officedocument.{kind}+xml"/>'
            for name in parts
            for beginning, kind in TYPES.items()
            if name.startswith(beginning)
        )
        parts = {"[Content_Types].xml": f"{TYPES_OF_ENDINGS}{types}</Types>", **parts}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return packed.getvalue()


STYLES = root(
    "w:styles",
    '<w:style w:type="paragraph" w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Own"><w:name w:val="My own"/><w:basedOn w:val="berschrift1"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Part"><w:name w:val="Part"/><w:pPr><w:outlineLvl w:val="1"/></w:pPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="Cap"><w:name w:val="caption"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Loop"><w:name w:val="Loop"/><w:basedOn w:val="Loop"/></w:style>',
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
            ("image", "media/b.png"), *((name.rstrip("2"), f"{name}.xml") for name in parts),
        ),
        "word/styles.xml": STYLES,
        "word/media/a.png": picture(),
        "word/media/b.png": picture("blue"),
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
        "ppt/presentation.xml": root("p:presentation", f"<p:sldIdLst>{ids}</p:sldIdLst><p:sldSz cx='9144000' cy='6858000'/>"),
        "ppt/_rels/presentation.xml.rels": related(*(("slide", f"slides/s{number}.xml") for number in numbers)),
        **{f"ppt/slides/s{number}.xml": slide for number, slide in enumerate(slides, start=1)},
        **{f"ppt/slides/_rels/s{number}.xml.rels": beside for number in numbers},
        "ppt/charts/c.xml": CHART,
        "ppt/media/a.png": picture(),
        "ppt/diagrams/d.xml": DIAGRAM,
        **{f"ppt/{name}.xml".replace(".rels.xml", ".rels"): content for name, content in parts.items()},
    })  # fmt: skip


def behind(layout: str, master: str, more: str = "") -> dict[str, str]:
    """The parts of a deck's layout and master, by the shapes of each."""
    return {
        "layout": root("p:sldLayout", f"<p:cSld><p:spTree>{layout}</p:spTree></p:cSld>", more),
        "_rels/layout.xml.rels": related(("slideMaster", "master.xml")),
        "master": root("p:sldMaster", f"<p:cSld><p:spTree>{master}</p:spTree></p:cSld>"),
    }


LAYOUT = ("slideLayout", "../layout.xml")


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


def frame(kind: str, inner: str) -> str:
    place = '<p:xfrm><a:off x="0" y="0"/><a:ext cx="9" cy="9"/></p:xfrm>'
    graphic = (
        f'<a:graphic><a:graphicData uri="{DRAWING}/{kind}">{inner}</a:graphicData></a:graphic>'
    )
    return f"<p:graphicFrame>{place}{graphic}</p:graphicFrame>"


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
        frame("table", f"<a:tbl>{drawn_row('Berth', 'Fee')}{drawn_row(NORTH, '1')}{drawn_row(COVERED, '3')}</a:tbl>"),
        ["Berth | Fee", "North | 1", "North | 3"],
    ),
    "chart": (frame("chart", '<c:chart r:id="rId1"/>'), ["Catches", "| Herring", "May | 4.3", "June | 7"]),
    "SmartArt": (frame("diagram", '<dgm:relIds r:dm="rId3"/>'), ["Moor the boat"]),
}  # fmt: skip


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


FORMULA = '<math xmlns="http://www.w3.org/1998/Math/MathML"><semantics><mi>ρ</mi><mi>g</mi><annotation>%rho g</annotation></semantics></math>'
HIDDEN = '<style:style style:name="Off"><style:p table:display="false" presentation:visibility="hidden"/></style:style>' \
         '<style:style style:name="P1" style:parent-style-name="Title"/>'  # fmt: skip


def opened(kind: str, content: str, **parts: str) -> bytes:
    """A file of OpenDocument with this content of its body."""
    written = f"<o:automatic-styles>{HIDDEN}</o:automatic-styles><o:body><o:{kind}>{content}</o:{kind}></o:body>"
    return zipped({
        "mimetype": f"application/vnd.oasis.opendocument.{kind}",
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
    "date": (tp("on <text:date>5 May</text:date>"), ["on 5 May"]),
    "section": (f"<text:section>{tp('in')}</text:section>", ["in"]),
    "table of contents": ("<text:table-of-content><text:table-of-content-source><text:index-title-template>Index</text:index-title-template></text:table-of-content-source><text:index-body><text:index-title>" + tp("Contents") + "</text:index-title></text:index-body></text:table-of-content>", ["Contents"]),
    "note": (tp(f"Fees<text:note><text:note-citation>1</text:note-citation><text:note-body>{tp('In 2024.')}</text:note-body></text:note> rise"), ["Fees rise", "In 2024."]),
    "comment": (tp(f"x<o:annotation><dc:creator>Me</dc:creator>{tp('Check')}</o:annotation>"), ["x", "Check"]),
    "text box": (tp(f"x<draw:frame><draw:text-box>{tp('Boxed')}</draw:text-box></draw:frame>"), ["x", "Boxed"]),
    "shape": (f"<draw:g><draw:custom-shape>{tp('Shaped')}</draw:custom-shape></draw:g>", ["Shaped"]),
    "formula": (tp('p is<draw:frame><draw:object xlink:href="./Object 1"/><draw:image xlink:href="x"/></draw:frame>'), ["p is", "ρg"]),
    "ruby": (tp("<text:ruby><text:ruby-base>漢</text:ruby-base><text:ruby-text>かん</text:ruby-text></text:ruby>"), ["漢(かん)"]),
    "table": (
        f"<table:table><table:table-header-rows>{tr(tc('1'), tc('2'))}</table:table-header-rows>"
        + tr(tc("North", 'table:number-rows-spanned="2"'), tc("a")) + tr("<table:covered-table-cell/>", tc("b")) + tr("<table:covered-table-cell/>", tc("c")) + "</table:table>",
        ["1 | 2", "North | a", "North | b", "| c"],
    ),
    "nested table": (
        f"<table:table>{tr(tc('1'), '<table:table-cell>' + tp('2') + '<table:table>' + tr(tc('3'), tc('4')) + '</table:table></table:table-cell>')}</table:table>",
        ["1 | 2", "3 | 4"],
    ),
}  # fmt: skip
