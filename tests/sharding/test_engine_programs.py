"""What the engine's programs do on TPUs and GPUs, as their own compilers say; none is needed.

engine_programs.py compiles them in a process of its own, where JAX's platform is the CPU. Those for
GPUs are tested where JAX's CUDA plugin is installed (the extra `cuda12`, 5 GB).
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from processes import program_facts

from mmqa_jax.decoding.slot_runner import columns_read

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the TPU's compiler is made for Linux alone"
    ),
]


NAMES = (
    *("7b_decode", "7b_prefill", "70b_decode", "70b_prefill", "7b_int8_decode"),
    *("8b_default_prefill", "70b_default_prefill"),
)


def compiled_for(platform: str) -> dict[str, dict[str, Any]]:
    """Program -> its facts (see engine_programs.facts)."""
    found = program_facts("engine_programs.py", platform)
    return {one["name"]: one for one in found}


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    return compiled_for("tpu")


@pytest.fixture(scope="module")
def gpu_programs() -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("the GPU's compiler comes with the extra `cuda12`")
    return compiled_for("gpu")


def least_bytes(found: dict[str, Any], whole: bool = False) -> float:
    """Of a step: weights once, and the cache's columns in use once; these may be all."""
    used = 1 if whole else columns_read(1000, 2048, 128) / 2048
    return found["weights"] - found["embedding"] + used * found["cache"]


@pytest.mark.parametrize("name", ["7b_decode", "7b_int8_decode"])
def test_a_step_reads_weights_and_used_columns_once(programs, name):
    """The kernel says what it reads; that it reads no more is tested with its numbers."""
    found = programs[name]
    floor = least_bytes(found)
    assert floor <= found["bytes"] <= 1.15 * floor


@pytest.mark.parametrize("name", ["gpt_oss_decode", "gpt_oss_prefill"])
def test_a_cache_of_small_heads_is_not_copied(programs, name):
    """The slots that `auto` takes fit. The table of tokens is copied: its rows are no whole lanes."""
    found = programs[name]
    assert found["copied"] < 1.1 * found["embedding"] + 1e-3 * found["cache"]
    assert found["temporaries"] < 0.05 * 15.75 * 2**30


def test_a_step_loops_over_layers_alone(programs):
    """Greedy ones: where a row samples with top_k or top_p, digits of a threshold come on top."""
    assert programs["7b_decode"]["loops"] == [32]
    assert programs["70b_decode"]["loops"] == [80]


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_not_copied(programs, name):
    found = programs[name]
    assert found["copied"] < 1e-3 * found["cache"]
    assert found["aliased"] >= found["cache"]


def test_prompts_read_weights_and_their_columns_once(programs):
    """In the chunks that users run, where each chip has one key head."""
    for name, slots, chunks in (("8b_default_prefill", 64, 2), ("70b_default_prefill", 16, 2)):
        found = programs[name]
        floor = found["weights"] - found["embedding"] + chunks / slots * found["cache"]
        # The output head belongs to `begin`, and is as large as the embedding.
        assert floor - found["embedding"] <= found["bytes"] <= 1.1 * floor


@pytest.mark.parametrize("name", ["7b_decode", "7b_int8_decode", "70b_decode"])
def test_a_step_attends_by_a_kernel(programs, name):
    assert programs[name]["kernels"] == ["tpu_custom_call"]


def test_attention_of_one_token_is_a_matrix_product(programs):
    """Where the kernel does not serve: one row alone would go to the vector unit."""
    assert not programs["unaligned_decode"]["kernels"]
    assert not programs["unaligned_decode"]["on_vector_unit"]


@pytest.mark.parametrize("name", NAMES)
def test_products_read_their_matrices_from_the_stack(programs, name):
    """None is transposed first."""
    assert not programs[name]["layers_moved"]


def test_what_arithmetic_says_fits_does(programs):
    """Weights, cache and a twentieth of the memory; the compiler refuses what does not fit."""
    found = programs["7b_decode"]
    assert found["temporaries"] < 0.05 * 15.75 * 2**30


def test_the_memory_of_prompts_is_linear(programs):
    """No scores of all heads: [8 chunks, 4 heads, 512, 1024] in float32 would be 64 MiB a layer."""
    found = programs["7b_prefill"]
    new = 8 * 512 * 2 * 32 * 4 * 128 * 2  # keys and values of the chunks, written at the end
    assert found["temporaries"] < new + 256 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_one_layer_is_compiled(programs, name):
    """CPU seconds in place of seconds, which depend on what else runs."""
    assert programs[name]["cpu_seconds"] < 60


GPU_STEPS = ("7b_decode", "7b_short_decode", "8b_short_decode", "8b_int8_decode")
GPU_PROMPTS = ("7b_prefill", "7b_short_prefill", "8b_short_prefill", "sharded_prefill")


@pytest.mark.parametrize("name", GPU_STEPS)
def test_a_gpus_step_reads_weights_and_used_columns_once(gpu_programs, name):
    """Of one key head for one query and for four. An int8 cache is half of the floor, beside the
    same activations."""
    found = gpu_programs[name]
    floor = least_bytes(found, whole="short" in name)
    assert floor <= found["bytes"] <= (1.2 if "int8" in name else 1.15) * floor
    assert not found["loops"]


@pytest.mark.parametrize(
    ("name", "slots", "most"), [("7b_short_prefill", 64, 1.25), ("8b_short_prefill", 128, 1.15)]
)
def test_a_gpus_prompts_read_weights_and_their_columns_once(gpu_programs, name, slots, most):
    """Two chunks of 128 tokens; the rest are their activations, and sums of products in parts."""
    found = gpu_programs[name]
    floor = found["weights"] + 2 / slots * found["cache"]
    assert floor - 2 * found["embedding"] <= found["bytes"] <= most * floor


@pytest.mark.parametrize("name", GPU_STEPS + GPU_PROMPTS)
def test_a_gpus_cache_is_not_copied(gpu_programs, name):
    found = gpu_programs[name]
    assert found["copied"] < 1e-3 * found["cache"]
    assert found["aliased"] >= found["cache"]


@pytest.mark.parametrize("name", GPU_STEPS + GPU_PROMPTS)
def test_a_gpu_attends_by_kernels(gpu_programs, name):
    """No scores: of 8 chunks and 32 heads [512, 1024] in float32 are 512 MiB a layer."""
    assert gpu_programs[name]["kernels"] == ["__gpu$xla.gpu.triton"]
    assert gpu_programs[name]["temporaries"] < 300 * 2**20


def test_heads_of_other_sizes_are_attended_to_by_cudnn(gpu_programs):
    """Triton's blocks are powers of two: rows of heads of 80 are taken out of the cache."""
    assert gpu_programs["heads80_prefill"]["kernels"] == ["__cudnn$fmhaScaleBiasSoftmax"]
    assert not gpu_programs["heads80_decode"]["kernels"]


@pytest.mark.parametrize("name", GPU_STEPS + GPU_PROMPTS)
def test_a_gpus_layers_compile_in_time(gpu_programs, name):
    """They are not a loop: XLA for GPUs copies a layer's weights out of a stack before using them."""
    assert gpu_programs[name]["cpu_seconds"] < 60
