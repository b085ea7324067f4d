"""What a mixture's step of decoding does on TPUs, as their own compiler says; none is needed."""

from __future__ import annotations

import sys

import pytest
from processes import program_facts

LAYERS = 4  # of mixture_program.py


@pytest.mark.optimized
@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_a_step_reads_its_experts_once_from_the_stack():
    """Rounded ones too: they are converted inside the product."""
    found = program_facts("mixture_program.py")
    assert [one["weights"] for one in found] == ["given", "int8"]
    for one in found:
        assert one["floor"] <= one["bytes"] <= 1.05 * one["floor"], one
        assert one["loops"] == [LAYERS]
        assert one["temporaries"] < one["matrix"], one  # no layer's matrix is taken out
