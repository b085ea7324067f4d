"""The task `retriever` beside sentence-transformers: losses, gradients, steps, exported folders."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.multi_vector_encoder import losses as token_losses
from sentence_transformers.sentence_transformer import losses
from updates import our_updates

from mmqa_jax.models.encoders.trained import EncoderRecord, read_encoder_record
from mmqa_jax.tasks.retriever import RetrieverLoss, RetrieverObjective
from mmqa_jax.training.optimizer import OptimizerOptions
from tests import tiny_encoders

pytestmark = pytest.mark.slow

BOUND = 1e-6
LOSS = 2e-6  # of 1 or the loss: their MaxSim sums in float32
GRADIENT = 6e-6
EXACT = 1e-12
WORDS = tiny_encoders.WORDS.split()
TEACHER = torch.tensor(np.random.default_rng(5).normal(size=(4, 3)))


def texts(seed: int, count: int = 4) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(count)]


class Pair:
    """An encoder of ours and of sentence-transformers, with equal weights."""

    def __init__(self, family: str, vectors: str, folder: Path):
        plain = folder / "plain"
        if vectors == "text":
            self.theirs = tiny_encoders.save_sentences(family, plain, "mean")
        else:
            tiny_encoders.save_plain(family, folder / "encoder")
            self.theirs = MultiVectorEncoder(str(folder / "encoder"), device="cpu").eval()
            self.theirs.save_pretrained(str(plain))
        self.folder = plain
        self.record = read_encoder_record(plain, vectors)
        self.theirs.double()
        self.start = {name: x.clone() for name, x in self.theirs.state_dict().items()}
        self.model = self.record.build(rngs=nnx.Rngs(0))
        self.record.load(self.model, plain)

    def batch(self, seed: int) -> tuple[list[dict], dict[str, jax.Array]]:
        """Columns as sentence-transformers has them, and ours: a query, a gold and two others."""
        columns = []
        for column in range(4):
            task = "query" if column == 0 else "document"
            columns.append(self.theirs.preprocess(texts(10 * seed + column), task=task))
        longest = max(column["input_ids"].shape[1] for column in columns)

        def padded(name: str, of: list[dict]) -> np.ndarray:
            arrays = [np.asarray(column[name]) for column in of]
            wide = [np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in arrays]
            return np.stack(wide, 1).reshape(-1, longest)  # a question's sources follow each other

        batch = {}
        for side, of in (("query", columns[:1]), ("source", columns[1:])):
            batch[f"{side}_ids"] = padded("input_ids", of)
            batch[f"{side}_mask"] = padded("attention_mask", of).astype(bool)
            batch[f"{side}_scored"] = batch[f"{side}_mask"]
        batch |= {
            "positive": 3 * np.arange(4),
            "source_rows": np.arange(12),
            "gold_rows": 3 * np.arange(4)[:, None],
            "scores": TEACHER.numpy(),
        }
        return columns, jax.tree.map(jnp.asarray, batch)

    def publish(self, state):
        """Parameters under the names of sentence-transformers' module."""
        source = self.record.trunk_tensors(state["bert"])
        named = {f"0.model.{name}": source.read(name) for name in source.specs()}
        if self.record.recipe.dense:
            named["1.linear.weight"] = np.asarray(state["dense"][0]["linear"]["kernel"]).T
        return named.items()


MADE: dict[tuple[str, str], Pair] = {}


@pytest.fixture
def pair(request, tmp_path_factory):
    if request.param not in MADE:
        MADE[request.param] = Pair(*request.param, tmp_path_factory.mktemp("pair"))
    made = MADE[request.param]
    return made


def mnr(model, **options):
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, **options)


SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
TEXT_LOSSES = {
    "softmax": (RetrieverLoss(), mnr),
    "symmetric": (
        RetrieverLoss(symmetric=True, scale=7.0),
        lambda m: mnr(m, scale=7.0, **SYMMETRIC),
    ),
    "matryoshka": (
        RetrieverLoss(matryoshka=(12, 36)),
        lambda m: losses.MatryoshkaLoss(m, mnr(m), [36, 12]),
    ),
    "margin_mse": (RetrieverLoss(kind="margin_mse", scale=1.0), losses.MarginMSELoss),
    "divergence": (
        RetrieverLoss(kind="divergence", scale=5.0, teacher_temperature=2.0),
        lambda m: losses.DistillKLDivLoss(m, student_temperature=0.2, teacher_temperature=2.0),
    ),
}
TOKEN_LOSSES = {
    "softmax": (
        RetrieverLoss(scale=1.0),
        lambda m: token_losses.CachedMultiVectorMultipleNegativesRankingLoss(m, scale=1.0),
    ),
    "margin_mse": (
        RetrieverLoss(kind="margin_mse", scale=1.0),
        token_losses.MultiVectorMarginMSELoss,
    ),
    "divergence": (
        RetrieverLoss(kind="divergence", scale=1.0),
        token_losses.MultiVectorDistillKLDivLoss,
    ),
}
CASES = [
    *((("bert", "text"), name, TEXT_LOSSES[name]) for name in TEXT_LOSSES),
    (("modernbert", "text"), "softmax", TEXT_LOSSES["softmax"]),
    *((("bert", "token"), name, TOKEN_LOSSES[name]) for name in TOKEN_LOSSES),
]


@pytest.mark.parametrize(
    ("pair", "case"),
    [(key, case) for key, _, case in CASES],
    ids=["-".join((*key, name)) for key, name, _ in CASES],
    indirect=["pair"],
)
def test_five_steps_equal(pair, case):
    """Losses, gradients and parameters of five steps of AdamW."""
    ours, make = case
    loss_of = make(pair.theirs)
    pair.theirs.load_state_dict(pair.start)
    batches = [pair.batch(seed) for seed in range(5)]
    parts = 2 if ours.kind == "softmax" and not ours.matryoshka else 1
    objective = RetrieverObjective(pair.record, tower_parts=parts, losses=ours)
    options = OptimizerOptions(
        name="adamw",
        learning_rate=1e-4,
        schedule="constant",
        warmup=0.0,
        clip_norm=None,
        eps=1e-2,
        weight_decay=0.01,
        no_decay="(?!)",
    )
    got = our_updates(objective, pair.model, options, [batch for _, batch in batches], pair.publish)
    optimizer = torch.optim.AdamW(pair.theirs.parameters(), lr=1e-4, eps=1e-2, weight_decay=0.01)
    worst = []  # of the gradients, of 1 or the largest value
    for (columns, _), update in zip(batches, got, strict=True):
        pair.theirs.zero_grad()
        loss = loss_of([dict(column) for column in columns], TEACHER)
        loss.backward()
        assert abs(update.loss - loss.item()) < LOSS * max(1, abs(loss.item()))
        named = {name: p for name, p in pair.theirs.named_parameters() if name in update.parameters}
        assert len(named) == len(update.parameters) > 10
        for name, p in named.items():
            want = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
            worst.append(np.abs(update.gradient[name] - want).max() / max(np.abs(want).max(), 1))
        optimizer.step()
        for name, p in named.items():
            np.testing.assert_allclose(
                update.parameters[name], p.detach().numpy(), rtol=0, atol=BOUND, err_msg=name
            )
    assert max(worst) < GRADIENT


@pytest.mark.parametrize(
    ("pair", "case"),
    [(("bert", "text"), TEXT_LOSSES[name]) for name in ("softmax", "matryoshka")],
    ids=["softmax", "matryoshka"],
    indirect=["pair"],
)
def test_gradients_are_theirs_in_float64(pair, case, in_float64):
    """What deviates above is rounding: no operation is another one. (Their MaxSim, and
    transformers' rotary positions, are in float32 whatever the model computes in.)"""
    ours, make = case
    pair.theirs.load_state_dict(pair.start)
    columns, batch = pair.batch(1)
    model = in_float64(pair.record, pair.model)
    graphdef, state = nnx.split(model)
    objective = RetrieverObjective(pair.record, losses=ours)
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda state: objective.loss(nnx.merge(graphdef, state), batch, None)[0])
    )(state)
    pair.theirs.zero_grad()
    wanted = make(pair.theirs)([dict(column) for column in columns], TEACHER)
    wanted.backward()
    assert abs(float(loss) - wanted.item()) < EXACT * max(1, wanted.item())
    got = dict(pair.publish(gradient))
    for name, p in pair.theirs.named_parameters():
        if name in got:
            want = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
            np.testing.assert_allclose(
                got[name], want, rtol=0, atol=EXACT * max(np.abs(want).max(), 1)
            )


@pytest.mark.parametrize("pair", [("bert", "text")], indirect=True)
def test_mask_of_false_negatives(pair):
    """GISTEmbedLoss with the model as its own guide."""
    pair.theirs.load_state_dict(pair.start)
    columns, batch = pair.batch(1)
    keep = np.arange(12) % 3 < 2  # a gold and one other
    batch = {key: x[keep] if len(x) == 12 else x for key, x in batch.items()}
    batch |= {"positive": 2 * jnp.arange(4)}
    for margin in (0.0, 0.05):
        theirs = losses.GISTEmbedLoss(
            pair.theirs,
            pair.theirs,
            0.05,
            margin=margin,
            contrast_anchors=False,
            contrast_positives=False,
        )
        want = theirs([dict(column) for column in columns[:3]], None).item()
        objective = RetrieverObjective(pair.record, losses=RetrieverLoss(margin=margin))
        plain = RetrieverObjective(pair.record, losses=RetrieverLoss())
        got = objective.loss(pair.model, batch, None)[0]
        assert abs(float(got) - want) < BOUND * max(1, want)
        assert abs(float(plain.loss(pair.model, batch, None)[0]) - want) > 1e-3


@pytest.mark.parametrize(
    "pair", [("bert", "text"), ("modernbert", "text"), ("bert", "token")], indirect=True
)
def test_exported_folder_opens_with_equal_vectors(pair, tmp_path):
    record = EncoderRecord.from_json(json.loads(json.dumps(pair.record.as_json())))
    assert record.recipe.prompts == pair.record.recipe.prompts
    pair.theirs.load_state_dict(pair.start)
    record.write(tmp_path, pair.model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((pair.folder / name).read_bytes())
    asked = texts(3)
    if record.vectors == "text":
        theirs = SentenceTransformer(str(tmp_path), device="cpu")
        wanted, got = (model.encode(asked) for model in (pair.theirs, theirs))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=BOUND)
        return
    theirs = MultiVectorEncoder(str(tmp_path), device="cpu")
    for encode in ("encode_query", "encode_document"):
        wanted, got = (getattr(model, encode)(asked) for model in (pair.theirs, theirs))
        for one, other in zip(wanted, got, strict=True):
            np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=0, atol=BOUND)
