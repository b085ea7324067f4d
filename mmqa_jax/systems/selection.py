"""Source selection (WebQA section 5.1) as a stage: what the verb rerank does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.systems import webqa
from mmqa_jax.systems.retrieval_scores import score_retrieval, show_retrieval
from mmqa_jax.systems.retrieval_stages import open_retriever
from mmqa_jax.systems.stages import check_top_k, split_questions


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What is reranked.

    Attributes:
      given: `restricted`, each question's own; a rankings file, of which `top_k` sources are read;
        or `all`, the whole collection, of which `top_k` are kept (models with joint_layers).
      top_k: see there.
      cap: for `restricted`, a name of webqa.CAPS.
      retriever: workdir of a contrastive run or a converted CLIP; with it, similarity is the
        cosine and two-hop questions are read a second time (parts.TwoPassReranker).
      index_dir: folder of `mmqa index` over the retriever's embeddings.
      similarity_weight: of the retriever's cosines, or of the scores in the file, beside the
        relevance; see webqa.interpolate.
    """

    given: str
    top_k: int
    cap: str = "none"
    retriever: Path | None = None
    index_dir: Path | None = None
    similarity_weight: float = 0.0

    def check(self) -> None:
        """Raises UserError where the parts do not fit together."""
        check_top_k(self.top_k)
        weight = self.similarity_weight
        if self.cap != "none" and self.given != "restricted":
            raise UserError(
                f"--cap={self.cap}: limits each question's own candidates; use it with "
                "--candidates=restricted, and --top_k with a file."
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise UserError(
                f"--similarity_weight={weight}: 0 or more was expected; give one, such as 20."
            )
        if (self.retriever is None) != (self.index_dir is None):
            raise UserError("--retriever needs --index, and --index --retriever; give both.")
        if self.retriever is not None and self.given == "all":
            raise UserError(
                "--retriever: finds similarities of few candidates; use it with --candidates="
                "restricted or a file."
            )
        if weight and not self.have_similarity:
            raise UserError(
                f"--similarity_weight={weight}: no similarity is known of --candidates="
                f"{self.given}; give --retriever and --index, or a file of `mmqa search`."
            )

    @property
    def have_similarity(self) -> bool:
        """Whether a retriever says how similar the candidates are."""
        return self.retriever is not None or self.given not in ("restricted", "all")


def rerank(
    data: Path, model: Path, candidates: Candidates, out: Path, *, split: str, select: str = "best"
) -> dict[str, Any]:
    """Scores candidate sources with the source head; sweeps threshold and similarity's weight.

    Args:
      select: how the sweep selects sources, a name of webqa.SELECTIONS.
    """
    from mmqa_jax.core import startup
    from mmqa_jax.retrieval.rankings import write_rankings

    candidates.check()
    check_out(out)
    startup.start()
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    hops = _read(candidates, model, corpus, questions)
    weight = candidates.similarity_weight
    relevance = webqa.combine(hops, weight)
    write_rankings(out, relevance)
    print(f"Relevance for {len(questions):,} questions: {out}")
    if not any(question.positives for question in questions):
        return {"questions": len(questions)}  # as in WebQA's test split
    scored = score_retrieval(corpus, questions, relevance)
    show_retrieval(f"{data.name}, {split}: reranked", scored)
    weights = sorted({*webqa.WEIGHTS, weight}) if candidates.have_similarity else (0.0,)
    best_weight, best_threshold, sweep = webqa.tune_selection(questions, hops, select, weights)
    _show_sweep(f"{data.name}, {split}: source F1 by --select={select}", sweep)
    own = {threshold: f1 for (tried, threshold), f1 in sweep.items() if tried == weight}
    rows = [
        {"similarity_weight": tried, "threshold": threshold, "source_f1": f1}
        for (tried, threshold), f1 in sweep.items()
    ]
    threshold = webqa.best_threshold(own)
    return {
        "questions": len(questions),
        "best_threshold": threshold,
        "source_f1": own[threshold],
        "best": {
            "similarity_weight": best_weight,
            "threshold": best_threshold,
            "source_f1": sweep[best_weight, best_threshold],
        },
        "sweep": rows,
        **scored,
    }


def _read(
    candidates: Candidates, model: Path, corpus: Corpus, questions: Sequence[Question]
) -> list[webqa.Hop]:
    """Relevance, and similarity where it is known (without, its rankings are empty)."""
    from mmqa_jax.retrieval.rankings import read_rankings
    from mmqa_jax.systems.cached_reranker import rank_all
    from mmqa_jax.systems.loading import load_reranker
    from mmqa_jax.systems.parts import TwoPassReranker

    if candidates.given == "restricted":
        given = webqa.restricted_candidates(questions, corpus, webqa.CAPS[candidates.cap])
    elif candidates.given != "all":  # mistakes in it show before the model loads
        ids = [question.id for question in questions]
        found = read_rankings(candidates.given, ids, corpus.row)
        given = [webqa.top(ranking, candidates.top_k) for ranking in found]
    reranker = load_reranker(model, corpus)
    if candidates.retriever is not None:
        retriever = open_retriever(
            corpus, candidates.retriever, candidates.index_dir, two_pass=True
        )
        return TwoPassReranker(retriever, reranker).read(questions, given)
    if candidates.given == "all":
        relevance = rank_all(reranker, questions, candidates.top_k)
    else:
        relevance = reranker.score(questions, given)
    nothing = [Ranking(question.id, (), ()) for question in questions]
    return [webqa.Hop(relevance, given if candidates.have_similarity else nothing)]


def _show_sweep(title: str, sweep: Mapping[tuple[float, float], float]) -> None:
    """Prints source F1: a row for every threshold, a column for every weight of similarity."""
    from mmqa_jax.evaluation.tables import Table, show

    weights = sorted({weight for weight, _ in sweep})
    thresholds = sorted({threshold for _, threshold in sweep})
    rows = [[f"{t:g}", *(float(sweep[weight, t]) for weight in weights)] for t in thresholds]
    if len(weights) == 1:
        show(Table(title, ["threshold", "source F1"], rows))
        return
    note = "A row a threshold, a column a --similarity_weight."
    show(Table(title, ["", *(f"{weight:g}" for weight in weights)], rows, note))
