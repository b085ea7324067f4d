"""`mmqa --install-completion`: real shells complete verbs, flags, choices and files."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cli_runs import mmqa

from mmqa_jax.cli import VERBS, make_parser

_START = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
_READY = "ready"


@pytest.fixture(scope="module", params=list(_START))
def installed(request, tmp_path_factory) -> tuple[str, str, str]:
    """A shell, what --install-completion printed, and the lines that it says to add."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_DATA_HOME", "BASH_COMPLETION_USER_DIR"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("SHELL", f"/usr/bin/{request.param}")
        ended = mmqa("--install-completion")
    assert ended.code == 0, ended.err
    (line,) = [line.strip() for line in ended.out.splitlines() if line.startswith("  ")]
    return request.param, ended.out, line


def typed(shell: str, setup: str, keys: str, expected: str, folder: Path) -> str:
    """What a terminal shows after keys, once `expected` is there or half a minute is over."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        _START[shell],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "HISTFILE": "/dev/null", "HOME": str(folder)},
        start_new_session=True,
    )
    os.close(slave)
    try:
        # Quoted in halves: the echo of the line must not look like its output.
        os.write(master, f"{setup}; echo {_READY[:2]}''{_READY[2:]}\n".encode())
        _shown(master, _READY)
        os.write(master, keys.encode())
        return _shown(master, expected)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _shown(terminal: int, expected: str) -> str:
    shown, end = "", time.monotonic() + 30
    while expected not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("mmqa trai\t", "mmqa train "),
        ("mmqa train --wo\t", "mmqa train --workdir"),
        ("mmqa prepare at\t", "mmqa prepare atlas"),
        ("mmqa search --method=bm\t", "--method=bm25"),
        ("mmqa search --method bm\t", "--method bm25"),
        ("mmqa ask --data=my\t", "--data=my\\ documents/"),
        ("mmqa train --config.train.steps=5 --wor\t", "steps=5 --workdir"),
        ("mmqa --inst\t", "--install-completion"),
    ],
)
def test_a_shell_completes_what_is_typed(installed, keys, expected, tmp_path):
    shell, _, setup = installed
    (tmp_path / "my documents").mkdir()
    if shell == "zsh":
        setup = setup.replace("compinit; compinit", "compinit; compinit -u")  # root's folders
    assert expected in typed(shell, setup, keys, expected, tmp_path)


def test_bash_completes_every_verb_and_every_flag():
    script = mmqa("--print-completion", "bash").out
    ask = "COMP_WORDS=(mmqa {0}); COMP_CWORD={1}; _mmqa; echo ${{COMPREPLY[*]}}"
    asked = [ask.format("''", 1), *(ask.format(f"{verb} --", 2) for verb in VERBS)]
    ended = subprocess.run(
        ["bash", "-c", "\n".join([script, "complete -p mmqa", *asked])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    compspec, verbs, *flags = ended.stdout.splitlines()
    assert compspec == "complete -o bashdefault -o default -F _mmqa mmqa"
    assert verbs.split() == list(VERBS)
    parsers = make_parser()._subparsers._group_actions[0].choices
    for verb, offered in zip(VERBS, flags, strict=True):
        known = {flag for flag in parsers[verb]._option_string_actions if flag.startswith("--")}
        assert set(offered.split()) == known, verb


def test_no_file_of_the_user_is_touched_and_what_is_left_is_said(installed):
    shell, printed, line = installed
    path = Path(printed.partition("Wrote ")[2].partition(".\n")[0])
    home = next(parent for parent in path.parents if parent.name.startswith("home"))
    assert [file for file in home.rglob("*") if file.is_file()] == [path]
    assert path.read_text() == mmqa("--print-completion", shell).out
    assert f"~/.{shell}rc" in printed
    assert shlex.quote(str(path if shell == "bash" else path.parent)) in line


@pytest.mark.parametrize("shell", ["/usr/bin/fish", None])
def test_a_shell_that_is_not_known_is_named(shell, monkeypatch):
    monkeypatch.delenv("SHELL", raising=False)
    if shell:
        monkeypatch.setenv("SHELL", shell)
    ended = mmqa("--install-completion")
    assert ended.code == 2
    assert f"$SHELL is {'fish' if shell else 'not set'}; name one: " in ended.err


def test_a_folder_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    ended = mmqa("--install-completion", "zsh")
    assert ended.code == 2
    assert f"{tmp_path / 'file'} is no folder to write to" in ended.err
