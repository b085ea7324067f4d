"""The mesh of an engine by the roofline of its whole job, beside that of its programs."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from mmqa_jax.core.chips import CHIPS
from mmqa_jax.core.config import load_config
from mmqa_jax.decoding.job_time import SplitCopy
from mmqa_jax.decoding.sizes import SIZES, Demand, choose_sizes
from mmqa_jax.models.llama.experts import reached
from mmqa_jax.plan.program import least_time, trace_program
from mmqa_jax.plan.programs import make_program, preset
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.prompting.backends.local_model import Sizing

pytestmark = pytest.mark.slow

AUTO = dict.fromkeys(SIZES, "auto")
INT8 = {"weights": "int8", "cache_dtype": "int8"}
KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v7x": "TPU7x", "h100": "NVIDIA H100 80GB HBM3",
         "h200": "NVIDIA H200", "b200": "NVIDIA B200"}  # fmt: skip
PROMPT = "configs/prompt/default.py"


def chosen(model, chip, prompt, new, *, count=8, mesh=None, **options):
    devices = [SimpleNamespace(platform="tpu", device_kind=KINDS[chip])] * count
    demand = Demand(10_000, prompt + new, 10_000 * prompt, 10_000 * new)
    config = dataclasses.replace(preset(model), dtype="bfloat16")
    free = CHIPS[chip].hbm_bytes
    return choose_sizes(config, AUTO | options, mesh or {}, devices, demand, free=free)


@pytest.mark.parametrize(
    ("model", "chip", "tensor", "weights"),
    [
        ("llama2_7b", "v5e", 8, "given"),
        ("llama2_7b", "v5e", 4, "int8"),
        ("qwen3_8b", "v6e", 2, "given"),
        ("llama31_8b", "v7x", 1, "given"),
        ("llama2_70b", "v7x", 2, "given"),
        ("llama31_8b", "h200", 1, "given"),
        ("qwen3_30b_a3b", "v6e", 4, "given"),
        ("llama2_70b", "b200", 2, "int8"),
    ],
)
def test_the_closed_form_is_near_the_programs_bound(model, chip, tensor, weights):
    """plan's bound is read from the program's jaxpr and shardings.

    The closed form leaves out that attention's products of float32 run at half the rate on GPUs.
    """
    data, length, of_copy = 8 // tensor, 2048, 32
    changes = {"engine.slots": of_copy * data, "engine.length": length, "engine.weights": weights,
               "model.mesh.data": data, "model.mesh.fsdp": 1, "model.mesh.tensor": tensor}  # fmt: skip
    config = load_config(PROMPT, changes)
    place = open_topology({"v6e": "v6e:2x4", "v7x": "v7x:2x2x1"}.get(chip, "v5e:2x4"))
    place = dataclasses.replace(place, data_sheet=CHIPS[chip])
    copy = a_copy(model, chip, tensor, weights)
    for name in ("decode", "prefill"):
        program = make_program(name, config, place.devices, model)
        bound = least_time(trace_program(program, place.placement(program.placed)), place.chip)
        tokens = program.examples / data
        call = copy.decode(of_copy, length)
        if name == "prefill":  # of chunks of 512 behind all columns
            call = copy.prefill(tokens, tokens / 512, length)
        parts = (call.compute, call.hbm)
        assert max(parts) == pytest.approx(max(bound.compute, bound.hbm), rel=0.15)
        if tensor > 1 and name == "prefill" and weights == "given":  # latency is small
            assert call.exchange == pytest.approx(bound.interconnect, rel=0.4)
        assert call.exchange >= bound.interconnect / 2.01  # sums of int8 products are float32


def a_copy(model, chip, tensor, weights) -> SplitCopy:
    """From the published sizes, without what sizes.py knows of them."""
    config = dataclasses.replace(preset(model), dtype="bfloat16")
    heads = 2 * config.hidden * config.head_size * (config.heads + config.kv_heads)
    mlp = 3 * config.hidden * config.mlp * (config.experts or 1)
    each = 1 if weights == "int8" else 2
    head = config.hidden * config.vocab_size * 2 / tensor
    layers = config.layers * (heads + mlp) * each / tensor
    token = 2 * config.layers * config.kv_heads * config.head_size * 2 / tensor
    experts = config.layers * mlp * each / tensor if config.experts else 0
    return SplitCopy(config, CHIPS[chip], tensor, layers, experts, head, token)


def test_experts_that_no_token_goes_to_are_not_read():
    few, many = (a_copy("qwen3_30b_a3b", "h100", 1, "given").decode(n, 0).hbm for n in (1, 4096))
    config = preset("qwen3_30b_a3b")
    assert reached(config, 1) == config.active_experts / config.experts
    assert few < many / 8


@pytest.mark.parametrize(
    ("model", "chip", "prompt", "new", "options", "mesh"),
    [
        # Weights that fill a chip leave room for few sequences: they are split.
        ("llama2_7b", "v5e", 1984, 64, INT8, "data=2 tensor=4"),
        ("llama2_7b", "v5e", 1984, 64, {}, "data=2 tensor=4"),
        ("qwen3_8b", "v5e", 744, 256, {}, "data=2 tensor=4"),
        ("qwen3_30b_a3b", "v6e", 744, 256, {}, "data=2 tensor=4"),
        ("llama2_70b", "h100", 744, 256, {}, "data=2 tensor=4"),
        # Where memory is large, or nearly all is prefill, copies have no exchange.
        ("llama2_7b", "v6e", 990, 10, INT8, "data=8"),
        ("llama31_8b", "v7x", 744, 256, {}, "data=8"),
        ("llama31_8b", "h200", 1984, 64, {}, "data=8"),
        ("llama31_8b", "b200", 744, 256, {}, "data=8"),
        ("llama2_70b", "v6e", 744, 256, {}, "tensor=8"),  # alone fits
    ],
)
def test_the_mesh_of_a_job(model, chip, prompt, new, options, mesh):
    sizes = chosen(model, chip, prompt, new, **options)
    axes = " ".join(f"{axis}={n}" for axis, n in sizes.shape.items() if n > 1)
    assert axes == mesh
    assert not sizes.lacking
    other = r"^data=.* needs [\d.]+ of the time of .* 10,000 prompts of [\d,]+ tokens with \d+ new ones: "
    assert re.search(other, sizes.reason) if mesh != "tensor=8" else sizes.reason == ""


@pytest.mark.parametrize("chip", KINDS)
def test_long_answers_split_no_less_than_long_prompts(chip):
    read, written = (
        chosen("llama2_7b", chip, *job).shape["tensor"] for job in ((1000, 8), (1000, 1000))
    )
    assert read <= written


def test_a_mesh_that_is_given_is_not_reasoned_about():
    sizes = chosen("llama2_7b", "v5e", 500, 100, mesh={"data": 1, "fsdp": 1, "tensor": 8})
    assert (sizes.shape["tensor"], sizes.reason) == (8, "")
    assert chosen("llama31_8b", "h100", 500, 100, count=1).reason == ""
    odd = chosen("smollm2", "v5e", 500, 100)  # 9 heads: no split but one
    assert (odd.shape["data"], odd.reason) == (8, "")


def test_later_prompts_keep_the_mesh(monkeypatch):
    """The weights lie where they are."""
    devices = [SimpleNamespace(platform="tpu", device_kind=KINDS["v5e"], process_index=0)] * 8
    where = "mmqa_jax.prompting.backends.local_model."
    monkeypatch.setattr(where + "devices_for", lambda mesh: devices)
    monkeypatch.setattr(where + "free_bytes", lambda device: CHIPS["v5e"].hbm_bytes)
    monkeypatch.setattr("mmqa_jax.decoding.sizes.EngineSizes.mesh", lambda self: None)
    config = dataclasses.replace(preset("llama2_7b"), dtype="bfloat16")
    sizing = Sizing(config, AUTO | {"weights": "int8"}, {}, None, "model")
    first = sizing.choose(Demand(10_000, 1000, 9_900_000, 100_000))
    long = Demand(None, 4000)
    assert sizing.choose(long).shape != first.shape
    assert sizing.choose(long, first.shape).shape == first.shape


def test_a_step_of_7b_on_eight_v5e_gives_9000_tokens_a_second():
    """`auto` took a copy on each chip, 8 slots beside it: 4,670."""
    changes = {"engine.weights": "int8", "engine.cache_dtype": "int8"}
    place = open_topology("v5e-8")

    def rate(more):
        program = make_program(
            "decode", load_config(PROMPT, changes | more), place.devices, "llama2_7b"
        )
        bound = least_time(trace_program(program, place.placement(program.placed)), place.chip)
        return program.examples / (bound.seconds + bound.interconnect)

    copies = {"model.mesh.data": 8, "model.mesh.fsdp": 1, "model.mesh.tensor": 1}
    assert rate({}) > 9_000 > 1.5 * rate(copies)
