"""Processes of one launch answer prompts: as one engine over all devices, or each its share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import finish, launch

from mmqa_jax.cli import main

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from tiny_llm import write_folder

SEVERAL = [sys.executable, str(Path(__file__).with_name("several_mmqa.py"))]
ONE_ENGINE = [f"--config.model.mesh.{axis}" for axis in ("data=2", "fsdp=1", "tensor=1")]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    model = write_folder(folder / "model")

    def of(count: int, *flags: str) -> list[str]:
        prompts = folder / f"{count}.txt"
        prompts.write_text("".join(f"ab{n * 'c'}\n" for n in range(count)))
        return [
            *("prompt", "--raw", f"--prompts={prompts}", f"--model={model}", "--json", *flags),
            *("--config.decoding.max_new_tokens=4", "--config.decoding.logprobs=True"),
        ]

    return of


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The seven answers of one process with one device."""
    out = tmp_path_factory.mktemp("whole") / "whole.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        assert main([*command(7, f"--out={out}", "--no_cache")]) == 0
    return out


class Answered(NamedTuple):
    """What two processes wrote, and printed for each of their commands."""

    folder: Path
    printed: list[list[dict]]  # of process 0 and of process 1


@pytest.fixture(scope="module")
def by_two(command, tmp_path_factory):
    """One engine over both answers five prompts and then seven; an engine each answers five."""
    folder = tmp_path_factory.mktemp("by_two")
    for process in ("0", "1"):
        (folder / process).mkdir()
    own = folder / "PROCESS"
    for_both = [*ONE_ENGINE, f"--cache={own / 'cache'}"]
    commands = (
        *command(5, *for_both, f"--out={own / 'five.jsonl'}"),
        "then",
        *command(7, *for_both, f"--out={own / 'seven.jsonl'}"),
        "then",
        *command(5, "--no_cache", "--chunk=2", f"--out={folder / 'shared.jsonl'}"),
    )
    said = finish(launch(2, *SEVERAL, *commands))
    lines = [[row for row in one.splitlines() if row.startswith("{")] for one in said]
    return Answered(folder, [[json.loads(row) for row in rows] for rows in lines])


def same(out: Path, whole: Path, count: int) -> None:
    """The first answers of a file that one process wrote."""
    rows, alone = ([json.loads(row) for row in path.open()] for path in (out, whole))
    assert len(rows) == count
    for got, want in zip(rows, alone, strict=False):
        assert (got["id"], got["text"]) == (want["id"], want["text"])
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-5)


def test_two_processes_answer_as_one(by_two, whole):
    """Process 0 alone has a file and a cache; what these hold neither computes again."""
    mine, other = by_two.folder / "0", by_two.folder / "1"
    same(mine / "five.jsonl", whole, 5)
    same(mine / "seven.jsonl", whole, 7)
    zero, one = (results[:2] for results in by_two.printed)
    assert {result["engine"]["devices"] for result in zero + one} == {2}
    assert [result["answered"] for result in zero] == [5, 2]
    assert [result["answered"] for result in one] == [5, 2]
    assert zero[1]["cached"] == 5
    assert one[1]["cached"] == 0
    assert not list(other.iterdir())
    assert not list(mine.glob("*.parts"))


def test_processes_with_an_engine_each_share_the_prompts(by_two, whole):
    same(by_two.folder / "shared.jsonl", whole, 5)
    zero, one = by_two.printed
    assert sorted([zero[2]["answered"], one[2]["answered"]]) == [2, 3]
    assert zero[2]["engine"]["devices"] == one[2]["engine"]["devices"] == 1
