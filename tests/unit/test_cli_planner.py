"""`mmqa train` of MAVL's planner: on plans that answered right, and by what its own plans earn."""

import re
import shutil

import jax
import jax.monitoring
import numpy as np
import pytest
from cli_runs import ROOT, done, flags_with, killed_after, mmqa, quietly, rows_of, weights_of
from planner_runs import PLANS, prepare_questions, write_finished

from mmqa_jax.core.config import load_config
from mmqa_jax.models.llama.network import unstack_layers
from mmqa_jax.tasks.policy import served_copy
from mmqa_jax.tasks.registry import check_config
from mmqa_jax.weights.record import read_metadata
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TINY = {
    "data.split": "train", "data.agents": "('manager',)", "data.folds": 1, "validate.fold": 0,
    "validate.questions": 0, "batches.length": 152, "train.log_every": 1,
    "train.optimizer.warmup": 0.0, "inference.new_tokens": 16,
}  # fmt: skip
LEARNED = {
    **TINY, "tokenizer": "corpus:600",
    "model.changes.layers": 1, "model.changes.heads": 2, "model.changes.kv_heads": 1,
    "batches.batch_size": 4, "batches.targets": 16, "batches.threads": 0,
    "train.steps": 60, "train.log_every": 10, "train.optimizer.learning_rate": 0.015,
    "train.checkpoint_every": 0, "train.evaluate_every": 60,
}  # fmt: skip
REWARDED = {
    **TINY, "batches.batch_size": 64, "grpo.group": 8, "train.steps": 20, "grpo.kl_weight": 0.01,
    "train.optimizer.learning_rate": 0.006, "train.checkpoint_every": 5, "train.keep": 2,
}  # fmt: skip
RIGHT = (1,)


def flags(inputs, mode, workdir, values, outcomes, **changes):
    values = {**values, "data.dir": inputs / "data", "data.outcomes": inputs / outcomes, **changes}
    return flags_with("train", f"okvqa/planner.py:{mode}", workdir, values)


def rewarded(inputs, workdir, **changes):
    values = {**REWARDED, "init": inputs / "learned", "tokenizer": ""}
    values = {key: value for key, value in values.items() if "model.changes" not in key}
    changes = {"data.chat": False, **changes}
    return flags(inputs, "reward", workdir, values, "one_right", **changes)


@pytest.fixture(scope="module")
def inputs(cli_cache, tmp_path_factory):
    """A planner that has learned another plan for most questions, and one that was rewarded."""
    folder = tmp_path_factory.mktemp("planner")
    with quietly(cli_cache):
        prepare_questions(folder)
        taught = [*PLANS[:7], RIGHT]  # so that it is drawn often enough to be rewarded
        write_finished(folder / "each_another", lambda n, plan: float(plan == taught[n]))
        write_finished(folder / "one_right", lambda n, plan: float(plan == RIGHT))
        learned = flags(folder, "runlocal", folder / "learned", LEARNED, "each_another")
        done(*learned, initializers=True)
        done(*rewarded(folder, folder / "rewarded", **{"grpo.updates": 2}))
    return folder


def test_plans_that_answered_right_are_learned(inputs):
    rows = rows_of(inputs / "learned" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.2 * losses[0]
    (judged,) = [row for row in rows if "eval/score" in row]
    assert judged["eval/score"] == judged["eval/score_manager"]
    assert judged["eval/reward"] == pytest.approx(
        judged["eval/score"] - 0.02 * judged["eval/calls"]
    )
    record = read_metadata(inputs / "learned")
    assert (record["model"], record["task"]) == ("llama", "mavl_planner")


def test_reward_rises_where_one_plan_is_always_right(inputs):
    rows = [row for row in rows_of(inputs / "rewarded" / "metrics.jsonl") if "reward" in row]
    # Two drawings of 64 plans, and five: by chance they differ by .05 (a standard error). The curve
    # is not the same on every processor.
    first, last = rows[:4], rows[10:]
    for name in ("score", "plan/1"):
        assert np.mean([row[name] for row in last]) > np.mean([row[name] for row in first]) + 0.15
    shares = [value for name, value in rows[0].items() if name.startswith("plan/")]
    assert sum(shares) == pytest.approx(1)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)  # the policy starts as the reference
    assert last[-1]["kl"] > 1e-3
    assert all(0 < row["tokens"] <= 16 for row in rows)
    for row in rows:
        assert row["reward"] == pytest.approx(row["score"] - 0.02 * row["calls"], abs=1e-5)


def test_a_killed_run_ends_with_the_same_weights(inputs, tmp_path):
    """Step 15 is between two updates on the same plans, which its checkpoint holds; 17 draws anew."""
    whole = inputs / "rewarded"
    killed = killed_after(15, _with_best(whole, tmp_path / "whole"), tmp_path / "killed")
    done(*rewarded(inputs, killed, **{"grpo.updates": 2}))
    ours, theirs = weights_of(killed), weights_of(whole)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    for ours, theirs in zip(*(rows_of(f / "metrics.jsonl") for f in (killed, whole)), strict=True):
        same = ("step", "loss", "reward", "kl", "tokens")
        assert [ours.get(name) for name in same] == [theirs.get(name) for name in same]


def _with_best(run, copy):
    """The run with a folder `best`, which `killed_after` removes."""
    shutil.copytree(run, copy)
    (copy / "best").mkdir()
    return copy


def test_a_step_compiles_nothing_that_an_earlier_one_has():
    """Every step serves the engine with other weights: by the same programs."""
    task = check_config(load_config(f"{ROOT}/configs/okvqa/planner.py:reward_runlocal"))
    model = task.objective(100).init(jax.random.key(0))
    unstack_layers(served_copy(model, None))
    model.layers.q.lora_b[...] += 1
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        unstack_layers(served_copy(model, None))
        assert compiled == []
        jax.jit(lambda x: x * 3 + 1)(np.ones(7)).block_until_ready()
        assert compiled  # the listener does hear of compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpo.group": 5}, r"batches\.batch_size=64: a multiple of 5, .* \(grpo\.group=5"),
        ({"data.fold": 1}, r"data\.fold=1: 0 to 0 was expected"),
        ({"data.agents": "('boss',)"}, r"data\.agents=\('boss',\): .* one of junior, senior"),
        ({"data.chat": True}, r"data\.chat=True: the model has no chat template"),
        ({"inference.new_tokens": 152}, r"batches\.length=152: holds no prompt"),
        ({"batches.length": 40}, r"none has a planner's prompt of at most 24 tokens"),
        ({"data.outcomes": "nowhere"}, r"data\.outcomes=nowhere: has no trace\.jsonl"),
    ],
)
def test_refused(inputs, tmp_path, changes, message):
    ended = mmqa(*rewarded(inputs, tmp_path / "run", **changes))
    assert ended.code == 2, ended.err
    assert re.search(message, ended.err), ended.err


def test_the_reference_needs_additions():
    config = load_config(f"{ROOT}/configs/okvqa/planner.py:reward_runlocal")
    config.model.lora = None
    refuses(r"model\.lora=none: the reference is the model without", check_config, config)
