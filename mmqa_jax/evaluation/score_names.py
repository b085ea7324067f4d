"""What scores are called in reports and tables; JSON and flags keep their identifiers.

An identifier names scorer and variant (`webqa_acc/no_lemma`), which figures in papers lack. A
person reads "answer accuracy (WebQA, no lemmatizer)", with the identifier behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAMES = {
    "webqa_acc/official": "answer accuracy (WebQA)",
    "webqa_acc/no_lemma": "answer accuracy (WebQA, no lemmatizer)",
    "webqa_acc/approx": "answer accuracy (WebQA, reference as keywords)",
    "webqa_acc/approx_no_lemma": "answer accuracy (WebQA, reference as keywords, no lemmatizer)",
    "exact_match/official": "exact match",
    "exact_match/no_lemma": "exact match (no lemmatizer)",
    "webqa_fl/official": "fluency (WebQA)",
    "webqa_fl/paper_eq1": "fluency (WebQA, equation 1)",
    "webqa_fl_acc/official": "fluency × accuracy (WebQA)",
    "source_f1/official": "source F1 (WebQA)",
    "source_f1/notebook": "source F1 (authors' notebook)",
    "source_f1/clip_notebook": "source F1 (authors' CLIP notebook)",
    "source_f1": "source F1",
    "source_f1@0.2": "source F1 at threshold 0.2",
    "citation_precision": "citation precision",
    "citation_recall": "citation recall",
    "refused/answerable": "refused, though a source answers",
    "refused/unanswerable": "refused, no source answers",
    "modality_accuracy": "modality accuracy",
    "mrr": "mean reciprocal rank",
    "article_mrr": "mean reciprocal rank of the right article",
    "vqa_accuracy/official": "VQA accuracy (official)",
    "vqa_accuracy/soft_labels": "VQA accuracy (soft labels)",
    "vqa_accuracy/official_from_soft_labels": "VQA accuracy (official, from soft labels)",
    "vqa_accuracy/paper": "VQA accuracy (formula of papers)",
    "vqa_accuracy/prophet": "VQA accuracy (Prophet's code)",
    "vqa_accuracy/kat": "VQA accuracy (KAT's code)",
    "a_okvqa_da/official": "direct-answer accuracy (A-OKVQA)",
    "a_okvqa_mc/official": "multiple-choice accuracy (A-OKVQA)",
    "choice_accuracy/recorded_choice": "choice accuracy",
    "scienceqa/recorded_choice": "accuracy (ScienceQA, recorded choice)",
    "scienceqa/letter_or_wrong": "accuracy (ScienceQA, no letter is wrong)",
    "scienceqa/letter_or_random": "accuracy (ScienceQA, no letter is drawn)",
    "scienceqa/letter_or_expected": "accuracy (ScienceQA, no letter counts as chance)",
    "mmbench/vanilla": "accuracy (MMBench, one pass)",
    "mmbench/circular": "accuracy (MMBench, all passes)",
    "mmbench/vanilla_2026": "accuracy (MMBench, one pass, rule of 2026)",
    "mmbench/circular_2026": "accuracy (MMBench, all passes, rule of 2026)",
    "seed_bench/letter": "accuracy (SEED-Bench, letter)",
    "seed_bench/likelihood": "accuracy (SEED-Bench, likelihood)",
    "infoseek/official": "accuracy (InfoSeek)",
    "evqa/exact_match": "exact match (Encyclopedic-VQA)",
    "evqa/bem": "accuracy by BEM (Encyclopedic-VQA)",
    "vidore/official": "nDCG (ViDoRe)",
    "mbeir/official": "recall of any positive (M-BEIR)",
    "mmmu/official": "accuracy (MMMU, no letter is drawn)",
    "mmmu/unparsed_wrong": "accuracy (MMMU, no letter is wrong)",
    "mathvista/official": "accuracy (MathVista)",
    "mathvista/empty_wrong": "accuracy (MathVista, an empty answer is wrong)",
    "mragbench/rule": "accuracy (MRAG-Bench)",
    "mmmu/letter": "accuracy (MMMU, the letter alone)",
    "multimodalqa/list_em": "exact match (MultimodalQA)",
    "multimodalqa/list_f1": "F1 (MultimodalQA)",
}
# Families whose variants depend on weights or on k.
_FAMILIES = (
    (re.compile(r"webqa_fl_acc/(\w+)"), "fluency × accuracy (WebQA, {})"),
    (re.compile(r"webqa_fl/paper_eq1_(\w+)"), "fluency (WebQA, equation 1, {} weights)"),
    (re.compile(r"webqa_fl/(\w+)"), "fluency (WebQA, {} weights)"),
    (re.compile(r"article_recall@(\d+)"), "the right article in the top {}"),
    (re.compile(r"vidore/ndcg@(\d+)"), "nDCG@{} (ViDoRe)"),
    (re.compile(r"mbeir/recall@(\d+)"), "a positive in the top {} (M-BEIR)"),
    (re.compile(r"ndcg@(\d+)"), "nDCG@{}"),
    (re.compile(r"hit_any@(\d+)"), "a gold source in the top {}"),
    (re.compile(r"hit_all@(\d+)"), "all gold sources in the top {}"),
)


def score_name(identifier: str) -> str:
    """A score's name for people: `webqa_acc/no_lemma` is "answer accuracy (WebQA, no lemmatizer)".

    Of an identifier that is not known (a scorer of one's own) the identifier itself.
    """
    if identifier in _NAMES:
        return _NAMES[identifier]
    for pattern, name in _FAMILIES:
        if found := pattern.fullmatch(identifier):
            return name.format(found[1].replace("_", " "))
    return identifier


def for_people(text: str) -> str:
    """A heading or a cell with the identifiers in it, as whole words, replaced by their names."""
    return " ".join(map(score_name, text.split(" ")))


def identifiers_in(texts: Iterable[str]) -> dict[str, str]:
    """Name -> identifier of all scores that are named in the texts, in order of appearance."""
    words = (word for text in texts for word in text.split(" "))
    return {name: word for word in words if (name := score_name(word)) != word}
