"""VQA accuracy and A-OKVQA's two scores, against restatements and on real questions."""

import collections
import itertools
import json

import hypothesis
import pytest
from hypothesis import strategies as st
from shared_data import SHARED, shared_benchmark

from mmqa_jax.benchmarks import aokvqa, okvqa
from mmqa_jax.benchmarks.aokvqa import read_aokvqa
from mmqa_jax.benchmarks.okvqa import read_okvqa
from mmqa_jax.data import answers
from mmqa_jax.data.answers import normalize_answer
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation import vqa
from tests.refusals import refuses

OKVQA, AOKVQA = SHARED / "okvqa", SHARED / "aokvqa"
needs_data = pytest.mark.skipif(
    not (OKVQA.exists() and AOKVQA.exists()),
    reason="needs ../shared/data/okvqa and aokvqa (MMQA_SHARED_DATA)",
)

WORDS = st.sampled_from(
    ["cat", "Cat.", "the cat", "dog", "two", "2", "", "none", "0", "x-y", "x y"]
)


def leave_one_out(said: str, references: list[str]) -> float:
    """The official definition, annotator by annotator."""
    if len({reference.strip() for reference in references}) > 1:
        said, references = normalize_answer(said), [normalize_answer(r) for r in references]
    scores = []
    for rest in itertools.combinations(references, len(references) - 1):
        scores.append(min(1.0, sum(said == reference for reference in rest) / 3))
    return sum(scores) / len(scores)


@hypothesis.given(WORDS, st.lists(WORDS, min_size=1, max_size=10))
def test_official_accuracy_leaves_every_annotator_out_once(said, references):
    found = vqa.official_accuracy(said, references)
    assert found == pytest.approx(leave_one_out(said, references), abs=1e-12)


@pytest.mark.parametrize(
    ("same", "official", "paper"),
    [(0, 0, 0), (1, 0.3, 1 / 3), (2, 0.6, 2 / 3), (3, 0.9, 1), (4, 1, 1), (9, 1, 1), (10, 1, 1)],
)
def test_accuracy_by_number_of_annotators(same, official, paper):
    """Of ten annotators (GT-Vision-Lab/VQA)."""
    references = ["cat"] * same + [f"dog {n}" for n in range(10 - same)]
    assert vqa.official_accuracy("cat", references) == pytest.approx(official)
    assert vqa.paper_accuracy("cat", references) == pytest.approx(paper)
    if same % 2 == 0:
        weight = round(paper, 3)  # as published
        assert answers.official_of_weight(weight) == pytest.approx(official)


@pytest.mark.parametrize(
    ("said", "references", "prophet", "official"),
    [
        ("cat", ["cat."] * 4 + ["dog"] * 6, 1.0, 1.0),  # punctuation goes on both sides
        ("The Cat", ["the cat"] * 4 + ["dog"] * 6, 0.0, 1.0),  # articles on one alone
        ("cat", ["Cat"] * 4 + ["dog"] * 6, 0.0, 1.0),
        ("two", ["two"] * 4 + ["dog"] * 6, 0.0, 1.0),
        ("two", ["2"] * 3 + ["two"] * 7, 0.9, 1.0),
        ("Cat.", ["cat"] * 10, 1.0, 0.0),  # the answer is normalized also where all agree
        ("x-y", ["x-y"] * 10, 0.0, 1.0),
        ("cat", [" cat"] * 4 + ["dog"] * 6, 0.0, 1.0),  # the annotators' spaces stay
    ],
)
def test_prophets_older_script(said, references, prophet, official):
    """What evaluation/vqa_utils/vqaEval.py of MILVLG/prophet printed for these ten answers."""
    assert vqa.prophet_accuracy(said, references) == pytest.approx(prophet)
    assert vqa.official_accuracy(said, references) == pytest.approx(official)


@pytest.mark.parametrize(
    ("said", "same", "count", "kat", "official"),
    [
        ("The Cat!", "cat", 3, 1.0, 0.9),  # three of ten are enough
        ("cat", "a cat", 1, 1 / 3, 0.3),
        ("two", "2", 3, 0.0, 0.9),  # number words stay
        ("x-y", "xy", 3, 1.0, 0.0),
        ("the cat", "cat", 10, 1.0, 0.0),  # normalized also where all agree
        ("", "the", 4, 1.0, 1.0),
    ],
)
def test_kats_own_score(said, same, count, kat, official):
    """What okvqa_ems of guilk/KAT (src/evaluation.py) gives for these ten answers."""
    references = (same,) * count + ("dog",) * (10 - count)
    question = Question("q", "test", "?", answers=references)
    (scores,) = okvqa.score_okvqa([question], [Prediction("q", said)]).scored
    assert scores.scores["vqa_accuracy/kat"] == pytest.approx(kat)
    assert scores.scores["vqa_accuracy/official"] == pytest.approx(official)


def test_nothing_is_normalized_where_all_annotators_agree():
    assert vqa.official_accuracy("the cat", ["cat"] * 10) == 0.0
    assert vqa.official_accuracy(" cat\n", ["cat"] * 10) == 1.0  # but whitespace is
    assert vqa.official_accuracy("the cat", ["cat"] * 9 + ["dog"]) == 1.0
    assert vqa.official_accuracy("the cat", ["the cat"] * 9 + ["The cat"]) == 1.0


def test_soft_labels_are_compared_as_normalized_strings():
    labels = {"don't walk": 0.667, "walk": 1, "2 dogs": 0.333, "two dogs": 0.333}
    assert vqa.soft_label_accuracy("Dont walk.", labels) == pytest.approx(0.667)
    assert vqa.soft_label_accuracy("the walk", labels) == 1.0
    assert vqa.soft_label_accuracy("Two dogs", labels) == pytest.approx(0.666)
    assert vqa.soft_label_accuracy("walking", labels) == 0.0
    assert vqa.soft_label_accuracy("x", {"x": 1, "X": 1}) == 1.0


def test_direct_answers_are_matched_exactly():
    references = ["cat"] * 2 + ["Cat"] * 8
    assert vqa.direct_answer_accuracy("cat", references) == pytest.approx(2 / 3)
    assert vqa.direct_answer_accuracy("Cat", references) == 1.0
    assert vqa.direct_answer_accuracy("cat ", references) == 0.0


def aokvqa_questions() -> list[Question]:
    def ask(name: str, difficult: bool, choices: tuple[str, ...], right: int) -> Question:
        return Question(
            name, "val", "?", answers=("a",) * 2 + ("b",) * 8, choices=choices, answer_index=right,
            extra={"difficult_direct_answer": difficult},
        )  # fmt: skip

    return [
        ask("easy", False, ("w", "x", "y", "z"), 1),
        ask("twice", False, ("x", "x", "y", "z"), 1),
        ask("difficult", True, ("w", "x", "y", "z"), 3),
        ask("missing", False, ("w", "x", "y", "z"), 0),
    ]


def test_aokvqa_scores_what_the_predictions_hold():
    both = [
        Prediction("easy", "a", choice=1),
        Prediction("twice", "b", choice=0),  # reads like the correct option
        Prediction("difficult", "b", choice=2),
    ]
    evaluation = aokvqa.score_aokvqa(aokvqa_questions(), both)
    direct, chosen = evaluation.scored
    assert direct.scores == {"a_okvqa_da/official": pytest.approx((2 / 3 + 1 + 0) / 3)}
    assert (direct.n, direct.missing, direct.unscored) == (3, 1, 1)
    assert chosen.scores == {"a_okvqa_mc/official": pytest.approx(2 / 4)}
    assert (chosen.n, chosen.missing) == (4, 1)
    assert evaluation.summary()["by_category"] == {}
    assert evaluation.notes == []
    only = [Prediction("easy", choice=1), Prediction("twice")]
    evaluation = aokvqa.score_aokvqa(aokvqa_questions(), only)
    assert evaluation.summary()["scores"] == {"a_okvqa_mc/official": 1 / 4}
    assert evaluation.unparsed == {"a_okvqa_mc/official": 1}
    evaluation = aokvqa.score_aokvqa(aokvqa_questions(), [Prediction("easy", "zebra")])
    assert evaluation.summary()["scores"] == {"a_okvqa_da/official": 0.0}


@pytest.mark.parametrize("choice", [-1, 4])
def test_a_choice_that_is_no_option_is_counted(choice):
    evaluation = aokvqa.score_aokvqa(aokvqa_questions(), [Prediction("easy", choice=choice)])
    assert evaluation.summary()["scores"] == {"a_okvqa_mc/official": 0.0}
    assert evaluation.unparsed == {"a_okvqa_mc/official": 1}


def test_references_of_two_kinds_are_not_mixed():
    questions = [
        Question("1", "test", "?", answers=("a",) * 10),
        Question("2", "test", "?", answers=("a",), extra={"soft_labels": {"a": 1}}),
    ]
    refuses("some questions have annotators' answers and some", okvqa.score_okvqa, questions, [])
    refuses("none of the 1 questions has", okvqa.score_okvqa, [Question("3", "test", "?")], [])


def test_okvqa_by_category():
    questions = [
        Question("1", "test", "?", category="Other", answers=("x",) * 2 + tuple("bcdefghi")),
        Question("2", "test", "?", category="Cooking and Food", answers=("b",) * 10),
    ]
    found = okvqa.score_okvqa(questions, [Prediction("1", "X"), Prediction("2", "b")]).summary()
    assert found["n"] == 2
    assert found["scores"]["vqa_accuracy/official"] == pytest.approx((0.6 + 1) / 2)
    assert found["scores"]["vqa_accuracy/paper"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["by_category"]["Cooking and Food"]["vqa_accuracy/official"] == 1.0
    assert found["by_modality"] == {}


# Real questions


@needs_data
def test_known_answers_on_okvqas_test_split():
    found = shared_benchmark(read_okvqa, "okvqa").questions
    questions = [question for question in found if question.split == "test"]
    rows = json.loads((OKVQA / "val_soft_labels.json").read_text())
    heaviest = [max(row["label"].values()) for row in rows]

    def scores(answer) -> dict[str, float]:
        predictions = [Prediction(str(row["question_id"]), answer(row)) for row in rows]
        return okvqa.score_okvqa(questions, predictions).summary()["scores"]

    best = scores(lambda row: max(row["label"], key=row["label"].get))
    assert best["vqa_accuracy/soft_labels"] == pytest.approx(sum(heaviest) / len(rows))
    expected = sum({1: 1, 0.667: 0.6}[weight] for weight in heaviest) / len(rows)
    assert best["vqa_accuracy/official_from_soft_labels"] == pytest.approx(expected)
    # No label reads "yes"; "man" is the heaviest of some.
    assert set(scores(lambda row: "yes").values()) == {0.0}
    man = sum(row["label"].get("man", 0) for row in rows) / len(rows)
    assert scores(lambda row: "The man.")["vqa_accuracy/soft_labels"] == pytest.approx(man)


@needs_data
def test_known_answers_on_aokvqas_val_split():
    """The figures of allenai/aokvqa, evaluation/eval_predictions.py, on the same answers."""
    found = shared_benchmark(read_aokvqa, "aokvqa").questions
    questions = [question for question in found if question.split == "val"]
    assert len(questions) == 1145

    def direct(answer) -> float:
        given = [Prediction(question.id, answer(question)) for question in questions]
        return aokvqa.score_aokvqa(questions, given).summary()["scores"]["a_okvqa_da/official"]

    majority = direct(lambda q: collections.Counter(q.answers).most_common(1)[0][0])
    assert 100 * direct(lambda q: "yes") == pytest.approx(0.18604651162790697)
    assert 100 * direct(lambda q: q.answers[0]) == pytest.approx(77.95348837209329)
    assert 100 * majority == pytest.approx(97.4573643410852)
    assert 100 * direct(lambda q: q.choices[q.answer_index]) == pytest.approx(78.26356589147295)

    def chosen(given) -> float:
        return aokvqa.score_aokvqa(questions, given).summary()["scores"]["a_okvqa_mc/official"]

    official = (24.541484716157207, 24.541484716157207, 25.938864628820962, 25.240174672489086)
    for option, expected in enumerate(official):
        given = [Prediction(question.id, choice=option) for question in questions]
        assert 100 * chosen(given) == pytest.approx(expected)
    assert chosen([Prediction(q.id, choice=q.answer_index) for q in questions]) == 1.0
    # The first 600 answered.
    some = [Prediction(question.id, choice=0) for question in questions[:600]]
    assert 100 * chosen(some) == pytest.approx(11.790393013100436)
