"""Copies of the weights run one arithmetic on a TPU, however many there are.

On a CPU answers are compared (tests/mesh/test_equal_bits_on_mesh.py). For a TPU its compiler says
which instructions round, over which shapes, and which kernels run; no TPU is needed.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from processes import program_facts

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the TPU's compiler is made for Linux alone"
    ),
]


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """Program and number of copies -> its facts."""
    return {one["name"]: one for one in program_facts("equal_programs.py")}


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_copys_arithmetic_is_that_of_one_alone(programs, kind):
    alone = programs[f"{kind} 1"]
    assert alone["roundings"] > 50
    for copies in (2, 4, 8):
        assert programs[f"{kind} {copies}"]["arithmetic"] == alone["arithmetic"], copies


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_copies_exchange_tokens_and_their_log_probabilities_alone(programs, copies):
    """Each slot's in its own place: what is summed are one number and zeros, which rounds nothing."""
    assert programs[f"prefill {copies}"]["exchanged"] == []
    exchanged = programs[f"decode {copies}"]["exchanged"]
    of_slots = f"[{16 * copies}]"
    of_floats = [one for one in exchanged if " f32" in one or " bf16" in one]
    assert of_floats == ([] if copies == 1 else [f"{of_floats[0].split()[0]} f32{of_slots}"])
