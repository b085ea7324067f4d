"""The pages: every command in them parses, every file they link to exists, the front page is short."""

import argparse
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mmqa_jax.cli import VERBS, command, make_parser, split_config_overrides
from mmqa_jax.core.config import load_config
from mmqa_jax.prompting.backends.config import check_prompt_config
from mmqa_jax.runs.row import read_row
from mmqa_jax.tasks.registry import read_task
from tests.bench import __main__ as bench

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "tests").glob("*.md")),
    *sorted((ROOT / "tests/bench").glob("*.md")),
    *(
        page
        for room in ("mmqa_jax", "configs", "launch")
        for page in sorted((ROOT / room).rglob("*.md"))
    ),
]
# They act as they are parsed: test_completion.py.
_WITHOUT_VERB = ("--help", "--print-completion", "--version")
_ADDING = ("plan", "run", "sweep", "train")  # verbs that take keys which a config leaves out
_OF_ALL = ("--help", "--json", "--traceback")  # flags of every verb
_SEPARATOR = "\x1f"  # between the arguments of a command
# In front of a block: `mmqa` and `python` print their arguments, nothing else can be started.
# A line is one write, so that commands in the background do not mix theirs.
_RECORDER = (
    f"PATH=; record() {{ local line; printf -v line '%s\\{oct(ord(_SEPARATOR))[2:]}' \"$@\"; "
    'printf \'%s\\n\' "$line"; }; mmqa() { record mmqa "$@"; }; '
    'python() { record python "$@"; }\n'
)
_BENCH = ["python", "-m", "tests.bench"]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _commands(page: Path, folder: Path) -> list[list[str]]:
    """Every `mmqa` and `python` command in a page's shell blocks, with loops unrolled."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        ended = subprocess.run(
            [shutil.which("bash"), "-c", _RECORDER + block],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        # What is not found are other programs: without PATH none is.
        errors = [line for line in ended.stderr.splitlines() if "No such file" not in line]
        assert not errors, block
        found += [line.split(_SEPARATOR)[:-1] for line in ended.stdout.splitlines()]
    return found


@pytest.fixture(scope="module")
def parser():
    """Of all verbs: to make it takes 9 ms, more than to parse a command."""
    return make_parser()


@pages
def test_every_command_parses(page, parser, tmp_path):
    for program, *line in _commands(page, tmp_path):
        if [program, *line[:2]] == _BENCH:
            bench.make_parser().parse_args(split_config_overrides(line[2:])[0])
        if program == "python" or line[0] in _WITHOUT_VERB:
            continue
        kept, overrides = split_config_overrides(line)
        arguments = parser.parse_args(kept)
        if getattr(arguments, "config", None):
            # The file, its mode and the keys exist.
            config = load_config(arguments.config, overrides, adds=line[0] in _ADDING)
            if line[0] in _ADDING:
                read = {"task": read_task, "row": read_row}
                next((read[key] for key in read if key in config), check_prompt_config)(config)
        else:
            assert not overrides, line


@pages
def test_every_flag_in_the_text_exists(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for fragment in re.findall(r"`mmqa ([^`]+)`", text):
        verb, *rest = fragment.split()
        if verb in ("VERB", *_WITHOUT_VERB):
            continue
        assert verb in VERBS, fragment
        for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
            assert flag.startswith("--config.") or flag in (*_OF_ALL, *_flags(verb)), fragment


@functools.cache
def _flags(verb: str) -> list[str]:
    parser = argparse.ArgumentParser(description="")
    command(verb).add_flags(parser)
    return re.findall(r"--[a-z]\w*", parser.format_usage())


@pages
def test_every_link_leads_to_a_file(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


@pages
def test_every_named_file_of_a_table_exists(page):
    """Files that a page names in the first column of a table are in its folder."""
    for cell in re.findall(r"^\| (`[^|]+`) \|", page.read_text("utf-8"), re.M):
        for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", cell):
            if name not in ("weights/", "journals/", "parts/"):  # of a run
                assert (page.parent / name).exists(), name


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_commands_are_found(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        '```bash\nls\nfor x in a b; do\n  A=1 mmqa ask --image=$x \\\n  "b c"\ndone\n```\n'
    )
    assert _commands(page, tmp_path) == [
        ["mmqa", "ask", "--image=a", "b c"],
        ["mmqa", "ask", "--image=b", "b c"],
    ]
