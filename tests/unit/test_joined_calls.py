"""Callers of one model together: what is asked in one call, what each gets, and how they end."""

from __future__ import annotations

import pytest
from fake_llm import FakeLLM

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.cache import Cached, ResponseCache
from mmqa_jax.prompting.joined_calls import run_joined
from mmqa_jax.prompting.stream import answer_all

GREEDY = Decoding(max_new_tokens=4)


class CountingLLM(FakeLLM):
    """Answers with the prompt in upper case; notes the prompts of every call."""

    fingerprint = "fake"

    def __init__(self, **more):
        super().__init__(lambda prompt: (prompt.upper(), -1.0), **more)
        self.calls: list[list[str]] = []

    def answer(self, queries):
        queries = list(queries)
        self.calls.append([query.prompt for query in queries])
        for query in reversed(queries):  # in any order
            yield from super().answer([query])


@pytest.fixture
def model(tmp_path):
    return Cached(CountingLLM(), ResponseCache(tmp_path / "answers"))


def asking(model, *steps, then=lambda: None):
    """A caller that asks step after step, and returns the texts of each and its counted work."""

    def run(join):
        own = join(model)
        texts = []
        for prompts in steps:
            queries = [Completion(name, prompt, GREEDY) for name, prompt in enumerate(prompts)]
            answers = answer_all(own, queries)
            texts.append([answers.by_id[n].text for n in range(len(prompts)) if n in answers.by_id])
        then()
        return texts, own.work.calls, own.failures

    return run


def backend(model) -> CountingLLM:
    return model._backend


def test_every_step_is_one_call(model):
    """What two ask is asked once; prompts with a common beginning follow each other."""
    callers = [
        asking(model, ["b a", "a"], ["d"]),
        asking(model, ["b", "a"], ["c"], ["d", "e"]),
        asking(model),
    ]
    results = dict(run_joined(callers))
    assert results == {
        0: ([["B A", "A"], ["D"]], 3, []),
        1: ([["B", "A"], ["C"], ["D", "E"]], 5, []),
        2: ([], 0, []),
    }
    assert backend(model).calls == [["a", "b", "b a"], ["c", "d"], ["e"]]  # d is kept


def test_progress_of_the_calls_alone_is_shown(model, capfd, monkeypatch):
    monkeypatch.delenv("MMQA_PROGRESS", raising=False)
    list(run_joined([asking(model, ["a"]), asking(model, ["b"])]))
    assert [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()] == [
        "Answering 2 rows"
    ]


def test_one_runs_at_a_time_and_in_order(model):
    seen = []

    def caller(name):
        def run(join):
            own = join(model)
            for step in range(3):
                seen.append((name, step))
                answer_all(own, [Completion(0, f"{name} {step}", GREEDY)])

        return run

    list(run_joined([caller("x"), caller("y")]))
    assert seen == [(name, step) for step in range(3) for name in "xy"]


def test_failures_are_the_callers_own(tmp_path):
    llm = CountingLLM(fail=[0])  # the first of the call: `a`
    model = Cached(llm, ResponseCache(tmp_path / "answers"))
    results = dict(run_joined([asking(model, ["a", "b"]), asking(model, ["b"])]))
    texts, calls, failures = results[0]
    assert (texts, calls, [one.id for one in failures]) == ([["B"]], 1, [0])
    assert results[1] == ([["B"]], 1, [])


def waiting(model, raised: list):
    """A caller that notes what is raised where it waits."""

    def run(join):
        try:
            answer_all(join(model), [Completion(0, "w", GREEDY)])
        except BaseException as error:
            raised.append(error)
            raise

    return run


@pytest.mark.parametrize("error", [UserError("cell 2."), RunError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["caller", "model"])
def test_an_error_ends_all(model, monkeypatch, error, where):
    """Each that waits ends by the same error, as if it were alone."""
    raised = []

    def fail(*_):
        raise error

    if where == "model":
        monkeypatch.setattr(backend(model), "answer", fail)
    between = asking(model, then=fail if where == "caller" else lambda: None)
    with pytest.raises(type(error)) as caught:
        list(run_joined([waiting(model, raised), between, waiting(model, raised)]))
    assert caught.value is error
    assert raised == [error, error]


def test_closed_in_between(model):
    raised = []
    ending = run_joined([asking(model), waiting(model, raised)])
    assert next(ending)[0] == 0
    ending.close()
    assert [type(error) for error in raised] == [GeneratorExit]


def test_a_kill_keeps_what_was_answered(model, monkeypatch):
    """Answers are in the cache as they come, before the call ends."""
    whole = backend(model).answer

    def two(queries):
        for n, result in enumerate(whole(queries)):
            if n == 2:
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(backend(model), "answer", two)
    with pytest.raises(KeyboardInterrupt):
        list(run_joined([asking(model, ["a", "b"]), asking(model, ["c", "d"])]))
    monkeypatch.setattr(backend(model), "answer", whole)
    backend(model).calls.clear()
    results = dict(run_joined([asking(model, ["a", "b"]), asking(model, ["c", "d"])]))
    assert [results[n][0] for n in (0, 1)] == [[["A", "B"]], [["C", "D"]]]
    assert backend(model).calls == [["a", "b"]]  # answers come from the last on


def test_a_caller_that_reads_no_further(model):
    """It asks anew while others still read the first call."""

    def impatient(join):
        own = join(model)
        next(iter(own.answer([Completion(n, f"p{n}", GREEDY) for n in range(3)])))
        return answer_all(own, [Completion(0, "q", GREEDY)]).by_id[0].text

    results = dict(run_joined([impatient, asking(model, ["r"])]))
    assert (results[0], results[1][0]) == ("Q", [["R"]])
