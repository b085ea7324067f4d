"""launch/docs.sh: pdoc makes pages of the docstrings, and what stands in them is shown as meant."""

import inspect
import re
import shlex
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = {"Args", "Attributes", "Raises", "Returns", "Yields"}
MODULES = ("mmqa_jax.data.schema", "mmqa_jax.evaluation.vqa", "mmqa_jax.papers.webqa")


class Text(HTMLParser):
    """The text of a page, and that of its preformatted blocks."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.blocks, self._inside = "", [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "pre":
            self._inside = True
            self.blocks.append("")

    def handle_endtag(self, tag):
        if tag == "pre":
            self._inside = False

    def handle_data(self, data):
        self.text += data
        if self._inside:
            self.blocks[-1] += data


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    from pdoc.__main__ import cli

    folder = tmp_path_factory.mktemp("api")
    script = (ROOT / "launch/docs.sh").read_text()
    (line,) = [line for line in script.splitlines() if " -m pdoc " in line]
    *python, named, dash_m, pdoc, form, out, package = shlex.split(
        line.replace('"${1:-api}"', str(folder))
    )
    action, _, message = named.partition(":")
    assert (*python, action, dash_m, pdoc) == (".venv/bin/python", "-W", "ignore", "-m", "pdoc")
    assert package == "mmqa_jax"
    with warnings.catch_warnings():
        # Any warning that docs.sh does not name is an error: of an import, a link, a docstring.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message)
        cli([form, out, *MODULES])
    return folder


@pytest.mark.slow
def test_a_page_shows_names_sections_and_tables(pages):
    page = (pages / "mmqa_jax/papers/webqa.html").read_text("utf-8")
    assert {"answer_full_scale", "Reader"} <= set(re.findall(r'id="(\w+)"', page))
    schema = (pages / "mmqa_jax/data/schema.html").read_text("utf-8")
    assert "<strong>" in schema.partition("Attributes:")[2].partition("</ul>")[0]
    text = Text((pages / "mmqa_jax/evaluation/vqa.html").read_text("utf-8"))
    (table,) = [block for block in text.blocks if block.startswith("vqa_accuracy/official ")]
    assert len(table.strip().splitlines()) == 6
    assert (pages / "search.js").is_file()


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the package with its place; found by its quotes, as a parser takes seconds."""
    for path in sorted((ROOT / "mmqa_jax").rglob("*.py")):
        code = path.read_text("utf-8")
        for text in re.finditer(r'"""(.*?)"""', code, re.DOTALL):
            line = code.rfind("\n", 0, text.start()) + 1
            if not code[line : text.start()].strip():  # no value of a name, no argument
                number = code.count("\n", 0, line) + 1
                yield f"{path.relative_to(ROOT)}, line {number}", inspect.cleandoc(text[1])


def spoiled(text: str) -> list[str]:
    """Lines that Markdown would not show as they are written."""
    found, before = [], ""
    for title in re.findall(r"^([A-Z][A-Z a-z]+):\n+ ", text, re.M):
        if title not in SECTIONS:
            found.append(f"a section that there is not: {title}")
    for line in text.splitlines():
        if line.startswith("    "):  # as it is
            before = line
            continue
        in_list = re.match(r"(\s*)([-*]|\d+\.) ", before)
        if re.search(r"<[A-Za-z/]", re.sub(r"`[^`]*`", "", line)):
            found.append(f"a tag outside of backticks: {line}")
        if in_list and line.strip() and not re.match(r"\s|[-*] |\d+\. ", line):
            found.append(f"a list that takes in the next line: {line}")
        if re.match(r"\S+( \S+)* {3,}\S", line):
            found.append(f"a table that is not indented: {line}")
        before = line
    return found


def test_docstrings_are_shown_as_they_are_written():
    found = list(docstrings())
    assert len(found) > 5_000
    assert [(place, *lines) for place, text in found if (lines := spoiled(text))] == []


def test_what_would_be_spoiled_is_found():
    text = "Files:\n\n    a\n\nA <s> here.\n\n- one\ntwo\n\nname     what\n\n    <s>    x\n\n`<s>` fine.\n"
    assert [line.partition(":")[0] for line in spoiled(text)] == [
        "a section that there is not",
        "a tag outside of backticks",
        "a list that takes in the next line",
        "a table that is not indented",
    ]
