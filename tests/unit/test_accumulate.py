"""An update in parts (`train.accumulate`) is that of the whole batch, for every task."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.options import read_section
from mmqa_jax.training.state import (
    WEIGHT,
    Step,
    abstract_state,
    initial_state,
    make_step,
    of_update,
)
from mmqa_jax.training.state import split_model as split_objective

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
# Every task but contrastive, which refuses parts.
TASKS = (
    *("atlas/rerank", "atlas/answer", "webqa/vlp_select", "webqa/vlp_qa", "webqa/modality"),
    *("atlas/mcan", "okvqa/mcan", "scienceqa/rmr_retriever", "scienceqa/rmr_finetune"),
    *("scienceqa/t5_finetune", "scienceqa/multimodal_cot", "webqa/fusion_in_decoder"),
    *("aokvqa/vlm_finetune", "okvqa/planner"),
)
ROWS, VOCABULARY = 8, 300


def task_of(name: str):
    config = load_config(CONFIGS / f"{name}.py:runlocal")
    config.batches.batch_size, config.train.accumulate = ROWS, 1
    return read_task(config)


def drawn(task) -> dict:
    """A batch of the task's shapes whose rows have different numbers of targets."""
    rng = np.random.default_rng(0)

    def draw(path, shape):
        name = str(getattr(path[-1], "key", getattr(path[-1], "name", "")))
        size = shape.shape
        if name in ("target_lengths", "prompt_lengths"):
            return rng.integers(1, 5, size).astype(np.int32)
        if name in ("target_segments", "masked_weights"):
            few = rng.integers(1, size[1] + 1, (size[0], 1))
            return (np.arange(size[1]) < few).astype(shape.dtype)
        if name == "position_ids":
            return np.broadcast_to(np.arange(size[1], dtype=np.int32) % 40, size)
        if name in ("input_ids", "question_ids", "query_ids", "candidate_ids", "target_ids"):
            return rng.integers(5, 60, size).astype(np.int32)
        if shape.dtype == np.bool_:
            return np.ones(size, bool)
        if np.issubdtype(shape.dtype, np.floating):
            return rng.random(size).astype(shape.dtype)
        return rng.integers(0, 2, size).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, task.batch())


@pytest.mark.parametrize("name", TASKS)
def test_the_parts_of_a_batch_weigh_what_the_whole_is_divided_by(name):
    """Losses and metrics, in 2 and in 4 parts; gradients follow, for they are linear in the loss."""
    task = task_of(name)
    objective, batch = task.objective(VOCABULARY), drawn(task)
    model = objective.init(jax.random.key(1))
    graphdef, state = nnx.split(model)

    @jax.jit
    def values_of(state, batch):
        loss, metrics = objective.loss(nnx.merge(graphdef, state), batch, None)
        return {**metrics, "loss": loss, "grad_norm": 0.0, "learning_rate": 0.0}

    def parts_of(count):
        size = ROWS // count
        parts = [jax.tree.map(lambda x, i=i: x[i * size :][:size], batch) for i in range(count)]
        return of_update([jax.device_get(values_of(state, part)) for part in parts])

    whole = parts_of(1)
    for count in (2, 4):
        np.testing.assert_allclose(parts_of(count)["loss"], whole["loss"], rtol=2e-5)
    assert parts_of(2).get("targets") == whole.get("targets")
    assert WEIGHT not in whole


class Words(nnx.Module):
    """A table of what a word costs, a factor, and what is not trained."""

    def __init__(self, key):
        def param(value):
            return nnx.Param(value, out_sharding=(None,) * value.ndim, eager_sharding=False)

        self.table = param(jax.random.normal(key, (9,)))
        self.factor = param(jnp.ones(2))
        self.frozen = param(jnp.ones(3))


class Costs:
    """The mean square of the costs of all words; dropout keeps half of them."""

    def init(self, key):
        return Words(key)

    def loss(self, model, batch, dropout_key):
        words = batch["words"]  # [B, L], below 0: none
        cost = model.table[...][words] * model.factor[0] + model.frozen.sum()
        dropped = jax.random.bernoulli(dropout_key, 0.5, words.shape) & batch["drops"][:, None]
        count = (words >= 0).sum().astype(jnp.float32)
        total = jnp.where((words >= 0) & ~dropped, cost**2, 0.0).sum()
        loss = total / jnp.maximum(count, 1) * batch.get("factor", jnp.ones(1)).sum()
        return loss, {"targets": count, WEIGHT: count}


def words(*lengths: int, width: int, drops: bool = False) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(sum(lengths)).integers(0, 9, (len(lengths), width))
    ids = np.where(np.arange(width) < np.array(lengths)[:, None], ids, -1)
    return {"words": ids, "drops": np.full(len(lengths), drops)}


def made_step(accumulate: int, **options) -> tuple[Step, Any]:
    section = {"name": "adam", "schedule": "constant", "warmup": 0.0, "clip_norm": 1.0}
    trainable = r"table|factor"
    chosen = OptimizerOptions(**{**section, "trainable": trainable, **options.pop("optimizer", {})})
    optimizer, schedule = make_optimizer(chosen, 10)
    mesh, model = make_mesh({"data": 1}, devices=jax.devices()[:1]), split_objective(Costs(), 0)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        Costs(), model, optimizer, schedule, seed=0, accumulate=accumulate, abstract=abstract,
        mesh=mesh, trainable=trainable, **options,
    )  # fmt: skip
    return step, step.begin(initial_state(model, optimizer, 0, abstract))


def taken(batches, **options):
    step, state = made_step(len(batches), **options)
    found = []
    for batch in batches:
        state, values = step(state, batch)
        found.append(jax.device_get(values))
    assert int(state.step) == 1
    return flatten_named(jax.device_get(state.params)), of_update(found), state


def test_parts_of_different_shapes_and_weights_are_one_batch():
    """1, 12 and no words in rows of 2, 6 and 3: each word counts alike, as the tables' sum tells."""
    parts = [words(1, 0, width=2), words(6, 6, width=6), words(0, 0, width=3)]
    whole = {
        "words": np.concatenate(
            [np.pad(p["words"], ((0, 0), (0, 6 - p["words"].shape[1])), constant_values=-1)
             for p in parts]
        ),
        "drops": np.zeros(6, bool),
    }  # fmt: skip
    (params, metrics, state), (wanted, of_whole, _) = taken(parts), taken([whole])
    for name, value in wanted.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6, err_msg=name)
    assert metrics == pytest.approx(of_whole, rel=1e-5)
    assert metrics["targets"] == 13
    # What is not trained has no sum, and an update leaves the sums empty.
    assert [x.shape for x in state.sums.gradient] == [(2,), (9,)]
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(state.sums))


def test_an_update_with_a_part_that_is_not_finite_changes_nothing_and_the_next_one_does():
    step, state = made_step(2, skip_nonfinite=True)
    start = flatten_named(jax.device_get((state.params, state.optimizer)))
    endless = {**words(2, width=2), "drops": np.ones(1, bool), "factor": np.array([np.inf], "f4")}
    plain = {**words(3, width=2), "factor": np.ones(1, "f4")}
    for first in (plain, endless):
        state, _ = step(state, first)
    after = flatten_named(jax.device_get((state.params, state.optimizer)))
    assert int(state.step) == 1
    for name, value in start.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    for batch in (plain, plain):
        state, values = step(state, batch)
    assert np.isfinite(values["grad_norm"])
    assert (jax.device_get(state.params["table"][...]) != start["0/table"]).any()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_step_and_every_part_of_one_draws_its_own_dropout(accumulate):
    """With a rate of nearly 0, on one batch, only the masks can change the loss."""
    step, state = made_step(accumulate, optimizer={"learning_rate": 1e-30})
    batch, losses = words(*[30] * 4, width=30, drops=True), []
    for _ in range(4):
        state, values = step(state, batch)
        losses.append(float(values["loss"]))
    assert len(set(losses)) == 4
    again, state = [], made_step(accumulate, optimizer={"learning_rate": 1e-30})[1]
    for _ in range(4):
        state, values = step(state, batch)
        again.append(float(values["loss"]))
    assert again == losses


def test_the_former_key_is_refused_with_its_successor():
    with pytest.raises(UserError, match=r"optimizer\.every: was replaced by train\.accumulate=N"):
        read_section({"steps": 4, "optimizer": {"name": "adam", "every": 2}})
