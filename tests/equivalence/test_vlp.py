"""VLP against a plain torch restatement of the published layers (BertForWebqa), float32."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import (
    LAYER,
    WHOLE,
    abstract,
    alone,
    compiled,
    names_its_axes,
    near_in_bfloat16,
    same_parameters,
    with_config,
)
from flax import nnx
from safetensors.torch import load_file
from vlp_pair import CONFIGS, TRUNK, batch, loaded, loop_mask, make_pair, run_torch
from vlp_torch import TorchVLP

from mmqa_jax.models.common.layers import attention, dropout, prefix_attention
from mmqa_jax.models.vlp import network
from mmqa_jax.models.vlp.keys import publish_vlp
from mmqa_jax.weights.published import write_published


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def x101(tmp_path_factory):
    """The first pair alone, for what does not depend on the frontend."""
    return make_pair("x101", tmp_path_factory.mktemp("x101"))


@pytest.mark.parametrize("regions", [0, 5])
def test_layers_hidden_states_and_both_heads(pair, regions):
    ours, theirs, config = pair
    x = batch(config, regions)
    with torch.no_grad():
        states = run_torch(theirs, x)
        source, words = theirs.source(states[-1]), theirs.words(states[-1])
    states = np.stack([state.numpy() for state in states])
    inputs = network.VLPInputs(**x)

    def run(model, inputs, states):
        mask = network.mixed_mask(inputs.context_mask, inputs.answer_mask)
        each = alone(model.bert.layers, lambda layer, h: layer(h, mask), states[:-1])
        hidden = model.encode(inputs)
        heads = model.source_logits(inputs), model.mlm_logits(hidden)
        return model._embed(inputs, None), each, hidden, *heads

    embedded, each, hidden, source_logits, mlm_logits = compiled(ours, run)(inputs, states)
    np.testing.assert_allclose(embedded, states[0], **LAYER)
    np.testing.assert_allclose(each, states[1:], **LAYER)
    np.testing.assert_allclose(hidden, states[-1], **WHOLE)
    np.testing.assert_allclose(source_logits, source.numpy(), **WHOLE)
    np.testing.assert_allclose(mlm_logits, words.numpy(), **WHOLE)


def test_region_frontend_alone(pair):
    ours, theirs, config = pair
    x = batch(config, 5)
    features, positions = x["region_features"], x["region_positions"]
    with torch.no_grad():
        content = theirs.vis_embed(torch.tensor(features)).numpy()
        place = theirs.vis_pe_embed(torch.tensor(positions)).numpy()
    np.testing.assert_allclose(ours.region_content(jnp.asarray(features)), content, **LAYER)
    np.testing.assert_allclose(ours.region_place(jnp.asarray(positions)), place, **LAYER)


def test_bfloat16_stays_near_float32(x101):
    """States and word logits stray no further than torch's."""
    ours, theirs, config = x101
    x = batch(config, 5)

    def run(model):
        hidden = model.encode(network.VLPInputs(**x))
        return hidden, model.mlm_logits(hidden), model.source_logits(network.VLPInputs(**x))

    half = dataclasses.replace(config, bert=dataclasses.replace(TRUNK, dtype="bfloat16"))
    want, got = (compiled(model, run)() for model in (ours, with_config(ours, half)))
    assert [output.dtype.name for output in got] == ["bfloat16", "float32", "float32"]
    with torch.no_grad():
        hidden = run_torch(theirs, x)[-1]
        rough = copy.deepcopy(theirs).bfloat16()
        rounded = run_torch(rough, x, torch.bfloat16)[-1]
        near_in_bfloat16((got[0], want[0]), (rounded, hidden))
        near_in_bfloat16((got[1], want[1]), (rough.words(rounded), theirs.words(hidden)))


def test_export_reloads_in_torch(pair, tmp_path):
    ours, theirs, config = pair
    write_published(tmp_path, publish_vlp(config, nnx.state(ours)))
    again = TorchVLP(config).eval()
    tensors = load_file(tmp_path / "model.safetensors")
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["cls.predictions.decoder.weight"], [])  # tied to the words
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name
    x = batch(config, 5)
    with torch.no_grad():
        got, want = (model.words(run_torch(model, x)[-1]) for model in (again, theirs))
    assert torch.equal(got, want)
    same_parameters(loaded(tmp_path, config), ours)


def test_mixed_mask_entry_by_entry():
    x = batch(CONFIGS["x101"], 5)
    mask = network.mixed_mask(jnp.asarray(x["context_mask"]), jnp.asarray(x["answer_mask"]))
    np.testing.assert_array_equal(mask[:, 0], loop_mask(x))


def test_source_score_does_not_depend_on_answer_padding_or_closed_slots(x101):
    ours, _, config = x101
    x = batch(config, 5)
    run = compiled(ours, network.VLP.source_logits)
    logits = lambda x: run(network.VLPInputs(**x))  # noqa: E731
    before = logits(x)
    changed = dict(x)
    changed["input_ids"] = np.where(x["context_mask"], x["input_ids"], 7)
    slots = ~x["context_mask"][:, 1:6, None]
    changed["region_features"] = np.where(slots, 9.0, x["region_features"]).astype("f4")
    np.testing.assert_allclose(before, logits(changed), atol=1e-6)
    changed["region_features"] = changed["region_features"] + 1.0  # open slots: it must matter
    assert np.abs(np.asarray(before - logits(changed))).min() > 1e-3


def test_presets_are_the_published_shapes():
    x101 = abstract(network.VLP, network.vlp_base_x101(layers=1))
    shapes = [linear.kernel.shape for linear in x101.region_content.linears]
    assert shapes == [(2048, 2048), (2048, 768)]
    assert x101.region_place.linears[0].kernel.shape == (1607, 768)
    assert x101.bert.embeddings.token_type.table.shape == (6, 768)
    assert x101.config.bert.eps == 1e-5
    vinvl = abstract(network.VLP, network.vlp_base_vinvl(layers=1))
    assert [linear.kernel.shape for linear in vinvl.region_content.linears] == [(2048, 768)]
    assert vinvl.region_place.linears[0].kernel.shape == (1601, 768)
    atlas = abstract(network.VLP, network.vlp_patches(8, layers=2))
    assert atlas.region_content.linears[0].kernel.shape == (192, 384)
    assert atlas.region_place.linears[0].kernel.shape == (6, 384)


def test_every_parameter_names_its_axes(x101):
    names_its_axes(x101.ours)


@pytest.mark.parametrize("beams", [1, 3])
def test_prefix_attention_is_attention_over_the_concatenation(beams):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("f4")  # noqa: E731
    b, n, h, d = 3, 3 * beams, 2, 8
    q, k, v = draw(n, 2, h, d), draw(n, 4, h, d), draw(n, 4, h, d)
    pk, pv = draw(b, 7, h, d), draw(b, 7, h, d)
    prefix_mask = np.arange(7)[None] < np.array([7, 3, 5])[:, None]
    mask = rng.random((1, 1, 2, 4)) < 0.6
    out = jax.jit(prefix_attention)(q, pk, pv, prefix_mask, k, v, mask=mask)
    each = lambda x: np.repeat(x, beams, axis=0)  # noqa: E731
    whole = np.concatenate(
        [
            np.broadcast_to(each(prefix_mask)[:, None, None], (n, 1, 2, 7)),
            np.broadcast_to(mask, (n, 1, 2, 4)),
        ],
        axis=-1,
    )
    keys, values = np.concatenate([each(pk), k], 1), np.concatenate([each(pv), v], 1)
    expected = jax.jit(attention)(q, keys, values, mask=whole)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_dropout_drops_its_rate_and_keeps_the_mean():
    x = jnp.ones((400, 1000))
    y = np.asarray(dropout(x, 0.1, jax.random.key(0)))
    assert abs((y == 0).mean() - 0.1) < 0.003  # 6 sigma
    np.testing.assert_allclose(y[y > 0], 1 / 0.9, rtol=1e-4)
    for rate, key in ((0.1, None), (0.0, jax.random.key(0)), (1e-9, jax.random.key(0))):
        np.testing.assert_array_equal(dropout(x, rate, key), x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_against_torch_and_closed_rows(is_causal):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(3, 6, 2, 8)).astype("f4") for _ in range(3))
    mask = rng.random((3, 1, 6, 6)) < 0.7
    mask[:, :, :, 0] = True
    whole = mask & np.tril(np.ones((6, 6), bool)) if is_causal else mask
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(t).transpose(1, 2) for t in (q, k, v)), attn_mask=torch.tensor(whole)
    ).transpose(1, 2)

    @jax.jit
    def run(key):
        args = {"mask": jnp.asarray(mask), "is_causal": is_causal}
        dropped = jax.vmap(
            lambda key: attention(q, k, v, **args, dropout_rate=0.3, dropout_key=key)
        )(jax.random.split(key, 2000))
        closed = attention(q, k, v, mask=jnp.zeros((3, 1, 6, 6), bool))
        return attention(q, k, v, **args), dropped, closed

    whole, dropped, closed = map(np.asarray, run(jax.random.key(0)))
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    assert np.abs(dropped[0] - expected.numpy()).max() > 0.1
    np.testing.assert_allclose(dropped.mean(0), expected, atol=0.15)  # unbiased
    np.testing.assert_allclose(
        closed, np.broadcast_to(v.mean(1, keepdims=True), v.shape), atol=1e-5
    )
