"""What prompts of a model with recurrent layers do on a TPU, as its own compiler says."""

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
LAYERS, TOKENS, HIDDEN, WORDS = 2, 2048, 5120, 1024  # of recurrent_program.py


@pytest.fixture(scope="module")
def prefill() -> dict[str, Any]:
    (found,) = program_facts("recurrent_program.py")
    return found


def test_a_layer_gathers_its_input_once(prefill):
    """And that of its MLP; heads stay where they are. Beside these the table of words is gathered, and
    what the last layer gives."""
    states, table = 2 * TOKENS * HIDDEN, 2 * WORDS * HIDDEN  # bytes
    exchanged = prefill["exchanged"]
    assert "all-to-all" not in exchanged
    assert exchanged["all-gather"] <= (2 * LAYERS + 1) * states + table
    assert exchanged["reduce-scatter"] <= 2 * LAYERS * states


def test_systems_are_not_solved_row_by_row(prefill):
    assert not [name for name in prefill["called"] if "Triangular" in name]
