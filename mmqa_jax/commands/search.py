"""`mmqa search`: rankings of sources for every question of a split."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

if TYPE_CHECKING:
    from mmqa_jax.data.schema import Question
    from mmqa_jax.extensions.fusion_tuning import TunedFusion

SUMMARY = "rank sources for every question."
EXAMPLE = (
    "mmqa search --data=data/atlas --method=dense --model=runs/contrastive "
    "--index=runs/index --out=runs/retrieval/dense.jsonl"
)
STORE_INPUTS = ("data", "sources", "model", "index", "modality_model")
STORE_OUTPUTS = ("out", "qrels")


_CHUNK = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add_data(parser)
    flags.add_split(parser)
    flags.add_sources(parser)
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
    flags.add_download(parser)
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
    flags.add_rankings_out(parser)
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
    from mmqa_jax.core.chunks import Part
    from mmqa_jax.core.files import check_out
    from mmqa_jax.data.corpus import open_corpus, split_questions
    from mmqa_jax.evaluation.retrieval import (
        know_articles,
        score_articles,
        score_retrieval,
        show_retrieval,
    )
    from mmqa_jax.evaluation.tables import answer_table, show
    from mmqa_jax.extensions.fusion_tuning import check_gold, tune_fusion
    from mmqa_jax.papers import webqa
    from mmqa_jax.retrieval.modality import modality_report
    from mmqa_jax.retrieval.rankings import (
        check_qrels,
        check_rankings_out,
        ranking_of,
        ranking_row,
        write_qrels,
        write_rankings,
    )
    from mmqa_jax.runs import identity
    from mmqa_jax.runs.part import OpenedParts
    from mmqa_jax.runs.parts import RetrieverSpec, open_fusions, open_predictor
    from mmqa_jax.runs.stages import Stage, answering

    data, out, split = Path(arguments.data), as_path(arguments.out), arguments.split
    restricted = arguments.candidates == "restricted"
    check_out(out)
    spec = RetrieverSpec(
        arguments.method,
        arguments.model,
        arguments.index,
        modality=arguments.modality,
        modality_model=arguments.modality_model,
        asks=arguments.asks,
        webqa_compat=arguments.webqa_compat,
        second_hop=arguments.second_hop,
        fusion_weight=arguments.fusion_weight,
    )
    _check_tune(arguments, alone=flags.is_alone(arguments, shard))
    spec.check(restricted=restricted)
    corpus = open_corpus(data, arguments.sources)
    questions = split_questions(corpus, data, split)
    check_rankings_out(out, questions, corpus)
    qrels = as_path(arguments.qrels) if arguments.qrels else None
    if qrels is not None:  # before hours of search, not after them
        check_out(qrels, flag="--qrels")
        check_qrels(qrels, questions)
    top_k, more, placed = arguments.top_k, {}, {}
    opened = OpenedParts(corpus, say=flags.say_where("search", "retriever.model", placed))
    if arguments.tune:
        check_gold(questions, "--tune", "the fusion weight")  # before the model loads
        at_weight = open_fusions(corpus, spec, opened.on_model("retriever"))
        tuned = tune_fusion(questions, at_weight, top_k)
        _show_sweep(f"{data.name}, {split}: fused", tuned, top_k)
        spec = dataclasses.replace(spec, fusion_weight=tuned.weight)
        more = {
            "fusion_weight": tuned.weight,
            "sweep": [{"fusion_weight": w, **scores} for w, scores in tuned.sweep.items()],
        }
        searched_before = at_weight(tuned.weight)  # which remembers the rankings
        opened.once("retriever", spec.fingerprint(), lambda _: searched_before, "retriever")

    def search(asked: Sequence[Question], parts: Mapping[str, Any]) -> Part:
        retriever = parts["retriever"]
        if restricted:
            rankings = webqa.retrieve_restricted(asked, corpus, retriever, cited=top_k)
        else:
            rankings = webqa.retrieve_full_scale(asked, retriever, cited=top_k, top_k=top_k)
        return Part([ranking_row(ranking) for ranking in rankings])

    what = {
        "verb": "search",
        "corpus": corpus.fingerprint,
        **({"asked": corpus.asked_by} if corpus.asked_by else {}),
        "questions": identity.of_questions(questions),
        "retriever": spec.fingerprint(),
        "candidates": arguments.candidates,
        "top_k": top_k,
    }
    stage = Stage(what, {"retriever": spec}, search)
    with answering(
        stage, flags.job_folder(out), questions, opened,
        chunk=arguments.chunk, shard=shard, engine=flags.engine(arguments),
        title="Searching", unit="questions",
    ) as job:  # fmt: skip
        rows = job.rows()
        if rows is None:
            return {"questions": len(questions), **placed, **job.waiting()}
        rankings = [ranking_of(row) for row in rows]
        write_rankings(out, rankings)
        if qrels is not None:
            write_qrels(qrels, questions)
        job.done()
    depth = 0 if restricted else min(top_k, len(corpus))
    scored = score_retrieval(corpus, questions, rankings, depth)
    searched = "own candidates" if restricted else f"modality {spec.modality}"
    show_retrieval(f"{data.name}, {split}: {spec.method}, {searched}", scored)
    print(f"Rankings of {len(questions):,} questions: {out}")
    if qrels is not None:
        print(f"Their gold sources: {qrels}")
    if know_articles(questions):
        by_article = score_articles(corpus.articles, questions, rankings)
        show(answer_table(f"{data.name}, {split}: articles", by_article))
        more["articles"] = by_article.scores
    if spec.modality in ("known", "classified"):
        choose = None if spec.modality == "known" else open_predictor(corpus, spec)
        report = modality_report(corpus, questions, choose)
        for name, value in report.items():
            if value is not None:
                print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
        more |= report
    return {"questions": len(questions), **scored, **more, **placed}


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


def _show_sweep(title: str, tuned: TunedFusion, top_k: int) -> None:
    """Prints one row per weight; the chosen one is marked."""
    from mmqa_jax.evaluation.tables import Table, show

    metrics = [f"recall@{k}" for k in (2, 10, 20, 100) if f"recall@{k}" in tuned.sweep[0.0]]
    rows = [
        [f"{weight:g}{' *' * (weight == tuned.weight)}", scores["ndcg"], scores["mrr"]]
        + [scores[name] for name in metrics]
        for weight, scores in tuned.sweep.items()
    ]
    note = "0: bm25 alone, 1: dense alone. * --fusion_weight with the best nDCG."
    show(Table(title, ["weight", f"ndcg@{top_k}", "mrr", *metrics], rows, note))
