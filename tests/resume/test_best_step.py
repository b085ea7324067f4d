"""The best step of a run: its checkpoint is kept, its weights are in the folder `best`."""

import jax
import numpy as np
import pytest
import tiny_run
from test_training_resume import assert_same_run, curve, run, weights

from mmqa_jax.training.best_weights import read_best
from mmqa_jax.training.state import Validation
from mmqa_jax.weights.record import read_metadata


def checkpoints(workdir):
    names = [folder.name for folder in (workdir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())  # others are unfinished


def best_arrays(workdir):
    return {name: np.asarray(x) for name, x in weights(workdir / "best").items()}


def test_the_best_step_is_kept_beside_the_last(judged):
    workdir, seen = judged
    means = {row["step"]: row["eval/mean"] for row in curve(workdir) if "eval/mean" in row}
    assert max(means, key=means.get) == 30
    assert checkpoints(workdir) == [30, 50, 60]  # the best and the latest two
    for name, value in best_arrays(workdir).items():
        np.testing.assert_array_equal(value, seen[30][name])
        np.testing.assert_array_equal(weights(workdir)[name], seen[60][name])
    found = read_best(workdir)
    assert found == {
        "step": 30, "metric": "mean", "value": means[30], "weights": str(workdir / "best")
    }  # fmt: skip


def test_only_validation_without_a_metric_keeps_no_best(tmp_path):
    run(tmp_path, tiny_run.pipeline(1), steps=4, checkpoint_every=2, evaluate_every=2, keep=1)
    assert read_best(tmp_path) is None
    assert not (tmp_path / "best").exists()
    assert checkpoints(tmp_path) == [4]


def test_nothing_is_evaluated_where_evaluate_every_is_0(tmp_path):
    def evaluate(model):
        raise AssertionError("evaluated")

    never = Validation(evaluate, "mean")
    run(tmp_path, tiny_run.pipeline(1), steps=2, evaluate_every=0, validation=never)
    assert not any("eval/mean" in row for row in curve(tmp_path))


def test_killed_runs_have_the_best_step_of_an_uninterrupted_one(tmp_path, judged, killed_run):
    reference, _ = judged
    killed_run(tmp_path, "in_evaluation", 1)  # step 15: no row is written, nothing is saved
    assert 15 not in checkpoints(tmp_path)
    assert not any("eval/mean" in row for row in curve(tmp_path))
    killed_run(tmp_path, "before_best", 2)  # step 30 is saved, the folder is still step 15's
    assert checkpoints(tmp_path) == [20, 30]
    assert read_metadata(tmp_path / "best")["step"] == 15
    # The next attempt begins with writing step 30's weights; this one dies where none are there.
    killed_run(tmp_path, "between_renames", 1)
    assert not (tmp_path / "best").exists()
    run(tmp_path, validation=tiny_run.KEEP_BEST)
    assert_same_run(tmp_path, reference)
    assert read_metadata(tmp_path / "best") == read_metadata(reference / "best")
    jax.tree.map(np.testing.assert_array_equal, best_arrays(tmp_path), best_arrays(reference))
    assert checkpoints(tmp_path) == checkpoints(reference)
    assert not list(tmp_path.glob(".best*"))


def test_the_first_of_the_finite_best_values_is_there_before_the_run_ends(tmp_path):
    """A run that is stopped because its validation no longer rises leaves what it was stopped for."""
    values = [float("nan"), 0.25, 0.25, float("inf")]
    left, seen = iter(values), []

    def evaluate(model):
        seen.append(np.array(model.first.kernel[...]))
        return {"odd": next(left)}

    stop = tiny_run.Watched(tiny_run.pipeline(1), 9, tiny_run.raise_signal(15))
    with pytest.raises(SystemExit):
        run(tmp_path, stop, evaluate_every=2, keep=1, validation=Validation(evaluate, "odd"))
    assert not (tmp_path / "model.json").exists()
    assert read_best(tmp_path)["step"] == 4  # of two that are equal
    assert checkpoints(tmp_path) == [4, 9]
    np.testing.assert_array_equal(best_arrays(tmp_path)["first/kernel"], seen[1])
    assert (seen[1] != seen[2]).any()
    rows = [row for row in curve(tmp_path) if "eval/odd" in row]
    assert [row["eval/odd"] for row in rows] == [None, 0.25, 0.25, None]
