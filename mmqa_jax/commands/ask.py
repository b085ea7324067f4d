"""`mmqa ask`: questions, answered with their sources from a folder of documents or a demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError

SUMMARY = "answer a question from a folder of documents with its sources, or say that none has it."
EXAMPLE = 'mmqa ask --data=manuals "How often is the filter cleaned?"'
_DEMO = "workdir-demo"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\n--data=FOLDER: documents (.txt .md .html .htm .pdf .docx .pptx .xlsx .csv .tsv .odt\n"
        "  .ods .odp) and pictures (.jpg .jpeg .png .webp), an interchange folder, or what\n"
        "  `mmqa prepare` wrote; it is read and embedded once, later calls read what has changed;\n"
        "  answers cite file, page and picture\n"
        "--workdir=DIR: a finished demo, with the models that it has trained\n"
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
        "  of several questions, and of --workdir, {answers: [...]}"
    )
    flags.add_reading(parser, f"a finished demo's workdir ({_DEMO}, without --data)")
    parser.add_argument("--image", help="a picture file that belongs to the question")
    parser.add_argument("question", nargs="+", help="the question; several are answered in turn")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers the questions in turn and prints each answer with its sources."""
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
        from mmqa_jax.runs.ask import ask_demo

        workdir = Path(arguments.workdir or _DEMO)
        return {"answers": ask_demo(workdir, arguments.question, picture)}
    from mmqa_jax.runs.ask_folder import ask_folder

    flags.download(arguments, "model", "encoder", "reranker", "ocr")
    options, reading = flags.reading_options(arguments)
    answers = ask_folder(
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
    return answers[0] if len(answers) == 1 else {"answers": answers}


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.data is not None:
        flags.check_reading(arguments)
        return
    for name in flags.READING:
        if getattr(arguments, name) is not None:
            raise UserError(
                f"--{name}: a demo answers with its own models; give --data=FOLDER with it, or "
                "leave it out."
            )
