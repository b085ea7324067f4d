"""A run that goes on with other options: those that change no step's numbers, or more steps."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from flax import nnx
from test_training_resume import curve

from mmqa_jax.core.config import config_fingerprint
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.models.common.layers import Linear, scan_layers, stack_layers
from mmqa_jax.training.loop import Resuming
from mmqa_jax.training.optimizer import OptimizerOptions, make_schedule
from mmqa_jax.weights.formats.orbax_reader import read_weights, stored_specs
from tests.refusals import refuses

CONSTANT = {"name": "adamw", "learning_rate": 0.01, "schedule": "constant", "warmup": 0}


def losses(workdir):
    return {row["step"]: row["loss"] for row in curve(workdir) if "loss" in row}


def stop_at(workdir, step, **changes):
    batches = tiny_run.Watched(tiny_run.pipeline(1), step, tiny_run.raise_signal(15))
    with pytest.raises(SystemExit):
        tiny_run.run(workdir, batches, **changes)


def test_what_changes_no_step_may_change(tmp_path):
    stop_at(tmp_path / "ours", 11, steps=20, log_every=1)
    others = {"checkpoint_every": 7, "evaluate_every": 5, "keep": 4, "log_every": 1}
    others |= {"on_nan": "skip", "skip_at_most": 3}
    tiny_run.run(tmp_path / "ours", tiny_run.pipeline(1), steps=20, **others)
    tiny_run.run(tmp_path / "theirs", tiny_run.pipeline(1), steps=20, log_every=1)
    assert losses(tmp_path / "ours") == losses(tmp_path / "theirs")
    kept = {path.name for path in (tmp_path / "ours" / "checkpoints").iterdir()}
    assert kept == {"10", "11", "14", "20"}


HELD = {
    "precision": {"parameters": "bfloat16", "moments": "bfloat16", "gradients": "bfloat16"},
    "ema": 0.9,
    "offload": "optimizer",
}


class Stacked(tiny_run.Regression):
    """Two layers more, in a stack, which may lie on the host."""

    def init(self, key):
        size, model = tiny_run.HIDDEN, tiny_run.MLP(key)
        rngs, names = nnx.Rngs(key), ("embed", "mlp")
        layers = stack_layers(lambda r: Linear(size, size, names, rngs=r), 2, rngs)
        model.second = Deep(model.second, layers)
        return model


class Deep(nnx.Module):
    def __init__(self, last, layers):
        self.last, self.layers = last, layers

    def __call__(self, x):
        return self.last(scan_layers(self.layers, x, lambda layer, x, *_: (x + layer(x), None))[0])


@pytest.mark.parametrize(
    ("task", "offload"), [(tiny_run.REGRESSION, "optimizer"), (Stacked(), "parameters")]
)
def test_a_run_in_bfloat16_with_an_average_resumes_to_the_bit(tmp_path, task, offload):
    """The best step's weights are the average, also where a kill came before they were written."""
    options = {"steps": 20, "log_every": 1, "validation": tiny_run.KEEP_BEST, "task": task}
    held = HELD | {"offload": offload}
    stop_at(tmp_path / "ours", 11, **options, **held)
    shutil.rmtree(tmp_path / "ours" / "best", ignore_errors=True)
    # Where state lies is no part of the experiment.
    ours = tiny_run.run(
        tmp_path / "ours", tiny_run.pipeline(1), **options, **held | {"offload": ""}
    )
    theirs = tiny_run.run(tmp_path / "theirs", tiny_run.pipeline(1), **options, **held)
    assert losses(tmp_path / "ours") == losses(tmp_path / "theirs")
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)
    for place in ("weights", "best/weights"):
        stored = [stored_specs(tmp_path / run / place) for run in ("ours", "theirs")]
        got, want = (read_weights(tmp_path / run / place, specs)
                     for run, specs in zip(("ours", "theirs"), stored, strict=True))  # fmt: skip
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=f"{place} {name}")
    for name, value in flatten_named(theirs).items():
        np.testing.assert_array_equal(read_weights(
            tmp_path / "theirs" / "weights", stored_specs(tmp_path / "theirs" / "weights"))[name],
            value)  # fmt: skip
    changed = HELD | {"precision": HELD["precision"] | {"moments": "float32"}}
    with pytest.raises(UserError, match=r"checkpoints/20: is a checkpoint of another config"):
        tiny_run.run(tmp_path / "ours", tiny_run.pipeline(1), **options, **changed)


def test_more_steps_of_a_constant_schedule_are_those_of_a_longer_run(tmp_path):
    tiny_run.run(tmp_path / "ours", tiny_run.pipeline(1), steps=8, log_every=1, optimizer=CONSTANT)
    for workdir in ("ours", "theirs"):
        tiny_run.run(
            tmp_path / workdir, tiny_run.pipeline(1), steps=16, log_every=1, optimizer=CONSTANT
        )
    assert losses(tmp_path / "ours") == losses(tmp_path / "theirs")
    assert len(losses(tmp_path / "ours")) == 16
    with pytest.raises(UserError, match=r"train\.steps=12: the run has taken 16 steps"):
        tiny_run.run(tmp_path / "ours", tiny_run.pipeline(1), steps=12, optimizer=CONSTANT)


def test_a_schedule_is_stretched_only_with_the_flag(tmp_path):
    tiny_run.run(tmp_path, tiny_run.pipeline(1), steps=10, log_every=1)
    with pytest.raises(
        UserError, match=r"train\.steps=20: .* with 10, .*add --stretch_schedule .*11 on"
    ):
        tiny_run.run(tmp_path, tiny_run.pipeline(1), steps=20, log_every=1)
    stretched = Resuming(stretch_schedule=True)
    stop = tiny_run.Watched(tiny_run.pipeline(1), 5, tiny_run.raise_signal(15))
    with pytest.raises(SystemExit):
        tiny_run.run(tmp_path, stop, steps=20, log_every=1, resuming=stretched)
    tiny_run.run(tmp_path, tiny_run.pipeline(1), steps=20, log_every=1)  # from now on it has 20
    options = tiny_run.train_config().optimizer.to_dict()
    rates = [
        rate
        for total, steps in ((10, range(10)), (20, range(10, 20)))
        for rate in jax.jit(make_schedule(OptimizerOptions(**options), total))(np.array(steps))
    ]
    found = [row["learning_rate"] for row in curve(tmp_path) if "learning_rate" in row]
    assert found == pytest.approx([float(rate) for rate in rates], rel=1e-6)


def test_checkpoints_of_older_versions_go_on(tmp_path):
    """Their fingerprint is of the whole section `train`, and they name no number of steps."""
    stop_at(tmp_path, 12, steps=20)
    old = tiny_run.train_config(steps=20).to_dict()
    (folder,) = (tmp_path / "checkpoints").glob("12")
    meta = json.loads((folder / "meta" / "metadata").read_text())
    del meta["steps"]
    meta["fingerprint"] = config_fingerprint({"train": old, "seed": 7, "model": {}})
    (folder / "meta" / "metadata").write_text(json.dumps(meta))
    (folder / "SHA256SUMS").unlink()
    changed = {"steps": 20, "log_every": 5}
    with pytest.raises(UserError, match=r"checkpoints/12: is a checkpoint of another config"):
        tiny_run.run(tmp_path, tiny_run.pipeline(1), **changed)  # nobody says what it was before
    tiny_run.run(tmp_path, tiny_run.pipeline(1), resuming=Resuming(former=old), **changed)
    assert [row["step"] for row in curve(tmp_path) if "loss" in row] == [4, 8, 12, 15, 20]


def test_config_json_keeps_what_changed(tmp_path):
    one = {"mesh": {"data": 2}, "train": {"steps": 4, "rate": 0.5}}
    other = {"mesh": {"data": 1}, "train": {"steps": 9, "rate": 0.5}}
    with Workdir(tmp_path) as workdir:
        workdir.claim(one)
        assert workdir.claim(other, free={"mesh", "train.steps"})
        workdir.record_changes(4)
        workdir.record_changes(6)
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["config"] == other
    (change,) = record["changes"]
    assert change["step"] == 4
    assert change["date"].startswith("20")
    assert change["changed"] == {"mesh.data": [2, 1], "train.steps": [4, 9]}
    with Workdir(tmp_path) as workdir:
        assert workdir.claim(other)
        refuses(r"train\.steps \(9 there, 4 now\)", workdir.claim, one, free={"mesh", "train"[:-1]})


def test_a_damaged_config_json_is_named(tmp_path):
    with Workdir(tmp_path) as workdir:
        workdir.claim({"seed": 10})
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("10", "18", 1))
    with Workdir(tmp_path) as workdir, pytest.raises(UserError, match=r"config\.json: is damaged"):
        workdir.claim({"seed": 10})
