"""What happens to a run when its data, its disk or its evaluation goes wrong."""

import multiprocessing
import resource
import signal

import numpy as np
import pytest
import tiny_run
from test_training_resume import assert_same_run, curve, run, weights

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.batches.feed import FeedConfig, feed_batches
from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.training.state import Validation
from tests.refusals import refuses


def spoiled(*steps):
    """The pipeline, with rows that give a loss of NaN in the batches of these steps."""
    batches = tiny_run.pipeline(1)
    for step in steps:
        batches = tiny_run.Watched(
            batches, step, lambda batch: {**batch, "y": batch["y"] * np.float32("nan")}
        )
    return batches


def params_of(model):
    named = flatten_named(tiny_run.nnx.state(model, tiny_run.nnx.Param))
    return {name: np.array(leaf) for name, leaf in named.items()}


def test_a_skipped_step_changes_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("MMQA_PROGRESS")
    seen = []

    def evaluate(model):
        seen.append(params_of(model))
        return {"mean": 0.0}

    run(
        tmp_path, spoiled(4), steps=6, log_every=1, evaluate_every=1, checkpoint_every=4,
        on_nan="skip", validation=Validation(evaluate),
    )  # fmt: skip
    for name, after in seen[3].items():
        np.testing.assert_array_equal(after, seen[2][name])
        assert (seen[4][name] != after).any()
    rows = {row["step"]: row for row in curve(tmp_path) if "eval/mean" not in row}
    assert rows[4] == {"step": 4, "skipped_steps": 1}  # no means: it had one step only
    assert np.isfinite([rows[step]["loss"] for step in rows if step != 4]).all()
    printed = " ".join(capfd.readouterr().err.split())
    assert "step 4: loss is nan on the batch with index" in printed
    assert "skipped (1 of at most 10)" in printed


def test_only_so_many_steps_are_skipped_and_resuming_counts_on(tmp_path):
    skip = {"on_nan": "skip", "skip_at_most": 2}
    stop = tiny_run.Watched(spoiled(3, 8), 9, tiny_run.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        run(tmp_path / "resumed", stop, **skip)
    with pytest.raises(RunError, match=r"step 13: .*3 steps were skipped.* step 10"):
        run(tmp_path / "resumed", spoiled(4), **skip)
    refuses(r"train\.on_nan='ignore'", run, tmp_path / "typo", on_nan="ignore")


def worker_batches(workers):
    """Batches of the examples, made by so many processes."""

    def make(planned, table):
        examples = [tiny_run.example(index) for index in table["example"]]
        return {name: np.stack([one[name] for one in examples]) for name in examples[0]}

    count = tiny_run.EXAMPLES
    table = {"example": np.arange(count), "bucket": np.zeros(count, int)}
    feed = FeedConfig(tiny_run.BATCH, seed=3, threads=1, workers=workers)
    return feed_batches(lambda epoch: table, [Bucket(0, 8)], make, feed)


def test_a_dead_worker_ends_the_run_and_loses_nothing(tmp_path):
    run(tmp_path / "undisturbed", worker_batches(0), steps=30)

    def kill(batch):
        for worker in multiprocessing.active_children():
            worker.kill()

    batches = tiny_run.Watched(worker_batches(1), 13, kill)
    message = r"batch \d+: the worker process that makes it has died \(exit code -9, killed, "
    refuses(message, run, tmp_path / "killed", batches, steps=30, error=RunError)
    folders = (tmp_path / "killed" / "checkpoints").iterdir()
    assert max(int(path.name) for path in folders if path.name.isdigit()) in (10, 20)
    run(tmp_path / "killed", worker_batches(0), steps=30)
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")


def test_a_full_disk_is_named_and_loses_nothing(tmp_path, uninterrupted):
    """The size of files is limited in the middle of a run, as a full disk or a quota would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(batch):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))

    try:
        with pytest.raises(RunError, match=r"cannot be written, .*may not grow.*ulimit"):
            run(tmp_path, tiny_run.Watched(tiny_run.pipeline(), 28, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


def test_sigterm_in_an_evaluation_ends_it_and_saves(tmp_path, uninterrupted, capsys):
    count = 0

    def evaluate(model):
        nonlocal count
        count += 1
        if count == 2:
            tiny_run.raise_signal(signal.SIGTERM)(None)
        return tiny_run.evaluate(model)

    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, validation=Validation(evaluate))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert "stopped after step 30 and saved" in capsys.readouterr().err
    assert [row["step"] for row in curve(tmp_path) if "eval/mean" in row] == [15, 30]
    run(tmp_path)
    assert_same_run(tmp_path, uninterrupted)
    assert weights(tmp_path).keys() == weights(uninterrupted).keys()
