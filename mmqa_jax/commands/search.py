"""`mmqa search`: rankings of sources for every question of a split."""

import argparse
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

SUMMARY = "rank sources for every question."
EXAMPLE = (
    "mmqa search --data=data/atlas --method=dense --model=runs/contrastive "
    "--index=runs/index --out=runs/retrieval/dense.jsonl"
)
STORE_INPUTS = ("data", "sources", "model", "index", "modality_model")
STORE_OUTPUTS = ("out", "qrels", "matches")


_CHUNK = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add(parser, "data", "split", "sources")
    parser.add_argument(
        "--method",
        choices=("bm25", "dense", "fused", "rrf"),
        required=True,
        help="fused: bm25 and dense by a convex combination of their scores; rrf: by reciprocal "
        "ranks",
    )
    parser.add_argument(
        "--model",
        default="",
        help="workdir of a contrastive run, its folder best, a CLIP or SigLIP, a "
        "Qwen3-VL-Embedding, or a published encoder of texts, folder or ORG/NAME (not for bm25)",
    )
    flags.add(parser, "download")
    parser.add_argument(
        "--index",
        default="",
        help="folder written by `mmqa index`; BM25 is made in memory if it has none",
    )
    parser.add_argument(
        "--fusion_weight",
        type=float,
        metavar="A",
        help="fused: weight of the dense scores, from 0 (bm25) to 1 (dense); 0.8 if not given",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="fused: search at every weight from 0 to 1, in steps of 0.05, and keep the one with "
        "the best nDCG; with --split=val",
    )
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
        choices=("unknown", "known", "classified", "text", "image"),
        default="unknown",
        help="search all sources, those of the gold sources' modality, those of the modality "
        "that a classifier predicts (its accuracy is printed), or those of one modality",
    )
    parser.add_argument(
        "--modality_model",
        default="",
        help="classified: workdir of a modality training run (WebQA's BERT classifier; by default "
        "logistic regression over the words of the train questions)",
    )
    parser.add_argument(
        "--asks",
        choices=("both", "text", "picture"),
        default="both",
        help="what of a question is searched for (both)",
    )
    parser.add_argument(
        "--webqa_compat",
        action="store_true",
        help="bm25: with the quirks of WebQA's baseline (gensim 3.8 over doc2bow pairs)",
    )
    parser.add_argument("--top_k", type=int, default=100, help="sources per question (100)")
    flags.add_shard(parser, "questions", _CHUNK)
    flags.add(parser, "out")
    parser.add_argument(
        "--matches",
        metavar="FILE.html",
        help="dense, by a ColPali or its like: also draw what of the best page the first 20 "
        "questions matched; --json has each word's best place",
    )
    parser.add_argument(
        "--qrels",
        metavar="FILE",
        help="also write the split's gold sources as qrels of TREC, for trec_eval or ir-measures",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Searches, writes the rankings, and scores them if gold sources are known."""
    flags.check_top_k(arguments.top_k)
    shard = flags.start(arguments, jax=arguments.method != "bm25")
    flags.download(arguments, "model")
    arguments = flags.fetched(arguments, STORE_INPUTS)
    _check_tune(arguments, alone=flags.is_alone(arguments, shard))
    from mmqa_jax.runs.parts import RetrieverSpec
    from mmqa_jax.runs.verbs import one_stage

    return one_stage.search(
        flags.stage_files(arguments, shard),
        flags.fill(RetrieverSpec, arguments),
        arguments.top_k,
        restricted=arguments.candidates == "restricted",
        tune=arguments.tune,
        qrels=as_path(arguments.qrels) if arguments.qrels else None,
        matches=as_path(arguments.matches) if arguments.matches else None,
    )


def _check_tune(arguments: argparse.Namespace, *, alone: bool) -> None:
    """Raises UserError if --tune contradicts another flag."""
    if not arguments.tune:
        return
    if arguments.method != "fused" or arguments.candidates != "all":
        raise UserError(
            "--tune: chooses the weight of --method=fused with --candidates=all; leave it out."
        )
    if arguments.fusion_weight is not None:
        raise UserError("--tune and --fusion_weight: the one chooses the other; give one of them.")
    if not alone:
        raise UserError(
            "--tune with --shard or --engine: the weight is chosen over all questions; choose "
            "it with one process, and give it to the others as --fusion_weight."
        )
    if arguments.split == "test":
        raise UserError(
            "--tune: a weight chosen on the test split would flatter the figures measured on it; "
            "give --split=val."
        )
