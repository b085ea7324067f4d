"""kill -9 at random moments: the run ends bit-equal to one that nothing disturbed."""

import json
import random
import signal

import pytest
import tiny_run
from test_training_resume import assert_same_run

from mmqa_jax.training.attempts import read_attempts
from mmqa_jax.weights.record import read_metadata

SETTINGS = {"log_every": 4, "evaluate_every": 15}
SEED = 20


def killed(attempt, workdir, kills, changes):
    """Kills attempts at random moments after random batches; the one after the last, in this
    process, runs to the end.

    Returns:
      For each attempt, the checkpoint that it resumed from; 0: none.
    """
    chance, settings = random.Random(SEED), json.dumps(changes)
    for _ in range(kills):
        moment = chance.randint(1, 12), chance.uniform(0, 0.25)
        ended = attempt(workdir, "random", *moment, settings)
        if ended.code == 0:
            break  # it was done before it could be killed
        assert ended.code == -signal.SIGKILL, ended.said
    tiny_run.run(workdir, tiny_run.pipeline(), validation=tiny_run.KEEP_BEST, **changes)
    return [row["step"] for row in read_attempts(workdir) if row["event"] == "start"]


@pytest.fixture(scope="module")
def kills(request):
    return request.config.getoption("--kills")


@pytest.mark.parametrize(
    "every",
    [{"checkpoint_every": 3}, {"checkpoint_every": 20, "checkpoint_local_every": 2}],
    ids=["workdir", "own_disk"],
)
def test_killed_at_random_moments(tmp_path, kills, attempt, monkeypatch, every):
    if "checkpoint_local_every" in every:
        monkeypatch.setenv("MMQA_LOCAL_CHECKPOINTS", str(tmp_path / "disk"))
    changes = {"steps": 8 * kills, **SETTINGS, **every}
    seldom = {"steps": 8 * kills, **SETTINGS, "checkpoint_every": 15}
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
