"""`python -m tests.bench train`: what its rows say, from tiny runs and from shards that only pretend."""

import dataclasses
import functools

import pytest
from cli_runs import quietly

from mmqa_jax.core import host
from tests.bench import Options, train, training_runs, training_shards
from tests.bench.training_runs import Sizes, median_share
from tests.drawn_weights import drawn_start, drawn_starts
from tests.fake_devices import fake_devices

pytestmark = pytest.mark.slow

TINY = Sizes(
    {"hidden": 16, "heads": 2, "mlp": 16, "layers": 1, "vocab_size": 64}, rows=4, columns=8
)
LOAD = dataclasses.replace(
    train.load_of("small"), curve=TINY, curve_steps=4, processes=(1, 2),
    jobs=training_shards.Jobs(parts=4, prompts=6),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quickly(cli_cache):
    with quietly(cli_cache):
        yield


def row_of(name, **changes):
    load = dataclasses.replace(LOAD, **changes)
    result = train.run_load(load, Options(rounds=1, only=(name,)), "here")
    (row,) = result["rows"]
    assert (result["device"], row["name"]) == ("here", name)
    return row


def test_the_loop_and_the_bare_step_are_timed_alike(monkeypatch):
    """The loop only asks for its batches: it trains in the row of processes, below."""

    def train(config, *, batches, **options):
        assert options["objective"].config == training_runs.vlp(TINY)
        for _ in range(config["steps"]):
            next(batches)

    monkeypatch.setattr("mmqa_jax.training.loop.train", train)
    monkeypatch.setattr("mmqa_jax.training.state.initial_state", drawn_start)
    found = training_runs.overhead(TINY, steps=6, rounds=1)
    for side in ("ours", "peer"):
        (seconds,) = found[side]
        assert 0 < seconds < 10


def test_the_rows_of_the_loop_and_of_a_save(monkeypatch):
    children = {
        "overhead": {"ours": [0.103, 0.102, 0.110], "peer": [0.100, 0.100, 0.100]},
        "save": {"ours": [0.2, 0.1, 0.3], "peer": [1.0, 2.0, 3.0], "copy_floor": 0.05},
    }
    asked = {}

    def child(name, env=None, **arguments):
        asked[name] = arguments
        return children[name]

    monkeypatch.setattr(train, "_child", child)
    row = row_of("loop")
    assert (row["ours"], row["peer"], row["unit"]) == (103.0, 100.0, "ms")
    assert row["overhead"] == pytest.approx(0.03)
    assert median_share([3.0, 1.0, 2.2], [2.0, 1.0, 2.0]) == pytest.approx(0.1)
    row = row_of("save_256mib")
    assert asked["save"]["mib"] == 256
    assert (row["ours"], row["peer"], row["ratio"], row["floor"]) == (0.2, 2.0, 10.0, 0.05)
    assert row["one_b_stall_s"] == pytest.approx(0.2 * 12e9 / 2**28, rel=1e-4)
    assert row["one_b_share"] == pytest.approx(
        row["one_b_stall_s"] / (600 + row["one_b_stall_s"]), rel=1e-4
    )
    assert row["written_gb_per_s"] == pytest.approx(2**28 / 2.0 / 1e9, rel=1e-4)


def test_a_save_is_timed(monkeypatch):
    bandwidth = functools.partial(host.read_bandwidth, 1 << 24)
    monkeypatch.setattr(host, "read_bandwidth", bandwidth)
    found = training_runs.save(mib=32, rounds=1)
    assert 0 < found["ours"][0] <= found["peer"][0]
    assert found["copy_floor"] > 0


def test_processes_are_given_their_places_and_what_the_first_returns_counts(monkeypatch):
    """The run alone is in this process; tests/sharding/test_two_processes.py trains in two."""
    started, losses = [], []

    def start(name, env, arguments):
        assert name == "curve"
        started.append(env)
        if not losses:
            sizes = Sizes(**arguments.pop("sizes"))
            with drawn_starts():
                losses.extend(training_runs.curve(sizes, **arguments))
            return losses
        return [loss * {"0": 1.25, "1": 9.0}[env["JAX_PROCESS_ID"]] for loss in losses]

    monkeypatch.setattr(train, "_start", start)
    monkeypatch.setattr(train, "_results", lambda started: started)
    row = row_of("processes")
    assert row["ours"] == pytest.approx(0.25)
    assert len(set(losses)) == 4
    assert row["work"] == "1, 2 processes, 4 steps"
    alone, *joined = started
    assert alone == fake_devices(1)
    assert [env.pop("JAX_PROCESS_ID") for env in joined] == ["0", "1"]
    assert (
        joined[0]
        == joined[1]
        == alone
        | {
            "JAX_COORDINATOR_ADDRESS": joined[0]["JAX_COORDINATOR_ADDRESS"],
            "JAX_NUM_PROCESSES": "2",
        }
    )
    assert joined[0]["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")


# Writes the parts of its shard, a tenth of a second apart.
SHARD = """
import os, sys
out, shard = (next(a.split('=')[1] for a in sys.argv if a.startswith(f)) for f in ('--out', '--shard'))
index, count = map(int, shard.split('/'))
assert len(os.sched_getaffinity(0)) == 1, 'not pinned'
os.makedirs(out + '.parts', exist_ok=True)
for number, part in enumerate(range(index, 4 * count, count)):
    file = f'{out}.parts/{part:05d}.jsonl'
    open(file, 'w').close()
    os.utime(file, (1000 + number / 10,) * 2)
"""


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(training_shards, "_MMQA", SHARD)
    job = training_shards._Job(("prompt",), 6, "out", "out.parts/[0-9]*.jsonl", "pretended")
    monkeypatch.setattr(training_shards, "_prompt", lambda folder, jobs: job)


def test_shards_are_pinned_and_their_parts_timed_after_the_first(pretended):
    """Six prompts in a tenth of a second, on one core and on two."""
    row = row_of("prompt")
    assert (row["ours"], row["peer"], row["unit"]) == (120.0, 60.0, "prompts/s")
    assert (row["ratio"], row["floor"], row["ratio_range"]) == (2.0, 120.0, [2.0, 2.0])
