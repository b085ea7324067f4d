"""Processes of one launch answer prompts: as one engine over all devices, or each its share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import MMQA, finish, launch

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from tiny_llm import write_folder

ONE_ENGINE = [f"--config.model.mesh.{axis}" for axis in ("data=2", "fsdp=1", "tensor=1")]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    model = write_folder(folder / "model")

    def of(count: int, *flags: str) -> list[str]:
        prompts = folder / f"{count}.txt"
        prompts.write_text("".join(f"ab{n * 'c'}\n" for n in range(count)))
        return [
            *(
                *MMQA,
                "prompt",
                "--raw",
                f"--prompts={prompts}",
                f"--model={model}",
                "--json",
                *flags,
            ),
            *("--config.decoding.max_new_tokens=4", "--config.decoding.logprobs=True"),
        ]

    return of


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The seven answers of one process with two devices."""
    out = tmp_path_factory.mktemp("whole") / "whole.jsonl"
    finish(launch(1, *command(7, *ONE_ENGINE, f"--out={out}", "--no_cache"), devices=2))
    return out


def same(out: Path, whole: Path, count: int) -> None:
    """The first answers of a file that one process wrote."""
    rows, alone = ([json.loads(row) for row in path.open()] for path in (out, whole))
    assert len(rows) == count
    for got, want in zip(rows, alone, strict=False):
        assert (got["id"], got["text"]) == (want["id"], want["text"])
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-5)


def test_two_processes_answer_as_one(command, whole, tmp_path):
    """Process 0 alone has a file and a cache; what these hold neither computes again."""
    out, cache = tmp_path / "out.jsonl", tmp_path / "cache"
    mine = [*ONE_ENGINE, f"--out={out}", f"--cache={cache}"]
    other = tmp_path / "other"
    other.mkdir()
    theirs = (f"--out={other / 'out.jsonl'}", f"--cache={other / 'cache'}")
    first = finish(launch(2, *command(5, *mine), differing=theirs))
    same(out, whole, 5)
    more = finish(launch(2, *command(7, *mine), differing=theirs))
    same(out, whole, 7)
    results = [[json.loads(one.splitlines()[-1]) for one in said] for said in (first, more)]
    assert {one["engine"]["devices"] for pair in results for one in pair} == {2}
    assert [[one["answered"] for one in pair] for pair in results] == [[5, 5], [2, 2]]
    assert [one["cached"] for one in results[1]] == [5, 0]
    assert not list(other.iterdir())
    assert not list(tmp_path.glob("*.parts"))


def test_processes_with_an_engine_each_share_the_prompts(command, whole, tmp_path):
    out = tmp_path / "out.jsonl"
    said = finish(launch(2, *command(5, "--no_cache", "--chunk=2", f"--out={out}")))
    same(out, whole, 5)
    results = [json.loads(one.splitlines()[-1]) for one in said]
    assert sorted(one["answered"] for one in results) == [2, 3]
    assert {one["engine"]["devices"] for one in results} == {1}
