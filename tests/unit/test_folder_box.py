"""Files of a folder that take too much, crash their parser or change: each named, the rest read."""

import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from document_files import docx, pdf, picture
from PIL import Image

from mmqa_jax.core.box import Budget
from mmqa_jax.data import boxed_documents, folder
from mmqa_jax.data.documents import document
from mmqa_jax.data.documents.document import DocumentError, Paragraph, Place
from mmqa_jax.data.folder import FolderOptions, read_folder

pytestmark = pytest.mark.slow

PLAIN = "The pump stands on the left."


@pytest.fixture
def files(tmp_path):
    """Reads a folder with these files and a plain text; its content."""

    def read_files(**contents: bytes):
        (tmp_path / "raw").mkdir(exist_ok=True)
        for name, data in {"plain_txt": PLAIN.encode(), **contents}.items():
            (tmp_path / "raw" / name.replace("_", ".")).write_bytes(data)
        content = read_folder(tmp_path / "raw", tmp_path / "kept", FolderOptions())
        assert PLAIN in [source.text for source in content.sources]
        return content

    return read_files


def form_loop() -> bytes:
    """A PDF with a form that draws itself twice."""
    form = b"/Fm Do /Fm Do"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R "
        b"/Resources << /XObject << /Fm 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(form), form),
        b"<< /Type /XObject /Subtype /Form /BBox [0 0 99 99] /Length %d "
        b"/Resources << /XObject << /Fm 5 0 R >> >> >>\nstream\n%s\nendstream" % (len(form), form),
    ]
    content = b"".join(b"%d 0 obj\n%s\nendobj\n" % (n, o) for n, o in enumerate(objects, start=1))
    return b"%PDF-1.4\n" + content + b"trailer << /Root 1 0 R /Size 6 >>\n%%EOF\n"


def wide_cell() -> bytes:
    """A Word file with a cell that claims two billion columns."""

    def fill(made):
        cell = made.add_table(1, 1).cell(0, 0)
        cell.text = "Wide."
        cell._tc.get_or_add_tcPr().get_or_add_gridSpan().val = 2_000_000_000

    return docx(fill)


def deep_picture() -> bytes:
    """A PNG of 31 million gray pixels, cut short: it is decoded to know whether it can be."""
    packed = io.BytesIO()
    Image.new("I;16", (5600, 5600)).save(packed, "PNG")
    return packed.getvalue()[:-20]


# Documents that a parser without a budget does not come back from, or not on a small machine.
HOSTILE = {
    "form_pdf": form_loop(),
    "wide_docx": wide_cell(),
    "deep_html": b"<div>" * 200_000 + b"deep",
    "long_html": b"<h1>" + b"Long heading. " * 9_000 + b"</h1>" + b"<h2>x</h2><p>y" * 15_000,
    "path_md": b"".join(b"%s %s\n\ntext\n\n" % (b"#" * n, b"a " * 20_000) for n in range(1, 7)),
    "spaces_md": b"# " + b" " * 300_000 + b"#x",
    "cells_html": b"<table><tr><td colspan=2000000000 rowspan=2000000000>a" + b"<tr><td>b" * 9,
}


# Reads a folder in a process of its own: the peak memory of a child begins at that of the process
# that starts it, and a test worker that has run models is larger than what is measured here.
READ = """
import json, resource, sys
from pathlib import Path
from mmqa_jax.data.documents import document
from mmqa_jax.data.folder import FolderOptions, read_folder
document._SECONDS = 1
content = read_folder(*map(Path, sys.argv[1:]), FolderOptions())
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "seconds": children.ru_utime + children.ru_stime,
    "kib": children.ru_maxrss,
    "texts": [[source.title, source.text] for source in content.sources],
    "bad": content.report.bad,
}))
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_within_its_budget_and_the_others_are_read(tmp_path, name):
    (tmp_path / "raw").mkdir()
    for each, data in (("plain.txt", PLAIN.encode()), (name.replace("_", "."), HOSTILE[name])):
        (tmp_path / "raw" / each).write_bytes(data)
    command = [sys.executable, "-c", READ, tmp_path / "raw", tmp_path / "kept"]
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert PLAIN in [text for _, text in result["texts"]]
    assert result["seconds"] < 8
    assert result["kib"] < 1 << 20
    assert sum(len(title) + len(text) for title, text in result["texts"]) < 1 << 27
    for reason in result["bad"].values():
        assert reason.startswith(("it takes over", "it crashes", "over", "no ")), reason


@pytest.mark.parametrize(
    ("name", "data", "budget", "reason"),
    [
        ("deep_png", deep_picture(), Budget(memory=32 << 20), "it takes over 32 MiB of memory"),
        ("large_txt", b"Words. " * 9000, Budget(output=4096), "over 0 MiB come out of it"),
    ],
)
def test_a_file_over_its_budget_is_named_with_the_limit_and_not_tried_again(
    files, monkeypatch, name, data, budget, reason
):
    budget_of = lambda ending, size: budget if size > 100 else Budget()  # noqa: E731
    monkeypatch.setattr(folder, "budget_of", budget_of)
    report = files(**{name: data}).report
    assert report.bad == {name.replace("_", "."): reason}
    assert report.opened == 2
    again = files(**{name: data}).report
    assert (again.bad, again.opened) == (report.bad, 0)


def test_budgets_grow_with_the_file_and_end():
    small, large, huge = (document.budget_of(".pdf", size) for size in (0, 1 << 20, 1 << 40))
    assert small < large < huge
    assert small.seconds <= 3 < 1800 == huge.seconds
    assert small.memory < 1 << 30
    assert (
        document.budget_of(".txt", 1 << 20).seconds < large.seconds
    )  # a page of text has more bytes
    few, many = (document.budget_of_scans(pages, 1 << 14).seconds for pages in (3, 10**6))
    assert 45 <= few <= many <= 100  # some 3 seconds a page; a file that claims many has few


def test_a_parser_that_fails_is_named(files, monkeypatch):
    monkeypatch.setattr(folder, "READERS", {**document.READERS, ".odd": document.READERS[".txt"]})
    report = files(new_odd=b"Text.").report  # the child does not know the ending
    assert report.bad == {"new.odd": "its parser fails (KeyError: '.odd')"}


def test_documents_and_pictures_are_parsed_in_children_alone(files, monkeypatch):
    def here(*_):
        raise AssertionError("parsed in this process")

    for ending, reader in document.READERS.items():
        monkeypatch.setitem(document.READERS, ending, reader._replace(read=here))
    monkeypatch.setattr(boxed_documents, "verify", here)
    content = files(a_pdf=pdf([[(10, 700, "Typed.")]]), b_png=picture(), c_md=b"# H\n\nText.")
    ids = {source.id for source in content.sources}
    assert ids == {"a.pdf#1", "b.png", "c.md#1", "plain.txt#1"}


def test_an_interrupt_ends_the_boxes_at_once(files, monkeypatch):
    long = Budget(seconds=60, memory=8 << 30)
    monkeypatch.setattr(folder, "budget_of", lambda ending, size: long)
    threading.Timer(1.5, os.kill, (os.getpid(), 2)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        files(loop_pdf=form_loop())
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("changes", [1, 99])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, changes):
    """It is read again, so that what is kept was the file at one moment; one that always changes
    is named."""
    path, fstat = tmp_path / "log.txt", os.fstat
    path.write_text("begin")
    left = changes

    def changing(number):
        nonlocal left
        about = fstat(number)
        if left:
            left -= 1
            with path.open("a") as file:
                file.write(" more")
        return about

    monkeypatch.setattr(folder.os, "fstat", changing)
    if changes == 1:
        assert folder.read_file(tmp_path, "log.txt") == b"begin more"
    else:
        with pytest.raises(DocumentError, match=r"^it changes while it is read; try again"):
            folder.read_file(tmp_path, "log.txt")


# What is kept of a document.


def kept_of(monkeypatch, *paragraphs, **more):
    made = document.Document(paragraphs, **more)
    monkeypatch.setitem(document.READERS, ".txt", document.Reader(lambda data: made))
    return boxed_documents.text(b"", ".txt", 64)


def test_paragraphs_come_back_as_they_were_read(monkeypatch):
    row = Paragraph(
        "A | 5 W", "Pumps > Data", 2, True, "Model | Power",
        (Place(0, 3, "Sheet1!A2"), Place(4, 7, box=(1.5, 2.0, 3.0, 4.0))),
    )  # fmt: skip
    paragraphs = (Paragraph("Before."), row, Paragraph("After.", "Pumps", 3))
    kept, pictures = kept_of(monkeypatch, *paragraphs)
    headings = kept["headings"]
    assert tuple(folder._paragraph(headings, *row) for row in kept["paragraphs"]) == paragraphs
    assert pictures == []


def test_a_heading_that_is_too_long_or_deep_to_be_repeated_is_a_paragraph():
    long = "Long " * 100 + "end"
    content = document.Content()
    for level, heading in enumerate(("Guide", long, "Part")):
        content.enter(level, heading)
    content.add("Text.")
    content.enter(0, "Levels")
    for level in range(1, 14):
        content.enter(level, f"level {level}")
    content.add("Deep.")
    made = content.document()
    assert [(p.text, p.heading) for p in made.paragraphs[:2]] == [
        (long, "Guide"), ("Text.", "Guide > Part")
    ]  # fmt: skip
    levels = [f"level {n}" for n in range(1, 14)]
    assert [p.text for p in made.paragraphs[2:]] == [*levels[9:], "Deep."]
    assert made.paragraphs[-1].heading.count(" > ") == 9
    texts = ("Guide", long, "Part", "Text.", "Levels", *levels, "Deep.")
    assert made.letters_read == sum(map(document.letters, texts))
