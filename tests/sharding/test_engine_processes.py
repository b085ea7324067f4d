"""A mesh over all devices of a launch: two processes serve one engine, and both have its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import MMQA, finish, launch

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from tiny_llm import write_folder


def test_two_processes_answer_as_one(tmp_path):
    model = write_folder(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"ab{n * 'c'}\n" for n in range(5)))
    given = {"mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 1}
    command = [
        *(*MMQA, "prompt", f"--prompts={prompts}", f"--model={model}", "--no_cache", "--json"),
        *(f"--config.model.{key}={value}" for key, value in given.items()),
        *("--config.decoding.max_new_tokens=4", "--config.decoding.logprobs=True"),
    ]
    outs = [tmp_path / name / "out.jsonl" for name in ("alone", "first", "second")]
    for out in outs:
        out.parent.mkdir()
    finish(launch(1, *command, f"--out={outs[0]}", devices=2))
    # Of a launch each has its own file: one job cannot be done by two processes at once.
    said = finish(launch(2, *command, f"--out={outs[1]}", differing=(f"--out={outs[2]}",)))
    assert {json.loads(one.splitlines()[-1])["engine"]["devices"] for one in said} == {2}
    alone, *both = ([json.loads(row) for row in out.open()] for out in outs)
    for rows in both:
        for got, want in zip(rows, alone, strict=True):
            assert got["text"] == want["text"]
            assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-5)
