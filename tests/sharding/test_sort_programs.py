"""What programs that choose the best of many sort on a TPU, as its own compiler says; none is needed.

XLA takes its kernel TopK where an array of two dimensions has more than about 64 k elements a row
for the best k, up to 128, and sorts everything otherwise; its estimate has nothing for sorts.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from processes import program_facts

from mmqa_jax.retrieval.indexes.mesh import _QUERY_BATCH

QUESTIONS, BEAMS, RESULTS = 8, 5, 20  # of sort_programs.py
_MOST = {  # elements of what TopK chose, or of rows that are too short for it
    "vlp_beams": QUESTIONS * BEAMS**2,
    "oscar_beams": QUESTIONS * BEAMS * 3 * BEAMS,  # three times as many, since captions end
    "t5_beams": QUESTIONS * BEAMS * 2 * BEAMS,
    "sampling": 0,
    "exact": QUESTIONS * 2 * RESULTS,
    "mesh": _QUERY_BATCH * 4 * RESULTS,  # of four devices
    "mesh_approx": _QUERY_BATCH * 4096,  # a block's candidates: too few for the 80 that are taken
}

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the TPU's compiler is made for Linux alone"
    ),
]


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in program_facts("sort_programs.py")}


def test_every_program_is_compiled(programs):
    assert programs.keys() == _MOST.keys()


@pytest.mark.parametrize("name", _MOST)
def test_only_what_was_chosen_is_sorted(programs, name):
    found = programs[name]
    assert max(found["sorts"], default=0) <= _MOST[name], found
    assert found["top_k"] == (name not in ("sampling", "mesh_approx"))
