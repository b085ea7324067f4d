"""What a run records beside its losses, over a kill: time split, goodput, a trace."""

import itertools

import jax
import pytest
import tiny_run
from test_training_resume import run

from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.training.attempts import PHASES, goodput, read_attempts
from mmqa_jax.training.loop import Observed, Steps


def test_the_wall_time_of_a_killed_run_is_accounted_for(tmp_path, killed_run):
    killed_run(tmp_path, "at_batch", 24, '{"steps": 36}')
    (start, *rows) = read_attempts(tmp_path)
    assert (start["event"], start["step"]) == ("start", 0)
    assert [row["step"] for row in rows if row["event"] == "save"] == [10, 20]
    run(tmp_path, steps=36, observed=Observed(profile=Steps(2, 4)))
    assert not (tmp_path / "profile").exists()  # the steps to trace lie before this attempt
    found, rows = goodput(read_attempts(tmp_path)), read_attempts(tmp_path)
    resumed = [row["step"] for row in rows if row["event"] == "start"][1]
    assert resumed in (10, 20)
    assert (rows[-1]["event"], rows[-1]["step"]) == ("end", 36)
    assert (found.attempts, found.lost_steps) == (2, 20 - resumed)
    assert 0 < found.share < 1
    assert sum(found.seconds.values()) == pytest.approx(rows[-1]["time"] - rows[0]["time"], abs=0.1)
    assert found.seconds["between"] > 0
    for name in ("counted", "compile", "checkpoint", "evaluate", "start"):
        assert found.seconds[name] > 0, name
    # The rows of metrics.jsonl split the time between them.
    trained = [row for row in read_metrics(tmp_path) if "loss" in row and row["step"] > resumed + 4]
    for before, row in itertools.pairwise(trained):
        split = sum(row.get(f"{phase}_seconds", 0) for phase in PHASES)
        assert split == pytest.approx(row["time"] - before["time"], rel=0.2, abs=0.1)
        assert row["examples_per_second"] > 0


def test_steps_are_traced(tmp_path):
    """Up to the last."""
    run(
        tmp_path,
        tiny_run.pipeline(1),
        steps=12,
        evaluate_every=0,
        observed=Observed(profile=Steps(10, 12)),
    )
    (file,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    traced = set()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    traced.add(dict(event.stats).get("step_num"))
    assert traced == {10, 11, 12}
