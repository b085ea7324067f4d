"""`mmqa search`, `rerank` and `answer`: one stage of a row by itself, from a corpus to a file."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.chunks import WHOLE, Engine, Part, Shard
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, write_jsonl
from mmqa_jax.core.serving import Serving
from mmqa_jax.data.corpus import Corpus, open_corpus, split_questions
from mmqa_jax.data.schema import Question, Ranking, prediction_row
from mmqa_jax.evaluation import retrieval
from mmqa_jax.evaluation.tables import Table, answer_table, show
from mmqa_jax.evaluation.webqa import SELECTIONS, best_threshold, check_threshold
from mmqa_jax.extensions import fusion_tuning, similarity
from mmqa_jax.papers import webqa
from mmqa_jax.retrieval import rankings
from mmqa_jax.retrieval.modality import modality_report, of_modality
from mmqa_jax.runs import part, parts
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.stages import Stage, answering


@dataclasses.dataclass(frozen=True)
class StageFiles:
    """The files of a stage: its questions, its output, and how it is computed."""

    # data, sources: folders of `mmqa prepare`, see `open_corpus`.
    data: Path
    split: str
    out: Path  # the file to write; finished chunks are kept beside it
    # chunk, shard, engine: see core.chunks.Job.
    chunk: int
    sources: str = ""
    # Batch size and mesh, in place of those of the model's run.
    inference: Mapping[str, Any] | None = None
    shard: Shard = WHOLE
    engine: Engine | None = None

    def open(self) -> tuple[Corpus, list[Question]]:
        """The corpus, and the questions of the split."""
        check_out(self.out)
        corpus = open_corpus(self.data, self.sources)
        return corpus, split_questions(corpus, self.data, self.split)

    @property
    def title(self) -> str:
        """The corpus and the split, as tables name them."""
        return f"{self.data.name}, {self.split}"


class _Opened(OpenedParts):
    """The parts of one stage; `placed` has devices, mesh and batch size of its model for --json."""

    def __init__(self, corpus: Corpus, files: StageFiles, verb: str, part: str):
        self.placed: dict[str, Any] = {}

        def say(name: str, serving: Serving) -> None:
            if name == f"{part}.model":
                print(f"{verb}: {serving}", file=sys.stderr)
                self.placed.update(serving.to_json())

        super().__init__(corpus, inference=files.inference, say=say)


def _chunks_of(files: StageFiles, stage: Stage, questions: list[Question], opened: _Opened) -> Any:
    """The job of a stage, see `answering`."""
    searches = {"title": "Searching", "unit": "questions"} if "retriever" in stage.parts else {}
    return answering(
        stage, files.out.with_name(f"{files.out.name}.parts"), questions, opened,
        chunk=files.chunk, shard=files.shard, engine=files.engine, **searches,
    )  # fmt: skip


# Search.


def search(
    files: StageFiles,
    spec: parts.RetrieverSpec,
    top_k: int,
    *,
    restricted: bool = False,
    tune: bool = False,
    qrels: Path | None = None,
    matches: Path | None = None,
) -> dict[str, Any]:
    """Searches, writes the rankings, and scores them if gold sources are known.

    `restricted` ranks each question's own candidates alone; `tune` first chooses the weight of
    `fused`, on these questions; `qrels` is a file for the questions' gold sources, `matches` one
    for a page that draws what of their best pages the questions matched.
    """
    spec.check(restricted=restricted)
    corpus, questions = files.open()
    show_matches = None
    if matches is not None:  # refused before the search
        check_out(matches, flag="--matches")
        show_matches = open_matches(spec.model, corpus, files.inference)
    rankings.check_rankings_out(files.out, questions, corpus)
    if qrels is not None:  # before hours of search, not after them
        check_out(qrels, flag="--qrels")
        rankings.check_qrels(qrels, questions)
    opened, more = _Opened(corpus, files, "search", "retriever"), {}
    if tune:
        fusion_tuning.check_gold(questions, "--tune", "the fusion weight")  # before a model loads
        at_weight = parts.open_fusions(corpus, spec, opened.on_model("retriever"))
        tuned = fusion_tuning.tune_fusion(questions, at_weight, top_k)
        _show_weights(f"{files.title}: fused", tuned, top_k)
        spec = dataclasses.replace(spec, fusion_weight=tuned.weight)
        more = {
            "fusion_weight": tuned.weight,
            "sweep": [{"fusion_weight": w, **scores} for w, scores in tuned.sweep.items()],
        }
        searched_before = at_weight(tuned.weight)  # which remembers the rankings
        opened.once("retriever", spec.fingerprint(), lambda _: searched_before, "retriever")

    def find(asked: Sequence[Question], taken: Mapping[str, Any]) -> Part:
        retriever = taken["retriever"]
        if restricted:
            ranked = webqa.retrieve_restricted(asked, corpus, retriever, cited=top_k)
        else:
            ranked = webqa.retrieve_full_scale(asked, retriever, cited=top_k, top_k=top_k)
        return Part([rankings.ranking_row(ranking) for ranking in ranked])

    what = {
        "verb": "search",
        "corpus": corpus.fingerprint,
        **({"asked": corpus.asked_by} if corpus.asked_by else {}),
        "questions": part.of_questions(questions),
        "retriever": spec.fingerprint(),
        "candidates": "restricted" if restricted else "all",
        "top_k": top_k,
    }
    count, placed = {"questions": len(questions)}, opened.placed
    stage = Stage(what, {"retriever": spec}, find)
    with _chunks_of(files, stage, questions, opened) as job:
        rows = job.rows()
        if rows is None:
            return {**count, **placed, **job.waiting()}
        ranked = list(map(rankings.ranking_of, rows))
        rankings.write_rankings(files.out, ranked)
        if qrels is not None:
            rankings.write_qrels(qrels, questions)
        job.done()
    depth = 0 if restricted else min(top_k, len(corpus))
    scored = retrieval.score_retrieval(corpus, questions, ranked, depth)
    searched = "own candidates" if restricted else f"modality {spec.modality}"
    retrieval.show_retrieval(f"{files.title}: {spec.method}, {searched}", scored)
    print(f"Rankings of {len(questions):,} questions: {files.out}")
    if qrels is not None:
        print(f"Their gold sources: {qrels}")
    if matches is not None and show_matches is not None:
        more["matches"] = show_matches(matches, files.title, questions, ranked)
        print(f"What of their best pages they matched: {matches}")
    if retrieval.know_articles(questions):
        by_article = retrieval.score_articles(corpus.articles, questions, ranked)
        show(answer_table(f"{files.title}: articles", by_article))
        more["articles"] = by_article.scores
    if spec.modality in ("known", "classified"):
        choose = None if spec.modality == "known" else parts.open_predictor(corpus, spec)
        report = modality_report(corpus, questions, choose)
        for name, value in report.items():
            if value is not None:
                print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
        more |= report
    return {**count, **scored, **more, **placed}


def open_matches(
    model: str, corpus: Corpus, inference: Mapping[str, Any] | None
) -> Callable[..., list[dict[str, Any]]]:
    """Opens what writes the page of --matches: `reports.row.write_matches` with a model."""
    from mmqa_jax.runs.reports.row import check_matches, write_matches
    from mmqa_jax.tasks.embedder import open_embedder

    if not model:
        raise UserError("--matches: --method=bm25 matches words, not pages; use --method=dense.")
    embedder, pictures = open_embedder(Path(model), corpus, inference)
    seen = {"embedder": check_matches(embedder), "pictures": pictures}
    return functools.partial(write_matches, corpus=corpus, **seen)


def _show_weights(title: str, tuned: fusion_tuning.TunedFusion, top_k: int) -> None:
    """Prints one row per weight; the chosen one is marked."""
    metrics = [f"recall@{k}" for k in (2, 10, 20, 100) if f"recall@{k}" in tuned.sweep[0.0]]
    rows = [
        [f"{weight:g}{' *' * (weight == tuned.weight)}", scores["ndcg"], scores["mrr"]]
        + [scores[name] for name in metrics]
        for weight, scores in tuned.sweep.items()
    ]
    note = "0: bm25 alone, 1: dense alone. * --fusion_weight with the best nDCG."
    show(Table(title, ["weight", f"ndcg@{top_k}", "mrr", *metrics], rows, note))


# Rerank.


@dataclasses.dataclass(frozen=True)
class RerankOptions:
    """The settings of scoring sources; see the flags of `mmqa rerank`."""

    model: str
    candidates: str = "restricted"
    top_k: int = 20
    cap: str = "none"
    retriever: str | None = None
    index: str | None = None
    similarity_weight: float = 0.0
    select: Literal["best", "above"] = "best"

    def check(self) -> None:
        """Raises UserError if the values contradict each other."""
        weight, candidates = self.similarity_weight, self.candidates
        if self.cap != "none" and candidates != "restricted":
            raise UserError(
                f"--cap={self.cap}: limits each question's own candidates; use it with "
                "--candidates=restricted, or use --top_k with a file."
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise UserError(
                f"--similarity_weight={weight}: 0 or more was expected; give one, such as 20."
            )
        if (self.retriever is None) != (self.index is None):
            raise UserError("--retriever and --index need each other; give both.")
        if self.retriever is not None and candidates == "all":
            raise UserError(
                "--retriever: computes the similarity of a few candidates; use it with "
                "--candidates=restricted or a file."
            )
        if weight and not self.has_similarity:
            raise UserError(
                f"--similarity_weight={weight}: no similarity is known for --candidates="
                f"{candidates}; give --retriever and --index, or a file of `mmqa search`."
            )

    @property
    def has_similarity(self) -> bool:
        """Whether a retriever, or the file, gives the similarity of the candidates."""
        return self.retriever is not None or self.candidates not in ("restricted", "all")


def rerank(files: StageFiles, options: RerankOptions) -> dict[str, Any]:
    """Scores candidate sources; sweeps the threshold and the weight of the similarity."""
    corpus, questions = files.open()
    rankings.check_rankings_out(files.out, questions, corpus)
    candidates = None
    if options.candidates not in ("restricted", "all"):  # checked before the model loads
        candidates = _read(options.candidates, corpus, questions)

    def read(asked: Sequence[Question], taken: Mapping[str, Any]) -> Part:
        reranker, top_k = taken["reranker"], options.top_k
        if options.candidates == "all":
            hops = similarity.read_all(asked, reranker, top_k)
        elif candidates is None:
            hops = similarity.read_restricted(asked, corpus, reranker, options.cap)
        else:
            hops = similarity.read_candidates(asked, taken["candidates"], reranker, top_k)
        return Part(similarity.evidence_rows(hops))

    weight = options.similarity_weight
    dense = parts.RetrieverSpec("dense", options.retriever or "", options.index or "")
    spec = parts.RerankerSpec(options.model, dense if options.retriever else None, weight)
    what = {
        "verb": "rerank",
        "corpus": corpus.fingerprint,
        "questions": part.of_questions(questions),
        "model": part.of_folders(options.model),
        "candidates": (options.candidates if candidates is None else part.of_rankings(candidates)),
        "top_k": options.top_k,
        "cap": options.cap,
        "retriever": dense.fingerprint(),
        "similarity_weight": weight,
        "select": options.select,
    }
    opened = _Opened(corpus, files, "rerank", "reranker")
    along = {} if candidates is None else {"candidates": candidates}
    count, placed = {"questions": len(questions)}, opened.placed
    stage = Stage(what, {"reranker": spec}, read, along)
    with _chunks_of(files, stage, questions, opened) as job:
        rows = job.rows()
        if rows is None:
            return {**count, **placed, **job.waiting()}
        evidence = similarity.evidence_of(rows)
        relevance = similarity.combine(evidence, weight)
        rankings.write_rankings(files.out, relevance)
        job.done()
    print(f"Relevance for {len(questions):,} questions: {files.out}")
    if note := webqa.cap_note(questions, options.cap):
        print(note, file=sys.stderr)
    if not any(question.positives for question in questions):  # as in WebQA's test split
        print(
            f"--split={files.split}: gold sources are hidden, so nothing is scored and no "
            "threshold swept; sweep it on --split=val",
            file=sys.stderr,
        )
        return {**count, **placed}
    scored = retrieval.score_retrieval(corpus, questions, relevance)
    retrieval.show_retrieval(f"{files.title}: reranked", scored)
    weights = sorted({*similarity.WEIGHTS, weight}) if options.has_similarity else (0.0,)
    tuned = similarity.tune_selection(questions, evidence, SELECTIONS[options.select], weights)
    title = f"{files.title}: source F1 by --select={options.select}"
    _show_thresholds(title, tuned, files.split)
    at_weight = {threshold: f1 for (w, threshold), f1 in tuned.sweep.items() if w == weight}
    threshold = best_threshold(at_weight)
    return {
        **count,
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


def _read(file: str, corpus: Corpus, questions: Sequence[Question]) -> list[Ranking]:
    return rankings.read_rankings(file, [question.id for question in questions], corpus.row)


def _show_thresholds(title: str, tuned: similarity.Tuned, split: str) -> None:
    """Prints source F1: one row per threshold, one column per similarity weight."""
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


# Answer.


def answer(
    files: StageFiles, model: str, sources: str, threshold: float, select: Literal["best", "above"]
) -> dict[str, Any]:
    """Answers the questions of a split from `oracle` sources, from `none`, or from a file of `mmqa
    rerank`, of which `threshold` and `select` say what is cited (webqa.answer_selected).

    A model of one modality (VLP_I, VLP_T) answers only the questions that need that modality.
    """
    from mmqa_jax.tasks.trained_readers import reader_modality

    check_threshold(threshold, "--threshold")
    corpus, questions = files.open()
    if sources == "oracle":  # checked before the model loads, and so is the file
        rankings.check_gold(questions)
    relevance = None
    if sources not in ("oracle", "none"):
        relevance = _read(sources, corpus, questions)
    modality = reader_modality(model)
    if modality is not None:
        answerable = of_modality(questions, corpus, modality)
        print(
            f"{model} was trained on {modality} sources alone: it answers the "
            f"{len(answerable)} of {len(questions)} questions that need them.",
            file=sys.stderr,
        )
        ids = {question.id for question in answerable}
        relevance = relevance and [r for r in relevance if r.question_id in ids]
        questions = answerable

    def read(asked: Sequence[Question], taken: Mapping[str, Any]) -> Part:
        reader = taken["reader"]
        if relevance is not None:
            options: dict[str, Any] = {"threshold": threshold, "select": select}
            predictions = webqa.answer_selected(asked, taken["relevance"], reader, **options)
        elif sources == "oracle":
            predictions = webqa.answer_oracle(asked, reader)
        else:
            predictions = webqa.answer_question_only(asked, reader)
        return Part(list(map(prediction_row, predictions)))

    what = {
        "verb": "answer",
        "corpus": corpus.fingerprint,
        "questions": part.of_questions(questions),
        "model": part.of_folders(model),
        "sources": sources if relevance is None else part.of_rankings(relevance),
        "threshold": threshold,
        "select": select,
    }
    opened = _Opened(corpus, files, "answer", "reader")
    along = {} if relevance is None else {"relevance": relevance}
    stage = Stage(what, {"reader": parts.ReaderSpec(model)}, read, along)
    with _chunks_of(files, stage, questions, opened) as job:
        rows = job.rows()
        if rows is None:
            return {"questions": len(questions), **opened.placed, **job.waiting()}
        write_jsonl(files.out, rows)
        job.done()
    print(f"{len(rows):,} answers: {files.out}")
    return {"questions": len(rows), "predictions": str(files.out), **opened.placed}
