"""Traces how a prompted system came to its answers: trace.jsonl, and its rows on cards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.report import TraceNode
from mmqa_jax.evaluation.tables import Table
from mmqa_jax.prompting.few_shot import lacks_caption
from mmqa_jax.prompting.llm_reader import READER
from mmqa_jax.prompting.search_loop import TURNS
from mmqa_jax.runs.reports.agents import agent_tree
from mmqa_jax.tasks.library import has_picture

# Counts of `trace_counts` -> what is shown of those above 0.
_SHOWN = {
    "questions_without_passages": "questions without a passage",
    "dropped_passages": "passages that did not fit",
    "without_caption": "questions without a caption of their picture",
    "without_picture": "questions whose picture is not there",
    "repeated_choices": "questions with the same choice twice",
    "too_few_examples": "questions with fewer examples than asked for",
    "questions_with_dropped_shots": "questions with examples that did not fit",
    "dropped_shots": "examples that did not fit",
    "shots_without_caption": "examples shown without a caption of their picture",
    "too_long": "questions that do not fit without examples",
    "failed": "questions with failed requests",
    "empty_answers": "empty answers",
    "cut": "answers cut where their tokens ran out",
    "questions_with_own_caption": "questions with their own caption, which parts.captions lacks",
    "shots_with_own_caption": "examples with their own caption, which parts.captions lacks",
    "answered_by_first_candidate": "questions answered by the first candidate",
    "without_candidates": "questions without candidates",
    "shots_without_candidates": "examples shown without candidates",
    "picture_not_shown": "questions whose picture was not shown",
    "dropped_sources": "sources that did not fit",
    "cut_sources": "sources cut to fit",
    "refused": "questions without sources, refused",
    "not_found": "questions that the model found no answer to in the sources",
    "uncited": "answers that cite no source",
    "wrong_citations": "citations of sources that there are not",
    "searches": "searches that the model made",
    "unanswered": "questions whose turns ended before an answer",
}


def trace_rows(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    scores: Mapping[str, Mapping[str, float]],
) -> Iterator[dict[str, Any]]:
    """One line per question: its prompts, shots, raw outputs, answer and scores."""
    for question, prediction in zip(questions, predictions, strict=True):
        yield {
            "question_id": question.id,
            "question": question.question,
            "answer": prediction.answer,
            "choice": prediction.choice,
            "references": list(question.answers or question.choices),
            "scores": dict(scores.get(question.id, {})),
            **prediction.trace,
        }


def trace_counts(
    questions: Sequence[Question], predictions: Sequence[Prediction], shots: int = 0
) -> dict[str, int]:
    """Counts, for scores.json, prompts without shots or knowledge, dropped shots, and failures.

    Of systems with candidates also how many answers are the first candidate for want of any other,
    and what has no candidates; with a file of captions what that file lacks. Examples count in
    every prompt that shows them.

    Args:
      shots: how many examples a prompt was to show.
    """
    traces = [prediction.trace for prediction in predictions if prediction.trace]
    known = [trace for trace in traces if "knowledge" in trace]
    knowledge = {
        "questions_without_passages": sum(
            not any(t["knowledge"]) and not t["dropped_passages"] for t in known
        ),
        "dropped_passages": sum(t["dropped_passages"] for t in known),
    }
    counts = {
        **(knowledge if known else {}),
        "without_caption": sum(map(lacks_caption, questions)),
        "without_picture": sum(q.image is None and has_picture(q) for q in questions),
        "repeated_choices": sum(len(set(q.choices)) < len(q.choices) for q in questions),
        "too_few_examples": sum(_chosen(t) < shots * len(t.get("prompts", ())) for t in traces),
        "questions_with_dropped_shots": sum(bool(t.get("dropped_shots")) for t in traces),
        "dropped_shots": sum(t.get("dropped_shots", 0) for t in traces),
        "shots_without_caption": _total(traces, "shots_without_caption") if questions else 0,
        "too_long": sum(bool(t.get("too_long")) for t in traces),
        "failed": sum(bool(t.get("failed")) for t in traces),
        "empty_answers": sum(not p.answer.strip() for p in predictions if p.trace),
        "cut": _total(traces, "cut"),
    }
    if any(TURNS in trace for trace in traces):
        counts["searches"] = _total(traces, "searches")
        counts["unanswered"] = sum(TURNS in t and "incomplete" in t for t in traces)
    if any("fallback" in trace for trace in traces):
        counts["answered_by_first_candidate"] = sum(
            bool(t["fallback"]) and not t.get("vote", True) for t in traces if "fallback" in t
        )
        counts["without_candidates"] = sum(not t.get("fallback", True) for t in traces)
        counts["shots_without_candidates"] = _total(traces, "shots_without_candidates")
    if any("caption" in trace for trace in traces):
        counts["questions_with_own_caption"] = sum(t.get("caption", "") is None for t in traces)
        counts["shots_with_own_caption"] = _total(traces, "shots_with_own_caption")
    if any(READER in trace for trace in traces):
        counts |= _reader_counts(traces)
    return counts


def _reader_counts(traces: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Counts in LLMReader's traces what the model was not shown, and how it cited."""
    return {
        "picture_not_shown": _total(traces, "picture_not_shown"),
        "dropped_sources": _total(traces, "dropped_sources"),
        "cut_sources": sum("cut_to_words" in trace for trace in traces),
        "refused": sum("refused" in trace for trace in traces),
        "not_found": _total(traces, "not_found"),
        "uncited": _total(traces, "uncited"),
        "wrong_citations": _total(traces, "wrong_citations"),
    }


def counts_table(counts: Mapping[str, int]) -> list[Table]:
    """The counts above 0 as a table; [] where there are none."""
    rows = [(text, counts[name]) for name, text in _SHOWN.items() if counts.get(name)]
    note = "Examples count in every prompt that shows them."
    return [Table("Prompts", ("what", "count"), rows, note)] if rows else []


def _total(traces: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(trace.get(key, 0) for trace in traces)


def llm_cost(whole: Mapping[str, int], questions: int) -> dict[str, float]:
    """Returns what a row's answers cost: calls of the language model and tokens, whole (the fields
    of prompting/backends/cache.py:Work) and per question. Kept answers count as fresh ones do, so
    that a rerun costs the same."""
    return {**whole, **{f"{name}_per_question": n / questions for name, n in whole.items()}}


def _chosen(trace: Mapping[str, Any]) -> int:
    """How many shots were chosen for a question's prompts."""
    return sum(map(len, trace.get("shots", ()))) + trace.get("dropped_shots", 0)


def reference_rows(question: Question) -> list[tuple[str, str]]:
    """Returns a card's rows on the right answer: choices and references."""
    rows = []
    if question.choices:
        rows.append(("choices", " · ".join(question.choices)))
    answers = question.answers
    if question.answer_index is not None:
        answers = (question.choices[question.answer_index],)
    reference = " · ".join(dict.fromkeys(answers))
    if question.keywords and reference:
        reference += f"  (scored: {question.keywords})"
    rows.append(("reference", reference or "(not published)"))
    return rows


def trace_tree(prediction: Prediction) -> list[TraceNode]:
    """The agents of a prediction, or the turns of a model that searches, as a tree; [] of another
    system."""
    if turns := prediction.trace.get(TURNS):
        return [_turn(number, turn) for number, turn in enumerate(turns, start=1)]
    if "agents" not in prediction.trace:
        return []
    return agent_tree(prediction.trace, prediction.answer)


def _turn(number: int, turn: Mapping[str, Any]) -> TraceNode:
    """A turn: its action, the whole text on request, and the sources that came back."""
    action = turn["action"].replace("_", " ")
    content = f": {turn['content']}" if "content" in turn else ""
    sources = ", ".join(turn["sources"]) if "sources" in turn else ""
    read = [TraceNode(f"sources: {sources or 'none'}")] if "sources" in turn else []
    return TraceNode(f"turn {number}, {action}{content}", long=turn["text"], children=read)


def answer_rows(question: Question, prediction: Prediction) -> list[tuple[str, str]]:
    """Returns a card's rows on how a prompted system found its answer; [] for other systems."""
    trace = prediction.trace
    if not trace:
        return []
    rows = []
    outputs = () if "agents" in trace else trace.get("outputs", ())  # those are in the tree
    for record in outputs:
        known = f"  (log-probability {record['logprob']:.2f})" if "logprob" in record else ""
        rows.append(("output", record["text"] + known))
    if scores := trace.get("calibrated_scores", trace.get("option_scores")):
        pairs = zip(question.choices, scores, strict=True)
        rows.append(("scores", " · ".join(f"{choice}: {score:.2f}" for choice, score in pairs)))
    if caption := trace.get("caption") or question.extra.get("caption"):
        rows.append(("caption", str(caption)))
    if dropped := trace.get("dropped_shots"):
        rows.append(("dropped", f"{dropped} shots that did not fit"))
    if knowledge := trace.get("knowledge"):
        passages = itertools.chain.from_iterable(knowledge)
        listed = (f"{passage['id']} ({passage['score']:.2f})" for passage in passages)
        rows.append(("knowledge", " · ".join(dict.fromkeys(listed)) or "(none found)"))
    if dropped := trace.get("dropped_passages"):
        rows.append(("dropped", f"{dropped} passages that did not fit"))
    if dropped := trace.get("dropped_sources"):
        rows.append(("dropped", f"{dropped} sources that did not fit"))
    rows += [
        ("failed", reason) for reason in (*trace.get("failed", ()), *trace.get("too_long", ()))
    ]
    return rows


def trace_details(trace: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each prompt with its shots; the prompts of agents are in their tree."""
    details = []
    prompts = trace.get("prompts", ())
    shots_of = trace.get("shots", [()] * len(prompts))  # a reader's prompts have none
    for number, (prompt, shots) in enumerate(zip(prompts, shots_of, strict=True), 1):
        name = "prompt" if len(prompts) == 1 else f"prompt {number}"
        listed = "\n".join(
            f"{shot['id']}" + (f"  {shot['similarity']:.3f}" if "similarity" in shot else "")
            for shot in shots
        )
        if "agents" not in trace:
            details.append((name, prompt))
        if listed:
            details.append((f"shots of {name} and their similarity", listed))
    return details
