"""`python -m tests.bench citations --data=FOLDER`: citations by cause beside those that are asked for.

SmolLM2-135M reads the five best passages by BM25 of FOLDER, Atlas or OpenStax, prepared: 60 (or
`--rounds`) questions of a split with a gold passage among the five, evenly over them. Gold are a question's
positives, or where it has none (OpenStax's multiple choice, asked without its choices) the passages
with its answer word by word; an answer is right that has the keywords, or the answer. `ours` are
citations by cause, `peer` those of the model itself. Precision and recall are of all answers, `gold`
is the share of right ones that cite a gold passage. On val all five are hidden in turn, by which
the threshold is chosen, the one of the highest F1 of right answers; `val tried N` is `gold` where N
are tried. On test as many are tried as a reader tries. `agreement` is the F1 of what the first
answers of val cite against real ablation (prompts without a source), and `correlation` that of the
losses. `processor` is answering with citing over answering alone, on test. With `--only=gold` all
are answered, and only right answers cited by cause: all rows are of these. `first` (alone by
`--only=first`) is the share of questions where a reader below the confidence in `at` is replaced by
the passages' best sentence (MiniLM), and what is first is right.
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
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.prompting.backends.config import open_backend
from mmqa_jax.prompting.causes import SENTENCES, suspects
from mmqa_jax.prompting.citations import read_citations
from mmqa_jax.prompting.few_shot import prompt_text
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.prompting.quotes import CONFIDENCE, best_quote
from mmqa_jax.runs.ask_folder import open_words
from mmqa_jax.tasks.library import open_text_embedder
from tests.bench import Options

_QUESTIONS, _TOP_K, _ABLATED = 60, 5, 12
_TRIED = (1, 2, 3, 5)
_SUPPORTS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)  # nats
_SURE = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_KINDS = ("text", "choose", "number", "color", "Others")  # of Atlas: no yes and no


class _Asked(dict):
    """A question's facts: gold, asked and sentences of its answer, whether words and quote are
    right."""


class _Timed(LLMReader):
    """Counts the processor's seconds that citing by cause takes."""

    citing = 0.0

    def _with_causes(self, *inputs: Any) -> list[Prediction]:
        began = time.process_time()
        predictions = super()._with_causes(*inputs)
        self.citing += time.process_time() - began
        return predictions


def run(options: Options) -> dict[str, Any]:
    """Precision, recall, share of gold, agreement and processor seconds of both."""
    if options.data is None:
        raise UserError("--data: name Atlas or OpenStax as `mmqa prepare` writes it.")
    corpus = open_corpus(Path(options.data))
    config = load_config(find_config("configs/prompt/default.py"), {"engine.length": 2048})
    llm = open_backend("engine", "smollm2", None, config, "--model")
    embedder, _ = open_text_embedder("minilm", Corpus([]))
    is_first = options.only == ("first",)
    rows: list[dict[str, Any]] = []
    support = sure = 0.0
    for split, tried in (("val", _TOP_K), ("test", LLMReaderOptions().tried)):
        questions, rankings = _readable(corpus, split, options.rounds or _QUESTIONS)
        if options.only == ("gold",):
            questions, rankings = _rightly_answered(corpus, llm, questions, rankings)
        reading = LLMReaderOptions(citations="asked" if is_first else "cause", tried=tried)
        reader = _Timed(corpus, llm, reading)
        if split == "test":  # nothing that was read before is reused, all is compiled
            llm.engine.forget()
        began = time.process_time()
        predictions = reader.answer(questions, rankings)
        whole = time.process_time() - began
        facts = [
            _facts(corpus, question, prediction, embedder)
            for question, prediction in zip(questions, predictions, strict=True)
        ]
        right = [fact for fact in facts if fact["right"]]
        about = {"answered": sum(f["confidence"] > 0 for f in facts), "right": len(right)}
        if split == "val":
            support = max(_SUPPORTS, key=lambda value: _f1([f for f in facts if f["right"]], value))
            sure = max(_SURE, key=lambda value: _first(facts, value))
            rows += [_row(f"val first at {value}", _first(facts, value)) for value in _SURE]
            if not is_first:
                rows += _of_val(facts, right, support)
                asked = list(zip(questions, rankings, predictions, strict=True))
                rows.append({**_agreement(corpus, llm, asked, support), "at": support})
        rows.append({**_row(f"{split} first", _first(facts, sure), _first(facts, 0.0)), "at": sure})
        if not is_first:
            for name, score, some in (
                ("precision", _precision, facts),
                ("recall", _recall, facts),
                ("gold", _has_gold, right),
            ):
                ours, peer = (_mean(some, score, at) for at in (support, None))
                rows.append({**_row(f"{split} {name}", ours, peer), "at": support, **about})
            if split == "test":
                row = _row("test processor", whole, whole - reader.citing)
                ratio = round(whole / (whole - reader.citing), 2)
                rows.append({**row, "ratio": ratio, "unit": "s", "tried": tried})
    return {"bench": "citations", "device": device_name(), "rows": rows}


def _row(name: str, ours: float, peer: float | None = None) -> dict[str, Any]:
    shares = {"ours": round(ours, 3), "peer": None if peer is None else round(peer, 3)}
    return {"name": name, **shares, "ratio": None, "unit": "", "floor": None}


def _of_val(facts: list[_Asked], right: list[_Asked], support: float) -> list[dict[str, Any]]:
    """The choices of val: other thresholds, fewer sources that are tried."""
    rows = [
        {**_row(f"val gold at {value}", _mean(right, _has_gold, value)),
         "precision": round(_mean(right, _precision, value), 3)}
        for value in _SUPPORTS
    ]  # fmt: skip
    for tried in _TRIED:
        some = [fact | {"tried": fact["suspects"](tried)} for fact in right]
        rows.append(_row(f"val tried {tried}", _mean(some, _has_gold, support)))
    return rows


def _agreement(
    corpus: Corpus, llm: Any, asked: Sequence[tuple[Question, Ranking, Prediction]], support: float
) -> dict[str, Any]:
    """F1 of what the first answers cite by hidden sources against prompts without them."""
    some = [row for row in asked if row[2].trace.get(SENTENCES)][:_ABLATED]
    llm.hides = False
    try:
        reader = LLMReader(corpus, llm, LLMReaderOptions(citations="cause", tried=_TOP_K))
        without = reader.answer([row[0] for row in some], [row[1] for row in some])
    finally:
        llm.hides = True
    ours, real = (
        np.concatenate([s["losses"] for p in predictions for s in p.trace[SENTENCES]])
        for predictions in ([row[2] for row in some], without)
    )
    both = np.sum((ours >= support) & (real >= support))
    f1 = 2 * both / max(np.sum(ours >= support) + np.sum(real >= support), 1)
    correlation = round(float(np.corrcoef(ours, real)[0, 1]), 3)
    return {**_row("val agreement", float(f1)), "correlation": correlation, "answers": len(some)}


def _readable(corpus: Corpus, split: str, most: int) -> tuple[list[Question], list[Ranking]]:
    """Questions with a gold passage among the best ones, evenly over the split."""
    asked = [q for q in corpus.questions(split) if q.answers and q.image is None]
    asked = [q for q in asked if q.choices or q.category in _KINDS]
    asked = [dataclasses.replace(q, choices=(), answer_index=None) for q in asked]
    ranked = open_words(corpus).search(asked, _TOP_K)
    pairs = [(q, r) for q, r in zip(asked, ranked, strict=True) if _gold(corpus, q, r.sources)]
    questions, rankings = zip(*evenly(pairs, most), strict=True)
    return list(questions), list(rankings)


def _rightly_answered(
    corpus: Corpus, llm: Any, questions: Sequence[Question], rankings: Sequence[Ranking]
) -> tuple[list[Question], list[Ranking]]:
    predictions = LLMReader(corpus, llm, LLMReaderOptions()).answer(questions, rankings)
    answered = zip(questions, rankings, predictions, strict=True)
    pairs = [(q, r) for q, r, prediction in answered if _is_in(q, prediction.answer)]
    if not pairs:
        raise RunError(f"none of {len(questions)} answers is right; take more by --rounds.")
    return [q for q, _ in pairs], [r for _, r in pairs]


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
    sources = [corpus.sources[corpus.row[name]] for name in read]
    texts = [prompt_text(source) for source in sources]
    quote = best_quote(question.question, sources, embedder, prediction.answer)
    quoted = ""
    if quote is not None:
        quoted = sources[quote.place].text[quote.start : quote.end]
    asked = tuple(read[n - 1] for n in read_citations(output, len(read)).numbers)
    as_asked = dataclasses.replace(prediction, sources=asked)
    return _Asked(
        gold=_gold(corpus, question, read),
        asked=set(asked),
        cause=prediction.trace.get(SENTENCES, []),
        suspects=lambda tried: {read[n] for n in suspects(as_asked, texts, tried)},
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
        if loss is not None and loss >= support and name in fact.get("tried", fact["read"])
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
