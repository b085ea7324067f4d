"""`mmqa train` of a searcher that sees: a step of GRPO on episodes with pictures, by a tiny Qwen-VL."""

import re

import numpy as np
import pytest
from cli_runs import LANDS, done, flags_with, mmqa, rows_of, write_documents
from test_cli_searcher import REWARDS

from mmqa_jax.extensions import tool_search
from mmqa_jax.prompting.search_actions import Answer, SearchPictures, Zoom

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]
RUN = {
    "episodes.turns": 3, "episodes.top_k": 1, "episodes.new_tokens": 8, "pictures.most": 2,
    "batches.batch_size": 4, "batches.length": 256, "grpo.group": 2, "grpo.draws": 1,
    "model.lora": None, "train.steps": 2, "train.checkpoint_every": 0, "train.log_every": 1,
    "train.evaluate_every": 2, "validate.split": "train", "train.optimizer.warmup": 0.0,
    "train.optimizer.learning_rate": 0.01, "validate.questions": 1,
}  # fmt: skip


@pytest.fixture
def make_flags(tmp_path, monkeypatch):
    """Flags of a run, in whose episodes a random model's turns are a search, a look and an answer."""
    actions = (SearchPictures("flag"), Zoom(1, (0, 0, 500, 500)), Answer("red [1]"))
    query = tool_search.ToolStyle.query
    turns = []  # of the query that is read next; all take their turns together

    def asked(style, episode, query_id):
        turns[:] = [len(episode.turns)]
        return query(style, episode, query_id)

    monkeypatch.setattr(tool_search, "_HEAD", "")
    monkeypatch.setattr(tool_search.ToolStyle, "tools", [])
    monkeypatch.setattr(tool_search.ToolStyle, "query", asked)
    monkeypatch.setattr(
        tool_search.ToolStyle, "read", lambda self, text, *, stopped: (text, actions[turns[0]])
    )
    questions = [
        {"id": f"q{n}", "split": "train", "question": f"What is on the flag of {land}?",
         "answers": ["red"], "positives": [f"s-{land}"]}
        for n, land in enumerate(LANDS)
    ]  # fmt: skip
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_documents(tmp_path / "documents", questions)
    done("prepare", "corpus", f"--raw={tmp_path / 'documents'}", f"--out={tmp_path / 'data'}")

    def make(name, **changes):
        values = {**RUN, "data.dir": tmp_path / "data", **changes}
        values["reward.function"] = f"{tmp_path / 'rewards.py'}:vowels"
        return flags_with("train", "atlas/searcher.py:pictured_runlocal", tmp_path / name, values)

    return make


def test_episodes_with_pictures_are_learned(make_flags, tmp_path):
    """The trainer sees of every drawn token what the engine saw: of pictures, zooms and texts."""
    done(*make_flags("run"))
    rows = [row for row in rows_of(tmp_path / "run" / "metrics.jsonl") if "engine_gap" in row]
    assert len(rows) == 2
    for number, row in enumerate(rows):
        assert row["engine_gap"] < 1e-5
        assert np.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        episodes = rows_of(tmp_path / "run" / "rollouts" / f"{number:06d}.jsonl")
        assert [len(episode["turns"]) for episode in episodes] == [3] * 4
        assert all(episode["turns"][0]["sources"][0].startswith("p-") for episode in episodes)
        # Results and pictures are not learned.
        assert row["tokens"] == np.mean([len(episode["drawn"]) for episode in episodes])
        assert row["tokens"] <= 24
    (judged,) = [row for row in rows_of(tmp_path / "run" / "metrics.jsonl") if "eval/reward" in row]
    assert judged["eval/searches"] == 1


def test_a_picture_more_than_a_row_holds_ends_an_episode(make_flags, tmp_path):
    done(*make_flags("run", **{"pictures.most": 1, "train.steps": 1, "train.evaluate_every": 0}))
    episodes = rows_of(tmp_path / "run" / "rollouts" / "000000.jsonl")
    for episode in episodes:
        assert len(episode["turns"]) == 2
        assert "shows 2 pictures, and a row of training has room for 1" in episode["problem"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes.template": "search_r1"}, r"template=search_r1: with pictures only tools"),
        ({"grpo.updates": 2}, r"grpo\.updates=2: with pictures only 1"),
        ({"exact": True}, r"exact=True: with pictures only False"),
        ({"pictures.most": 64}, r"batches\.length=256: with .* of a picture"),
    ],
)
def test_refused(make_flags, changes, message):
    ended = mmqa(*make_flags("run", **changes))
    assert ended.code == 2, ended.err
    assert re.search(message, ended.err), ended.err
