"""Oscar against a plain torch restatement of the published layers, tiny random weights."""

import copy

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
    deviation,
    names_its_axes,
    same_parameters,
)
from flax import nnx
from oscar_pair import DROPOUT, LAYOUT, make_pair, pictures, real, torch_inputs
from oscar_torch import Tensorizer
from safetensors.torch import load_file

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.oscar import network
from mmqa_jax.models.oscar.keys import oscar_config, publish_oscar
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses


@pytest.fixture(scope="module", params=["published", "other"])
def pair(request, tmp_path_factory):
    """The published constants, and others, with a norm on the regions."""
    folder = tmp_path_factory.mktemp("oscar")
    if request.param == "published":
        return make_pair(folder)
    return make_pair(folder, eps=1e-3, region_norm=True, region_eps=0.1)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    return make_pair(folder, eps=1e-3, region_norm=True, region_eps=0.1)


@pytest.fixture(scope="module")
def encode(other):
    """(inputs, dropout key) -> hidden states, compiled once."""
    run = compiled(other.ours, lambda model, x, key: model.encode(x, dropout_key=key))
    return lambda inputs, key=None: np.asarray(run(inputs, key))


def hidden_and_logits(model, inputs):
    hidden = model.encode(inputs)
    return hidden, model.token_logits(hidden)


def tensorized(caption=LAYOUT.caption, text=LAYOUT.text):
    """CaptionTensorizer's ids, segments, features and mask of all pictures."""
    rows = map(Tensorizer(caption, text, LAYOUT.regions), *pictures())
    return [np.stack(parts) for parts in zip(*rows, strict=True)]


def test_the_layout_is_the_tensorizers():
    inputs = LAYOUT.captioning(*pictures())
    ids, segments, features, mask = tensorized()
    shown = np.asarray(inputs.context_mask) | np.asarray(inputs.caption_mask)
    np.testing.assert_array_equal(inputs.input_ids, ids)
    np.testing.assert_array_equal(inputs.token_type_ids[shown], segments[shown])
    np.testing.assert_array_equal(inputs.region_features, features)
    np.testing.assert_array_equal(inputs.position_ids, np.tile(np.arange(LAYOUT.text), (4, 1)))
    ours = np.asarray(network.attention_mask(inputs))[:, 0]
    rows = real(inputs)
    np.testing.assert_array_equal(ours[rows], mask[rows])
    # The original's padding rows see nothing; nothing sees them in either.
    np.testing.assert_array_equal(mask.any(axis=1), ours.any(axis=1))


def test_every_layer_and_the_whole_model(pair):
    ours, theirs, _ = pair
    inputs = LAYOUT.captioning(*pictures())
    rows = real(inputs)
    mask = torch.tensor(tensorized()[3])
    with torch.no_grad():
        embedded = theirs.embed(*torch_inputs(inputs))
        outputs = theirs.layers(embedded, mask)
        words = theirs.words(outputs[-1])

    def run(model, inputs, states):
        seen = network.attention_mask(inputs)
        each = alone(model.bert.layers, lambda layer, x: layer(x, seen), states)
        return model.embed(inputs), each, *hidden_and_logits(model, inputs)

    states = np.stack([embedded, *outputs[:-1]])
    of_inputs, each, hidden, logits = compiled(ours, run)(inputs, states)
    np.testing.assert_allclose(of_inputs, embedded, **LAYER)
    np.testing.assert_allclose(each[:, rows], np.stack(outputs)[:, rows], **LAYER)
    np.testing.assert_allclose(hidden[rows], outputs[-1][rows], **WHOLE)
    np.testing.assert_allclose(logits[rows], words[rows], **WHOLE)


@pytest.mark.parametrize(
    ("changed", "feel_it"),
    [
        ("earlier", {"earlier", "later"}),
        ("later", {"later"}),
        ("labels", {"earlier", "later", "labels", "regions"}),
        ("regions", {"earlier", "later", "labels", "regions"}),
        ("padding", set()),
    ],
)
def test_who_sees_whom(encode, changed, feel_it):
    """What is changed in some columns is felt exactly where the mask is open, at every column."""
    row = 0
    captions, labels, regions = pictures()
    captions[row], labels[row], regions[row] = [7] * 5, [9] * 3, regions[row][:4]
    inputs = LAYOUT.captioning(captions, labels, regions)
    column = np.arange(LAYOUT.text + LAYOUT.regions)
    none = np.zeros(LAYOUT.regions, bool)
    caption = np.append(inputs.caption_mask[row], none)
    groups = {
        "earlier": caption & (column < 3),
        "later": caption & (column >= 3),
        "labels": np.append(inputs.context_mask[row], none),
        "regions": np.append(np.zeros(LAYOUT.text, bool), inputs.region_mask[row]),
        "padding": ~real(inputs)[row],
    }
    assert all(group.sum() >= 2 for group in groups.values())
    text, slots = groups[changed][: LAYOUT.text], groups[changed][LAYOUT.text :]
    ids, features = inputs.input_ids.copy(), inputs.region_features.copy()
    ids[row, text] = 30
    features[row, slots] += 1.0
    before = encode(inputs)[row]
    after = encode(inputs.replace(input_ids=ids, region_features=features))[row]
    difference = np.abs(after - before).max(axis=-1)
    for name in groups.keys() - {"padding"}:
        felt = difference[groups[name]]
        assert np.all(felt > 1e-3 if name in feel_it else felt == 0.0), (name, felt)


def test_bfloat16_strays_no_further_than_torchs(other):
    """From the float32 logits, in root mean square: 1.25 times what torch's bfloat16 does."""
    inputs = LAYOUT.captioning(*pictures())
    rows, mask = real(inputs), torch.tensor(tensorized()[3])

    def ours(dtype):
        model = load_published("oscar", other.folder, unroll=1, dtype=dtype)
        hidden, logits = compiled(model, hidden_and_logits)(inputs)
        assert (hidden.dtype, logits.dtype) == (dtype, jnp.float32)
        return np.asarray(logits)[rows]

    def theirs(dtype):
        model = copy.deepcopy(other.theirs).to(dtype)
        *text, features = torch_inputs(inputs)
        with torch.no_grad():
            return model.words(model(*text, features.to(dtype), mask)).float().numpy()[rows]

    bound = 1.25 * deviation(theirs(torch.bfloat16), theirs(torch.float32))
    assert 0 < deviation(ours("bfloat16"), ours("float32")) < bound


def test_dropout_reaches_layers_and_regions(other, encode):
    inputs = LAYOUT.captioning(*pictures())
    one, two = (jax.random.key(seed, impl="unsafe_rbg") for seed in (1, 2))
    np.testing.assert_array_equal(encode(inputs, one), encode(inputs, one))
    assert np.abs(encode(inputs, one) - encode(inputs, two)).mean() > 0.01
    embed = compiled(other.ours, lambda model, x, key: model.embed(x, dropout_key=key))
    plain, dropped = (embed(inputs, key)[:, LAYOUT.text :] for key in (None, one))
    rate, gone = DROPOUT["dropout"], (dropped == 0) & (plain != 0)
    assert abs(gone.mean() - rate) < 0.1  # 5 sigma
    np.testing.assert_allclose(dropped[~gone], plain[~gone] / (1 - rate), rtol=1e-3)


def test_export_reloads_in_torch_and_here(pair, tmp_path):
    ours, theirs, _ = pair
    with_pooler = load_published("oscar", pair.folder, unroll=1, pooler=True)
    write_published(tmp_path, publish_oscar(with_pooler.config, nnx.state(with_pooler)))
    tensors = load_file(tmp_path / "model.safetensors")
    original = theirs.state_dict()
    table = "bert.embeddings.word_embeddings.weight"
    assert original.keys() - tensors.keys() == {"cls.predictions.decoder.weight"}  # tied to it
    assert tensors.keys() <= original.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, original[key]), key
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(1.0)
    theirs.load_state_dict(tensors | {"cls.predictions.decoder.weight": tensors[table]})
    assert theirs.cls.predictions.decoder.weight is theirs.bert.embeddings.word_embeddings.weight
    again = load_published("oscar", tmp_path, unroll=1, **DROPOUT)
    assert again.config == ours.config
    same_parameters(again, ours)


def test_presets_have_the_published_sizes():
    """BERT's published counts with pooler, and Oscar's maps over 2,054 values a region."""
    for preset, bert, hidden in (
        (network.oscar_plus_base, 109_482_240, 768),
        (network.oscar_plus_large, 335_141_888, 1024),
    ):
        config = preset(pooler=True)
        assert (config.region_norm, config.bert.eps, config.bert.types) == (False, 1e-12, 2)
        model = abstract(network.Oscar, config)
        head = hidden * hidden + hidden + 2 * hidden + 30522
        count = bert + (2054 + 1) * hidden + head
        assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == count


def test_every_parameter_names_its_axes(other):
    names_its_axes(other.ours)


def test_bad_checkpoints_and_sizes_are_named(other, tmp_path):
    refuses(r"img_feature_type 'dis_code' is not", oscar_config, {"img_feature_type": "dis_code"})
    refuses(r"config\.json: no such file", load_published, "oscar", tmp_path)
    refuses(r"types is 1: expected at least 2", network.oscar_plus_base, types=1)
    refuses(r"region_features is 0", network.OscarConfig, other.ours.config.bert, region_features=0)
    untied = torch.load(other.folder / "pytorch_model.bin")
    untied["cls.predictions.decoder.weight"] = untied["cls.predictions.decoder.weight"] + 1.0
    torch.save(untied, tmp_path / "pytorch_model.bin")
    text = (other.folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"tensors that should be equal: cls\.predictions\.decoder"):
        load_published("oscar", tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"use_img_layernorm": 1', '"_other": 1'))
    refuses(r"keys without a rule: bert\.LayerNorm\.weight", load_published, "oscar", tmp_path)
