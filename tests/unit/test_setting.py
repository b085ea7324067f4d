"""A setting knows its parts, its options and what it cannot answer."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.captions import Captions
from mmqa_jax.runs import settings

QUESTIONS = [Question("q", "val", "?", choices=("a", "b"))]


def answer(questions, corpus, llm, knowledge=None, *, shots: int = 8, read: str = "text"):
    return []


def refuse(*_):
    raise UserError("refused")


def system(**says) -> SimpleNamespace:
    return SimpleNamespace(SETTINGS={"one": Setting(answer, **says)})


def test_parts_and_options_are_those_of_the_function():
    setting = Setting(answer)
    assert setting.parts() == {"llm": True, "knowledge": False}
    assert setting.options({"shots": 2}) == {"shots": 2, "read": "text"}


def test_a_function_with_other_defaults():
    setting = Setting(functools.partial(answer, read="letter"))
    assert setting.parts() == {"llm": True, "knowledge": False}
    assert setting.options({}) == {"shots": 8, "read": "letter"}


def test_without_rules_nothing_is_refused():
    of, hidden = system(), [Question("x", "test", "?")]
    settings.check_options(of, "one", {}, {"captions": SimpleNamespace(tags="t")})
    settings.check_questions(of, "one", hidden)
    settings.check_inputs(of, "one", hidden, {}, {"captions": Captions({})})
    assert settings.notes_of(of, "one", hidden, {}) == []
    assert not settings.needs_all(of, "one")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"of_choices": True}, "setting one: 1 of 1 questions have no choices"),
        ({"of_gold": True}, "gold sources of all 1 questions"),
    ],
)
def test_questions_that_cannot_be_answered(flag, message):
    settings.check_questions(system(), "one", QUESTIONS)
    with pytest.raises(UserError, match=message):
        settings.check_questions(system(**flag), "one", [Question("x", "test", "?")])


def test_its_own_rules():
    with pytest.raises(UserError, match="refused"):
        settings.check_options(system(check_row=refuse), "one", {}, {})
    with pytest.raises(UserError, match="refused"):
        settings.check_inputs(system(check_inputs=refuse), "one", QUESTIONS, {}, {})


def test_rules_see_all_options():
    seen = []
    of = system(
        check_row=lambda options, parts: seen.append((options["shots"], [*parts])),
        check_inputs=lambda questions, options: seen.append(options["shots"]),
        notes=lambda questions, options: [f"{options['shots']} shots"],
    )
    settings.check_options(of, "one", {"read": "x"}, {"knowledge": None})
    settings.check_inputs(of, "one", QUESTIONS, {"shots": 1}, {})
    assert seen == [(8, ["knowledge"]), 1]
    assert settings.notes_of(of, "one", QUESTIONS, {}) == ["8 shots"]
