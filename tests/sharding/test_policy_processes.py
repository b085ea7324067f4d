"""Policies on two processes: every draw, and what the trainer says of it, is one process's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import ROOT, launch, outcomes
from test_two_processes import CAPITALS, RING
from test_two_processes import data as corpus  # noqa: F401, a fixture

pytestmark = pytest.mark.slow
sys.path.append(str(ROOT / "tests" / "unit"))

# The trainer's divergence asks for the reference's log-probabilities, which are gathered.
SETTINGS = {
    "episodes": {"turns": 2, "new_tokens": 8, "slots": 4, "results_by": "message"},
    "batches": {"batch_size": 8, "length": 576},
    "grpo": {"group": 2, "draws": 1, "kl_weight": 0.01},
    "train": {"steps": 2, "checkpoint_every": 2, "log_every": 1, "evaluate_every": 2},
    "validate": {"split": "train", "questions": 4},
    "mesh": {"data": 4},
}
REWARD = """import jax

def vowels(episode):
    others = jax.process_index()  # process 0's values count
    return sum(x in "aeiou" for x in episode.turns[0].text) / 9 + others
"""


def flags(data: Path, rewards: Path, workdir: Path) -> list[str]:
    made = ["train", f"--config={ROOT}/configs/atlas/searcher.py:runlocal"]
    made += [f"--workdir={workdir}", f"--config.data.dir={data}"]
    made.append(f"--config.reward.function={rewards}:vowels")
    for section, values in SETTINGS.items():
        made += [f"--config.{section}.{name}={value}" for name, value in values.items()]
    return made


def test_two_processes_draw_as_one_does(corpus, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARD)
    found = {}
    for count in (1, 2):
        run = tmp_path / f"by_{count}"
        words = *RING, *flags(corpus, rewards, run)
        ended = outcomes(launch(count, *words, devices=4 // count, fresh=True))
        assert [code for code, _ in ended] == [0] * count, ended
        rollouts = {file.name: file.read_bytes() for file in (run / "rollouts").iterdir()}
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[count] = rollouts, rows
    (episodes, alone), (others, two) = found.values()
    assert len(CAPITALS) >= 4
    assert sorted(episodes) == sorted(others) == ["000000.jsonl", "000001.jsonl"]
    assert others["000000.jsonl"] == episodes["000000.jsonl"]
    for ours, theirs in zip(two, alone, strict=True):
        shared = {"loss", "reward", "kl", "tokens", "eval/reward", "engine_gap"} & ours.keys()
        assert shared
        for name in shared:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_two_processes_plan_as_one_does(tmp_path, monkeypatch):
    from planner_runs import prepare_questions, write_finished

    monkeypatch.setenv("MMQA_PROGRESS", "off")
    data = prepare_questions(tmp_path)
    outcomes_of = write_finished(tmp_path / "right", lambda n, plan: len(plan) / 3)
    made = ["train", f"--config={ROOT}/configs/okvqa/planner.py:reward_runlocal"]
    made += [f"--config.data.{name}={value}" for name, value in {
        "dir": data, "outcomes": outcomes_of, "split": "train", "folds": 1, "agents": "('manager',)",
    }.items()]  # fmt: skip
    made += [
        *("--config.tokenizer=corpus:600", "--config.validate.fold=0", "--config.mesh.data=4"),
        *("--config.train.steps=2", "--config.train.evaluate_every=2", "--config.data.cost=0.1"),
        "--config.batches.batch_size=8",
    ]
    metrics = {}
    for count in (1, 2):
        run = tmp_path / f"by_{count}"
        words = *RING, *made, f"--workdir={run}"
        ended = outcomes(launch(count, *words, devices=4 // count, fresh=True))
        assert [code for code, _ in ended] == [0] * count, ended
        metrics[count] = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
    for ours, theirs in zip(metrics[2], metrics[1], strict=True):
        shared = {"loss", "reward", "kl", "calls", "tokens", "eval/reward"} & ours.keys()
        assert shared
        for name in shared:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
