"""Training learns: a small Atlas of real texts and pictures, a small model of each task.

The bounds are far below what a model reaches that the loss tells nothing about its inputs.
"""

import pytest
from cli_runs import done, quietly, train_flags

from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.runs.corpora import prepare_atlas

pytestmark = pytest.mark.slow

STEPS = {"contrastive": 20, "rerank": 60, "answer": 20}
# Of the last ten steps: loss at most, accuracy at least. Beside them the loss where the labels of
# every batch are shuffled.
BOUNDS = {
    "contrastive": (0.5, 0.9),  # 2.4
    "rerank": (0.3, 0.9),  # 0.5: one or two of eight choices are gold
    "answer": (2.5, 0.1),  # 3.6
}
SIZES = {
    "tokenizer": "corpus:2000",
    "data.split": "val",  # 21 questions, to be learnt by heart
    "model.changes.hidden": 64,
    "model.changes.mlp": 128,
    "batches.batch_size": 12,
    "train.log_every": 10,
    "train.checkpoint_every": 0,
    "train.optimizer.learning_rate": 0.002,
    "augment.entities": 0.0,
    "augment.palette": 0.0,
}
OF_TASK = {
    "contrastive": {
        "model.changes.layers": 1,
        "model.vision.embed_dim": 64,
        "model.vision.layers": 1,
        "batches.query_length": 32,
        "batches.source_lengths": "(64,)",
        "inference.buckets": "(64,)",
    },
    "rerank": {
        "model.changes.layers": 1,
        "model.visual_hidden": "(64,)",
        "packing.buckets": "((1,96),)",
        "packing.max_question_tokens": 48,
        "train.optimizer.learning_rate": 0.004,
    },
    "answer": {
        "model.changes.layers": 1,
        "model.visual_hidden": "(64,)",
        "packing.buckets": "((2,104),)",
        "packing.max_question_tokens": 32,
        "train.optimizer.learning_rate": 0.008,
    },
}


@pytest.fixture(scope="module")
def atlas(made_once):
    """Eight countries, as the demo's tests have them."""
    return made_once("atlas", lambda folder: prepare_atlas(folder / "data", 8)) / "data"


@pytest.mark.parametrize("task", list(STEPS))
def test_the_loss_falls_far_below_a_guess(task, atlas, cli_cache, tmp_path):
    values = {**SIZES, **OF_TASK[task], "train.steps": STEPS[task]}
    with quietly(cli_cache):
        flags = train_flags(task, atlas, tmp_path / "run", **values)
        done("train", *flags, initializers=True)
    first, *_, last = read_metrics(tmp_path / "run")
    loss, accuracy = BOUNDS[task]
    assert 0 < last["loss"] < loss < first["loss"]
    assert last["accuracy"] > accuracy
