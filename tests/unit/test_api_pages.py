"""launch/docs.sh: pdoc makes pages of the docstrings, and what stands in them is shown as meant."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
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
    """The pages of a few modules, by the command of launch/docs.sh."""
    folder = tmp_path_factory.mktemp("api")
    script = (ROOT / "launch/docs.sh").read_text()
    (line,) = [line for line in script.splitlines() if " -m pdoc " in line]
    python, *options, package = shlex.split(line.replace('"${1:-api}"', str(folder)))
    assert (python, package) == (".venv/bin/python", "mmqa_jax")
    # Any warning that docs.sh does not name is an error: of an import, a link, a docstring.
    command = [sys.executable, "-W", "error::UserWarning", *options, *MODULES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
def test_a_page_shows_names_sections_and_tables(pages):
    page = (pages / "mmqa_jax/papers/webqa.html").read_text("utf-8")
    assert {"answer_full_scale", "Reader"} <= set(re.findall(r'id="(\w+)"', page))
    schema = (pages / "mmqa_jax/data/schema.html").read_text("utf-8")
    assert "<strong>" in schema.partition("Attributes:")[2].partition("</ul>")[0]
    text = Text((pages / "mmqa_jax/evaluation/vqa.html").read_text("utf-8"))
    (table,) = [block for block in text.blocks if block.startswith("vqa_accuracy/official ")]
    assert len(table.strip().splitlines()) == 8
    assert (pages / "search.js").is_file()


def docstrings() -> Iterator[tuple[str, str]]:
    """Every public docstring of the package with its place, as pdoc reads it."""
    for path in sorted((ROOT / "mmqa_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name, text = getattr(node, "name", ""), ast.get_docstring(node, clean=False)
                if text and not name.startswith("_"):
                    yield f"{path.relative_to(ROOT)} {name}", inspect.cleandoc(text)


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
    assert [(place, *lines) for place, text in docstrings() if (lines := spoiled(text))] == []


def test_what_would_be_spoiled_is_found():
    text = "Files:\n\n    a\n\nA <s> here.\n\n- one\ntwo\n\nname     what\n\n    <s>    x\n\n`<s>` fine.\n"
    assert [line.partition(":")[0] for line in spoiled(text)] == [
        "a section that there is not",
        "a tag outside of backticks",
        "a list that takes in the next line",
        "a table that is not indented",
    ]
