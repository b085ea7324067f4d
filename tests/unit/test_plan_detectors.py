"""`mmqa plan` of detectors: the program of `mmqa features`, and what a number of pictures takes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cli_runs import done, mmqa
from flax import nnx
from tiny_detectors import tiny

from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.data.pictures.resize import VINVL
from mmqa_jax.inference.region_detector import DetectorKind
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN
from mmqa_jax.models.detection.resnext import Conv
from mmqa_jax.plan import programs, verdict
from mmqa_jax.plan.program import trace_program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SMALL = dataclasses.replace(VINVL, shorter=60, longer=150)


def test_hours_of_a_number_of_pictures(monkeypatch):
    config, name = tiny("maskrcnn"), "vinvl_x152c4"
    monkeypatch.setitem(programs.DETECTORS, name, DetectorKind(name, config, SMALL))

    def traced(program, placement):  # test_region_detector.py compiles it
        return trace_program(dataclasses.replace(program, floor_bytes=0.0), placement)

    monkeypatch.setattr(verdict, "compile_program", traced)
    planned = done("plan", f"--model={name}", "--pictures=3600")
    (program,) = planned["programs"]
    assert program["name"] == "regions"
    made = nnx.state(nnx.eval_shape(lambda: FasterRCNN(config, rngs=nnx.Rngs())))
    held = sum(leaf.size for leaf in jax.tree.leaves(made))
    assert program["memory_gib"]["parameters"] == pytest.approx(4 * held / 2**30, abs=1e-3)
    cost = planned["pictures"]
    assert cost["hours_bound"] == pytest.approx(program["bound_ms"] / 1e3)
    assert cost["pictures_per_second_bound"] == pytest.approx(1e3 / program["bound_ms"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=vlp_x101", "--pictures=0"], "--pictures=0: at least 1"),
        (["--model=bge_base", "--pictures=5"], "only a detector takes pictures"),
        (["--model=vlp_x101", "--config=configs/webqa/vlp_select.py"], "leave --config out"),
    ],
)
def test_refusals(flags, message):
    ended = mmqa("plan", *flags)
    assert ended.code == 2
    assert message in ended.err


def test_zeros_between_joined_groups_are_no_operations_of_the_model():
    conv = Conv(32, 32, 3, ("embed", "mlp"), rngs=nnx.Rngs(0), groups=8)
    traced = jax.make_jaxpr(conv)(jnp.zeros((1, 5, 7, 32)))
    assert jaxpr_flops(traced.jaxpr) == 2 * 5 * 7 * 32 * 9 * 32 / 8
