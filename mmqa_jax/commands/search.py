"""`mmqa search`: rankings of sources for every question of a split."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "rank sources for every question."
EXAMPLE = (
    "mmqa search --data=data/atlas --method=dense --model=runs/contrastive "
    "--index=runs/index --out=runs/retrieval/dense.jsonl"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add_data(parser)
    flags.add_split(parser)
    parser.add_argument(
        "--method",
        choices=("bm25", "dense", "fused"),
        required=True,
        help="fused: reciprocal-rank fusion of the other two",
    )
    parser.add_argument(
        "--model",
        default="",
        help="workdir of a contrastive run, its folder best, or a converted CLIP (dense, fused)",
    )
    parser.add_argument("--index", default="", help="folder written by `mmqa index` (dense, fused)")
    parser.add_argument(
        "--second_hop",
        action="store_true",
        help="search again with the title of the first result (two-hop questions)",
    )
    parser.add_argument(
        "--candidates",
        choices=("all", "restricted"),
        default="all",
        help="the whole collection, or each question's own gold and negative sources",
    )
    parser.add_argument(
        "--modality",
        choices=("unknown", "known", "classified"),
        default="unknown",
        help="search all sources, those of the gold sources' modality, or those of the modality "
        "that a classifier predicts; its accuracy is printed",
    )
    parser.add_argument(
        "--modality_model",
        default="",
        help="classified: workdir of a modality training run (WebQA's BERT classifier; by default "
        "logistic regression over the words of the train questions)",
    )
    parser.add_argument(
        "--webqa_compat",
        action="store_true",
        help="bm25: with the quirks of WebQA's baseline (gensim 3.8 over doc2bow pairs)",
    )
    parser.add_argument("--top_k", type=int, default=100, help="sources per question (100)")
    parser.add_argument("--out", required=True, help="JSON-lines file to write")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Searches, writes the rankings, and scores them if gold sources are known."""
    flags.check_top_k(arguments.top_k)
    if arguments.method != "bm25":
        from mmqa_jax.core import distributed

        distributed.start()
    from mmqa_jax.core.files import check_out
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.data.splits import split_questions
    from mmqa_jax.evaluation.retrieval_tables import score_retrieval, show_retrieval
    from mmqa_jax.retrieval.modality import modality_report
    from mmqa_jax.retrieval.rankings import write_rankings
    from mmqa_jax.systems import webqa
    from mmqa_jax.systems.parts import RetrieverSpec, open_retriever

    data, out, split = Path(arguments.data), Path(arguments.out), arguments.split
    restricted = arguments.candidates == "restricted"
    check_out(out)
    spec = RetrieverSpec(
        arguments.method,
        arguments.model,
        arguments.index,
        modality=arguments.modality,
        modality_model=arguments.modality_model,
        webqa_compat=arguments.webqa_compat,
        second_hop=arguments.second_hop,
    )
    spec.check(restricted=restricted)
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    retriever = open_retriever(corpus, spec)
    top_k = arguments.top_k
    if restricted:
        rankings = webqa.retrieve_restricted(questions, corpus, retriever, cited=top_k)
    else:
        rankings = webqa.retrieve_full_scale(questions, retriever, cited=top_k, top_k=top_k)
    write_rankings(out, rankings)
    scored = score_retrieval(corpus, questions, rankings)
    searched = "own candidates" if restricted else f"modality {spec.modality}"
    show_retrieval(f"{data.name}, {split}: {spec.method}, {searched}", scored)
    print(f"Rankings of {len(questions):,} questions: {out}")
    more = {}
    if spec.modality != "unknown":
        more = modality_report(corpus, questions, retriever, known=spec.modality == "known")
        for name, value in more.items():
            if value is not None:
                print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    return {"questions": len(questions), **scored, **more}
