"""Training of the MCANs against Prophet's and openvqa's, restated in torch."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import mcan_torch
import numpy as np
import optax
import pytest
import test_mcan_openvqa
import torch
from compare import deviation, randomize
from flax import nnx
from shared_data import SHARED, require
from test_mcan import CONFIG as FINETUNED
from test_mcan import TorchMCAN
from torch import nn
from updates import (
    EPS,
    RATE,
    at_one_rate,
    optimizer_section,
    our_updates,
    same_updates,
    their_updates,
)

from mmqa_jax.core.config import load_module
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.answers import AnswerVocabulary, make_vocabulary, prep_ans
from mmqa_jax.data.formats.official import SOFT_LABELS
from mmqa_jax.data.schema import Question
from mmqa_jax.models.mcan.keys import mcan_key_map, mcan_openvqa_key_map, publish_mcan
from mmqa_jax.models.mcan.network import MCAN
from mmqa_jax.tasks.vqa import VQAObjective
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.layouts import Checkpoint, open_source
from mmqa_jax.weights.published import load_checkpoint

ROWS, STEPS = 3, 3
EPOCH = 443_757 // 64
# Softmax ignores the bias of keys, and a shift of all of AttFlat's scores: rounding alone.
NO_GRADIENT = r"key\.bias|linear_k\.bias|linear_q\.bias|attflat_\w+\.mlp\.linear\.bias"


def small(new_answers: int):
    return dataclasses.replace(
        FINETUNED,
        text=dataclasses.replace(FINETUNED.text, pooler=False, dropout=0.0, attention_dropout=0.0),
        fusion=dataclasses.replace(FINETUNED.fusion, dropout=0.0),
        grid=3,
        new_answers=new_answers,
    )


class Pretrained(TorchMCAN):
    """Without MCANForFinetune's new answers."""

    def __init__(self, config):
        super().__init__(config)
        self.proj1 = nn.Linear(config.fusion.flat_out, 0)


def batch(answers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, FINETUNED.text.vocab_size, (ROWS, 13)).astype("i4")
    ids[np.arange(13) >= np.array([13, 5, 2])[:, None]] = 0
    return {
        "question_ids": ids,
        "image": rng.normal(size=(ROWS, 9, FINETUNED.image_features)).astype("f4"),
        "targets": rng.choice([0.0, 0.3, 0.6, 0.9, 1.0], (ROWS, answers)).astype("f4"),
    }


def groups(model: nn.Module, rate: float) -> list[dict]:
    """optim.py, `get_optim`: BERT's parameters are a group of their own, at 0.01 of the rate."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bert" not in n], "lr": rate},
        {"params": [p for n, p in named if "bert" in n], "lr": 0.01 * rate},
    ]


def prophets_updates(model: nn.Module, arrays: dict, mode: str) -> list[tuple[float, dict, dict]]:
    """Loss, gradients and the parameters afterwards of each step, which is an epoch here."""
    betas = {"betas": (0.9, 0.98), "eps": 1e-9}
    if mode == "pretrain":
        rates, optimizer = [0.25, 0.5, 0.75], torch.optim.Adam(groups(model, 7e-5), **betas)
    elif mode == "head":
        optimizer = torch.optim.Adam(model.proj1.parameters(), 1e-3, **betas)
        rates = [1.0] * STEPS
    else:
        optimizer, rates = torch.optim.AdamW(groups(model, 5e-5), **betas), [1.0, 1.0, 0.2]
    highest = [group["lr"] for group in optimizer.param_groups]
    done = []
    for scale in rates:
        optimizer.zero_grad()
        logits, _ = model(torch.tensor(arrays["question_ids"]), torch.tensor(arrays["image"]))
        loss = nn.BCEWithLogitsLoss(reduction="sum")(logits, torch.tensor(arrays["targets"]))
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        for group, rate in zip(optimizer.param_groups, highest, strict=True):
            group["lr"] = rate * scale
            if mode == "pretrain":
                norm = torch.nn.utils.clip_grad_norm_(group["params"], 2.0)
                assert norm > 2.0
        optimizer.step()
        after = {n: p.detach().clone() for n, p in model.named_parameters()}
        done.append((loss.item(), gradients, after))
    return done


@functools.partial(jax.jit, static_argnums=(0, 1))  # compiled once for two of the recipes
def gradient_of(task, graphdef, params, arrays):
    def loss_of(params):
        return task.loss(nnx.merge(graphdef, params), arrays, None)[0]

    return jax.value_and_grad(loss_of)(params)


@pytest.mark.parametrize("mode", ["pretrain", "head", "finetune"])
def test_steps_of_the_recipes_are_prophets(mode, tmp_path):
    """configs/okvqa/mcan.py, its batch and its epochs scaled down."""
    config = small(0 if mode == "pretrain" else 4)
    torch.manual_seed(0)
    theirs = randomize((Pretrained if mode == "pretrain" else TorchMCAN)(config), 1)
    tensors = {k: v for k, v in theirs.state_dict().items() if v.numel()}
    torch.save({"state_dict": tensors}, tmp_path / "epoch.pkl")
    source = open_source(tmp_path / "epoch.pkl")
    ours = load_checkpoint(MCAN, Checkpoint(config, mcan_key_map, source, "prophet"), config)
    arrays = batch(config.answers + config.new_answers)
    start = {n: p.detach().clone() for n, p in theirs.named_parameters()}
    wanted = prophets_updates(theirs, arrays, mode)

    path = Path(__file__).parents[2] / "configs/okvqa/mcan.py"
    section = load_module(path).get_config(mode).train.optimizer.to_dict()
    epoch = {"pretrain": EPOCH, "head": 1, "finetune": 2 * 140}[mode]
    section["levels"] = tuple((at // epoch, factor) for at, factor in section["levels"])
    section["eps"] *= 64 / ROWS  # the mean over a batch, see the config
    if "clip_norm" in section:
        section["clip_norm"] *= 64 / ROWS
    options = read_typed(OptimizerOptions, section, "train.optimizer")
    transform, _ = make_optimizer(options, STEPS)
    task = VQAObjective(config)
    graphdef, params = nnx.split(ours)

    @jax.jit
    def update(gradients, state, params):
        changes, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    state = jax.jit(transform.init)(params)
    before = start
    clear = {name: np.ones(value.shape, bool) for name, value in start.items()}
    for theirs_loss, gradients, after in wanted:
        loss, our_gradients = gradient_of(task, graphdef, params, arrays)
        params, state = update(our_gradients, state, params)
        np.testing.assert_allclose(ROWS * loss, theirs_loss, rtol=1e-5)
        source = publish_mcan(config, params).source
        changes, total = [], 0
        for name, value in after.items():
            if not value.numel():
                continue
            if torch.equal(value, before[name]):
                np.testing.assert_array_equal(source.read(name), value, err_msg=name)
                continue
            # Adam blows up what is nothing but rounding.
            clear[name] &= np.abs(gradients[name].numpy()) > 1e-4
            pair = source.read(name) - start[name].numpy(), (value - start[name]).numpy()
            total += value.numel()
            changes.append([x[clear[name]] for x in pair])
        got, want = map(np.concatenate, zip(*changes, strict=True))
        assert len(want) > 0.8 * total
        assert deviation(got, want) < 1e-3
        before = after


def warmup_rate(step: int) -> float:
    """openvqa utils/optim.py:37-51, `rate`, of the step that follows `step` ones."""
    batches, epochs = 443_757 / 64, 4  # data_size / batch_size, warmup_epoch + 1
    for quarter in (1, 2, 3):
        if step + 1 <= int(batches * epochs * quarter * 0.25):
            return quarter / epochs
    return 1.0


@pytest.mark.parametrize(("mode", "highest"), [("pretrain", 7e-5), ("openvqa", 1e-4)])
def test_schedules_of_both_originals(mode, highest):
    """Prophet `schedule_step`, by epoch; openvqa `rate`, by step, and `adjust_lr`, by epoch."""
    train = load_module(Path(__file__).parents[2] / "configs/okvqa/mcan.py").get_config(mode).train
    options = read_typed(OptimizerOptions, train.optimizer.to_dict(), "train.optimizer")
    _, schedule = make_optimizer(options, train.steps)
    assert train.steps == 13 * EPOCH
    by_epoch = [0.25, 0.5, 0.75, *[1.0] * 7, 0.2, 0.2, 0.04]
    at = np.unique(np.arange(13)[:, None] * EPOCH + np.array([*range(6), EPOCH - 1])).tolist()
    factors = [by_epoch[step // EPOCH] for step in at]
    if mode == "openvqa":
        decays = [1.0] * 4 + by_epoch[4:]
        factors = [warmup_rate(step) * decays[step // EPOCH] for step in at]
    np.testing.assert_allclose(schedule(np.array(at)), highest * np.array(factors), rtol=1e-6)


def test_updates_of_openvqa(tmp_path):
    """utils/train_engine.py:36, 145-192: as Prophet's, without clipping, all at one rate."""
    config = test_mcan_openvqa.CONFIG
    torch.manual_seed(0)
    theirs = randomize(mcan_torch.TorchMCAN(config), 1)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "epoch13.pkl")
    ours = test_mcan_openvqa.loaded(tmp_path / "epoch13.pkl")
    rng, batches = np.random.default_rng(2), []
    ids, image = test_mcan_openvqa.batch()
    for _ in range(2):
        targets = rng.choice([0.0, 0.3, 0.6, 0.9, 1.0], (ROWS, config.answers)).astype("f4")
        batches.append({"question_ids": ids, "image": image, "targets": targets})

    def loss_of(batch):
        logits = theirs(torch.tensor(batch["question_ids"]), torch.tensor(batch["image"]))
        return nn.BCEWithLogitsLoss(reduction="sum")(logits, torch.tensor(batch["targets"]))

    options = {"betas": (0.9, 0.98), "eps": 1e-7 * EPS * ROWS}
    adam = torch.optim.Adam(theirs.parameters(), RATE, **options)
    wanted = [
        update._replace(
            loss=update.loss / ROWS, gradient={k: v / ROWS for k, v in update.gradient.items()}
        )
        for update in their_updates(theirs, adam, [[batch] for batch in batches], loss_of)
    ]
    section = optimizer_section("okvqa/mcan.py", "openvqa")
    # The sum over 64 questions, and the mean over them (see the config); and for both 100 times EPS.
    section["eps"] *= 64 * 100
    key_map = mcan_openvqa_key_map(config)
    got = our_updates(
        VQAObjective(config), ours, at_one_rate(section), batches, lambda x: export(x, key_map)
    )
    same_updates(got, wanted, zero=NO_GRADIENT)


def soft_target(answers, ans_to_ix):
    """prophet/stage1/utils/load_data.py:22-29."""
    ans_score = np.zeros(len(ans_to_ix), np.float32)
    for ans in answers:
        ans = prep_ans(ans)
        if ans in ans_to_ix:
            ans_score[ans_to_ix[ans]] = min(1.0, ans_score[ans_to_ix[ans]] + 0.3)
    return ans_score


def get_score(occur):
    """openvqa vqa_loader.py, `get_score`."""
    return [0.0, 0.3, 0.6, 0.9][occur] if occur < 4 else 1.0


def test_targets_are_the_originals_on_annotators_answers():
    answers = ("Cat", "cat.", "the cat", "two dogs", "2 dogs", "bird", "no, sir", *["fish"] * 5)
    vocabulary = AnswerVocabulary(["cat", "2 dogs", "fish", "bird", "no sir", "horse"])
    question = Question("1", "train", "?", answers=answers)
    index = {answer: number for number, answer in enumerate(vocabulary.answers)}
    made = vocabulary.dense([vocabulary.targets(question)])[0]
    np.testing.assert_array_equal(made, soft_target(answers, index))
    counts = [3, 2, 5, 1, 1, 0]
    np.testing.assert_allclose(made, [get_score(count) for count in counts], rtol=1e-6)


def test_targets_from_the_published_soft_labels():
    """Annotators whose counts give these weights, through Prophet's own formula."""
    file = SHARED / "okvqa/val_soft_labels.json"
    require(file)
    rows = json.loads(file.read_text())
    questions = [
        Question(str(r["question_id"]), "test", r["sent"], answers=tuple(r["label"]),
                 extra={SOFT_LABELS: r["label"]})
        for r in rows
    ]  # fmt: skip
    vocabulary = make_vocabulary(questions, 2)
    index = {answer: number for number, answer in enumerate(vocabulary.answers)}
    assert len(index) > 2000
    for row, question in zip(rows, questions, strict=True):
        annotators = [
            answer
            for answer, weight in row["label"].items()
            for _ in range(4 if weight == 1 else round(3 * weight))  # OK-VQA's counts are even
        ]
        made = vocabulary.dense([vocabulary.targets(question)])[0]
        np.testing.assert_allclose(made, soft_target(annotators, index), rtol=0, atol=1e-6)
