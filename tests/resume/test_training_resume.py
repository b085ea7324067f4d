"""A training run that is killed, stopped or spoiled and started again."""

import json
import shutil
import signal

import grain
import jax
import numpy as np
import pytest
import tiny_run
from flax import nnx

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.training import loop
from mmqa_jax.training.attempts import read_attempts
from mmqa_jax.training.loop import CLOCK_COLUMNS
from mmqa_jax.weights.folder import load_weights, save_trained
from mmqa_jax.weights.record import read_metadata
from tests.refusals import refuses


def run(workdir, batches=None, **changes):
    """One attempt in this process."""
    return tiny_run.run(workdir, batches or tiny_run.pipeline(), **changes)


def abstract_params():
    return nnx.state(nnx.eval_shape(lambda: tiny_run.MLP(jax.random.key(0))), nnx.Param)


def weights(workdir):
    """The arrays of a weights folder by name."""
    params = load_weights(workdir, abstract_params())
    return {name: np.asarray(leaf) for name, leaf in flatten_named(params).items()}


def curve(workdir):
    """The rows of metrics.jsonl without what a clock gave."""
    rows = read_metrics(workdir)
    return [{k: v for k, v in row.items() if k not in ("time", *CLOCK_COLUMNS)} for row in rows]


def assert_same_run(workdir, reference):
    ours, theirs = weights(workdir), weights(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert curve(workdir) == curve(reference)


def test_it_learns_and_logs_every_row_once(uninterrupted):
    rows = curve(uninterrupted)
    trained = [row for row in rows if "loss" in row]
    assert {row["one"] for row in trained} == {1.0}  # means of as many steps as were added
    assert [row["step"] for row in trained] == list(range(4, 61, 4))
    assert trained[-1]["loss"] < 0.5 * trained[0]["loss"]
    assert [row["step"] for row in rows if "eval/mean" in row] == [15, 30, 45, 60]
    assert read_metadata(uninterrupted)["step"] == 60


def test_nothing_is_compiled_after_each_shape_was_seen(tmp_path):
    compiled, seen = [], {}

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def note(name):
        return lambda batch: seen.update({name: len(compiled)})

    jax.monitoring.register_event_duration_secs_listener(listen)
    batches = tiny_run.Watched(tiny_run.pipeline(), 3, note("after both shapes"))
    batches = tiny_run.Watched(batches, 12, note("at the end"))
    run(tmp_path, batches, task=tiny_run.Regression(), steps=12)
    assert seen["after both shapes"] >= 2
    assert seen["at the end"] == seen["after both shapes"]


def test_killed_runs_end_equal_to_an_uninterrupted_one(tmp_path, uninterrupted, killed_run):
    killed_run(tmp_path, "at_batch", 7)  # before the first checkpoint
    assert not any((tmp_path / "checkpoints").iterdir())
    killed_run(tmp_path, "in_save", 20)  # goes on from 10, within a window of metrics
    newest = max(int(folder.name) for folder in (tmp_path / "checkpoints").glob("[0-9][0-9]"))
    assert newest == 10
    refuses("run the training to its end", weights, tmp_path)
    run(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("batch", [19, 20])  # between two local ones, and while one is written
def test_a_run_resumes_from_the_hosts_own_disk(
    tmp_path, uninterrupted, killed_run, monkeypatch, batch
):
    """Equal to an uninterrupted one, from a step that the workdir does not have."""
    monkeypatch.setenv("MMQA_LOCAL_CHECKPOINTS", str(tmp_path / "disk"))
    every = {"checkpoint_every": 50, "checkpoint_local_every": 3}
    killed_run(tmp_path / "run", "at_batch", batch, json.dumps(every))
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    run(tmp_path / "run", **every)
    starts = [row["step"] for row in read_attempts(tmp_path / "run") if row["event"] == "start"]
    assert starts in ([0, 15], [0, 18])
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_goes_on_on_another_mesh(tmp_path, uninterrupted, attempt):
    with pytest.raises(SystemExit):
        run(tmp_path, tiny_run.Watched(tiny_run.pipeline(), 33, tiny_run.raise_signal(15)))
    ended = attempt(tmp_path, "on_mesh", 0, devices=4)
    assert ended.code == 0, ended.said
    assert "'tensor'" in ended.said  # the weights were indeed split
    for name, value in weights(uninterrupted).items():
        np.testing.assert_allclose(weights(tmp_path)[name], value, atol=2e-5, err_msg=name)
    # The rows of both parts: same steps, same losses but for the order of the sums.
    for ours, theirs in zip(curve(tmp_path), curve(uninterrupted), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_nohup_outlives_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        batches = tiny_run.Watched(tiny_run.pipeline(1), 3, tiny_run.raise_signal(signal.SIGHUP))
        run(tmp_path, batches, steps=8)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "model.json").exists()


def stop_by(number, workdir, capsys, step):
    """A run that a signal stops between two checkpoints."""
    batches = tiny_run.Watched(tiny_run.pipeline(), step, tiny_run.raise_signal(number))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        run(workdir, batches)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert f"stopped after step {step} and saved" in capsys.readouterr().err
    assert (workdir / "checkpoints" / str(step)).is_dir()
    assert not (workdir / "model.json").exists()  # unfinished weights are not offered as final


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_saves_and_says_so(tmp_path, capsys, number):
    stop_by(number, tmp_path, capsys, 3)


def test_a_stopped_run_ends_equal_to_an_uninterrupted_one(tmp_path, uninterrupted, capsys):
    stop_by(signal.SIGTERM, tmp_path, capsys, 33)
    run(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(tmp_path):
    spoiled = []

    def spoil(batch):
        spoiled.extend(batch["index"].tolist())
        return {**batch, "y": batch["y"] * np.float32("nan")}

    batches = tiny_run.Watched(tiny_run.pipeline(1), 20, spoil)
    with pytest.raises(RunError, match=r"step 20: loss is nan on the batch with index ") as error:
        run(tmp_path, batches, log_every=100)  # step 20 is also one to save at
    named = str(error.value).split("index ")[1].split(";")[0].split(", ")
    assert [int(index) for index in named] == spoiled
    assert "the last good checkpoint is step 10" in str(error.value)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["10"]


def test_pretrained_weights_start_a_run_but_not_its_resumption(tmp_path):
    loads = []

    def load(model):
        loads.append(True)
        model.first.kernel.set_value(np.full((5, 16), 0.5, np.float32))

    still = {"name": "adam", "learning_rate": 1e-12, "schedule": "constant", "warmup": 0}
    options = {"steps": 4, "load_pretrained": load, "optimizer": still}
    options["metadata"] = {"name": "mlp"}
    stop = tiny_run.Watched(tiny_run.pipeline(1), 2, tiny_run.raise_signal(15))
    with pytest.raises(SystemExit):
        run(tmp_path, stop, **options)
    params = run(tmp_path, tiny_run.pipeline(1), **options)
    assert loads == [True]
    assert read_metadata(tmp_path)["name"] == "mlp"
    np.testing.assert_allclose(params["first"]["kernel"][...], 0.5, atol=1e-6)
    assert np.ptp(params["second"]["kernel"][...]) > 0.1  # the rest is the task's own start


def test_restart_of_a_finished_run_trains_no_more(tmp_path, uninterrupted):
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    unfinished = workdir / "checkpoints" / "50.orbax-checkpoint-tmp"  # a kill in its save left it
    unfinished.mkdir()
    task = tiny_run.Regression()
    again = run(workdir, task=task, validation=tiny_run.KEEP_BEST)
    assert task.traces == 0
    assert not unfinished.exists()
    for name, leaf in flatten_named(again).items():
        np.testing.assert_array_equal(leaf, weights(uninterrupted)[name])
    assert_same_run(workdir, uninterrupted)


def test_a_checkpoint_of_another_config_is_refused(tmp_path, uninterrupted):
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    refuses(r"checkpoints/60: is a checkpoint of another config", run, workdir, accumulate=2)


def test_weights_of_another_model_are_refused_with_their_keys(tmp_path, uninterrupted):
    wider = nnx.eval_shape(lambda: nnx.Linear(5, 16, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"another model .*bias is missing; kernel is missing"):
        load_weights(uninterrupted, nnx.state(wider, nnx.Param))
    shrunk = abstract_params()
    shrunk["first"]["kernel"].set_value(jax.ShapeDtypeStruct((4, 16), np.float32))
    with pytest.raises(UserError, match=r"first/kernel is \[5, 16\], the model's is \[4, 16\]"):
        load_weights(uninterrupted, shrunk)
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        load_weights(tmp_path / "nowhere", abstract_params())


def test_accumulation_takes_the_same_step_as_the_whole_batch(tmp_path):
    class NoDropout(tiny_run.Regression):
        def loss(self, model, batch, dropout_key):
            error = model(batch["x"]) - batch["y"]
            return (error**2).mean(), {}

    rows = []
    for name, batches, accumulate in (
        ("whole", tiny_run.pipeline(1), 1),
        ("parts", tiny_run.pipeline(1, tiny_run.BATCH // 4), 4),
    ):
        params = run(
            tmp_path / name, batches, task=NoDropout(), steps=5, accumulate=accumulate,
            log_every=1, evaluate_every=0, checkpoint_every=0,
        )  # fmt: skip
        rows.append((flatten_named(params), read_metrics(tmp_path / name)))
    (whole, of_whole), (parts, of_parts) = rows
    for name, leaf in parts.items():
        np.testing.assert_allclose(leaf, whole[name], atol=1e-6, err_msg=name)
    assert [row["step"] for row in of_parts] == [1, 2, 3, 4, 5]
    for one, other in zip(of_whole, of_parts, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            np.testing.assert_allclose(other[name], one[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("parts", [1, 2])
def test_every_step_and_part_has_a_dropout_key_of_its_own(tmp_path, parts):
    """A run that resumes has the same ones."""

    class Drawn(tiny_run.Regression):
        def loss(self, model, batch, dropout_key):
            loss, _ = super().loss(model, batch, dropout_key)
            drawn = jax.random.uniform(dropout_key)
            return loss, {"drawn": drawn, "square": drawn**2}

    def drawn(name, stop=None):
        batches = tiny_run.pipeline(1, tiny_run.BATCH // parts)
        batches = batches if stop is None else tiny_run.Watched(batches, *stop)
        run(
            tmp_path / name, batches, task=Drawn(), steps=6, accumulate=parts,
            log_every=1, evaluate_every=0, checkpoint_every=3,
        )  # fmt: skip
        return [(row["drawn"], row["square"]) for row in read_metrics(tmp_path / name)]

    whole = drawn("whole")
    assert len(set(whole)) == 6
    between_parts = sum(square - mean**2 for mean, square in whole)
    assert (between_parts > 0.01) == (parts > 1)
    with pytest.raises(SystemExit):
        drawn("resumed", (3 * parts, tiny_run.raise_signal(15)))
    assert drawn("resumed") == whole


def test_a_run_of_updates_in_parts_resumes_where_it_stopped(tmp_path):
    """The signal comes while the first part of the fourth update is read; that update is ended."""
    options = {"steps": 6, "accumulate": 2, "checkpoint_every": 5, "evaluate_every": 0}
    rows = tiny_run.BATCH // 2
    whole = run(tmp_path / "whole", tiny_run.pipeline(1, rows), **options)
    stopped = tiny_run.Watched(tiny_run.pipeline(1, rows), 7, tiny_run.raise_signal(15))
    with pytest.raises(SystemExit):
        run(tmp_path / "parts", stopped, **options)
    assert stopped.count == 8
    parts = run(tmp_path / "parts", tiny_run.pipeline(1, rows), **options)
    for name, leaf in flatten_named(whole).items():
        np.testing.assert_array_equal(flatten_named(parts)[name], leaf, err_msg=name)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_lost_tokens_are_said_once_and_counted_in_every_step(tmp_path, monkeypatch):
    """Two parts of two rows each an update; the first part of every second update loses tokens."""
    said = []
    monkeypatch.setattr(loop, "announce", said.append)
    lost = [[0, 0], [0, 0], [5, 0], [2, 1], [0, 0], [0, 0], [7, 0], [0, 0]]

    def with_lost(i, batch):
        return {**batch, "truncated": np.array(lost[i % len(lost)], np.int32)}

    source = grain.MapDataset.range(16).map(tiny_run.example).batch(2).map_with_index(with_lost)
    batches = iter(source.to_iter_dataset())
    run(
        tmp_path, batches, steps=4, accumulate=2, log_every=1, evaluate_every=0,
        limits=("batches.length",),
    )  # fmt: skip
    assert [row["truncated"] for row in read_metrics(tmp_path)] == [0, 8, 0, 7]
    (line,) = [one for one in said if "lose" in one]
    assert line.startswith("step 2: 1 of 2 examples lose 5 tokens that do not fit; raise batches.l")


def test_data_that_ends_and_bad_values_are_named(tmp_path):
    refuses(r"train\.log_every=0: at least 1 was expected", run, tmp_path, log_every=0)
    with pytest.raises(UserError, match=r"optimizer\.learning_rat: .*mean 'learning_rate'"):
        run(tmp_path, optimizer={"learning_rat": 0.1})
    few = iter(grain.MapDataset.source([next(tiny_run.pipeline())]).to_iter_dataset())
    refuses("step 2: the data ended before the last", run, tmp_path / "few", few, error=RunError)


def test_saved_weights_are_replaced_whole(tmp_path):
    save_trained(tmp_path, None, {"a": np.ones(3, np.float32)}, {"name": "first"})
    save_trained(tmp_path, None, {"b": np.zeros(2, np.float32)}, {"name": "second"})
    loaded = load_weights(tmp_path, {"b": jax.ShapeDtypeStruct((2,), np.float32)})
    np.testing.assert_array_equal(loaded["b"], np.zeros(2))
    assert read_metadata(tmp_path) == {"name": "second"}
