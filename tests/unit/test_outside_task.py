"""A task of a user's own: one config file outside of the package, and every verb knows it."""

import json

import pytest
from cli_runs import done

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

OWN = '''
"""Is a question long? Logistic regression over its words."""

import dataclasses
from typing import ClassVar

import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.feed import BatchesSection, feed_batches
from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.data.tokenizers import TokenTable, text_inputs
from mmqa_jax.models.common.layers import Embedding, Linear
from mmqa_jax.tasks.task import DataSection, Recipe, ServingSection, Task, bools, ints


class Words(nnx.Module):
    def __init__(self, size, width, rngs):
        self.words = Embedding(size, width, ("vocab", "embed"), rngs=rngs)
        self.out = Linear(width, 1, ("embed", None), rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Objective:
    size: int
    width: int

    def init(self, key):
        return Words(self.size, self.width, nnx.Rngs(key))

    def loss(self, model, batch, dropout_key):
        words = model.words(batch["input_ids"]) * batch["mask"][..., None]  # [B, L, W]
        logit = model.out(words.sum(axis=1))[:, 0]  # [B]
        losses = optax.sigmoid_binary_cross_entropy(logit, batch["label"])
        return losses.mean(), {"accuracy": ((logit > 0) == (batch["label"] > 0)).mean()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    width: int = at_least(1, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches(BatchesSection):
    length: int = at_least(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length(Task):
    name: ClassVar[str] = "length"
    product: ClassVar[str] = "judge of length"

    data: DataSection
    model: Model
    batches: Batches
    inference: ServingSection

    def _check(self, files):
        pass

    def objective(self, vocab_size, mesh=None):
        return Objective(vocab_size, self.model.width)

    def batch(self):
        rows, length = self.batches.batch_size, self.batches.length
        return {"input_ids": ints(rows, length), "mask": bools(rows, length), "label": ints(rows)}

    def _recipe(self, corpus, questions, tokenizer):
        tokens = TokenTable(tokenizer, [question.question for question in questions])
        everything = {"index": np.arange(len(questions)), "bucket": np.zeros(len(questions), int)}

        def make(planned, table):
            rows = [tokens[row] for row in table["index"]]
            ids, mask, _ = text_inputs(rows, self.batches.length, tokenizer)
            label = np.array([len(row) > 4 for row in rows], np.int32)
            return {"input_ids": ids, "mask": mask, "label": label, "index": table["index"]}

        shapes = [Bucket(0, self.batches.length)]
        batches = feed_batches(lambda _: everything, shapes, make, self.feed())
        return Recipe(self.objective(tokenizer.vocab_size), batches, None)


def get_config():
    config = ConfigDict()
    config.task, config.seed, config.tokenizer, config.init = "length", 0, "corpus:200", "scratch"
    config.data = {"dir": "", "split": "train"}
    config.mesh = {"data": 1}
    config.model = {"width": 4}
    config.batches = {"batch_size": 2, "length": 16, "threads": 0}
    config.train = {"steps": 3, "log_every": 1, "optimizer": {"learning_rate": 0.1}}
    config.inference = {"batch_size": 2}
    return config
'''


@pytest.fixture
def own(tmp_path):
    """The config file."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_it_is_trained_resumed_reported_and_planned(own, data, tmp_path):
    flags = f"--config={own}", f"--config.data.dir={data}"
    run = tmp_path / "run"
    assert done("train", *flags, f"--workdir={run}")["steps"] == 3
    longer = done(
        "train", *flags, "--config.train.steps=5", f"--workdir={run}", "--stretch_schedule"
    )
    assert longer["steps"] == 5
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    report = done("report", f"--workdir={run}")
    assert report["task"] == "length"
    assert "Training of the judge of length" in (run / "report.html").read_text()
    (program,) = done("plan", *flags, "--topology=v5e:2x4", "--config.batches.batch_size=8",
                      "--config.mesh.data=8")["programs"]  # fmt: skip
    assert (program["name"], program["fits"]) == ("train", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--config.model.width=0", r"config key model\.width=0: at least 1 was expected"),
        ("--config.batches.length=two", r"config\.batches\.length=two: .* a whole number"),
        ("--config.model.wdth=4", r"config key model\.wdth: unknown; did you mean 'width'"),
    ],
)
def test_its_mistakes_are_named_as_those_of_others(own, data, refused, tmp_path, change, message):
    flags = f"--config={own}", f"--config.data.dir={data}", f"--workdir={tmp_path / 'run'}"
    refused("train", *flags, change, message=message)
    assert not (tmp_path / "run").exists()
