"""Scanned pages that a vision-language model reads in place of RapidOCR (`--ocr`)."""

import base64
import contextlib
import hashlib
import json

import pytest
from cli_runs import done
from document_files import docx, pdf_of, picture
from openai_stub import Stub, error, said
from test_documents_pdf import STAMP, scan, write
from tiny_llm import write_folder, write_qwen_vl

from mmqa_jax.data.documents.document import letters
from mmqa_jax.data.documents.ocr import PageReader, PageText
from mmqa_jax.data.documents.pdf import page_pictures
from mmqa_jax.data.folder import FolderOptions, read_folder
from mmqa_jax.runs.page_reader import open_page_reader
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SCAN = "q 612 0 0 792 0 0 cm /I Do Q\n"
LINES = ("The crane is repaired every 17 weeks.", "Ask the harbour master.")
LETTER = pdf_of(
    [(write(72, 700, "The first page is text."), ""), (SCAN + STAMP, ""), (SCAN, "")],
    picture=scan(*LINES),
)


class Model:
    """A page reader that knows what pages say, and counts what it is asked.

    Args:
      said: digest of a page's picture -> what it says.
    """

    def __init__(self, said: dict[str, PageText], fingerprint: str = "a"):
        self._said, self.batches = said, []
        self.reader = PageReader("a model", fingerprint, self._opened)

    @contextlib.contextmanager
    def _opened(self):
        def read(pictures):
            self.batches.append(len(pictures))
            return [self._said[hashlib.sha256(one).hexdigest()] for one in pictures]

        yield read


def says(data: bytes, texts: dict[int, PageText]) -> dict[str, PageText]:
    drawn = {page.number: page.picture for page in page_pictures(data)}
    return {hashlib.sha256(drawn[number]).hexdigest(): text for number, text in texts.items()}


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "letter.pdf").write_bytes(LETTER)
    (tmp_path / "raw" / "note.docx").write_bytes(docx(lambda made: made.add_paragraph("A note.")))
    return tmp_path / "raw"


def read(raw, model: Model):
    return read_folder(raw, raw.parent / "kept", FolderOptions(ocr=model.reader))


def test_pages_are_read_once_and_placed_on_their_page(raw):
    """What the page has as text, a stamp, is not said again; every letter is in the ledger."""
    stamp = "HARBOUR-0001 received 3 May"
    model = Model(says(LETTER, {2: PageText(f"{LINES[0]}\n{stamp}\n\n---"), 3: PageText(LINES[1])}))
    content = read(raw, model)
    found = {source.id: source for source in content.sources}
    assert {name: source.text for name, source in found.items()} == {
        "letter.pdf#1": "The first page is text.",
        "letter.pdf#2": f"{stamp}\n{LINES[0]}",
        "letter.pdf#3": LINES[1],
        "note.docx#1": "A note.",
    }
    third = found["letter.pdf#3"].extra
    assert (third["page"], third["places"]) == (
        3,
        [{"start": 0, "end": len(LINES[1]), "box": [0, 0, 612, 792]}],
    )
    report = content.report
    row = report.ledger["letter.pdf"]
    all_letters = letters("The first page is text." + stamp + "".join(LINES))
    assert (row.read, row.held, row.missing) == (all_letters, all_letters, 0)
    assert (report.scanned_pages, report.broken_figures, report.opened) == ({}, {}, 2)

    again = read(raw, model)
    assert (again.digest, again.report.opened, model.batches) == (content.digest, 0, [2])
    other = Model(says(LETTER, {2: PageText(""), 3: PageText(LINES[0])}), "b")
    assert other.batches == []
    changed = read(raw, other)
    assert [source.text for source in changed.sources][1:3] == [stamp, LINES[0]]
    assert changed.report.scanned_pages == {"letter.pdf": [2]}


def test_pages_that_are_not_read_are_named_and_tried_again(raw):
    cut, none = PageText(LINES[0], "its first 9 tokens alone are read"), PageText("", "timed out")
    model = Model(says(LETTER, {2: cut, 3: none}))
    for batches in ([2], [2, 1]):
        report = read(raw, model).report
        assert report.scanned_pages == {"letter.pdf": [3]}
        assert report.broken_figures == {
            "letter.pdf": ["page 2: its first 9 tokens alone are read", "page 3: timed out"]
        }
        assert model.batches == batches


def test_pages_of_many_files_are_read_in_batches(raw, monkeypatch):
    monkeypatch.setattr("mmqa_jax.data.folder._BATCH", 3)
    said = says(LETTER, {2: PageText("Two."), 3: PageText("Three.")})
    for number in range(3):
        data = pdf_of([(SCAN, "")], picture=scan(f"Letter {number}"))
        (raw / f"{number}.pdf").write_bytes(data)
        said |= says(data, {1: PageText(f"Letter {number}")})
    model = Model(said)
    texts = [source.text for source in read(raw, model).sources]
    assert [text for text in texts if text.startswith("Letter")] == [
        "Letter 0",
        "Letter 1",
        "Letter 2",
    ]
    assert model.batches == [3, 2]


def test_a_tiny_model_reads_pages(tmp_path, monkeypatch):
    """Its letters are random; pages one by one, in a cache of their own, and together are alike."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reader = open_page_reader(str(write_qwen_vl(tmp_path / "vlm")))
    assert reader.fingerprint == open_page_reader(str(tmp_path / "vlm")).fingerprint
    pages = [picture("red"), picture("blue"), b"no picture"]
    with reader.open() as ask:
        together = ask(pages)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with reader.open() as ask:
        assert [*ask(pages[:1]), *ask(pages[1:2])] == together[:2]
    assert all(page.text for page in together[:2])
    assert together[2].text == ""
    assert "picture" in together[2].problem
    monkeypatch.setattr("mmqa_jax.runs.page_reader._MOST_TOKENS", 5)
    short = open_page_reader(str(tmp_path / "vlm"))
    with short.open() as ask:
        ((text, problem),) = ask(pages[:1])
    assert (together[0].text[:5], "its first 5 tokens alone are read") == (text, problem)
    assert short.fingerprint != reader.fingerprint


def test_a_scanned_letter_is_read_by_a_tiny_model(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vlm = write_qwen_vl(tmp_path / "vlm")
    command = ("prepare", "folder", f"--raw={raw}", f"--out={tmp_path / 'out'}", f"--ocr={vlm}")
    files = done(*command)["files"]
    assert (files["scanned_pages"], files["bad"]) == ({}, {})
    row = files["ledger"]["letter.pdf"]
    assert row["read"] == row["held"] > letters("The first page is text.")
    assert done(*command, "--overwrite")["files"]["opened"] == 0


def test_names_that_cannot_read_pages_are_refused(refused, raw, tmp_path):
    blind = write_folder(tmp_path / "llm")
    refuses(r"--ocr=.*llm: it cannot be asked about pictures; name", open_page_reader, str(blind))
    flags = (f"--raw={raw}", f"--out={tmp_path / 'out'}")
    refused("prepare", "folder", *flags, "--ocr=/nowhere", message="--ocr=/nowhere")
    refused("prepare", "folder", *flags, f"--ocr={blind}", message="cannot be asked about pictures")
    (raw / "sources.jsonl").write_text('{"id": "a", "modality": "text", "text": "b"}\n')
    vlm = write_qwen_vl(tmp_path / "vlm")
    refused("prepare", "folder", *flags, f"--ocr={vlm}", message=r"has sources\.jsonl.*leave --ocr")
    refused("prepare", "corpus", *flags, f"--ocr={vlm}", message="only `mmqa prepare folder`")


def test_a_server_reads_pages(tmp_path, monkeypatch):
    """It is shown the picture as it was drawn; a page that it fails on is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def reply(body):
        shown = json.dumps(body["messages"])
        return error(400, "too dark") if pictured("blue") in shown else said("A letter.")

    def pictured(color):
        return base64.b64encode(picture(color)).decode()

    with Stub(reply).serving() as stub:
        with open_page_reader("openai:tiny").open() as ask:
            texts = ask([picture("red"), picture("blue")])
        assert texts[0] == PageText("A letter.")
        assert texts[1].text == ""
        assert "too dark" in texts[1].problem
        assert len(stub.asked) == 2
