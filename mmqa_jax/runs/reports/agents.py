"""Shows agents' work from their traces: a tree per question, and summaries over all questions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.data.schema import Prediction
from mmqa_jax.evaluation.report import TraceNode
from mmqa_jax.evaluation.tables import Cell, Table
from mmqa_jax.papers.mavl import TOOL_NAMES
from mmqa_jax.papers.prophet import vote

_ACTIONS = tuple(TOOL_NAMES)
_RETRIEVES, _GENERATES = 2, 3


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
    return TraceNode(f"{TOOL_NAMES[action]}: {text}", children=behind)


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
        "actions": {str(action): _of_action(action, traces) for action in _ACTIONS},
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
    actions = [str(action) for action in _ACTIONS]
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
        [f"{a}: {TOOL_NAMES[int(a)]}", *effect.values()] for a, effect in summary["actions"].items()
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
        "planned": {str(a): sum(a in agent["plan"] for agent in answers) for a in _ACTIONS},
        "used": {str(a): sum(a in agent["used"] for agent in answers) for a in _ACTIONS},
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
    for agent in agents:
        others = [other for other in reversed(agents) if other is not agent]
        yield agent, vote([(other["answer"], other["ballot"]) for other in others])[0]


def _changes(trace: Mapping[str, Any], role: str) -> bool:
    elected = max(trace["vote"], key=trace["vote"].get, default="")
    others = {agent["agent"]: other for agent, other in _left_out(trace["agents"])}
    return others[role] != elected


def _actions(plan: Sequence[int]) -> str:
    return ", ".join(f"Action_{action}" for action in plan) or "no action"
