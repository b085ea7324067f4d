"""Asks MAVL's planners, which are the language model itself with the prompt of figure 6b."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message, Query
from mmqa_jax.prompting.few_shot import Order, few_shot
from mmqa_jax.prompting.plans import NO_PLAN, Plan, Role, parse_plan, planner_prompt
from mmqa_jax.prompting.shots import Shot
from mmqa_jax.prompting.steps import Steps
from mmqa_jax.prompting.stream import answer_all
from mmqa_jax.prompting.tools import answer_fields, answer_template

# (question id, role) -> the plans that its agent considers.
Planned = Mapping[tuple[str, Role], Sequence[Plan]]
_STOP = ("===", "task:")  # what follows would be another task of the prompt's form


def ask_planners(
    questions: Sequence[Question],
    llm: Any,
    shown: Mapping[str, Sequence[Shot]],
    agents: Sequence[Role],
    task: str,
    chat: bool,
    order: Order,
    new_tokens: int,
    steps: Mapping[str, Steps],
) -> Planned:
    """One plan per question and agent, all in one pass; an empty one where the planner fails.

    Args:
      shown: question id -> shots of P_0, fewer of them where the context is short.
      task: `prompt`, all of P_0, or `test_input`, the question's own block.
      chat: the prompt is a user's message to a chat model.
      new_tokens: that a planner may write.
      steps: question id -> what was asked, and why there is no plan; extended.
    """
    decoding = Decoding(max_new_tokens=new_tokens, stop=_STOP)

    def asking(key: tuple[str, Role], role: Role) -> Callable[[str], Query]:
        def make(text: str) -> Query:
            prompt = planner_prompt(role, text)
            if chat:
                return Chat(key, (Message("user", (prompt,)),), decoding)
            return Completion(key, prompt, decoding)

        return make

    first = answer_template(())  # P_0
    if task == "test_input":
        first = first.without_head()
    prompts = {
        (question.id, role): few_shot(
            first,
            question,
            shown[question.id] if task == "prompt" else (),
            lambda one: answer_fields(one, {}, ()),
            asking((question.id, role), role),
            llm.check,
            order,
        )
        for question in questions
        for role in agents
    }
    answers = answer_all(llm, [p.query for p in prompts.values() if p.query], "Planning")
    planned = {}
    for (name, role), prompt in prompts.items():
        key = (name, role)
        if prompt.query is not None:
            steps[name].planner_prompts[role] = planner_prompt(role, prompt.text)
        if key in answers.by_id:
            planned[key] = (parse_plan(role, answers.by_id[key].text),)
        else:
            planned[key] = (NO_PLAN,)
            reason = answers.failed.get(key, prompt.reason)
            steps[name].failed.append(f"the {role}'s planner: {reason}")
    return planned
