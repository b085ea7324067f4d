"""Answer normalization: golden values of VQA's official script, Prophet's and PICa's rules."""

import hypothesis
import pytest
from hypothesis import strategies as st

from mmqa_jax.data import answers

# From running github.com/GT-Vision-Lab/VQA, PythonEvaluationTools/vqaEvaluation/vqaEval.py with
# Python 3.11 (only its print statements changed): the text, after processPunctuation, and after
# processDigitArticle of that. Line breaks, tabs and ends were cleaned first, as `evaluate` does.
OFFICIAL = [
    ("The cat.", "The cat", "cat"),
    ("a 1,000 dollars", "a 1000 dollars", "1000 dollars"),
    ("1,000; or so", "1000 or so", "1000 or so"),
    ("it's 5:58 p.m.", "it's 5:58 pm", "it's 5:58 pm"),
    ("dont walk", "dont walk", "don't walk"),
    ("Don't", "Don't", "don't"),
    ("DONT", "DONT", "don't"),
    ("Two  dogs!", "Two  dogs ", "2 dogs"),
    ("none", "none", "0"),
    ("None of them", "None of them", "0 of them"),
    ("zero-sum", "zero sum", "0 sum"),
    ("rock-n-roll", "rock n roll", "rock n roll"),
    ("rock - n - roll", "rock  n  roll", "rock n roll"),
    ("30.7 lbs", "30.7 lbs", "30.7 lbs"),
    ("30. 7", "30 7", "30 7"),
    ("...", "", ""),
    ("3.14.", "3.14", "3.14"),
    ("mr. a", "mr a", "mr"),
    ("Id've", "Id've", "id've"),
    ("i'dve", "i'dve", "i'dve"),
    ("Let's GO", "Let's GO", "let's go"),
    ("what's that?", "what's that ", "what's that"),
    ("whats  that", "whats  that", "what's that"),
    ("semi;colon", "semi colon", "semi colon"),
    ("semi; colon", "semi colon", "semi colon"),
    ("a/b", "a b", "b"),
    ("a / b", "a  b", "b"),
    ("(hello)", " hello ", "hello"),
    ("[x]", " x ", "x"),
    ("{y}", " y ", "y"),
    ("<=5.", "  5", "5"),
    ("x<=5.y", "x  5y", "x 5y"),
    ("no, thanks", "no thanks", "no thanks"),
    ("no,thanks", "no thanks", "no thanks"),
    ("twenty-one", "twenty one", "twenty 1"),
    ("ten", "ten", "10"),
    ("Ten.", "Ten", "10"),
    ("one,two", "one two", "1 2"),
    ("1,two", "1 two", "1 2"),
    ("an apple a day", "an apple a day", "apple day"),
    ("THE", "THE", ""),
    ("the", "the", ""),
    ("", "", ""),
    ("  ", "", ""),
    ("tab\tand\nline", "tab and line", "tab and line"),
    (" trailing ", "trailing", "trailing"),
    ("50%", "50%", "50%"),
    ("$10,000.00", "$10000.00", "$10000.00"),
    ("u.s.a", "usa", "usa"),
    ("U.S.A.", "USA", "usa"),
    ("somebody'd", "somebody'd", "somebodyd"),
    ("ows'at", "ows'at", "ows'at"),
    ("'ows'at", "'ows'at", "'ow's'at"),
    ("@home", " home", "home"),
    ("back\\slash", "back slash", "back slash"),
    ("under_score", "under score", "under score"),
    ("`tick`", " tick ", "tick"),
    ("w1,2-3 x", "w123 x", "w123 x"),
    ("é. É", "é É", "é é"),
    ("۱,۲-x", "۱۲x", "۱۲x"),
    ("toys 'r' us", "toys 'r' us", "toys 'r' us"),
    ("yall'd've", "yall'd've", "y'all'd've"),
    ("hes and Im", "hes and Im", "he's and im"),
    ("a-an-the", "a an the", ""),
    ("thats it!", "thats it ", "that's it"),
]


@pytest.mark.parametrize(("text", "punctuation", "whole"), OFFICIAL)
def test_official_golden_values(text, punctuation, whole):
    stripped = answers.strip_whitespace(text)
    assert answers.process_punctuation(stripped) == punctuation
    assert answers.process_digit_article(punctuation) == whole
    assert answers.normalize_answer(text) == whole


def test_only_the_first_32_periods_go():
    """The official script passes re.UNICODE, which is 32, as the number of replacements."""
    assert answers.process_punctuation("x." * 40) == "x" * 32 + "x." * 8


def test_the_contraction_table_is_whole():
    table = answers.vqa_contractions()
    assert len(table) == 120
    # Oddities of the original: an apostrophe lost, capitals that no lower-case word equals.
    assert table["somebody'd"] == "somebodyd"
    assert table["Im"] == "I'm"
    assert answers.process_digit_article("Im") == "im"


@hypothesis.given(st.text(alphabet="aA1.,;- \t'ten", max_size=30))
def test_digits_articles_and_spaces_are_settled(text):
    found = answers.normalize_answer(text)
    assert found == " ".join(found.lower().split())
    assert not {"a", "an", "the", "ten", "none"} & set(found.split())
    assert answers.process_digit_article(found) == found


@pytest.mark.parametrize(
    ("text", "prophet", "pica"),
    [
        ("The red, big dog.", "red big dog", "red big dog"),
        # Prophet maps numbers and contractions, PICa removes "to" and splits at spaces alone.
        ("to Two dont", "to 2 don't", "two dont"),
        ("A  B", "b", "b"),
        ("1,5", "15", "15"),
        ("1, 5", "1 5", "1 5"),
        ("x-ray", "x ray", "x-ray"),
        ("p.m.", "pm", "pm"),
        ("an\nan", "", "an\nan"),
        ("3.5", "3.5", "35"),
    ],
)
def test_prophets_and_picas_answers(text, prophet, pica):
    assert answers.prep_ans(text) == prophet
    assert answers.pica_answer(text) == pica
