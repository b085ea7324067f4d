"""A searcher that is killed with half a group drawn, at the hand-over and in an update goes on with
the same bits; what its checkpoints draw again is what it drew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from cli_runs import LANDS, done, flags_with, weights_of, write_documents

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

# Ends its process in the third batch: at an episode, before the engine gets weights, in a step.
REWARD = """
import os, signal
from mmqa_jax.extensions import searcher
from mmqa_jax.training.state import Step

place, _, number = os.environ.get("KILL_AT", "").partition(":")
calls = {"rollout": 0, "hand-over": 0, "update": 0}

def reached(here):
    calls[here] += 1
    if here == place and calls[here] == int(number):
        os.kill(os.getpid(), signal.SIGKILL)

def vowels(episode):
    reached("rollout")
    return sum(letter in "aeiou" for letter in episode.turns[0].text) / 9

hand_over, step = searcher.served_copy, Step.__call__

def handed_over(*arguments):
    copy = hand_over(*arguments)
    reached("hand-over")
    return copy

def stepped(*arguments):
    state = step(*arguments)
    reached("update")
    return state

searcher.served_copy, Step.__call__ = handed_over, stepped
"""
VALUES = {
    "episodes.results_by": "message", "episodes.turns": 2, "episodes.slots": 4,
    "episodes.new_tokens": 8, "batches.batch_size": 4, "batches.length": 576, "grpo.group": 2,
    "grpo.draws": 2, "train.steps": 4, "train.checkpoint_every": 1, "train.keep": 4,
    "train.evaluate_every": 0, "train.optimizer.learning_rate": 0.03,
}  # fmt: skip


def train(folder: Path, run: Path, kill_at: str = "") -> int:
    values = {**VALUES, "data.dir": folder / "data"}
    values["reward.function"] = f"{folder / 'rewards.py'}:vowels"
    words = flags_with("train", "atlas/searcher.py:runlocal", run, values)
    environment = {**os.environ, "KILL_AT": kill_at, "MMQA_PROGRESS": "off"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "mmqa_jax.cli", *map(str, words)]
    return subprocess.run(command, env=environment, cwd=ROOT, timeout=600).returncode


def test_kills_change_no_bit(tmp_path, cli_cache, monkeypatch):
    monkeypatch.setenv("MMQA_CACHE", str(cli_cache))
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    questions = [
        {"id": f"q{n}", "split": "train", "question": f"What is the capital of {land}?",
         "answers": [LANDS[land]]}
        for n, land in enumerate(LANDS)
    ]  # fmt: skip
    (tmp_path / "rewards.py").write_text(REWARD)
    write_documents(tmp_path / "documents", questions)
    done("prepare", "corpus", f"--raw={tmp_path / 'documents'}", f"--out={tmp_path / 'data'}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(tmp_path, whole) == 0
    # Of each attempt: an episode of the second batch, the second hand-over, the first update.
    for place in ("rollout:7", "hand-over:2", "update:1"):
        assert train(tmp_path, killed, place) == -signal.SIGKILL, place
    assert train(tmp_path, killed) == 0
    for name, array in weights_of(whole).items():
        np.testing.assert_array_equal(weights_of(killed)[name], array, err_msg=name)
    files = sorted(file.name for file in (whole / "rollouts").iterdir())
    assert files == [f"{n:06d}.jsonl" for n in range(4)]
    for name in files:
        ours, theirs = ((run / "rollouts" / name).read_bytes() for run in (killed, whole))
        assert ours == theirs, name
