"""Completion of verbs and flags by the shell: `mmqa --install-completion`.

The scripts are shtab's, changed where its bash and zsh know `--flag value` alone: here a flag and
its value are written as one word, `--flag=value`.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, check_out

SHELLS = ("bash", "zsh")
# bash breaks words at `=`, of which shtab's function knows nothing. What it does not complete (the
# values of most flags) readline completes as the name of a file.
_BASH = """
_mmqa() {
  local words=() cword=0 i
  for i in "${!COMP_WORDS[@]}"; do
    (( i == COMP_CWORD )) && cword=${#words[@]}
    if [[ ${COMP_WORDS[i]} != = ]]; then
      words+=("${COMP_WORDS[i]}")
    elif (( i == COMP_CWORD )); then
      words+=("")
    fi
  done
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$cword
  _shtab_mmqa "$@"
}
complete -o default -o bashdefault -F _mmqa mmqa
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--install-completion` and `--print-completion` to the parser of all verbs."""
    parser.add_argument(
        "--install-completion",
        nargs="?",
        choices=SHELLS,
        action=_Install,
        help="write the completion of verbs and flags for a shell (that of $SHELL) to its folder, "
        "and say what is left to do",
    )
    parser.add_argument(
        "--print-completion", choices=SHELLS, action=_Print, help="print it in place of that"
    )


class _Print(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option=None):
        print(completion_script(parser, shell), end="")
        parser.exit()


class _Install(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option=None):
        shell = shell or _shell_in_use(os.environ)
        path = completion_path(shell, os.environ)
        check_out(path, flag="")
        with atomic_write(path) as file:
            file.write(completion_script(parser, shell))
        print(f"Wrote {path}.\n{_left_to_do(shell, path)}")
        parser.exit()


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The text that completes a parser's verbs and flags.

    Args:
      parser: of `mmqa VERB ...`; changed for what shtab makes of it, so that it parses no more.
      shell: `bash` or `zsh`.
    """
    import shtab

    for flag in _flags_with_values(parser):
        if shell == "zsh":
            flag.metavar = flag.dest  # a metavar's colons would end its part of the description
            flag.option_strings = [f"{name}=" for name in flag.option_strings]
            if not flag.choices and flag.type in (None, Path):
                flag.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell)
    return f"{script.rstrip()}\n" + (_BASH if shell == "bash" else "")


def completion_path(shell: str, environment: Mapping[str, str]) -> Path:
    """The file where a shell looks for a user's completion of `mmqa`."""
    home = Path(environment.get("HOME") or Path.home())
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    if shell == "zsh":
        return data / "zsh/site-functions/_mmqa"
    folder = environment.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion"
    return Path(folder) / "completions/mmqa"


def _left_to_do(shell: str, path: Path) -> str:
    """What a user does so that new shells read the file; nobody else's files are changed."""
    if shell == "zsh":
        return (
            "New shells complete mmqa if its folder is in fpath. If it is not, put into ~/.zshrc:\n"
            f"  fpath=({shlex.quote(str(path.parent))} $fpath); autoload -Uz compinit; compinit"
        )
    return (
        "New shells complete mmqa where the package bash-completion is in use. Where it is not, "
        f"put into ~/.bashrc:\n  source {shlex.quote(str(path))}"
    )


def _shell_in_use(environment: Mapping[str, str]) -> str:
    name = Path(environment.get("SHELL", "")).name
    if name not in SHELLS:
        raise UserError(
            f"--install-completion: the shell of $SHELL is {name or 'not set'}; name one: "
            f"--install-completion {' or '.join(SHELLS)}."
        )
    return name


def _flags_with_values(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The flags of a parser and of its verbs that take a value."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _flags_with_values(verb)
        elif action.option_strings and action.nargs != 0:
            yield action
