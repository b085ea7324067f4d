"""Requests that arrive while others are served: the answers of the engine, pieces, cancellation."""

import concurrent.futures
import threading

import numpy as np
import pytest
from test_engine import Letters, make_engine

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.online import Closed, OnlineEngine, QueueFull, TextStream
from mmqa_jax.decoding.requests import Request, Scoring
from tests.refusals import refuses

pytestmark = pytest.mark.slow

TEXTS = ["a", "what is it", "what is there?", "Once upon a time, there was", "b c d e f g", "zz"]


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def requests():
    for n, text in enumerate(TEXTS * 3):
        yield Request(n, text, max_new_tokens=4 + n, temperature=n % 3 / 2, seed=n, stop=["ab"])
    yield Request("draws", "some", max_new_tokens=9, temperature=1.0, n=3, seed=4)
    yield Scoring("scored", "what is", [" it", " there", "!"])


def test_answers_are_those_of_the_engine(engine):
    wanted = {result.id: result for result in engine.serve(requests())}
    with OnlineEngine(engine) as online, concurrent.futures.ThreadPoolExecutor(8) as threads:
        pending = list(threads.map(online.submit, requests()))
        found = [one.future.result(60) for one in pending]
    for request, answer in zip(requests(), found, strict=True):
        if isinstance(request, Scoring):
            scores = [score.logprobs for score in wanted[request.id].scores]
            for own, other in zip(answer.scores, scores, strict=True):
                np.testing.assert_allclose(own.logprobs, other, atol=1e-5)
        else:
            own = [candidate.tokens for candidate in answer.candidates]
            assert own == [candidate.tokens for candidate in wanted[request.id].candidates]


def test_likeliest_tokens_are_those_of_greedy_decoding(engine):
    (greedy,) = engine.generate([Request(0, "what is", max_new_tokens=6)])
    tokens = greedy.candidates[0].tokens
    (scores,) = engine.score([Scoring(0, Letters().encode("what is"), [tokens, (3, *tokens[1:])])])
    right, wrong = scores.scores
    assert [one.token for one in right.likeliest] == list(tokens)
    assert [one.logprob for one in right.likeliest] == pytest.approx(right.logprobs, abs=1e-6)
    assert wrong.likeliest[0] == right.likeliest[0]
    assert (right.greedy, wrong.greedy) == (True, tokens[0] == 3)


def test_pieces_join_to_the_text(engine):
    pieces: dict[tuple[int, int], str] = {}
    streams: dict[tuple[int, int], TextStream] = {}
    with OnlineEngine(engine) as online:
        pending = []
        for number, request in enumerate(requests()):

            def on_token(one, number=number):
                key = number, one.draw
                stops = one.request.original.stop
                stream = streams.setdefault(key, TextStream(Letters(), stops))
                pieces[key] = pieces.get(key, "") + stream.push(one.tokens[-1], one.finish)

            pending.append(online.submit(request, on_token))
        answers = [one.future.result(60) for one in pending]
    for number, answer in enumerate(answers[:-1]):
        texts = sorted(text for (of, _), text in pieces.items() if of == number)
        assert texts == sorted(candidate.text for candidate in answer.candidates)


def test_a_stop_string_is_held_back_until_it_is_known_to_be_none():
    stream = TextStream(Letters(), ["abc", "b!"])
    table = Letters.table.index
    assert [stream.push(table(letter)) for letter in "xabab"] == ["x", "", "", "ab", ""]
    assert stream.push(table("c"), "stop") == ""


def test_what_is_cancelled_frees_its_slot(engine):
    (wanted,) = engine.generate([Request(0, "go on", max_new_tokens=20)])
    engine.forget()
    with OnlineEngine(engine) as online:
        began = threading.Event()
        long = [
            online.submit(Request(n, "go on", max_new_tokens=150), lambda one: began.set())
            for n in range(40)  # eight times the slots
        ]
        assert began.wait(60)
        for one in long:
            one.cancel()
        short = online.submit(Request("short", "what is", max_new_tokens=3))
        assert len(short.future.result(60).candidates[0].tokens) <= 3
        assert all(one.future.cancelled() or one.future.done() for one in long)
        assert sum(one.future.cancelled() for one in long) >= 35
    assert online.unfinished == 0
    # The prompts that were cancelled are not reused wrongly.
    (found,) = engine.generate([Request(0, "go on", max_new_tokens=20)])
    assert found.candidates[0].tokens == wanted.candidates[0].tokens


def test_of_a_cancelled_request_no_draw_that_waits_is_begun(engine):
    """Although more wait than there are slots, so that nothing new would be taken yet."""
    before, pending = engine.throughput.decode_tokens, []

    def leave(_):
        if pending:
            pending.pop().cancel()

    draws = Request(0, "go on", max_new_tokens=100, n=40, temperature=1.0, seed=1)
    with OnlineEngine(engine) as online:
        pending.append(online.submit(draws, leave))
        online.submit(Request("short", "what is", max_new_tokens=3)).future.result(60)
    assert online.unfinished == 0
    assert engine.throughput.decode_tokens - before < 100


def test_refusals(engine):
    online = OnlineEngine(engine, most=2)
    with pytest.raises(UserError, match=r"engine\.length = 160"):
        online.submit(Request("long", "a" * 158, max_new_tokens=20))
    running = [online.submit(Request(n, "go", max_new_tokens=120)) for n in range(2)]
    with pytest.raises(QueueFull, match="2 requests"):
        online.submit(Request("third", "go"))
    online.close()  # what was taken is answered
    assert all(one.future.done() for one in running)
    with pytest.raises(Closed, match="being closed"):
        online.submit(Request("late", "go"))


def test_a_failing_engine_fails_what_waits(engine, monkeypatch, capsys):
    online = OnlineEngine(engine)
    monkeypatch.setattr(engine, "_decode", lambda active: 1 / 0)
    pending = online.submit(Request(0, "go", max_new_tokens=8))
    refuses("division by zero", pending.future.result, 60, error=Closed)
    assert not online.is_serving
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(Closed, match="division by zero"):
        online.submit(Request(1, "go"))
