"""What LLaMA's beam search does on a TPU, as its own compiler says; none is needed."""

from __future__ import annotations

import sys

import pytest
from processes import program_facts

LAYERS, STEPS = 2, 16  # of beam_program.py


@pytest.mark.optimized
@pytest.mark.skipif(sys.platform != "linux", reason="the TPU's compiler is made for Linux alone")
def test_beams_are_reordered_without_touching_the_cache():
    (found,) = program_facts("beam_program.py")
    written = found["written"]
    assert written.pop("dynamic-update-slice") == 2 * LAYERS  # keys and values of a step, in place
    moving = {
        "gather",
        "scatter",
        "copy",
        "transpose",
        "reshape",
        "convert",
        "select",
        "concatenate",
    }
    assert not moving & written.keys()
    assert found["copied"] < 1e-3 * found["cache"]
    assert found["repeated"] == []  # prompts are held and read once for all beams of a question
    assert STEPS - 1 in found["loops"]
    # And those of the prompts, once: over their pages, and over their rows of keys and values.
    assert len(found["loops"]) == 1 + 3 * LAYERS
