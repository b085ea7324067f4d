"""The command line: `mmqa VERB ...`. Every verb is a module of commands/.

argparse rather than absl flags: every verb has its own flags, and `mmqa --help` responds without
loading a numerical library. Config files are ml_collections: `--config=FILE[:MODE]
--config.train.steps=500`.
"""

import argparse
import atexit
import difflib
import gc
import importlib
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from mmqa_jax.core.errors import RunError, UserError, find_disk_failure, report_disk_once
from mmqa_jax.core.host import skip_absent_tpu
from mmqa_jax.core.paths import check_scheme, scheme_of
from mmqa_jax.core.terminal import escape_streams, json_line

VERBS = (
    *("demo", "ask", "serve", "prepare", "features", "caption", "convert", "train", "embed"),
    *("replay", "index", "search"),
    *("rerank", "candidates", "answer", "prompt", "judge", "run", "sweep", "tables", "compare"),
    *("evaluate", "report", "plan", "merge", "status", "models"),
)
_PLACES = ("workdir", "out", "cache")  # flags that say where a verb writes
_INTERRUPTED = 130
_UNREAD = 141  # as of other commands whose output `| head` stops reading
_OBJECTS_BEFORE_COLLECTION = 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code (0 done, 1 the run failed, 2 invalid input)."""
    # Imports and traces make millions of objects that stay. To look for garbage after every 700 of
    # them, as Python does by default, takes a tenth of a short run.
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    # Nor does the interpreter look through them all again, several times, when it ends.
    atexit.register(gc.freeze)
    _open_closed()
    _print_anything()
    argv = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in argv
    places: list[str] = []
    try:
        _check_text(argv)
        with report_disk_once():
            if argv[:1] == ["bench"]:
                raise UserError("mmqa bench: is `python -m tests.bench` now, in a checkout's root.")
            argv, overrides = split_config_overrides(argv)
            arguments = make_parser(_verb_of(argv)).parse_args(argv)
            if overrides and not hasattr(arguments, "config"):
                raise UserError(f"{overrides[0]}: `mmqa {arguments.verb}` takes no --config.")
            arguments.overrides = overrides
            _check_stores(arguments)
            skip_absent_tpu()
            places = [str(place) for name in _PLACES if (place := getattr(arguments, name, None))]
            result = command(arguments.verb).run(arguments)
            _print_result(json_line(result) if arguments.json else None)
    except KeyboardInterrupt:
        print("mmqa: interrupted; start the same command again to continue.", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            _drop_stdout()
            return _UNREAD
        code, sentence = _explain(error, places)
        if code is None:
            raise
        if show_traceback:
            traceback.print_exc()
        _say_last(f"mmqa: {sentence}")
        return code
    return 0


def _explain(error: Exception, places: Sequence[str]) -> tuple[int | None, str]:
    """Exit code and sentence of an exception; None for a bug of ours.

    Args:
      error: what a verb raised.
      places: where it writes.
    """
    if isinstance(error, RunError):
        return 1, str(error)
    failure = find_disk_failure(error)
    if failure is not None:
        return 1, failure.sentence(places)
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, PermissionError) and error.filename:
        return 2, (
            f"{os.fspath(error.filename)}: permission denied; check who may read and write there, "
            "or name another place."
        )
    return None, ""


def _print_result(result: str | None) -> None:
    """Prints the last line of stdout, and says now what would go wrong at the process's end."""
    try:
        if result is not None:
            print(result)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        _drop_stdout()


def _reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads, and no other pipe was meant."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _open_closed() -> None:
    """Opens /dev/null for a closed stream (`>&-`), whose number the next file would get."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _drop_stdout() -> None:
    """Keeps Python from writing once more what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_last(sentence: str) -> None:
    """Prints a sentence on stderr, behind all else."""
    try:
        sys.stdout.flush()
    except OSError:  # it is a file on the disk that is full
        _drop_stdout()
    print(sentence, file=sys.stderr, flush=True)


def _print_anything() -> None:
    """What the terminal's encoding lacks is printed as an escape (\\u2013) and ends no run; control
    characters of texts are escaped, too (core/terminal.py).

    The encoding may be ASCII or Latin-1 (LC_ALL, PYTHONIOENCODING, a pipe), and a file's name may
    hold bytes that are no text, which Python keeps as lone surrogates.
    """
    for stream in (sys.stdout, sys.stderr):
        stream = getattr(stream, "unescaped", stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python's own sequences (3.13) would be escaped
    escape_streams()


def _check_text(argv: Sequence[str]) -> None:
    """UserError for an argument that is no text: it could be written into no file of a run."""
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{argument}: holds bytes that are no text in this locale "
                f"({sys.getfilesystemencoding()}); rename the file, or set LC_ALL=C.UTF-8."
            ) from None


def _check_stores(arguments: argparse.Namespace) -> None:
    """UserError for a place in an object store where the verb takes none, or that is unknown."""
    verb = command(arguments.verb)
    taken = {*getattr(verb, "STORE_INPUTS", ()), *getattr(verb, "STORE_OUTPUTS", ())}
    if getattr(verb, "STORE_CONFIG", False):
        taken.add("overrides")
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            place = text.partition("=")[2] if name == "overrides" else text
            if not isinstance(place, str) or scheme_of(place) is None:
                continue
            flag = f"--config.{text}" if name == "overrides" else f"--{name}={text}"
            if name not in taken:
                raise UserError(
                    f"{flag}: `mmqa {arguments.verb}` takes no place in an object store there; "
                    "name one in the file system."
                )
            check_scheme(place, flag)


def command(verb: str):
    """The module of a verb."""
    return importlib.import_module(f"mmqa_jax.commands.{verb}")


def _verb_of(argv: Sequence[str]) -> str | None:
    """The verb that is asked for; None where none is, or one that does not exist."""
    first = next((argument for argument in argv if not argument.startswith("-")), None)
    return first if first in VERBS else None


class _PrintVersion(argparse.Action):
    """Prints the versions of what computes and ends; they are looked up when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib import metadata  # takes longer than all else that --help imports

        names = ("mmqa-jax", "jax", "flax", "transformers")
        print(", ".join(f"{name} {metadata.version(name)}" for name in names))
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints a shell's script and ends; shtab is imported when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option=None):
        import shtab

        print(shtab.complete(parser, shell))
        parser.exit()


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser of `mmqa VERB ...`; invalid arguments raise UserError.

    `verb`: the only one that is parsed, so that no other's module is loaded; None: all.
    """
    parser = _Parser(
        prog="mmqa",
        description="Multimodal, multi-hop question answering in JAX.",
        epilog="`mmqa VERB --help` shows a verb's flags and a working example.",
    )
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        action=_PrintCompletion,
        help="print what completes verbs and flags in a shell, such as in ~/.bashrc: "
        'eval "$(mmqa --print-completion bash)"',
    )
    parser.add_argument(
        "--version", nargs=0, action=_PrintVersion, help="print the versions of what computes"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS if verb is None else (verb,):
        module = command(name)
        added = verbs.add_parser(
            name,
            help=module.SUMMARY,
            description=module.SUMMARY,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="last line: the result as JSON")
        added.add_argument("--traceback", action="store_true", help="show an error's traceback")
        module.add_flags(added)
    return parser


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error message is one sentence, and whose flags are written out."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args=None, namespace=None):
        # Checked here, where the verb's own flags are known, to suggest the closest one.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            suggestion = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        close = difflib.get_close_matches(str(value), map(str, action.choices), n=1)
        suggestion = f" (did you mean {close[0]}?)" if close else ""
        expected = ", ".join(map(str, action.choices))
        self.error(
            f"argument {'/'.join(action.option_strings) or action.metavar or action.dest}: invalid "
            f"choice: {value!r}{suggestion}; choose from {expected}"
        )

    def error(self, message: str) -> NoReturn:
        verb = self.prog.removeprefix("mmqa").strip()
        raise UserError(f"{f'mmqa {verb}: ' if verb else ''}{message}; see `{self.prog} --help`.")


def split_config_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--config.a.b=value` arguments from the verb's own."""
    arguments, overrides = [], []
    for argument in argv:
        if argument.startswith("--config."):
            if "=" not in argument:
                raise UserError(f"{argument}: write it as --config.KEY=VALUE, without spaces.")
            overrides.append(argument.removeprefix("--config."))
        else:
            arguments.append(argument)
    return arguments, overrides


if __name__ == "__main__":
    sys.exit(main())
