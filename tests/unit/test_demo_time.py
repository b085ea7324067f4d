"""The time left of a demo, by a clock that the test turns."""

import pytest
from cli_runs import ROOT

from mmqa_jax.core.config import load_config
from mmqa_jax.core.speed import best_precision
from mmqa_jax.runs.demo import TimeLeft, about, stage_units

STAGES = (
    *("prepare", "contrastive", "embed", "search", "rerank"),
    *("tune", "refuse", "select", "answer", "read", "score"),
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def config():
    return load_config(f"{ROOT}/configs/atlas/demo.py", [])


def test_a_machine_half_as_fast_takes_twice_as_long(config):
    fast = TimeLeft(config, {}, 164.0).start("prepare")
    slow = TimeLeft(config, {}, 82.0).start("prepare")
    assert slow == pytest.approx(2 * fast)


def test_the_work_of_a_stage_scales_its_time(config):
    before = stage_units(config)
    left = TimeLeft(config, {}, 164.0).start("answer")
    config.answer.train.steps *= 2
    assert stage_units(config)["answer"] == 2 * before["answer"]
    assert TimeLeft(config, {}, 164.0).start("answer") > 1.5 * left
    config.evaluate.questions = 0
    assert stage_units(config)["read"] == 1540


def test_a_finished_stage_corrects_the_others(config):
    clock = Clock()
    time_left = TimeLeft(config, {"prepare": {"seconds": 1000.0}}, 164.0, clock)
    first = time_left.start("contrastive")  # prepare says nothing of the other stages
    usual = 95  # seconds of this stage at 164 GFLOP/s
    clock.now += 3 * usual
    time_left.finish()
    assert time_left.start("embed") == pytest.approx(3 * (first - usual))


def test_it_falls_with_the_clock_and_ends_at_nothing(config):
    clock = Clock()
    time_left = TimeLeft(config, {}, 164.0, clock)
    for stage in STAGES:
        left = time_left.start(stage)
        assert left > 0
        clock.now += left / 100
        assert time_left.seconds() < left
        time_left.finish()
    clock.now += 1e6
    assert time_left.seconds() == 0
    assert time_left.seconds(12.0) == 12.0


def test_a_training_is_believed_on_its_own_time(config):
    time_left = TimeLeft(config, {}, 164.0, Clock())
    time_left.start("answer")
    assert time_left.seconds(1000.0) == pytest.approx(time_left.seconds(10.0) + 990)


def test_wording():
    assert [about(x) for x in (3, 44, 100, 754)] == [
        *("about 10 s", "about 40 s", "about 2 min", "about 13 min")
    ]  # fmt: skip


def test_the_precision_is_chosen_by_the_measured_rates():
    assert best_precision({"float32": 100.0, "bfloat16": 200.0}) == "bfloat16"
    assert best_precision({"float32": 100.0, "bfloat16": 105.0}) == "float32"
    assert best_precision({"float32": 100.0, "bfloat16": 20.0}) == "float32"
