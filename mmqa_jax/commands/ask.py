"""`mmqa ask`: one question, answered with its sources from a finished demo's workdir."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError

SUMMARY = "answer a question from a demo's workdir with its sources, or say that none has it."
EXAMPLE = 'mmqa ask --workdir=workdir-demo "What is the capital of Kenya?"'


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument("--workdir", default="workdir-demo", help="a finished demo's workdir")
    parser.add_argument("--image", help="a picture file that belongs to the question")
    parser.add_argument("question", nargs="+", help="the question; several are answered in turn")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers the questions in turn and prints each answer with its sources."""
    if not all(text.strip() for text in arguments.question):
        raise UserError("the question is empty; write one in quotes.")
    from mmqa_jax.data.images import decode, read_picture_file

    picture = None
    if arguments.image is not None:
        picture = read_picture_file(arguments.image)
        decode(picture, arguments.image)  # a broken file is refused before models load
    from mmqa_jax.core import distributed

    distributed.start()
    from mmqa_jax.runs.ask import Answerer

    answerer = Answerer(Path(arguments.workdir))
    answers = []
    for text in arguments.question:
        began = time.perf_counter()
        answer = answerer.answer(text, picture)
        seconds = time.perf_counter() - began
        cited = answer.prediction.sources, answer.prediction.source_scores
        sources = [
            (answerer.corpus.sources[answerer.corpus.row[name]], score)
            for name, score in zip(*cited, strict=True)
        ]
        _show(text, answer, sources, seconds)
        answers.append(
            {
                "question": text,
                "answer": answer.text,
                "raw_answer": answer.prediction.answer,
                "found": answer.found,
                "sources": [
                    {"id": s.id, "score": score, "title": s.title, "text": s.text}
                    for s, score in sources
                ],
                "seconds": round(seconds, 2),
            }
        )
    return {"answers": answers}


def _show(question: str, answer: Any, sources: list[tuple[Any, float]], seconds: float) -> None:
    """Prints an answer on stderr, because stdout is reserved for the JSON."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    console.print(f"\n[bold]{escape(question)}[/bold]")
    console.print(f"{escape(answer.text)}  [dim]({seconds:.1f} s)[/dim]")
    if not answer.found:
        console.print("The nearest source:")
    for source, score in sources:
        kind = "picture" if source.modality == "image" else "snippet"
        console.print(
            f"  [cyan]{kind} {escape(source.id)}[/cyan] ({score:.2f}) "
            f"[bold]{escape(source.title)}[/bold]: {escape(source.text)}",
            highlight=False,
        )
