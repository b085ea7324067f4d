"""SigLIP and SigLIP 2 against transformers: random weights, sizes off their defaults."""

import copy
import pickle

import jax
import numpy as np
import pytest
import torch
import transformers
from compare import LAYER, WHOLE, abstract, alone, compiled, forward, names_its_axes, reloaded
from flax import nnx
from siglip_pair import TEXT, VISION, published, spiece

from mmqa_jax.data.published_tokenizers import load_siglip_tokenizer, open_tokenizer
from mmqa_jax.data.tokenizers import text_inputs
from mmqa_jax.models.encoders.dual_encoder import of_towers
from mmqa_jax.models.two_towers.keys import key_map, publish_siglip, siglip_config
from mmqa_jax.models.two_towers.network import TwoTowers, resized_positions
from mmqa_jax.retrieval.text_encoder import as_dual_encoder
from mmqa_jax.tasks.contrastive_losses import SigmoidObjective
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses

pytestmark = pytest.mark.slow

SHAPES = np.array([[4, 3], [2, 7], [1, 1], [7, 2], [3, 4]], np.int32)  # rows, columns
PATCHES = 14


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def pair(request, tmp_path_factory):
    """(torch model, our model loaded from its checkpoint)."""
    folder = tmp_path_factory.mktemp("siglip") / request.param
    theirs = published(request.param, folder)
    return theirs, load_published("siglip", folder, unroll=1)


def pictures(flexible):
    """Ours and theirs, normalized."""
    rng = np.random.default_rng(2)
    if not flexible:
        pixels = rng.normal(size=(5, 27, 27, 3)).astype(np.float32)
        return pixels, {"pixel_values": torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())}
    patches = rng.normal(size=(5, PATCHES, 108)).astype(np.float32)
    mask = np.arange(PATCHES) < SHAPES.prod(1)[:, None]
    return (patches, SHAPES), {
        "pixel_values": torch.from_numpy(patches),
        "pixel_attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "spatial_shapes": torch.from_numpy(SHAPES).long(),
    }


def texts():
    ids = np.random.default_rng(1).integers(3, 61, (5, 11)).astype(np.int32)
    mask = np.arange(11) < np.array([11, 3, 9, 10, 2])[:, None]
    return np.where(mask, ids, 0), mask


def test_layers_and_outputs_equal(pair):
    theirs, ours = pair
    ours_seen, theirs_seen = pictures(ours.config.vision.flexible)
    ids, mask = texts()
    torch_ids, torch_mask = torch.from_numpy(ids).long(), torch.from_numpy(mask).long()
    states = {"output_hidden_states": True}
    with torch.no_grad():
        expected = theirs(input_ids=torch_ids, **theirs_seen)
        masked = theirs.get_text_features(torch_ids, torch_mask).pooler_output
        text = theirs.text_model(torch_ids, **states).hidden_states
        vision = theirs.vision_model(**theirs_seen, **states).hidden_states
    layers = {"text": 4, "vision": 3}  # with what comes before the blocks
    text, vision = (
        np.stack([x.numpy() for x in seen[: layers[name]]])
        for name, seen in (("text", text), ("vision", vision))
    )
    seen = None
    if ours.config.vision.flexible:
        seen = theirs_seen["pixel_attention_mask"].numpy().astype(bool)[:, None, None, :]

    def run(model, shown):
        return {
            "vision": model.vision.hidden_states(shown),
            "text": model.text.hidden_states(ids),
            "vision blocks": alone(model.vision.layers, lambda m, x: m(x, mask=seen), vision[:-1]),
            "text blocks": alone(model.text.layers, forward, text[:-1]),
            "image_embeds": model.encode_image(shown),
            "text_embeds": model.encode_text(ids),
            "text masked": model.text(ids, mask),
            "logits": model.logits(ids, shown),
        }

    got = compiled(ours, run)(ours_seen)
    for name, want in (("vision", vision), ("text", text)):
        np.testing.assert_allclose(got[name], want, **WHOLE, err_msg=name)
        np.testing.assert_allclose(got[f"{name} blocks"], want[1:], **LAYER, err_msg=name)
    assert np.ptp(expected.logits_per_text.numpy()) > 0.1
    np.testing.assert_allclose(got["image_embeds"], expected.image_embeds, **WHOLE)
    np.testing.assert_allclose(got["text_embeds"], expected.text_embeds, **WHOLE)
    np.testing.assert_allclose(got["text masked"], masked, **WHOLE)
    np.testing.assert_allclose(got["logits"], expected.logits_per_text, **WHOLE)


def test_positions_are_resized_as_by_torch():
    """Both ways, larger and smaller, of any shape, in one program."""
    rng = np.random.default_rng(0)
    positions = rng.normal(size=(5, 5, 7)).astype(np.float32)
    shapes = np.array([[5, 5], [1, 40], [13, 3], [9, 1], [8, 5], [1, 1]], np.int32)
    resized = jax.jit(resized_positions, static_argnums=2)
    got = resized(positions, shapes, 40)
    for (rows, columns), ours in zip(shapes, got, strict=True):
        grid, size = torch.from_numpy(positions).permute(2, 0, 1)[None], [int(rows), int(columns)]
        # torch's kernel on CPU is wrong of one column and several rows: there of the transposed.
        axes = (2, 3) if columns == 1 < rows else (2, 2)
        want = torch.nn.functional.interpolate(
            grid.transpose(*axes).contiguous(), size=size[::-1] if axes[1] == 3 else size,
            mode="bilinear", align_corners=False, antialias=True,
        ).transpose(*axes)[0].reshape(7, -1).T  # fmt: skip
        np.testing.assert_allclose(ours[: rows * columns], want, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(ours[rows * columns :], np.broadcast_to(
            ours[0], (40 - rows * columns, 7)))  # fmt: skip
    resized(positions, shapes[::-1].copy(), 40)
    assert resized._cache_size() == 1


def test_exported_weights_are_read_by_transformers(pair, tmp_path):
    theirs, ours = pair
    write_published(tmp_path, publish_siglip(ours.config, nnx.state(ours)))
    again = reloaded(type(theirs), tmp_path)
    assert theirs.state_dict().keys() == again.state_dict().keys()
    for name, want in theirs.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], want, err_msg=name)
    assert siglip_config(again.config.to_dict()) == siglip_config(theirs.config.to_dict())


def test_every_parameter_names_its_axes(pair):
    names_its_axes(abstract(TwoTowers, pair[1].config))


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ("vision_config", "vision_use_head", False, "vision_use_head is False"),
        ("vision_config", "num_channels", 4, "num_channels is 4"),
        ("vision_config", "new_trick", 2, "the key 'new_trick'"),
        ("vision_config", "hidden_act", "swish", "vision.activation is 'swish'"),
        ("vision_config", "num_attention_heads", 7, "divisor of vision.width"),
        ("vision_config", "patch_size", [6, 6], "patch_size is \\[6, 6\\], expected a whole"),
        ("text_config", "is_causal", True, "is_causal is True"),
        ("text_config", "projection_size", 12, "embedded in one size"),
        ("", "logit_norm", True, "the key 'logit_norm'"),
    ],
)
def test_what_siglip_does_not_do_is_refused_by_name(place, key, value, message):
    content = {"model_type": "siglip", "text_config": dict(TEXT), "vision_config": dict(VISION)}
    (content[place] if place else content)[key] = value
    refuses(message, siglip_config, content)


def test_positions_of_no_grid_are_refused():
    content = {"model_type": "siglip2", "vision_config": {"num_patches": 250}}
    refuses("num_patches is 250, expected a square number", siglip_config, content)


@pytest.mark.parametrize("pair", ["siglip"], indirect=True)  # pictures of training have one size
def test_three_steps_with_the_sigmoid_loss(pair):
    """Losses and parameters beside transformers' own loss and torch's SGD."""
    theirs, ours = pair
    theirs = copy.deepcopy(theirs)
    rng = np.random.default_rng(3)
    ids, _ = texts()
    count = len(ids)
    pixels = rng.integers(0, 256, (count, 27, 27, 3)).astype(np.uint8)
    torch_pixels = torch.from_numpy((pixels / 127.5 - 1).transpose(0, 3, 1, 2).astype("f4"))
    task = SigmoidObjective(of_towers(ours.config, fusion="image"))
    graphdef, state = as_dual_encoder(ours, task.config, None)
    batch = {
        "query_ids": ids, "query_mask": np.ones_like(ids, bool),
        "source_ids": np.zeros_like(ids), "source_mask": np.ones_like(ids, bool),
        "pixels": pixels, "has_image": np.ones(count, bool), "positive": np.arange(count),
        "source_rows": np.arange(count), "gold_rows": np.arange(count)[:, None],
    }  # fmt: skip

    @jax.jit
    def step(state):
        def loss(state):
            return task.loss(nnx.merge(graphdef, state), batch, jax.random.key(0))[0]

        value, gradient = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda p, g: p - 0.02 * g, state, gradient)

    optimizer = torch.optim.SGD(theirs.parameters(), 0.02)
    for _ in range(3):
        optimizer.zero_grad()
        output = theirs(torch.from_numpy(ids).long(), torch_pixels, return_loss=True)
        output.loss.backward()
        optimizer.step()
        got, state = step(state)
        np.testing.assert_allclose(got, output.loss.item(), rtol=1e-5)
    wanted = dict(theirs.named_parameters())
    exported = dict(export(state, key_map(ours.config)))
    assert exported.keys() == wanted.keys()
    for name, value in exported.items():
        np.testing.assert_allclose(value, wanted[name].detach(), **WHOLE, err_msg=name)


TEXTS = [
    "A photo of a Cat!",
    "  two   spaces,\tand a tab; the U.S.'s flag (1905) ▁ — ΟΔΟΣ İstanbul ﬁne 北京 🙂",
    "",
    "...",
    "the quick brown fox jumps over the lazy dog " * 5,
    "<unk> x </s> y",
]


def same_tokens(ours, theirs, length, texts):
    """Ids of texts as transformers pads and cuts them, without masks."""
    rows = theirs(texts, padding="max_length", truncation=True, max_length=length)["input_ids"]
    ids, _, _ = text_inputs(ours.encode_batch(texts), length, ours)
    assert ids.tolist() == rows


def test_siglips_tokens(tmp_path):
    spiece(tmp_path)
    theirs = transformers.SiglipTokenizer(str(tmp_path / "spiece.model"))
    ours = load_siglip_tokenizer(tmp_path, 100)
    # A special token in a text is one in transformers, here it is plain.
    same_tokens(ours, theirs, 16, TEXTS[:-1])
    assert ours.sep_id not in ours.encode(TEXTS[-1])
    ours.save(tmp_path / "tokenizer.json")
    for again in (open_tokenizer(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(ours))):
        assert again.fingerprint == ours.fingerprint
        assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
    refuses("the model 10; put the checkpoint's own", load_siglip_tokenizer, tmp_path, 10)
    (tmp_path / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    refuses("padding_side is 'left', expected 'right'", load_siglip_tokenizer, tmp_path, 100)


def test_siglip_2s_tokens(tmp_path):
    letters = sorted({c for text in TEXTS for c in text.lower() if not c.isspace()} - {"🙂"})
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{n:02X}>" for n in range(256))]
    tokens += ["▁", *letters, "th", "the", "▁the", "ca", "cat"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t")]
    options = {"add_eos_token": True, "add_bos_token": False, "padding_side": "right"}
    theirs = transformers.Siglip2Tokenizer(vocabulary, merges, **options)
    theirs.save_pretrained(tmp_path)
    ours = load_siglip_tokenizer(tmp_path, 1000)
    same_tokens(ours, theirs, 24, TEXTS[:-1])
    assert ours.encode("The CAT") == ours.encode("the cat")
    assert (ours.sep_id, ours.pad_id) == (1, 0)
    ours.save(tmp_path / "tokenizer.json")
    assert open_tokenizer(tmp_path / "tokenizer.json").encode_batch(TEXTS) == ours.encode_batch(
        TEXTS
    )
