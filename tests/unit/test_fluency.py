"""Fluency's formulas by hand, over a scorer whose likelihoods are given."""

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.fluency import fluency_times_accuracy, plain, score_fluency
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.webqa import score_answers


class Given:
    """s(source -> target) from a table; remembers what it was asked."""

    def __init__(self, table):
        self.table, self.asked = table, []

    def score(self, sources, targets, progress=None):
        self.asked = list(zip(sources, targets, strict=True))
        return np.array([self.table[pair] for pair in self.asked])


def question(name, *answers, **more):
    return Question(name, "val", "?", answers=answers, **more)


TABLE = {
    ("It is red", "It is red"): -1.0,
    ("It is red", "Red"): -3.0,
    ("The red one", "The red one"): -2.0,
    ("The red one", "Red"): -2.5,
    ("Blue", "Blue"): -1.5,
    ("Blue", "Red"): -1.0,
}


def test_both_formulas_by_hand():
    asked = [
        question("two", "It is red.", "The red one!"),
        question("likelier", "Blue"),  # the answer is likelier than the reference: 1 at most
        question("missing", "It is red."),
        question("hidden"),
    ]
    scorer = Given(TABLE)
    scores = score_fluency(
        asked, [Prediction("two", "Red."), Prediction("likelier", "Red")], scorer
    )
    assert (scores.n, scores.missing, scores.unscored) == (3, 1, 1)
    # Exponentials: max(exp(-3 + 1), exp(-2.5 + 2)); the logarithms: max(3 / 1, 2.5 / 2) cut to 1.
    np.testing.assert_allclose(scores.per_question["webqa_fl/official"], [np.exp(-0.5), 1, 0])
    np.testing.assert_allclose(scores.per_question["webqa_fl/paper_eq1"], [1, 1 / 1.5, 0])
    assert sorted(scorer.asked) == sorted(TABLE)  # each pair once, the reference as the source


def test_repeated_texts_are_scored_once():
    asked = [question(str(n), "It is red.", "It is red") for n in range(5)]
    scorer = Given(TABLE)
    score_fluency(asked, [Prediction(str(n), "Red") for n in range(5)], scorer)
    assert sorted(scorer.asked) == [("It is red", "It is red"), ("It is red", "Red")]


def test_texts_lose_ascii_punctuation_and_nothing_else():
    assert plain(' "Yes ,  it\'s A\ttwo-tone\n coat — ¡sí!"') == "Yes its A twotone coat — ¡sí"


def test_the_product_is_of_single_questions():
    asked = [
        question("a", "It is red.", category="text", keywords="red"),
        question("b", "Blue", category="text", keywords="blue navy"),
        question("c", "Blue", category="color"),  # no keywords
        question("d", category="text", keywords="x"),  # no reference answer
    ]
    given = [Prediction("a", "Red"), Prediction("b", "Blue"), Prediction("c", "Red")]
    fluency = score_fluency(asked, given, Given(TABLE))
    product = fluency_times_accuracy(fluency, score_answers(asked, given))
    assert product.question_ids == ("a", "b")
    assert list(product.per_question) == ["webqa_fl_acc/no_lemma"]
    np.testing.assert_allclose(product.per_question["webqa_fl_acc/no_lemma"], [np.exp(-2), 0.5])
    assert product.scores["webqa_fl_acc/no_lemma"] != pytest.approx(
        fluency.scores["webqa_fl/official"] * 0.75
    )
    others = score_answers([asked[3]], [])
    assert fluency_times_accuracy(fluency, others) is None


def test_other_weights_give_other_names():
    """Only BARTScore's bart.pth is `official`; the products name both deviations."""
    asked = [question("a", "It is red.", category="text", keywords="red")]
    given = [Prediction("a", "Red")]
    weights = "bart-large-cnn"
    fluency = score_fluency(asked, given, Given(TABLE), weights=weights)
    assert list(fluency.per_question) == [
        "webqa_fl/bart-large-cnn",
        "webqa_fl/paper_eq1_bart-large-cnn",
    ]
    official = Scores(("a",), ("text",), {"webqa_acc/official": np.array([0.5])})
    product = fluency_times_accuracy(fluency, official, weights)
    assert product.scores == pytest.approx({"webqa_fl_acc/bart-large-cnn": np.exp(-2) / 2})
    product = fluency_times_accuracy(fluency, score_answers(asked, given), weights)
    assert list(product.per_question) == ["webqa_fl_acc/bart-large-cnn_no_lemma"]
    fluency = score_fluency(asked, given, Given(TABLE))
    assert list(fluency_times_accuracy(fluency, official).per_question) == ["webqa_fl_acc/official"]


def test_questions_without_references_and_unknown_ids_are_refused():
    with pytest.raises(UserError, match="none of the 1 questions has a reference answer"):
        score_fluency([question("a")], [], Given({}))
    with pytest.raises(UserError, match="no question has the id 'b'"):
        score_fluency([question("a", "x")], [Prediction("b", "x")], Given({}))
