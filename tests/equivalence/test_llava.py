"""LLaVA-1.5 against transformers' LlavaForConditionalGeneration: random weights, tiny sizes."""

import functools

import jax
import jax.numpy as jnp
import llava_pair as tiny
import numpy as np
import pytest
import torch
from cached import decode, prefill
from compare import (
    LAYER,
    WHOLE,
    alone,
    compiled,
    deviation,
    forward,
    names_its_axes,
    same_gradients,
)
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import kv_cache
from mmqa_jax.models.llama.network import unstack_layers
from mmqa_jax.models.llava.config import llava_1_5_7b
from mmqa_jax.models.llava.keys import llava_key_map
from mmqa_jax.models.llava.network import Llava, expand_images
from mmqa_jax.weights.keymap import model_source
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llava")


@pytest.fixture(params=list(tiny.CASES))
def pair(request, folder):
    return tiny.make_pair(request.param, folder / request.param)


@pytest.fixture
def published(folder):
    """The case with LLaVA-1.5's own options, for what does not depend on them."""
    case = next(iter(tiny.CASES))
    return tiny.make_pair(case, folder / case)


def run_ours(ours, prompts, mask=None, positions=None, pixels=None):
    counted = np.broadcast_to(np.arange(prompts.mask.shape[1]), prompts.mask.shape)
    return np.asarray(
        compiled(ours, forward)(
            prompts.input_ids,
            tiny.pixels() if pixels is None else pixels,
            np.ones_like(prompts.mask) if mask is None else mask,
            counted if positions is None else positions,
        )
    )


def test_layers_and_logits_equal(pair):
    theirs, ours, _ = pair
    prompts = tiny.prompts(ours)
    inputs = tiny.torch_inputs(prompts)
    assert prompts.input_ids.shape == (3, tiny.LENGTH)
    seen: dict[str, list] = {"llama": [], "embedded": []}
    hooks = [
        layer.register_forward_hook(lambda _, __, out: seen["llama"].append(out.numpy()))
        for layer in theirs.model.language_model.layers
    ]
    hooks.append(
        theirs.model.language_model.register_forward_pre_hook(
            lambda _, __, kwargs: seen["embedded"].append(kwargs["inputs_embeds"].numpy()),
            with_kwargs=True,
        )
    )
    want = tiny.torch_logits(theirs, inputs)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        tower = theirs.model.vision_tower(inputs["pixel_values"], output_hidden_states=True)
        states = [state.numpy() for state in tower.hidden_states]
        selected = torch.from_numpy(states[ours.config.feature_layer][:, 1:])
        features = theirs.model.multi_modal_projector(selected).numpy()
    (embedded,) = seen["embedded"]

    def parts(model, ids, pixels, states, embedded, hidden):
        angles, *_ = model.llama._prepare(embedded, None, None)
        selected = states[model.config.feature_layer][:, 1:]
        return {
            "before the tower": model.vision.embed(pixels)[0],
            "tower": alone(model.vision.layers, lambda layer, x: layer(x), states[:-1]),
            "projector": model.projector(selected),
            "features": model.encode_images(pixels),
            "embedded": model.embed(ids, model.projector(selected)),
            "llama": alone(model.llama.layers, lambda layer, x: layer(x, *angles), hidden),
        }

    hidden = np.stack([embedded, *seen["llama"][:-1]])  # [layers, B, L, H]
    got = compiled(ours, parts)(
        prompts.input_ids, tiny.pixels(), np.stack(states), embedded, hidden
    )
    np.testing.assert_allclose(got["before the tower"], states[0], **LAYER)
    np.testing.assert_allclose(got["tower"], states[1:], **LAYER)
    np.testing.assert_allclose(got["projector"], features, **LAYER)
    np.testing.assert_allclose(got["features"], features, **WHOLE)
    real = prompts.mask
    np.testing.assert_allclose(got["embedded"][real], embedded[real], **LAYER)
    for layer, mine in enumerate(np.asarray(got["llama"])):
        np.testing.assert_allclose(mine[real], seen["llama"][layer][real], **LAYER)
    np.testing.assert_allclose(run_ours(ours, prompts)[real], want[real], **WHOLE)
    assert np.abs(want).max() > 1  # the comparison is of numbers that matter
    # The pictures matter too: at other positions they give other answers.
    swapped = run_ours(ours, prompts, pixels=tiny.pixels()[::-1].copy())
    assert np.abs(swapped[:2] - want[:2])[real[:2]].max() > 0.1
    np.testing.assert_allclose(swapped[2][real[2]], want[2][real[2]], **WHOLE)


def test_padding_on_the_left_equals(published):
    theirs, ours, _ = published
    prompts = tiny.prompts(ours, pad_left=True)
    inputs = tiny.torch_inputs(prompts)
    want = tiny.torch_logits(theirs, inputs)[prompts.mask]
    got = run_ours(ours, prompts, prompts.mask, inputs["position_ids"].numpy())
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[prompts.mask], want, **WHOLE)
    # Only distances matter, so that rows need not count from their first real token.
    got = run_ours(ours, prompts, prompts.mask)
    np.testing.assert_allclose(got[prompts.mask], want, **WHOLE)
    # The same rows padded on the right give the same logits, without a mask.
    right = tiny.prompts(ours)
    np.testing.assert_allclose(run_ours(ours, right)[right.mask], want, **WHOLE)


def test_words_alone_need_no_pictures(published):
    theirs, ours, _ = published
    prompts = expand_images(tiny.rows()[2:], [0], ours.config)
    inputs = tiny.torch_inputs(prompts)
    del inputs["pixel_values"]
    got = compiled(ours, forward)(prompts.input_ids)
    np.testing.assert_allclose(got, tiny.torch_logits(theirs, inputs), **WHOLE)


def test_gradients_of_the_language_model_loss_equal(published):
    theirs, ours, _ = published
    rows = [row[:60] for row in tiny.rows()]  # long positions: the forward's
    prompts = expand_images(rows, tiny.PICTURES, ours.config)
    answers = prompts.mask & (prompts.input_ids != tiny.IMAGE_TOKEN)
    labels = np.where(answers, prompts.input_ids, -100)
    theirs.zero_grad()
    loss = theirs(**tiny.torch_inputs(prompts), labels=torch.from_numpy(labels).long()).loss
    loss.backward()
    graphdef, state = nnx.split(ours)

    @jax.jit
    @jax.value_and_grad
    def step(state, ids, pixels, answers):
        log_probs = jax.nn.log_softmax(nnx.merge(graphdef, state)(ids, pixels)[:, :-1])
        picked = jnp.take_along_axis(log_probs, jnp.where(answers, ids, 0)[:, 1:, None], axis=-1)
        return -jnp.sum(picked[..., 0] * answers[:, 1:]) / answers[:, 1:].sum()

    value, gradients = step(state, prompts.input_ids, tiny.pixels(), answers)
    np.testing.assert_allclose(value, loss.item(), **LAYER)
    # The key map run backwards puts our gradients under published names and layouts.
    source = model_source(gradients, llava_key_map(ours.config))
    published_names = {n: tiny.published_name(ours, n) for n, _ in theirs.named_parameters()}
    assert source.specs().keys() == set(published_names.values())
    got = {name: source.read(key) for name, key in published_names.items()}
    same_gradients(got, theirs, zero="k_proj.bias")
    # The tower's last layer and norm are not read: LLaVA takes the layer before.
    unread = {name for name, parameter in theirs.named_parameters() if parameter.grad is None}
    assert unread == {n for n in got if "tower.encoder.layers.3." in n or "tower.post_layer" in n}


def test_greedy_generation_equals(published):
    """Prefill of embedded prompts, then single steps, against transformers' `generate`."""
    theirs, ours, folder = published
    steps, bucket = 6, 528
    inputs = tiny.torch_inputs(tiny.prompts(ours, pad_left=True))
    del inputs["position_ids"]
    with torch.no_grad():
        want = theirs.generate(
            **inputs,
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    model = load_published("llava", folder)
    unstack_layers(model.llama)
    prompts = tiny.prompts(ours, length=bucket)
    graphdef, state = nnx.split(model)

    @jax.jit
    def begin(state, ids, pixels, lengths):
        model = nnx.merge(graphdef, state)
        cache = kv_cache.empty(model.config.llama, 4, 560, "float32")
        return prefill(model.llama, model.embed(ids, model.encode_images(pixels)), lengths, cache)

    @functools.partial(jax.jit, donate_argnums=3)
    def step(state, token, position, cache):
        return decode(nnx.merge(graphdef, state).llama, token, position, cache)

    logits, cache = begin(state, prompts.input_ids, tiny.pixels(), prompts.lengths)
    position, got = np.append(prompts.lengths, 0), [np.asarray(logits)]
    for _ in range(steps - 1):
        token = np.append(got[-1].argmax(-1), 0)  # the cache has a row to spare
        logits, cache = step(state, token, position, cache)
        position = position + 1
        got.append(np.asarray(logits)[:3])
    np.testing.assert_allclose(got, np.stack(want.logits), **WHOLE)
    tokens = np.stack(got, axis=1).argmax(-1)  # [3, steps]
    np.testing.assert_array_equal(tokens, want.sequences[:, tiny.LENGTH :])


def test_more_pictures_than_placeholders_are_not_read(published):
    """A fixed number of pictures: those after the last placeholder may be anything."""
    _, ours, _ = published
    prompts = tiny.prompts(ours)
    embed = compiled(ours, Llava.embed)
    features = np.random.default_rng(3).normal(size=(5, tiny.PATCHES, 48)).astype(np.float32)
    want = embed(prompts.input_ids, features[:3])
    features[3:] = np.nan
    np.testing.assert_array_equal(embed(prompts.input_ids, features), want)
    # A placeholder without a picture cannot go unnoticed.
    got = np.asarray(embed(prompts.input_ids, features[:2]))
    last = np.zeros_like(prompts.mask)
    last[1, tiny.PATCHES : 2 * tiny.PATCHES] = True
    np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(last[..., None], got.shape))


def test_bfloat16_stays_near_float32(published):
    """The root mean square deviation of the logits is below 2 % of their own."""
    _, ours, folder = published
    half = load_published("llava", folder, param_dtype="bfloat16", dtype="bfloat16", unroll=1)
    prompts = tiny.prompts(ours)
    got = compiled(half, forward)(prompts.input_ids, tiny.pixels())
    assert got.dtype == jnp.float32
    want = run_ours(ours, prompts)
    assert 1e-4 < deviation(np.asarray(got)[prompts.mask], want[prompts.mask]) < 0.02


def test_every_parameter_names_its_axes(pair):
    names_its_axes(
        pair.ours, known={"layers", "embed", "mlp", "heads", "vocab", "positions", "patch"}
    )


def test_what_the_model_cannot_take_is_named(published):
    _, ours, _ = published
    with pytest.raises(UserError, match=r"takes \(40, 40, 3\)"):
        jax.eval_shape(ours.encode_images, jnp.zeros((1, 36, 36, 3)))
    with pytest.raises(UserError, match=r"feature_layer is -26: the vision tower has 24 layers; c"):
        llava_1_5_7b(feature_layer=-26)
    refuses("projector_activation is 'tanh': expected", llava_1_5_7b, projector_activation="tanh")
