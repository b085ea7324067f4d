"""The command line itself: help, what loads when, wrong commands, exit codes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import ROOT, mmqa, succeeded

from mmqa_jax.cli import VERBS, make_parser, split_config_overrides

pytestmark = pytest.mark.usefixtures("quiet")


def test_every_verb_has_help_with_a_working_example():
    ended = succeeded("--help")
    for verb in VERBS:
        assert re.search(rf"^ +{verb}\s+\w", ended.out, re.MULTILINE), verb
        own = succeeded(verb, "--help")
        example = own.out.partition("example:\n")[2].strip()
        assert example.startswith(f"mmqa {verb} ")
        _parses(example)


def _parses(example: str) -> None:
    kept, _ = split_config_overrides(shlex.split(example)[1:])
    make_parser().parse_args(kept)


def test_help_loads_no_numerical_library():
    script = (
        "import sys\n"
        "from mmqa_jax.cli import main\n"
        "for arguments in (['--help'], ['train', '--help']):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 0\n"
        "heavy = {'jax', 'numpy', 'grain', 'flax', 'orbax', 'PIL', 'rich', 'tokenizers',\n"
        "         'tensorflow_datasets', 'ml_collections', 'matplotlib', 'scipy', 'openai', 'jinja2', 'torch',\n"
        "         'transformers', 'shtab'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_ends_as_main_does():
    command = Path(sys.executable).with_name("mmqa")
    ended = subprocess.run(
        [command, "serach"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert re.fullmatch(r"mmqa: .*'serach'.*see `mmqa --help`\.\n", ended.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"required: VERB; see `mmqa --help`"),
        (["serach"], r"invalid choice: 'serach' \(did you mean search\?\).*see `mmqa --help`"),
        (["report", "--workdi=x"], r"arguments: --workdi=x \(did you mean --workdir\?\)"),
        (["report", "--wokdir=x"], r"unrecognized arguments: --wokdir=x"),
        (["report", "--wokdir=x"], r"did you mean --workdir\?\); see `mmqa report --help`"),
        (["prepare", "msmarco", "--out=x"], r"invalid choice: 'msmarco'.*atlas.*webqa.*corpus"),
        (["evaluate", "squad"], r"invalid choice: 'squad'.*see `mmqa evaluate --help`"),
        (["search", "--data=x", "--method=bm25"], r"required: --out; see `mmqa search --help`"),
        (["search", "--method=bm26"], r"--method: invalid choice: 'bm26'"),
        (["search", "--top_k=many"], r"--top_k: invalid int value: 'many'"),
        (["answer", "--threshold=half"], r"--threshold: invalid float value: 'half'"),
        (["report", "--config.seed=1"], r"seed=1: `mmqa report` takes no --config"),
        (["demo", "--config.seed", "1"], r"--config\.seed: write it as --config\.KEY=VALUE"),
        (["train", "--workdir=x"], r"required: --config"),
        (["ask"], r"give a question in quotes, or --calibrate"),
    ],
)
def test_wrong_commands(arguments, message, refused):
    refused(*arguments, message=message)


def test_traceback_is_shown_on_request():
    ended = mmqa("report", "--workdir=nowhere-at-all", "--traceback")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("mmqa: nowhere-at-all: holds no finished demo")
