"""`mmqa answer`: answers from gold sources, given sources, or none."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags
from mmqa_jax.core.paths import as_path

if TYPE_CHECKING:
    from mmqa_jax.data.schema import Question

SUMMARY = "answer every question from given sources, with beam search."
EXAMPLE = (
    "mmqa answer --data=data/atlas --model=runs/answer --sources=oracle "
    "--out=runs/predictions.jsonl"
)
STORE_INPUTS = ("data", "model", "sources")
STORE_OUTPUTS = ("out",)


_CHUNK = 512


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add_data(parser)
    flags.add_split(parser)
    parser.add_argument(
        "--model", required=True, help="workdir of an answer training run, or its folder best"
    )
    parser.add_argument(
        "--sources",
        default="oracle",
        help="`oracle` (the gold sources, if published), `none`, or a file of `mmqa rerank`",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.2,
        help="probability that a source needs to be cited (0.2); `mmqa rerank` sweeps it",
    )
    flags.add_select(parser)
    flags.add_devices(parser, "questions")
    flags.add_shard(parser, "questions", _CHUNK)
    parser.add_argument("--out", required=True, help="predictions.jsonl to write")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers the questions of a split.

    A model of one modality (VLP_I, VLP_T) answers only the questions that need that modality.
    """
    shard = flags.start(arguments)
    arguments = flags.fetched(arguments, STORE_INPUTS)
    from mmqa_jax.core.chunks import Part
    from mmqa_jax.core.files import check_out, write_jsonl
    from mmqa_jax.data.corpus import open_corpus, split_questions
    from mmqa_jax.data.schema import prediction_row
    from mmqa_jax.evaluation.source_selection import check_threshold
    from mmqa_jax.papers import webqa
    from mmqa_jax.retrieval.modality import of_modality
    from mmqa_jax.retrieval.rankings import check_gold, read_rankings
    from mmqa_jax.runs import identity
    from mmqa_jax.runs.part import OpenedParts
    from mmqa_jax.runs.parts import ReaderSpec
    from mmqa_jax.runs.stages import Stage, answering
    from mmqa_jax.tasks.registry import reader_modality

    data, out = Path(arguments.data), as_path(arguments.out)
    options, placed = flags.serving_options(arguments), {}
    check_threshold(arguments.threshold, "--threshold")
    check_out(out)
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, arguments.split)
    if arguments.sources == "oracle":  # checked before the model loads, and so is the file
        check_gold(questions)
    relevance = None
    if arguments.sources not in ("oracle", "none"):
        relevance = read_rankings(arguments.sources, [q.id for q in questions], corpus.row)
    modality = reader_modality(arguments.model)
    if modality is not None:
        answerable = of_modality(questions, corpus, modality)
        print(
            f"{arguments.model} was trained on {modality} sources alone: it answers the "
            f"{len(answerable)} of {len(questions)} questions that need them.",
            file=sys.stderr,
        )
        ids = {question.id for question in answerable}
        relevance = relevance and [r for r in relevance if r.question_id in ids]
        questions = answerable

    def answer(asked: Sequence[Question], parts: Mapping[str, Any]) -> Part:
        reader = parts["reader"]
        if relevance is not None:
            predictions = webqa.answer_selected(
                asked,
                parts["relevance"],
                reader,
                threshold=arguments.threshold,
                select=arguments.select,
            )
        elif arguments.sources == "oracle":
            predictions = webqa.answer_oracle(asked, reader)
        else:
            predictions = webqa.answer_question_only(asked, reader)
        return Part([prediction_row(prediction) for prediction in predictions])

    what = {
        "verb": "answer",
        "corpus": corpus.fingerprint,
        "questions": identity.of_questions(questions),
        "model": identity.of_folders(arguments.model),
        "sources": arguments.sources if relevance is None else identity.of_rankings(relevance),
        "threshold": arguments.threshold,
        "select": arguments.select,
    }
    say = flags.say_where("answer", "reader.model", placed)
    opened = OpenedParts(corpus, inference=options, say=say)
    along = {} if relevance is None else {"relevance": relevance}
    stage = Stage(what, {"reader": ReaderSpec(arguments.model)}, answer, along)
    with answering(
        stage, flags.job_folder(out), questions, opened,
        chunk=arguments.chunk, shard=shard, engine=flags.engine(arguments),
    ) as job:  # fmt: skip
        rows = job.rows()
        if rows is None:
            return {"questions": len(questions), **placed, **job.waiting()}
        write_jsonl(out, rows)
        job.done()
    print(f"{len(rows):,} answers: {out}")
    return {"questions": len(rows), "predictions": str(out), **placed}
