"""Every verb on a disk that becomes full: one sentence, and the same command goes on later.

The disk is a tmpfs of its own, of which a file takes all but a few pages.
"""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from cli_runs import (
    QUESTIONS,
    TEST,
    done,
    mmqa,
    rows_of,
    succeeded,
    train_flags,
    write_documents,
    write_rows,
)
from small_disk import small_disk
from test_cli_compare import write_run
from test_cli_prompt import RUN
from test_inference_killed import (  # noqa: F401 - fixtures
    ALONE,
    SHARED,
    captioner,
    flags_of,
    prophet,
    results,
)
from tiny_checkpoints import make_source

from mmqa_jax.cli import main
from tests.forks import server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SAID = re.compile(
    r"mmqa: (/[^\n]+: cannot be written, because )?the disk is full( \([^\n]*\))?; what was finished "
    r"before is kept: free some space and start the same command again, which continues\.\n\Z"
)
# A conversion knows what it will write.
CONVERT = re.compile(
    r"will be written, the disk has .* left; name a folder on another disk\.\n\Z|" + SAID.pattern
)
MORE = ("prepare", "convert", "evaluate", "report")


@pytest.fixture(scope="module")
def more_flags(data, request, tmp_path_factory):
    """Verb, folder -> the flags of verbs that are no jobs in chunks."""
    folder = tmp_path_factory.mktemp("more")
    raw = write_documents(folder / "raw", QUESTIONS)
    source = make_source("bert", folder / "bert")
    predictions = folder / "predictions.jsonl"
    answers = [{"question_id": row["id"], "answer": "a", "sources": []} for row in TEST]
    write_rows(predictions, answers)

    def flags(verb: str, out: Path) -> list:
        if verb == "report" and not (out / "metrics.jsonl").exists():
            models = request.getfixturevalue("models")
            out.mkdir(exist_ok=True)
            (out / "metrics.jsonl").write_bytes((models / "answer/metrics.jsonl").read_bytes())
            (out / "config.json").write_bytes((models / "answer/config.json").read_bytes())
        return {
            "prepare": ["prepare", "corpus", f"--raw={raw}", f"--out={out / 'data'}"],
            "convert": [*source.flags("bert"), f"--out={out / 'model'}"],
            "evaluate": [
                "evaluate", "corpus", f"--references={data}", f"--predictions={predictions}",
                f"--submission={out / 'submission.json'}",
            ],
            "report": ["report", f"--workdir={out}"],
        }[verb]  # fmt: skip

    return flags


def size_of(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.parametrize("verb", [*SHARED, *ALONE, *MORE])
def test_a_full_disk_ends_a_verb_in_one_sentence(verb, request, tmp_path):
    """With no page left, and with a half of what it writes; then its files are an undisturbed's.

    `rerank` and `answer` write as `search` and `run` do.
    """
    flags = request.getfixturevalue("more_flags" if verb in MORE else "flags_of")
    ended = succeeded(*flags(verb, tmp_path / "whole"))
    expected, needed = results(tmp_path / "whole"), size_of(tmp_path / "whole")
    with small_disk(tmp_path / "disk") as disk:
        out = disk.folder / "out"
        argv = flags(verb, out)
        for left in (0, needed // 2):
            disk.leave(left)
            ended = mmqa(*argv)
            assert "Traceback" not in ended.err, ended.err
            if verb == "convert":
                assert ended.code == 1
                assert CONVERT.search(ended.err), ended.err
                assert not out.exists()
                continue
            assert ended.code == 1 or left, ended.err
            assert ended.code == 0 or SAID.search(ended.err), ended.err
            assert not [*out.rglob("*.tmp")]
        disk.free()
        ended = succeeded(*argv)
        assert_same(results(out), expected, out, tmp_path / "whole")


def assert_same(found, expected, out, whole):
    """The same files; where one names its folder, the other names its own.

    TensorStore names the files of a converted model by chance: its record is compared.
    """
    if "model/model.json" in expected:
        name = "model/model.json"
        found, expected = {name: found[name]}, {name: expected[name]}
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        if isinstance(content, bytes):
            content = content.replace(str(whole).encode(), str(out).encode())
        assert found[name] == content, name


def test_training_on_a_full_disk(data, cli_cache, tmp_path):
    """At last a process of its own, with all that its threads say until it ends; then it goes on."""
    environment = os.environ | {"MMQA_CACHE": str(cli_cache), "MMQA_PROGRESS": "off"}
    with small_disk(tmp_path / "disk") as disk:
        workdir = disk.folder / "run"
        flags = train_flags("answer", data, workdir, **{"train.steps": 3})
        disk.leave(4 * 2**10)  # full before a thread starts
        ended = mmqa("train", *flags)
        assert ended.code == 1, ended.err
        assert SAID.fullmatch(ended.err), ended.err
        disk.leave(4 * 2**20)  # in the second save
        fork = server().start(["-c", RUN, "train", *flags], environment)
        said, _ = fork.communicate()
        assert fork.returncode == 1, said
        assert SAID.fullmatch(said), said
        disk.free()
        done("train", *flags)
        assert [row["step"] for row in rows_of(workdir / "metrics.jsonl") if "loss" in row] == [
            1,
            2,
            3,
        ]
        assert (workdir / "weights").is_dir()


def test_results_that_go_to_a_full_disk(tmp_path):
    """`mmqa compare ... --json > FILE`: nothing is left that closing the file would write."""
    runs = [write_run(tmp_path / name, {"s": [1.0, 0.0, 1.0]}) for name in "ab"]
    err = io.StringIO()
    with small_disk(tmp_path / "disk", 64 * 2**10) as disk:
        with (
            (disk.folder / "out").open("w") as out,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            disk.leave(0)
            assert main(["compare", *map(str, runs), "--json"]) == 1
        assert SAID.fullmatch(err.getvalue()), err.getvalue()
