"""What training steps for several TPU slices send over the data-center network, as XLA compiles them.

slices_program.py compiles them in a process of its own, where JAX's platform is the CPU.
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
    """Program -> its facts (see slices_program.facts)."""
    return {found["name"]: found for found in program_facts("slices_program.py")}


@pytest.mark.parametrize(
    ("name", "crossing"),
    [("data", {"data"}), ("fsdp", {"fsdp"}), ("both", {"data", "fsdp", "data+fsdp"})],
)
def test_data_and_fsdp_alone_cross_slices(programs, name, crossing):
    """Nothing is permuted over all axes, as XLA did with a shard of the embeddings (`gather_features`)."""
    found = programs[name]
    assert "one-to-one" not in found["sent"]
    assert {over.split()[1] for over in found["sent"]} <= crossing
    assert {over.split()[1] for over in found["planned"]} <= crossing
    each = len(found["owners"]) // len(set(found["owners"]))
    assert found["last_device"] == each - 1  # all other collectives are of one slice
    # The lowered program, by which facts are kept, does not say where its devices are.
    assert found["slices"] == found["owners"], "python -m tests.hlo.refresh"


def test_a_chip_sends_its_part_of_the_gradients_to_the_other_slice(programs):
    """Once, as the plan counts it; XLA sums the embeddings' and the norms' in float32."""
    found = programs["data"]
    (least,) = found["planned"].values()
    assert found["sent"].keys() == found["planned"].keys() == {"all-reduce data"}
    assert least <= found["sent"]["all-reduce data"] <= 1.15 * least


@pytest.mark.parametrize("name", ["fsdp", "both"])
def test_parameters_that_cross_slices_cross_by_parts(programs, name):
    """Of one layer XLA gathers once for both passes; gradients it sums whole, not by parts."""
    sent, least = programs[name]["sent"], programs[name]["planned"]
    assert 0.5 * least["all-gather fsdp"] <= sent["all-gather fsdp"] <= least["all-gather fsdp"]
    sums = sum(size for over, size in sent.items() if over.startswith("all-reduce"))
    wanted = sum(size for over, size in least.items() if not over.startswith("all-gather"))
    assert wanted <= sums <= 2.3 * wanted
