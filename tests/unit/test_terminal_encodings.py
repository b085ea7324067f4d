"""Terminals and pipes of ASCII or Latin-1: every verb prints what it has, and none ends for it.

And no control character of a text from outside reaches a terminal.
"""

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
import termios
import threading

import pytest
from cli_runs import ROOT, write_rows
from openai_stub import Stub, error, said
from test_cli_compare import write_run
from word_encoder import install

from mmqa_jax.cli import main
from mmqa_jax.core.progress import Progress, Screen, announce
from mmqa_jax.core.terminal import escape_streams, escaped
from mmqa_jax.evaluation.tables import Table, show

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


# Control characters.

# Takes the terminal's title, erases the screen, colors, links; C1; turns the direction; and what
# rich would read as markup and as an emoji.
HOSTILE = (
    "\x1b]0;T\x07\x1b[2J\x1b[31m\x1b]8;;x:y\x1b\\\x08\x0b\x9b1m\x7f\u202e\u2066[bold]b[red]:smile:"
)
# What rich and the bar write: styles other than HOSTILE's, erased lines, a hidden cursor.
RICHS = re.compile(r"\x1b\[(?!31m|2J)[\d;]*[mKA]|\x1b\[\?25[lh]|\r")
NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@contextlib.contextmanager
def terminal(monkeypatch, **variables):
    """A pseudoterminal as stdout and stderr of the block; yields what reaches it, by `read()`."""
    reading, writing = os.openpty()
    attributes = termios.tcgetattr(writing)
    attributes[1] &= ~termios.OPOST  # a newline stays one character
    termios.tcsetattr(writing, termios.TCSANOW, attributes)
    received = bytearray()

    def receive():
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(reading, 65536):
                received.extend(data)

    thread = threading.Thread(target=receive)
    thread.start()
    with monkeypatch.context() as patch:
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "300", **variables}.items():
            patch.setenv(name, value)
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, os.fdopen(os.dup(writing), "w", encoding="utf-8"))
        shown = io.StringIO()
        yield shown
        for stream in (sys.stdout, sys.stderr):
            stream.close()
    os.close(writing)
    thread.join()
    os.close(reading)
    shown.write(received.decode())


def check_shown(shown: str, *, times: int):
    """HOSTILE is there escaped, that often at least, and its characters are not."""
    assert not NOT_SHOWN.findall(RICHS.sub("", shown)), shown
    # Rich drops some itself, and may wrap.
    assert shown.count("\\x1b[31m") >= times, shown
    assert shown.count("[bold]b[red]:smile:") >= times, shown


def test_escapes_are_jsons_where_json_may_hold_the_character():
    text = "".join(map(chr, (*range(0x100), *range(0x2000, 0x2100))))
    assert json.loads(escaped(json.dumps(text, ensure_ascii=False))) == text
    assert not NOT_SHOWN.search(escaped(text))
    assert escaped("\x1b[31m\tä\n\x9b\u202e\r") == "\\x1b[31m\tä\n\\u009b\\u202e\\x0d"


def test_bars_tables_and_lines(monkeypatch):
    with terminal(monkeypatch, MMQA_PROGRESS="on") as shown:
        escape_streams()
        announce(f"announced {HOSTILE}")
        with Progress(f"Title {HOSTILE}", total=2) as progress:
            for _ in range(2):
                print(f"under the bar {HOSTILE}", file=sys.stderr)
                progress.advance(loss=HOSTILE)
                with progress.paused():
                    print(f"in a pause {HOSTILE}")
        print(f"behind the bar {HOSTILE}")
        show(Table(f"Table {HOSTILE}", [f"a {HOSTILE}"], [[HOSTILE]], HOSTILE))
        Screen().print(f"screen {HOSTILE}")
    check_shown(shown.getvalue(), times=10)
    assert "\x1b[1m" in shown.getvalue()  # the table's own style
    for line in ("announced", "under the bar", "in a pause", "behind the bar", "screen"):
        assert f"{line} \\x1b]0;T" in shown.getvalue()


@pytest.fixture
def hostile(tmp_path):
    """A folder whose name is hostile, as are those of its files and their texts."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    return folder


def reaching(monkeypatch, *verbs: tuple[str, ...], code: int = 0) -> str:
    with terminal(monkeypatch) as shown:
        codes = [ended(verb) for verb in verbs]
    assert codes == [code] * len(verbs), shown.getvalue()
    return shown.getvalue()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_answer_its_question_and_its_sources(monkeypatch, tmp_path, hostile, flags):
    install(monkeypatch, tmp_path / "cache")
    (hostile / "[bold]a.txt").write_text(f"Lima is the capital. {HOSTILE}\n")
    (hostile / f"{hostile.name}.xyz").write_text("not taken")
    (hostile / f"{hostile.name}.pdf").write_text("no PDF")
    model = ("--backend=openai", "--model=m", "--least_similarity=-1")
    with Stub(lambda _: said(f"Lima {HOSTILE} [1]")).serving():
        verb = ("ask", f"--data={hostile}", *model, f"Is Lima {HOSTILE} a capital?", *flags)
        shown = reaching(monkeypatch, verb)
    check_shown(shown, times=3)
    assert "[bold]a.txt" in shown
    if flags:
        row = json.loads(shown.rstrip().rpartition("\n")[2])
        assert row["answer"].startswith("Lima \x1b]0;T\x07")


def test_what_a_server_refuses_with(monkeypatch, tmp_path, hostile):
    install(monkeypatch, tmp_path / "cache")
    (hostile / "a.txt").write_text("Lima is the capital.\n")
    model = ("--backend=openai", "--model=m", "--least_similarity=-1")
    with Stub(lambda _: error(400, f"no {HOSTILE}")).serving():
        shown = reaching(monkeypatch, ("ask", f"--data={hostile}", *model, "Is Lima a capital?"))
    assert "(400: no ]0;T" in shown  # as http_client.py quotes it
    assert "[bold]b[red]:smile:" in shown
    assert not NOT_SHOWN.findall(RICHS.sub("", shown))


def test_stages_and_scores(monkeypatch, tmp_path, hostile):
    raw = hostile / "raw"
    raw.mkdir()
    write_rows(raw / "sources.jsonl", [{**row, "title": HOSTILE} for row in SOURCES])
    write_rows(raw / "questions.jsonl", [{**QUESTIONS[0], "category": HOSTILE}])
    data, hits = hostile / "data", hostile / "hits.jsonl"
    rows = [{"question_id": "q–1", "answer": HOSTILE, "sources": ["β"]}]
    answers = write_rows(hostile / "answers.jsonl", rows)
    scored = ("evaluate", "corpus", f"--references={data}", f"--predictions={answers}")
    shown = reaching(
        monkeypatch,
        ("prepare", "corpus", "--raw", str(raw), "--out", str(data)),
        ("search", "--method=bm25", f"--data={data}", "--split=val", f"--out={hits}"),
        (*scored, "--split=val"),
        (*scored, "--split=val", "--markdown"),
    )
    check_shown(shown, times=4)
    shown = reaching(monkeypatch, (*scored, "--split=val", "--json"))
    assert list(json.loads(shown.splitlines()[-1])["by_category"]) == [HOSTILE]
    assert not NOT_SHOWN.findall(RICHS.sub("", shown))


def test_status_report_and_errors(monkeypatch, hostile):
    run = write_run(hostile / "run", {"s": [1.0, 0.0]}, row=HOSTILE, dataset=HOSTILE)
    other = write_run(hostile / "other", {"s": [1.0, 1.0]}, dataset=HOSTILE)
    check_shown(reaching(monkeypatch, ("compare", str(run), str(other))), times=1)
    check_shown(reaching(monkeypatch, ("report", f"--workdir={hostile}")), times=1)
    check_shown(reaching(monkeypatch, ("status", str(hostile))), times=1)
    training = hostile / "training"
    training.mkdir()
    (training / "attempts.jsonl").write_text("")
    config = {"config": {"task": HOSTILE, "train": {"steps": 4}}}
    (training / "config.json").write_text(json.dumps(config))
    check_shown(reaching(monkeypatch, ("status", str(training))), times=1)
    for verb in (
        ("search", "--method=bm25", f"--data={hostile}/none", f"--out={hostile}/hits.jsonl"),
        ("report", f"--workdir={hostile}/none"),
        ("status", f"{hostile}/none"),
        ("train", f"--config={hostile}/none.py", f"--workdir={hostile}/new"),
        ("ask", f"--{HOSTILE}=1", "Why?"),
    ):
        check_shown(reaching(monkeypatch, verb, code=2), times=1)


def test_all_that_rich_prints_goes_through_screen():
    """Another console would print what texts spell."""
    others = re.compile(r"rich(\.console)? import .*\b(Console|print)\b|rich\.(print|console)\b")
    files = (ROOT / "mmqa_jax").rglob("*.py")
    assert [path.name for path in files if others.search(path.read_text())] == ["progress.py"]
