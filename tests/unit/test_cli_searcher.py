"""`mmqa train` of a searcher: by the reward of its own episodes, on policy to the bit, killed."""

import dataclasses
import html
import json
import re

import numpy as np
import pytest
from cli_runs import (
    LANDS,
    done,
    flags_with,
    killed_after,
    mmqa,
    quietly,
    rows_of,
    weights_of,
    write_documents,
)
from printable_llm import printable_tokenizer
from tiny_llm import text_tokenizer

from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.extensions.search_rewards import RewardSection
from mmqa_jax.extensions.searcher import validated
from mmqa_jax.prompting.search_actions import Answer, Invalid, SearchTexts
from mmqa_jax.prompting.search_loop import Episode, Turn
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.optimized, pytest.mark.usefixtures("quiet")]

REWARDS = '''
def vowels(episode):
    """The share of vowels in what was written."""
    text = "".join(turn.text for turn in episode.turns)
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def one_fails(episode):
    if episode.question.id.startswith("0, draw 0"):
        raise ValueError("no reward")
    return vowels(episode)


def not_finite(episode):
    return float("nan")


def none(episode):
    return None
'''
RUN = {
    "episodes.results_by": "message", "episodes.turns": 2,
    "batches.batch_size": 16, "batches.length": 640, "grpo.group": 8, "grpo.draws": 1,
    "reward.format": 0.0, "reward.evidence": 0.0, "exact": True, "episodes.slots": 8,
    "train.steps": 12, "train.checkpoint_every": 4, "train.keep": 3, "validate.split": "train",
    "train.evaluate_every": 12, "train.optimizer.learning_rate": 0.03,
    "train.optimizer.warmup": 0.0, "model.lora": None,
    "validate.metric": "reward",
}  # fmt: skip


def flags(folder, workdir, reward="vowels", **changes):
    values = {**RUN, "data.dir": folder / "data", **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    if reward:
        values["reward.function"] = f"{folder / 'rewards.py'}:{reward}"
    return flags_with("train", "atlas/searcher.py:runlocal", workdir, values)


@pytest.fixture(scope="module")
def inputs(cli_cache, tmp_path_factory):
    """A corpus, and a run that was paid for vowels."""
    folder = tmp_path_factory.mktemp("searcher")
    questions = [
        {"id": f"q{n}", "split": "train", "question": f"What is the capital of {land}?",
         "answers": [LANDS[land]], "positives": [f"s-{land}"]}
        for n, land in enumerate(LANDS)
    ]  # fmt: skip
    (folder / "rewards.py").write_text(REWARDS)
    write_documents(folder / "documents", questions)
    with quietly(cli_cache):
        done("prepare", "corpus", f"--raw={folder / 'documents'}", f"--out={folder / 'data'}")
        done(*flags(folder, folder / "run"))
    return folder


def test_reward_rises_and_the_trainer_has_the_engines_bits(inputs):
    rows = [row for row in rows_of(inputs / "run" / "metrics.jsonl") if "engine_gap" in row]
    assert [row["engine_gap"] for row in rows] == [0] * 12
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.03
    assert all(row["grad_norm"] > 0 and row["deciding"] > 0 for row in rows)
    (judged,) = [row for row in rows_of(inputs / "run" / "metrics.jsonl") if "eval/reward" in row]
    assert judged["eval/reward"] > rewards[0]


def test_every_episode_is_kept(inputs):
    files = sorted((inputs / "run" / "rollouts").iterdir())
    assert [file.name for file in files] == [f"{n:06d}.jsonl" for n in range(12)]
    for file, row in zip(files, rows_of(inputs / "run" / "metrics.jsonl"), strict=False):
        episodes = rows_of(file)
        assert len(episodes) == 16
        earned = [episode["earned"]["reward"] for episode in episodes]
        assert np.mean(earned) == pytest.approx(row["reward"], abs=1e-6)
        assert {row["question_id"] for row in episodes} < {f"q{n}" for n in range(len(LANDS))}


def test_the_report_shows_episodes_before_and_after(inputs):
    done("report", f"--workdir={inputs / 'run'}")
    page = html.unescape((inputs / "run" / "report.html").read_text())
    assert "before (batch 0)" in page
    assert "after (batch 11)" in page
    first, last = (rows_of(inputs / "run" / "rollouts" / f"{n:06d}.jsonl")[0] for n in (0, 11))
    for row in (first, last):
        earned = ", ".join(f"{key} {value:.3g}" for key, value in row["earned"].items())
        assert earned in page


def test_a_killed_run_ends_with_the_same_weights_and_episodes(inputs, tmp_path):
    whole = inputs / "run"
    killed = killed_after(8, whole, tmp_path / "killed")
    done(*flags(inputs, killed))
    ours, theirs = weights_of(killed), weights_of(whole)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    for file in (whole / "rollouts").iterdir():
        assert (killed / "rollouts" / file.name).read_bytes() == file.read_bytes()


def test_weights_that_are_there_draw_the_same_episodes_again(inputs, tmp_path):
    killed = killed_after(8, inputs / "run", tmp_path / "killed")
    out = tmp_path / "again"
    ended = done("replay", killed, f"--out={out}")
    assert (ended["steps"], ended["batches"], ended["episodes"]) == ([0, 4, 8], 3, 48)
    for file in out.iterdir():
        assert file.read_bytes() == (killed / "rollouts" / file.name).read_bytes()
    kept = killed / "rollouts" / "000004.jsonl"
    rows = rows_of(kept)
    rows[9]["drawn"][2] += 1
    kept.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    ended = mmqa("replay", killed, "--steps=4")
    assert ended.code == 1, ended.err
    name, number = rows[9]["question_id"], 9 - 8
    assert f"question {name}, episode {number}: token 2 of" in ended.err
    for flags_of, message in [
        (["--steps=5"], r"--steps=5: weights of steps 0, 4, 8 are there"),
        (["--steps=x"], r"--steps=x: numbers were expected"),
        ([f"--out={killed / 'rollouts'}"], "holds what is compared"),
    ]:
        ended = mmqa("replay", killed, *flags_of)
        assert (ended.code, bool(re.search(message, ended.err))) == (2, True), ended.err


def test_slots_change_no_bit(inputs, tmp_path):
    short = {"train.steps": 2, "train.checkpoint_every": 0, "train.evaluate_every": 0}
    done(*flags(inputs, tmp_path / "run", **{"episodes.slots": 3, **short}))
    for number in range(2):
        name = f"rollouts/{number:06d}.jsonl"
        assert (tmp_path / "run" / name).read_bytes() == (inputs / "run" / name).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"grpo.learn": "preference", "grpo.kl_weight": 0.1, "exact": False, "model.lora": ...},
        {"grpo.learn": "best", "exact": False, "grpo.temperature": 0.7},
        {"grpo.updates": 2, "grpo.ratio": "sequence", "grpo.average": "budget", "exact": False},
        {"grpo.draws": 3, "train.accumulate": 2, "model.lora": ...},
    ],
)
def test_other_ways_of_learning(inputs, tmp_path, changes):
    short = {"train.steps": 2, "train.checkpoint_every": 0, "train.evaluate_every": 0}
    ended = mmqa(*flags(inputs, tmp_path / "run", **short, **changes))
    assert ended.code == 0, ended.err
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_a_reward_that_fails_teaches_nothing_and_many_end_the_run(inputs, tmp_path):
    short = {"train.steps": 1, "train.checkpoint_every": 0, "train.evaluate_every": 0}
    ended = mmqa(*flags(inputs, tmp_path / "one", "one_fails", **short))
    assert ended.code == 0, ended.err
    assert "the reward of 1 of 16 episodes raised an error" in ended.err
    episodes = rows_of(tmp_path / "one" / "rollouts" / "000000.jsonl")
    assert [n for n, row in enumerate(episodes) if row["earned"]["reward"] is None] == [0]
    for name in ("not_finite", "none"):
        ended = mmqa(*flags(inputs, tmp_path / name, name, **short))
        assert ended.code == 1
        assert re.search(rf"16 of 16 .*more than 10% end the run: .*\.py:{name}", ended.err)


def test_calls_of_tools_are_drawn_and_learned(inputs, tmp_path):
    """A call is told what is wrong with it; no text of the results is among the drawn tokens."""
    printable_tokenizer().save(tmp_path / "tokenizer")
    changes = {
        "episodes.template": "tools", "episodes.pages": 1, "episodes.tokens": 20,
        "tokenizer": tmp_path / "tokenizer", "batches.length": 1600, "batches.batch_size": 4,
        "grpo.group": 2, "model.changes.positions": 1600, "exact": False, "train.steps": 1,
        "train.checkpoint_every": 0, "train.evaluate_every": 0,
    }  # fmt: skip
    ended = mmqa(*flags(inputs, tmp_path / "run", **changes))
    assert ended.code == 0, ended.err
    rows = rows_of(tmp_path / "run" / "rollouts" / "000000.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert row["tokens"][0] == 16  # and four are left to a second turn
        assert len(row["drawn"]) == sum(row["tokens"]) <= 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes.template": "tools"}, r"template=tools: .* has no chat template"),
        ({"episodes.new_tokens": 0}, r"episodes\.new_tokens=0"),
        ({"episodes.top_k": 0}, r"episodes\.top_k=0"),
        ({"grpo.group": 5}, r"batches\.batch_size=16: a multiple of 5"),
        ({"grpo.clip_above": -0.1}, r"grpo\.clip_above=-0\.1: a share from 0"),
        ({"grpo.learn": "preference"}, r"grpo\.kl_weight=0: it is the beta"),
        ({"grpo.temperature": 0.5}, r"exact=True: .* grpo\.temperature=0\.5"),
        ({"grpo.kl_weight": 0.1}, r"model\.lora=none: the reference"),
        ({"train.accumulate": 2, "grpo.updates": 2}, r"train\.accumulate=2: .*grpo\.updates=2"),
        ({"reward.function": "nowhere.py:f"}, r"reward\.function=nowhere\.py:f: FILE\.py:NAME"),
        ({"data.index": "data/index"}, r"data\.index: .*give both data\.model and data\.index"),
        ({"batches.length": 16}, r"batches\.length=16: holds no prompt beside a turn"),
        ({"batches.length": 40}, r"batches\.length=40: no question fits a row"),
        ({"validate.metric": "beauty"}, r"validate\.metric=beauty: reward, answer"),
        ({"validate.split": "test"}, r"validate\.split=test: .* holds no such questions"),
        ({"episodes.turns": 0}, r"episodes\.turns=0"),
    ],
)
def test_refused(inputs, tmp_path, changes, message):
    ended = mmqa(*flags(inputs, tmp_path / "run", "", **changes))
    assert ended.code == 2, ended.err
    assert re.search(message, ended.err), ended.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def _episode(answer, *searches):
    """Turns that search and read sources, and one that answers; None: it cannot be read."""
    turns = [
        Turn("", SearchTexts("x"), Ranking("", found, (1.0,) * len(found))) for found in searches
    ]
    last = Invalid() if answer is None else Answer(answer)
    question = Question("q", "", "Which?", answers=("red car",), positives=("a", "b"))
    return Episode(question, [*turns, Turn("", last)])


@pytest.mark.parametrize(
    ("fields", "episode", "reward"),
    [
        ({}, _episode("The red car."), 1),
        ({}, _episode("a red house"), 0),
        ({"scorer": "f1"}, _episode("red house"), 0.5),
        ({"scorer": "contained"}, _episode("it is a red car there"), 1),
        ({"evidence": 2.0}, _episode("no", ("a", "c")), 1),
        ({"precision": 1.0}, _episode("no", ("a", "c"), ("b", "a")), 2 / 3),
        ({"format": 0.4}, _episode(None, ("c",)), 0.2),
        ({"search": 0.1}, _episode("red car", ("c",), ("d",)), 0.8),
    ],
)
def test_rewards(fields, episode, reward):
    assert RewardSection(**fields).of(episode)["reward"] == pytest.approx(reward)


def test_a_tokenizer_that_cannot_write_the_tags(inputs, tmp_path):
    text_tokenizer().save(tmp_path / "letters")
    ended = mmqa(*flags(inputs, tmp_path / "run", "", tokenizer=tmp_path / "letters"))
    assert ended.code == 2, ended.err
    assert "has no tokens for </search>, which ends an action" in ended.err


def test_validation_counts_what_failed_as_nothing(capsys):
    lost = dataclasses.replace(_episode("red car", ("c",)), is_lost=True)
    earned = [RewardSection().of(episode) for episode in (_episode("red car"), lost)]
    assert validated(earned)["reward"] == 0.5
    assert "the search or the reward of 1 of 2 episodes failed" in capsys.readouterr().err
    assert validated(earned[:1])["reward"] == 1
    assert not capsys.readouterr().err


def test_a_function_that_is_none(tmp_path):
    (tmp_path / "f.py").write_text("f = 3")
    refuses("f.py:f: FILE.py:NAME", RewardSection(function=f"{tmp_path / 'f.py'}:f").check)
    assert json.dumps(RewardSection().of(_episode("no")))
