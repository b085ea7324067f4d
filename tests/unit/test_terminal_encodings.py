"""Terminals and pipes of ASCII or Latin-1: every verb prints what it has, and none ends for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from cli_runs import ROOT, write_rows
from test_cli_compare import write_run

pytestmark = pytest.mark.slow

ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1:strict"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
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


@pytest.fixture(params=ENCODINGS)
def encoding(request):
    return request.param


def run(encoding, *arguments, program=("-m", "mmqa_jax.cli")):
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "MMQA_PROGRESS": "off", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, *program, *map(os.fsencode, arguments)],
        capture_output=True, env=environment | ENCODINGS[encoding], timeout=120,
    )  # fmt: skip
    assert b"Traceback" not in ended.stderr, ended.stderr.decode("latin-1")
    assert b"Logging error" not in ended.stderr
    ended.stdout.decode("latin-1" if encoding == "latin-1" else "ascii")
    return ended


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """A verb that prints a table, and needs no JAX."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / name, {"s": [1.0, 0.0, 1.0]}) for name in "ab"]
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


def run_all(encoding, verbs, missing):
    """What each verb of one process prints, all of which must succeed, and stderr of them and of
    verbs whose file is missing."""
    ended = run(encoding, json.dumps(verbs), *missing, program=("-c", SEVERAL))
    assert ended.returncode == 0, ended.stderr
    _, *printed = ended.stdout.decode("latin-1").split("--- began\n")
    shown = [text.rpartition("--- ") for text in printed]
    assert [code for *_, code in shown] == ["0\n"] * len(verbs), ended.stderr
    return [text for text, *_ in shown], ended.stderr


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
    (made, _, scored, table, _), said = run_all(
        encoding, verbs, [str(tmp_path / name) for name in names]
    )
    assert json.loads(made.splitlines()[-1])["data"] == data
    assert os.path.getsize(hits)
    assert list(json.loads(scored.splitlines()[-1])["by_category"]) == ["Κ"]
    assert "webqa_acc" in table
    refused = [line for line in said.splitlines() if line.startswith(b"mmqa: ")]
    assert len(refused) == 2
    assert said.splitlines()[-2:] == refused
