"""LLMReranker: P(yes) of every pair, with what failed as 0."""

import math

import pytest
from fake_llm import FakeLLM
from test_llm_reader import CORPUS

from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.prompting.backends import Choices, Message
from mmqa_jax.prompting.llm_reader import LLMReranker, LLMRerankerOptions

ASKED = [Question("q", "test", "What is the capital?"), Question("r", "test", "Which flag?")]
FOUND = [Ranking("q", ("b", "a"), (2.0, 1.0)), Ranking("r", ("c", "a", "b"), (1.0, 1.0, 1.0))]
RIGHT = (("the capital?", "Pelot is"), ("Which flag", "red flag"))


def judge(prompt: str, option: str) -> tuple[float, ...]:
    """Probability .8 of yes, else .3; and .6 of an empty source."""
    helps = any(a in prompt and b in prompt for a, b in RIGHT)
    yes = 0.6 if "(empty)" in prompt else 0.8 if helps else 0.3
    share = 0.5  # other words take half
    return (math.log(share * (yes if option.strip().lower() == "yes" else 1 - yes)),)


@pytest.mark.parametrize("chat", [True, False])
def test_helpful_sources_come_first(chat):
    llm = FakeLLM(score=judge)
    reranker = LLMReranker(CORPUS, llm, LLMRerankerOptions(chat=chat))
    first, second = reranker.score(ASKED, FOUND)
    assert (first.question_id, first.sources) == ("q", ("a", "b"))
    assert first.scores == pytest.approx((0.8, 0.3))
    assert second.sources == ("c", "a", "b")  # of equal ones the earlier first
    assert second.scores == pytest.approx((0.8, 0.3, 0.3))
    assert reranker.unscored.total() == 0
    assert len(llm.seen) == 5
    query = llm.seen[0]
    assert isinstance(query, Choices)
    assert query.continuations == (("Yes", "No") if chat else (" yes", " no"))
    # Behind the question, so that the engine computes its beginning once.
    prompts = [llm.text(query) for query in llm.seen if query.id[0] == "q"]
    beginning = prompts[0].partition("Source:")[0]
    assert "What is the capital?" in beginning
    assert all(prompt.startswith(beginning) for prompt in prompts)


def test_calibrated_by_an_empty_source():
    reranker = LLMReranker(CORPUS, FakeLLM(score=judge), LLMRerankerOptions(calibrated=True))
    first, _ = reranker.score(ASKED, FOUND)
    odds = 0.8 / 0.2 / (0.6 / 0.4)
    assert first.sources == ("a", "b")
    assert first.scores[0] == pytest.approx(odds / (1 + odds))


def test_pairs_that_fail_count_as_0_and_are_counted():
    llm = FakeLLM(score=judge, fail=[("q", "a")])
    reranker = LLMReranker(CORPUS, llm)
    first, _ = reranker.score(ASKED, FOUND)
    assert (first.sources, first.scores[1]) == (("b", "a"), 0.0)
    assert reranker.unscored.total() == 1
    long = Ranking("q", ("long", "a"), (1.0, 0.5))
    reranker = LLMReranker(CORPUS, FakeLLM(score=judge, length=400))
    (ranked,) = reranker.score(ASKED[:1], [long])
    assert (ranked.sources, ranked.scores[1]) == (("a", "long"), 0.0)
    assert reranker.unscored.total() == 1


def test_pictures_are_shown_where_the_model_sees():
    llm = FakeLLM(score=judge, takes_pictures=True)
    LLMReranker(CORPUS, llm).score(ASKED[1:], FOUND[1:])
    shown = {query.id[1]: query.prompt[0] for query in llm.seen}
    assert isinstance(shown["c"], Message)
    assert [len(shown[name].pictures) for name in ("a", "b", "c")] == [0, 0, 1]


def test_no_candidates():
    assert LLMReranker(CORPUS, FakeLLM()).score(ASKED[:1], [Ranking("q", (), ())]) == [
        Ranking("q", (), ())
    ]
