"""`mmqa prepare folder`: documents as a corpus, files that changed, and files that are wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import ROOT, done, succeeded, tree
from document_files import docx, docx_bomb, huge_png, pdf, picture

from mmqa_jax.data import folder
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.documents import document as readers
from mmqa_jax.data.documents.pdf import page_pictures
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

MANUAL = pdf(
    [
        [(20, 700, "Filters"), (10, 660, "Wash the filter every seven days."),
         (9, 300, "Figure 1. The filter from above.")],
        [(20, 700, "Pumps"), (10, 660, "The pump is on the left.")],
    ],
    {0: (320, picture(form="JPEG"))},
)  # fmt: skip


@pytest.fixture
def raw(tmp_path):
    """A folder with documents of several kinds and a picture that one of them shows."""
    raw = tmp_path / "raw"
    (raw / "sub").mkdir(parents=True)
    (raw / "manual.pdf").write_bytes(MANUAL)
    (raw / "notes.md").write_text("# Notes\nThe motor is new.\n![A red square](sub/red_1.png)\n")
    (raw / "page.HTML").write_text("<h1>Shop</h1><p>Open on Mondays.<script>alert(1)</script>")
    (raw / "word.docx").write_bytes(docx(lambda document: document.add_paragraph("From Word.")))
    (raw / "sub" / "red_1.png").write_bytes(picture())
    (raw / "sub" / "blue-sky.jpg").write_bytes(picture("blue", form="JPEG"))
    return raw


def prepare(raw: Path, *more: str) -> dict:
    return done("prepare", "folder", f"--raw={raw}", f"--out={raw.parent / 'out'}", *more)


def sources(raw: Path) -> dict:
    return {source.id: source for source in open_corpus(raw.parent / "out").sources}


def test_sources_of_a_folder(raw):
    result = prepare(raw)
    assert result["counts"] == {
        "sources": 8, "questions": 0, "pictures": 3, "broken_pictures": 0,
        "questions_without_sources": 0,
    }  # fmt: skip
    assert result["files"]["documents"], result["files"]["pictures"] == (4, 2)
    found = sources(raw)
    told = {name: (s.modality, s.title, s.text, s.extra["page"]) for name, s in found.items()}
    assert told == {
        "manual.pdf#1": ("text", "Filters", "Wash the filter every seven days.\n"
                         "Figure 1. The filter from above.", 1),
        "manual.pdf#2": ("text", "Pumps", "The pump is on the left.", 2),
        "manual.pdf#figure1": ("image", "Filters", "Figure 1. The filter from above.", 1),
        "notes.md#1": ("text", "Notes", "The motor is new.", None),
        "page.HTML#1": ("text", "Shop", "Open on Mondays.", None),
        "word.docx#1": ("text", "word", "From Word.", None),
        "sub/blue-sky.jpg": ("image", "sub", "blue sky", None),
        "sub/red_1.png": ("image", "Notes", "A red square", None),
    }  # fmt: skip
    extra = found["manual.pdf#2"].extra
    (place,) = extra.pop("places")
    size = extra.pop("page_size")
    assert size == [612, 792]
    assert extra == {"file": "manual.pdf", "page": 2, "heading": "Pumps"}
    assert (place["start"], place["end"]) == (0, len("The pump is on the left."))
    assert place["box"][0] == pytest.approx(72)  # points from the left, an inch
    corpus = open_corpus(raw.parent / "out")
    assert corpus.picture(corpus.row["sub/red_1.png"]) == picture()
    assert corpus.picture(corpus.row["manual.pdf#figure1"]) == picture(form="JPEG")


def test_only_what_changed_is_read_again(raw, monkeypatch):
    prepare(raw)
    before, first = tree(raw.parent / "out"), sources(raw)
    opened = []
    read_file = folder.read_file
    monkeypatch.setattr(
        "mmqa_jax.data.folder.read_file",
        lambda folder, name: opened.append(name) or read_file(folder, name),
    )
    result = prepare(raw, "--overwrite")
    assert (opened, result["files"]["opened"]) == ([], 0)
    assert tree(raw.parent / "out") == before  # nothing is written

    (raw / "notes.md").write_text("# Notes\nThe motor is old.\n")
    os.utime(raw / "page.HTML", ns=(1, 1))  # touched, and the same
    result = prepare(raw, "--overwrite")
    assert set(opened) == {"notes.md", "page.HTML", "sub/blue-sky.jpg", "sub/red_1.png"}
    assert result["files"]["opened"] == 1  # pictures are copied, and only the text is read
    changed = {name for name, source in sources(raw).items() if first.get(name) != source}
    assert changed == {"notes.md#1", "sub/red_1.png"}

    (raw / "notes.md").unlink()
    prepare(raw, "--overwrite")
    assert "notes.md#1" not in sources(raw)


def test_damage_of_what_is_kept_is_repaired(raw):
    prepare(raw)
    first = sources(raw)
    kept = raw.parent / "out" / "read"
    (kept / "files.json").write_text('{"files": 3}')
    for file in (kept / "documents").glob("*-*.jsonl"):
        file.write_bytes(file.read_bytes().replace(b"filter", b"filtre"))
    (raw / "new.txt").write_text("New.")
    assert prepare(raw, "--overwrite")["files"]["opened"] >= 2
    assert {**first, "new.txt#1": sources(raw)["new.txt#1"]} == sources(raw)


def test_what_is_kept_of_files_that_are_gone_is_removed(raw, monkeypatch):
    monkeypatch.setattr(folder, "_SPARE", 10)
    for number in range(20):
        for file in ("a", "b"):
            (raw / f"{file}.txt").write_text(f"{file} {number}")
        prepare(raw, "--overwrite")
    kept = raw.parent / "out" / "read" / "documents"
    assert sum(file.read_bytes().count(b'{"results": ') for file in kept.glob("*-*.jsonl")) < 35


def test_two_files_of_the_same_text_are_one_source(raw):
    (raw / "copy of notes.txt").write_text("The motor is new.")
    (raw / "sub" / "zz.png").write_bytes(picture())
    files = prepare(raw)["files"]
    assert files["same_content"] == {
        "notes.md": "copy of notes.txt", "sub/zz.png": "sub/red_1.png",
    }  # fmt: skip
    found = sources(raw)
    assert found["copy of notes.txt#1"].extra["same_as"] == ["notes.md"]
    assert "notes.md#1" not in found


BAD = {
    "bomb.docx": (docx_bomb(3 * 2**23), "unpacks to 25,"),
    "huge.png": (huge_png(30_000), "900000000 pixels"),
    "locked.pdf": (pdf([[(10, 700, "Secret.")]], encrypted=True), "encrypted"),
    "nothing.pdf": (b"", "empty"),
    "broken.pdf": (MANUAL[:60], "no PDF that can be read"),
    "scan.pdf": (pdf([[], []], {0: (9, picture(form="JPEG"))}), "no text: 1 scanned page"),
    "blank.pdf": (pdf([[]]), "no text"),
    "latin.txt": (b"caf\xe9", "not UTF-8 text"),
    "no picture.webp": (b"text", "not a picture that can be decoded"),
    "spaces.md": (b" \n", "no text"),
}


def test_bad_files_are_named_and_the_others_kept(raw):
    for name, (data, _) in BAD.items():
        (raw / name).write_bytes(data)
    (raw / "half.pdf").write_bytes(pdf([[(10, 700, "Typed.")], []], {1: (9, picture(form="JPEG"))}))
    (raw / "movie.mp4").write_bytes(b"x")
    (raw / ".git").mkdir()
    ended = succeeded("prepare", "folder", f"--raw={raw}", f"--out={raw.parent / 'out'}", "--json")
    files = ended.value["files"]
    assert files["bad"].keys() == BAD.keys()
    for name, (_, reason) in BAD.items():
        assert reason in files["bad"][name], name
    assert files["scanned_pages"] == {"half.pdf": [2]}
    assert (files["left_out"], files["hidden"]) == ({".mp4": 1}, 1)
    assert "10 files are left out: blank.pdf: no text; " in ended.err
    assert "1 scanned page is without text, and not read: half.pdf (1)" in ended.err
    assert "1 files of other kinds are not read: 1 .mp4" in ended.err
    assert "half.pdf#1" in sources(raw)
    # A later call says the same without opening them again.
    assert prepare(raw, "--overwrite")["files"] == {**files, "opened": 0}


def test_links_pipes_and_unreadable_files(raw, tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("Outside.")
    (raw / "out.txt").symlink_to(secret)
    (raw / "folder").symlink_to(tmp_path)
    (raw / "sub" / "loop").symlink_to(raw)
    (raw / "self.txt").symlink_to(raw / "self.txt")
    os.mkfifo(raw / "pipe.txt")
    (raw / "private.txt").write_text("Private.")
    opened = os.open

    def denied(path, *arguments, **more):
        if Path(path).name == "private.txt":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(folder.os, "open", denied)
    bad = prepare(raw)["files"]["bad"]
    link = "a symbolic link, which is not followed; copy the file into the folder"
    assert bad == {
        "out.txt": link, "folder": link, "sub/loop": link, "self.txt": link,
        "pipe.txt": "a pipe, device or socket, not a file",
        "private.txt": "cannot be read (Permission denied)",
    }  # fmt: skip
    assert not any("Outside" in source.text for source in sources(raw).values())


def huge(path):
    path.touch()
    os.truncate(path, folder.MOST_BYTES + 1)  # a hole


@pytest.mark.parametrize(
    ("become", "message"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "^cannot be read"),
        (os.mkfifo, "^no longer a file$"),
        (Path.touch, "^empty$"),
        (huge, f"^.* bytes, more than the {folder.MOST_BYTES:,} of a file; split it"),
    ],
)
def test_what_a_file_has_become_when_it_is_read(tmp_path, become, message):
    become(tmp_path / "a.txt")
    refuses(message, folder.read_file, tmp_path, "a.txt", error=folder.DocumentError)


def test_names_that_are_no_text(raw):
    Path(os.fsdecode(os.fsencode(raw) + b"/caf\xe9.txt")).write_text("Latin name.")
    (raw / "two\nlines.txt").write_text("Lines.")
    bad = prepare(raw)["files"]["bad"]
    assert bad == dict.fromkeys(
        ("caf\\xe9.txt", "two\nlines.txt"), "its name is no plain text; rename it"
    )


def test_folders_that_give_nothing_are_refused(refused, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    flags = ("prepare", "folder", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    refused(*flags, message="no documents and no pictures; put .txt .md .html .htm .pdf .docx")
    (raw / "a.zip").write_bytes(b"x")
    refused(*flags, message=r"no documents and no pictures \(but 1 \.zip\)")
    (raw / "a.pdf").write_bytes(b"x")
    refused(*flags, message="its only file cannot be read: a.pdf: no PDF that can be read")
    (raw / "b.txt").write_bytes(b"\xe9")
    refused(*flags, message="none of its 2 files can be read, the first one, a.pdf: no PDF")
    refused(*flags, "--chunk_words=9", message="--chunk_words=9: at least 10 was expected")
    refused(
        "prepare", "corpus", *flags[2:], "--chunk_words=50", message="only `mmqa prepare folder`"
    )


def test_a_missing_library_is_named_with_the_remedy(refused, raw, monkeypatch):
    find = readers.importlib.util.find_spec
    monkeypatch.setattr(
        readers.importlib.util, "find_spec", lambda name: None if name == "lxml" else find(name)
    )
    message = r"\.docx: needs the package lxml; install it with `pip install"
    refused("prepare", "folder", f"--raw={raw}", f"--out={raw.parent / 'out'}", message=message)


def test_an_interchange_folder_is_read_as_one(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "sources.jsonl").write_text(json.dumps({"id": "s", "modality": "text", "text": "T."}))
    (raw / "other.txt").write_text("Not a source.")
    prepare(raw)
    assert list(sources(raw)) == ["s"]


def test_the_corpus_may_lie_in_the_folder_itself(raw):
    flags = ("prepare", "folder", f"--raw={raw}", f"--out={raw / 'corpus'}")
    first = done(*flags)
    assert done(*flags, "--overwrite")["fingerprint"] == first["fingerprint"]


def test_chunks_of_another_length(raw):
    (raw / "long.txt").write_text("One two three four five. " * 10)
    prepare(raw, "--chunk_words=10", "--chunk_overlap=0")
    found = [source for name, source in sources(raw).items() if name.startswith("long.txt")]
    assert [len(source.text.split()) for source in found] == [10] * 5


def test_a_kill_while_reading_loses_nothing(raw):
    for number in range(30):
        (raw / f"{number}.txt").write_text(f"Text {number}.")
    script = """
import os, sys
from pathlib import Path
from mmqa_jax.data import folder
from mmqa_jax.runs.corpora import prepare
left = int(sys.argv[3])
def dying(place, name, read=folder.read_file):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    return read(place, name)
folder.read_file = dying
prepare("folder", Path(sys.argv[1]), Path(sys.argv[2]), overwrite=True)
"""
    out = raw.parent / "out"
    command = [sys.executable, "-c", script, str(raw), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([*command, "20"], env=environment, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert not (out / "corpus.json").exists()
    result = prepare(raw)
    # What the killed one had read is not read again, except for what boxes still had.
    assert (
        36 - 20 <= result["files"]["opened"] <= 36 - 20 + folder._AHEAD * folder._MOST_WORKERS // 4
    )
    assert len(sources(raw)) == 8 + 30


def test_pages_as_pictures(raw):
    """In place of a PDF's text, or beside it; other documents stay as they are."""
    text = {*_sources_of(raw, "--pages=text")}
    pages = _sources_of(raw, "--overwrite", "--pages=pictures")
    assert {*pages} == {name for name in text if not name.startswith("manual.pdf")} | {
        "manual.pdf#page1", "manual.pdf#page2",
    }  # fmt: skip
    second = pages["manual.pdf#page2"]
    assert (second.modality, second.text, second.title) == ("image", "", "Pumps")
    assert {key: second.extra[key] for key in ("file", "page", "heading", "whole_page")} == {
        "file": "manual.pdf", "page": 2, "heading": "Pumps", "whole_page": True,
    }  # fmt: skip
    corpus = open_corpus(raw.parent / "out")
    shown = [corpus.picture(corpus.row[f"manual.pdf#page{n}"]) for n in (1, 2)]
    assert shown == [page.picture for page in page_pictures(MANUAL)]
    assert {*_sources_of(raw, "--overwrite", "--pages=both")} == text | {*pages}


def test_pages_are_drawn_once(raw, monkeypatch):
    drawn = []
    boxed = folder._boxed

    def counted(free, data, ending, function, request):
        if function == "pages":
            drawn.append(len(data))
        return boxed(free, data, ending, function, request)

    monkeypatch.setattr(folder, "_boxed", counted)
    assert prepare(raw)["files"]["pages"] == 0
    files = prepare(raw, "--overwrite", "--pages=pictures")["files"]
    assert (files["pages"], files["opened"]) == (2, 1)  # the PDF alone, for its pages
    before = tree(raw.parent / "out")
    assert prepare(raw, "--overwrite", "--pages=pictures")["files"]["opened"] == 0
    assert tree(raw.parent / "out") == before
    assert prepare(raw, "--overwrite")["files"]["opened"] == 0
    assert prepare(raw, "--overwrite", "--pages=both")["files"]["opened"] == 0
    assert drawn == [len(MANUAL)]


def test_a_scanned_pdf_is_read_by_its_pages(raw, monkeypatch):
    monkeypatch.setattr(folder.ocr, "is_installed", lambda: False)
    scan = {0: (100, picture("blue", form="JPEG"))}
    (raw / "scan.pdf").write_bytes(pdf([[]], scan))
    assert "install 'mmqa-jax[ocr]'" in prepare(raw)["files"]["bad"]["scan.pdf"]
    files = prepare(raw, "--overwrite", "--pages=both")["files"]
    assert (files["bad"], files["scanned_pages"], files["pages"]) == ({}, {}, 3)
    assert sources(raw)["scan.pdf#page1"].title == "scan"


def test_pages_of_what_has_none_are_refused(refused, tmp_path):
    (tmp_path / "sources.jsonl").write_text('{"id": "a", "modality": "text", "text": "b"}\n')
    flags = (f"--raw={tmp_path}", f"--out={tmp_path / 'out'}", "--pages=both")
    refused("prepare", "folder", *flags, message=r"has sources\.jsonl.*leave --pages out")
    refused("prepare", "corpus", *flags, message="only `mmqa prepare folder` takes them")


def _sources_of(raw: Path, *more: str) -> dict:
    prepare(raw, *more)
    return sources(raw)
