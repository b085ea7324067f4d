"""`mmqa` several times in one process: python several_mmqa.py WORDS [then WORDS]...

PROCESS in a word stands for the number of this process in its launch. The exit code is the highest.
"""

from __future__ import annotations

import itertools
import os
import sys

from mmqa_jax.cli import main


def codes(words: list[str]) -> list[int]:
    """The exit codes of the commands, one after another."""
    process = os.environ.get("JAX_PROCESS_ID", "0")
    words = [word.replace("PROCESS", process) for word in words]
    commands = itertools.groupby(words, lambda word: word == "then")
    return [main(list(command)) for between, command in commands if not between]


if __name__ == "__main__":
    sys.exit(max(codes(sys.argv[1:])))
