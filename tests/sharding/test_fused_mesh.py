"""A mesh splits the TPU's attention kernels by rows and heads, and changes nothing."""

from __future__ import annotations


def test_eight_devices_equal_one(run_on_devices):
    """Bit by bit: also what dropout drops."""
    assert run_on_devices(8, "fused_on_mesh.py").split() == ["encoder", "one_mask", "beams"]
