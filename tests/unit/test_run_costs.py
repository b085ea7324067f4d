"""What is recorded of a training run besides its losses: time, work, goodput, W&B, status."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_runs import mmqa

from mmqa_jax.core import host
from mmqa_jax.core.chips import GIB, TPUS
from mmqa_jax.core.flops import jaxpr_flops, traced_flops
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.metrics import MetricsWriter, check_wandb, read_metrics
from mmqa_jax.models.vlp.atlas_reader import ProbedInputs
from mmqa_jax.runs.status import training_status
from mmqa_jax.training import loop
from mmqa_jax.training.attempts import FILE, PHASES, Attempts, TimeSplit, goodput, read_attempts
from mmqa_jax.training.loop import CLOCK_COLUMNS, Throughput, parse_steps, tokens_of
from mmqa_jax.training.optimizer import OptimizerOptions
from tests.refusals import refuses


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_phases_add_up_to_the_wall_time():
    clock = Clock()
    split = TimeSplit(clock)
    windows = []
    for _ in range(2):
        for phase, seconds in (("input", 1.0), ("compute", 3.0), ("input", 0.5), ("evaluate", 7.0)):
            clock.now += seconds
            split.lap(phase)
        windows.append(split.take())
        clock.now += 2.0  # before the next lap: belongs to the next window
    expected = {"input": 1.5, "compile": 0, "compute": 3.0, "checkpoint": 0, "evaluate": 7.0}
    assert windows[0] == expected
    assert windows[1] == {**expected, "input": 3.5}
    assert sum(split.total.values()) == pytest.approx(clock.now - 2.0 - 100.0)
    assert {f"{phase}_seconds" for phase in PHASES} <= set(CLOCK_COLUMNS)


class Flying:
    """The loss of a step that is computed, or not yet."""

    def __init__(self, ready):
        self._ready = ready

    def is_ready(self):
        return self._ready

    def block_until_ready(self):
        self._ready = True


def test_a_wait_behind_a_step_is_no_wait_for_input(monkeypatch):
    """Reading a batch takes a second; so does the first program of a shape, to compile."""
    clock = Clock()

    class Batches:
        def __next__(self):
            clock.now += 1.0
            return {"index": np.arange(4), "x": np.ones((4, 2), np.float32)}

    class Step:
        mesh = make_mesh(devices=jax.devices()[:1])

        def model_flops(self, state, batch):
            clock.now += 1.0
            return 0.0

    monkeypatch.setattr(loop, "TimeSplit", lambda: TimeSplit(clock))
    quiet = types.SimpleNamespace(
        **dict.fromkeys(("beat", "advance", "check"), lambda *_, **__: None)
    )
    outputs = loop._Outputs(None, None, None, quiet, quiet, quiet)
    options = loop.LoopOptions(steps=9, optimizer=OptimizerOptions("adam", 0.1))
    run = loop._Run(options, outputs, Step(), Batches(), {"sums": {}, "count": 0}, 0, ())
    found = []
    for step, ready in enumerate((False, False, True, False), start=1):
        batch = run.read(step, None)
        assert batch.keys() == {"x"}
        run.dispatched(step, {"loss": Flying(ready)})
        found.append((run._split.total["input"], run._split.total["compute"]))
    # Nothing in flight; a step in flight, twice; the last one is computed.
    assert found == [(1, 0), (1, 1), (1, 2), (2, 2)]
    assert run._split.total["compile"] == 1.0


def test_tokens_are_counted_without_padding():
    def mask(rows, used, columns=8):
        return np.arange(columns)[None] < np.full((rows, 1), used)

    assert (
        tokens_of({"query_mask": mask(4, 3), "source_mask": mask(8, 5), "has_image": mask(8, 1)})
        == 52
    )
    vlp = ProbedInputs(
        input_ids=np.ones((2, 8), int), token_type_ids=np.ones((2, 8), int),
        position_ids=np.ones((2, 8), int), context_mask=mask(2, 4),
        answer_mask=mask(2, 6) & ~mask(2, 4), region_features=np.ones((2, 1, 3)),
        region_positions=np.ones((2, 1, 3)), probe_mask=mask(2, 2),
    )  # fmt: skip
    assert tokens_of({"inputs": vlp, "labels": np.ones(2)}) == 12
    packed = np.array([[1, 1, 2, 2, 0], [1, 0, 0, 0, 0]])
    assert tokens_of({"segments": packed, "input_ids": packed}) == 5
    assert tokens_of({"x": np.ones((4, 5)), "index": np.arange(4)}) == 0


def test_what_the_backward_pass_computes_again_is_no_work_of_the_model():
    layers, batch, width = 3, 4, 16
    shapes = (
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        jax.ShapeDtypeStruct((batch, width), jnp.float32),
    )

    def loss(remat):
        def layer(x, kernel):
            return jnp.tanh(jnp.tanh(x @ kernel) @ kernel), None

        body = jax.checkpoint(layer) if remat else layer
        return lambda kernels, x: jax.lax.scan(body, x, kernels)[0].sum()

    product = 2 * batch * width * width
    plain = traced_flops(jax.grad(loss(False)), *shapes)
    assert plain == 2 * layers * 3 * product
    again = jax.make_jaxpr(jax.grad(loss(True)))(*shapes).jaxpr
    assert jaxpr_flops(again) > plain
    assert jaxpr_flops(again, recomputed=False) == plain


class CountedStep:
    """A step of a known number of FLOPs."""

    calls = 0

    def model_flops(self, state, batch):
        self.calls += 1
        return 4e9 * batch["query"].shape[1]


def counted(step):
    found = Throughput(make_mesh(devices=jax.devices()[:1]), step)
    batch = {"query": np.ones((4, 2)), "source": np.ones((12, 2)), "mask": np.ones((4, 2), bool)}
    wider = {**batch, "query": np.ones((4, 3))}
    return found, [found.count(one, None, one) for one in (batch, wider, batch)]


SECONDS = {"input": 1.0, "compile": 0.0, "compute": 3.0, "checkpoint": 5.0, "evaluate": 9.0}


def test_rates_are_over_the_time_of_steps():
    """A program is new, and will be compiled, at the first batch of its shape."""
    step = CountedStep()
    found, new = counted(step)
    assert new == [True, True, False]
    assert step.calls == 2
    row = found.columns(SECONDS)
    assert row["input_seconds"] == 1.0
    assert "compile_seconds" not in row
    assert row["examples_per_second"] == 12 / 4.0
    assert row["tokens_per_second"] == 24 / 4.0
    assert row["tflops_per_second"] == pytest.approx((8 + 12 + 8) * 1e9 / 4.0 / 1e12)
    assert not {"mfu", "mfu_measured", "hbm_gib"} & row.keys()  # of a CPU, within the first minute
    assert set(row) <= set(CLOCK_COLUMNS)
    assert "examples_per_second" not in found.columns(SECONDS)  # an empty window


class Chip:
    """One of two v5e."""

    device_kind, platform = "TPU v5e", "tpu"

    def memory_stats(self):
        return {"peak_bytes_in_use": 3 * GIB, "bytes_in_use": GIB}


def test_mfu_against_the_data_sheet_and_against_what_was_measured(monkeypatch):
    monkeypatch.setattr(loop, "matmul_peak", lambda device: 1e12)
    for name, blocks in (("local_blocks", (0,)), ("batch_blocks", 2)):  # one of two hosts
        monkeypatch.setattr(loop, name, lambda mesh, blocks=blocks: blocks)
    mesh = types.SimpleNamespace(size=2, local_devices=[Chip()])
    found = Throughput(mesh, CountedStep(), measure_after=4.0)
    rows = []
    for _ in range(2):
        whole = {"query": np.ones((4, 2))}
        found.count({"query": np.ones((2, 2)), "mask": np.ones((2, 2), bool)}, None, whole)
        rows.append(found.columns(SECONDS))
    assert TPUS["v5e"].peak == 197e12
    assert rows[0]["mfu"] == pytest.approx(8e9 / 4.0 / (2 * 197e12))
    assert rows[0]["tokens_per_second"] == 8 / 4.0  # the other host's rows are estimated
    assert rows[0]["hbm_gib"] == 3.0
    assert "mfu_measured" not in rows[0]  # three seconds were computed
    assert rows[1]["mfu_measured"] == pytest.approx(8e9 / 4.0 / 2e12)


def test_the_measured_peak_is_that_of_a_product():
    """The same for all runs of a process."""
    device = jax.devices()[0]
    peak = host.matmul_peak(device)
    assert 0 < peak < 1e15
    assert host.matmul_peak(device) == peak


def attempt(*rows):
    """Rows (event, time, step, elapsed, compute, checkpoint)."""
    return [
        {
            "event": event, "time": at, "step": step, "elapsed": elapsed,
            "seconds": {"compute": compute, "checkpoint": checkpoint} if event != "start" else {},
        }
        for event, at, step, elapsed, compute, checkpoint in rows
    ]  # fmt: skip


FIRST = attempt(
    ("start", 0, 0, 0, 0, 0),
    ("save", 50, 10, 50, 30, 1),
    ("save", 90, 20, 90, 60, 2),
    ("step", 99, 23, 99, 69, 2),  # killed after this
)


def test_goodput_of_one_attempt():
    found = goodput(FIRST)
    assert (found.share, found.wall_seconds, found.attempts, found.lost_steps) == (
        69 / 99,
        99,
        1,
        0,
    )
    assert found.seconds["start"] == 99 - 69 - 2
    assert goodput(FIRST[:1]) is None
    assert goodput([]) is None


def test_steps_that_a_kill_lost_do_not_count():
    second = attempt(
        ("start", 120, 10, 0, 0, 0), ("save", 160, 30, 40, 35, 3), ("end", 161, 30, 41, 35, 4)
    )
    found = goodput(FIRST + second)  # checkpoint 20 was not complete
    assert found.wall_seconds == 161
    assert found.seconds["counted"] == 30 + 35
    assert found.seconds["lost"] == 39
    assert found.seconds["between"] == 21
    assert found.seconds["checkpoint"] == 2 + 4
    assert found.lost_steps == 13
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
    assert found.share == 65 / 161
    assert found.text().startswith(
        "40 % of 2:41 in steps that count (lost 24 %, start 19 %, between"
    )
    assert found.text().endswith("2 attempts, 13 steps lost")


def test_an_attempt_that_was_set_back_before_its_start_counts_nothing():
    """Its checkpoint, and those after it, were deleted as damaged."""
    second = attempt(("start", 100, 20, 0, 0, 0), ("step", 110, 25, 10, 9, 0))
    third = attempt(("start", 110, 10, 0, 0, 0), ("end", 150, 30, 40, 40, 0))
    found = goodput(FIRST + second + third)
    assert found.seconds["counted"] == 30 + 0 + 40
    assert found.lost_steps == 13 + 5


def test_a_slice_that_dies_and_comes_back_costs_what_it_took():
    """Of 300 s: 40 until its loss was missed and all started again, twice, and the steps redone."""
    both = attempt(
        ("start", 0, 0, 0, 0, 0), ("local", 50, 12, 50, 40, 1), ("step", 60, 14, 60, 50, 1)
    )
    alone = attempt(
        ("start", 100, 12, 0, 0, 0), ("local", 150, 20, 50, 40, 2), ("stop", 180, 25, 80, 65, 4)
    )
    again = attempt(("start", 220, 25, 0, 0, 0), ("end", 300, 50, 80, 70, 3))
    for rows, devices in ((both, 8), (alone, 4), (again, 8)):
        rows[0]["devices"] = devices
    found = goodput(both + alone + again)
    assert found.seconds["between"] == 40 + 40
    assert found.seconds["lost"] == 10  # computing steps 13 and 14, which are done again
    assert found.lost_steps == 2
    assert found.seconds["counted"] == 40 + 65 + 70
    assert found.fewer_devices_seconds == 80
    assert found.as_json()["fewer_devices_seconds"] == 80
    assert found.text().endswith("3 attempts, 2 steps lost, 1:20 on fewer devices")


def test_of_local_checkpoints_the_last_two_rows_stay(tmp_path):
    for start in (0, 6):
        attempts = Attempts(tmp_path)
        attempts.start(start)
        for step in range(start + 2, start + 10, 2):
            event = "save" if step == start + 4 else "local"
            attempts.note(event, step, {"compute": float(step)})
    rows = [(row["event"], row["step"]) for row in read_attempts(tmp_path)]
    assert rows == [
        ("start", 0), ("save", 4), ("local", 6), ("local", 8),
        ("start", 6), ("save", 10), ("local", 12), ("local", 14),
    ]  # fmt: skip


def test_attempts_are_kept_through_a_kill(tmp_path):
    clock, now = Clock(), Clock()
    for number in range(2):
        attempts = Attempts(tmp_path, clock=clock, now=now)
        clock.now += 5
        attempts.start(10 * number)
        clock.now += 20
        attempts.note("step", 3, {"compute": 1.0})  # too early for a row
        clock.now += 20
        attempts.note("step", 5, {"compute": 2.0})
        attempts.note("save", 6, {"compute": 2.5})
        for later in (8, 9):  # the last step that is known of
            clock.now += 40
            attempts.note("step", later, {"compute": 3.0})
    rows = read_attempts(tmp_path)
    assert [(row["event"], row["step"], row["elapsed"]) for row in rows] == [
        ("start", 0, 0.0), ("save", 6, 45.0), ("step", 9, 125.0),
        ("start", 10, 0.0), ("save", 6, 45.0), ("step", 9, 125.0),
    ]  # fmt: skip
    assert read_attempts(tmp_path / "nowhere") == []


_GOOD = {"event": "start", "time": 5.0, "step": 3, "elapsed": 1, "seconds": {"compute": 2.0}}


@pytest.mark.parametrize(
    "damage",
    [
        b'{"event": "save", "time": 5.0, "st',  # cut short by a crash
        b"\x00\xff\xfe" * 40,
        b"",
        b"5",
        b"[" * 100_000,
        json.dumps({"event": "start"}).encode(),
        *(
            json.dumps(_GOOD | changed).encode()
            for changed in (
                {"step": "3"},
                {"step": True},
                {"step": -1},
                {"step": 10**400},
                {"time": None},
                {"event": 1},
                {"elapsed": float("nan")},
                {"seconds": [1]},
                {"seconds": {"compute": "1"}},
            )
        ),
    ],
)
@pytest.mark.parametrize("where", ["first", "last", "alone"])
def test_a_damaged_record_of_attempts_stops_no_training(tmp_path, caplog, damage, where):
    good = [json.dumps(_GOOD).encode(), json.dumps(_GOOD | {"event": "save", "step": 5}).encode()]
    kept = {"first": [damage, *good], "last": [*good, damage], "alone": [damage]}[where]
    (tmp_path / FILE).write_bytes(b"\n".join(kept))
    rows = read_attempts(tmp_path)
    assert [row["step"] for row in rows] == ([] if where == "alone" else [3, 5])
    if damage:
        assert f"{tmp_path / FILE}: line" in caplog.text
        assert "goodput is counted from the rest" in caplog.text
    attempts = Attempts(tmp_path)
    attempts.start(5)
    attempts.note("save", 7, {"compute": 1.0})
    again = read_attempts(tmp_path)
    assert [row["step"] for row in again] == [row["step"] for row in rows] + [5, 7]
    assert goodput(again) is not None


def test_a_record_of_attempts_that_cannot_be_read_stops_no_training(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    assert read_attempts(tmp_path) == []
    assert "cannot be read (Is a directory)" in caplog.text
    attempts = Attempts(tmp_path)
    attempts.start(0)
    attempts.note("end", 5, {"compute": 1.0})
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("damage", ["\x00\x01", "5", '{"loss": 1}', '{"step": "3"}', '{"step": 1'])
def test_a_damaged_curve_is_refused_with_its_line(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 1, "time": 2.0}}\n{damage}\n{{"step": 2}}\n'
    )
    refuses(r"metrics\.jsonl, line 2: ", read_metrics, tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "time": 2.0}\n{"step": 2, "lo\xff')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]  # cut short by a kill


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("5", "START:END was expected"),
        ("a:b", "START:END was expected"),
        ("3:-4", "START:END was expected"),
        ("0:4", r"steps from 1 to 20 \(train\.steps\)"),
        ("9:4", r"the first not behind the last"),
        ("9:21", r"steps from 1 to 20"),
    ],
)
def test_ranges_that_cannot_be_traced(given, message):
    assert parse_steps("4:9", 20) == (4, 9)
    refuses(message, parse_steps, given, 20)


class StubRun:
    """Records what a wandb run is told."""

    def __init__(self):
        self.rows, self.metrics, self.finished = [], [], False

    def define_metric(self, *arguments, **named):
        self.metrics.append((arguments, named))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package."""
    stub = types.ModuleType("wandb")
    stub.__spec__ = types.SimpleNamespace(name="wandb")
    stub.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    stub.started, stub.runs = [], []

    def init(**named):
        stub.started.append(named)
        stub.runs.append(StubRun())
        return stub.runs[-1]

    stub.init = init
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_weights_and_biases_gets_the_same_rows(wandb, tmp_path):
    (tmp_path / "config.json").write_text('{"config": {"task": "rerank"}}')
    for restored in (0, 4):
        with MetricsWriter(tmp_path, restored_step=restored, wandb="mine") as metrics:
            metrics.write(restored + 2, {"loss": 0.5, "eval/mrr": float("nan")})
            metrics.write(restored + 4, {"loss": 0.25})
    first, second = wandb.started
    assert first == second  # a restart continues the same run
    assert (first["project"], first["resume"], first["name"]) == ("mine", "allow", tmp_path.name)
    assert first["config"] == {"task": "rerank"}
    assert "mode" not in first  # WANDB_MODE decides
    assert [run.finished for run in wandb.runs] == [True, True]
    assert wandb.runs[0].metrics == [(("*",), {"step_metric": "step"})]
    assert [row["step"] for run in wandb.runs for row in run.rows] == [2, 4, 6, 8]
    kept = [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(tmp_path)]
    assert kept[1:2] + kept[3:] == [wandb.runs[0].rows[1], wandb.runs[1].rows[1]]


def test_weights_and_biases_that_does_not_start_or_is_not_there(wandb, tmp_path, monkeypatch):
    def refuse(**_):
        raise wandb.errors.Error("api_key not configured (no-tty)\nmore")

    wandb.init = refuse
    refuses(r"api_key not configured .*WANDB_MODE=off", MetricsWriter, tmp_path, wandb="mine")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(r"--wandb=mine: .* pip install 'mmqa-jax\[wandb\]'", check_wandb, "mine")


def test_status_of_a_training_run(tmp_path):
    config = {"config": {"task": "rerank", "train": {"steps": 40}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in FIRST))
    rows = [
        {"step": 20, "time": 88.0, "loss": 0.75, "steps_per_second": 0.5},
        {"step": 20, "time": 89.0, "eval/mrr": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("20", "20.damaged", "30.orbax-checkpoint-tmp"):  # set aside, being written
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    status = training_status(tmp_path, now=109.0)
    assert (status["step"], status["steps"], status["saved"]) == (23, 40, [20])
    assert (status["last"], status["seconds_left"], status["loss"]) == (10.0, 34.0, 0.75)
    assert status["goodput"]["share"] == pytest.approx(69 / 99, abs=1e-4)
    shown = mmqa("status", tmp_path)
    assert shown.code == 0
    assert "rerank: step 23 of 40 (57%), 0.5 steps/s, about 0:34 left, loss 0.75" in shown.out
    assert "goodput: 70 % of 1:39 in steps that count (start 28 %, checkpoint 2 %)." in shown.out


@pytest.mark.parametrize("value", ["", None, [], True, 10**400, float("nan"), float("inf"), -1])
def test_status_of_damaged_metrics(value, tmp_path):
    config = {"config": {"task": "rerank", "train": {"steps": 40}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / FILE).write_text("no row\n")
    for name in ("loss", "time", "steps_per_second"):
        row = {"step": 20, "time": 88.0, "loss": 0.75, "steps_per_second": 0.5, name: value}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        shown = mmqa("status", tmp_path)
        assert (shown.code, "rerank: step" in shown.out) == (0, True), shown.err
    for damaged in ({"steps": value}, value):
        config["config"]["train"] = damaged
        (tmp_path / "config.json").write_text(json.dumps(config))
        shown = mmqa("status", tmp_path)
        assert shown.code == 2, shown.err
        assert "is not a training run's; copy the run again." in shown.err
