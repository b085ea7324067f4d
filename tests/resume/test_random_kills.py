"""kill -9 at random moments: the run ends bit-equal to one that nothing disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from kills import SETTINGS
from test_training_resume import assert_same_run

from mmqa_jax.weights.folder import read_metadata

KILLS = str(Path(__file__).with_name("kills.py"))
SEED = 20


def killed(workdir, kills, steps):
    done = subprocess.run(
        [sys.executable, KILLS, *map(str, (workdir, SEED, kills, steps))],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def kills(request):
    return request.config.getoption("--kills")


def test_killed_at_random_moments(tmp_path, kills):
    steps = 8 * kills
    tiny_run.run(
        tmp_path / "undisturbed", tiny_run.pipeline(), steps=steps, validation=tiny_run.KEEP_BEST,
        **SETTINGS,
    )  # fmt: skip
    found = killed(tmp_path / "killed", kills, steps)
    # The kills were spread over the run: most left a new checkpoint to resume from.
    assert found["kills"] >= min(kills, 4)
    assert len(set(found["from"])) >= found["kills"] // 2
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")
    for name in ("killed", "undisturbed"):
        best = read_metadata(tmp_path / name / "best")
        assert best == read_metadata(tmp_path / "undisturbed" / "best")
    assert not list((tmp_path / "killed").glob("**/*tmp*"))
