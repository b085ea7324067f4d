"""Bring your own documents: interchange folders in and out, and what is wrong with bad ones."""

import dataclasses
import io
import itertools
import json
import os
import shutil
import tarfile

import pytest
from shared_data import SHARED, require

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.formats.interchange import read_interchange
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import PictureTar, decode
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.runs.corpora import prepare_interchange
from tests.pictures import plain
from tests.refusals import refuses

SOURCES = [
    {
        "id": "a",
        "modality": "text",
        "text": "Snow is white.\u2028Ice too.",
        "title": "Snow",
        "book": 1,
    },
    {"id": "b", "modality": "image", "text": "A red dot.", "image": "images/dot.png"},
    {"id": "c", "modality": "image", "text": "Its picture is lost.", "image": None},
]
QUESTIONS = [
    {
        "id": "q1",
        "split": "val",
        "question": "What color is snow?",
        "image": "images/dot.png",
        "answers": ["white", "It is white."],
        "keywords": "white",
        "category": "color",
        "positives": ["a"],
        "negatives": ["b", "c"],
        "choices": ["red", "white"],
        "answer_index": 1,
        "rationale": "Snow reflects all light.",
        "more_images": ["images/more.png"],
        "level": "easy",
    },
    {"id": "q2", "question": "And why?"},
]


def png(color=(255, 0, 0)):
    return plain(color, (4, 3))


def write(folder, sources=SOURCES, questions=QUESTIONS):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "dot.png").write_bytes(png())
    (folder / "images" / "more.png").write_bytes(png((0, 0, 9)))
    for name, rows in (("sources", sources), ("questions", questions)):
        if rows is not None:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def test_prepare_keeps_every_key(tmp_path):
    prepare_interchange(write(tmp_path / "in"), tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    assert corpus.sources == [
        Source("a", "text", "Snow is white.\u2028Ice too.", "Snow", extra={"book": 1}),
        Source("b", "image", "A red dot.", image="images/dot.png"),
        Source("c", "image", "Its picture is lost."),
    ]
    (q1,) = corpus.questions("val")
    assert q1 == Question(
        id="q1", split="val", question="What color is snow?", image="images/dot.png",
        answers=("white", "It is white."), keywords="white", category="color",
        positives=("a",), negatives=("b", "c"), choices=("red", "white"), answer_index=1,
        rationale="Snow reflects all light.", extra={"level": "easy"},
        more_images=("images/more.png",),
    )  # fmt: skip
    assert corpus.questions("test") == [Question("q2", "test", "And why?")]
    assert corpus.picture(1) == corpus.question_picture(q1) == png()
    assert corpus.read_picture(*q1.more_images) == png((0, 0, 9))
    assert corpus.picture(0) is corpus.picture(2) is None
    assert corpus.manifest["name"] == "in"


def test_pictures_from_a_tar(tmp_path):
    folder = write(tmp_path / "in")
    (folder / "images" / "dot.png").unlink()
    with tarfile.open(folder / "images.tar", "w") as tar:
        for name, data in (("./images/other.png", png((0, 0, 9))), ("./images/dot.png", png())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert read_interchange(folder).read_picture("images/dot.png") == png()
    (folder / "images.tar").write_bytes(b"no tar at all" * 100)
    refuses(r"images\.tar: not an uncompressed tar", read_interchange, folder)


def source(**change):
    return [*SOURCES, {"id": "x", "modality": "text", "text": "t", **change}]


def question(**change):
    return [QUESTIONS[1], {"id": "x", "question": "q", **change}]


@pytest.mark.parametrize(
    ("sources", "questions", "message"),
    [
        ([], None, r"sources\.jsonl: the corpus is empty"),
        ([3], None, r"sources\.jsonl, line 1: not a JSON object"),
        (source(id="a"), None, r"line 4: id 'a' is already used in .*sources\.jsonl, line 1"),
        (source(id=None), None, r"line 4: `id` is missing"),
        (source(id=7), None, r"line 4: `id` is 7; expected a string"),
        (source(modality="video"), None, r"line 4: `modality` is 'video'; expected text or image"),
        (source(text=""), None, r"line 4: `text` is ''"),
        (source(modality="image"), None, r"line 4: `image` is missing"),
        (source(image="images/dot.png"), None, r"line 4: a source of modality text has an `image`"),
        (
            source(modality="image", image="images/none.png"),
            None,
            r"sources\.jsonl, line 4: `image`",
        ),
        (source(modality="image", image="../dot.png"), None, r"line 4: .* is outside the folder"),
        (SOURCES, question(id="q2"), r"questions\.jsonl, line 2: id 'q2' is already used"),
        (SOURCES, question(question=" "), r"line 2: `question` is ' '"),
        (SOURCES, question(positives=["z"]), r"line 2: source 'z' is not in sources\.jsonl"),
        (SOURCES, question(negatives="a"), r"line 2: `negatives` is 'a'; expected a list"),
        (SOURCES, question(positives=["a"], negatives=["a"]), r"line 2: source 'a' is both"),
        (SOURCES, question(split="dev"), r"line 2: `split` is 'dev'; expected train or val or"),
        (SOURCES, question(answer_index=0), r"line 2: `answer_index` needs `choices`"),
        (SOURCES, question(choices=["a"] * 27), r"line 2: `choices` are 27; 26 at most"),
        (SOURCES, question(choices=["a"] * 26, answer_index=26), r"line 2: `answer_index` is 26;"),
        (SOURCES, question(choices=["a", "b"], answer_index=2), "`answer_index` is 2; .* 0 to 1"),
        (SOURCES, question(choices=["a"], answer_index=True), r"line 2: `answer_index` is True"),
        (SOURCES, question(image="none.png"), r"line 2: `image` 'none\.png' is not a file"),
        (SOURCES, question(more_images=["none.png"]), r"line 2: `more_images` 'none\.png' is not"),
    ],
)
def test_bad_folders_are_named_with_their_line(tmp_path, sources, questions, message):
    refuses(message, read_interchange, write(tmp_path, sources, questions))


def test_what_lies_outside_the_folder_is_not_read(tmp_path):
    """By a link to a file, a linked folder, a chain of links; links within the folder are fine."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(png())
    folder = write(tmp_path / "in", source(modality="image", image="images/link.png"), None)
    link = folder / "images" / "link.png"
    out = r"sources\.jsonl, line 4: `image` '.*' is a symbolic link that leads out of the folder; copy"
    for target in (outside / "secret.png", "../../outside/secret.png", "/etc/passwd"):
        link.symlink_to(target)
        refuses(out, read_interchange, folder)
        link.unlink()
    link.symlink_to("dot.png")
    assert read_interchange(folder).read_picture("images/link.png") == png()
    (folder / "more").symlink_to(outside)
    link.unlink()
    link.symlink_to("../more/secret.png")
    refuses(out, read_interchange, folder)
    write(folder, source(modality="image", image="more/secret.png"), None)
    refuses(out, read_interchange, folder)
    for name in ("sources.jsonl", "questions.jsonl", "images.tar"):
        write(folder)
        (folder / name).unlink(missing_ok=True)
        (outside / name).write_text('{"id": "a", "modality": "text", "text": "t"}\n')
        (folder / name).symlink_to(outside / name)
        refuses(rf"in/{name} is a symbolic link that leads out of", read_interchange, folder)
        (folder / name).unlink()


def with_members(folder, *members):
    write(folder, source(modality="image", image="images/x.png"), None)
    with tarfile.open(folder / "images.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))
    return folder


def test_members_of_the_tar_that_hold_no_picture(tmp_path):
    for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "images/dot.png")):
        member = tarfile.TarInfo("images/x.png")
        member.type, member.linkname = kind, target
        with pytest.raises(UserError, match=r"'images/x\.png' is a link or a sparse file"):
            read_interchange(with_members(tmp_path / str(kind), (member, b"")))
    # A sparse member: 8 GiB of which 512 bytes are in the file (the header's old GNU fields).
    member = tarfile.TarInfo("images/x.png")
    member.size = 512
    folder = with_members(tmp_path / "sparse", (member, bytes(512)))
    data = bytearray((folder / "images.tar").read_bytes())
    data[156:157] = tarfile.GNUTYPE_SPARSE
    data[386:410] = b"%011o\0%011o\0" % (0, 512)
    data[483:495] = b"\x80" + (2**33).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (folder / "images.tar").write_bytes(data)
    with tarfile.open(folder / "images.tar") as tar:
        assert tar.getmembers()[0].size == 2**33
    refuses("is a link or a sparse file", read_interchange, folder)


def test_a_tar_that_is_cut_while_it_is_read(tmp_path):
    member = tarfile.TarInfo("images/x.png")
    member.size = len(png())
    tar = PictureTar(with_members(tmp_path, (member, png())) / "images.tar")
    assert tar.read("images/x.png") == png()
    os.truncate(tmp_path / "images.tar", 520)
    refuses(r"^images/x\.png: the tar file ends", tar.read, "images/x.png", error=PictureError)


def test_a_member_that_claims_8_gib(tmp_path):
    """Cut off: the tar is refused. In a tar with a hole as large: a broken picture."""
    member = tarfile.TarInfo("images/x.png")
    member.size = len(png())
    folder = with_members(tmp_path, (member, png()))
    data = bytearray((folder / "images.tar").read_bytes())
    data[124:136] = b"\x80" + (2**33).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (folder / "images.tar").write_bytes(data)
    refuses(r"images\.tar: not an uncompressed .*\(unexpected end", read_interchange, folder)
    os.truncate(folder / "images.tar", 512 + 2**33 + 1024)
    manifest = prepare_interchange(folder, tmp_path / "out")
    assert list(manifest["broken_pictures"]) == ["images/x.png"]
    (folder / "images.tar").unlink()
    (folder / "images" / "x.png").touch()
    os.truncate(folder / "images" / "x.png", 2**33)
    manifest = prepare_interchange(folder, tmp_path / "out2")
    assert list(manifest["broken_pictures"]) == ["images/x.png"]


def test_bad_json_and_missing_files(tmp_path):
    refuses("nowhere: no such folder", read_interchange, tmp_path / "nowhere")
    refuses(r"sources\.jsonl: no such file", read_interchange, tmp_path)
    write(tmp_path)
    with open(tmp_path / "sources.jsonl", "a") as file:
        file.write('\n{"id": \n')
    refuses(r"sources\.jsonl, line 5: not valid JSON", read_interchange, tmp_path)


def test_openstax(tmp_path):
    """200 real textbook sources and their questions, pictures out of the 70 MB tar."""
    require(SHARED / "openstax")
    folder = tmp_path / "openstax"
    folder.mkdir()
    shutil.copyfile(SHARED / "openstax" / "images.tar", folder / "images.tar")
    with open(SHARED / "openstax" / "sources.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, 200)]
    ids = {row["id"] for row in rows}
    with open(SHARED / "openstax" / "questions.jsonl", encoding="utf-8") as file:
        every = map(json.loads, file)
        kept = [row for row in every if row["positives"] and ids.issuperset(row["positives"])]
    assert len(kept) >= 50
    write(folder, rows, kept)
    manifest = prepare_interchange(folder, tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    assert manifest["counts"]["broken_pictures"] == 0
    assert [dataclasses.astuple(s)[:4] for s in corpus.sources] == [
        (row["id"], row["modality"], row["text"], row["title"]) for row in rows
    ]
    assert [q.question for q in corpus.questions()] == [
        row["question"]
        for split in ("train", "val", "test")
        for row in kept
        if row["split"] == split
    ]
    with tarfile.open(SHARED / "openstax" / "images.tar") as tar:
        for row in corpus.modality_rows("image")[:5]:
            data = tar.extractfile(corpus.sources[row].image).read()
            assert corpus.picture(row) == data
            assert max(decode(data).size) == 320


def test_links_that_lead_to_themselves_and_impossible_names(tmp_path):
    folder = write(tmp_path / "in", source(modality="image", image="images/x.png"), None)
    (folder / "images" / "x.png").symlink_to("y.png")
    (folder / "images" / "y.png").symlink_to("x.png")
    refuses(r"line 4: `image` '.*x\.png' is a symbolic link", read_interchange, folder)
    for name, reason in (("a" * 300, "File name too long"), ("a\0b", "embedded null byte")):
        write(folder, source(modality="image", image=name), None)
        refuses(f"line 4: `image` .* is no file's name .{reason}", read_interchange, folder)
    for name in ("sources.jsonl", "questions.jsonl", "images.tar"):
        write(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(name)
        refuses(rf"in/{name} is a symbolic link that leads to itself", read_interchange, folder)
        (folder / name).unlink()


def header(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def pax(record):
    data = b"%d %s\n" % (len(record) + 4, record)
    return header("pax", len(data), tarfile.XHDTYPE) + data.ljust(512, b"\0")


@pytest.mark.parametrize(
    "content",
    [
        header("././@LongLink", 2**45, tarfile.GNUTYPE_LONGNAME),
        header("pax", 2**45, tarfile.XHDTYPE),
        header("pax", 2**33, tarfile.XGLTYPE),
        pax(b"size=-1024") + header("images/x.png", 0),  # leads back to itself, without end
        pax(b"size=99999999999999999999") + header("images/x.png", 0),
        header("pax", 0, tarfile.XHDTYPE) * 3_000,
    ],
    ids=["long name", "pax", "global pax", "negative size", "size", "chain"],
)
def test_a_tar_that_claims_what_it_does_not_hold(tmp_path, content):
    folder = write(tmp_path, source(modality="image", image="images/x.png"), None)
    (folder / "images.tar").write_bytes(content + bytes(20_480))
    refuses(r"images\.tar: not an uncompressed tar file", read_interchange, folder)


@pytest.mark.parametrize("where", ["folder", "tar"])
def test_a_picture_in_another_unicode_form_is_named_by_its_code_points(where, tmp_path):
    composed, decomposed = "caf\u00e9.png", "cafe\u0301.png"
    folder = write(tmp_path / "in", [SOURCES[0], {**SOURCES[1], "image": f"images/{composed}"}], [])
    if where == "folder":
        (folder / "images" / decomposed).write_bytes(png())
    else:
        with tarfile.open(folder / "images.tar", "w") as tar:
            tar.add(folder / "images" / "dot.png", f"./images/{decomposed}")
    message = r"line 2: .* is there in another Unicode form \(images/cafe\\u0301.png\), as macOS"
    refuses(message, read_interchange, folder)
    write(folder, [SOURCES[0], {**SOURCES[1], "image": f"images/{decomposed}"}], [])
    assert read_interchange(folder).sources[1].image == f"images/{decomposed}"
