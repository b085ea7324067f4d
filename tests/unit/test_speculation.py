"""Speculation: answers are those of steps of one token, whatever is proposed."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from cli_runs import mmqa
from flax import nnx
from test_cli_prompt import ENGINE
from test_engine import make_engine
from tiny_llm import MODEL, SIZES, by_id, pictured_letters, qwen_vl_config, tiny_llama, write_folder

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.speculation import look_up
from mmqa_jax.models.qwen_vl.network import QwenVL
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

SPECULATING = dataclasses.replace(SIZES, speculate=4)


def followed(text, count):
    """What `look_up` says, written out with lists; None where nothing is in common."""
    last = len(text) - 1
    common = []
    for place in range(last):
        length = 0
        while length < min(3, place + 1) and text[place - length] == text[last - length]:
            length += 1
        common.append(length)
    if not common or not max(common):
        return None
    place = max(range(last), key=lambda n: (common[n], n))
    return [text[place + 1 + n % (last - place)] for n in range(count)]


def test_the_longest_last_place_is_continued():
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 4, (64, 20)).astype(np.int32)
    positions = rng.integers(0, 20, 64).astype(np.int32)
    got = jax.jit(look_up, static_argnums=2)(texts, positions, 3)
    told = 0
    for text, position, row in zip(texts.tolist(), positions, got.tolist(), strict=True):
        want = followed(text[: position + 1], 3)
        told += want is not None
        assert want is None or row == want
    assert told > 40


def requests():
    """Prompts of all lengths, of which some repeat themselves; greedy and drawn, with stops."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 50, rng.integers(1, 70)).tolist() for _ in range(6)]
    prompts += [[*prompt[:12], *prompt[:12], *prompt[:5]] for prompt in prompts[:3]]
    kinds = [
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "temperature": 0.7, "seed": 3, "n": 2},
        {"max_new_tokens": 1},
        {"max_new_tokens": 30, "temperature": 1.5, "top_k": 9, "top_p": 0.8},
        {"max_new_tokens": 40, "stop": ["e", "th"]},
    ]
    return [
        Request((n, kind), prompt, logprobs=True, **options)
        for n, prompt in enumerate(prompts)
        for kind, options in enumerate(kinds)
    ]


def listed(result):
    return [(one.tokens, one.text, one.finish, one.logprobs) for one in result.candidates]


def answers(engine, asked=None):
    results = by_id(engine.generate(requests() if asked is None else asked))
    return {key: listed(result) for key, result in results.items()}


def equal(got, want):
    assert got.keys() == want.keys()
    for key, candidates in want.items():
        for one, other in zip(got[key], candidates, strict=True):
            assert one[:3] == other[:3]
            np.testing.assert_allclose(one[3], other[3], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def one_by_one():
    return answers(make_engine())


@pytest.mark.parametrize("speculate", [2, 4, 8])
def test_answers_are_those_of_single_tokens(one_by_one, speculate):
    engine = make_engine(sizes=dataclasses.replace(SIZES, speculate=speculate))
    equal(answers(engine), one_by_one)
    counts = engine.throughput
    assert counts.decode_tokens == sum(
        len(one[0]) - 1 for candidates in one_by_one.values() for one in candidates
    )


def test_a_draft_proposes_what_the_model_takes(one_by_one):
    """An equal model is always right, also where tokens are drawn; another one changes nothing."""
    steps = {}
    for name, seed in (("equal", 6), ("another", 1)):
        engine = make_engine(sizes=SPECULATING, draft=tiny_llama(MODEL, seed))
        equal(answers(engine), one_by_one)
        steps[name] = engine.throughput.decode_tokens / engine.throughput.steps
    assert steps["equal"] > 1.5 * steps["another"]


def test_pictures_with_positions_of_three_axes():
    """Marks of pictures in the text are no tokens to propose; positions behind them are shifted."""
    config, rng = qwen_vl_config(), np.random.default_rng(4)
    shown = [rng.integers(0, 256, shape).astype(np.uint8) for shape in ((8, 12, 3), (16, 8, 3))]
    mark, again = config.image_token, rng.integers(8, 50, 9).tolist()
    told = [
        ([5, mark, *again, 6, *again], [shown[0]]),
        ([5, mark, *again, mark, 7, *again], [shown[0], shown[1]]),
        ([mark, mark, 9], [shown[1], shown[1]]),
        ([*again, *again], []),
    ]
    asked = [
        Request((n, temperature), tokens, 16, temperature, images=images, seed=n, logprobs=True)
        for n, (tokens, images) in enumerate(told)
        for temperature in (0.0, 0.8)
    ]
    sizes = dataclasses.replace(SIZES, slots=3)
    found, steps = [], []
    for speculate in (1, 4):
        sizes = dataclasses.replace(sizes, speculate=speculate)
        model = drawn(lambda: QwenVL(config, rngs=nnx.Rngs()), 3, config.llama.init_stddev)
        engine = Engine(model, config=sizes)
        found.append(answers(engine, asked))
        steps.append(engine.throughput.steps)
    equal(*reversed(found))
    assert steps[1] < steps[0]


def test_what_a_shared_beginning_holds_is_looked_up_too():
    """The text of a prompt whose beginning is cached is whole, and so are its answers."""
    head = np.random.default_rng(5).integers(8, 50, 70).tolist()
    asked = [Request(n, [*head, n, *head[:5]], 20, logprobs=True) for n in (8, 9)]
    want, engine = answers(make_engine(), asked), make_engine(sizes=SPECULATING)
    for request, shared in zip(asked, (0, 64), strict=True):
        (result,) = engine.generate([request])
        assert result.reused_tokens == shared
        equal({request.id: listed(result)}, {request.id: want[request.id]})
        text = [*request.prompt, *result.candidates[0].tokens]
        texts = np.asarray(engine._runner._slots.text)
        assert text in texts[:, : len(text)].tolist()


def test_a_run_that_is_given_up_goes_on_with_the_rest(one_by_one):
    engine, found = make_engine(sizes=SPECULATING), {}
    run = engine.generate(requests())
    for result, _ in zip(run, range(11), strict=False):
        found[result.id] = listed(result)
    run.close()
    rest = [request for request in requests() if request.id not in found]
    assert 30 < len(rest) < 40
    equal(found | answers(engine, rest), one_by_one)


REFUSED = [
    ({"sizes": {"speculate": 9}}, "engine.speculate is 9: expected 1"),
    ({"sizes": {"speculate": 0}}, "engine.speculate is 0: expected 1"),
    ({"sizes": {"speculate": 2, "scan_layers": True}}, "pages of 128 columns.*set it to 1"),
    ({"draft": {}}, "engine.draft: engine.speculate is 1.*set that to 4"),
    ({"sizes": {"speculate": 2}, "draft": {"positions": 100}}, "reads 100 tokens.*leave engine"),
]


def made(sizes: dict, draft: dict | None):
    model = None if draft is None else tiny_llama(dataclasses.replace(MODEL, **draft))
    return make_engine(sizes=dataclasses.replace(SIZES, **sizes), draft=model)


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_speculated_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        made(changes.get("sizes", {}), changes.get("draft"))


def test_every_token_is_told_once_and_choices_are_scored_as_ever():
    told: dict = {}
    engine = make_engine(sizes=SPECULATING)

    def hear(sequence):
        told.setdefault(sequence.request.original.id, []).append(sequence.tokens[-1])

    served = [Request(n, [9, 10, 11, 9, 10], 20) for n in range(3)]
    scored = Scoring("scored", [9, 10, 11], [[12, 13], [9, 10, 11]])
    results = by_id(engine.serve([*served, scored], on_token=hear))
    for request in served:
        assert told[request.id] == list(results[request.id].candidates[0].tokens)
    expected = make_engine().loglikelihood(scored.prompt, scored.continuations)
    for one, other in zip(results["scored"].scores, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("quiet")
def test_the_verb_takes_a_draft_of_its_vocabulary_alone(tmp_path):
    model, another = write_folder(tmp_path / "model"), write_folder(tmp_path / "another")
    (another / "tokenizer.json").unlink()
    pictured_letters().save(str(another / "tokenizer.json"))
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "to be or not to be or", "max_new_tokens": 9}, {"prompt": "a"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = []

    def prompt(**engine):
        out = tmp_path / f"{len(answers)}.jsonl"
        changes = [f"--config.engine.{name}={value}" for name, value in engine.items()]
        flags = f"--model={model}", f"--prompts={prompts}", f"--out={out}", "--no_cache", "--raw"
        ended = mmqa("prompt", *flags, *ENGINE, *changes)
        answers.append(out.read_text() if out.exists() else None)
        return ended

    for engine in ({}, {"speculate": 3}, {"speculate": 3, "draft": model}):
        assert prompt(**engine).code == 0
    texts = [[json.loads(line)["text"] for line in file.splitlines()] for file in answers]
    assert texts[0] == texts[1] == texts[2]
    refused = prompt(speculate=3, draft=another)
    assert refused.code == 2
    assert "its vocabulary is another" in refused.err
    assert "name a smaller model of the same family" in refused.err
    assert answers[-1] is None
