"""`mmqa ask`: questions, answered with their sources from a folder of documents or a demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.terminal import json_line

if TYPE_CHECKING:
    from mmqa_jax.runs.ask_folder import AskOptions

SUMMARY = "answer a question from a folder of documents with its sources, or say that none has it."
EXAMPLE = 'mmqa ask --data=manuals "How often is the filter cleaned?"'
_DEMO = "workdir-demo"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\n--data=FOLDER: documents (.txt .md .html .htm .pdf .docx .pptx .xlsx .csv .tsv .odt\n"
        "  .ods .odp), code and pictures (.jpg .jpeg .png .webp), an interchange folder, or what\n"
        "  `mmqa prepare` wrote; it is read and embedded once, later calls read what has changed;\n"
        "  answers cite file, page and picture\n"
        "--workdir=DIR: a finished demo, with the models that it has trained, or a row of `mmqa\n"
        "  run`, with its parts; `steps` of its --json is how it came to the answer\n"
        "backend openai: any server with OpenAI's API, at the address in the environment\n"
        "  variable OPENAI_BASE_URL, with the key in OPENAI_API_KEY if it requires one\n"
        "--json, of --data: {question, answer, found, sources: [{id, file, page, text, image,\n"
        "  score, cited, boxes, lines, cells, quote}], seconds}: `boxes` are [left, top, right,\n"
        "  bottom] of lines in points from the page's top left corner, `lines` the first and last\n"
        "  of a text file, `cells` those of a sheet, `quote` text and place of what the answer\n"
        "  quotes of it; `cited` is the source's number beside the answer, or null\n"
        "  where the answer cites none of those that the model was shown, `score` the similarity;\n"
        "  quote, the passages' best sentence where the model is not sure of its words, or null;\n"
        "  refusal, of a question too far from all passages: {nearest, similarity, least};\n"
        "  sentences, with --citations=cause, [{text, sources, losses}] of the answer: numbers of\n"
        "  what was read, the one that it needs most first, and nats that it loses without each;\n"
        "  thinking, thinking_tokens of a model that thought, cut where its tokens ran out;\n"
        "  of several questions a line each as it comes, and last, as of --workdir,\n"
        "  {answers: [...]}"
    )
    flags.add_reading(parser, f"the workdir of a demo ({_DEMO}, without --data) or a row")
    parser.add_argument("--image", help="a picture file that belongs to the question")
    parser.add_argument(
        "--calibrate",
        metavar="FILE.csv",
        help="with --data, instead of a question: chooses --least_similarity for --encoder on your "
        "own, in the columns question,answered (yes or no: whether the folder answers it)",
    )
    parser.add_argument("question", nargs="*", help="the question; several are answered in turn")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers the questions in turn and prints each answer with its sources."""
    if bool(arguments.question) == (arguments.calibrate is not None):
        raise UserError("give a question in quotes, or --calibrate=FILE.csv with many.")
    if not all(text.strip() for text in arguments.question):
        raise UserError("the question is empty; write one in quotes.")
    _check_flags(arguments)
    from mmqa_jax.data.pictures.decode import decode, read_picture_file

    picture = None
    if arguments.image is not None:
        picture = read_picture_file(arguments.image)
        decode(picture, arguments.image)  # a broken file is refused before models load
    if arguments.data is None and arguments.workdir is None and not Path(_DEMO).is_dir():
        raise UserError(
            f"give --data=FOLDER, whose documents answer; without it a finished demo does, and "
            f"there is no {_DEMO} here (`mmqa demo` makes one)."
        )
    from mmqa_jax.core.hosts import distributed

    distributed.start()
    if arguments.data is None:
        from mmqa_jax.runs.status import kind_of

        workdir = Path(arguments.workdir or _DEMO)
        if kind_of(workdir) == "row":
            from mmqa_jax.runs.ask_row import ask_row as answers
        else:
            from mmqa_jax.runs.ask import ask_demo as answers
        return {"answers": _in_turn(arguments, answers(workdir, arguments.question, picture))}
    from mmqa_jax.runs.ask_folder import ask_folder

    flags.download(arguments, "model", "encoder", "reranker", "ocr")
    options, reading = flags.reading_options(arguments)
    if arguments.calibrate is not None:
        return _calibrated(arguments, options)
    asked = ask_folder(
        Path(arguments.data),
        arguments.question,
        picture,
        model=arguments.model or "smollm2",
        backend=arguments.backend or "engine",
        thinking=arguments.thinking or "off",
        cache=flags.optional_path(arguments.cache),
        folder=flags.folder_options(arguments),
        options=options,
        reading=reading,
    )
    answers = _in_turn(arguments, asked)
    return answers[0] if len(answers) == 1 else {"answers": answers}


def _calibrated(arguments: argparse.Namespace, options: AskOptions) -> dict[str, Any]:
    from mmqa_jax.runs.ask_folder import open_folder
    from mmqa_jax.runs.calibration import calibrate

    cache = flags.optional_path(arguments.cache)
    folder = flags.folder_options(arguments)
    corpus = open_folder(Path(arguments.data), cache, folder, encoder=options.encoder)
    chosen = calibrate(corpus, options.encoder, Path(arguments.calibrate))
    print(
        f"--least_similarity={chosen['least_similarity']}: refuses "
        f"{chosen['refused_answered']:.0%} of the questions that are answered, and "
        f"{chosen['refused_others']:.0%} of the others.",
        file=sys.stderr,
    )
    return chosen


def _in_turn(
    arguments: argparse.Namespace, answers: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All answers, each of several printed as it comes where `--json` asks for it."""
    printed = []
    for answer in answers:
        printed.append(answer)
        if arguments.json and len(arguments.question) > 1:
            print(json_line(answer), flush=True)
    return printed


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.data is not None:
        flags.check_reading(arguments)
        return
    for name in (*flags.READING, "calibrate"):
        if getattr(arguments, name) is not None:
            raise UserError(
                f"--{name}: a demo answers with its own models; give --data=FOLDER with it, or "
                "leave it out."
            )
