"""VLP's cached beam search against full re-encoding of every sequence at every step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.beam import BeamResult
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.vlp.atlas_reader import (
    AtlasVLP,
    AtlasVLPConfig,
    Context,
    ProbedInputs,
    said_before,
)
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

MASK, SEP, TYPE, STEPS, LENGTH = 4, 3, 5, 6, 14
CONFIG = VLPConfig(
    BertConfig(
        vocab_size=23,
        hidden=16,
        layers=2,
        heads=2,
        mlp=24,
        positions=32,
        types=6,
        eps=1e-5,
        unroll=1,
    ),
    region_features=7,
    region_positions=5,
    visual_hidden=(),
)


OURS = AtlasVLPConfig(**vars(CONFIG), region_tags=True, copy_head=True)


@pytest.fixture(scope="module", params=[CONFIG, OURS], ids=["vlp", "copy"])
def model(request) -> VLP:
    """Weights large enough that answers differ by question, [SEP] likely enough to end some."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: request.param.build(rngs=nnx.Rngs())))
    rng = np.random.default_rng(2)
    state = nnx.map_state(
        lambda path, x: x.replace(
            (
                (path[-1] == "scale")
                + (0.5 if path[-1] in ("kernel", "table") else 0.1) * rng.normal(size=x.shape)
            ).astype(np.float32)
        ),
        state,
    )
    made = nnx.merge(graphdef, state)
    made.mlm_head.bias[...][SEP] += 1.0
    if isinstance(made, AtlasVLP):
        # [SEP] is never asked to be copied here, so it must win among the written words.
        made.copy_head.gate.bias[...] -= 1.0
        made.mlm_head.bias[...][SEP] += 3.0
    nnx.update(made, jax.device_put(nnx.state(made)))
    return made


def batch(rows: int, regions: int, length: int = LENGTH) -> VLPInputs:
    """Context + question only, right-padded; image rows have closed region slots."""
    rng = np.random.default_rng(10 * rows + regions)
    columns = np.arange(length)[None]
    real = rng.integers(regions + 4, length + 1, (rows, 1))
    real[0] = length
    opened = rng.integers(1, regions + 1, (rows, 1)) if regions else 0
    context = (columns < real) & ~((columns > opened) & (columns <= regions))
    return VLPInputs(
        input_ids=np.where(columns < real, rng.integers(5, 23, (rows, length)), 0),
        token_type_ids=np.where(columns < real, np.where(columns < 4, 4, TYPE), 0),
        position_ids=np.where(columns < real, columns, 0),
        context_mask=context,
        answer_mask=np.zeros((rows, length), bool),
        region_features=rng.normal(size=(rows, regions, 7)).astype(np.float32),
        region_positions=rng.normal(size=(rows, regions, 5)).astype(np.float32),
    )


def search(model: VLP, inputs: VLPInputs, **options) -> BeamResult:
    """The cached search, on the host."""
    options = {"mask_id": MASK, "sep_id": SEP, "max_new_tokens": STEPS} | options
    return jax.device_get(beam_search(*nnx.split(model), inputs, **options))


def arrays(inputs: VLPInputs) -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in vars(inputs).items() if v is not None}


def read(model: VLP, inputs: VLPInputs, positions: jax.Array) -> jax.Array:
    """Log-probabilities of words at columns `positions` [B, P]."""
    hidden = model.encode(inputs)
    at = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
    if not isinstance(model, AtlasVLP):
        return jax.nn.log_softmax(model.mlm_logits(at))
    context = Context(hidden, inputs.input_ids, inputs.context_mask)
    return model.token_log_probs(at, context, said_before(inputs, positions))


@functools.partial(jax.jit, static_argnums=0)
def _next(graphdef, state, inputs: VLPInputs, at) -> jax.Array:
    """Log-probabilities of the word at one column of the first row."""
    return read(nnx.merge(graphdef, state), inputs, jnp.reshape(at, (1, 1)))[0, 0]


# Not op by op: each would be a program.
token_log_probs, log_probs_of, mlm_logits = map(
    nnx.jit, (AtlasVLP.token_log_probs, AtlasVLP.log_probs_of, AtlasVLP.mlm_logits)
)


def fresh(config: AtlasVLPConfig) -> AtlasVLP:
    return drawn(lambda: AtlasVLP(config, rngs=nnx.Rngs()))


class FullEncoder:
    """log p(next word | question, words so far) by `encode` on the whole sequence, no cache."""

    def __init__(self, model: VLP, inputs: VLPInputs):
        self.run = functools.partial(_next, *nnx.split(model))
        self.inputs = arrays(inputs)
        self.real = np.asarray(inputs.position_ids).max(axis=1) + 1

    def __call__(self, question: int, words: tuple[int, ...]) -> np.ndarray:
        x = {k: v[question : question + 1] for k, v in self.inputs.items()}
        pad = ((0, 0), (0, STEPS + 1))
        for name in ("input_ids", "token_type_ids", "position_ids", "context_mask", "answer_mask"):
            x[name] = np.pad(x[name], pad)
        first = int(self.real[question])
        span = slice(first, first + len(words) + 1)
        x["input_ids"][0, span] = (*words, MASK)
        x["token_type_ids"][0, span] = TYPE
        x["position_ids"][0, span] = np.arange(span.start, span.stop)
        x["answer_mask"][0, span] = True
        return np.asarray(self.run(VLPInputs(**x), first + len(words)))


def brute_force(log_probs, question, beams, length_penalty=0.0):
    """Every beam re-encoded from scratch at every step; candidates kept as whole sequences."""
    living = [(0.0, ())]
    found: dict[int, tuple[float, tuple[int, ...]]] = {}
    for step in range(1, STEPS + 1):
        proposals = []
        for score, words in living:
            ended = bool(words) and words[-1] == SEP
            probs = log_probs(question, words)
            for w in np.argsort(-probs, kind="stable")[:beams]:
                proposals.append((score - 10000.0 * ended + float(probs[w]), (*words, int(w))))
        living = sorted(proposals, key=lambda p: -p[0])[:beams]
        for slot, (score, words) in enumerate(living):
            if (words[-1] == SEP or step == STEPS) and slot not in found:
                found[slot] = (score + length_penalty * step, words)
        if len(found) == beams:
            break
    return sorted(found.values(), key=lambda c: -c[0])


@pytest.mark.parametrize(
    ("model", "rows", "regions", "beams", "penalty"),
    [(CONFIG, 5, 4, 4, 0.3), (OURS, 3, 0, 3, 0.0)],
    ids=["vlp", "copy"],
    indirect=["model"],
)
def test_beam_search_equals_full_reencoding(model, rows, regions, beams, penalty):
    inputs = batch(rows, regions)
    result = search(model, inputs, num_beams=beams, token_type=TYPE, length_penalty=penalty)
    log_probs = FullEncoder(model, inputs)
    lengths = set()
    for question in range(rows):
        expected = brute_force(log_probs, question, beams, penalty)
        for k, (score, words) in enumerate(expected):
            length = int(result.lengths[question, k])
            assert tuple(result.tokens[question, k, :length].tolist()) == words, (question, k)
            assert not np.any(result.tokens[question, k, length:])
            np.testing.assert_allclose(result.scores[question, k], score, atol=1e-3)
            lengths.add(length)
    assert len(lengths) > 1  # answers of several lengths were compared


def test_greedy_answer_is_the_teacher_forced_argmax(model):
    inputs = batch(5, 4)
    result = search(model, inputs, num_beams=1)
    log_probs = FullEncoder(model, inputs)
    for question in range(5):
        length = int(result.lengths[question, 0])
        words = tuple(result.tokens[question, 0, :length].tolist())
        steps = [log_probs(question, words[:t]) for t in range(length)]
        assert [int(p.argmax()) for p in steps] == list(words)
        total = sum(float(p.max()) for p in steps)
        np.testing.assert_allclose(result.scores[question, 0], total, atol=1e-4)
        assert length == STEPS or words[-1] == SEP
        assert SEP not in words[:-1]
    assert len({tuple(t.tolist()) for t in result.tokens[:, 0]}) >= 4  # the context matters


def test_probes_give_every_step_of_decoding_in_one_pass(model):
    """A [MASK] probe per answer position reads what decoding reads there (training's shortcut)."""
    inputs, words = batch(3, 4), (7, 9, 9, 12, SEP)
    log_probs = FullEncoder(model, inputs)
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, x, start):
        model = nnx.merge(graphdef, state)
        return read(model, x, start + jnp.arange(len(words))[None])

    for question in range(3):
        x = {k: v[question : question + 1] for k, v in arrays(inputs).items()}
        first, count = int(log_probs.real[question]), len(words)
        pad = ((0, 0), (0, 2 * count))
        for name in ("input_ids", "token_type_ids", "position_ids", "context_mask", "answer_mask"):
            x[name] = np.pad(x[name], pad)
        answer, probes = slice(first, first + count), slice(LENGTH + count, LENGTH + 2 * count)
        x["probe_mask"] = np.zeros_like(x["answer_mask"])
        for span, ids in ((answer, words), (probes, (MASK,) * count)):
            x["input_ids"][0, span] = ids
            x["token_type_ids"][0, span] = TYPE
            x["position_ids"][0, span] = first + np.arange(count)
        x["answer_mask"][0, answer] = True
        x["probe_mask"][0, probes] = True
        given = ProbedInputs(**{k: jnp.asarray(v) for k, v in x.items()})
        found = np.asarray(run(state, given, probes.start))[0]
        expected = np.stack([log_probs(question, words[:t]) for t in range(count)])
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_answers_do_not_depend_on_padding_or_batch_mates(model):
    run = functools.partial(search, model, num_beams=4, token_type=TYPE, length_penalty=0.3)
    inputs = batch(5, 4)
    together = run(inputs)
    alone = run(jax.tree.map(lambda x: np.repeat(np.asarray(x)[1:2], 5, axis=0), inputs))
    wider = {
        k: np.pad(v, ((0, 0), (0, 3)), constant_values=1 if k == "input_ids" else 0)
        if not k.startswith("region")
        else v
        for k, v in arrays(inputs).items()
    }
    padded = run(VLPInputs(**wider))
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])
    np.testing.assert_array_equal(together.tokens, padded.tokens)
    np.testing.assert_allclose(together.scores, padded.scores, atol=1e-4)


def test_one_compilation_per_shape(model):
    graphdef, state = nnx.split(model)
    kwargs = {"mask_id": MASK, "sep_id": SEP, "num_beams": 1, "max_new_tokens": STEPS}
    inputs = batch(5, 4)
    beam_search(graphdef, state, inputs, **kwargs)
    count = beam_search._cache_size()
    again = nnx.split(nnx.merge(graphdef, state))  # another model of the same config
    beam_search(*again, inputs.replace(input_ids=inputs.input_ids + 1), **kwargs)
    assert beam_search._cache_size() == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 24}, "vocabulary size 23"),
        ({"max_new_tokens": 19}, "expected 1 to 18"),
        ({"token_type": 6, "max_new_tokens": 9}, "expected 0 to 5"),
        ({"no_repeat_ngram": 1, "max_new_tokens": 9}, "expected 0 .repeats allowed. or 2 to"),
    ],
)
def test_bad_arguments_are_named(model, change, message):
    with pytest.raises(UserError, match=message):
        beam_search(*nnx.split(model), batch(1, 0), mask_id=MASK, sep_id=SEP, **change)


def test_a_copy_head_mixes_written_and_copied_words():
    """Against the mixture in plain numpy; `log_probs_of` reads the same numbers one by one."""
    rng = np.random.default_rng(0)
    model = fresh(OURS)
    hidden = rng.normal(size=(2, 3, 16)).astype(np.float32)  # [B, P, H]
    ids, mask = rng.integers(0, 23, (2, 5)), rng.random((2, 5)) < 0.7
    mask[:, 0] = True
    keys = rng.normal(size=(2, 5, 16)).astype(np.float32)
    context, said = Context(keys, ids, mask), rng.random((2, 3, 5)) < 0.4
    found = np.exp(token_log_probs(model, hidden, context, said))

    @nnx.jit
    def parts(head):
        return head.query(hidden), head.key(keys), head.again(hidden), head.gate(hidden)

    query, key, again, gate = map(np.asarray, parts(model.copy_head))
    logits = np.asarray(mlm_logits(model, hidden))
    scores = np.einsum("bph,blh->bpl", query, key) / 16**0.5
    scores += said * again  # [B, P, 1]: words said before
    gates = 1 / (1 + np.exp(-gate))
    for b in range(2):
        for p in range(3):
            weights = np.exp(scores[b, p]) * mask[b]
            weights /= weights.sum()
            written = np.exp(logits[b, p]) / np.exp(logits[b, p]).sum()
            gate = gates[b, p, 0]
            mixed = (1 - gate) * written
            for column in range(5):
                mixed[ids[b, column]] += gate * weights[column]
            np.testing.assert_allclose(found[b, p], mixed, rtol=1e-4, atol=1e-6)
    wanted = rng.integers(0, 23, (2, 3))
    one_by_one = log_probs_of(model, hidden, context, said, wanted)
    expected = np.take_along_axis(np.log(found), wanted[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(one_by_one, expected, atol=1e-4)


def test_words_beyond_the_written_ones_are_only_copied():
    """Against a full head whose logits of the later words are -inf."""
    rng = np.random.default_rng(0)
    limited = fresh(dataclasses.replace(OURS, written_words=9))
    hidden = rng.normal(size=(2, 3, 16)).astype(np.float32)  # [B, P, H]
    ids, mask = np.array([[1, 12, 4, 12], [20, 8, 9, 3]]), np.array([[1, 1, 1, 0], [1] * 4], bool)
    keys = rng.normal(size=(2, 4, 16)).astype(np.float32)
    context, said = Context(keys, ids, mask), np.zeros((2, 3, 4), bool)
    found = np.exp(token_log_probs(limited, hidden, context, said))  # [B, P, V]

    whole = fresh(OURS)  # the same parameters
    logits = np.array(mlm_logits(whole, hidden))
    np.testing.assert_allclose(mlm_logits(limited, hidden), logits[:, :, :9], atol=1e-6)
    logits[:, :, 9:] = -1e9
    mixed = nnx.jit(lambda head: head(hidden, logits, context, said, 23))
    expected = mixed(whole.copy_head)
    np.testing.assert_allclose(found, np.exp(expected), atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-5)
    assert found[0, :, 13:].max() < 1e-15
    assert found[0, :, 12].min() > 0

    wanted = np.array([[12, 13, 2], [9, 8, 22]])
    sayable_of = nnx.jit(lambda model: model.sayable(context, wanted))
    sayable = np.asarray(sayable_of(limited))
    np.testing.assert_array_equal(sayable, [[True, False, True], [True, True, False]])
    one_by_one = np.exp(log_probs_of(limited, hidden, context, said, wanted))
    picked = np.take_along_axis(found, wanted[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(one_by_one[sayable], picked[sayable], atol=1e-6)
    assert np.asarray(sayable_of(whole)).all()


def test_said_before_counts_visible_answer_words_only():
    """Columns: [CLS] 7 8 7, question 9, answer 8 [MASK] 7, a probe at the answer's second place."""
    inputs = batch(1, 0, 9).replace(
        input_ids=np.asarray([[1, 7, 8, 7, 9, 8, MASK, 7, MASK]]),
        position_ids=np.asarray([[0, 1, 2, 3, 4, 5, 6, 7, 6]]),
        answer_mask=np.asarray([[0, 0, 0, 0, 0, 1, 1, 1, 0]], bool),
    )
    said = np.asarray(jax.jit(said_before)(inputs, np.asarray([[5, 6, 7, 8]])))
    eight = np.array([0, 0, 1, 0, 0, 1, 0, 0, 0], bool)
    mask = np.array([0, 0, 0, 0, 0, 0, 1, 0, 1], bool)
    np.testing.assert_array_equal(said[0], [np.zeros(9, bool), eight, eight | mask, eight])


def test_no_ngram_twice(model):
    """The search with forbidden repeats against one step by step in Python."""
    inputs, ngram = batch(5, 4), 2
    free, result = (
        search(model, inputs, num_beams=1, **options)
        for options in ({}, {"no_repeat_ngram": ngram})
    )
    log_probs = FullEncoder(model, inputs)
    for question in range(5):
        words: tuple[int, ...] = ()
        while len(words) < STEPS and words[-1:] != (SEP,):
            scores = log_probs(question, words).copy()
            for start in range(len(words) - ngram + 1):
                if words[start : start + ngram - 1] == words[len(words) - ngram + 1 :]:
                    scores[words[start + ngram - 1]] = -np.inf
            words += (int(scores.argmax()),)
        length = int(result.lengths[question, 0])
        assert tuple(result.tokens[question, 0, :length].tolist()) == words
    assert not np.array_equal(free.tokens, result.tokens)  # something was forbidden


def test_written_words_without_a_copy_head_are_refused():
    with pytest.raises(UserError, match=r"model\.written_words .* set model.copy_head too"):
        AtlasVLPConfig(**vars(CONFIG), written_words=9)
