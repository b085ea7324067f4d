"""Validation on two processes finds what one finds, and each of them does a part of the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import finish, launch

SCRIPT = str(Path(__file__).with_name("evaluate.py"))


def evaluated(processes: int, devices: int, mesh: dict[str, int], order: list[int]) -> list[dict]:
    """What each process printed."""
    started = launch(
        processes, sys.executable, SCRIPT, json.dumps(mesh), json.dumps(order), devices=devices
    )
    return [json.loads(out.splitlines()[-1]) for out in finish(started)]


def numbers(tree) -> list[float]:
    """The numbers of nested lists and dicts."""
    if isinstance(tree, dict):
        return [x for name in sorted(tree) for x in numbers(tree[name])]
    if isinstance(tree, list):
        return [x for one in tree for x in numbers(one)]
    return [] if isinstance(tree, str) else [tree]


def words(tree) -> list[str]:
    """The texts of nested lists."""
    if isinstance(tree, list):
        return [x for one in tree for x in words(one)]
    return [tree] if isinstance(tree, str) else []


def test_two_processes_evaluate_as_one_does():
    """Parameters split over both; process 0 has the first and the last rows of a batch."""
    (alone,) = evaluated(1, 1, {"data": 1}, [0])
    two = evaluated(2, 2, {"data": 2, "fsdp": 2}, [0, 2, 3, 1])
    assert two[0].keys() == alone.keys() == {"contrastive", "rerank", "answer"}
    for task, expected in alone.items():
        for process in two:
            found = process[task]
            assert found["values"] == pytest.approx(expected["values"])
            assert words(found["detail"]) == words(expected["detail"])
            assert numbers(found["detail"]) == pytest.approx(numbers(expected["detail"]), abs=1e-5)
        shares = [set(process[task]["decoded"]) for process in two]
        assert shares[0] | shares[1] == set(expected["decoded"]) == set("0123456")
        assert sum(map(len, shares)) < 14
        # In the pairs of a reranker a picture is there several times, elsewhere once.
        assert task == "rerank" or not shares[0] & shares[1]
