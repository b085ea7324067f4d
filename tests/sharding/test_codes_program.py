"""What a decode step with weights in codes does on TPUs, as their own compiler says; none is needed."""

from __future__ import annotations

import sys

import pytest
from processes import program_facts

LAYERS = 4  # of codes_program.py
# Form and program -> kernels of a layer's linears in codes.
KERNELS = {
    ("mxfp4", "decode"): 3,
    ("int4", "decode"): 7,
    ("int4", "prefill"): 0,
    ("fp8", "decode"): 7,
}


@pytest.mark.optimized
@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_a_step_reads_codes_once_from_the_stack():
    """Prompts of many rows are multiplied by XLA."""
    facts = program_facts("codes_program.py")
    assert [(of["weights"], of["program"]) for of in facts] == [*KERNELS]
    for of in facts:
        assert of["loops"] == [LAYERS]
        assert of["kernels"] == KERNELS[of["weights"], of["program"]], of
        if of["program"] == "decode":
            # Of gpt-oss the table of tokens is copied, which is a quarter of all of four layers.
            most = 1.8 if of["weights"] == "mxfp4" else 1.1
            assert of["bytes"] <= most * of["floor"], of
