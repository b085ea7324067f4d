"""ModernBERT beside transformers, float32; its vectors and scores are in test_text_encoders.py."""

import json

import numpy as np
import pytest
import torch
from compare import WHOLE, compiled, names_its_axes
from tiny_encoders import QUESTIONS, save_plain, texts
from transformers import AutoTokenizer

from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.models.encoders.text_encoders import load_text_encoder
from mmqa_jax.models.modernbert.keys import modernbert_config
from tests.refusals import refuses

pytestmark = pytest.mark.slow

BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")


def test_each_layer(tmp_path):
    """With all biases, which vectors and scores are compared without."""
    theirs = save_plain("modernbert", tmp_path, **dict.fromkeys(BIASES, True))
    batch = AutoTokenizer.from_pretrained(tmp_path)(
        texts(), padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False
    )
    assert batch["input_ids"].shape[1] > 500
    outputs = []
    for layer in theirs.layers:
        layer.register_forward_hook(lambda _, __, out: outputs.append(out.numpy()))
    with torch.no_grad():
        embedded = theirs.embeddings(batch["input_ids"]).numpy()
        last = theirs(**batch).last_hidden_state.numpy()
    ours = load_text_encoder(tmp_path)
    names_its_axes(ours)

    def run(model, ids, mask):
        return model.embed(ids), model.layer_outputs(model.embed(ids), mask), model(ids, mask)

    mask = batch["attention_mask"].numpy().astype(bool)
    got = compiled(ours, run)(batch["input_ids"].numpy(), mask)
    np.testing.assert_allclose(got[0][mask], embedded[mask], **WHOLE)
    np.testing.assert_allclose(got[1][:, mask], np.stack(outputs)[:, mask], **WHOLE)
    np.testing.assert_allclose(got[2][mask], last[mask], **WHOLE)


def test_a_reranker_of_the_mean(tmp_path):
    options = {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True}
    theirs = save_plain("modernbert", tmp_path, classifier=True, **options)
    given = texts(500)
    pairs = [(question, text) for question in QUESTIONS for text in (given[1], given[-1])]
    batch = AutoTokenizer.from_pretrained(tmp_path)(
        pairs, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False
    )
    assert batch["input_ids"].shape[1] > 500
    with torch.no_grad():
        wanted = theirs(**batch).logits[:, 0].sigmoid().numpy()
    ours = open_cross_encoder(tmp_path, corpus_of_lists(["a"], None, None, None), batch_size=8)
    scores = ours.relevance(pairs)
    np.testing.assert_allclose(scores, wanted, **WHOLE)
    assert np.ptp(scores) > 0.01


def test_configs_of_both_versions_of_transformers(tmp_path):
    """Version 4 names thetas and every how many layers; 5 writes what follows from them."""
    save_plain("modernbert", tmp_path)
    newer = json.loads((tmp_path / "config.json").read_text())
    assert {"layer_types", "rope_parameters"} <= newer.keys()
    older = {
        key: value for key, value in newer.items() if key not in ("layer_types", "rope_parameters")
    }
    older |= {"global_attn_every_n_layers": 2, "global_rope_theta": 900, "local_rope_theta": 70}
    assert modernbert_config(older) == modernbert_config(newer)
    assert modernbert_config(newer).local == (False, True, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"other": {}}}, "a kind of layer in rope_parameters is 'other'"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*, expected 22 of full_attention"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
        ({"hidden_activation": "swish"}, "activation is 'swish'"),
        ({"num_hidden_layers": 1}, "there are at least 2"),
        ({"causal": True}, "the key 'causal'"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    refuses(message, modernbert_config, changes)
