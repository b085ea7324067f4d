"""`python -m tests.bench NAME ...`, from the repository's root: see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from mmqa_jax.cli import split_config_overrides
from mmqa_jax.commands import flags
from mmqa_jax.commands.plan import add_program_flags
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.host import skip_absent_tpu
from tests import bench

_PLAN = "plan"  # measures nothing, and has flags of its own
_PLAN_FLAGS = "--config=configs/webqa/vlp_select.py --topology=v5e:4x4"
_EXAMPLE = "python -m tests.bench models --only=clip_image,bert --json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one bench; returns the exit code (0 done, 1 it failed, 2 invalid input)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        argv, overrides = split_config_overrides(argv)
        arguments = make_parser().parse_args(argv)
        skip_absent_tpu()
        if arguments.name == _PLAN:
            from tests.bench import plan

            arguments.overrides = overrides
            result = plan.run(arguments)
        else:
            result = _measured(arguments, overrides)
        if arguments.json:
            print(json.dumps(result, ensure_ascii=False), flush=True)
    except (RunError, UserError) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        print(f"tests.bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error message is one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see `{self.prog} --help`.")


def _measured(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs a bench that measures, and shows its rows."""
    if overrides:
        raise UserError(f"--config.{overrides[0]}: the bench {arguments.name} takes no config.")
    options = bench.Options(arguments.rounds, tuple(arguments.only), arguments.size, arguments.data)
    result = bench.run_bench(arguments.name, options)
    bench.show(result)
    return result


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m tests.bench`; invalid arguments raise UserError."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="python -m tests.bench",
        description="Measures speed or memory against a peer on the same inputs.\n\nbenches:\n"
        + bench.describe(),
        epilog=f"example:\n  {_EXAMPLE}",
        formatter_class=raw,
    )
    benches = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, what in bench.BENCHES.items():
        options = _PLAN_FLAGS if name == _PLAN else "--json"
        example = f"example:\n  python -m tests.bench {name} {options}"
        added = benches.add_parser(name, description=what, epilog=example, formatter_class=raw)
        added.add_argument("--json", action="store_true", help="last line: the result as JSON")
        added.add_argument("--traceback", action="store_true", help="show an error's traceback")
        if name == _PLAN:
            add_program_flags(added)
        else:
            _add_flags(added)
    return parser


def _add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser, "ROW", "the rows to measure (all)")
    parser.add_argument("--rounds", type=int, help="timing repetitions (the bench's default)")
    parser.add_argument(
        "--size",
        choices=bench.SIZES,
        help="full: published sizes, which need a large machine (the bench's default)",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="input: a prepared corpus (generated pictures and texts)"
    )


if __name__ == "__main__":
    sys.exit(main())
