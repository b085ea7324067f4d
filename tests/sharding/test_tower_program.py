"""What LLaVA's tower does on a TPU slice, as the TPU's own compiler says; none is needed."""

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
DEVICES, PATCHES, WIDTH, MLP, HIDDEN = 8, 64, 256, 1024, 1024  # of tower_program.SMALL


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    (found,) = program_facts("tower_program.py", "small")
    return found


def test_every_device_encodes_pictures_of_its_own(programs):
    """Features change hands once, at the end; the layer behind them is not computed."""
    found = programs["tower"]
    assert found["collectives"] == {"all-to-all": 1}
    assert found["loops"] == [3]
    rows = -(-(PATCHES + 1) // 8) * 8  # as they lie in tiles (models/common/array_layout.py)
    layer = rows * (4 * WIDTH**2 + 2 * WIDTH * MLP) + 2 * rows**2 * WIDTH
    projector = PATCHES * (WIDTH * HIDDEN + HIDDEN**2)
    products = 3 * layer + PATCHES * 16 * 16 * 3 * WIDTH + projector
    assert found["flops"] == pytest.approx(2 * products * found["batch"] / DEVICES, rel=0.03)


def test_parameters_are_read_once(programs):
    found = programs["tower"]
    assert found["parameters"] <= found["bytes"]
    assert found["bytes"] <= 1.1 * (found["arguments"] + found["output"])
    assert found["temporaries"] < found["parameters"]


def test_features_are_split_and_stay_in_bfloat16(programs):
    picture = PATCHES * HIDDEN // DEVICES * 2
    batch = programs["tower"]["batch"]
    assert batch * picture <= programs["tower"]["output"] < 1.01 * batch * picture
    assert programs["features"] == (2 * 64 + batch) * picture


def test_chunks_get_their_patches_by_one_exchange(programs):
    """[4 chunks, 128 tokens, H] on every device: two of each, the fewest of exact programs."""
    found = programs["gather"]
    assert found["collectives"] == {"all-gather": 1}
    assert found["output"] == 4 * 128 * HIDDEN * 2
    assert found["temporaries"] <= found["output"]
