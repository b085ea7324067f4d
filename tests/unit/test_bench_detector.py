"""`tests.bench detector`: both sides compute the same, and rows say how fast."""

from __future__ import annotations

import pytest
from drawn_weights import drawn
from flax import nnx
from tiny_detectors import PRESETS, tiny

from tests.bench import Options, detector
from tests.bench.torchvision_detectors import importable

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet", "short_readings")]


def test_rows_of_maps_and_of_a_whole_detector(monkeypatch):
    names = {preset.__name__: name for name, preset in PRESETS.items()}
    kinds = [kind._replace(config=tiny(names[kind.name])) for kind in detector.KINDS]
    monkeypatch.setattr(detector, "KINDS", kinds)
    build = detector.FasterRCNN  # its initializers are a hundred programs
    of_numpy = lambda config, rngs: drawn(lambda: build(config, rngs=nnx.Rngs()))  # noqa: E731
    monkeypatch.setattr(detector, "FasterRCNN", of_numpy)
    monkeypatch.setattr(detector, "_BLOCKS", (1, 2, 1, 1))
    monkeypatch.setitem(detector._SIZES, "small", (64, 96))
    only = ("vlp_x101", "bottom_up_r101", "vlp_x101_whole")
    result = detector.run(Options(rounds=1, only=only))
    *maps, whole = result["rows"]
    assert [row["name"] for row in result["rows"]] == list(only)
    for row in maps:
        assert row["ratio"] > 0
        assert row["deviation"] < 1e-4  # else the harness stops at .001
        assert row["gflops"] > 0
    assert whole["ours"] > 0
    if not importable():
        assert whole["peer"] is None
        assert whole["torchvision"] == "cannot be imported"
    else:
        assert whole["ratio"] > 0
