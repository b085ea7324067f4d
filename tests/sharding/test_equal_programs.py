"""Copies of the weights run one arithmetic on a TPU and on GPUs, however many there are.

On a CPU answers are compared (tests/mesh/test_equal_bits_on_mesh.py). For TPUs and GPUs their
compilers say which instructions round, over which shapes and in which tiles, and which kernels run;
none is needed. Those for GPUs are tested where JAX's CUDA plugin is installed (the extra `cuda12`).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest
from processes import program_facts

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(sys.platform != "linux", reason="the compilers are made for Linux alone"),
]


@pytest.fixture(scope="module", params=["equal", "equal_gpu"])
def programs(request) -> dict[str, dict[str, Any]]:
    """Program and number of copies -> its facts."""
    if request.param == "equal_gpu" and importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("the GPU's compiler comes with the extra `cuda12`")
    return {one["name"]: one for one in program_facts("equal_programs.py", request.param)}


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_copys_arithmetic_is_that_of_one_alone(programs, kind):
    alone = programs[f"{kind} 1"]
    assert alone["roundings"] > 50
    for copies in (2, 4, 8):
        assert programs[f"{kind} {copies}"]["arithmetic"] == alone["arithmetic"], copies


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_copies_exchange_tokens_and_their_log_probabilities_alone(programs, copies):
    """Each slot's in its own place: a TPU sums one number and zeros, which rounds nothing, and GPUs
    gather."""
    assert programs[f"prefill {copies}"]["exchanged"] == []
    exchanged = programs[f"decode {copies}"]["exchanged"]
    of_floats = [one for one in exchanged if " f32" in one or " bf16" in one]
    assert len(of_floats) == (copies > 1)
    shapes = {shape for one in of_floats for shape in re.findall(r"\b(?:f32|bf16)\[.*?\]", one)}
    assert shapes <= {"f32[16]", f"f32[{16 * copies}]"}
