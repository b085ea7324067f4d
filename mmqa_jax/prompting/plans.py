"""MAVL's planners: which actions an agent of a level may take, its prompt, and what it answers.

The prompt is that of figure 6b, whose words for the senior and the junior follow from the manager's
(reference.md 6).
"""

from __future__ import annotations

import itertools
import re
from typing import Literal, NamedTuple

from mmqa_jax.prompting.templates import load_template

Role = Literal["junior", "senior", "manager"]
Actions = tuple[int, ...]  # ascending, each once

# Role -> the actions that it may plan, from the lowest level to the highest.
ROLES: dict[Role, Actions] = {"junior": (1,), "senior": (1, 2), "manager": (1, 2, 3)}
# Action -> what the planner is told of it.
_MEANINGS = {
    1: "you need to refer candidate answers to answer questions",
    2: "you need retrieve knowledge from KBs to answer questions",
    3: "you need more knowledge to answer questions",
}
_NAMED = re.compile(r"Action_(\d+|[A-Za-z]\w*)")


class Plan(NamedTuple):
    """What an agent is going to do.

    Attributes:
      actions: within its role.
      refused: the names of other actions that the planner asked for.
      said: the planner's answer.
    """

    actions: Actions
    refused: tuple[str, ...] = ()
    said: str = ""


NO_PLAN = Plan(())


def planner_prompt(role: Role, task: str) -> str:
    """The planner's prompt: figure 6b, and the end of its last line, which is ours.

    Args:
      task: the prompt P0 with its examples, or its test input alone.
    """
    named = ", ".join(f"Action_{action}" for action in ROLES[role])
    meanings = "".join(f"Action_{a} is that {_MEANINGS[a]}.\n" for a in ROLES[role])
    fields = {"role": role, "actions": named, "meanings": meanings, "task": task}
    return load_template("mavl.planner").render([], fields)


def parse_plan(role: Role, text: str) -> Plan:
    """The actions that a planner's answer names, within the role, ascending and each once.

    An answer that names none is the empty plan.
    """
    names = list(dict.fromkeys(_NAMED.findall(text)))
    allowed = {str(action) for action in ROLES[role]}
    actions = sorted(int(name) for name in names if name in allowed)
    refused = tuple(f"Action_{name}" for name in names if name not in allowed)
    return Plan(tuple(actions), refused, text.strip())


def every_plan(role: Role) -> list[Plan]:
    """All plans of a role, those with fewer actions first."""
    allowed = ROLES[role]
    return [
        Plan(actions)
        for count in range(len(allowed) + 1)
        for actions in itertools.combinations(allowed, count)
    ]
