"""Bert against transformers' BertModel and BertForMaskedLM, tiny random weights, float32."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import (
    LAYER,
    WHOLE,
    abstract,
    alone,
    compiled,
    forward,
    names_its_axes,
    near_in_bfloat16,
    random_model,
    randomize,
    same_gradients,
    with_config,
)
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import network as B
from mmqa_jax.models.bert.keys import bert_config, bert_rules, mlm_rules
from mmqa_jax.models.bert.network import Bert, BertConfig, MlmHead
from mmqa_jax.weights.keymap import KeyMap, abstract_model, export, load_into
from mmqa_jax.weights.layouts import open_source
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

# Nothing at its default: a port that ignores eps, activation or types must fail.
CONFIG = BertConfig(
    vocab_size=99,
    hidden=36,
    layers=3,
    heads=3,
    mlp=52,
    positions=40,
    types=6,
    eps=1e-3,
    activation="gelu_new",
    pooler=True,
    unroll=1,
)


def torch_config(config: BertConfig) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        max_position_embeddings=config.positions,
        type_vocab_size=config.types,
        layer_norm_eps=config.eps,
        hidden_act=config.activation,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        initializer_range=0.2,
        attn_implementation="eager",
        pad_token_id=None,  # torch drops the gradient of a padding row
    )


def batch(config: BertConfig, rows=5, length=23):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, (rows, length))
    types = rng.integers(0, config.types, (rows, length))
    lengths = np.array([length, 7, 1, 16, 22])[:rows]
    return ids, types, np.arange(length)[None] < lengths[:, None]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(our model loaded from transformers' checkpoint, that model)."""
    torch.manual_seed(0)
    theirs = randomize(transformers.BertModel(torch_config(CONFIG)), 1, 0.15)
    folder = tmp_path_factory.mktemp("bert")
    theirs.save_pretrained(folder)
    ours = load_published("bert", folder, unroll=1)
    assert ours.config == CONFIG
    return ours, theirs


def run_torch(model, ids, types, mask, **kwargs):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids),
            token_type_ids=torch.tensor(types),
            attention_mask=torch.tensor(mask).long(),
            output_hidden_states=True,
            **kwargs,
        )


def test_whole_model_and_pooler(pair):
    ours, theirs = pair
    ids, types, mask = batch(CONFIG)
    expected = run_torch(theirs, ids, types, mask)
    hidden = compiled(ours, forward)(ids, mask, types)
    np.testing.assert_allclose(hidden[mask], expected.last_hidden_state.numpy()[mask], **WHOLE)
    pooled = compiled(ours, lambda model, hidden: model.pool(hidden))(hidden)
    np.testing.assert_allclose(pooled, expected.pooler_output.numpy(), **WHOLE)


def test_each_layer_from_the_reference_input(pair):
    ours, theirs = pair
    ids, types, mask = batch(CONFIG)
    expected = run_torch(theirs, ids, types, mask).hidden_states
    expected = np.stack([h.numpy() for h in expected])  # [layers + 1, B, L, H]
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    columns = mask[:, None, None, :]

    def run(model, states):
        return (
            model.embeddings(ids, positions, types),
            alone(model.layers, lambda layer, x: layer(x, columns), states[:-1]),
            model.layer_outputs(states[0], columns),
        )

    embedded, each, stacked = compiled(ours, run)(expected)
    np.testing.assert_allclose(embedded, expected[0], **LAYER)
    np.testing.assert_allclose(each[:, mask], expected[1:, mask], **LAYER)
    np.testing.assert_allclose(stacked[:, mask], expected[1:, mask], **WHOLE)


def test_explicit_positions_and_row_mask(pair):
    ours, theirs = pair
    ids, types, mask = batch(CONFIG)
    positions = np.broadcast_to(np.arange(ids.shape[1])[::-1] + 11, ids.shape)
    rows = np.tril(np.ones((ids.shape[1],) * 2, bool)) & mask[:, None, :]
    rows |= np.eye(ids.shape[1], dtype=bool)
    with torch.no_grad():
        embedded = theirs.embeddings(
            torch.tensor(ids), torch.tensor(types), torch.tensor(positions.copy())
        )
        additive = torch.where(torch.tensor(rows)[:, None], 0.0, torch.finfo(torch.float32).min)
        expected = embedded
        for layer in theirs.encoder.layer:
            out = layer(expected, additive)
            expected = out[0] if isinstance(out, tuple) else out
    hidden = compiled(ours, forward)(ids, rows, types, positions)
    np.testing.assert_allclose(hidden, expected.numpy(), **WHOLE)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_mlm_loss_and_every_gradient(activation, tmp_path):
    config = dataclasses.replace(CONFIG, activation=activation, eps=1e-5, pooler=False)
    torch.manual_seed(0)
    theirs = randomize(transformers.BertForMaskedLM(torch_config(config)), 2, 0.15)
    theirs.save_pretrained(tmp_path)
    key_map = KeyMap(rules=[*bert_rules("bert.", "bert/"), *mlm_rules("head")])
    graphdef, params = abstract_model(
        lambda: nnx.Dict(bert=Bert(config, rngs=nnx.Rngs()), head=MlmHead(config, rngs=nnx.Rngs()))
    )
    params = load_into(params, key_map, open_source(tmp_path))
    ids, types, mask = batch(config)
    labels = np.where(mask & (np.random.default_rng(3).random(ids.shape) < 0.3), ids, -100)

    loss = theirs(
        input_ids=torch.tensor(ids),
        token_type_ids=torch.tensor(types),
        attention_mask=torch.tensor(mask).long(),
        labels=torch.tensor(labels),
    ).loss
    loss.backward()

    @jax.jit
    @jax.value_and_grad
    def our_loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model.bert(ids, mask, types)
        logits = model.head(hidden, model.bert.embeddings.word)
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1
        )[..., 0]
        return -jnp.sum(picked * (labels >= 0)) / np.sum(labels >= 0)

    value, grads = our_loss(params)
    assert abs(float(value) - loss.item()) < 1e-5
    same_gradients(dict(export(grads, key_map)), theirs, zero=r"self\.key\.bias")


def test_bfloat16_stays_near_float32(pair):
    """Hidden states stray no further than torch's."""
    ours, theirs = pair
    ids, types, mask = batch(CONFIG)
    half = with_config(ours, dataclasses.replace(CONFIG, dtype="bfloat16"))
    got, want = (compiled(model, forward)(ids, mask, types) for model in (half, ours))
    assert got.dtype == "bfloat16"
    rounded, exact = (
        run_torch(model, ids, types, mask).last_hidden_state
        for model in (copy.deepcopy(theirs).bfloat16(), theirs)
    )
    near_in_bfloat16((got[mask], want[mask]), (rounded[mask], exact[mask]))


def test_remat_and_unroll_leave_loss_and_gradients_alone():
    config = dataclasses.replace(CONFIG, layers=2, pooler=False)
    ids, types, mask = batch(config, rows=3)
    key = jax.random.key(5, impl="unsafe_rbg")  # quick to compile
    model = random_model(Bert, config)

    def run(config):
        graphdef, state = nnx.split(with_config(model, config))

        def loss(state):
            hidden = nnx.merge(graphdef, state)(ids, mask, types, dropout_key=key)
            return jnp.mean(hidden[..., 0] ** 3)

        return jax.jit(jax.value_and_grad(loss))(state)

    value, grads = run(dataclasses.replace(config, unroll=True))
    # Of a scan, as test_bart.py's are; "full": test_llama.py.
    other, other_grads = run(dataclasses.replace(config, unroll=1, remat="dots"))
    np.testing.assert_allclose(value, other, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, other_grads)
    with pytest.raises(UserError, match="remat is 'some'"):
        run(dataclasses.replace(config, remat="some"))


def test_dropout_key_decides_and_none_is_deterministic(pair):
    ours, _ = pair
    ids, types, mask = batch(CONFIG)
    run = compiled(ours, lambda model, key: model(ids, mask, types, dropout_key=key))
    one, two = (jax.random.key(seed, impl="unsafe_rbg") for seed in (1, 2))
    plain = run(None)
    np.testing.assert_array_equal(plain, run(None))
    np.testing.assert_array_equal(run(one), run(one))
    assert np.abs(run(one) - run(two)).mean() > 0.01
    assert np.abs(run(one) - plain).mean() > 0.01


def test_presets_have_the_published_parameter_counts():
    """Counts of the published models (with pooler): 108,310,272; 109,482,240; 335,141,888;
    22,713,216 (Hugging Face `num_parameters()`)."""
    for preset, count in [
        (B.bert_base_cased, 108_310_272),
        (B.bert_base_uncased, 109_482_240),
        (B.bert_large_uncased, 335_141_888),
        (B.minilm_l6, 22_713_216),
    ]:
        config = preset(pooler=True)
        parameters = jax.tree.leaves(nnx.state(abstract(Bert, config)))
        assert sum(x.size for x in parameters) == count


def test_every_parameter_names_its_axes(pair):
    ours, _ = pair
    known = {"layers", "embed", "mlp", "heads", "vocab", "positions", "proj", None}
    names_its_axes(ours, known)


def test_bad_input_is_named():
    refuses(r"model\.heads is 5", BertConfig, hidden=36, heads=5)
    refuses("'tanhish'", BertConfig, activation="tanhish")
    refuses(r"attention_dropout is 1", BertConfig, attention_dropout=1.0)
    for key, value, message in (
        (
            "position_embedding_type",
            "relative_key",
            "'relative_key' is not supported; use a checkp",
        ),
        ("hidden_act", "swish", "'swish' is not supported; use a checkpoint with one of gelu, "),
    ):
        refuses(f"here: {key} {message}", bert_config, {key: value}, "here")
    tiny = B.bert_tiny(hidden=8, heads=2, mlp=8, layers=1, positions=4)
    model = abstract(Bert, tiny)
    with pytest.raises(UserError, match="5 tokens long"):
        model(jnp.zeros((1, 5), int), jnp.ones((1, 5), bool))
    with pytest.raises(UserError, match="pooler"):
        model.pool(jnp.zeros((1, 4, 8)))


@pytest.mark.parametrize("layers", [1, 3])
def test_the_first_position_alone_equals_the_whole_models(layers):
    config = dataclasses.replace(CONFIG, layers=layers)
    rng = np.random.default_rng(4)
    embedded = rng.normal(size=(3, 11, config.hidden)).astype(np.float32)
    mask = (np.arange(11) < np.array([[11], [7], [1]]))[:, None, None]

    def both(model, *given):
        return model.encode(*given), model.encode_first(*given)

    whole, first = compiled(random_model(Bert, config), both)(embedded, mask)
    np.testing.assert_allclose(first, whole[:, 0], atol=1e-5)
