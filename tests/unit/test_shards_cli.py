"""`--shard`, `mmqa merge` and `mmqa status` with verbs that need no model."""

import json
import shutil

import pytest
from cli_runs import done, mmqa, rows_of
from row_runs import row_flags

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture
def search(data, tmp_path):
    return ["search", f"--data={data}", "--method=bm25", f"--out={tmp_path / 'found.jsonl'}"]


def test_shards_of_a_search(search, bm25, tmp_path, monkeypatch):
    """Two of a Slurm array, a merge that comes too early, and one that comes late."""
    out = tmp_path / "found.jsonl"
    flags = [*search, "--chunk=2", "--shard=auto"]
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    waits = {"questions": 5, "waiting_for_other_shards": True, "missing_parts": 2}
    assert done(*flags) == waits
    ended = mmqa("merge", out)
    assert ended.code == 2
    assert "2 of 3 parts are missing: 0, 2; start --shard=0 of 2 again" in ended.err
    status = done("status", out)
    assert (status["items"], status["items_done"], status["missing"]) == (5, 2, [0, 2])
    assert not status["complete"]
    shown = mmqa("status", out).out
    assert "2 of 5 items are done" in shown
    assert "missing parts: 0, 2." in shown
    assert not out.exists()

    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    result = done(*flags)
    assert result["recall"]["recall@1"] == 1.0
    assert out.read_bytes() == bm25.read_bytes()
    out.unlink()
    assert done("merge", out) == {"out": str(out), "rows": 5}
    assert out.read_bytes() == bm25.read_bytes()
    assert done(*flags) == result  # a shard once more: the scores
    status = done("status", out)
    assert status["complete"]
    assert status["missing"] == []
    assert status["seconds_left"] == 0
    # One process leaves no parts.
    shutil.rmtree(tmp_path / "found.jsonl.parts")
    assert done(*search, "--chunk=2") == result
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--shard=1/2", "--top_k=7"], "top_k is 100 there and 7 here"),
        (["--shard=1/2", "--split=train"], "questions is '.*' there"),
        (["--shard=1/2", "--webqa_compat"], "retriever is '.*' there"),
        (["--top_k=7"], "top_k is 100 there and 7 here"),
        (["--shard=2/2"], "I/N with I from 0 to N - 1"),
        (["--shard=1/2", "--chunk=0"], "--chunk=0: at least 1"),
    ],
)
def test_shards_that_do_not_belong_together(changed, message, search, refused):
    done(*search, "--chunk=2", "--shard=0/2")
    refused(*search, "--chunk=2", *changed, message=message)


def test_a_weight_is_chosen_by_one_process(search, refused):
    flags = [*search, "--method=fused", "--tune", "--split=val"]
    refused(
        *flags,
        "--shard=0/2",
        message="--tune with --shard or --engine: the weight is chosen over all",
    )


def test_there_is_nothing_to_merge(refused, tmp_path):
    (tmp_path / "out.jsonl").write_text("")
    for verb in ("merge", "status"):
        refused(verb, tmp_path / "out.jsonl", message="holds no parts of a job; name the --workd")
    (tmp_path / "out.jsonl.parts").mkdir()
    job = tmp_path / "out.jsonl.parts" / "job.json"
    job.write_text(json.dumps({"job": {"items": 0}, "complete": False}))
    refused("merge", tmp_path / "out.jsonl", message="job.json: is not a job's; delete it")


def test_shards_of_a_row(data, tmp_path):
    def flags(name):
        return [*row_flags("atlas:bm25", tmp_path / name, data, data, data), "--chunk=2"]

    whole = done(*flags("whole"))
    folder = tmp_path / "shared"
    assert done(*flags("shared"), "--shard=1/2")["waiting_for_other_shards"]
    assert not (folder / "predictions.jsonl").exists()
    assert done("status", folder)["missing"] == [0, 2]
    ended = mmqa(*flags("shared"), "--shard=0/2", "--limit=3")
    assert "holds a run of another config" in ended.err
    assert done(*flags("shared"), "--shard=0/2") == whole
    for name in ("predictions.jsonl", "scores.json", "retrieval/candidates.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [row["question_id"] for row in rows_of(folder / "per_question.jsonl")] == [
        row["question_id"] for row in rows_of(tmp_path / "whole" / "per_question.jsonl")
    ]
    assert not (tmp_path / "whole" / "parts").exists()
    (folder / "scores.json").unlink()
    assert done("merge", folder) == whole
    assert (folder / "scores.json").exists()
