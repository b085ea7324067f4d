"""BART against transformers' BartForConditionalGeneration: random weights, config off its defaults."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import (
    LAYER,
    WHOLE,
    alone,
    compiled,
    deviation,
    forward,
    names_its_axes,
    randomize,
    reloaded,
    same_gradients,
    same_parameters,
)
from flax import nnx

from mmqa_jax.models.bart.keys import bart_key_map, publish_bart
from mmqa_jax.models.bart.network import Bart, BartLayer, bart_base, bart_large_cnn
from mmqa_jax.models.common.encoder_decoder import shift_tokens_right
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses

ROWS, SOURCE, TARGET = 3, 37, 19
SOURCE_LENGTHS, TARGET_LENGTHS = np.array([37, 5, 22]), np.array([8, 19, 1])

COMMON = {
    "vocab_size": 102,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "max_position_embeddings": 40,
}
CASES = {
    "scaled embeddings, tanh gelu, unlike stacks, other ids": {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 56,
        "decoder_ffn_dim": 72,
        "activation_function": "gelu_new",
        "scale_embedding": True,
        "init_std": 0.08,
        "pad_token_id": 3,
        "decoder_start_token_id": 5,
        "eos_token_id": 4,
    },
    "as bart-large-cnn": {
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "activation_function": "gelu",
    },
}


class Pair(NamedTuple):
    """A torch model, ours loaded from its checkpoint, and our compiled forward."""

    theirs: transformers.BartForConditionalGeneration
    ours: Bart
    folder: Path
    forward: Callable  # (source, its mask, decoder inputs, their mask) -> logits [3, 19, V]


def make_theirs(case: str, seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.BartConfig(**COMMON, **CASES[case], attn_implementation="eager")
    theirs = randomize(transformers.BartForConditionalGeneration(config), seed, 0.05)
    theirs.final_logits_bias.copy_(torch.randn_like(theirs.final_logits_bias))
    return theirs


@functools.cache
def make_pair(case: str, folder: Path) -> Pair:
    theirs = make_theirs(case)
    theirs.save_pretrained(folder)
    # Recomputation shows in gradients alone, which are compared with torch's.
    ours = load_published("bart", folder, unroll=1, remat="dots")
    return Pair(theirs, ours, folder, compiled(ours, forward))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bart")


@pytest.fixture(params=list(CASES))
def pair(request, folder):
    return make_pair(request.param, folder / request.param)


@pytest.fixture
def first(folder):
    """The first case alone, for what does not depend on the config."""
    return make_pair(next(iter(CASES)), folder / next(iter(CASES)))


def batch():
    """(source, its mask, target, its mask), padded on the right with word 77."""
    rng = np.random.default_rng(0)
    source, target = (rng.integers(6, COMMON["vocab_size"], (ROWS, n)) for n in (SOURCE, TARGET))
    source_mask = np.arange(SOURCE) < SOURCE_LENGTHS[:, None]
    target_mask = np.arange(TARGET) < TARGET_LENGTHS[:, None]
    return (
        np.where(source_mask, source, 77),
        source_mask,
        np.where(target_mask, target, 77),
        target_mask,
    )


def run_torch(model, source, source_mask, target, target_mask, **more):
    with torch.no_grad():
        return model(
            input_ids=torch.from_numpy(source),
            attention_mask=torch.from_numpy(source_mask).long(),
            decoder_input_ids=torch.from_numpy(target),
            decoder_attention_mask=torch.from_numpy(target_mask).long(),
            **more,
        )


def test_embeddings_layers_and_logits_equal(pair):
    theirs, ours, _, forward = pair
    source, source_mask, target, target_mask = batch()
    want = run_torch(theirs, source, source_mask, target, target_mask, output_hidden_states=True)
    # [layers + 1, B, L, H]: the embeddings, then every layer's output.
    encoded, decoded = (
        np.stack([h.numpy() for h in states])
        for states in (want.encoder_hidden_states, want.decoder_hidden_states)
    )
    memory = want.encoder_last_hidden_state.numpy()

    def each_layer(model, source, target, encoded, decoded, memory):
        columns, own = source_mask[:, None, None], target_mask[:, None, None]
        return (
            model.encoder.embed(model.embed(source)),
            model.decoder.embed(model.embed(target)),
            alone(model.encoder.layers, lambda layer, x: layer(x, columns), encoded),
            alone(model.decoder.layers, lambda layer, x: layer(x, own, memory, columns), decoded),
            model.encode(source, source_mask),
        )

    of_source, of_target, of_encoder, of_decoder, last = compiled(ours, each_layer)(
        source, target, encoded[:-1], decoded[:-1], memory
    )
    np.testing.assert_allclose(of_source, encoded[0], **LAYER)
    np.testing.assert_allclose(of_target, decoded[0], **LAYER)
    np.testing.assert_allclose(of_encoder, encoded[1:], **LAYER)
    np.testing.assert_allclose(of_decoder, decoded[1:], **LAYER)
    np.testing.assert_allclose(last, memory, **WHOLE)
    logits = forward(source, source_mask, target, target_mask)
    np.testing.assert_allclose(logits, want.logits.numpy(), **WHOLE)
    assert np.abs(want.logits.numpy()).max() > 1  # the comparison is of numbers that matter


@pytest.mark.parametrize("source_side", ["right", "left"])
@pytest.mark.parametrize("target_side", ["right", "left"])
def test_padding_equals(pair, source_side, target_side):
    theirs, _, _, forward = pair
    source, source_mask, target, target_mask = batch()
    if source_side == "left":
        source, source_mask = source[:, ::-1].copy(), source_mask[:, ::-1].copy()
    if target_side == "left":
        target, target_mask = target[:, ::-1].copy(), target_mask[:, ::-1].copy()
    want = run_torch(theirs, source, source_mask, target, target_mask).logits.numpy()
    got = np.asarray(forward(source, source_mask, target, target_mask))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[target_mask], want[target_mask], **WHOLE)
    # What padding holds changes nothing.
    other_source = np.where(source_mask, source, 78)
    other_target = np.where(target_mask, target, 78)
    again = forward(other_source, source_mask, other_target, target_mask)
    np.testing.assert_allclose(again[target_mask], got[target_mask], **LAYER)
    # A token sees nothing after it: padding on the right needs no mask, on the left it does.
    unmasked = forward(source, source_mask, target, np.ones_like(target_mask))
    difference = np.abs(unmasked[target_mask] - want[target_mask]).max()
    assert difference < 1e-4 if target_side == "right" else difference > 0.1
    unmasked = forward(source, np.ones_like(source_mask), target, target_mask)
    assert np.abs(unmasked[target_mask] - want[target_mask]).max() > 0.1


def test_gradients_of_the_sequence_to_sequence_loss_equal(first):
    theirs, ours, _, _ = first
    source, source_mask, target, target_mask = batch()
    labels = np.where(target_mask, target, -100)
    theirs.zero_grad()
    loss = theirs(
        input_ids=torch.from_numpy(source),
        attention_mask=torch.from_numpy(source_mask).long(),
        labels=torch.from_numpy(labels),
    ).loss
    loss.backward()
    graphdef, state = nnx.split(ours)

    @jax.jit
    @jax.value_and_grad
    def step(state):
        log_probs = nnx.merge(graphdef, state).log_probs(source, source_mask, labels)
        return -jnp.sum(log_probs * target_mask) / target_mask.sum()

    value, gradients = step(state)
    np.testing.assert_allclose(value, loss.item(), **LAYER)
    exported = dict(export(gradients, dataclasses.replace(bart_key_map(), tied=())))
    assert not exported.pop("final_logits_bias").any()  # theirs is a buffer
    same_gradients(exported, theirs, zero=r"k_proj\.bias")


def test_token_log_probabilities_are_those_of_bartscore(first):
    """neulab/BARTScore bart_score.py, `BARTScorer.score`, stated again: targets are the labels,
    filled up with the padding id, which the loss leaves out."""
    theirs, ours, _, _ = first
    source, source_mask, target, target_mask = batch()
    target = np.where(target_mask, target, theirs.config.pad_token_id)
    with torch.no_grad():
        logits = theirs(
            input_ids=torch.from_numpy(source),
            attention_mask=torch.from_numpy(source_mask).long(),
            labels=torch.from_numpy(target),
        ).logits
        loss = torch.nn.functional.nll_loss(
            torch.log_softmax(logits.view(-1, logits.shape[-1]), dim=1),
            torch.from_numpy(target).view(-1),
            ignore_index=theirs.config.pad_token_id,
            reduction="none",
        ).view(ROWS, TARGET)
    run = compiled(ours, lambda m, *inputs: m.log_probs(*inputs))
    got = np.where(target_mask, run(source, source_mask, target), 0)
    np.testing.assert_allclose(got, -loss.numpy(), **WHOLE)
    scores = got.sum(1) / target_mask.sum(1)
    want = -loss.sum(1).numpy() / target_mask.sum(1)
    np.testing.assert_allclose(scores, want, **WHOLE)
    assert scores.std() > 0.01


def test_shifted_targets_equal():
    from transformers.models.bart.modeling_bart import shift_tokens_right as theirs

    target = np.random.default_rng(0).integers(0, 50, (4, 9))
    target[1:, 6:], target[2, 4:] = -100, -100
    want = theirs(torch.from_numpy(target), 3, 5).numpy()
    np.testing.assert_array_equal(shift_tokens_right(jnp.asarray(target), 3, 5), want)


def test_bfloat16_stays_near_float32(first):
    """The root mean square deviation of the logits is below 2 % of their own."""
    half = load_published("bart", first.folder, param_dtype="bfloat16", dtype="bfloat16", unroll=1)
    inputs = batch()
    got = compiled(half, forward)(*inputs)
    assert got.dtype == jnp.float32
    assert 1e-4 < deviation(got, first.forward(*inputs)) < 0.02


def test_export_reloads_in_transformers(pair, tmp_path):
    theirs, ours, _, _ = pair
    published = publish_bart(ours.config, nnx.state(ours))
    write_published(tmp_path, published, more={"eos_token_id": 4})
    again = reloaded(
        transformers.BartForConditionalGeneration, tmp_path, attn_implementation="eager"
    )
    assert again.config.eos_token_id == 4
    assert again.dtype == torch.float32
    kept = again.state_dict()
    assert kept.keys() == theirs.state_dict().keys()
    for name, want in theirs.state_dict().items():
        assert torch.equal(kept[name], want), name
    np.testing.assert_array_equal(
        run_torch(again, *batch()).logits.numpy(), run_torch(theirs, *batch()).logits.numpy()
    )
    back = load_published("bart", tmp_path, unroll=1)
    assert back.config == dataclasses.replace(ours.config, remat="none")
    same_parameters(back, ours)


def test_too_long_inputs_are_named(first):
    ids = jnp.zeros((1, 41), int)
    for run in (
        lambda: first.ours.encode(ids, ids),
        lambda: first.ours.decode(ids, jnp.zeros((1, 3, 48)), jnp.ones((1, 3))),
    ):
        refuses("41 tokens long", jax.eval_shape, run)


def test_each_kind_of_dropout_acts(first):
    """In a decoder layer each rate by itself; in the whole model the key decides."""
    config = first.ours.config
    state = jax.tree.map(lambda p: np.asarray(p)[0], nnx.state(first.ours.decoder.layers))
    rng = np.random.default_rng(0)
    x, source = (rng.normal(size=(2, n, 48)).astype(np.float32) for n in (9, 11))
    keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in (1, 2)]  # quick to compile
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}

    def run(key, **changes):
        changed = dataclasses.replace(config, **off | changes)
        heads, mlp = config.decoder_heads, config.decoder_mlp
        make = functools.partial(BartLayer, changed, heads, mlp, cross=True)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs())))
        return nnx.merge(graphdef, state)(x, None, source, dropout_key=key)

    @jax.jit
    def each(key):
        return run(None), run(key), {kind: run(key, **{kind: 0.5}) for kind in off}

    plain, undropped, dropped = each(keys[0])
    np.testing.assert_allclose(undropped, plain, **LAYER)
    for kind, found in dropped.items():
        assert np.abs(found - plain).mean() > 0.01, kind

    model = compiled(first.ours, lambda m, key: m(*batch(), dropout_key=key))
    np.testing.assert_array_equal(model(keys[0]), model(keys[0]))
    assert np.abs(model(keys[0]) - model(keys[1])).mean() > 0.01
    assert np.abs(model(keys[0]) - first.forward(*batch())).mean() > 0.01


def test_presets_have_the_published_parameter_counts():
    """406,290,432 and 139,420,416: transformers' `num_parameters()` of facebook/bart-large-cnn and
    bart-base, which counts no buffer. Here the architecture is built anew, without storage."""
    for config, count in ((bart_large_cnn(), 406_290_432), (bart_base(), 139_420_416)):
        with torch.device("meta"):
            theirs = transformers.BartForConditionalGeneration(
                transformers.BartConfig(**config.to_hf())
            )
        assert theirs.num_parameters() == count
        model = nnx.eval_shape(lambda config=config: Bart(config, rngs=nnx.Rngs()))
        ours = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
        assert ours == count + config.vocab_size  # the head's bias


def test_every_parameter_names_its_axes(first):
    names_its_axes(first.ours, {"layers", "embed", "mlp", "heads", "vocab", "positions"})
