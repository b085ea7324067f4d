"""`mmqa prepare`: a user's documents and WebQA's files, whole, broken and missing."""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runs import (
    FLAGS,
    QUESTIONS,
    TEST,
    done,
    mmqa,
    png,
    question,
    rows_of,
    succeeded,
    write_documents,
    write_rows,
)

from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.formats.webqa import ImagesTsv
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import Question
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever

pytestmark = pytest.mark.usefixtures("quiet")


def test_prepare_reports_what_it_wrote(data):
    corpus = open_corpus(data)
    assert len(corpus) == 11
    assert [q.id for q in corpus.questions("test")] == [row["id"] for row in TEST]
    assert corpus.manifest["counts"]["questions_without_sources"] == 1


# Documents


def test_missing_and_unknown_raw_folders(refused, tmp_path):
    out, raw = f"--out={tmp_path / 'out'}", tmp_path / "raw"
    raw.mkdir()
    for flags, message in (
        (["webqa"], r"--raw: name the folder with the files of webqa"),
        (["corpus", "--raw=nowhere"], r"--raw=nowhere: no such folder"),
        (["mmmu", f"--raw={__file__}"], r"\.py: is a file; give"),
        (["atlas", "--raw=x"], r"--raw: Atlas is made from installed"),
        (["corpus", "--raw=.", "--unanswerable"], r"--unanswerable: is a choice"),
        (["webqa", f"--raw={raw}"], r"WebQA_train_val\.json: no such file; put the official files"),
        (["corpus", f"--raw={raw}"], r"sources\.jsonl: no such file; check the path"),
    ):
        refused("prepare", *flags, out, message=message)


def test_bad_documents(refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    flags = ("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    text = (raw / "questions.jsonl").read_text()
    (raw / "questions.jsonl").write_text(text.replace('{"id": "train2"', '{"id" "train2"'))
    refused(*flags, message=r"questions\.jsonl, line 3: not valid JSON .*; every line must hold")
    (raw / "questions.jsonl").write_text(text.replace('"s-Gondal"', '"s-Gone"', 1))
    refused(*flags, message=r"questions\.jsonl, line 1: source 's-Gone' is not in sources\.jsonl")
    (raw / "sources.jsonl").write_bytes('{"id": "é"}'.encode("latin-1"))
    refused(*flags, message=r"sources\.jsonl: not UTF-8 text \(byte 8\); save the file as UTF-8")
    (raw / "sources.jsonl").write_text("\n")
    refused(*flags, message=r"sources\.jsonl: the corpus is empty; write one source per line")


def test_an_out_folder_that_holds_a_corpus_is_left_alone(refused, data, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS[:2])
    shutil.copytree(data, tmp_path / "out")
    out = f"--out={tmp_path / 'out'}"
    flags = ("prepare", "corpus", f"--raw={raw}", out)
    message = r"out: already holds a prepared corpus; name another folder or give --overwrite"
    refused(*flags, message=message)
    refused("prepare", "atlas", out, message=message)  # before anything is made
    assert done(*flags, "--overwrite")["splits"] == {"train": 2}
    assert len(open_corpus(tmp_path / "out").questions()) == 2


@pytest.mark.parametrize("out", ["file", "file/out"])
def test_an_out_folder_that_cannot_be_made(out, refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    (tmp_path / "file").write_text("")
    out = f"--out={tmp_path / out}"
    message = r"--out=.*file is no folder to write to; name another path"
    refused("prepare", "corpus", f"--raw={raw}", out, message=message)
    refused("prepare", "atlas", out, message=message)


@pytest.mark.parametrize(
    "fields",
    [{"question": "\ud83d?"}, {"answers": ["a", "\ude00"]}, {"id": "\ud83d"}, {"own": ["\ud83d"]}],
)
def test_half_a_character_is_named_with_its_line(fields, refused, tmp_path):
    raw = write_documents(tmp_path / "raw", [question(0, "test", "Hav", **fields)])
    flags = ("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    message = r"questions\.jsonl, line 1: holds '\\ud...', half of a character; write it whole"
    refused(*flags, message=message)


def test_a_document_whose_picture_is_missing(refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    (raw / "Borduria.png").unlink()
    message = r"sources\.jsonl, line 10: `image` 'Borduria\.png' is not a file in .*; add the"
    refused("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}", message=message)


def test_documents_whose_pictures_are_no_pictures_keep_their_words(tmp_path):
    raw = write_documents(tmp_path / "raw", [question(0, "test", "Hav", image="shot.jpg")])
    (raw / "Arvania.png").write_text("these are notes")
    (raw / "shot.jpg").write_bytes(b"")
    ended = succeeded("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    assert "2 pictures are broken and left out: Arvania.png, shot.jpg" in ended.err
    broken = ended.value["broken_pictures"]
    assert list(broken) == ["Arvania.png", "shot.jpg"]
    for name, reason in broken.items():
        assert re.fullmatch(rf"{name}: not a picture that can be decoded .*; give a PNG.*", reason)
    corpus = open_corpus(tmp_path / "out")
    lost, kept = (corpus.sources[corpus.row[name]] for name in ("p-Arvania", "p-Borduria"))
    assert (lost.modality, lost.text, lost.image) == ("image", "Flag of Arvania", None)
    assert corpus.picture(corpus.row[kept.id]) == png(FLAGS["Borduria"])
    (asked,) = corpus.questions("test")
    assert (asked.question, asked.image) == ("What is the capital of Hav?", None)


def test_too_many_broken_pictures_fail_the_run(refused, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    sources = rows_of(raw / "sources.jsonl")
    for name in range(11):  # ten may be broken, of so few
        (raw / f"{name}.png").write_text("these are notes")
        sources.append({"id": str(name), "modality": "image", "image": f"{name}.png"})
    write_rows(raw / "sources.jsonl", sources)
    ended = mmqa("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert (ended.code, ended.out) == (1, "")
    message = (
        r"mmqa: 11 pictures cannot be decoded, more than the 10 allowed "
        r"\(0\.png, .*10\.png\).*; fetch the picture files again.*\n"
    )
    assert re.fullmatch(message, ended.err), ended.err
    assert not (tmp_path / "out").exists()
    # The remedy is a flag that exists.
    (flag,) = re.findall(r"--\w+", ended.err)
    assert flag in mmqa("prepare", "--help").out
    flags = ("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    refused(*flags, f"{flag}=-1", message=rf"{flag}=-1: 0 or more was expected")
    assert len(done(*flags, f"{flag}=11")["broken_pictures"]) == 11


# WebQA's files

COLORS = {30000000: (255, 0, 0), 30000001: (0, 255, 0), 30000002: (0, 0, 255)}


@pytest.fixture
def webqa_raw(tmp_path):
    """WebQA's official files in small: one question over three pictures."""
    raw = tmp_path / "webqa"
    raw.mkdir()
    facts = [{"image_id": n, "caption": f"Caption {n}", "title": "T"} for n in COLORS]
    datum = {
        "Q": '"Is it red?"', "A": ['"Yes."'], "Keywords_A": '"yes"', "Qcate": "YesNo",
        "split": "val", "Guid": "g1", "img_posFacts": facts[:1], "img_negFacts": facts[1:],
        "txt_negFacts": [{"snippet_id": "g1_0", "fact": "Ice is cold.", "title": "Ice"}],
    }  # fmt: skip
    (raw / "WebQA_train_val.json").write_text(json.dumps({"g1": datum}, indent=1))
    write_pictures(raw, {n: png(color) for n, color in COLORS.items()})
    (raw / "ATTRIBUTION.txt").write_text("Pictures: nobody's.")  # no line break at its end
    return raw


def write_pictures(raw: Path, pictures: dict[int, bytes]) -> None:
    lines = [b"%d\t%s\n" % (n, base64.b64encode(data)) for n, data in pictures.items()]
    offsets = np.cumsum([0, *map(len, lines)])[:-1]
    (raw / "imgs.tsv").write_bytes(b"".join(lines))
    (raw / "imgs.lineidx").write_text("".join(f"{offset}\n" for offset in offsets))


def test_a_broken_picture_is_counted_and_named_and_the_run_goes_on(webqa_raw, tmp_path):
    pictures = {n: png(color) for n, color in COLORS.items()} | {30000001: b"no picture"}
    write_pictures(webqa_raw, pictures)
    ended = succeeded(
        "prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}", "--json"
    )
    assert list(ended.value["broken_pictures"]) == ["images/30000001"]
    assert ended.value["counts"]["broken_pictures"] == 1
    assert ended.value["counts"]["pictures"] == 2
    assert "Pictures: nobody's." in ended.out
    assert "1 picture is broken and left out: images/30000001" in ended.err
    corpus = open_corpus(tmp_path / "out")
    assert corpus.picture(corpus.row["30000001"]) is None
    assert corpus.picture(corpus.row["30000002"]) == pictures[30000002]
    # The caption still takes part.
    caption = corpus.sources[corpus.row["30000001"]].text
    found = BM25Retriever(corpus).search([Question("q", "val", caption)], 1)
    assert found[0].sources == ("30000001",)


def test_bad_official_files(webqa_raw, refused, tmp_path):
    flags = ("prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}")
    good = (webqa_raw / "WebQA_train_val.json").read_text()
    lines = good.splitlines()
    number = next(n for n, line in enumerate(lines) if '"Qcate"' in line)
    lines[number] = lines[number].replace(":", "")
    (webqa_raw / "WebQA_train_val.json").write_text("\n".join(lines))
    message = rf"WebQA_train_val\.json, line {number + 1}, .*not valid JSON .*; repair that line"
    refused(*flags, message=message)
    (webqa_raw / "WebQA_train_val.json").write_text("{}")
    refused(*flags, message=r"list no facts, so the corpus is empty; check the files")
    (webqa_raw / "WebQA_train_val.json").write_text(good)
    (webqa_raw / "imgs.lineidx").unlink()
    refused(*flags, message=r"imgs\.lineidx: no such file; fetch imgs\.tsv and imgs\.lineidx")
    (webqa_raw / "imgs.tsv").unlink()
    refused(*flags, message=r"imgs\.tsv: no such file; fetch imgs\.tsv and imgs\.lineidx")
    (webqa_raw / "imgs.tsv").write_bytes(b"")
    (webqa_raw / "imgs.lineidx").write_bytes(b"")
    refused(*flags, message=r"imgs\.tsv, row 0: .*has 0 rows; .*fetch them again")
    write_pictures(webqa_raw, {n: png(color) for n, color in COLORS.items()})
    (webqa_raw / "WebQA_train_val.json").write_text(good.replace("Is it red?", r"\ud83d"))
    message = r"WebQA_train_val\.json, line \d+, column \d+: holds '\\ud83d', half of a character"
    refused(*flags, message=message)
    (webqa_raw / "ATTRIBUTION.txt").write_bytes("Pictures: José's.".encode("latin-1"))
    refused(*flags, message=r"ATTRIBUTION\.txt: not UTF-8 text \(byte 13\); save the file as")


def test_a_cut_picture_file_costs_the_picture_in_the_cut(webqa_raw, tmp_path):
    tsv = webqa_raw / "imgs.tsv"
    tsv.write_bytes(tsv.read_bytes()[:-40])
    result = done("prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}")
    assert list(result["broken_pictures"]) == ["images/30000002"]
    reason = result["broken_pictures"]["images/30000002"]
    assert re.search(r"imgs\.tsv, row 2: broken base64 .*; fetch it again\.", reason)
    assert result["counts"]["pictures"] == 2


def test_what_a_user_may_not_expect_of_official_files_is_said(webqa_raw, tmp_path):
    path = webqa_raw / "WebQA_train_val.json"
    data = json.loads(path.read_text())
    # A guid with no sources, and a snippet id that is already another fact's.
    data["g2"] = {"Q": "Which?", "Qcate": "text", "split": "val", "Guid": "g2"}
    data["g3"] = {
        **data["g2"], "Guid": "g3", "split": "train",
        "txt_posFacts": [{"snippet_id": "g1_0", "fact": "Snow is white.", "title": "Snow"}],
    }  # fmt: skip
    path.write_text(json.dumps(data))
    ended = succeeded(
        "prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}", "--json"
    )
    assert "1 of 3 questions list no sources at all; kept" in ended.err
    assert "1 snippet ids are used for two facts; a number is appended to the later id" in ended.err
    assert re.search(r"│ train questions +│ +1 │ +36,766 │ +-36,765 │", ended.out)
    assert "Not the whole published release." in ended.out
    assert ended.value["counts"]["questions_without_sources"] == 1
    differences = ended.value["published_differences"]
    assert differences["pictures"] == {"published": 389_750, "found": 3}
    assert differences["snippets"] == {"published": 544_489, "found": 2}
    assert differences["val questions"] == {"published": 4_966, "found": 2}
    corpus = open_corpus(tmp_path / "out")
    snippets = {s.text for s in corpus.sources if s.modality == "text"}
    assert snippets == {"Ice is cold.", "Snow is white."}


@pytest.mark.slow
def test_a_killed_prepare_goes_on_with_the_same_bytes(webqa_raw, tmp_path, monkeypatch):
    flags = ["prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}"]
    program = (
        "import os, signal, sys\n"
        "from mmqa_jax.cli import main\n"
        "from mmqa_jax.data.records import corpus_records as records, picture_records\n"
        "from mmqa_jax.data.formats.webqa import ImagesTsv\n"
        "records.PICTURE_SHARD = 1\n"
        "picture_records.processors = lambda: 1\n"
        "read = ImagesTsv.read_named\n"
        "def read_named(self, name):\n"
        "    if name == 'images/30000002': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return read(self, name)\n"
        "ImagesTsv.read_named = read_named\n"
        f"main({flags!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    monkeypatch.setattr(corpus_records, "PICTURE_SHARD", 1)
    names, read = [], ImagesTsv.read_named
    noted = lambda self, name: names.append(name) or read(self, name)  # noqa: E731
    monkeypatch.setattr(ImagesTsv, "read_named", noted)
    done(*flags)
    assert names == ["images/30000002"]
    done(*flags[:-1], f"--out={tmp_path / 'whole'}")
    assert len(names) == 4
    resumed, whole = (
        {
            str(path.relative_to(folder)): path.is_file() and path.read_bytes()
            for path in folder.rglob("*")
        }
        for folder in (tmp_path / "out", tmp_path / "whole")
    )
    assert resumed == whole


def test_picture_files_of_another_release(webqa_raw, refused, tmp_path):
    flags = ("prepare", "webqa", f"--raw={webqa_raw}", f"--out={tmp_path / 'out'}")
    write_pictures(webqa_raw, {n: png(COLORS[n]) for n in (30000000, 30000001)})
    refused(*flags, message=r"imgs\.tsv, row 2: .*has 2 rows; .*fetch them again")
    write_pictures(webqa_raw, {n + 5: png(color) for n, color in COLORS.items()})
    refused(*flags, message=r"imgs\.tsv, row 0: .*do not belong together, fetch them again")
    assert not (tmp_path / "out").exists()
