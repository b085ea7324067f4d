"""What a mixture's step of decoding and chunks of prompts do on TPUs, as their own compiler says; none is needed."""

from __future__ import annotations

import sys

import pytest
from processes import program_facts

LAYERS = 4  # of mixture_program.py


@pytest.mark.optimized
@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_experts_are_read_once_from_the_stack():
    """Rounded ones too. Each device multiplies its own share of prompts' rows by its experts."""
    found = program_facts("mixture_program.py")
    assert [(one["weights"], one["program"]) for one in found] == [
        (weights, program) for weights in ("given", "int8") for program in ("decode", "prefill")
    ]
    for one in found:
        prompts = one["program"] == "prefill"
        # Of prompts activations as well: 16 MiB a pass.
        assert one["floor"] <= one["bytes"] <= (1.35 if prompts else 1.05) * one["floor"], one
        assert one["loops"] == [LAYERS]
        assert one["temporaries"] < one["matrix"], one  # no layer's matrix is taken out
        if prompts:
            assert one["flops"] <= 1.05 * one["model_flops"], one
