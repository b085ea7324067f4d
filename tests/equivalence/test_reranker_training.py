"""The task `reranker` beside sentence-transformers: losses, gradients, steps, exported folders."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses
from updates import our_updates

from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.models.encoders.trained import RerankerRecord, cross_encoder_record
from mmqa_jax.tasks.reranker import RerankerObjective
from mmqa_jax.training.optimizer import OptimizerOptions
from tests import tiny_encoders

pytestmark = pytest.mark.slow

BOUND, GRADIENT = 1e-6, 6e-6
TEMPERATURE, EXACT = 0.5, 1e-12
QUESTIONS, GROUP = 3, 4
WORDS = tiny_encoders.WORDS.split()


def texts(rng, count: int) -> list[str]:
    return [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(count)]


class Pair:
    """A reranker of ours and of sentence-transformers, with equal weights."""

    def __init__(self, family: str, folder: Path):
        tiny_encoders.save_plain(family, folder, classifier=True, num_labels=1)
        self.folder = folder
        self.theirs = CrossEncoder(str(folder), device="cpu").eval().double()
        self.start = {name: x.clone() for name, x in self.theirs.state_dict().items()}
        self.record = cross_encoder_record(folder)
        self.model = self.record.build(rngs=nnx.Rngs(0))
        self.record.load(self.model, folder)

    def batch(self, seed: int) -> tuple[list[str], list[list[str]], np.ndarray, dict]:
        rng = np.random.default_rng(seed)
        asked = texts(rng, QUESTIONS)
        sources = [texts(rng, GROUP) for _ in asked]
        labels = rng.permuted(np.tile(np.linspace(0, 1, GROUP), (QUESTIONS, 1)), axis=1)
        pairs = [(q, text) for q, own in zip(asked, sources, strict=True) for text in own]
        tokens = self.theirs.tokenizer(
            [q for q, _ in pairs], [text for _, text in pairs], padding=True, return_tensors="np"
        )
        ids = tokens["input_ids"]
        ours = {
            "pair_ids": ids,
            "pair_mask": tokens["attention_mask"].astype(bool),
            "pair_types": tokens.get("token_type_ids", np.zeros_like(ids)),
            "labels": labels.astype(np.float32),
        }
        return asked, sources, labels, jax.tree.map(jnp.asarray, ours)

    def publish(self, state):
        """Parameters under the names of sentence-transformers' module."""
        family = text_encoders.FAMILIES[json.loads(self.record.published)["model_type"]]
        config = self.record.config
        source = text_encoders.published_tensors(
            family, config, state, family.classifier(config), classifier=True
        )
        return [(f"0.model.{name}", source.read(name)) for name in source.specs()]


@functools.cache
def made(family: str, folder: Path) -> Pair:
    return Pair(family, folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("rerankers")


def flat(asked, sources):
    repeated = list(itertools.chain.from_iterable([q] * GROUP for q in asked))
    return [repeated, list(itertools.chain.from_iterable(sources))]


def pointwise(model, asked, sources, labels):
    loss = losses.BinaryCrossEntropyLoss(model)
    return loss(flat(asked, sources), torch.tensor(labels.ravel()))


def listed(kind, model, asked, sources, labels):
    return kind(model)([asked, sources], [torch.tensor(row) for row in labels])


def margin_mse(model, asked, sources, labels):
    columns = [list(column) for column in zip(*sources, strict=True)]
    return losses.MarginMSELoss(model)([asked, *columns], torch.tensor(labels))


def divergence(model, asked, sources, labels):
    tokens = model.tokenizer(*flat(asked, sources), padding=True, return_tensors="pt")
    logits = model.model(**tokens).logits.reshape(labels.shape)
    predicted, wanted = (x.log_softmax(1) for x in (logits, torch.tensor(labels) / TEMPERATURE))
    return torch.nn.functional.kl_div(predicted, wanted, reduction="batchmean", log_target=True)


LOSSES = {
    "divergence": divergence,
    "pointwise": pointwise,
    "listwise": functools.partial(listed, losses.ListNetLoss),
    "lambda": functools.partial(listed, losses.LambdaLoss),
    "margin_mse": margin_mse,
}


@pytest.mark.parametrize(
    ("family", "kind"), [*(("bert", kind) for kind in LOSSES), ("modernbert", "lambda")]
)
def test_five_steps_equal(family, kind, folders):
    """Losses, gradients and parameters of five steps of AdamW."""
    pair = made(family, folders / family)
    pair.theirs.load_state_dict(pair.start)
    batches = [pair.batch(seed) for seed in range(5)]
    options = OptimizerOptions(
        name="adamw",
        learning_rate=1e-4,
        schedule="constant",
        warmup=0.0,
        eps=1e-2,
        weight_decay=0.01,
        no_decay="(?!)",
    )
    objective = RerankerObjective(pair.record, kind, GROUP, temperature=TEMPERATURE)
    got = our_updates(objective, pair.model, options, [b[-1] for b in batches], pair.publish)
    optimizer = torch.optim.AdamW(pair.theirs.parameters(), lr=1e-4, eps=1e-2, weight_decay=0.01)
    worst = []
    for (asked, sources, labels, _), update in zip(batches, got, strict=True):
        pair.theirs.zero_grad()
        loss = LOSSES[kind](pair.theirs, asked, sources, labels)
        loss.backward()
        assert abs(update.loss - loss.item()) < BOUND * max(1, abs(loss.item()))
        named = dict(pair.theirs.named_parameters())
        assert named.keys() == update.parameters.keys()
        for name, p in named.items():
            want = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
            worst.append(np.abs(update.gradient[name] - want).max() / max(np.abs(want).max(), 1))
        optimizer.step()
        for name, p in named.items():
            np.testing.assert_allclose(
                update.parameters[name], p.detach().numpy(), rtol=0, atol=BOUND, err_msg=name
            )
    assert max(worst) < GRADIENT


def test_gradients_are_theirs_in_float64(folders, in_float64):
    """What deviates above is rounding: no operation is another one. (sentence-transformers' own
    losses of rerankers hold logits in float32 whatever the model computes in.)"""
    kind = "divergence"
    pair = made("bert", folders / "bert")
    pair.theirs.load_state_dict(pair.start)
    asked, sources, labels, batch = pair.batch(1)
    graphdef, state = nnx.split(in_float64(pair.record, pair.model))
    objective = RerankerObjective(pair.record, kind, GROUP, temperature=TEMPERATURE)
    batch["labels"] = jnp.asarray(labels)
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda state: objective.loss(nnx.merge(graphdef, state), batch, None)[0])
    )(state)
    pair.theirs.zero_grad()
    wanted = LOSSES[kind](pair.theirs, asked, sources, labels)
    wanted.backward()
    assert abs(float(loss) - wanted.item()) < EXACT
    got = dict(pair.publish(gradient))
    for name, p in pair.theirs.named_parameters():
        want = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        np.testing.assert_allclose(got[name], want, rtol=0, atol=EXACT * max(np.abs(want).max(), 1))


def test_dropout_is_that_of_the_published_config(folders):
    """Of each key another draw, of which many are what none is, nearly."""
    pair = made("bert", folders / "bert")
    *_, batch = pair.batch(1)
    with_it, without = (
        RerankerObjective(pair.record, "pointwise", GROUP, dropout=dropout)
        for dropout in (True, False)
    )
    assert pair.record.config.dropout == json.loads(pair.record.published)["hidden_dropout_prob"]
    loss = jax.jit(lambda key: with_it.loss(pair.model, batch, key)[0])
    drawn = np.array([loss(jax.random.key(n)) for n in range(60)])
    plain = without.loss(pair.model, batch, jax.random.key(0))[0]
    np.testing.assert_array_equal(plain, with_it.loss(pair.model, batch, None)[0])
    assert len(np.unique(drawn)) == 60
    assert abs(drawn.mean() - plain) < 5 * drawn.std() / 60**0.5 + 0.05 * abs(float(plain))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_exported_folder_opens_with_equal_scores(family, folders, tmp_path):
    pair = made(family, folders / family)
    pair.theirs.load_state_dict(pair.start)
    record = RerankerRecord.from_json(json.loads(json.dumps(pair.record.as_json())))
    record.write(tmp_path, pair.model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((pair.folder / name).read_bytes())
    rng = np.random.default_rng(9)
    pairs = list(zip(texts(rng, 5), texts(rng, 5), strict=True))
    wanted = pair.theirs.predict(pairs)
    got = CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=BOUND)
