"""kill -9 at random moments: the run ends bit-equal to one that nothing disturbed."""

from __future__ import annotations

import json
import random
import signal

import pytest
import tiny_run
from test_training_resume import assert_same_run

from mmqa_jax.weights.record import read_metadata

SETTINGS = {"log_every": 4, "checkpoint_every": 3, "evaluate_every": 15}
SEED = 20


def newest(workdir):
    """The latest complete checkpoint, 0 without one."""
    names = [folder.name for folder in (workdir / "checkpoints").glob("*")]
    return max([0, *(int(name) for name in names if name.isdigit())])


def killed(attempt, workdir, kills, changes):
    """Kills attempts at random moments after random batches; the one after the last, in this
    process, runs to the end.

    Returns:
      For each attempt that died, the checkpoint that it resumed from.
    """
    chance, origins = random.Random(SEED), []
    settings = json.dumps(changes)
    while len(origins) < kills:
        origin, moment = newest(workdir), (chance.randint(1, 12), chance.uniform(0, 0.25))
        ended = attempt(workdir, "random", *moment, settings)
        if ended.code == 0:
            break  # it was done before it could be killed
        assert ended.code == -signal.SIGKILL, ended.said
        origins.append(origin)
    tiny_run.run(workdir, tiny_run.pipeline(), validation=tiny_run.KEEP_BEST, **changes)
    return origins


@pytest.fixture(scope="module")
def kills(request):
    return request.config.getoption("--kills")


def test_killed_at_random_moments(tmp_path, kills, attempt):
    changes = {"steps": 8 * kills, **SETTINGS}
    seldom = changes | {"checkpoint_every": 15}
    tiny_run.run(
        tmp_path / "undisturbed", tiny_run.pipeline(), validation=tiny_run.KEEP_BEST, **seldom
    )
    origins = killed(attempt, tmp_path / "killed", kills, changes)
    # The kills were spread over the run: most left a new checkpoint to resume from.
    assert len(origins) >= min(kills, 4)
    assert len(set(origins)) >= len(origins) // 2
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")
    for name in ("killed", "undisturbed"):
        best = read_metadata(tmp_path / name / "best")
        assert best == read_metadata(tmp_path / "undisturbed" / "best")
    assert not list((tmp_path / "killed").glob("**/*tmp*"))
