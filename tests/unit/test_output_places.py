"""Where a verb writes: pipes, sockets and links are no files to replace, links to folders stay."""

import os
import socket
import stat

import pytest
from cli_runs import QUESTIONS, mmqa, train_flags, write_documents, write_rows
from row_runs import row_flags
from tiny_checkpoints import make_source

from mmqa_jax.core.files import check_out
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def pipe(tmp_path):
    """A named pipe, which must survive."""
    path = tmp_path / "place"
    os.mkfifo(path)
    yield path
    assert stat.S_ISFIFO(path.lstat().st_mode)
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(f".{path.name}")]


FILES = {
    "search": ("--method=bm25", "--data={data}", "--out={place}"),
    "rerank": ("--data={data}", "--model={data}", "--candidates={file}", "--out={place}"),
    "answer": ("--data={data}", "--model={data}", "--out={place}"),
    "prompt": ("--prompts={file}", "--model={data}", "--out={place}"),
    "caption": ("--features={file}", "--model={data}", "--tokenizer={file}", "--out={place}"),
    "evaluate": ("corpus", "--references={data}", "--predictions={file}", "--submission={place}"),
}


def flags_of(verb, data, file, place):
    return [verb, *(flag.format(data=data, file=file, place=place) for flag in FILES[verb])]


@pytest.mark.parametrize("verb", FILES)
def test_a_pipe_is_no_file_to_write(verb, data, pipe, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [])
    ended = mmqa(*flags_of(verb, data, file, pipe))
    flag = "--submission" if verb == "evaluate" else "--out"
    assert (ended.code, ended.err) == (
        2,
        f"mmqa: {flag}={pipe}: is a device, pipe or socket, and files are written under another "
        "name first; name a file.\n",
    )


@pytest.mark.parametrize("verb", FILES)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_refused_and_stays(verb, dangling, data, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [])
    target, place = tmp_path / "target", tmp_path / "place"
    if not dangling:
        target.write_text("theirs")
    place.symlink_to(target)
    ended = mmqa(*flags_of(verb, data, file, place))
    assert ended.code == 2
    assert f"={place}: is a symbolic link to {target}; name the file itself" in ended.err
    assert place.is_symlink()
    assert dangling or target.read_text() == "theirs"


FOLDERS = ("prepare", "convert", "embed", "index", "candidates", "train", "run", "demo")


def folder_flags(verb, place, data, tmp_path):
    raw = write_documents(tmp_path / "raw", QUESTIONS)
    return {
        "prepare": lambda: ["prepare", "corpus", f"--raw={raw}", f"--out={place}"],
        "convert": lambda: [*make_source("bert", tmp_path / "b").flags("bert"), f"--out={place}"],
        "embed": lambda: ["embed", f"--data={data}", f"--model={data}", f"--out={place}"],
        "index": lambda: ["index", f"--embeddings={place}"],
        "candidates": lambda: ["candidates", f"--data={data}", f"--model={data}", f"--out={place}"],
        "train": lambda: ["train", *train_flags("answer", data, place)],
        "run": lambda: row_flags("atlas:bm25", place, data, data, data),
        "demo": lambda: ["demo", f"--workdir={place}"],
    }[verb]()


@pytest.mark.parametrize("verb", FOLDERS)
def test_a_pipe_is_no_folder(verb, data, pipe, tmp_path):
    ended = mmqa(*folder_flags(verb, pipe, data, tmp_path))
    assert ended.code == 2
    assert str(pipe) in ended.err
    assert len(ended.err.splitlines()) == 1


def test_folders_behind_links_stay_where_they_are(data, tmp_path):
    """`runs -> /scratch/runs`, and the folder itself."""
    for number, there in enumerate((True, False)):
        scratch, place = tmp_path / f"scratch{number}", tmp_path / f"place{number}"
        if there:
            scratch.mkdir()
        place.symlink_to(scratch)
        source = make_source("bert", tmp_path / f"bert{number}")
        for again in ([], ["--overwrite"]):
            ended = mmqa(*source.flags("bert"), f"--out={place}", *again)
            assert ended.code == 0, ended.err
        assert place.is_symlink()
        assert (scratch / "model.json").is_file()


def test_other_things_than_files(tmp_path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for place in (tmp_path / "socket", tmp_path / "socket" / "below"):
            refuses(r"--out=.*: (is a device|.*/socket is no folder)", check_out, place)
