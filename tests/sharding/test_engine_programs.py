"""What the engine's programs do on a TPU, as its own compiler says; none is needed.

engine_programs.py compiles them in a process of its own, where JAX's platform is the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmqa_jax.decoding.slot_runner import EngineConfig

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the TPU's compiler is made for Linux alone"
)


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """Program -> its facts (see engine_programs.facts)."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_programs.py"))],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = map(json.loads, done.stdout.splitlines())
    return {one["name"]: one for one in found}


def test_a_step_reads_weights_and_used_columns_once(programs):
    found = programs["7b_decode"]
    used = EngineConfig(length=2048).read(1000) / 2048
    floor = found["weights"] - found["embedding"] + used * found["cache"]
    assert floor <= found["bytes"] <= 1.15 * floor


def test_a_step_loops_over_layers_alone(programs):
    """And over bits of a threshold, where a row samples with top_k or top_p."""
    assert sorted(programs["7b_decode"]["loops"]) == [32, 32, 32]
    assert sorted(programs["70b_decode"]["loops"]) == [32, 32, 80]


@pytest.mark.parametrize("name", ["7b_decode", "7b_prefill", "70b_decode"])
def test_the_cache_is_not_copied(programs, name):
    found = programs[name]
    assert found["copied"] < 1e-3 * found["cache"]
    assert found["aliased"] >= found["cache"]


def test_what_arithmetic_says_fits_does(programs):
    """Weights, cache and a twentieth of the memory; the compiler refuses what does not fit."""
    found = programs["7b_decode"]
    assert found["temporaries"] < 0.05 * 15.75 * 2**30


def test_the_memory_of_prompts_is_linear(programs):
    """No scores of all heads: [8 chunks, 4 heads, 512, 1024] in float32 would be 64 MiB a layer."""
    found = programs["7b_prefill"]
    new = 8 * 512 * 2 * 32 * 4 * 128 * 2  # keys and values of the chunks, written at the end
    assert found["temporaries"] < new + 256 * 2**20


@pytest.mark.parametrize("name", ["7b_decode", "7b_prefill", "70b_decode"])
def test_one_layer_is_compiled(programs, name):
    """CPU seconds in place of seconds, which depend on what else runs."""
    assert programs[name]["cpu_seconds"] < 60
