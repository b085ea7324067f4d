"""Thoughts and answers of reasoning models."""

from __future__ import annotations

import pytest

from mmqa_jax.prompting.backends import answer_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Paris.\n", "Paris."),
        ("<think>\nFrance, so\n</think>\n\nParis.", "Paris."),
        ("\n<think>\n\n</think>\n\nParis.", "Paris."),  # thinking is off
        ("France, so\n</think>\n\nParis.", "Paris."),  # the template opened it
        ("<think>\nFrance, and France", ""),  # tokens ran out
        ("Write <think>a</think> in front.", "Write <think>a</think> in front."),
        ("<think>x</think>The tag is </think>.", "The tag is </think>."),
        ("", ""),
    ],
)
def test_the_answer_is_without_thoughts(text, answer):
    assert answer_of(text) == answer
