"""`python -m tests.bench train`: what its rows say, from tiny runs and from shards that only pretend."""

import dataclasses
import functools

import pytest
from cli_runs import quietly

from mmqa_jax.core import host
from tests.bench import Options, train, training_runs, training_shards
from tests.bench.training_runs import Sizes, median_share
from tests.drawn_weights import drawn_start

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
