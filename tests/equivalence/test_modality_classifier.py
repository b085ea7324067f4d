"""WebQA's BERT modality classifier against the published layers on a tiny random BERT."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from compare import abstract, compiled, forward, random_model, randomize
from flax import nnx
from updates import (
    EPS,
    RATE,
    TransformersAdamW,
    at_one_rate,
    optimizer_section,
    our_updates,
    same_updates,
    their_updates,
)

from mmqa_jax.models.bert.keys import bert_key_map, fill_bert
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.encoders.heads import TextClassifier, TextClassifierConfig
from mmqa_jax.tasks.modality import ModalityObjective
from mmqa_jax.weights.keymap import export

SIZES = BertConfig(vocab_size=50, hidden=32, layers=2, heads=4, mlp=48, positions=20)


class Published(torch.nn.Module):
    """bert_classifier.py:26-45, without dropout; `pooling` cls is the state of `[CLS]`."""

    def __init__(self, bert, pooling):
        super().__init__()
        self.bert, self.fc, self.pooling = bert, torch.nn.Linear(32, 2), pooling

    def forward(self, ids, mask):
        output = self.bert(ids, attention_mask=mask)
        pooled = output[1] if self.pooling == "pooler" else output[0][:, 0]
        return torch.log_softmax(self.fc(pooled), dim=1)


@pytest.fixture(params=["pooler", "cls"])
def pair(request, tmp_path):
    """The published module, and ours with its weights."""
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=20, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    bert = randomize(transformers.BertModel(config, request.param == "pooler"), 0, 0.2)
    bert.save_pretrained(tmp_path / "bert")
    published = Published(bert, request.param).eval()
    ours = abstract(TextClassifier, TextClassifierConfig(SIZES, 2, request.param))
    fill_bert(ours.bert, tmp_path / "bert")
    ours.head.kernel.set_value(jnp.asarray(published.fc.weight.detach().numpy().T))
    ours.head.bias.set_value(jnp.asarray(published.fc.bias.detach().numpy()))
    return published, ours


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(12) < np.array([12, 3, 7, 9, 5])[:, None]
    ids = np.where(mask, rng.integers(5, 50, mask.shape), 0).astype(np.int32)
    return {"input_ids": ids, "mask": mask, "label": np.array([0, 1, 1, 1, 1], np.int32)}


def test_log_probabilities_and_updates(pair, batch):
    """bert_classifier.py:113-130, 283-290: NLL, the gradient clipped to 1, transformers' AdamW."""
    published, ours = pair
    labels = torch.tensor(batch["label"]).long()
    ids, mask = (torch.tensor(batch[name].astype(np.int64)) for name in ("input_ids", "mask"))
    wanted = published(ids, mask)
    found = jax.nn.log_softmax(compiled(ours, forward)(batch["input_ids"], batch["mask"]))
    np.testing.assert_allclose(found, wanted.detach(), rtol=0, atol=1e-5)

    def loss_of(_):
        return torch.nn.functional.nll_loss(published(ids, mask), labels)

    section = optimizer_section("webqa/modality.py")
    adamw = TransformersAdamW(published, RATE, 1e-6 * EPS, 0.0)
    theirs = their_updates(published, adamw, [[batch]] * 2, loss_of, clip_norm=1.0)
    task = ModalityObjective(dataclasses.replace(ours.config, bert=without_dropout(SIZES)))

    def publish(state):
        trained = nnx.merge(nnx.graphdef(ours), state)
        yield "fc.weight", np.asarray(trained.head.kernel[...]).T
        yield "fc.bias", np.asarray(trained.head.bias[...])
        for name, array in export(nnx.state(trained.bert), bert_key_map(trained.bert.config)):
            yield f"bert.{name}", array

    got = our_updates(task, ours, at_one_rate(section), [batch] * 2, publish)
    same_updates(got, theirs, zero=r"key\.bias")


def test_a_frozen_bert_has_no_gradient(batch):
    config = TextClassifierConfig(without_dropout(SIZES))

    graphdef, params = nnx.split(random_model(TextClassifier, config))

    @jax.jit
    def norms(params):
        found = []
        for frozen in (True, False):
            task = ModalityObjective(config, frozen)
            grads = jax.grad(
                lambda p, task=task: task.loss(nnx.merge(graphdef, p), batch, None)[0]
            )(params)
            found.append([optax.tree.norm(grads[part]) for part in ("head", "bert")])
        return found

    (head, bert), (other_head, other_bert) = norms(params)
    assert head > 0
    assert other_head > 0
    assert bert == 0
    assert other_bert > 0


def without_dropout(config):
    return dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)
