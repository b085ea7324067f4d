"""The time left of a demo, by a clock that the test turns."""

import pytest
from cli_runs import ROOT

from mmqa_jax.core.config import load_config
from mmqa_jax.core.speed import best_precision
from mmqa_jax.runs.demo_time import (
    FIXED,
    RECORDED,
    STAGES,
    Recorded,
    TimeLeft,
    about,
    stage_units,
    usual_seconds,
)

# Measured GFLOP/s of float32 products of the machines of RECORDED.
RATES = (164.0, 206.0, 140.6, 206.0)
# `mmqa demo --config=configs/atlas/demo.py:runlocal` on two cores of 41 GFLOP/s that five other
# programs shared: seconds of its stages, of which the trainings' starts and compilations.
TOY_RATE = 41.3
TOY = dict(
    zip(STAGES, (12.6, 71.2, 31.7, 24.9, 121.5, 14.2, 1.5, 12.6, 143.5, 49.5, 0.3), strict=True)
)
TOY_FIXED = {"contrastive": 63.4, "rerank": 117.5, "answer": 137.9}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def config():
    return load_config(f"{ROOT}/configs/atlas/demo.py", [])


def left_after(count, config, seconds, rate, precision="float32", fixed=None, recorded=RECORDED):
    """What is predicted after so many stages, and what they took."""
    clock = Clock()
    time_left = TimeLeft(config, {}, rate, precision, recorded=recorded, clock=clock)
    for stage in STAGES[:count]:
        time_left.start(stage)
        clock.now += seconds[stage]
        time_left.finish((fixed or {}).get(stage))
    predicted = time_left.start(STAGES[count])
    return predicted, sum(seconds[stage] for stage in STAGES[count:])


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_recorded_demos_are_predicted_to_a_quarter(count, number, config):
    """From the second stage on; those of float32 by the demos that are not themselves."""
    one = RECORDED[number]
    alike = [other for other in RECORDED if other.precision == one.precision]
    others = [other for other in RECORDED if other is not one or len(alike) == 1]
    predicted, truth = left_after(
        count, config, one.seconds, RATES[number], one.precision, recorded=others
    )
    assert predicted == pytest.approx(truth, rel=0.25)


@pytest.mark.parametrize("count", range(2, 9))
def test_a_toy_demo_is_predicted_to_a_quarter(count):
    """Nearly all of it compiles, which the sizes in its config do not tell."""
    config = load_config(f"{ROOT}/configs/atlas/demo.py:runlocal", [])
    predicted, truth = left_after(count, config, TOY, TOY_RATE, fixed=TOY_FIXED)
    assert predicted == pytest.approx(truth, rel=0.25)


@pytest.mark.parametrize("slower", [0.3, 1.0, 4.0])
def test_one_core_and_products_are_told_apart(slower, config):
    """A machine whose products are `slower`, and whose single core is as the reference's."""
    usual = usual_seconds("float32")
    seconds = {name: FIXED[name] + slower * (usual[name] - FIXED[name]) for name in STAGES}
    fixed = {name: FIXED[name] for name in ("contrastive", "rerank", "answer")}
    seconds["prepare"] = usual["prepare"]
    predicted, truth = left_after(2, config, seconds, 164 / slower, fixed=fixed)
    assert predicted == pytest.approx(truth, rel=0.01)


def test_programs_that_are_kept_need_not_compile(config):
    """A second demo on the reference machine: its trainings say that nothing compiles."""
    usual = usual_seconds("float32")
    seconds = {name: usual[name] - 0.8 * FIXED[name] for name in STAGES}
    fixed = {name: 0.2 * FIXED[name] for name in ("contrastive", "rerank", "answer")}
    predicted, truth = left_after(2, config, seconds, 164.0, fixed=fixed)
    assert predicted == pytest.approx(truth, rel=0.1)


def test_every_stage_is_recorded_with_more_than_its_fixed_seconds():
    for one in RECORDED:
        assert tuple(one.seconds) == STAGES
        for stage, seconds in one.seconds.items():
            assert seconds / one.slowness > FIXED[stage]
    doubled = Recorded("float32", 2.0, {name: 2 * s for name, s in RECORDED[0].seconds.items()})
    assert usual_seconds("float32", [RECORDED[0], doubled]) == RECORDED[0].seconds


def test_the_work_of_a_stage_scales_its_time(config):
    before = stage_units(config)
    left = TimeLeft(config, {}, 164.0).start("answer")
    config.answer.train.steps *= 2
    assert stage_units(config)["answer"] == 2 * before["answer"]
    assert TimeLeft(config, {}, 164.0).start("answer") > 1.4 * left
    config.evaluate.questions = 0
    assert stage_units(config)["read"] == 1540


def test_it_falls_with_the_clock_and_ends_at_nothing(config):
    clock = Clock()
    time_left = TimeLeft(config, {}, 164.0, clock=clock)
    for stage in STAGES:
        left = time_left.start(stage)
        assert left > 0
        clock.now += left / 100
        assert time_left.seconds() < left
        time_left.finish()
    clock.now += 1e6
    assert time_left.seconds() == 0
    assert time_left.seconds(12.0) == 12.0


def test_a_stage_that_was_interrupted_has_had_its_seconds(config):
    left = TimeLeft(config, {}, 164.0, clock=Clock()).start("rerank")
    assert TimeLeft(config, {}, 164.0, clock=Clock()).start("rerank", 60.0) == left - 60


def test_a_training_is_believed_on_its_own_time(config):
    time_left = TimeLeft(config, {}, 164.0, clock=Clock())
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
