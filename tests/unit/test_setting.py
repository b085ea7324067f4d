"""A setting knows its parts, its options and what it cannot answer."""

import functools
from types import SimpleNamespace

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.examples.side_files import Captions
from tests.refusals import refuses

QUESTIONS = [Question("q", "val", "?", choices=("a", "b"))]


def answer(questions, corpus, llm, knowledge=None, *, shots: int = 8, read: str = "text"):
    return []


def refuse(*_):
    raise UserError("refused")


def test_parts_and_options_are_those_of_the_function():
    setting = Setting(answer)
    assert setting.parts() == {"llm": True, "knowledge": False}
    assert setting.options({"shots": 2}) == {"shots": 2, "read": "text"}


def test_a_function_with_other_defaults():
    setting = Setting(functools.partial(answer, read="letter"))
    assert setting.parts() == {"llm": True, "knowledge": False}
    assert setting.options({}) == {"shots": 8, "read": "letter"}


def test_without_rules_nothing_is_refused():
    of, hidden = Setting(answer), [Question("x", "test", "?")]
    of.check_row({}, {"captions": SimpleNamespace(tags="t")})
    of.check_questions("one", hidden)
    of.check_inputs(hidden, {}, {"captions": Captions({})})
    assert of.notes(hidden, {}) == []
    assert not of.needs_all


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"of_choices": True}, "setting one: 1 of 1 questions have no choices"),
        ({"of_gold": True}, "gold sources of all 1 questions"),
    ],
)
def test_questions_that_cannot_be_answered(flag, message):
    Setting(answer).check_questions("one", QUESTIONS)
    refuses(message, Setting(answer, **flag).check_questions, "one", [Question("x", "test", "?")])


def test_its_own_rules():
    refuses("refused", Setting(answer, rule_of_row=refuse).check_row, {}, {})
    refuses("refused", Setting(answer, rule_of_inputs=refuse).check_inputs, QUESTIONS, {}, {})


def test_rules_see_all_options():
    seen = []
    of = Setting(
        answer,
        rule_of_row=lambda options, parts: seen.append((options["shots"], [*parts])),
        rule_of_inputs=lambda questions, options: seen.append(options["shots"]),
        write_notes=lambda questions, options: [f"{options['shots']} shots"],
    )
    of.check_row({"read": "x"}, {"knowledge": None})
    of.check_inputs(QUESTIONS, {"shots": 1}, {})
    assert seen == [(8, ["knowledge"]), 1]
    assert of.notes(QUESTIONS, {}) == ["8 shots"]
