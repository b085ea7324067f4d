"""CLIP against transformers' CLIPModel: random weights, sizes off their defaults."""

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
    randomize,
    reloaded,
    same_gradients,
    with_config,
)
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.two_towers import config as clip
from mmqa_jax.models.two_towers.config import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.models.two_towers.keys import key_map, publish_clip
from mmqa_jax.models.two_towers.network import TwoTowers, normalize_pixels
from mmqa_jax.weights.keymap import export, model_source
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses

EOS = 98


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def pair(request, tmp_path_factory):
    """(torch model, our model loaded from its checkpoint)."""
    activation = request.param
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": 99,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 21,
            "hidden_act": activation,
            "layer_norm_eps": 3e-5,
            # 2 stands for "largest id" in transformers; the other branch looks for the id.
            "eos_token_id": 2 if activation == "gelu" else EOS,
            "pad_token_id": 1,
            "bos_token_id": 0,
        },
        vision_config={
            "hidden_size": 40,
            "intermediate_size": 72,
            "num_hidden_layers": 4,
            "num_attention_heads": 5,
            "image_size": 30,
            "patch_size": 6,
            "hidden_act": activation,
            "layer_norm_eps": 2e-5,
        },
        projection_dim=28,
    )
    theirs = randomize(transformers.CLIPModel(config), 0)
    folder = tmp_path_factory.mktemp("clip") / activation
    theirs.save_pretrained(folder)
    # A loop compiles sooner than its unrolled layers.
    return theirs, load_published("clip", folder, unroll=1)


def _texts():
    rng = np.random.default_rng(1)
    ids = rng.integers(3, 90, (5, 17)).astype(np.int32)
    mask = np.ones_like(ids)
    for row, length in enumerate([17, 3, 9, 16, 2]):
        ids[row, length - 1] = EOS
        ids[row, length:] = 1
        mask[row, length:] = 0
    return ids, mask


def _pixels():
    return np.random.default_rng(2).normal(size=(5, 30, 30, 3)).astype(np.float32)


def _nchw(pixels):
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def test_layers_and_outputs_equal(pair):
    theirs, ours = pair
    ids, mask = _texts()
    pixels = _pixels()
    torch_ids, torch_mask = torch.from_numpy(ids).long(), torch.from_numpy(mask)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch_ids, attention_mask=torch_mask, pixel_values=_nchw(pixels)
        )
        text = theirs.text_model(torch_ids, torch_mask, output_hidden_states=True).hidden_states
        vision = theirs.vision_model(_nchw(pixels), output_hidden_states=True).hidden_states
    text, vision = (np.stack([x.numpy() for x in states]) for states in (text, vision))
    real = mask.astype(bool)
    columns = real[:, None, None, :]

    def run(model):
        return {
            "vision": model.vision.hidden_states(pixels),
            "text": model.text.hidden_states(ids, mask),
            "vision blocks": alone(model.vision.layers, forward, vision[:-1]),
            "text blocks": alone(
                model.text.layers, lambda m, x: m(x, mask=columns, is_causal=True), text[:-1]
            ),
            "image_embeds": model.encode_image(pixels),
            "text_embeds": model.encode_text(ids, mask),
            "text_embeds without mask": model.encode_text(ids),
            "logits": model.logits(ids, pixels, mask),
            "patches": [model.vision.patch_features(pixels, n) for n in (-2, -1, 1, 0)],
        }

    got = jax.tree.map(np.asarray, compiled(ours, run)())
    np.testing.assert_allclose(got["vision"][0], vision[0], **LAYER)
    np.testing.assert_allclose(got["vision blocks"], vision[1:], **LAYER)
    np.testing.assert_allclose(got["vision"], vision, **WHOLE)
    np.testing.assert_allclose(got["text"][0], text[0], **LAYER)
    for layer in range(3):
        np.testing.assert_allclose(got["text blocks"][layer][real], text[layer + 1][real], **LAYER)
        np.testing.assert_allclose(got["text"][layer + 1][real], text[layer + 1][real], **WHOLE)
    np.testing.assert_allclose(got["image_embeds"], expected.image_embeds, **WHOLE)
    np.testing.assert_allclose(got["text_embeds"], expected.text_embeds, **WHOLE)
    # Right padding needs no mask: nothing before the end-of-text token sees a pad.
    np.testing.assert_allclose(got["text_embeds without mask"], expected.text_embeds, **WHOLE)
    np.testing.assert_allclose(got["logits"], expected.logits_per_text, **WHOLE)
    for layer, patches in zip((-2, -1, 1, 0), got["patches"], strict=True):
        np.testing.assert_allclose(patches, vision[layer][:, 1:], **WHOLE)


@pytest.mark.parametrize("pair", ["quick_gelu"], indirect=True, scope="module")
def test_gradients_of_the_contrastive_loss_equal(pair):
    theirs, ours = pair
    ids, mask = _texts()
    pixels = _pixels()
    theirs.zero_grad()
    loss = theirs(
        input_ids=torch.from_numpy(ids).long(),
        attention_mask=torch.from_numpy(mask),
        pixel_values=_nchw(pixels),
        return_loss=True,
    ).loss
    loss.backward()
    graphdef, state = nnx.split(ours)

    def contrastive(state):
        logits = nnx.merge(graphdef, state).logits(ids, pixels, mask)
        rows = jax.nn.log_softmax(logits, axis=1)
        columns = jax.nn.log_softmax(logits, axis=0)
        return -(jnp.diagonal(rows).mean() + jnp.diagonal(columns).mean()) / 2

    value, gradients = jax.jit(jax.value_and_grad(contrastive))(state)
    np.testing.assert_allclose(value, loss.item(), **WHOLE)
    same_gradients(dict(export(gradients, key_map(ours.config))), theirs, r"k_proj\.bias")


@pytest.mark.parametrize("pair", ["quick_gelu"], indirect=True, scope="module")
def test_bfloat16_stays_near_float32(pair):
    """Both towers' last states stray no further than torch's."""
    theirs, ours = pair
    ids, mask = _texts()
    pixels, real = _pixels(), mask.astype(bool)
    half = clip.CLIPConfig(
        dataclasses.replace(ours.config.vision, dtype="bfloat16"),
        dataclasses.replace(ours.config.text, dtype="bfloat16"),
    )

    def run(model):
        states = model.vision.hidden_states(pixels)[-1], model.text.hidden_states(ids, mask)[-1]
        return states, (model.vision(pixels), model.text(ids, mask))

    got, features = compiled(with_config(ours, half), run)()
    assert {x.dtype.name for x in got} == {"bfloat16"}
    assert {x.dtype.name for x in features} == {"float32"}

    def run_torch(model, dtype):
        texts = torch.from_numpy(ids).long(), torch.from_numpy(mask)
        pictures = _nchw(pixels).to(dtype)
        with torch.no_grad():
            vision = model.vision_model(pictures, output_hidden_states=True)
            text = model.text_model(*texts, output_hidden_states=True)
        return vision.hidden_states[-1], text.hidden_states[-1]

    rounded = run_torch(copy.deepcopy(theirs).bfloat16(), torch.bfloat16)
    exact = run_torch(theirs, torch.float32)
    # In float32 ours are torch's within 1e-4, see above.
    near_in_bfloat16((got[0], exact[0]), (rounded[0], exact[0]))
    near_in_bfloat16((got[1][real], exact[1][real]), (rounded[1][real], exact[1][real]))


def test_every_parameter_names_its_axes(pair):
    names_its_axes(pair[1])


def test_export_reloads_in_torch(pair, tmp_path):
    theirs, ours = pair
    write_published(tmp_path, publish_clip(ours.config, nnx.state(ours)))
    again = reloaded(transformers.CLIPModel, tmp_path)
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name


def test_another_models_folder_is_refused(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    refuses(r"config\.json: model_type is 'bert', expected", load_published, "clip", tmp_path)


def test_wrong_picture_size_and_long_text_are_refused(pair):
    _, ours = pair
    with pytest.raises(UserError, match=r"takes \(30, 30, 3\)"):
        ours.encode_image(np.zeros((1, 24, 24, 3), np.float32))
    with pytest.raises(UserError, match="22 tokens, the model takes 21"):
        ours.encode_text(np.full((1, 22), EOS, np.int32))


def test_sizes_that_do_not_divide_are_refused(pair):
    _, ours = pair
    with pytest.raises(UserError, match=r"vision\.patch_size is 6: .* vision\.image_size = 31"):
        dataclasses.replace(ours.config.vision, image_size=31)
    with pytest.raises(UserError, match=r"text\.heads is 7: .*divisor of text\.width = 48"):
        dataclasses.replace(ours.config.text, heads=7)
    with pytest.raises(UserError, match=r"text\.activation is 'relu': .*quick_gelu, gelu"):
        dataclasses.replace(ours.config.text, activation="relu")


def test_pixel_normalization():
    bytes_ = np.array([[[[0, 128, 255]]]], np.uint8)
    want = (np.array([0, 128, 255]) / 255 - np.array(PIXEL_MEAN)) / np.array(PIXEL_STD)
    np.testing.assert_allclose(normalize_pixels(jnp.asarray(bytes_))[0, 0, 0], want, atol=1e-6)
    floats = jnp.asarray(bytes_, jnp.float32) / 255
    np.testing.assert_allclose(normalize_pixels(floats)[0, 0, 0], want, atol=1e-6)


@pytest.mark.parametrize("name", ["vit_b_32", "vit_b_16", "vit_l_14", "vit_l_14_336"])
def test_presets_have_the_published_sizes(name):
    """Every parameter's shape is that of transformers' model with the published sizes."""
    config = getattr(clip, name)()
    vision, text = config.vision, config.text
    large = name.startswith("vit_l")
    published = transformers.CLIPConfig(  # config.json of openai/clip-vit-*
        projection_dim=768 if large else 512,
        vision_config={
            "image_size": 336 if name.endswith("336") else 224,
            "patch_size": {"vit_b_32": 32, "vit_b_16": 16}.get(name, 14),
            **(
                {
                    "hidden_size": 1024,
                    "intermediate_size": 4096,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 16,
                }
                if large
                else {}
            ),
        },
        text_config=(
            {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
            if large
            else {}
        ),
    )
    with torch.device("meta"):
        theirs = transformers.CLIPModel(published)
    state = nnx.state(abstract(TwoTowers, config))
    ours = {k: s.shape for k, s in model_source(state, key_map(config)).specs().items()}
    assert ours == {k: tuple(p.shape) for k, p in theirs.named_parameters()}
    assert vision.heads == vision.width // 64
    assert text.heads == text.width // 64
    # openai/CLIP: the count its notebook prints for ViT-B/32.
    if name == "vit_b_32":
        assert sum(int(np.prod(shape)) for shape in ours.values()) == 151_277_313
