"""`python -m tests.bench citations --data=FOLDER`: citations by cause beside those that are asked for.

SmolLM2-135M reads the five best passages by BM25 of FOLDER, Atlas or OpenStax, prepared: the first
questions of a split with a gold passage among the five, 60 or `--rounds`. Gold are a question's
positives, or where it has none (OpenStax's multiple choice, asked without its choices) the passages
with its answer word by word; an answer is right that has the keywords, or the answer. `ours` are
citations by cause, `peer` those of the model itself. Precision and recall are of all answers, `gold`
is the share of right ones that cite a gold passage. The threshold is chosen on val: the one of the
highest F1 of right answers. `first` (alone by `--only=first`) is the share of questions where a
reader below the confidence in `at` is replaced by the passages' best sentence (MiniLM), and what is
first is right.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.config import find_config, load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.prompting.backends.config import open_backend
from mmqa_jax.prompting.causes import SENTENCES
from mmqa_jax.prompting.citations import read_citations
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.prompting.quotes import CONFIDENCE, best_quote
from mmqa_jax.runs.ask_folder import open_words
from mmqa_jax.tasks.library import open_text_embedder
from tests.bench import Options

_QUESTIONS, _TOP_K = 60, 5
_SUPPORTS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)  # nats
_SURE = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_KINDS = ("text", "choose", "number", "color", "Others")  # of Atlas: no yes and no


class _Asked(dict):
    """A question's facts: gold, asked and sentences of its answer, whether words and quote are
    right."""


def run(options: Options) -> dict[str, Any]:
    """Precision, recall, share of gold and processor seconds of both, on val and test."""
    if options.data is None:
        raise UserError("--data: name Atlas or OpenStax as `mmqa prepare` writes it.")
    corpus = open_corpus(Path(options.data))
    config = load_config(find_config("configs/prompt/default.py"), {"engine.length": 2048})
    llm = open_backend("engine", "smollm2", None, config, "--model")
    embedder, _ = open_text_embedder("minilm", Corpus([]))
    kinds = ("asked",) if options.only == ("first",) else ("asked", "cause")
    rows: list[dict[str, Any]] = []
    support = sure = 0.0
    for split in ("val", "test"):
        questions, rankings = _readable(corpus, split, options.rounds or _QUESTIONS)
        seconds, predictions = {}, []
        for kind in kinds:
            if split == "test":  # nothing that was read before is reused
                llm.engine.forget()
            reader = LLMReader(corpus, llm, LLMReaderOptions(citations=kind))
            began = time.process_time()
            predictions = reader.answer(questions, rankings)
            seconds[kind] = time.process_time() - began
        facts = [
            _facts(corpus, question, prediction, embedder)
            for question, prediction in zip(questions, predictions, strict=True)
        ]
        if split == "val":
            support = max(_SUPPORTS, key=lambda value: _f1([f for f in facts if f["right"]], value))
            sure = max(_SURE, key=lambda value: _first(facts, value))
        right = [fact for fact in facts if fact["right"]]
        about = {"answered": sum(f["confidence"] > 0 for f in facts), "right": len(right)}
        for name, ours, peer, unit in (
            ("precision", *(_mean(facts, _precision, at) for at in (support, None)), ""),
            ("recall", *(_mean(facts, _recall, at) for at in (support, None)), ""),
            ("gold", *(_mean(right, _has_gold, at) for at in (support, None)), ""),
            ("processor", seconds[kinds[-1]], seconds["asked"], "s"),
            ("first", _first(facts, sure), _first(facts, 0.0), ""),
        ):
            row = {"name": f"{split} {name}", "ours": round(ours, 3), "peer": round(peer, 3)}
            at = {"processor": None, "first": sure}.get(name, support)
            more = {"ratio": None, "unit": unit, "floor": None, "at": at}
            rows.append({**row, **more, **about})
        if split == "val":
            rows += [
                {"name": f"val gold at {value}", "ours": round(_mean(right, _has_gold, value), 3),
                 "peer": None, "ratio": None, "unit": "", "floor": None, "at": value,
                 "precision": round(_mean(right, _precision, value), 3)}
                for value in _SUPPORTS
            ]  # fmt: skip
            rows += [
                {"name": f"val first at {value}", "ours": round(_first(facts, value), 3),
                 "peer": None, "ratio": None, "unit": "", "floor": None, "at": value}
                for value in _SURE
            ]  # fmt: skip
    if len(kinds) == 1:
        rows = [row for row in rows if " first" in row["name"]]
    return {"bench": "citations", "device": device_name(), "rows": rows}


def _readable(corpus: Corpus, split: str, most: int) -> tuple[list[Question], list[Ranking]]:
    """The first questions with a gold passage among the best ones."""
    asked = [q for q in corpus.questions(split) if q.answers and q.image is None]
    asked = [q for q in asked if q.choices or q.category in _KINDS]
    asked = [dataclasses.replace(q, choices=(), answer_index=None) for q in asked]
    ranked = open_words(corpus).search(asked, _TOP_K)
    pairs = [(q, r) for q, r in zip(asked, ranked, strict=True) if _gold(corpus, q, r.sources)]
    questions, rankings = zip(*pairs[:most], strict=True)
    return list(questions), list(rankings)


def _gold(corpus: Corpus, question: Question, names: Sequence[str]) -> set[str]:
    if question.positives:
        return set(question.positives) & set(names)
    return {name for name in names if _is_in(question, corpus.sources[corpus.row[name]].text)}


def _is_in(question: Question, text: str) -> bool:
    """Whether a text has the question's keywords, or its answer, word by word."""
    wanted = question.keywords or question.answers[0]
    return f" {_words(wanted)} " in f" {_words(text)} "


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _facts(corpus: Corpus, question: Question, prediction: Prediction, embedder: Any) -> _Asked:
    read = prediction.read
    output = prediction.trace.get("outputs", [{"text": ""}])[0]["text"]
    quote = best_quote(
        question.question, [corpus.sources[corpus.row[name]] for name in read], embedder
    )
    quoted = ""
    if quote is not None:
        source = corpus.sources[corpus.row[read[quote.place]]]
        quoted = source.text[quote.start : quote.end]
    return _Asked(
        gold=_gold(corpus, question, read),
        asked={read[n - 1] for n in read_citations(output, len(read)).numbers},
        cause=prediction.trace.get(SENTENCES, []),
        read=read,
        right=_is_in(question, prediction.answer),
        quote=_is_in(question, quoted),
        confidence=prediction.trace.get(CONFIDENCE, 0.0),
    )


def _cited(fact: _Asked, support: float | None) -> set[str]:
    """By cause, or where `support` is None what the model cites."""
    if support is None:
        return fact["asked"]
    return {
        name
        for sentence in fact["cause"]
        for name, loss in zip(fact["read"], sentence["losses"], strict=True)
        if loss >= support
    }


def _precision(fact: _Asked, cited: set[str]) -> float:
    return len(cited & fact["gold"]) / max(len(cited), 1)


def _recall(fact: _Asked, cited: set[str]) -> float:
    return len(cited & fact["gold"]) / max(len(fact["gold"]), 1)


def _has_gold(fact: _Asked, cited: set[str]) -> float:
    return float(bool(cited & fact["gold"]))


def _mean(facts: Sequence[_Asked], score: Any, support: float | None) -> float:
    return float(np.mean([score(fact, _cited(fact, support)) for fact in facts])) if facts else 0.0


def _f1(facts: Sequence[_Asked], support: float) -> float:
    precision, recall = (_mean(facts, score, support) for score in (_precision, _recall))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _first(facts: Sequence[_Asked], sure: float) -> float:
    """The share of questions whose first sentence is right."""
    return float(np.mean([f["right"] if f["confidence"] >= sure else f["quote"] for f in facts]))
