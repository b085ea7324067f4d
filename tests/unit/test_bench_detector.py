"""`tests.bench detector`: both sides compute the same, and rows say how fast."""

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_detectors import PRESETS, tiny

from mmqa_jax.inference.region_detector import make_find
from tests.bench import Options, detector, detector_batch, runner
from tests.bench.runner import Peak
from tests.drawn_weights import drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet", "short_readings")]


@pytest.fixture
def tiny_kinds(monkeypatch):
    names = {preset.__name__: name for name, preset in PRESETS.items()}
    kinds = [kind._replace(config=tiny(names[kind.name])) for kind in detector.KINDS]
    monkeypatch.setattr(detector, "KINDS", kinds)
    build = detector.FasterRCNN  # its initializers are a hundred programs
    of_numpy = lambda config, rngs: drawn(lambda: build(config, rngs=nnx.Rngs()))  # noqa: E731
    monkeypatch.setattr(detector, "FasterRCNN", of_numpy)
    of_batches = []

    def of_batch(build, mesh):
        if not of_batches:
            of_batches.append(drawn(build, stddev=0.05))
        return of_batches[0]

    monkeypatch.setattr(detector_batch, "init_sharded", of_batch)
    monkeypatch.setattr(detector, "_BLOCKS", (1, 1, 1, 1))
    monkeypatch.setitem(detector._SIZES, "small", (64, 96))
    small_square = lambda side, dtype, **options: Peak(128, dtype, **options)  # noqa: E731
    monkeypatch.setattr(detector, "Peak", small_square)
    monkeypatch.setattr(runner, "_PROBE", 64)  # of 512: a second where there is no bfloat16
    # Several threads, which the worker would keep, wait for each other longer than they compute.
    monkeypatch.setattr(detector.torch_reference, "threads", lambda: 1)
    for module in (detector, detector_batch):  # torchvision builds the published widths alone
        monkeypatch.setattr(module, "importable", lambda: False)


def test_rows_and_the_parts_of_a_batch(tiny_kinds, monkeypatch):
    """On a CPU the last two are asked for by name."""
    maps, whole = "vlp_x101", "vinvl_x152c4_whole"
    batch, beside = "vinvl_x152c4_batch", "vinvl_x152c4_torchvision"
    parts, compared = detector_batch.parts, []

    def compare(graphdef, state, pictures):
        """What the parts hand on is what the detector finds in one call."""
        found = parts(graphdef, state, pictures)
        want, got = make_find(graphdef)(state, pictures), found["classes"]()
        assert want.valid.any()
        assert np.abs(want.features).max() > 0.1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
        compared.append(got)
        return found

    monkeypatch.setattr(detector_batch, "parts", compare)
    only = (maps, whole, batch, beside)
    result = detector.run(Options(rounds=1, only=only))
    rows = {row["name"]: row for row in result["rows"]}
    assert tuple(rows) == only
    assert rows[maps]["ratio"] > 0
    assert rows[maps]["deviation"] < 1e-4  # else the harness stops at .001
    assert rows[maps]["gflops"] > 0
    for name in (whole, beside):
        assert rows[name]["ours"] > 0
        assert rows[name]["peer"] is None
        assert rows[name]["torchvision"] == "cannot be imported"
    assert len(compared) == 1
    assert rows[batch]["pictures"] == 2
    assert rows[batch]["regions"] > 0
    assert rows[batch]["planned_gib"] > 0
    timed = ("trunk", "proposals", "regions_features", "classes", "copy")
    assert all(rows[batch][name] > 0 for name in timed)
