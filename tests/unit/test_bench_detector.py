"""`tests.bench detector`: both sides compute the same, and rows say how fast."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from drawn_weights import drawn
from flax import nnx
from tiny_detectors import PRESETS, tiny

from tests.bench import Options, detector, detector_batch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet", "short_readings")]


@pytest.fixture
def tiny_kinds(monkeypatch):
    names = {preset.__name__: name for name, preset in PRESETS.items()}
    kinds = [kind._replace(config=tiny(names[kind.name])) for kind in detector.KINDS]
    monkeypatch.setattr(detector, "KINDS", kinds)
    build = detector.FasterRCNN  # its initializers are a hundred programs
    of_numpy = lambda config, rngs: drawn(lambda: build(config, rngs=nnx.Rngs()))  # noqa: E731
    monkeypatch.setattr(detector, "FasterRCNN", of_numpy)
    monkeypatch.setattr(detector, "_BLOCKS", (1, 2, 1, 1))
    monkeypatch.setitem(detector._SIZES, "small", (64, 96))
    for module in (detector, detector_batch):  # torchvision builds the published widths alone
        monkeypatch.setattr(module, "importable", lambda: False)


def test_rows_of_maps_and_of_a_whole_detector(tiny_kinds):
    only = ("vlp_x101", "bottom_up_r101", "vlp_x101_whole")
    result = detector.run(Options(rounds=1, only=only))
    *maps, whole = result["rows"]
    assert [row["name"] for row in result["rows"]] == list(only)
    for row in maps:
        assert row["ratio"] > 0
        assert row["deviation"] < 1e-4  # else the harness stops at .001
        assert row["gflops"] > 0
    assert whole["ours"] > 0
    assert whole["peer"] is None
    assert whole["torchvision"] == "cannot be imported"


def test_a_batch_and_its_parts(tiny_kinds):
    """On a CPU these rows are asked for by name."""
    only = ("vlp_x101_batch", "vlp_x101_torchvision")
    batch, beside = detector.run(Options(rounds=1, only=only))["rows"]
    assert batch["pictures"] == 2
    assert batch["regions"] > 0
    assert batch["planned_gib"] > 0
    parts = [batch[name] for name in ("trunk", "proposals", "regions_features", "classes", "copy")]
    assert all(part > 0 for part in parts)
    assert beside["ours"] > 0
    assert beside["peer"] is None


def test_the_parts_of_a_batch_are_the_whole():
    """What the parts hand on is what the detector finds in one call."""
    kind = detector.KINDS[1]._replace(config=tiny("maskrcnn"))
    drawn = detector_batch.Drawn.of(kind, (64, 96), 2)
    graphdef, state = nnx.split(drawn.model)
    want = drawn.model.regions(drawn.pictures)
    got = detector_batch.parts(graphdef, state, drawn.pictures)["classes"]()
    assert want.valid.any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
