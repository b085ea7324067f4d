"""`mmqa rerank`: source selection (WebQA section 5.1), with a sweep of its threshold."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

if TYPE_CHECKING:
    from mmqa_jax.data.schema import Question
    from mmqa_jax.extensions.similarity import Tuned

SUMMARY = "score candidate sources with a trained VLP source head, or a cross-encoder."
EXAMPLE = (
    "mmqa rerank --data=data/atlas --model=runs/rerank --candidates=restricted "
    "--out=runs/retrieval/restricted.jsonl"
)
STORE_INPUTS = ("data", "model", "candidates", "retriever", "index")
STORE_OUTPUTS = ("out",)


# Questions of a chunk; of one search over the whole collection, which encodes all sources anew.
_CHUNK, _CHUNK_ALL = 256, 8192


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add_data(parser)
    flags.add_split(parser)
    parser.add_argument(
        "--model",
        required=True,
        help="workdir of a rerank training run, or its folder best; or a published cross-encoder "
        "or Qwen3-Reranker (folder or ORG/NAME), which reads pictures by their captions, or a "
        "Qwen3-VL-Reranker, which sees them",
    )
    flags.add_download(parser)
    parser.add_argument(
        "--candidates",
        default="restricted",
        help="`restricted` (each question's own), a file of `mmqa search`, or `all`: the whole "
        "collection, with a model like that of configs/atlas/rerank_cached.py",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        default=20,
        help="candidates to score from a file, or to keep with --candidates=all (20)",
    )
    parser.add_argument(
        "--cap",
        choices=("none", "webqa"),
        default="none",
        help="restricted: webqa scores 16 pictures and 16 snippets per question, gold ones among "
        "them, like the baseline; all where gold sources are hidden",
    )
    parser.add_argument(
        "--retriever",
        help="workdir of a contrastive run, a CLIP or SigLIP, or another published encoder: "
        "scores two-hop questions again with the title of their best source, and provides cosines "
        "as the similarity",
    )
    parser.add_argument("--index", help="folder written by `mmqa index`, of the retriever")
    parser.add_argument(
        "--similarity_weight",
        type=float,
        default=0.0,
        metavar="W",
        help="of the similarity (the retriever's, or the scores in the file) against the "
        "relevance; 0 is VLP alone; the sweep shows the best on --split=val",
    )
    flags.add_select(parser)
    flags.add_devices(parser, "pairs")
    flags.add_shard(parser, "questions", shown=f"{_CHUNK}; --candidates=all: {_CHUNK_ALL}")
    flags.add_rankings_out(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Scores candidate sources; sweeps the threshold and the weight of the similarity."""
    _check(arguments)
    shard = flags.start(arguments)
    flags.download(arguments, "model", "retriever")
    arguments = flags.fetched(arguments, STORE_INPUTS)
    from mmqa_jax.core.chunks import Part
    from mmqa_jax.core.files import check_out
    from mmqa_jax.data.corpus import open_corpus, split_questions
    from mmqa_jax.evaluation.retrieval import score_retrieval, show_retrieval
    from mmqa_jax.evaluation.source_selection import SELECTIONS, best_threshold
    from mmqa_jax.extensions import similarity
    from mmqa_jax.papers import webqa
    from mmqa_jax.retrieval.rankings import check_rankings_out, read_rankings, write_rankings
    from mmqa_jax.runs import identity
    from mmqa_jax.runs.part import OpenedParts
    from mmqa_jax.runs.parts import RerankerSpec, RetrieverSpec
    from mmqa_jax.runs.stages import Stage, answering

    data, out, split = Path(arguments.data), as_path(arguments.out), arguments.split
    options, placed = flags.serving_options(arguments), {}
    check_out(out)
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    check_rankings_out(out, questions, corpus)
    candidates = None
    if arguments.candidates not in ("restricted", "all"):  # checked before the model loads
        candidates = read_rankings(arguments.candidates, [q.id for q in questions], corpus.row)

    def read(asked: Sequence[Question], parts: Mapping[str, Any]) -> Part:
        reranker, top_k = parts["reranker"], arguments.top_k
        if arguments.candidates == "all":
            hops = similarity.read_all(asked, reranker, top_k)
        elif candidates is None:
            hops = similarity.read_restricted(asked, corpus, reranker, arguments.cap)
        else:
            hops = similarity.read_candidates(asked, parts["candidates"], reranker, top_k)
        return Part(similarity.evidence_rows(hops))

    weight = arguments.similarity_weight
    dense = RetrieverSpec("dense", arguments.retriever or "", arguments.index or "")
    reranker = RerankerSpec(arguments.model, dense if arguments.retriever else None, weight)
    what = {
        "verb": "rerank",
        "corpus": corpus.fingerprint,
        "questions": identity.of_questions(questions),
        "model": identity.of_folders(arguments.model),
        "candidates": (
            arguments.candidates if candidates is None else identity.of_rankings(candidates)
        ),
        "top_k": arguments.top_k,
        "cap": arguments.cap,
        "retriever": dense.fingerprint(),
        "similarity_weight": weight,
        "select": arguments.select,
    }
    chunk = _CHUNK_ALL if arguments.candidates == "all" else _CHUNK
    chunk = chunk if arguments.chunk is None else arguments.chunk
    say = flags.say_where("rerank", "reranker.model", placed)
    opened = OpenedParts(corpus, inference=options, say=say)
    along = {} if candidates is None else {"candidates": candidates}
    stage = Stage(what, {"reranker": reranker}, read, along)
    with answering(
        stage, flags.job_folder(out), questions, opened,
        chunk=chunk, shard=shard, engine=flags.engine(arguments),
    ) as job:  # fmt: skip
        rows = job.rows()
        if rows is None:
            return {"questions": len(questions), **placed, **job.waiting()}
        evidence = similarity.evidence_of(rows)
        relevance = similarity.combine(evidence, weight)
        write_rankings(out, relevance)
        job.done()
    print(f"Relevance for {len(questions):,} questions: {out}")
    if note := webqa.cap_note(questions, arguments.cap):
        print(note, file=sys.stderr)
    if not any(question.positives for question in questions):  # as in WebQA's test split
        print(
            f"--split={split}: gold sources are hidden, so nothing is scored and no threshold "
            "swept; sweep it on --split=val",
            file=sys.stderr,
        )
        return {"questions": len(questions), **placed}
    scored = score_retrieval(corpus, questions, relevance)
    show_retrieval(f"{data.name}, {split}: reranked", scored)
    weights = sorted({*similarity.WEIGHTS, weight}) if _has_similarity(arguments) else (0.0,)
    tuned = similarity.tune_selection(questions, evidence, SELECTIONS[arguments.select], weights)
    _show_sweep(f"{data.name}, {split}: source F1 by --select={arguments.select}", tuned, split)
    at_weight = {threshold: f1 for (w, threshold), f1 in tuned.sweep.items() if w == weight}
    threshold = best_threshold(at_weight)
    return {
        "questions": len(questions),
        "best_threshold": threshold,
        "source_f1": at_weight[threshold],
        "best": {
            "similarity_weight": tuned.weight,
            "threshold": tuned.threshold,
            "source_f1": tuned.sweep[tuned.weight, tuned.threshold],
            "at_edge": tuned.at_edge,
        },
        "sweep": [
            {"similarity_weight": w, "threshold": t, "source_f1": f1}
            for (w, t), f1 in tuned.sweep.items()
        ],
        **scored,
        **placed,
    }


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError if the flags contradict each other."""
    flags.check_top_k(arguments.top_k)
    weight, candidates = arguments.similarity_weight, arguments.candidates
    if arguments.cap != "none" and candidates != "restricted":
        raise UserError(
            f"--cap={arguments.cap}: limits each question's own candidates; use it with "
            "--candidates=restricted, or use --top_k with a file."
        )
    if not (weight >= 0 and math.isfinite(weight)):
        raise UserError(
            f"--similarity_weight={weight}: 0 or more was expected; give one, such as 20."
        )
    if (arguments.retriever is None) != (arguments.index is None):
        raise UserError("--retriever and --index need each other; give both.")
    if arguments.retriever is not None and candidates == "all":
        raise UserError(
            "--retriever: computes the similarity of a few candidates; use it with --candidates="
            "restricted or a file."
        )
    if weight and not _has_similarity(arguments):
        raise UserError(
            f"--similarity_weight={weight}: no similarity is known for --candidates="
            f"{candidates}; give --retriever and --index, or a file of `mmqa search`."
        )


def _has_similarity(arguments: argparse.Namespace) -> bool:
    """Whether a retriever, or the file, gives the similarity of the candidates."""
    return arguments.retriever is not None or arguments.candidates not in ("restricted", "all")


def _show_sweep(title: str, tuned: Tuned, split: str) -> None:
    """Prints source F1: one row per threshold, one column per similarity weight."""
    from mmqa_jax.evaluation.tables import Table, show

    weights, sweep = tuned.weights, tuned.sweep
    thresholds = sorted({threshold for _, threshold in sweep})
    rows: list[Sequence[Any]] = [
        [f"{t:g}", *(float(sweep[weight, t]) for weight in weights)] for t in thresholds
    ]
    notes = []
    if len(weights) > 1:
        notes.append("One row per threshold, one column per --similarity_weight.")
    if tuned.at_edge:
        notes.append(
            f"The best weight, {tuned.weight:g}, is the largest: larger ones may be better."
        )
    if split == "test":
        notes.append("Choose threshold and weight with --split=val, not by this table.")
    columns = ["", *(f"{weight:g}" for weight in weights)]
    if len(weights) == 1:
        columns = ["threshold", "source F1"]
    show(Table(title, columns, rows, " ".join(notes)))
