"""What a decode step with weights in codes does on TPUs, as their own compiler says; none is needed."""

from __future__ import annotations

import sys

import pytest
from processes import program_facts

LAYERS, LINEARS = 4, 7  # of codes_program.py


@pytest.mark.optimized
@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_a_step_reads_codes_once_from_the_stack():
    """Prompts of many rows are multiplied by XLA."""
    facts = program_facts("codes_program.py")
    assert [(of["weights"], of["program"]) for of in facts] == [
        (weights, program) for weights in ("int4", "fp8") for program in ("decode", "prefill")
    ]
    for of in facts:
        decodes = of["program"] == "decode"
        assert of["loops"] == [LAYERS]
        assert of["kernels"] == decodes * LINEARS, of
        if decodes:
            assert of["bytes"] <= 1.1 * of["floor"], of
