"""Numbers of Word's lists: those that LibreOffice 7.4 writes of the same files, converted to text.

LibreOffice has neither `lvlRestart` nor `isLgl`, puts a space where `suff` says none, and does not
take a style's level from `pStyle`; of these ECMA-376 says what Word shows (17.9.4 to 17.9.29).
"""

import pytest
from office_files import cell, para, root, t, word
from test_documents_office import is_balanced, texts

from mmqa_jax.data.documents.docx import read_docx


def level(number: int, form: str, text: str, more: str = "", start: int = 1) -> str:
    return (
        f'<w:lvl w:ilvl="{number}"><w:start w:val="{start}"/><w:numFmt w:val="{form}"/>{more}'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
    )


KINDS = (
    level(0, "decimal", "%1.") + level(1, "decimal", "%1.%2") + level(2, "lowerLetter", "(%3)")
    + level(3, "lowerRoman", "%4)") + level(4, "upperRoman", "%5/%1"),
    level(0, "upperRoman", "Article %1")
    + level(1, "decimalZero", "Section %1.%2", "<w:isLgl/>")
    + level(2, "upperLetter", "%3:", '<w:lvlRestart w:val="0"/>')
    + level(3, "ordinal", "%4", '<w:lvlRestart w:val="1"/>'),
    level(0, "bullet", "•") + level(1, "decimal", "%2.", '<w:suff w:val="nothing"/>'),
    level(0, "decimal", "%1.", start=5) + level(1, "decimal", "%1.%2", start=3),
    '<w:numStyleLink w:val="Legal"/>',
    level(0, "decimal", "§ %1", '<w:pStyle w:val="Head"/>')
    + level(1, "decimal", "§ %1.%2", '<w:pStyle w:val="Below"/>'),
)  # fmt: skip
LETTERS = level(1, "lowerLetter", "%1%2)")
OVERRIDES = {
    7: '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="1"/></w:lvlOverride>',
    8: '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
    f'<w:lvlOverride w:ilvl="1">{LETTERS}</w:lvlOverride>',
}  # lists of the first kind
NUMBERING = root(
    "w:numbering",
    "".join(
        f'<w:abstractNum w:abstractNumId="{kind}"><w:multiLevelType w:val="multilevel"/>{levels}'
        "</w:abstractNum>"
        for kind, levels in enumerate(KINDS, start=1)
    )
    + "".join(
        f'<w:num w:numId="{number}"><w:abstractNumId w:val="{1 if number > 6 else number}"/>'
        f"{OVERRIDES.get(number, '')}</w:num>"
        for number in range(1, 9)
    ),
)
STYLES = root(
    "w:styles",
    '<w:style w:type="numbering" w:styleId="Legal"><w:name w:val="Legal"/><w:pPr><w:numPr>'
    '<w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="Head"><w:name w:val="heading 1"/><w:pPr><w:numPr>'
    '<w:numId w:val="6"/></w:numPr></w:pPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="Below"><w:name w:val="heading 2"/><w:basedOn w:val="Head"/>'
    '<w:pPr><w:numPr><w:ilvl w:val="1"/><w:numId w:val="6"/></w:numPr></w:pPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="Bare"><w:name w:val="bare"/><w:basedOn w:val="Head"/>'
    '<w:pPr><w:numPr><w:numId w:val="0"/></w:numPr></w:pPr></w:style>',
)


def item(number: int, at: int = 0, text: str = "x", mark: str = "") -> str:
    numbered = f'<w:numPr><w:ilvl w:val="{at}"/><w:numId w:val="{number}"/></w:numPr>'
    return f"<w:p><w:pPr>{numbered}{mark}</w:pPr>{t(text)}</w:p>"


def numbered(body: str, styles: str = STYLES):
    document = read_docx(word(body, numbering=NUMBERING, styles=styles))
    assert is_balanced(document)
    return document


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("10 11 11 12 12 13 11 12 10 11 12 13 14",
         ["1. x", "1.1 x", "1.2 x", "(a) x", "(b) x", "i) x", "1.3 x", "(a) x", "2. x", "2.1 x",
          "(a) x", "i) x", "I/2 x"]),
        ("12 11 10 12", ["(a) x", "1.2 x", "2. x", "(a) x"]),
        ("40 41 41 40 41", ["5. x", "5.3 x", "5.4 x", "6. x", "6.3 x"]),
        ("10 10 70 70 10 71 80 81 80 81 10",
         ["1. x", "2. x", "1. x", "2. x", "3. x", "3.1 x", "7. x", "7a) x", "8. x", "8a) x",
          "9. x"]),
        ("50 51 10", ["1. x", "1.1 x", "2. x"]),
        (" ".join(["12"] * 28), [*(f"({letter}) x" for letter in "abcdefghijklmnopqrstuvwxyz"),
                                "(aa) x", "(bb) x"]),
        ("20 21 22 23 21 22 23 20 21 22 23 23",
         ["Article I x", "Section 1.01 x", "A: x", "1st x", "Section 1.02 x", "B: x", "2nd x",
          "Article II x", "Section 2.01 x", "C: x", "1st x", "2nd x"]),
        ("30 31 31 30 31", ["x", "1.x", "2.x", "x", "1.x"]),
        ("90 19 10", ["x", "x", "1. x"]),  # no such list, no such level
    ],
)  # fmt: skip
def test_numbers_are_those_that_a_person_sees(items, expected):
    assert texts(numbered("".join(item(*map(int, one)) for one in items.split()))) == expected


@pytest.mark.parametrize("of_style", ['<w:ilvl w:val="1"/>', ""])
def test_headings_are_numbered_by_their_styles(of_style):
    def styled(style: str, text: str) -> str:
        return f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{t(text)}</w:p>'

    parts = [("Head", "Fees"), ("Below", "Boats"), ("Below", "Carts"), ("Head", "Keys")]
    body = "".join(styled(*part) + para(t("Text.")) for part in parts) + styled("Bare", "End.")
    document = numbered(body, STYLES.replace('<w:ilvl w:val="1"/>', of_style))
    assert [(p.heading, p.text) for p in document.paragraphs] == [
        ("§ 1 Fees", "Text."), ("§ 1 Fees > § 1.1 Boats", "Text."),
        ("§ 1 Fees > § 1.2 Carts", "Text."), ("§ 2 Keys", "Text."), ("", "End."),
    ]  # fmt: skip


def test_numbers_in_tables_and_of_paragraphs_that_are_joined():
    """A column of numbers alone is numbered; a deleted end of a paragraph makes no item."""
    row = "<w:tr>%s%s</w:tr>"
    cells = [f"<w:tc>{item(1, 0, '')}</w:tc>" for _ in range(2)]
    body = "".join(row % (number, cell(name)) for number, name in zip(cells, "ab", strict=True))
    joined = item(1, 0, "c", "<w:rPr><w:del/></w:rPr>") + item(1, 0, "d") + item(1, 0, "")
    document = numbered(f"<w:tbl>{body}</w:tbl>{joined}{item(1, 0, 'e')}")
    assert texts(document) == ["1. | a", "2. | b", "3. cd", "5. e"]


@pytest.mark.parametrize("count", [4000, 99999999])
def test_damaged_numbers_cost_nothing(count):
    """Numbers that Word does not reach, levels beyond the ninth and styles that go in circles."""
    kind = level(0, "lowerRoman", "%1", start=count) + level(10**10, "upperLetter", "%9%1")
    lists = (
        f'<w:abstractNum w:abstractNumId="1">{kind}</w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="1"/></w:num>'
    )
    body = item(1) + '<w:p><w:pPr><w:pStyle w:val="Loop"/></w:pPr></w:p>' + item(1, 10**10)
    document = read_docx(word(body, numbering=root("w:numbering", lists)))
    first = "mmmm x" if count == 4000 else "99999999 x"
    assert texts(document)[0] == first
    assert is_balanced(document)
