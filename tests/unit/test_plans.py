"""MAVL's planners: their prompt, and what is read from their answers."""

import pytest

from mmqa_jax.papers.mavl import ROLES, every_plan, parse_plan, planner_prompt

# Figure 6b of the paper, and the end of its last line (templates/mavl.toml says why).
MANAGER = """You are manager planner. Please provide the actions for the given task.
===
The actions should be in [Action_1, Action_2, Action_3].
Action_1 is that you need to refer candidate answers to answer questions.
Action_2 is that you need retrieve knowledge from KBs to answer questions.
Action_3 is that you need more knowledge to answer questions.
===
task: TASK
the response should be like this: Action_1, Action_2, Action_3
"""


def test_the_managers_prompt_is_the_papers():
    assert planner_prompt("manager", "TASK") == MANAGER


def test_lower_levels_are_told_of_their_own_actions():
    junior, senior = planner_prompt("junior", "$x {y}"), planner_prompt("senior", "")
    assert junior.startswith("You are junior planner.")
    assert "in [Action_1].\n" in junior
    assert junior.endswith("task: $x {y}\nthe response should be like this: Action_1\n")
    assert "Action_2" not in junior
    assert senior.endswith("like this: Action_1, Action_2\n")
    assert "Action_3" not in senior


@pytest.mark.parametrize(
    ("role", "text", "actions", "refused"),
    [
        ("manager", "Action_3, Action_1", (1, 3), ()),
        ("manager", "Action_2 Action_2\nAction_1.", (1, 2), ()),
        ("senior", "Action_1, Action_2, Action_3", (1, 2), ("Action_3",)),
        ("junior", "Action_2", (), ("Action_2",)),
        ("manager", "Action_4 and Action_12, Action_search(x)", (), ("4", "12", "search")),
        ("manager", "I can answer directly.", (), ()),
        ("manager", "", (), ()),
        ("manager", "action_1 Action 2", (), ()),  # not the asked spelling
        ("manager", "Action_1 Action_" + "1" * 5000, (1,), ("1" * 5000,)),
    ],
)
def test_parsing(role, text, actions, refused):
    plan = parse_plan(role, text)
    assert plan.actions == actions
    assert plan.refused == tuple(f"Action_{name.removeprefix('Action_')}" for name in refused)
    assert plan.said == text.strip()


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("Action_3, Action_1", (1, 3)),  # as strict
        ("Action_1, 3", (1, 3)),
        ("Action 1", (1,)),
        ("action_3", (3,)),
        ("ACTION-2.", (2,)),
        ("Action1 and action 3", (1, 3)),
        ("The actions are 1, 2 and 3.", (1, 2, 3)),
        ("Actions: 1 & 2", (1, 2)),
        ("actions [2, 3]", (2, 3)),
        ("1. **Action 2**: search\n2. action 3", (2, 3)),  # the list's own numbers are none
        ("1, 3", (1, 3)),
        ("[1, 3]", (1, 3)),
        ("(2)", (2,)),
        ("1\n3", (1, 3)),
        ("2 3\nbecause they help", (2, 3)),
        ("01, 3.", (1, 3)),
        ("", ()),
        ("I can answer directly.", ()),
        ("1. Look at the picture", ()),  # a step of the planner's own
        ("3 apples", ()),
        ("In action 5 men run", ()),  # no such action
        ("1.5", ()),
        ("An action is needed", ()),
        ("transaction 1", ()),
        ("actions 1, " + "3" * 5000, (1,)),
        ("action " + "1 " * 50_000 + "x", (1,)),
    ],
)
def test_lenient_reading(text, actions):
    assert parse_plan("manager", text, "lenient").actions == actions


def test_lenient_reading_keeps_to_the_level():
    plan = parse_plan("junior", "actions 1 and 3", "lenient")
    assert (plan.actions, plan.refused) == ((1,), ("Action_3",))
    assert parse_plan("junior", "actions 1 and 3").actions == ()


def test_every_plan_has_fewer_actions_first():
    assert [len(every_plan(role)) for role in ROLES] == [2, 4, 8]
    assert [plan.actions for plan in every_plan("senior")] == [(), (1,), (2,), (1, 2)]
