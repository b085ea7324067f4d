"""Terminals and pipes of ASCII or Latin-1: every verb prints what it has, and none ends for it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import subprocess
import sys

import pytest
from cli_runs import ROOT, write_rows
from test_cli_compare import write_run

from mmqa_jax.cli import main

pytestmark = pytest.mark.slow

SOURCES = [
    {"id": "β", "modality": "text", "text": "Café → 珈琲, 🙂 – “quoted”", "title": "Ünïcode"},
    {"id": "b", "modality": "text", "text": "Snow is white."},
]
QUESTIONS = [{"id": "q–1", "split": "val", "question": "Which café ?", "category": "Κ",
              "answers": ["珈琲"], "keywords": "珈琲", "positives": ["β"]}]  # fmt: skip


# Runs a verb for each list of arguments, a line before each, and its exit code on the last; then
# one for each file that is missing: the C locale decodes the bytes of their names its own way.
SEVERAL = """
import json, sys
from mmqa_jax.cli import main
for arguments in json.loads(sys.argv[1]):
    print("--- began", flush=True)
    try:
        code = main(arguments)
    except SystemExit as ended:  # of --help
        code = ended.code
    print(f"--- {code}", flush=True)
for path in sys.argv[2:]:
    assert main(["evaluate", "okvqa", f"--predictions={path}"]) == 2
"""


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """A verb that prints a table, and needs neither JAX nor SciPy (as scores of 0 and 1 would)."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / name, {"s": [1.0, 0.5, 1.0]}) for name in "ab"]
    return [sys.executable, "-m", "mmqa_jax.cli", "compare", *map(str, runs), "--json"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_ends_no_verb(compare, closed, tmp_path):
    out = tmp_path / "shown"
    command = f"({shlex.join(compare)} {closed}) > {out} 2>&1; echo $?"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, cwd=ROOT, text=True)
    assert ended.stdout == "0\n"
    shown = out.read_text()
    assert (shown == "") == (">&-" in closed.replace("2>&-", ""))


def unread(command: list[str]) -> tuple[int, bytes]:
    """Exit code and stderr of a verb that prints to a pipe whose reader has gone."""
    read, written = os.pipe()
    os.close(read)
    ended = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(written)
    return ended.returncode, ended.stderr


def test_a_reader_that_has_gone_ends_compare_quietly(compare, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    assert unread(compare) == (0, b"")


def test_a_reader_that_has_gone_ends_status_quietly(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    (tmp_path / "attempts.jsonl").write_text("")
    (tmp_path / "config.json").write_text('{"config": {"task": "a", "train": {"steps": 4}}}')
    assert unread([sys.executable, "-m", "mmqa_jax.cli", "status", str(tmp_path)]) == (141, b"")


def printed_in_c(verbs, missing):
    """As `printed_in`, in a process of the C locale, whose file names are ASCII too."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "MMQA_PROGRESS": "off", "JAX_PLATFORMS": "cpu"}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = map(os.fsencode, (json.dumps(verbs), *missing))
    ended = subprocess.run(
        [sys.executable, "-c", SEVERAL, *arguments],
        capture_output=True, env=environment, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    _, *printed = ended.stdout.decode("ascii").split("--- began\n")
    shown = [text.rpartition("--- ") for text in printed]
    assert [code for *_, code in shown] == ["0\n"] * len(verbs), ended.stderr
    return [text for text, *_ in shown], ended.stderr


def printed_in(encoding, verbs, missing):
    """What each verb prints, all of which must succeed, and stderr of them and of verbs whose file
    is missing."""
    texts, said = [], io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace")
    with contextlib.redirect_stderr(said):
        for verb in verbs:
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding)) as out:
                assert ended(verb) == 0, said.buffer.getvalue()
            texts.append(out.buffer.getvalue().decode(encoding))
        for path in missing:
            assert ended(["evaluate", "okvqa", f"--predictions={path}"]) == 2
    return texts, said.buffer.getvalue()


def ended(verb):
    """Exit code of a verb in this process, all that it printed written out."""
    try:
        return main(list(verb))
    except SystemExit as stop:  # of --help
        return stop.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "C"])
def test_verbs_print_names_texts_tables_and_help(encoding, tmp_path):
    """And errors name files outside the encoding."""
    # Where file names are ASCII, others cannot be given but as bytes.
    named = "data" if encoding == "C" else "Bücher–珈琲"
    folder = tmp_path / named
    folder.mkdir()
    write_rows(folder / "sources.jsonl", SOURCES)
    write_rows(folder / "questions.jsonl", QUESTIONS)
    data = str(tmp_path / f"prepared {named}")
    hits = str(tmp_path / f"hits {named}.jsonl")
    rows = [{"question_id": "q–1", "answer": "珈琲", "sources": ["β"]}]
    answers = str(write_rows(tmp_path / f"answers {named}.jsonl", rows))
    flags = (
        *("evaluate", "corpus", f"--references={data}", f"--predictions={answers}"),
        "--split=val",
    )
    verbs = (
        ("prepare", "corpus", "--raw", str(folder), "--out", data, "--json"),
        ("search", "--method=bm25", f"--data={data}", "--split=val", f"--out={hits}"),
        (*flags, "--json"),
        flags,
        ("prepare", "--help"),
    )
    names = ("Bücher–珈琲.jsonl", os.fsdecode(b"broken-\xff\xfe.jsonl"))
    missing = [str(tmp_path / name) for name in names]
    shown = printed_in_c if encoding == "C" else functools.partial(printed_in, encoding)
    (made, _, scored, table, _), said = shown(verbs, missing)
    assert b"Traceback" not in said, said
    assert b"Logging error" not in said
    assert json.loads(made.splitlines()[-1])["data"] == data
    assert os.path.getsize(hits)
    assert list(json.loads(scored.splitlines()[-1])["by_category"]) == ["Κ"]
    assert "webqa_acc" in table
    refused = [line for line in said.splitlines() if line.startswith(b"mmqa: ")]
    assert len(refused) == 2
    assert said.splitlines()[-2:] == refused
