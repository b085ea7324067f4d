"""Loaded straight onto a 2 x 2 x 2 mesh, models compute what they do on one device.

Those of LLaMA, LLaVA, BART and Oscar are compared in their own test files.
"""

from __future__ import annotations


def test_eight_devices_equal_one(run_on_devices):
    done = run_on_devices(8, "models_on_mesh.py")
    assert done.split() == ["clip", "modified_resnet", "bert", "vlp", "mcan", "mcan_openvqa"]
