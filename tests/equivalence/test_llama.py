"""LLaMA against transformers' LlamaForCausalLM: random weights, config values off their defaults."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cached import decode, prefill
from compare import (
    LAYER,
    WHOLE,
    alone,
    compiled,
    deviation,
    forward,
    names_its_axes,
    reloaded,
    same_gradients,
    same_parameters,
    with_config,
)
from decoder_pair import Pair, run_torch, save_pair, torch_layers
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import kv_cache
from mmqa_jax.models.common.layers import attention
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import llama_key_map, publish_llama
from mmqa_jax.models.llama.network import Llama, unstack_layers
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.published import load_published, write_published

LENGTH = 520  # short prompts hide mistakes in rotary positions
LENGTHS = np.array([LENGTH, 7, 301])

COMMON = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "max_position_embeddings": 640,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
}
CASES = {
    "grouped, tied": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "tie_word_embeddings": True,
        "rms_norm_eps": 3e-4,
        "rope_theta": 1234.5,
    },
    "one key head, llama3 scaling": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 56,
        "rms_norm_eps": 2e-5,
        "hidden_act": "gelu_new",
        # Of the eight frequencies one is kept, two are interpolated, five divided.
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 6.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 90,
        },
    },
    "all heads, biases, own head size, linear scaling": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 14,
        "intermediate_size": 72,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
    },
}


@functools.cache
def make_pair(case: str, folder: Path) -> Pair:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**COMMON, **CASES[case])
    return save_pair(transformers.LlamaForCausalLM(config), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(params=list(CASES))
def pair(request, folder):
    return make_pair(request.param, folder / request.param)


@pytest.fixture
def grouped(folder):
    """The first case alone, for what does not depend on the config."""
    return make_pair(next(iter(CASES)), folder / next(iter(CASES)))


def tokens(rows=3, length=LENGTH):
    return np.random.default_rng(1).integers(0, COMMON["vocab_size"], (rows, length))


def everything():
    """(mask, positions) of rows that are all real."""
    return np.ones((3, LENGTH), bool), np.broadcast_to(np.arange(LENGTH), (3, LENGTH))


def test_layers_and_logits_equal(pair):
    theirs, ours, _, forward = pair
    ids = tokens()
    outputs, want = torch_layers(theirs, ids)
    with torch.no_grad():
        embedded = theirs.model.embed_tokens(torch.from_numpy(ids)).numpy()

    def each_layer(model, ids, inputs):
        (cos, sin), *_ = model._prepare(inputs[0], None, None)
        each = alone(model.layers, lambda layer, x: layer(x, cos, sin), inputs)
        return model.embed(ids), each, model.layer_outputs(inputs[0])

    inputs = np.stack([embedded, *outputs[:-1]])  # [layers, B, L, H]
    got, each, stacked = compiled(ours, each_layer)(ids, inputs)
    np.testing.assert_array_equal(got, embedded)
    np.testing.assert_allclose(each, outputs, **LAYER)
    np.testing.assert_allclose(stacked, outputs, **WHOLE)
    np.testing.assert_allclose(forward(ids, *everything()), want, **WHOLE)
    assert np.abs(want).max() > 1  # the comparison is of numbers that matter


def test_padding_equals(grouped):
    theirs, _, _, forward = grouped
    ids = tokens()
    right = np.arange(LENGTH) < LENGTHS[:, None]
    everyone, counted = everything()
    unpadded = forward(ids, everyone, counted)
    for mask in (right, right[:, ::-1].copy()):
        positions = np.maximum(mask.cumsum(1) - 1, 0)  # as transformers' generate counts them
        want = run_torch(theirs, ids, attention_mask=mask.astype(np.int64), position_ids=positions)
        got = forward(ids, mask, positions)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got[mask], want[mask], **WHOLE)
        # Only distances matter, so that rows need not count from their first real token.
        got = forward(ids, mask, counted)
        np.testing.assert_allclose(got[mask], want[mask], **WHOLE)
        # What follows a token is not seen: padding on the right needs no mask, on the left it does.
        difference = np.abs(unpadded[mask] - want[mask]).max()
        assert difference < 1e-4 if mask is right else difference > 0.1


@pytest.mark.parametrize("pair", [*CASES][::2], indirect=True)  # tied; biases
def test_gradients_of_the_language_model_loss_equal(pair):
    theirs, ours, _, _ = pair
    ids = tokens(length=120)  # positions: the forward's
    mask = np.arange(120) < np.array([120, 7, 61])[:, None]
    labels = np.where(mask, ids, -100)
    theirs.zero_grad()
    loss = theirs(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask).long(),
        labels=torch.from_numpy(labels),
    ).loss
    loss.backward()

    def language_model(model, ids, mask):
        log_probs = jax.nn.log_softmax(model(ids, mask)[:, :-1])
        picked = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * mask[:, 1:]) / mask[:, 1:].sum()

    graphdef, state = nnx.split(ours)

    @jax.jit
    @jax.value_and_grad
    def step(state):
        return language_model(nnx.merge(graphdef, state), ids, mask)

    value, gradients = step(state)
    np.testing.assert_allclose(value, loss.item(), **LAYER)
    key_map = dataclasses.replace(llama_key_map(ours.config), tied=())
    same_gradients(dict(export(gradients, key_map)), theirs, zero=r"k_proj\.bias")


def test_bfloat16_stays_near_float32(grouped):
    """The root mean square deviation of the logits is below 2 % of their own."""
    half = load_published(
        "llama", grouped.folder, param_dtype="bfloat16", dtype="bfloat16", unroll=1
    )
    got = compiled(half, forward)(tokens())
    assert got.dtype == jnp.float32
    assert 1e-4 < deviation(got, grouped.forward(tokens(), *everything())) < 0.02


# Where every head has keys of its own; of grouped heads are the engines of test_decoder_families.py.
@pytest.mark.parametrize("pair", [[*CASES][2]], indirect=True)
def test_generation_with_a_cache_equals_the_whole_forward(pair):
    """Prefill into some rows, chunks and single steps, each row at its own position."""
    _, ours, folder, forward = pair
    ids = tokens()
    want = np.asarray(forward(ids, *everything()))
    unstacked = load_published("llama", folder, layers_apart=True)
    lengths, bucket, slots = np.array([40, 3, 17]), 40, np.array([4, 1, 5])
    prompts = np.where(np.arange(bucket) < lengths[:, None], ids[:, :bucket], 0)

    # Six pages with stale contents, three in use; the first prompt comes again, in page 0.
    cache = kv_cache.empty(unstacked.config, 6, 96, "float32")
    cache = jax.tree.map(lambda x: np.full(x.shape, 7, np.float32), cache)

    def begin(model, ids, lengths, pages, cache):
        return prefill(model, model.embed(ids), lengths, cache, pages)

    again = np.array([0, 1, 2, 0])
    batch = prompts[again], lengths[again], np.array([*slots, 0]), cache
    logits, cache = compiled(unstacked, begin)(*batch)
    np.testing.assert_allclose(logits[:3], want[np.arange(3), lengths - 1], **WHOLE)
    of_stack, other = compiled(ours, begin)(*batch)
    np.testing.assert_allclose(of_stack, logits, **LAYER)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LAYER), other, cache)
    for row in (2, 3):
        jax.tree.map(lambda x, row=row: np.testing.assert_array_equal(x[row], 7.0), cache)
    graphdef, state = nnx.split(unstacked)

    @functools.partial(jax.jit, donate_argnums=4)
    def extend(state, chunk, starts, ends, cache):
        model = nnx.merge(graphdef, state)
        hidden, cache = kv_cache.forward(
            model, model.embed(chunk), cache, table=slots[:, None], starts=starts, ends=ends
        )
        return model.logits(hidden), cache

    @functools.partial(jax.jit, donate_argnums=3)
    def step(state, token, position, cache):
        active = np.isin(np.arange(6), slots)
        return decode(nnx.merge(graphdef, state), token, position, cache, active)

    # A chunk of five tokens, of which row 1 has only two real ones.
    fresh = np.array([5, 2, 5])
    chunk = np.zeros((3, 5), int)
    for row, real in enumerate(fresh):
        chunk[row, :real] = ids[row, lengths[row] : lengths[row] + real]
    logits, cache = extend(state, chunk, lengths, lengths + fresh, cache)
    logits = np.asarray(logits)
    for row, real in enumerate(fresh):
        positions = lengths[row] + np.arange(real)
        np.testing.assert_allclose(logits[row, :real], want[row, positions], **WHOLE)

    at = lengths + fresh
    for _ in range(4):
        token, position = np.zeros(6, int), np.zeros(6, int)
        token[slots], position[slots] = ids[np.arange(3), at], at
        logits, cache = step(state, token, position, cache)
        np.testing.assert_allclose(np.asarray(logits)[slots], want[np.arange(3), at], **WHOLE)
        at += 1


def test_a_donated_cache_is_updated_in_place():
    """The step's output is the given cache's memory, and nothing of a layer's size is beside it."""
    config = LlamaConfig(
        vocab_size=50, hidden=32, layers=4, heads=4, kv_heads=2, mlp=48, positions=4096
    )
    graphdef, stack = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs())))
    model = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stack))
    unstack_layers(model)
    graphdef, state = nnx.split(model)
    cache = jax.eval_shape(lambda: kv_cache.empty(config, 8 * 32, 128, "float32"))
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    table = np.arange(8 * 32).reshape(8, 32)

    def step(state, token, position, cache):
        model = nnx.merge(graphdef, state)
        embedded, where = model.embed(token[:, None]), {"starts": position, "ends": position + 1}
        hidden, cache = kv_cache.forward(model, embedded, cache, table=table, **where)
        return model.logits(hidden[:, 0]), cache

    memory = (
        jax.jit(step, donate_argnums=3).lower(state, rows, rows, cache).compile().memory_analysis()
    )
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)]
    assert memory.alias_size_in_bytes == sum(sizes)
    assert memory.temp_size_in_bytes < sizes[0]


def test_a_cache_of_another_type(grouped):
    ids = tokens()
    step = compiled(grouped.ours, decode)
    cache, out = kv_cache.empty(grouped.ours.config, 3, 16, "bfloat16"), []
    for position in range(16):
        logits, cache = step(ids[:, position], np.full(3, position), cache)
        out.append(logits)
    assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    want = grouped.forward(ids, *everything())[:, :16]
    assert 1e-6 < deviation(np.stack(out, axis=1), want) < 0.01


def test_export_reloads_in_transformers(pair, tmp_path):
    theirs, ours, _, _ = pair
    published = publish_llama(ours.config, nnx.state(ours))
    write_published(tmp_path, published, more={"eos_token_id": 5}, shard_bytes=40_000)
    assert len([*tmp_path.glob("model-*-of-*.safetensors")]) > 1
    again = reloaded(transformers.LlamaForCausalLM, tmp_path, attn_implementation="eager")
    assert again.config.eos_token_id == 5
    assert again.dtype == torch.float32
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name
    ids = tokens(rows=1)
    np.testing.assert_array_equal(run_torch(again, ids), run_torch(theirs, ids))
    back = load_published("llama", tmp_path, unroll=1)
    assert dataclasses.replace(back.config, init_stddev=0.0) == dataclasses.replace(
        ours.config, init_stddev=0.0
    )
    same_parameters(back, ours)


def test_every_parameter_names_its_axes(pair):
    _, ours, folder, _ = pair
    names_its_axes(ours, {"layers", "embed", "mlp", "heads", "vocab"})
    stacked = dict(nnx.to_flat_state(nnx.state(ours)))
    unstacked = load_published("llama", folder)
    unstack_layers(unstacked)
    for path, variable in nnx.to_flat_state(nnx.state(unstacked.layers)):
        of_stack = stacked["layers", *path[1:]]
        names, array = variable.get_metadata()["out_sharding"], np.asarray(variable[...])
        if path[-1] == "kernel":  # they lie transposed
            names, array = names[::-1], array.T
        assert ("layers", *names) == of_stack.get_metadata()["out_sharding"]
        np.testing.assert_array_equal(array, np.asarray(of_stack[...])[path[0]])


def test_remat_and_attention_dropout(grouped):
    ids = tokens(rows=2, length=24)

    def gradients(key, **changes):
        config = dataclasses.replace(grouped.ours.config, **changes)
        graphdef, state = nnx.split(with_config(grouped.ours, config))

        def loss(state):
            return jnp.mean(nnx.merge(graphdef, state)(ids, dropout_key=key) ** 2)

        return jax.jit(jax.value_and_grad(loss))(state)

    key = jax.random.key(3, impl="unsafe_rbg")  # quick to compile
    plain = gradients(None)
    dropped = gradients(key, attention_dropout=0.5, remat="dots")
    got = gradients(None, attention_dropout=0.5, remat="full")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, plain)
    queries = [np.asarray(grads["layers"]["q"]["kernel"][...]) for _, grads in (dropped, plain)]
    assert deviation(*queries) > 0.1  # half of what the queries see is dropped


def test_grouped_attention_equals_repeated_heads():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 7, 6, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 11, 2, 8)).astype(np.float32)
    mask = rng.random((2, 1, 7, 11)) < 0.6
    repeated = [np.repeat(x, 3, axis=2) for x in (k, v)]

    @jax.jit
    def attend(q, k, v, mask):
        masked = attention(q, k, v, mask=mask)
        causal = attention(q, k[:, :7], v[:, :7], mask=mask[..., :1, :7], is_causal=True)
        return masked, causal, attention(q, k[:, :7], v[:, :7], is_causal=True)

    for got, want in zip(attend(q, k, v, mask), attend(q, *repeated, mask), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_what_the_model_cannot_take_is_named(grouped):
    _, ours, folder, _ = grouped
    with pytest.raises(UserError, match="641 tokens long"):
        jax.eval_shape(ours, np.zeros((1, 641), int))
    unstacked = load_published("llama", folder, layers_apart=True)
    with pytest.raises(TypeError, match="unstacked layers only run in"):
        jax.eval_shape(unstacked, np.zeros((1, 2), int))
    with pytest.raises(UserError, match="layout does not have: layers/0/"):
        publish_llama(unstacked.config, nnx.state(unstacked))
