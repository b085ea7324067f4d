"""Search-R1 and MMSearch-R1: actions, transcripts and budgets, with a scripted model.

Actions are compared with the expressions of the authors' scripts; transcripts with their f-strings.
"""

import dataclasses
import re

import numpy as np
import pytest
from document_files import picture
from fake_llm import FakeLLM
from tiny_llm import make_engine, tiny_backend

import mmqa_jax as mmqa
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.multiple_choice import tagged_answer
from mmqa_jax.papers.search_r1 import (
    MMSearchR1Style,
    SearchR1Style,
    answer_mmsearch_r1,
    answer_search_r1,
)
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message
from mmqa_jax.prompting.backends.cache import request_key
from mmqa_jax.prompting.search_actions import Answer, Invalid, SearchByPicture, SearchTexts
from mmqa_jax.runs.traces import trace_counts, trace_tree
from tests.refusals import refuses

pytestmark = pytest.mark.slow
SEARCH_R1 = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)  # postprocess_predictions
ANSWERS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)  # extract_solution
TEXTS = ["Wash the filter every week.", "The pump is on the left.", "A plan of the house."]


@pytest.fixture(scope="module")
def corpus():
    return mmqa.open_corpus(
        TEXTS, titles=["Filter", "Pump", "Plan"], pictures=[None, None, picture()]
    )


class Script(FakeLLM):
    """Says its lines in turn, one for each question still asked; `seen` has the queries."""

    def __init__(self, *lines, **options):
        super().__init__(**options)
        self.lines = iter(lines)
        self._say = lambda prompt: (next(self.lines), -1.0)

    def answer(self, queries):
        for result in super().answer(queries):
            (candidate,) = result.candidates
            ended = dataclasses.replace(candidate, finish="end")
            yield dataclasses.replace(result, candidates=(ended,))


class Words:
    """Finds the sources that contain the query's first word; keeps what it was asked."""

    def __init__(self, corpus):
        self.corpus, self.asked = corpus, []

    def search(self, questions, top_k):
        self.asked.append([(question.question, question.image) for question in questions])
        return [self._ranking(question, top_k) for question in questions]

    def _ranking(self, question, top_k):
        word = question.question.split()[0].lower()
        names = [s.id for s in self.corpus.sources if word in s.text.lower()][:top_k]
        return Ranking(question.id, tuple(names), tuple(1.0 for _ in names))


def question(name="q", image=None):
    return Question(name, "test", "Where is the pump", image=image)


def test_actions_are_read_as_the_authors_read_them(corpus):
    style, rng = SearchR1Style(corpus, Decoding(), True), np.random.default_rng(0)
    pieces = ["<search>", "</search>", "<answer>", "</answer>", " a ", "\n", "<think>", "b"]
    kinds = {"search": SearchTexts, "answer": Answer}
    for _ in range(3_000):
        text = "".join(rng.choice(pieces, rng.integers(1, 9)))
        match = SEARCH_R1.search(text)
        expected = kinds[match[1]](match[2].strip()) if match else Invalid()
        if expected == SearchTexts(""):
            expected = Invalid()
        assert style.read(text, stopped=False) == (text, expected), text
        last = [match[1].strip() for match in ANSWERS.finditer(text)]
        assert tagged_answer(text) == (last[-1] if last else None), text
    assert style.read("<answer> x", stopped=True) == ("<answer> x</answer>", Answer("x"))
    assert style.read("<search> x", stopped=True)[1] == SearchTexts("x")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<reason>a</reason><search><img></search>", SearchByPicture()),
        ("<reason>a</reason><text_search> old pump </text_search>\n", SearchTexts("old pump")),
        ("<reason>a</reason><answer>x</answer><answer> y </answer>", Answer("y")),
        ("<text_search>a</text_search> and more", Answer("")),
        ("<answer>x</answer> <answer>", Answer("x")),
        ("Unable to answer due to lack of relevant information", Answer("")),
    ],
)  # fmt: skip
def test_actions_of_mmsearch_r1(corpus, text, action):
    assert MMSearchR1Style(corpus, Decoding()).read(text, stopped=False) == (text, action)


def test_a_transcript_grows_as_the_authors_write_it(corpus):
    lines = ["<think>a</think>\n<search> pump </search>", "hm", "<answer> left </answer>"]
    llm, words = Script(*lines), Words(corpus)
    (prediction,) = answer_search_r1([question()], corpus, llm, words, top_k=2)
    assert (prediction.answer, prediction.read) == ("left", ("1",))
    assert words.asked == [[("pump", None)]]
    first, second, third = llm.seen
    assert isinstance(first, Chat)
    assert first.messages[0].text.endswith(
        "<answer> Beijing </answer>. Question: Where is the pump?\n"
    )
    results = "Doc 1(Title: Pump) The pump is on the left.\n"
    returned = f"{lines[0]}\n\n<information>{results.strip()}</information>\n\n"
    assert (first.begun, second.begun) == ("", returned)
    assert third.begun == returned + (
        "hm\nMy previous action is invalid. "
        "If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )
    llm = Script(*lines)
    answer_search_r1([question()], corpus, llm, words, top_k=2, results_by="user")
    texts = [message.text for message in llm.seen[1].messages]
    assert texts == [
        first.messages[0].text,
        lines[0],
        f"<information>{results.strip()}</information>",
    ]
    assert not llm.seen[1].begun
    llm = Script(*lines, takes_messages=False)
    answer_search_r1([question()], corpus, llm, words, top_k=2)
    assert isinstance(llm.seen[1], Completion)
    assert llm.seen[1].prompt == first.messages[0].text + returned


def test_questions_take_their_turns_together_within_their_budget(corpus):
    llm, words = (
        Script(
            *["<search>pump</search>"] * 3, "<answer>a</answer>", *["<search>filter</search>"] * 4
        ),
        Words(corpus),
    )
    predictions = answer_search_r1([question(n) for n in "abc"], corpus, llm, words, turns=3)
    assert [len(asked) for asked in words.asked] == [3, 2]  # the third turn may not search
    assert [prediction.answer for prediction in predictions] == ["a", "", ""]
    assert [p.trace["searches"] for p in predictions] == [1, 2, 2]
    assert predictions[1].trace["incomplete"] == ["the turns ended before an answer was given"]
    counts = trace_counts([question(n) for n in "abc"], predictions)
    assert (counts["searches"], counts["unanswered"]) == (5, 2)
    first, second = trace_tree(predictions[0])
    assert (first.text, second.text) == ("turn 1, search texts: pump", "turn 2, answer: a")
    assert first.children[0].text == "sources: 1"


def test_a_failed_request_ends_its_question_alone(corpus):
    llm = Script("<answer>a</answer>", fail=[("a", 0)])
    first, second = answer_search_r1([question("a"), question("b")], corpus, llm, Words(corpus))
    assert (first.answer, first.trace["failed"], second.answer) == ("", ["timed out"], "a")


def test_mmsearch_r1_searches_by_the_picture_and_sees_what_comes_back(corpus):
    (asked,) = [s for s in corpus.sources if s.image]
    lines = [
        "<search><img></search>",
        "<text_search>pump</text_search>",
        "<text_search>filter</text_search>",
    ]
    llm, words = Script(*lines, takes_pictures=True), Words(corpus)
    about = Question("q", "test", "house of whom", image=asked.image)
    (prediction,) = answer_mmsearch_r1([about], corpus, llm, words)
    assert words.asked == [[("house of whom", asked.image)], [("pump", None)]]
    assert (prediction.answer, prediction.trace["searches"]) == ("", 2)
    first, second, third = (query.messages for query in llm.seen)
    assert [part.data for part in first[0].pictures] == [picture()]
    assert first[0].content[0].endswith("Here is the image and the question:\n")
    assert first[0].content[-1] == " house of whom"
    assert [message.role for message in third] == ["user", "assistant"] * 2 + ["user"]
    assert [part.data for part in second[2].pictures] == [picture()]
    assert "as demonstrated below:\n1. image: \ntitle: Plan\n</information>\n" in second[2].text
    assert "Original user's question: house of whom\nPlease extract" in second[2].text
    assert "relevance:\n1. (Pump) The pump is on the left.\n</information>" in third[4].text
    without = Script("<search><img></search>", takes_pictures=True)
    (prediction,) = answer_mmsearch_r1([question()], corpus, without, words)
    assert (prediction.answer, prediction.trace["searches"]) == ("", 0)
    refuses(
        "reads texts alone; name one that sees",
        answer_mmsearch_r1,
        [about],
        corpus,
        Script(),
        words,
    )


def test_a_begun_message_is_continued():
    backend = tiny_backend(make_engine())
    messages = (Message("user", ("hello",)),)

    def say(begun, count):
        (result,) = backend.answer([Chat(0, messages, Decoding(count), begun)])
        return result.candidates[0].text

    whole = say("", 6)
    assert len(whole) == 6
    assert say(whole[:2], 4) == whole[2:]
    query = Chat(0, messages, Decoding(), "")
    assert request_key("x", query) != request_key("x", dataclasses.replace(query, begun="a"))
