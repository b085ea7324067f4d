"""Rows of Hugging Face's data sets and of WebDataset's shards as a corpus."""

import io
import json
import tarfile

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tiny_llm import flag

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.formats.chats import conversation
from mmqa_jax.runs.corpora import prepare

RED, GRAY = flag().data, flag((9, 9, 9)).data
COLUMNS = "question=q,answers=a,choices=options,answer_index=label,image=img"
ROWS = [
    {"q": "Which?", "a": ["red"], "options": ["red", "gray"], "label": 0, "img": RED},
    {"q": "And this?", "a": ["gray"], "options": ["red", "gray"], "label": 1, "img": GRAY},
    {"q": "Without?", "a": [], "options": [], "label": None, "img": None},
]


def _encoded(row: dict) -> dict:
    image = row["img"] and {"bytes": row["img"], "path": None}
    return {**row, "img": image}


def saved(folder, rows=ROWS):
    """As `save_to_disk` leaves it, of two splits."""
    made = datasets.Dataset.from_list([_encoded(row) for row in rows])
    made = made.cast_column("img", datasets.Image())
    parts = {"train": made, "validation": made.select([0])}
    datasets.DatasetDict(parts).save_to_disk(str(folder))


def parquet(folder, rows=ROWS):
    """As on the hub."""
    (folder / "data").mkdir(parents=True)
    for name, own in (("train-00000", rows), ("validation-00000", rows[:1])):
        table = pyarrow.Table.from_pylist([_encoded(row) for row in own])
        pyarrow.parquet.write_table(table, folder / "data" / f"{name}.parquet", row_group_size=2)


def shards(folder, rows=ROWS):
    for name, own in (("train-0", rows), ("val-0", rows[:1])):
        members = {}
        for number, row in enumerate(own):
            texts = {key: row[key] for key in ("q", "a", "options", "label")}
            members[f"{name}/{number:06d}.json"] = json.dumps(texts).encode()
            if row["img"]:
                members[f"{name}/{number:06d}.PNG"] = row["img"]
        write_tar(folder / f"{name}.tar", members)


def write_tar(path, members):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize(
    ("kind", "write"), [("hf", saved), ("hf", parquet), ("webdataset", shards)]
)
def test_the_same_rows_are_the_same_questions(tmp_path, kind, write):
    write(tmp_path / "raw")
    columns = COLUMNS.replace("image=img", "image=png") if kind == "webdataset" else COLUMNS
    manifest = prepare(kind, tmp_path / "raw", tmp_path / "out", columns=columns)
    assert manifest["splits"] == {"train": 3, "val": 1}
    assert manifest["origin"]["left_out_rows"] == 0
    corpus = open_corpus(tmp_path / "out")
    found = corpus.questions("train")
    assert [
        {
            "q": question.question,
            "a": list(question.answers),
            "options": list(question.choices),
            "label": question.answer_index,
            "img": corpus.question_picture(question),
        }
        for question in found
    ] == ROWS


def test_conversations_with_a_column_of_pictures(tmp_path):
    """As TRL's data sets have them: parts without a name, and the pictures beside them; keys of
    other messages' parts are null."""
    user = [{"type": "image", "text": None}, {"type": "text", "text": "Which?"},
            {"type": "image", "text": None}]  # fmt: skip
    answer = [{"type": "text", "text": "Both."}]
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    images = [{"bytes": data, "path": None} for data in (RED, GRAY)]
    short = {"messages": messages, "images": images[:1]}
    rows = [{"messages": messages, "images": images}, short]
    (tmp_path / "raw").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "raw" / "train.parquet")
    columns = "messages=messages,image=images"
    manifest = prepare("hf", tmp_path / "raw", tmp_path / "out", columns=columns)
    assert manifest["origin"]["left_out_rows"] == 1
    assert (
        "row 1: `messages` show more pictures than the row has" in manifest["origin"]["reasons"][0]
    )
    corpus = open_corpus(tmp_path / "out")
    (question,) = corpus.questions("train")
    found = conversation(question.extra, "")
    assert [corpus.read_picture(name) for name in found.pictures] == [RED, GRAY]
    assert found.messages[1]["content"] == "Both."


def test_pictures_with_captions_are_sources(tmp_path):
    members = {"a.txt": b"A red flag.", "a.png": RED, "b.txt": b"Only words.", "c.png": RED}
    write_tar(tmp_path / "raw" / "0.tar", members)
    columns = "text=txt,image=png"
    manifest = prepare("webdataset", tmp_path / "raw", tmp_path / "out", columns=columns)
    corpus = open_corpus(tmp_path / "out")
    assert [(s.modality, s.text) for s in corpus.sources] == [
        ("image", "A red flag."), ("text", "Only words.")
    ]  # fmt: skip
    assert corpus.picture(0) == RED
    assert manifest["origin"]["left_out_rows"] == 1


def test_hostile_members_are_counted_and_named(tmp_path):
    """Paths out of the folder, a link, a broken picture, broken JSON; nothing is unpacked."""
    path = tmp_path / "raw" / "0.tar"
    good = {"a.json": b'{"q": "Good?"}', "a.png": RED}
    bad = {"../../e.json": b'{"q": "Out?"}', "/etc/f.json": b'{"q": "Out?"}', "b.json": b"{",
           "c.json": b'{"q": "Broken picture?"}', "c.png": b"no picture"}  # fmt: skip
    write_tar(path, {**good, **bad})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("d.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    columns = "question=q,image=png"
    manifest = prepare(
        "webdataset", tmp_path / "raw", tmp_path / "out", columns=columns, max_broken_pictures=1
    )
    reasons = " ".join(manifest["origin"]["reasons"])
    assert manifest["origin"]["left_out_rows"] == 4
    for name in ("../../e.json", "/etc/f.json", "'d.json' is a link", "sample 'b'"):
        assert name in reasons
    assert list(manifest["broken_pictures"]) == ["0.tar/c/0"]
    assert [q.question for q in open_corpus(tmp_path / "out").questions()] == [
        "Good?", "Broken picture?"
    ]  # fmt: skip


def test_a_member_that_is_too_large_is_not_read(tmp_path):
    """A sparse file on this disk, as large as its header says."""
    path = tmp_path / "raw" / "0.tar"
    write_tar(path, {"a.json": b'{"q": "Good?"}'})
    info = tarfile.TarInfo("huge.json")
    info.size = 10 * 2**30
    with path.open("r+b") as file:
        file.seek(1024)  # behind the first member
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(1024 + 512 + info.size + 1024)
    manifest = prepare("webdataset", path.parent, tmp_path / "out", columns="question=q")
    assert manifest["splits"] == {"train": 1}
    assert "huge.json: 10,737,418,240 bytes, more than" in manifest["origin"]["reasons"][0]


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("hf", None, "--columns: says what the columns of hf and webdataset are"),
        ("hf", "question", "--columns=question: 'question' is no ROLE=COLUMN"),
        ("hf", "asked=q", "'asked' is no ROLE=COLUMN"),
        ("hf", "image=img", "question, messages or text among them"),
        ("hf", "question=q,question=a", "each role once was expected"),
        ("hf", "question=nothing", "has no column nothing (it has"),
        ("webdataset", "question=q", "holds no tar shards (*.tar)"),
        ("corpus", "question=q", "leave it out"),
        ("hf", "question=label", "has no row that can be used; the first one left out"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, kind, columns, message):
    parquet(tmp_path / "raw")
    with pytest.raises(UserError) as error:
        prepare(kind, tmp_path / "raw", tmp_path / "out", columns=columns)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_split_of_another_name_is_refused(tmp_path):
    rows = datasets.Dataset.from_list([{"q": "Which?"}])
    datasets.DatasetDict({"train": rows, "holdout": rows}).save_to_disk(str(tmp_path / "raw"))
    with pytest.raises(UserError, match=r"its splits holdout are none of train, .*; rename them"):
        prepare("hf", tmp_path / "raw", tmp_path / "out", columns="question=q")
    assert not (tmp_path / "out").exists()
