"""Citations by cause: what each sentence loses without each source, by hand."""

import pytest
from fake_llm import FakeLLM

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking, Source
from mmqa_jax.prompting.causes import SENTENCES, marked, sentences_of, suspects
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from tests.refusals import refuses

SOURCES = [Source(f"s{n}", "text", text) for n, text in enumerate(("a pump", "a filter", "a hose"))]
CORPUS = Corpus(SOURCES)
RANKING = Ranking("q", ("s0", "s1", "s2"), (0.9, 0.8, 0.7))
ANSWER = "The filter is red. It leaks [3]. Who knows?"


def score(prompt: str, continuation: str) -> tuple[float, ...]:
    """The first sentence needs the filter, the second pump and hose; nothing supports the last."""
    has = {name: f"] a {name}" in prompt for name in ("pump", "filter", "hose")}
    first = -1.0 if has["filter"] else -5.0
    second = -2.0 if has["pump"] and has["hose"] else -3.0
    return (first, second, -7.0)[: len(sentences_of(continuation))]


class Hiding(FakeLLM):
    hides = True


def answered(llm=FakeLLM, **options):
    llm = llm(lambda prompt: (ANSWER, -1.0), score)
    reader = LLMReader(CORPUS, llm, LLMReaderOptions(citations="cause", **options))
    (prediction,) = reader.answer([Question("q", "", "What?")], [RANKING])
    return prediction


@pytest.mark.parametrize("llm", [FakeLLM, Hiding])
def test_sentences_cite_what_they_lose_most_without(llm):
    prediction = answered(llm)
    assert prediction.sources == ("s1", "s0", "s2")
    assert prediction.source_scores == (0.8, 0.9, 0.7)
    sentences = prediction.trace[SENTENCES]
    assert [s["losses"] for s in sentences] == [[0, 4, 0], [1, 0, 1], [0, 0, 0]]
    assert [s["sources"] for s in sentences] == [[2], [1, 3], []]
    assert marked(sentences) == "The filter is red. [2] It leaks. [1] [3] Who knows?"
    assert prediction.trace["unfounded"] == []


@pytest.mark.parametrize("llm", [FakeLLM, Hiding])
def test_what_shares_no_word_is_not_tried(llm):
    prediction = answered(llm, tried=1)  # and what the answer names
    sentences = prediction.trace[SENTENCES]
    assert [s["losses"] for s in sentences] == [[None, 4, 0], [None, 0, 1], [None, 0, 0]]
    assert [s["sources"] for s in sentences] == [[2], [3], []]


def test_suspects_have_words_that_others_lack():
    texts = ["Wash the pump.", "The pump is red.", "Red is a color of the pump.", "Wash: weekly!"]
    read = ("a", "b", "c", "d")
    asked = Prediction("q", "Weekly the pump is washed", read=read)
    assert suspects(asked, texts, 1) == [3]
    assert suspects(asked, texts, 2) == [1, 3]  # `is` stands in two, the first of which counts
    assert suspects(Prediction("q", "Weekly", ("b",), (0.5,), read=read), texts, 1) == [1, 3]
    assert suspects(Prediction("q", "Who knows", read=read), texts, 2) == [0, 1]


def test_an_asked_citation_that_supports_nothing_is_told():
    prediction = answered(support=2.0)
    assert (prediction.sources, prediction.trace["unfounded"]) == (("s1",), [3])


@pytest.mark.parametrize(
    ("answer", "sentences"),
    [("No.", ["No."]), ("At 3.5 V. Then off", ["At 3.5 V.", "Then off"]), (" ", [])],
)
def test_sentences_end_by_unicodes_rules(answer, sentences):
    assert sentences_of(answer) == sentences


def test_a_server_scores_no_message():
    llm = FakeLLM(takes_pictures=None)
    refuses("a server does not tell", LLMReader, CORPUS, llm, LLMReaderOptions(citations="cause"))
