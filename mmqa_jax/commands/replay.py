"""`mmqa replay`: a searcher's run draws its episodes again."""

import argparse
from typing import Any

from mmqa_jax.core.paths import as_path

SUMMARY = "draw the episodes of a searcher's run again, and say whether they have the same bytes."
EXAMPLE = "mmqa replay runs/atlas/searcher --steps=0"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\nThe weights that a run began with (step 0) and those of its checkpoints drew the\n"
        "batches behind them, which its folder `rollouts` keeps. They draw them once more, on\n"
        "this host and its devices: equal, or the first step, question, episode and token that\n"
        "differ (exit code 1). The run may be finished or killed, and is not changed."
    )
    parser.add_argument("run", help="the --workdir of `mmqa train` of a searcher")
    parser.add_argument(
        "--steps", default="", help="whose weights draw, such as 0,40; by default all"
    )
    parser.add_argument("--out", help="keep what is drawn in this folder")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draws, compares, and says that all is equal."""
    from mmqa_jax.core.errors import UserError
    from mmqa_jax.core.hosts import distributed
    from mmqa_jax.extensions.search_replay import replay

    names = [name for name in arguments.steps.split(",") if name]
    if not all(name.isdecimal() and len(name) < 10 for name in names):
        raise UserError(f"--steps={arguments.steps}: numbers were expected, such as 0,40.")
    distributed.start(join=False)
    out = as_path(arguments.out) if arguments.out else None
    result = replay(as_path(arguments.run), [int(name) for name in names], out)
    drawn = f"{result['episodes']:,} episodes of steps {', '.join(map(str, result['steps']))}"
    print(f"{arguments.run}: equal ({drawn}).")
    return result
