"""HTML and text formats: what a person sees is read, and every other letter is counted."""

import base64
import contextlib
import io
import json
import random
import struct
import time
import zipfile
from email.message import EmailMessage

import pytest
from document_files import picture

from mmqa_jax.data.documents.chunks import ChunkOptions, chunks
from mmqa_jax.data.documents.document import READERS, DocumentError, letters, place_of
from mmqa_jax.data.documents.html import read_epub, read_html
from mmqa_jax.data.documents.plain import (
    read_eml,
    read_json,
    read_json_lines,
    read_markdown,
    read_msg,
    read_notebook,
    read_plain,
    read_rst,
)
from mmqa_jax.data.documents.tex import read_tex
from tests.refusals import refuses


@pytest.mark.parametrize("ending", READERS)
def test_each_ending_has_its_reader(ending):
    """Readers are named in strings; what is no file of a kind is read as text or refused."""
    with contextlib.suppress(DocumentError):
        READERS[ending].read(b"no file of this kind")


def texts(document):
    assert document.missing == 0
    return [(paragraph.heading, paragraph.text) for paragraph in document.paragraphs]


def rows(document):
    assert document.missing == 0
    return [(p.header, p.text) for p in document.paragraphs if p.is_row]


def html(markup: str):
    return read_html(f"<!doctype html><meta charset=utf-8>{markup}".encode())


# Text, code and Markdown


def test_code_keeps_its_lines():
    """With indentation and numbers, from which passages have theirs; a line of a program is a text."""
    code = (
        "import os\n\n\ndef clean(pump):\n\tif pump:\r\n        return  pump.wash()\n"
        + "x=1;" * 200
    )
    document = READERS[".py"].read(code.encode())
    *lines, written = document.paragraphs
    assert [(line.text, line.places[0].line, line.is_row) for line in lines] == [
        ("import os", 1, True),
        ("def clean(pump):", 4, True),
        ("    if pump:", 5, True),
        ("        return pump.wash()", 6, True),
    ]
    assert (written.is_row, document.letters_read, document.missing) == (False, document.letters, 0)
    passages = list(chunks([*lines, *lines], ChunkOptions(words=10, overlap=0)))
    assert [passage.text.split("\n") for passage in passages] == [
        [line.text for line in (*lines, lines[0])], [line.text for line in lines[1:]],
    ]  # fmt: skip
    numbered = [
        [{"start": p.start, "end": p.end, "line": p.line} for p in passage.places]
        for passage in passages
    ]
    first, last = (place_of({"places": places})["lines"] for places in numbered)
    assert (first, last) == ([1, 6], [4, 6])


def test_lists_and_listings_keep_their_lines():
    written = b"Parts:\n- a pump\n  of steel\n- a valve\n\n1) oil\n2) wash it\nat once\n"
    items = [
        ("", "Parts:"),
        ("", "- a pump of steel"),
        ("", "- a valve"),
        ("", "1) oil"),
        ("", "2) wash it at once"),
    ]
    assert texts(read_plain(written)) == items
    document = read_markdown(b"Run:\n\n- one\n- two\n\n```\nmake all\nmake test\n```\n")
    (passage,) = chunks(document.paragraphs, ChunkOptions())
    assert passage.text == "Run:\none\ntwo\nmake all\nmake test"


def test_markdown():
    document = read_markdown(
        b"# Guide\nIntro with [a link](http://x.org).\n\n## Parts ##\n- one\n- two\n\n"
        b"```sh\n# no heading\n```\nOld\n===\nText ![A red pump](img/p.png) here.\n"
    )
    assert texts(document) == [
        ("Guide", "Intro with a link."),
        ("Guide > Parts", "one"),
        ("Guide > Parts", "two"),
        ("Guide > Parts", "# no heading"),
        ("Old", "Text here."),
    ]
    assert [(f.caption, f.link) for f in document.figures] == [("A red pump", "img/p.png")]


# What CommonMark's reference (spec.commonmark.org), GitHub and Obsidian make of each.
@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("# T\n\n- a\n- b\n---\nEnd.", [("T", "a"), ("T", "b"), ("T", "End.")]),
        (
            "\ufeffFirst\nline.\r\n\r\nSecond\x00 \u00adline.\n \nA\u0308",
            [("", "First line."), ("", "Second line."), ("", "Ä")],
        ),
        ("A title of\ntwo lines\n===\n\nText.", [("A title of two lines", "Text.")]),
        (
            "```a\n# no\n```b\n# code\n```\n\nEnd.",
            [("", "# no"), ("", "```b"), ("", "# code"), ("", "End.")],
        ),
        ("<!-- hidden -->\n5&thinsp;m &lt; 6&nbsp;m &amp; more", [("", "5 m < 6 m & more")]),
        ("<details><summary>More</summary>\n\nIn.\n\n</details>", [("", "More"), ("", "In.")]),
        ("# Empty\n\n# Full\n\nText.", [("", "Empty"), ("Full", "Text.")]),
        ("3. third\n4. fourth", [("", "3. third"), ("", "4. fourth")]),
        ("Fact.[^n]\n\n[^n]: The note.", [("", "Fact.1"), ("", "1 The note.")]),
        ("- [x] done\n- [ ] open", [("", "[x] done"), ("", "[ ] open")]),
        ("Area $\\pi r^2$.", [("", "Area \\pi r^2.")]),
        ("See [rules][r] and [[Note|other]].\n\n[r]: http://x.y", [("", "See rules and other.")]),
        ("`" * 3 + "\nfirst\n\nsecond\n" + "`" * 3, [("", "first"), ("", "second")]),
    ],
)
def test_markdown_is_what_its_readers_show(text, paragraphs):
    assert texts(read_markdown(text.encode())) == paragraphs


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("![The plan][p]\n\n[p]: plan.png", [("The plan", "plan.png")]),
        ('<img src="plan.png" alt="The plan" width="3">', [("The plan", "plan.png")]),
        ("![[plan.png|The plan]]", [("The plan", "plan.png")]),
        ("![a](<my plan.png>)", [("a", "my%20plan.png")]),
        ("![b](dir/plan(1).png 'T')", [("b", "dir/plan(1).png")]),
    ],
)
def test_pictures_of_markdown(text, figures):
    assert [(f.caption, f.link) for f in read_markdown(text.encode()).figures] == figures


@pytest.mark.parametrize(
    ("front", "title"),
    [
        ("---\ntitle: Rules of the lock\ntags: [a]\n---\n", "Rules of the lock"),
        ('+++\ntitle = "Rules"\n+++\n', "Rules"),
        ("---\ntags: [a, b]\n---\n", ""),
        ("---\ntitle: [broken\n---\n", ""),
        ("---\n- a\n---\n", ""),
    ],
)
def test_front_matter_is_no_text_and_states_the_title(front, title):
    document = read_markdown(f"{front}\nWait.".encode())
    assert (document.title, texts(document)) == (title, [("", "Wait.")])
    assert document.left_out["front matter"] == letters(front) - letters(title)


@pytest.mark.parametrize("rule", ["---", "+++", "***"])
@pytest.mark.parametrize("front", ["", "---\ntitle: Ä\n---\n"])
def test_what_stands_between_rules_is_no_front_matter(front, rule):
    text = f"{front}First.\n\n{rule}\n## Second\nIt stays.\n\n{rule}\n## Third\nIt too.\n"
    document = read_markdown(text.encode())
    said = [text.removeprefix("+++ ") for _, text in texts(document) if text != "+++"]
    assert said == ["First.", "It stays.", "It too."]
    assert document.left_out == ({"front matter": 5} if front else {})


def test_a_table_of_markdown_keeps_its_header_in_each_row():
    document = read_markdown(b"| Part | Days |\n|---|---|\n| Filter | 7 |\n| Belt \\| seal | 30 |")
    assert rows(document) == [("Part | Days", "Filter | 7"), ("Part | Days", "Belt | seal | 30")]


@pytest.mark.parametrize(
    ("line", "text", "links"),
    [
        ("## A # b ##  ", "A # b", []),
        ('[P](http://x.org/P_(b)) ![q](q_(1).png "Q")', "P", ["q_(1).png"]),
        ("![" * 20_000, "![" * 20_000, []),
        ("[a](b" * 20_000, "[a](b" * 20_000, []),
        ("![](" + "a" * 50_000, "![](" + "a" * 50_000, []),
        ("# " + "#" * 50_000 + "x", "#" * 50_000 + "x", []),
        ("#" + " " * 50_000 + "# x", "# x", []),
        ("> " * 20_000 + "x", "x", []),
        ("*a **b " * 20_000, ("*a **b " * 20_000).strip(), []),
        ("<a " * 50_000, ("<a " * 50_000).strip(), []),
    ],
)
def test_lines_of_markdown_in_linear_time(line, text, links):
    began = time.process_time()
    document = read_markdown(f"{line}\n\nEnd.".encode())
    assert text in {document.paragraphs[0].heading, document.paragraphs[0].text}
    assert [figure.link for figure in document.figures] == links
    assert time.process_time() - began < 10  # cubic time takes minutes


# HTML


def test_html():
    inline = base64.b64encode(picture()).decode()
    document = read_html(
        f"""<!doctype html><head><title>T</title><style>p {{}}</style></head>
        <nav>Home</nav><h1>Pumps</h1>Bare <b>te</b>xt<p>One<br>two<script>alert(1)</script> three
        <h2>Data</h2><table><tr><th>Model<th>Power<tr><td>A</td><td>5 W</td></tr></table>
        <ul><li>first<li>second</ul>
        <figure><img src="a%20b.png" alt="alt"><figcaption>Figure 1. A pump.</figcaption></figure>
        <img src="data:image/png;base64,{inline}" alt="inline"><img src="ornament.png" alt="">
        <noscript>without scripts</noscript>&eacute;nd""".encode()
    )
    assert document.title == "T"
    assert texts(document) == [
        ("Pumps", "Bare text"),
        ("Pumps", "One two three"),
        ("Pumps > Data", "A | 5 W"),
        ("Pumps > Data", "first"),
        ("Pumps > Data", "second"),
        ("Pumps > Data", "without scriptsénd"),
    ]
    assert rows(document) == [("Model | Power", "A | 5 W")]
    assert [(f.caption, f.link, f.picture) for f in document.figures] == [
        ("Figure 1. A pump.", "a%20b.png", None),
        ("inline", "", picture()),
    ]
    assert document.left_out == {
        "navigation": 4, "scripts and styles": len("palert1"), "alternative texts beside captions": 3
    }  # fmt: skip


# Each label with bytes and text as the WHATWG's Encoding standard has them.
@pytest.mark.parametrize(
    ("label", "encoded", "text"),
    [
        ("us-ascii", b"5 \x80 \x96 \x93x\x94", "5 € – “x”"),
        ("iso-8859-1", b"caf\xe9 \x93x\x94", "café “x”"),
        ("iso-8859-9", b"Il\xfdca\x92da", "Ilıca’da"),
        ("tis-620", "ประตู".encode("cp874") + b"\x85", "ประตู…"),
        ("gb2312", "镕喆".encode("gb18030"), "镕喆"),
        ("big5", "喺".encode("big5hkscs"), "喺"),
        ("shift_jis", "①髙".encode("cp932"), "①髙"),
        ("x-sjis", "①".encode("cp932"), "①"),
        ("windows-31j", "髙".encode("cp932"), "髙"),
        ("ks_c_5601-1987", "뷁".encode("cp949"), "뷁"),
        ("euc-kr", "뷁".encode("cp949"), "뷁"),
        ("x-mac-roman", "ü".encode("mac-roman"), "ü"),
        ("utf-16", "ü".encode(), "ü"),
        ("unicode", "ü".encode(), "ü"),
        ("utf-8;", "ü".encode(), "ü"),
    ],
)
def test_charsets_by_the_table_of_browsers(label, encoded, text):
    declared = f'<meta http-equiv="Content-Type" content="text/html; charset={label}"><p>'
    assert texts(read_html(declared.encode() + encoded)) == [("", text)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("<p>é".encode("utf-16"), "é"),
        (b"<meta charset=utf-8><p>One \xff two.", "One \ufffd two."),
        (b'<?xml version="1.0" encoding="ISO-8859-1"?><p>M\xfcller', "Müller"),
        ("<p>Müller öffnet".encode(), "Müller öffnet"),
        (b"<p>caf\xe9", "café"),
        (b"<meta charset=klingon><p>caf\xe9", "café"),
        ("<p>Die Schleuse öffnet \ue000 früh".encode().replace("\ue000".encode(), b"\xff"),
         "Die Schleuse öffnet \ufffd früh"),
    ],
)  # fmt: skip
def test_pages_that_declare_no_encoding_of_the_table(data, text):
    document = read_html(data)
    assert texts(document) == [("", text)]
    uncoded = text.count("\ufffd")
    assert document.left_out.get("bytes that are no characters", 0) == uncoded


@pytest.mark.parametrize("markup", [b" ", b"<p><!-- x -->"])
def test_html_without_content(markup):
    assert read_html(markup).paragraphs == ()


def test_entities_of_html_do_not_grow():
    bomb = b"<!DOCTYPE html [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;'>]><p>&b;</p>"
    assert sum(len(text) for _, text in texts(read_html(bomb))) < len(bomb)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ('Is <math alttext="\\pi r^2"><mi>π</mi><mi>r</mi></math> wide', "Is \\pi r^2 wide"),
        ("Is <math><mi>π</mi><msup><mi>r</mi><mn>2</mn></msup></math> wide", "Is πr2 wide"),
        ("<noscript>For those without.</noscript>", "For those without."),
        ("A: <textarea>Kaj 7</textarea> <input value='5000'> <input type=hidden value=z>"
         "<select><option>Norway<option selected>Denmark</select> <button>Send</button>",
         "A: Kaj 7 5000 Denmark Send"),
        ("<svg><text>left</text><text>right</text><style>x</style></svg>", "left right"),
        ("<p hidden>no</p><div style='color:red; DISPLAY : none'>no</div>yes", "yes"),
        ("<details><summary>More</details>", "More"),
        ("<object data=x.pdf>instead</object>", "instead"),
        ("<table role=presentation><tr><td>one", "one"),
        ("<table><tr><td><h2>x</h2><table><tr><td>y | z</table></table>", "y | z"),
    ],
)  # fmt: skip
def test_what_a_person_sees_is_read(markup, text):
    assert [paragraph for _, paragraph in texts(html(markup))] == [text]


# Merged cells: https://html.spec.whatwg.org/#forming-a-table
@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<tr><th>A<th>B<tr><td rowspan=2>x<td>1<tr><td>2<tr><td>y<td>3",
         [("A | B", "x | 1"), ("A | B", "x | 2"), ("A | B", "y | 3")]),
        ("<tr><th rowspan=2>N<th colspan=2>P<tr><th>min<th>max<tr><td>a<td>1<td>2",
         [("N | P min | P max", "a | 1 | 2")]),
        ("<tr><td>1<td rowspan=0>all<tr><td>2", [("", "1 | all"), ("", "2 | all")]),
        ("<tbody><tr><td rowspan=9>x<td>1<tbody><tr><td>2", [("", "x | 1"), ("", "2")]),
        ("<tr><td rowspan=2000000000 colspan=2000000000>x<td>y<tr><td>z",
         [("", "x | y"), ("", "x | z")]),
        ("<tr><th>only", [("", "only")]),
        ("<tr><th>A<th>B<tr><td><td>1", [("A | B", "| 1")]),
        ("<tr><th>H<th>I<tr><td>a<table><tr><td>in</table>b<td>c", [("", "in"), ("H | I", "a b | c")]),
    ],
)  # fmt: skip
def test_rows_of_tables(markup, expected):
    assert rows(html(f"<table>{markup}</table>")) == expected


@pytest.mark.parametrize(
    ("markup", "headings"),
    [
        (  # a note's heading ranks with that of its section, as in DocBook's pages
            "<div><div><div><h2>Joins</h2></div></div>a<div><h2>Note</h2>b</div>c"
            "<div><div><h3>Left</h3></div>d<div><h2>Tip</h2>e</div>f</div></div>"
            "<div><div><h2>Where</h2></div>g</div>",
            ["Joins", "Joins > Note", "Joins", "Joins > Left", "Joins > Left > Tip",
             "Joins > Left", "Where"],
        ),
        (  # a heading with its first lines in a container of their own
            "<div><h1>Title</h1>a</div>b<div><h2>Part</h2>c</div>d<div><h2>Other</h2>e</div>f",
            ["Title", "Title", "Title > Part", "Title > Part", "Title > Other", "Title > Other"],
        ),
        ("<h1>T</h1>a<blockquote><h2>Q</h2>b</blockquote>c<p>d", ["T", "T > Q", "T", "T"]),
        ("<h2>A</h2>a<h2>B</h2>b<h3>C</h3>c<h1>D</h1>d", ["A", "B", "B > C", "D"]),
    ],
)  # fmt: skip
def test_a_heading_ends_with_its_box(markup, headings):
    found = [paragraph.heading for paragraph in read_html(markup.encode()).paragraphs]
    assert found == headings


@pytest.mark.parametrize(
    ("markup", "seen"),
    [
        ("<div>" * 100_000 + "<p>deep", "deep"),
        ("<p>" + "word " * 2_200_000 + "<p>end", "end"),  # 11 MB in a node
        ("<table>" + "<tr><td>" * 100_000 + "end", "end"),
        ("<table><tr>" + "<td rowspan=65534>ab cd" * 5_000 + "<tr><td>q" * 5_000 + "</table>", "q"),
        ("<table><tr><td>" * 10_000 + "end", "end"),
        ("<h1>" + "A" * 200_000 + "</h1>" + "<p>item</p>" * 20_000, "item"),
        ("<p " + " ".join(f"a{n}=1" for n in range(30_000)) + ">end", "end"),
        ("<a href=x><b><i>" * 20_000 + "end", "end"),
        ("<ol><li>" * 50_000 + "end", "end"),
    ],
)
def test_nothing_is_lost_of_odd_pages_and_their_cost_is_linear(markup, seen):
    began = time.process_time()
    document = html(markup)
    assert document.missing == 0
    assert document.paragraphs[-1].text.endswith(seen)
    kept = sum(len(p.text) + len(p.heading) + len(p.header) for p in document.paragraphs)
    assert kept < 20 * len(markup) + 2**22
    assert time.process_time() - began < 20  # quadratic time takes minutes


def test_every_letter_of_a_random_page_is_read_or_counted():
    words = (f"w{number}x" for number in range(10**9))
    draw = random.Random(7)
    for _ in range(60):
        seen: list[str] = []
        markup = _random_element(draw, words, seen, 5)
        document = html(markup)
        read = " ".join(
            [document.title, *(f"{p.heading} {p.header} {p.text}" for p in document.paragraphs)]
        )
        assert [word for word in seen if word not in read] == [], markup
        assert document.missing == 0, markup


def _random_element(draw: random.Random, words, seen: list[str], depth: int) -> str:
    """An element of page content, whose words are added to `seen` unless no person sees them."""
    tag = draw.choice(
        ["p", "div", "h1", "h2", "li", "span", "b", "pre", "td", "th", "section", "summary", "dd",
         "x-card", "article", "blockquote", "style", "figure", "nav"]
    )  # fmt: skip
    inner = []
    below = seen if tag not in ("style", "nav") else []
    for _ in range(draw.randint(1, 4)):
        if depth and tag != "style" and draw.random() < 0.6:
            inner.append(_random_element(draw, words, below, depth - 1))
        else:
            below.append(next(words))
            inner.append(f" {below[-1]} ")
    content = "".join(inner)
    if tag in ("td", "th"):
        cell = f"<tr><{tag} rowspan={draw.randint(0, 3)}>{content}</{tag}><td>"
        return f"<table>{cell}</td></tr><tr><td></td></tr></table>"
    return f"<{tag}>{content}</{tag}>"


# JSON


@pytest.mark.parametrize(
    ("read", "text", "paragraphs"),
    [
        (read_json, '{"name": "Pump", "power": 5.0, "tags": ["a", "b"], "on": true}',
         [("", "name: Pump; power: 5.0; tags: a, b; on: true")]),
        (read_json, '{"parts": [{"n": "Filter"}, {"n": "Belt"}], "by": {"who": {"name": "Ada"}}}',
         [("parts", "n: Filter"), ("parts", "n: Belt"), ("by > who", "name: Ada")]),
        (read_json, '["x", ["y", null], {}]', [("", "x; y, null")]),
        (read_json, '"one\\n\\ntwo"', [("", "one"), ("", "two")]),
        (read_json_lines, '{"q": "Who?"}\n\n{"q": "Where?"}\n',
         [("", "q: Who?"), ("", "q: Where?")]),
    ],
)  # fmt: skip
def test_json_is_read_with_its_keys(read, text, paragraphs):
    assert texts(read(text.encode())) == paragraphs


def test_deep_and_wide_json():
    deep = '{"k":' * 60 + '"end"' + "}" * 60
    document = read_json(deep.encode())
    assert document.missing == 0
    assert document.paragraphs[-1].text == "k: end"
    assert len(document.paragraphs[-1].heading) < 60
    long_key = json.dumps({"k" * 100_000: [{"a": n} for n in range(2_000)]})
    document = read_json(long_key.encode())
    assert document.missing == 0
    assert sum(len(p.text) + len(p.heading) for p in document.paragraphs) < 2 * len(long_key)


# Notebooks


def test_a_notebook():
    import nbformat.v4 as v4

    drawn = base64.b64encode(picture()).decode()
    cells = [
        v4.new_markdown_cell("# Data\nWe *load* it. ![plan](attachment:p.png)",
                             attachments={"p.png": {"image/png": drawn}}),
        v4.new_code_cell("print('<hello>')", outputs=[
            v4.new_output("stream", text="<hello>\n"),
            v4.new_output("display_data", {"text/html": "<table><tr><th>A<tr><td>5</table>",
                                           "text/plain": "A 5"}),
            v4.new_output("execute_result", {"text/plain": "'done'"}),
            v4.new_output("display_data", {"image/png": drawn, "text/plain": "<Figure>"}),
            v4.new_output("error", ename="KeyError", evalue="x",
                          traceback=["\x1b[0;31mKeyError\x1b[0m: x"]),
        ]),
        v4.new_raw_cell("raw"),
    ]  # fmt: skip
    notebook = v4.new_notebook(cells=cells, metadata={"title": "Pumps"})
    document = read_notebook(json.dumps(notebook).encode())
    assert document.title == "Pumps"
    assert texts(document) == [
        ("Data", text)
        for text in ("We load it.", "print('<hello>')", "<hello>", "5", "'done'", "KeyError: x",
                     "raw")
    ]  # fmt: skip
    assert rows(document) == [("A", "5")]
    assert [(f.caption, f.picture) for f in document.figures] == [
        ("plan", picture()),
        ("", picture()),
    ]


# reStructuredText


def test_rst():
    document = read_rst(
        b"""
Pumps
=====

Wash it *weekly*; see :ref:`the manual <manual>` and :py:func:`open`. [1]_

.. hidden words

.. py:function:: start(speed)
   :deprecated: 3.1

   Starts it.

.. note:: Mind the belt.

Data
----

+--------+------+
| Part   | Days |
+========+======+
| Filter | 7    |
|        +------+
|        | 9    |
+--------+------+

.. figure:: pump.png
   :alt: drawn

   The pump.

.. image:: red.png
   :alt: A red pump

Area :math:`\\pi r^2`; an unknown_ target and |nothing|.

.. raw:: html

   <b>bold</b>

.. csv-table::
   :file: /etc/passwd

.. include:: /etc/passwd

3. third

.. [1] A footnote.

.. badtable::

===== ===
bad   t
===== ====
x     y
"""
    )
    read = texts(document)
    assert document.title == "Pumps"
    assert read[0][0] == "Pumps"
    seen = [text for _, text in read]
    for text in (
        "Wash it weekly; see the manual <manual> and open. [1]", "start(speed)", "3.1", "Starts it.",
        "Mind the belt.", "Area \\pi r^2; an unknown_ target and |nothing|.", "<b>bold</b>",
        "3. third", "===== ===", "bad t", "===== ====", "x y",
    ):  # fmt: skip
        assert text in seen, (text, seen)
    assert any("A footnote." in text for text in seen)
    assert rows(document) == [("Part | Days", "Filter | 7"), ("Part | Days", "Filter | 9")]
    assert [(f.caption, f.link, f.heading) for f in document.figures] == [
        ("The pump.", "pump.png", "Pumps > Data"),
        ("A red pump", "red.png", "Pumps > Data"),
    ]
    assert document.left_out == {
        "comments": len("hiddenwords"), "alternative texts beside captions": len("photo")
    }  # fmt: skip
    assert not any("root" in text or "System Message" in text for text in seen)


def test_a_caption_of_several_paragraphs():
    caption = "<figcaption><p>One.</p><p>Two.</p></figcaption>"
    document = html(f"<figure><img src=a.png>{caption}</figure>")
    assert texts(document) == []
    assert [f.caption for f in document.figures] == ["One. Two."]


# Books


def book(chapters: dict[str, bytes], metadata: str = "<dc:title>A &amp; B</dc:title>") -> bytes:
    """An EPUB of these files; those that end in .xhtml are its chapters, in order."""
    names = [name for name in chapters if name.endswith(".xhtml")]
    items = "".join(
        f'<item id="{n}" href="{n}" media-type="application/xhtml+xml"/>' for n in names
    )
    order = "".join(f'<itemref idref="{name}"/>' for name in names if "outside" not in name)
    container = '<rootfiles><rootfile full-path="OPS/p.opf"/></rootfiles>'
    package = (
        f'<package xmlns="o" xmlns:dc="d"><metadata>{metadata}</metadata>'
        f"<manifest>{items}</manifest><spine>{order}</spine></package>"
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("META-INF/container.xml", f'<container xmlns="c">{container}</container>')
        archive.writestr("OPS/p.opf", package)
        for name, content in chapters.items():
            archive.writestr(name.removeprefix("/") if "/" in name else f"OPS/{name}", content)
    return packed.getvalue()


def test_a_book():
    xhtml = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">'
    document = read_epub(
        book({
            "2.xhtml": f"{xhtml}<head><title/><script src='x'/></head><body><h1>Two<a id='t'/></h1>"
            "<p>caf&eacute;&nbsp;x</p><img src='p%20p.png' alt='The pump'/></body></html>".encode(),
            "1.xhtml": b"<html><head><title>One</title></head><body><p>not closed<br>here</html>",
            "p p.png": picture(),
            "outside.xhtml": f"{xhtml}<body><p>hidden</p></body></html>".encode(),
        })
    )  # fmt: skip
    assert document.title == "A & B"
    assert texts(document) == [("Two", "café x"), ("Two", "not closed here")]
    (figure,) = document.figures
    assert (figure.caption, figure.picture, figure.link) == ("The pump", picture(), "")
    assert document.left_out == {"titles of parts": 3, "parts outside the reading order": 6}


# Mails


def test_a_mail():
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = "Fähre", "Ada <ada@x.org>", "bo@x.org"
    mail["Date"] = "Fri, 03 May 2024 10:00:00 +0000"
    mail.set_content("The ferry.\n\nAt eight.")
    markup = "<p>The <b>ferry</b> leaves.</p><img src='cid:map' alt='The map'><p>At eight."
    mail.add_alternative(markup, subtype="html")
    mail.get_payload()[1].add_related(picture(), "image", "png", cid="<map>")
    mail.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="plan.pdf")
    mail.add_attachment(picture("blue"), maintype="image", subtype="png", filename="quay.png")
    forwarded = EmailMessage()
    forwarded["Subject"] = "Re: Fähre"
    forwarded.set_content("Tide at nine.")
    mail.add_attachment(forwarded)
    document = read_eml(bytes(mail))
    assert document.title == "Fähre"
    assert texts(document) == [
        ("Fähre", "From: Ada <ada@x.org>; To: bo@x.org; Date: Fri, 03 May 2024 10:00:00 +0000"),
        ("Fähre", "The ferry leaves."),
        ("Fähre", "At eight."),
        ("Fähre", "Attachment: plan.pdf"),
        ("Fähre > Re: Fähre", "Tide at nine."),
    ]
    assert [(f.caption, f.picture) for f in document.figures] == [
        ("The map", picture()), ("quay.png", picture("blue")),
    ]  # fmt: skip
    assert document.left_out["the same text in another form"] == letters("The ferry. At eight.")


@pytest.mark.parametrize(
    ("head", "body", "text"),
    [
        ("Content-Type: text/plain; charset=ks_c_5601-1987", "뷁".encode("cp949"), "뷁"),
        ("Content-Type: text/plain; charset=gb2312", "镕".encode("gb18030"), "镕"),
        ("Content-Type: text/html; charset=klingon", b"<p>caf\xe9", "café"),
        ("Content-Type: text/plain; charset=klingon", "Öl <p>".encode(), "Öl <p>"),
        ("Content-Type: text/plain\nContent-Transfer-Encoding: base64", b"VGlkZQ==", "Tide"),
        ("Content-Type: multipart/mixed; boundary=none", b"Lost", "Lost"),
    ],
)
def test_mails_in_other_encodings(head, body, text):
    document = read_eml(f"Subject: S\n{head}\n\n".encode() + body)
    assert texts(document) == [("S", text)]


def outlook(properties: dict[int, str | bytes]) -> bytes:
    """A mail of Outlook's: a compound file with a stream for each property, in sectors of 512.

    [MS-CFB] has the format; each stream is padded to 4,096 bytes, so that none needs small sectors.
    """
    kinds = {n: 0x1F if isinstance(value, str) else 0x102 for n, value in properties.items()}
    table = bytes(32)
    for number, kind in kinds.items():
        table += struct.pack("<HHIQ", kind, number, 6, 0)
    streams = {"__properties_version1.0": table.ljust(4096, b"\0")} if properties else {}
    for number, value in properties.items():
        text = isinstance(value, str)
        data = value.ljust(2048).encode("utf-16-le") if text else value.ljust(4096)
        streams[f"__substg1.0_{number:04X}{kinds[number]:04X}"] = data
    end, free, none = 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFF
    entries = len(streams) // 4 + 1  # sectors of the directory, which follow the table of sectors
    table_of_sectors = [0xFFFFFFFD, *range(2, entries + 1), end]
    contents = b""
    directory = _entry("Root Entry", 5, none, 1 if streams else none, end, 0)
    for number, (name, data) in enumerate(streams.items(), start=1):
        sectors = -(-len(data) // 512)
        first = len(table_of_sectors)
        after = number + 1 if number < len(streams) else none
        directory += _entry(name, 2, after, none, first, len(data))
        table_of_sectors += [*range(first + 1, first + sectors), end]
        contents += data.ljust(512 * sectors, b"\0")
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    sizes = (62, 3, 0xFFFE, 9, 6, 0, 1, 1, 0, 4096, end, 0, end, 0, 0)
    head += struct.pack("<HHHHH6xIIIIIIIIII", *sizes)
    head += struct.pack("<108I", *[free] * 108)
    packed_table = struct.pack("<128I", *table_of_sectors, *[free] * (128 - len(table_of_sectors)))
    return head + packed_table + directory.ljust(512 * entries, b"\0") + contents


def _entry(name: str, kind: int, right: int, child: int, first: int, size: int) -> bytes:
    encoded = (name + "\0").encode("utf-16-le")
    about = struct.pack("<HBBIII", len(encoded), kind, 1, 0xFFFFFFFF, right, child)
    return encoded.ljust(64, b"\0") + about + bytes(36) + struct.pack("<IQ", first, size)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({0x1000: "The ferry.\r\n\r\nAt eight."}, ["The ferry.", "At eight."]),
        ({0x1000: "The ferry", 0x1013: b"<p>The <b>ferry</b>"}, ["The ferry"]),
        ({0x1013: "<p>The <b>ferry</b>"}, ["The ferry"]),
    ],
)
def test_a_mail_of_outlook(body, text):
    head = {0x001A: "IPM.Note", 0x0037: "Fähre", 0x0C1A: "Ada", 0x0E04: "Bo"}
    document = read_msg(outlook({**head, **body}))
    assert document.title == "Fähre"
    assert texts(document) == [("Fähre", t) for t in ("From: Ada; To: Bo", *text)]


# LaTeX


def tex(body: str):
    return read_tex(
        f"\\documentclass{{article}}\n\\begin{{document}}{body}\\end{{document}}".encode()
    )


def test_latex():
    document = read_tex(
        rb"""\documentclass{article} % a class
\newcommand{\model}{Pump-X}\newcommand{\R}{\mathbb{R}}
\title{On \model\ and\\ rivers} \author{Ada \and Bo}
\begin{document}
\maketitle
\begin{abstract}We measure.\end{abstract}
\section{Intro}\label{sec:intro}
The \model{} is \textbf{big}, see~\cite{knuth}. A \foo{thing} \& caf\'e \foo{x}{y}.
% hidden words
It weighs 5\,kg\footnote{Dry weight.}. ``Quoted'' --- a < b.

New: $x_i \in \R$, $\alpha^2 \leq \unknown$.
\begin{figure}[h]\includegraphics[width=3cm]{img/p.png}\caption{The pump.}\end{figure}
\subsection{Lists}
\begin{enumerate}\item first \item second\end{enumerate}
\begin{tabular}{|l|c|} \hline Part & Days \\ \hline
\multirow{2}{*}{Filter} & 7 \\ & 9 \\ \multicolumn{2}{c}{both} \\ \hline \end{tabular}
\begin{lstlisting}[language=C]
int main() { return a<b; }
\end{lstlisting}
\begin{tikzpicture}\draw (0,0);\end{tikzpicture}
\begin{theorem}[Big] All is well. \end{theorem}
\href{http://x.y}{link} \input{/etc/passwd}
\begin{thebibliography}{9}\bibitem{knuth} Knuth.\end{thebibliography}
\end{document}"""
    )
    assert document.title == "On Pump-X and rivers"
    title, intro = "On Pump-X and rivers", "On Pump-X and rivers > Intro"
    assert texts(document) == [
        (title, "Ada Bo"),
        (title, "We measure."),
        (intro, "The Pump-X is big, see [knuth]. A thing & café x y. It weighs 5 kg [Dry weight.]. “Quoted” — a < b."),
        (intro, "New: x_i ∈ℝ, α^2 ≤unknown."),
        (f"{intro} > Lists", "1. first"),
        (f"{intro} > Lists", "2. second"),
        (f"{intro} > Lists", "Filter | 7"),
        (f"{intro} > Lists", "Filter | 9"),
        (f"{intro} > Lists", "both"),
        (f"{intro} > Lists", "int main() { return a<b; }"),
        (f"{intro} > Lists", "Big All is well."),
        (f"{intro} > Lists", "link"),
        (f"{intro} > Lists", "[knuth] Knuth."),
    ]  # fmt: skip
    assert {header for header, _ in rows(document)} == {"Part | Days"}
    assert [(f.caption, f.link) for f in document.figures] == [("The pump.", "img/p.png")]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (r"\newcommand{\a}{\a\a x}\a", "x"),  # what grows without end in LaTeX
        (r"\begin{itemize}\item no end", "no end"),
        (r"$a & b", "a b"),
        (r"50\% of \$5", "50% of $5"),
        (r"\begin{verbatim}a<b", "a<b"),  # without its end
    ],
)
def test_odd_latex(body, text):
    assert [paragraph for _, paragraph in texts(tex(body))] == [text]


def test_latex_that_shows_latex():
    shown = r"\documentclass{article} \begin{document}x\end{document}"
    listing = rf"\begin{{lstlisting}}[language=TeX]{shown}\end{{lstlisting}}"
    paragraphs = texts(read_tex((listing + r"\captionof{table}{Pumps}").encode()))
    assert [text for _, text in paragraphs] == [shown, "Pumps"]


@pytest.mark.parametrize(
    ("read", "data", "reason"),
    [
        (read_plain, "é".encode("latin-1"), "save the file as UTF-8"),
        (read_plain, "é".encode("utf-16"), "save the file as UTF-8"),
        (read_html, picture(), "no HTML that can be read"),
        (read_json, b'{"a": 1', "the text, line 1, column 8"),
        (read_json, b'{"a": 1, "a": 2}', "key 'a' appears twice in one object"),
        (read_json_lines, b'{"a": 1}\n{"a"\n', "line 2: "),
        (read_notebook, b"{}", "no notebook that can be read"),
        (read_notebook, b"[", "no notebook that can be read"),
        (read_epub, b"PK\x03\x04", "no EPUB that can be read"),
        (read_epub, book({})[:-9], "no EPUB that can be read"),
        (read_epub, book({"/META-INF/rights.xml": b""}), "encrypted; save it without"),
        (read_eml, b"Some text.", "no mail: it has no header of one"),
        (read_msg, b"Some text.", "no mail of Outlook's that can be read"),
        (read_msg, outlook({}), "no mail of Outlook's that can be read"),
        (read_tex, b"\\documentclass{a}\\begin{document}" + b"{" * 20_000, "nested too deep"),
    ],
)
def test_files_that_cannot_be_read(read, data, reason):
    refuses(reason, read, data, error=DocumentError)
