"""The generation engine on a tiny random LLaMA, against plain forward passes of the same model."""

import contextlib
import dataclasses
from collections import Counter

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import nnx
from tiny_llm import MODEL, SIZES, by_id, tiny_llama

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring, StopDetector, TooLong, truncate
from mmqa_jax.decoding.sampling import SamplingParameters, choose, draw_key
from tests.refusals import refuses

pytestmark = pytest.mark.slow

END = 7


class Letters:
    """A tokenizer of 60 characters; its special token 0 begins every text."""

    table = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!?"

    def encode(self, text):
        return [0, *(self.table.index(letter) for letter in text)]

    def decode(self, ids):
        return "".join(self.table[token] for token in ids)


def make_engine(model=MODEL, sizes=SIZES, **options):
    options = {"tokenizer": Letters(), "end_ids": [END]} | options
    return Engine(tiny_llama(model), config=sizes, **options)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def log_probs_of():
    """Model -> tokens [n] -> log-probabilities [n, V] of what follows each, from one forward pass."""
    graphdef = nnx.graphdef(tiny_llama(MODEL))

    @jax.jit
    def forward(state, ids):
        return jax.nn.log_softmax(nnx.merge(graphdef, state)(ids))

    def of(model):
        state = nnx.state(model)

        def run(tokens):
            ids = np.zeros((1, SIZES.length), np.int32)
            ids[0, : len(tokens)] = tokens
            return np.asarray(forward(state, ids))[0, : len(tokens)]

        return run

    return of


@pytest.fixture(scope="module")
def log_probs(log_probs_of):
    return log_probs_of(tiny_llama(MODEL))


def greedy(log_probs, prompt, steps):
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(log_probs(tokens)[-1].argmax()))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


def check_greedy(log_probs, request, candidate):
    """One forward pass over prompt and answer shows which token comes next after each."""
    tokens = list(candidate.tokens)
    assert len(tokens) == request.max_new_tokens or tokens[-1] == END
    assert END not in tokens[:-1]
    rows = log_probs([*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
    assert tokens == rows.argmax(-1).tolist()
    np.testing.assert_allclose(candidate.logprobs, rows.max(-1), rtol=0, atol=1e-4)


def random_requests(seed, count):
    """Prompts of 1 to 140 tokens, half of them with one of three beginnings."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, MODEL.vocab_size, size) for size in (20, 64, 100)]
    requests = []
    for number in range(count):
        tail = rng.integers(0, MODEL.vocab_size, rng.integers(1, 40))
        head = heads[rng.integers(3)] if rng.random() < 0.6 else tail[:0]
        if rng.random() < 0.1:
            head = rng.integers(0, MODEL.vocab_size, 100)
        steps = int(rng.integers(1, 20))
        requests.append(
            Request(
                number, (*head, *tail), steps, logprobs=True, temperature=(number % 3 == 2) * 1.5
            )
        )
    return requests


def served(engine, requests):
    return by_id(engine.generate(requests))


def test_greedy_equals_the_forward_pass(engine, log_probs):
    requests = [r for r in random_requests(0, 24) if not r.temperature]
    results = served(engine, requests)
    assert results.keys() == {request.id for request in requests}
    for request in requests:
        got = results[request.id].candidates[0]
        check_greedy(log_probs, request, got)
        tokens = got.tokens
        assert got.finish == ("end" if tokens[-1] == END else "length")
        of_text = got.logprobs[:-1] if tokens[-1] == END else got.logprobs
        assert got.total == pytest.approx(sum(of_text))
        assert got.text == Letters().decode(tokens).split("g")[0]  # END is the letter g


def test_an_answer_does_not_depend_on_its_neighbors(engine):
    """Alone, and in a batch of random order with shared beginnings: the same bits."""
    requests = random_requests(1, 28)
    alone = {}
    for request in requests:
        engine.forget()
        (alone[request.id],) = engine.generate([request])
        assert alone[request.id].reused_tokens == 0
    order = np.random.default_rng(100).permutation(len(requests))
    together = served(engine, [requests[n] for n in order])
    assert sum(result.reused_tokens for result in together.values()) > 100
    for request in requests:
        assert together[request.id].candidates == alone[request.id].candidates


def test_prompts_are_encoded_in_full_batches(engine, monkeypatch):
    """A chunk without partners waits for those of later prompts."""
    shares = []
    encode = engine._runner.encode

    def watched(tokens, starts, ends, rows, *rest):
        shares.append(np.mean(rows < SIZES.slots))  # others are padding
        return encode(tokens, starts, ends, rows, *rest)

    monkeypatch.setattr(engine._runner, "encode", watched)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(8, MODEL.vocab_size, size) for size in rng.integers(33, 140, 60)]
    engine.forget()
    served(engine, [Request(n, prompt, 2) for n, prompt in enumerate(prompts)])
    assert np.mean(shares) > 0.9
    assert min(shares) > 0  # none is all padding


def test_those_that_decode_wait_for_one_batch_of_a_long_prompt(engine, monkeypatch):
    """Its chunks alternate with steps, while at least as many decode as are encoded."""
    called = []
    for name in ("encode", "step"):
        method = getattr(engine._runner, name)

        def watched(*arguments, name=name, method=method):
            called.append(name)
            return method(*arguments)

        monkeypatch.setattr(engine._runner, name, watched)
    engine.forget()
    rng = np.random.default_rng(12)
    # One of them ends soon, and the long one comes in its place.
    short = [Request(n, rng.integers(8, 60, 5), 12 if n else 2) for n in range(4)]
    long = Request("long", rng.integers(8, 60, 140), 3)
    served(engine, [*short, long, *(Request(10 + n, [9 + n], 2) for n in range(4))])
    first = called.index("step")
    assert called.count("encode") - called[:first].count("encode") >= 3
    for one, other in zip(called[first:], called[first + 1 :], strict=False):
        assert (one, other) != ("encode", "encode")


def test_chunks_of_a_prompt_fill_a_batch(engine, monkeypatch):
    """A prompt alone takes as few batches as its tokens fill."""
    batches = []
    encode = engine._runner.encode

    def watched(tokens, starts, ends, rows, *rest):
        batches.append(
            (tokens.shape[1], int(np.sum(rows < SIZES.slots)), int(np.sum(ends - starts)))
        )
        return encode(tokens, starts, ends, rows, *rest)

    monkeypatch.setattr(engine._runner, "encode", watched)
    engine.forget()
    prompt = np.random.default_rng(13).integers(8, MODEL.vocab_size, 140)
    served(engine, [Request(0, prompt, 2)])
    assert batches == [(32, 2, 64), (32, 2, 64), (8, 2, 12)]  # length, rows that are used, tokens


@contextlib.contextmanager
def compilations():
    """What JAX compiles meanwhile: a list that grows."""
    compiled = []

    def count(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_nothing_is_compiled_after_warm_up(engine):
    for size in (5, 150):  # both buckets
        served(engine, [Request(0, [1] * size, 3)])
        engine.forget()
    list(engine.score([Scoring(0, [1, 2, 3], [[4], [5, 6]]), Scoring(1, [1] * 50, [[4] * 20])]))
    with compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(2.0)
        assert len(compiled) == 1  # the event is the one that JAX sends
        requests = random_requests(11, 40)
        with jax.transfer_guard("disallow"):
            served(engine, requests)
            list(engine.score([Scoring(0, requests[0].prompt, [[1], [2] * 9, [3] * 19])]))
        assert len(compiled) == 1


def test_other_weights_are_those_that_answer(engine, log_probs_of):
    """As a policy that is being trained; prompts that were encoded with the old ones are not
    reused, nothing is compiled, and the first weights come back to the same answers."""
    requests = random_requests(5, 12)
    before = served(engine, requests)
    longest = max(requests, key=lambda request: len(request.prompt))
    served(engine, [longest])
    assert served(engine, [longest])[longest.id].reused_tokens >= 32
    log_probs = log_probs_of(tiny_llama(MODEL, 9))
    engine.use(tiny_llama(MODEL, 9))
    with compilations() as compiled:
        assert served(engine, [longest])[longest.id].reused_tokens == 0
        found = served(engine, requests)
    assert not compiled
    for request in requests:
        if not request.temperature:
            check_greedy(log_probs, request, found[request.id].candidates[0])
    assert any(found[n].candidates != before[n].candidates for n in found)
    engine.use(tiny_llama(MODEL))
    after = served(engine, requests)
    assert all(after[n].candidates == before[n].candidates for n in before)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 1, "buckets": (16,), "prefill_tokens": 16, "page": 0},
        {"length": 192, "buckets": (64,), "page": 16},
        {"page": 64, "pages": 5},  # of which a long sequence takes three
    ],
    ids=str,
)
def test_sizes_change_no_answer(engine, changes):
    requests = random_requests(20, 12)
    want = served(engine, requests)
    got = served(make_engine(sizes=dataclasses.replace(SIZES, **changes)), requests)
    for request in requests:
        one, other = got[request.id].candidates[0], want[request.id].candidates[0]
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "most"), [({"cache_dtype": "bfloat16"}, 0.05), ({"weights": "int8"}, 0.1)], ids=str
)
def test_coarser_numbers_stay_near(log_probs, changes, most):
    """Log-probabilities of a given text under a rounded cache or rounded weights."""
    text = np.random.default_rng(5).integers(0, MODEL.vocab_size, 120)
    requests = [Scoring(n, text[:size], [text[size:]]) for n, size in enumerate((1, 60, 100))]
    sizes = dataclasses.replace(SIZES, buckets=(32,), **changes)
    coarse = make_engine(sizes=sizes)
    want = np.take_along_axis(log_probs(text)[:-1], text[1:, None], axis=1)[:, 0]
    for scores in coarse.score(requests):
        (score,) = scores.scores
        deviation = np.sqrt(np.mean((np.array(score.logprobs) - want[-len(score.logprobs) :]) ** 2))
        assert 1e-5 < deviation < most
    # And through decoding, which reads what prefill and earlier steps have written.
    (result,) = coarse.generate([Request(0, text[:40], 30, logprobs=True)])
    candidate = result.candidates[0]
    rows = log_probs([*text[:40], *candidate.tokens])[39:-1]
    want = np.take_along_axis(rows, np.array(candidate.tokens)[:, None], axis=1)[:, 0]
    assert np.sqrt(np.mean((candidate.logprobs - want) ** 2)) < most


def test_scores_equal_the_forward_pass(engine, log_probs):
    rng = np.random.default_rng(7)
    requests = []
    for number, size in enumerate((1, 2, 31, 32, 33, 70, 128)):
        prompt = rng.integers(0, MODEL.vocab_size, size)
        choices = [rng.integers(0, MODEL.vocab_size, n) for n in (1, 3, 12, 32)]
        likely = greedy(log_probs, prompt, 4)
        requests.append(Scoring(number, prompt, [*choices, likely]))
    found = {scores.id: scores.scores for scores in engine.score(requests)}
    for request in requests:
        prompt = list(request.prompt)
        for score, tokens in zip(found[request.id], request.continuations, strict=True):
            rows = log_probs([*prompt, *tokens])[len(prompt) - 1 : -1]
            want = np.take_along_axis(rows, np.array(tokens)[:, None], axis=1)[:, 0]
            np.testing.assert_allclose(score.logprobs, want, rtol=0, atol=1e-4)
            assert score.total == pytest.approx(want.sum(), abs=1e-3)
            assert score.mean == pytest.approx(want.mean(), abs=1e-4)
            assert score.greedy == (list(tokens) == rows.argmax(-1).tolist())
        assert found[request.id][-1].greedy


def test_continuations_share_one_pass_over_the_prompt(engine):
    rng = np.random.default_rng(8)
    prompt = rng.integers(0, MODEL.vocab_size, 70)
    choices = [rng.integers(0, MODEL.vocab_size, n) for n in (1, 3, 12, 4)]
    before = dataclasses.replace(engine.throughput)
    engine.loglikelihood(prompt, choices)
    assert engine.throughput.prefill_tokens - before.prefill_tokens == 70 + 0 + 2 + 11 + 3
    assert engine.throughput.reused_tokens == before.reused_tokens


@pytest.mark.parametrize(("layers", "begin"), [(1, 20), (2, 50)])
def test_hidden_tokens_are_as_if_they_were_not_read(layers, begin):
    """As keys that the forward pass masks for all tokens: with one layer wherever they stand, with
    more where no token of the prompt stands behind them, whose keys have seen them."""
    model = dataclasses.replace(MODEL, layers=layers)
    rng = np.random.default_rng(10)
    prompt, tail = rng.integers(0, MODEL.vocab_size, 70), rng.integers(0, MODEL.vocab_size, 5)
    answers = [[*tail, *rng.integers(0, MODEL.vocab_size, size)] for size in (9, 20)]
    answers.insert(0, [*answers[1], 3])  # of which one is the beginning
    places = [(0, 0), (begin, 70), (begin + 5, 70)]
    scoring = Scoring(
        0,
        prompt,
        [answer for _ in places for answer in answers],
        hidden=[place for place in places for _ in answers],
        unscored=len(tail),
    )
    (scores,) = make_engine(model).score([scoring])
    graphdef, state = nnx.split(tiny_llama(model))
    forward = jax.jit(lambda state, ids, seen: nnx.merge(graphdef, state)(ids, seen))
    for score, answer, place in zip(
        scores.scores, scoring.continuations, scoring.hidden, strict=True
    ):
        ids = np.zeros((1, 112), np.int32)
        ids[0, : 70 + len(answer)] = [*prompt, *answer]
        seen = np.ones(ids.shape, bool)
        seen[0, slice(*place)] = False
        rows = jax.nn.log_softmax(forward(state, ids, seen))[0]
        scored = range(70 + len(tail), 70 + len(answer))
        want = [rows[column - 1, ids[0, column]] for column in scored]
        np.testing.assert_allclose(score.logprobs, want, rtol=0, atol=1e-4)


def test_a_continuation_that_begins_another_is_read_with_it(engine):
    rng = np.random.default_rng(11)
    prompt, longest = rng.integers(0, MODEL.vocab_size, 40), rng.integers(0, MODEL.vocab_size, 20)
    alone = [engine.loglikelihood(prompt, [longest[:size]])[0] for size in (20, 7, 1)]
    engine.forget()
    before = engine.throughput.prefill_tokens
    together = engine.loglikelihood(prompt, [longest, longest[:7], longest[:1]])
    assert engine.throughput.prefill_tokens - before == 40 + 19
    assert [score.logprobs for score in together] == [score.logprobs for score in alone]


def test_columns_of_branches_are_not_reused_as_a_sequence(engine, log_probs):
    """A prompt with the tokens of an earlier prompt and all its continuations, in that order."""
    rng = np.random.default_rng(9)
    prompt = rng.integers(0, MODEL.vocab_size, 10)
    one, other = rng.integers(0, MODEL.vocab_size, (2, 15))  # both begin in the first chunk
    engine.loglikelihood(prompt, [one, other])
    whole = [*prompt, *one[:-1], *other[:-1]]  # its columns hold exactly these tokens
    request = Request(0, whole, 3, logprobs=True)
    (result,) = engine.generate([request])
    check_greedy(log_probs, request, result.candidates[0])


def test_loglikelihood_of_text_is_cut_as_in_the_harness(engine, log_probs):
    """A blank at the prompt's end goes to the continuations."""
    scores = engine.loglikelihood("the land is ", ["big", "red."])
    for score, text in zip(scores, (" big", " red."), strict=True):
        tokens = Letters().encode("the land is" + text)
        rows = log_probs(tokens)[-len(text) - 1 : -1]
        want = rows[np.arange(len(text)), tokens[-len(text) :]]
        np.testing.assert_allclose(score.logprobs, want, rtol=0, atol=1e-4)


def test_draws_differ_by_seed_and_number_alone(engine):
    prompt = [1, 2, 3, 4]

    def draw(identity, **changes):
        return Request(identity, prompt, 12, temperature=2.0, logprobs=True, **changes)

    results = served(engine, [draw(0, n=6), draw(1), draw(2, seed=5), draw(3, seed=5)])
    of_six = results[0].candidates
    assert [c.total for c in of_six] == sorted((c.total for c in of_six), reverse=True)
    assert len({c.tokens for c in of_six}) == 6
    assert results[1].candidates[0] in of_six  # draw number 0 of the same seed
    assert results[2].candidates == results[3].candidates
    assert results[2].candidates[0] not in of_six


def test_sampled_words_follow_the_distribution():
    """20,000 draws: every share within five deviations of its probability; the cut ones never."""
    logits = np.array([2.0, 1.5, 1.5, 0.5, 0.0, -1.0, -3.0], np.float32)
    rows = 20000
    keys = np.stack([draw_key(3, n) for n in range(rows)])
    chosen = jax.jit(choose, static_argnums=4)

    def shares(temperature, top_k, top_p):
        parameters = SamplingParameters(
            np.full(rows, temperature, np.float32),
            np.full(rows, top_k, np.int32),
            np.full(rows, top_p, np.float32),
            keys,
        )
        inputs = (np.tile(logits, (rows, 1)), parameters, np.full(rows, 4), np.ones(rows, bool))
        tokens, logprobs = chosen(*inputs, None)
        first = jax.tree.map(lambda x: x[:500], inputs)
        for got, same in zip(chosen(*first, True), (tokens, logprobs), strict=True):
            np.testing.assert_array_equal(got, same[:500])  # the program without branches
        want = logits - np.log(np.exp(logits).sum())  # of the model, whatever the temperature
        np.testing.assert_allclose(logprobs, want[tokens], rtol=0, atol=1e-5)
        return np.bincount(tokens, minlength=len(logits)) / rows

    for temperature, top_k, top_p, kept in [
        (1.0, 0, 1.0, 7),
        (2.0, 0, 1.0, 7),
        (1.0, 4, 1.0, 4),
        (1.0, 2, 1.0, 3),  # the second and third are equal
        (0.7, 0, 0.5, 3),  # 0.48 + 0.23 + 0.23
        (1.0, 5, 0.85, 3),  # of the five: 0.41, 0.66 and 0.91 with the equal ones
        (0.5, 1, 0.1, 1),
    ]:
        want = np.where(np.arange(7) < kept, np.exp(logits / temperature), 0)
        want /= want.sum()
        got = shares(temperature, top_k, top_p)
        assert np.all(np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / rows)), (top_k, top_p)


def test_greedy_and_sampling_rows_do_not_meet():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    parameters = SamplingParameters(
        np.array([0, 3.0, 0, 3.0], np.float32),
        np.zeros(4, np.int32),
        np.ones(4, np.float32),
        np.tile(draw_key(1, 0), (4, 1)),
    )
    chosen = jax.jit(choose)
    both, _ = chosen(logits, parameters, np.zeros(4, int), np.ones(4, bool))
    greedy_only = parameters.replace(temperature=np.zeros(4, np.float32))
    none, _ = chosen(logits, greedy_only, np.zeros(4, int), np.ones(4, bool))
    np.testing.assert_array_equal(none, logits.argmax(-1))
    np.testing.assert_array_equal(np.asarray(both)[[0, 2]], logits.argmax(-1)[[0, 2]])
    assert np.any(np.asarray(both)[[1, 3]] != logits.argmax(-1)[[1, 3]])


def test_steps_that_are_told_whether_they_sample(engine, monkeypatch):
    """As on GPUs: two programs without branches; the host knows which rows of which slots sample."""
    told = make_engine()
    programs = told._runner._programs
    monkeypatch.setattr(programs, "told_of_sampling", True)
    heard = {"begin": [], "step": []}
    for name, of_calls in heard.items():
        program = getattr(programs, name)

        def call(*arguments, program=program, of_calls=of_calls):
            of_calls.append(arguments[-1])
            return program(*arguments)

        monkeypatch.setattr(programs, name, call)
    drawn = {"temperature": 2.0, "seed": 3}
    sampled = [
        Request(0, [1, 2, 3], 3, **drawn),
        Request(1, [4, 5], 9, top_k=4, **drawn),
        Request(2, [6], 6, top_p=0.6, **drawn),
    ]
    plain = [Request(3 + n, [n + 8, 9], 12) for n in range(6)]
    for requests, expected in ((plain, {False}), (sampled + plain, {False, True})):
        heard["begin"].clear(), heard["step"].clear()
        engine.forget(), told.forget()
        want, got = served(engine, requests), served(told, requests)
        for n, result in want.items():
            assert [c.tokens for c in got[n].candidates] == [c.tokens for c in result.candidates]
        assert set(heard["step"]) == expected
        assert set(heard["begin"]) <= expected
    assert True in heard["begin"]
    assert heard["step"][-1] is False  # those that sampled have ended


def test_stop_strings_end_the_text(engine, log_probs):
    prompt = Letters().encode("the land is big and the sea is ")
    tokens = greedy(log_probs, prompt, 20)
    text = Letters().decode(tokens)
    stop = text[5:8]  # three tokens
    where = text.index(stop)
    (result,) = engine.generate([Request(0, prompt, 20, stop=("never", stop))])
    candidate = result.candidates[0]
    assert candidate.finish == "stop"
    assert candidate.text == result.text == text[:where]
    assert list(candidate.tokens) == tokens[: where + 3]


class Bytes:
    """UTF-8 bytes as tokens: most characters take several."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("für Öl: ja\nQ:", ("\nQ",), "für Öl: ja"),
        ("ein Öl", ("Öl",), "ein "),
        ("日本語。次", ("。",), "日本語"),
        ("aab", ("ab",), "a"),
        ("xab", ("b", "ab"), "x"),
        ("nichts", ("x", "yz"), "nichts"),
    ],
)
def test_the_detector_stops_at_the_first_match(text, stops, before):
    detector = StopDetector(Bytes(), stops)
    data = text.encode()
    hit = next((n for n, token in enumerate(data, 1) if detector.push(token)), None)
    ends = [
        n for n in range(len(data)) if any(s in data[:n].decode(errors="ignore") for s in stops)
    ]
    ends += [len(data)] if any(text.endswith(stop) for stop in stops) else []
    assert hit == (ends[0] if ends else None)
    assert truncate(text, stops) == before


def test_long_prompts_are_shortened_by_the_caller_or_refused(engine):
    long = Request("long", [1] * 150, 20)
    short = Request("short", [1] * 10, 3)
    with pytest.raises(
        TooLong, match=r"'long': its prompt of 150 tokens plus 20 new ones is 10 more"
    ):
        list(engine.generate([short, long]))
    asked = []

    def fewer(request, excess):
        asked.append(excess)
        return dataclasses.replace(request, prompt=request.prompt[:-6])

    results = by_id(engine.generate([short, long], shorten=fewer))
    assert asked == [10, 4]
    assert results["long"].prompt_tokens == 138
    for give_up in (lambda request, excess: None, lambda request, excess: request):
        with pytest.raises(TooLong, match=r"engine\.length = 160"):
            list(engine.generate([long], shorten=give_up))
    with pytest.raises(UserError, match="keep the id"):
        list(engine.generate([long], shorten=lambda r, n: dataclasses.replace(short)))
    with pytest.raises(TooLong, match="'s': its prompt of 150 tokens plus 11 new ones"):
        list(engine.score([Scoring("s", [1] * 150, [[1], [1] * 11])]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": []}, "its prompt is empty"),
        ({"prompt": [3, 60]}, "has token 60, expected 0 to 59"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected 1 to 2,147,483,647"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"n": 3}, "n is 3, expected 1 for greedy"),
        ({"n": 0}, "n is 0"),
        ({"stop": "end"}, "a list of strings, not one string"),
        ({"stop": ("",)}, "at least one character"),
        ({"seed": -1}, "seed is -1"),
        ({"beams": 2, "n": 3}, "beams is 2"),
        ({"beams": 2, "temperature": 1.0}, "beams is 2"),
    ],
)
def test_bad_requests_are_named(engine, changes, match):
    with pytest.raises(UserError, match=rf"request 'odd': .*{match}"):
        list(engine.generate([Request(**{"id": "odd", "prompt": [1, 2], **changes})]))
    (after,) = engine.generate([Request("next", [1, 2], 3)])  # the engine goes on
    assert len(after.candidates[0].tokens) <= 3


def test_other_mistakes_are_named(engine):
    with pytest.raises(UserError, match="request 4: its id is not unique"):
        list(engine.generate([Request(4, [1], 2), Request(4, [2], 2)]))
    refuses("expected at least one", engine.loglikelihood, [1, 2], [])
    refuses("all texts or all token ids", engine.loglikelihood, "text", [[1]])
    with pytest.raises(UserError, match="continuation '' adds no token to its prompt; expected"):
        engine.loglikelihood("text", ["a", ""])
    bare = make_engine(tokenizer=None)
    with pytest.raises(UserError, match="its prompt is text, but the engine has no tokenizer"):
        list(bare.generate([Request(0, "text")]))
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        list(bare.generate([Request(0, [1], stop=("a",))]))
    refuses("end token 60: expected 0 to 59", make_engine, end_ids=[60])
    for changes, match in [
        ({"length": 193}, "engine.length is 193: expected at most model.positions = 192"),
        ({"slots": 0}, "engine.slots is 0"),
        ({"buckets": (8, 20)}, "engine.buckets is"),
        ({"page": 24}, r"engine.page is 24: .* that each of engine.buckets = \(8, 32\) divides"),
        ({"pages": -1}, "engine.pages is -1: expected 0"),
        (
            {"page": 16, "pages": 9},
            "engine.pages is 9: 9 of 16 tokens .* hold fewer than engine.length = 160; raise it, or "
            "lower engine.length",
        ),
        ({"cache_dtype": "int4"}, "engine.cache_dtype is 'int4'"),
        ({"weights": "int2"}, "engine.weights is 'int2'"),
        ({"weights": "int4"}, "engine.weights=int4: the model holds no"),
    ]:
        with pytest.raises(UserError, match=match):
            make_engine(sizes=dataclasses.replace(SIZES, **changes))


def test_an_abandoned_run_leaves_a_usable_engine(engine):
    requests = random_requests(30, 6)
    want = served(engine, requests)
    run = engine.generate(requests)
    next(run)
    with pytest.raises(RuntimeError, match="already serving"):
        next(engine.generate(requests))
    run.close()
    got = served(engine, requests)
    assert {n: r.candidates for n, r in got.items()} == {n: r.candidates for n, r in want.items()}


def test_throughput_counts_what_was_done(engine):
    before = dataclasses.replace(engine.throughput)
    shown = []

    class Bar:
        def advance(self, n, **values):
            shown.append((n, values))

    engine.forget()
    prompt = np.arange(40)
    requests = [Request(n, [*prompt, n], 3) for n in range(8, 11)]
    results = list(engine.generate(requests, progress=Bar()))
    after = engine.throughput
    new = sum(len(result.candidates[0].tokens) for result in results)
    assert after.requests - before.requests == 3
    assert after.prefill_tokens - before.prefill_tokens == 3 * 41 - 2 * 32
    assert after.reused_tokens - before.reused_tokens == 2 * 32
    assert Counter(result.reused_tokens for result in results) == {32: 2, 0: 1}
    assert after.decode_tokens - before.decode_tokens == new - 3  # the first comes with the prompt
    assert [n for n, _ in shown] == [1, 1, 1]
    assert shown[-1][1]["decode"].endswith(" tokens/s")
