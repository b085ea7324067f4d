"""Prompts of solved examples: their text, and how many shots fit."""

import numpy as np
import pytest
from fake_llm import FakeLLM

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.decoding.requests import Score, Scores
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.backends.cache import Answers, answer_all
from mmqa_jax.prompting.examples.library import Shot
from mmqa_jax.prompting.few_shot import (
    PromptTemplate,
    Trace,
    few_shot,
    load_template,
    prompts_record,
)
from mmqa_jax.prompting.multiple_choice import choose_option, option_prior
from mmqa_jax.runs import traces
from tests.refusals import refuses

SHOTS = [Shot(Question(f"s{n}", "train", f"shot {n} ?"), 1.0 - n / 10) for n in range(4)]
QUERY = Question("q", "val", "open ?")
TEMPLATE = PromptTemplate("Head\n", "[$question]\n", "<$question>")


def fields(question: Question) -> dict[str, str]:
    return {"question": question.question}


def make(text: str) -> Completion:
    return Completion("q", text, Decoding(max_new_tokens=2))


def limit(characters: int):
    return FakeLLM(length=characters).check


def score_by_length(prompt: str, option: str) -> tuple[float, ...]:
    return (-float(len(option)),)


def fake(**options) -> FakeLLM:
    """Answers a completion by its last word, scores continuations by their length."""
    return FakeLLM(lambda prompt: (prompt.split()[-1], -1.0), score_by_length, **options)


def test_the_order_of_shots():
    first = few_shot(TEMPLATE, QUERY, SHOTS[:2], fields, make, limit(999))
    assert first.text == first.query.prompt == "Head\n[shot 0 ?]\n[shot 1 ?]\n<open ?>"
    last = few_shot(TEMPLATE, QUERY, SHOTS[:2], fields, make, limit(999), "most_similar_last")
    assert last.text == "Head\n[shot 1 ?]\n[shot 0 ?]\n<open ?>"


@pytest.mark.parametrize("order", ["most_similar_first", "most_similar_last"])
@pytest.mark.parametrize("fits", range(5))
def test_the_least_similar_shots_are_dropped(order, fits):
    length = len("Head\n<open ?>") + fits * len("[shot 0 ?]\n")
    found = few_shot(TEMPLATE, QUERY, SHOTS, fields, make, limit(length + 1), order)
    assert [shot.question.id for shot in found.shots] == [f"s{n}" for n in range(fits)]
    assert found.dropped == 4 - fits
    assert all((f"shot {n}" in found.text) == (n < fits) for n in range(4))


def test_a_question_that_never_fits():
    found = few_shot(TEMPLATE, QUERY, SHOTS, fields, make, limit(3))
    assert found.query is None
    assert "more than engine.length" in found.reason
    record = prompts_record([found])
    assert record["dropped_shots"] == 4
    assert record["too_long"] == [found.reason]


def test_dollars_in_questions_are_text():
    shot = Shot(Question("s", "train", "$question costs $5 ?"), 1.0)
    found = few_shot(TEMPLATE, QUERY, [shot], fields, make, limit(999))
    assert "[$question costs $5 ?]" in found.text


def test_picas_prompt_verbatim():
    """microsoft/PICa, gpt3_api_okvqa.py l.82-96."""
    shot = {"context": "a cat.", "question": "what is it?", "answer": "cat"}
    text = load_template("pica.okvqa").render(
        [shot, shot], {"context": "a dog.", "question": "who?"}
    )
    assert text == (
        "Please answer the question according to the above context.\n===\n"
        "Context: a cat.\n===\nQ: what is it?\nA: cat\n\n===\n"
        "Context: a cat.\n===\nQ: what is it?\nA: cat\n\n===\n"
        "Context: a dog.\n===\nQ: who?\nA:"
    )


def test_an_unknown_template():
    refuses(r"template=pica\.nothing: no such prompt template", load_template, "pica.nothing")


def test_queries_are_sent_in_the_order_of_their_texts():
    backend = fake(fail=["b"])
    queries = [Completion("a", "x z"), Completion("b", "x y"), Completion("c", "a")]
    answers = answer_all(backend, queries)
    assert [query.id for query in backend.seen] == ["c", "b", "a"]
    assert {name: result.text for name, result in answers.by_id.items()} == {"a": "z", "c": "a"}
    assert answers.failed == {"b": "timed out"}


def scored(*values: tuple[float, int]) -> Scores:
    scores = (Score(total, (total / n,) * n, False) for total, n in values)
    return Scores("q", tuple(scores))


def test_the_most_probable_option():
    question = Question("q", "val", "?", choices=("long option", "short", "third"))
    answers = Answers({"q": scored((-4.0, 4), (-3.0, 2), (-9.0, 1))}, {})
    assert choose_option(question, answers).choice == 1
    assert choose_option(question, answers, score="mean").choice == 0
    prior = {"q": np.array([-1.0, -1.0, -8.5])}
    found = choose_option(question, answers, prior)
    assert (found.choice, found.answer) == (2, "third")
    assert found.trace["option_scores"] == [-4.0, -3.0, -9.0]
    assert found.trace["calibrated_scores"] == [-3.0, -2.0, -0.5]


def test_options_that_tie_or_have_no_scores():
    question = Question("q", "val", "?", choices=("same", "same"))
    assert choose_option(question, Answers({"q": scored((-1.0, 1), (-1.0, 1))}, {})).choice == 0
    lost = choose_option(question, Answers({}, {"q": "timed out"}))
    assert (lost.choice, lost.answer, lost.trace["failed"]) == (None, "", ["timed out"])


def test_the_prior_of_options():
    backend = fake()
    options = {"q": (" one", " three"), "r": (" one", " eleven")}
    prior = option_prior(backend, options, "A:")
    assert {name: values.tolist() for name, values in prior.items()} == {
        "q": [-4.0, -6.0],
        "r": [-4.0, -7.0],
    }
    assert [query.id for query in backend.seen] == ["prior 0"]  # all distinct options in one query


class _Recorder(dict):
    def __init__(self, **values):
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


def test_reports_count_the_keys_that_a_trace_has():
    trace = _Recorder(reader=3, fallback="a cat", caption=None, prompts=["..."], shots=[[]])
    prediction = Prediction("q", trace=trace)
    traces.trace_counts([QUERY], [prediction])
    traces.answer_rows(QUERY, prediction)
    traces.trace_details(trace)
    assert len(trace.asked) > 15
    assert trace.asked <= Trace.__annotations__.keys()


def test_a_query_that_does_not_fit_fails_and_the_others_are_answered():
    backend = fake(length=12)
    queries = [Completion("long", "a b c d e f g h"), Completion("short", "a b c")]
    answers = answer_all(backend, queries)
    assert list(answers.by_id) == ["short"]
    assert answers.failed.keys() == answers.not_sent == {"long"}
    assert answer_all(backend, queries, checked=True).by_id.keys() == {"long", "short"}
