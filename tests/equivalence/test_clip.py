"""CLIP against transformers' CLIPModel: random weights, sizes off their defaults."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models import clip
from mmqa_jax.models.clip import CLIP, PIXEL_MEAN, PIXEL_STD, normalize_pixels
from mmqa_jax.weights.clip import clip_key_map, load_clip
from mmqa_jax.weights.keymap import StateSource, export, save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYER_TOLERANCE = {"rtol": 0, "atol": 1e-5}
MODEL_TOLERANCE = {"rtol": 0, "atol": 1e-4}
EOS = 98
# Tiny models: nearly all the time is compiling.
FAST = {"xla_backend_optimization_level": 1}


@pytest.fixture(autouse=True)
def _exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def pair(request, tmp_path_factory):
    """(torch model, our model loaded from its checkpoint, folder)."""
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
    theirs = transformers.CLIPModel(config).eval()
    with torch.no_grad():  # fresh biases are 0 and norms 1: they would hide a missing one
        for parameter in theirs.parameters():
            if parameter.ndim:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("clip") / activation
    theirs.save_pretrained(folder)
    ours_config, state = load_clip(folder)
    ours_config = clip.CLIPConfig(  # a loop compiles sooner than its unrolled layers
        dataclasses.replace(ours_config.vision, unroll=1),
        dataclasses.replace(ours_config.text, unroll=1),
    )
    ours = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: CLIP(ours_config, rngs=nnx.Rngs(0)))), state
    )
    return theirs, ours, folder


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
    theirs, ours, _ = pair
    ids, mask = _texts()
    pixels = _pixels()
    torch_ids, torch_mask = torch.from_numpy(ids).long(), torch.from_numpy(mask)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch_ids, attention_mask=torch_mask, pixel_values=_nchw(pixels)
        )
        text = theirs.text_model(torch_ids, torch_mask, output_hidden_states=True).hidden_states
        vision = theirs.vision_model(_nchw(pixels), output_hidden_states=True).hidden_states
    text, vision = ([x.numpy() for x in states] for states in (text, vision))
    real = mask.astype(bool)
    columns = real[:, None, None, :]

    @functools.partial(jax.jit, compiler_options=FAST)
    def run(state):
        model = nnx.merge(nnx.graphdef(ours), state)
        return {
            "vision": model.vision.hidden_states(pixels),
            "text": model.text.hidden_states(ids, mask),
            # Each block by itself, on their input, so that errors do not add up.
            "vision blocks": _each_block(model.vision.layers, vision),
            "text blocks": _each_block(model.text.layers, text, mask=columns, is_causal=True),
            "image_embeds": model.encode_image(pixels),
            "text_embeds": model.encode_text(ids, mask),
            "text_embeds without mask": model.encode_text(ids),
            "logits": model.logits(ids, pixels, mask),
            "patches": [model.vision.patch_features(pixels, n) for n in (-2, -1, 1, 0)],
        }

    got = jax.tree.map(np.asarray, run(nnx.state(ours)))
    np.testing.assert_allclose(got["vision"][0], vision[0], **LAYER_TOLERANCE)
    np.testing.assert_allclose(got["vision blocks"], vision[1:], **LAYER_TOLERANCE)
    np.testing.assert_allclose(got["vision"], vision, **MODEL_TOLERANCE)
    np.testing.assert_allclose(got["text"][0], text[0], **LAYER_TOLERANCE)
    for layer in range(3):
        np.testing.assert_allclose(
            got["text blocks"][layer][real], text[layer + 1][real], **LAYER_TOLERANCE
        )
        np.testing.assert_allclose(
            got["text"][layer + 1][real], text[layer + 1][real], **MODEL_TOLERANCE
        )
    np.testing.assert_allclose(got["image_embeds"], expected.image_embeds, **MODEL_TOLERANCE)
    np.testing.assert_allclose(got["text_embeds"], expected.text_embeds, **MODEL_TOLERANCE)
    # Right padding needs no mask: nothing before the end-of-text token sees a pad.
    np.testing.assert_allclose(
        got["text_embeds without mask"], expected.text_embeds, **MODEL_TOLERANCE
    )
    np.testing.assert_allclose(got["logits"], expected.logits_per_text, **MODEL_TOLERANCE)
    for layer, patches in zip((-2, -1, 1, 0), got["patches"], strict=True):
        np.testing.assert_allclose(patches, vision[layer][:, 1:], **MODEL_TOLERANCE)


def _each_block(stack, hidden_states, **options):
    """Block n on their hidden state n: [layers, B, N, width]."""
    graphdef, params = nnx.split(stack)

    def one(inputs):
        params, x = inputs
        return nnx.merge(graphdef, params)(x, **options)

    return jax.lax.map(one, (params, np.stack(hidden_states[:-1])))


def test_gradients_of_the_contrastive_loss_equal(pair):
    theirs, ours, _ = pair
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

    value, gradients = jax.jit(jax.value_and_grad(contrastive), compiler_options=FAST)(state)
    np.testing.assert_allclose(value, loss.item(), rtol=0, atol=1e-4)
    # The key map run backwards puts our gradients under torch's names and layouts.
    exported = dict(export(gradients, clip_key_map(ours.config)))
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    assert exported.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_allclose(exported[name], want, rtol=0, atol=1e-4, err_msg=name)


def test_export_reloads_in_torch(pair, tmp_path):
    theirs, ours, _ = pair
    save_model(tmp_path / "model.safetensors", nnx.state(ours), clip_key_map(ours.config))
    theirs.config.save_pretrained(tmp_path)
    again, info = transformers.CLIPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name


def test_another_models_folder_is_refused(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"config\.json: model_type is 'bert', expected 'clip'"):
        load_clip(tmp_path)


def test_wrong_picture_size_and_long_text_are_refused(pair):
    _, ours, _ = pair
    with pytest.raises(UserError, match=r"takes \(30, 30, 3\)"):
        ours.encode_image(np.zeros((1, 24, 24, 3), np.float32))
    with pytest.raises(UserError, match="22 tokens, the model takes 21"):
        ours.encode_text(np.full((1, 22), EOS, np.int32))


def test_sizes_that_do_not_divide_are_refused(pair):
    _, ours, _ = pair
    with pytest.raises(UserError, match="not a multiple of patch_size"):
        dataclasses.replace(ours.config.vision, image_size=31)
    with pytest.raises(UserError, match="not a multiple of heads"):
        dataclasses.replace(ours.config.text, heads=7)
    with pytest.raises(UserError, match="use one of quick_gelu, gelu"):
        dataclasses.replace(ours.config.text, activation="relu")


def test_pixel_normalisation():
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
    state = nnx.state(nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0))))
    ours = {k: s.shape for k, s in StateSource(state, clip_key_map(config)).specs().items()}
    assert ours == {k: tuple(p.shape) for k, p in theirs.named_parameters()}
    assert vision.heads == vision.width // 64
    assert text.heads == text.width // 64
    # openai/CLIP: the count its notebook prints for ViT-B/32.
    if name == "vit_b_32":
        assert sum(int(np.prod(shape)) for shape in ours.values()) == 151_277_313
