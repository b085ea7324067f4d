"""Validation by the likelihood of options, and of answers where a question has no options."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_llm import text_tokenizer

from mmqa_jax.data.batches.texts import RowSize
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.prompting.examples.training import ExampleOptions, encode_text
from mmqa_jax.tasks import solved_questions
from mmqa_jax.tasks.solved_questions import OptionLikelihood, ValidateOptions
from tests.refusals import refuses

CHOSEN = [
    Question("a", "val", "Which?", choices=("x", "yy"), answer_index=1),
    Question("b", "val", "Which?", choices=("x", "yy"), answer_index=0),
]
SHORT = Question("c", "val", "What?", answers=("ivy", "vine", "ivy"))


@pytest.fixture
def scored(monkeypatch):
    """questions, metric -> values of a model that gives every letter -1, and what it was shown."""
    monkeypatch.setattr(solved_questions.nnx, "state", lambda model: model)

    def evaluate(questions: list[Question], metric: str = "accuracy", readable=None):
        tokenizer, shown = text_tokenizer(), []

        def make_score(examples):
            shown.extend(tokenizer.decode(one.tokens[one.start :]) for one in examples)
            return lambda state: np.array([-one.targets for one in examples], np.float64)

        task = SimpleNamespace(
            validate=ValidateOptions(split="val", questions=0, shots=(0,), metric=metric),
            size=RowSize(128, 16),
            length_key="batches.length",
            unsolved="a known answer",
            place="data",
            examples=ExampleOptions(similarity="random"),
            is_solved=lambda question: True,
            open_library=lambda corpus: ExampleLibrary(questions),
        )
        made = OptionLikelihood(
            task, Corpus([], questions), encode_text(tokenizer), make_score, readable
        )
        return made(None), shown

    return evaluate


def test_a_question_without_choices_counts_by_its_most_frequent_answer(scored):
    """Of " x" and " yy" the model finds the shorter one likelier."""
    values, shown = scored([*CHOSEN, SHORT])
    assert shown == [" x", " yy", " x", " yy", " ivy"]
    assert values["accuracy"] == values["accuracy@k0"] == 0.5
    assert values["log_likelihood"] == -1.0
    values, shown = scored([SHORT], "log_likelihood")
    assert shown == [" ivy"]
    assert values == {"log_likelihood@k0": -1.0, "log_likelihood": -1.0}


def test_what_cannot_be_validated_is_refused(scored):
    refuses(r"validate\.metric=accuracy: no question of val has", scored, [SHORT])
    refuses(r"validate\.split=val: data holds no", scored, CHOSEN, readable=lambda questions: [])
