"""Which choice a text names, against the original functions and restatements of them."""

import collections
import string

import hypothesis
import pytest
from hypothesis import strategies as st

from mmqa_jax.evaluation import multiple_choice as rules

CHOICES = ("a cat", "a dog", "a red fox", "none")
# Text -> choice by ScienceQA's rule, by LLaVA's, by VLMEvalKit's; None: no choice. Printed by the
# originals: lupantech/ScienceQA 360b71c models/run_gpt3.py:48-68; haotian-liu/LLaVA
# llava/eval/eval_science_qa.py:64-78; open-compass/VLMEvalKit c3371551
# vlmeval/utils/matching_util.py, can_infer.
GOLDEN = [
    ("", None, None, None),
    ("B", None, 1, 1),
    ("b", None, None, None),
    ("(B)", None, None, 1),
    ("B.", None, None, 1),
    ("The answer is B", None, None, 1),
    ("The answer is B.", 1, 1, 1),
    ("The answer is B. a dog", 1, 1, 1),
    ("A dog", None, None, 0),
    ("a dog", None, None, 1),
    ("It is a dog.", None, None, 1),
    ("a cat and a dog", None, None, None),
    ("A or B", None, None, None),
    ("B because the ears of it are long and round", None, None, None),
    ("The picture shows B", None, None, 1),
    ("I think that the animal here is a dog", None, None, 1),
    ("Z", None, None, None),
    ("Z: a dog", None, None, None),
    ("Cannot determine the answer", None, None, None),
    ("Sorry, I can't help with images of people yet. B", None, None, None),
    ("I can't process this file.", None, None, None),
    ("Failed to obtain answer via API B", None, None, None),
    ("none", None, None, 3),
    ("E", None, None, None),
    ("E. a dog", None, None, 1),
    ("F", None, None, None),
    ("[C]", None, None, 2),
    ("*D*", None, None, 3),
    ("The answer is E.", None, None, None),
    ("The answer is A. The answer is A.", None, None, None),
    ("The answer is A. The answer is B.", None, None, None),
    ("A. a cat", None, 0, 0),
    ("A.", None, None, 0),
    ("A.\n", None, None, 0),
    ("A ", None, None, 0),
    ("B. The answer is C.", 2, 1, None),
    ("the answer is B.", None, None, 1),
    ("The answer is B\n", None, None, 1),
    ("The answer is  B.", None, None, 1),
    ("The answer is BC.", 1, 1, None),
    (" B", None, None, 1),
]


@pytest.mark.parametrize(("text", "scienceqa", "llava", "vlmeval"), GOLDEN)
def test_the_originals_choices(text, scienceqa, llava, vlmeval):
    found = (
        rules.gpt3_choice(text, len(CHOICES)),
        rules.llava_choice(text, len(CHOICES)),
        rules.vlmeval_choice(text, CHOICES),
    )
    assert found == (scienceqa, llava, vlmeval)


# Text -> choice by VLMEvalKit's rule of 2025 and by that since June 2026, printed by c3371551 and by
# e8e78f05 of August 2026; texts of GOLDEN where the two differ, and more.
GOLDEN_2026 = [
    ("The answer is A. The answer is A.", None, 0),
    ("The answer is A. The answer is B.", None, 0),
    ("B. The answer is C.", None, 2),
    ("The answer is BC.", None, 1),
    ("The correct answer is **B**. Here's why: it barks at every cat in the street", None, 1),
    ("The answer is C because of its red fur and long tail, I believe.", None, 2),
    ("the ANSWER  is\nd, as none of the others is shown in this picture", None, 3),
    ("The answer is a dog.", 1, 0),
    ("The answer is blue and not another color of all", None, 1),
    ("The answer is E, which is not among what was asked here", None, None),
    ("Z. The answer is B.", 1, 1),
    ("A or B? The answer is C", None, 2),
    ("answer is", None, None),
    ("the answer is **", None, None),
    ("Failed to obtain answer via API: the answer is B", None, None),
    ("The answer is apparent.", None, 0),
]


@pytest.mark.parametrize(("text", "in_2025", "in_2026"), GOLDEN_2026)
def test_vlmevalkits_rule_of_2026_takes_a_stated_letter(text, in_2025, in_2026):
    assert rules.vlmeval_choice(text, CHOICES) == in_2025
    assert rules.vlmeval_choice(text, CHOICES, answer_is=True) == in_2026


def test_vlmevalkits_two_rules_agree_where_nothing_is_stated():
    known = {text for text, _, _ in GOLDEN_2026}
    for text, _, _, expected in GOLDEN:
        if text not in known:
            assert rules.vlmeval_choice(text, CHOICES, answer_is=True) == expected


LETTER = st.sampled_from(string.ascii_uppercase)


@hypothesis.given(LETTER, st.integers(2, 5), st.text("xyz .\n", max_size=20))
def test_a_stated_letter_is_its_choice_or_none(letter, count, before):
    expected = string.ascii_uppercase.index(letter) if letter < "ABCDEF"[count] else None
    text = f"{before}The answer is {letter}."
    assert rules.gpt3_choice(text, count) == expected
    assert rules.llava_choice(text, count) == expected
    assert rules.exact_letter_choice(letter, count) == expected
    # Said twice, even the same letter names none.
    assert rules.gpt3_choice(text * 2, count) is None


@hypothesis.given(
    st.lists(st.sampled_from(["A", "B", "C", "x", "y", "Z"]), min_size=1, max_size=8),
    st.sampled_from([" ", ", ", ". ", "! ", " ("]),
)
def test_vlmeval_takes_one_letter_among_the_last_four_words(words, separator):
    """The choices' texts are short and occur nowhere, so that letters alone decide."""
    letters = {word for word in words if word in "ABC"}
    expected = None
    if len(letters) == 1:
        (letter,) = letters
        from_end = len(words) - words.index(letter)  # of its first occurrence
        expected = "ABC".index(letter) if from_end <= 4 else None
    assert rules.vlmeval_choice(separator.join(words), ("q1", "q2", "q3")) == expected


@hypothesis.given(st.permutations(["oak", "elm", "fir", "yew"]), st.integers(0, 3))
def test_vlmeval_finds_the_one_text_wherever_the_choice_stands(choices, index):
    assert rules.vlmeval_choice(f"an {choices[index].upper()} tree", choices) == index
    assert rules.vlmeval_choice(f"{choices[index]}, not {choices[index - 1]}", choices) is None
    # An answer of more than twice the length of all choices is not searched.
    assert rules.vlmeval_choice("x" * 25 + choices[index], choices) is None


def test_choices_that_repeat_cannot_be_told_apart_by_their_text():
    assert rules.vlmeval_choice("elm", ("elm", "oak", "elm")) is None
    assert rules.vlmeval_choice("oak", ("elm", "oak", "elm")) == 1


def test_random_choices_depend_on_the_question_and_the_seed_alone():
    ids = [str(n) for n in range(3000)]
    drawn = [rules.random_choice(name, 3) for name in ids]
    assert drawn == [rules.random_choice(name, 3) for name in reversed(ids)][::-1]
    assert drawn != [rules.random_choice(name, 3, seed=11) for name in ids]
    counts = collections.Counter(drawn)
    assert set(counts) == {0, 1, 2}
    assert all(abs(n - 1000) < 4 * (3000 * 2 / 9) ** 0.5 for n in counts.values())  # 4 sigma


def test_the_likeliest_choice_is_the_first_of_least_loss():
    assert rules.likeliest_choice([2.0, 0.5, 0.7, 3.0]) == 1
    assert rules.likeliest_choice([2.0, 0.5, 0.5]) == 1
