"""Traces how a prompted system came to its answers: trace.jsonl, its rows on cards, agents."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.report import TraceNode
from mmqa_jax.evaluation.tables import Cell, Table

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
    "search_retries": "searches that failed and were made again",
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

    `shots`: how many examples a prompt was to show.
    """
    from mmqa_jax.prompting.few_shot import lacks_caption
    from mmqa_jax.prompting.llm_reader import READER
    from mmqa_jax.prompting.search_loop import TURNS
    from mmqa_jax.tasks.library import has_picture

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
        counts["search_retries"] = _total(traces, "search_retries")
        counts["not_found"] = _total(traces, "not_found")
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
    if not prediction.trace:  # not prompted
        return []
    from mmqa_jax.prompting.search_loop import TURNS

    if turns := prediction.trace.get(TURNS):
        return [turn_node(number, turn) for number, turn in enumerate(turns, start=1)]
    if "agents" not in prediction.trace:
        return []
    return agent_tree(prediction.trace, prediction.answer)


def turn_node(number: int, turn: Mapping[str, Any]) -> TraceNode:
    """Shows a turn: its action, the whole text on request, and the sources that came back."""
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


# Shows agents' work from their traces: a tree per question, and summaries over all questions.


_RETRIEVES, _GENERATES = 2, 3


def _tools() -> Mapping[int, str]:
    """Action -> its tool's name; imported for rows with agents alone."""
    from mmqa_jax.papers.mavl import TOOL_NAMES

    return TOOL_NAMES


def agent_tree(trace: Mapping[str, Any], answer: str) -> list[TraceNode]:
    """A question's agents with plans, tools' outputs, prompts and answers, then the vote."""
    asked = {
        (tuple(entry["actions"]), entry.get("agent")): (prompt, entry.get("output", ""))
        for entry, prompt in zip(trace["by_actions"], trace["prompts"], strict=True)
    }
    nodes = []
    for agent in trace["agents"]:
        planned = f"the planner said: {agent['said']}" if agent["said"] else ""
        refused = f"; refused: {', '.join(agent['refused'])}" if agent["refused"] else ""
        read = _long("the planner's prompt", trace.get("planner_prompts", {}).get(agent["agent"]))
        steps = [
            TraceNode(f"plan: {_actions(agent['plan'])}{refused}", long=planned, children=read)
        ]
        steps += [_tool(trace, action) for action in agent["plan"]]
        used = tuple(agent["used"])  # an agent's own draw, or the answer that agents share
        prompt, output = asked.get((used, agent["agent"]), asked.get((used, None), ("", "")))
        steps += [TraceNode("prompt", long=prompt), *_long("output", output)]
        name = f"{agent['agent']}: {agent['answer'] or '(no answer)'}"
        sure = f"{agent['votes']:g} votes, probability {agent['probability']:.2f}"
        nodes.append(TraceNode(f"{name} ({sure})", score=agent["score"], children=steps))
    sums = sorted(trace["vote"].items(), key=lambda pair: -pair[1])
    counted = ", ".join(f"{name} {weight:.3g}" for name, weight in sums)
    changes = [
        TraceNode(f"without the {agent['agent']}: {other or trace['fallback'] or '(none)'}")
        for agent, other in _left_out(trace["agents"])
        if (other or trace["fallback"]) != answer
    ]
    if not sums:
        changes = [TraceNode("no agent answered: the first candidate")]
    nodes.append(TraceNode(f"vote: {counted or '–'} → {answer or '(none)'}", children=changes))
    return nodes


def _tool(trace: Mapping[str, Any], action: int) -> TraceNode:
    """Shows a tool's request and its result."""
    text = trace["tools"].get(str(action), "") or "nothing found"
    behind = []
    if action == _RETRIEVES and (passages := trace.get("passages")):
        listed = " · ".join(f"{passage['id']} ({passage['score']:.2f})" for passage in passages)
        behind = [TraceNode(f"passages: {listed}")]
    if action == _GENERATES:
        behind = _long("the tool's prompt", trace.get("knowledge_prompt"))
    return TraceNode(f"{_tools()[action]}: {text}", children=behind)


def _long(name: str, text: str | None) -> list[TraceNode]:
    """A long text as a node; none where there is no text."""
    return [TraceNode(name, long=text)] if text else []


def agent_summary(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """Over all questions: what each agent planned, used and answered, and what actions changed.

    An action's effect is measured where a question was answered with and without it, all else
    equal: `better` and `worse` count questions' pairs of such answers whose score differs.
    """
    traces = [p.trace for p in predictions if "agents" in p.trace]
    if not traces:
        return {}
    roles = [agent["agent"] for agent in traces[0]["agents"]]
    teams = [{agent["agent"]: agent for agent in trace["agents"]} for trace in traces]
    agents = {role: _of_agent([team[role] for team in teams]) for role in roles}
    return {
        "agents": agents,
        "actions": {str(action): _of_action(action, traces) for action in _tools()},
        "changed_by_leaving_out": {
            role: sum(_changes(trace, role) for trace in traces) for role in roles
        },
        "all_agree": sum(len(trace["vote"]) == 1 for trace in traces),
        "scored_by": next(filter(None, (trace.get("scored_by") for trace in traces)), None),
    }


def agent_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The summary as the report shows it; [] for systems without agents."""
    if not summary:
        return []
    actions = [str(action) for action in _tools()]
    columns = ["agent", *(f"plans {a}" for a in actions), *(f"uses {a}" for a in actions)]
    columns += ["empty plans", "refused", "no answer", "accuracy alone", "decides"]
    rows: list[list[Cell]] = [
        [
            role,
            *(counts["planned"][a] for a in actions),
            *(counts["used"][a] for a in actions),
            *(counts[name] for name in ("empty_plans", "refused_actions", "no_answer", "accuracy")),
            summary["changed_by_leaving_out"][role],
        ]
        for role, counts in summary["agents"].items()
    ]
    scorer, scoring = summary["scored_by"], "No question has references that count."
    if scorer is not None:
        scoring = f"Accuracy alone: {scorer}, of the questions that it counts."
    note = (
        "Questions. Refused: plans that name unknown actions or those above the agent's level. "
        "Uses: the tool gave something. Decides: without the agent the vote is another. "
        f"All agents that answer agree in {summary['all_agree']:,}. {scoring}"
    )
    effects: list[list[Cell]] = [
        [f"{a}: {_tools()[int(a)]}", *effect.values()] for a, effect in summary["actions"].items()
    ]
    seen = (
        "Pairs of answers to one question whose prompts differ in this action alone. The oracle's "
        "row has all such pairs; a row with planners those in which its agents differ."
    )
    heads = ("action", "pairs", "answer changed", "better", "worse", "mean change")
    return [Table("Agents", columns, rows, note), Table("Actions", heads, effects, seen)]


def _of_agent(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = [agent["score"] for agent in answers if agent["score"] is not None]
    return {
        "planned": {str(a): sum(a in agent["plan"] for agent in answers) for a in _tools()},
        "used": {str(a): sum(a in agent["used"] for agent in answers) for a in _tools()},
        "empty_plans": sum(not agent["plan"] for agent in answers),
        "refused_actions": sum(bool(agent["refused"]) for agent in answers),
        "no_answer": sum(not agent["answer"] for agent in answers),
        "accuracy": float(np.mean(scores)) if scores else None,
    }


def _of_action(action: int, traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [
        (a, b)  # without and with the action, all else equal
        for trace in traces
        for a, b in itertools.permutations(trace["by_actions"], 2)
        if set(b["actions"]) - set(a["actions"]) == {action}
        and len(b["actions"]) - 1 == len(a["actions"])
    ]
    changes = [b["score"] - a["score"] for a, b in pairs if None not in (a["score"], b["score"])]
    return {
        "pairs": len(pairs),
        "changed": sum(a["answer"] != b["answer"] for a, b in pairs),
        "better": sum(change > 0 for change in changes),
        "worse": sum(change < 0 for change in changes),
        "mean_change": float(np.mean(changes)) if changes else None,
    }


def _left_out(agents: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], str]]:
    """Every agent, and what the others elect without it."""
    from mmqa_jax.papers.prophet import vote

    for agent in agents:
        others = [other for other in reversed(agents) if other is not agent]
        yield agent, vote([(other["answer"], other["ballot"]) for other in others])[0]


def _changes(trace: Mapping[str, Any], role: str) -> bool:
    elected = max(trace["vote"], key=trace["vote"].get, default="")
    others = {agent["agent"]: other for agent, other in _left_out(trace["agents"])}
    return others[role] != elected


def _actions(plan: Sequence[int]) -> str:
    return ", ".join(f"Action_{action}" for action in plan) or "no action"
