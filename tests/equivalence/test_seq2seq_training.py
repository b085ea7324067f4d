"""Training of Fusion-in-Decoder, KAT and Multimodal-CoT against their scripts, restated in torch."""

import copy
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import test_fusion_in_decoder as fid
import test_multimodal_t5 as mmcot
import torch
from flax import nnx
from torch import nn
from updates import (
    EPS,
    RATE,
    TransformersAdamW,
    at_one_rate,
    optimizer_section,
    our_updates,
    same_updates,
    their_updates,
)

from mmqa_jax.core.config import load_config, load_module
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.batches.texts import passage_arrays, target_arrays
from mmqa_jax.models.t5.config import MultimodalT5Config
from mmqa_jax.models.t5.keys import multimodal_t5_key_map, t5_key_map
from mmqa_jax.models.t5.network import PictureFusion
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.seq2seq import Seq2SeqObjective
from mmqa_jax.training.optimizer import OptimizerOptions, make_schedule
from mmqa_jax.weights.keymap import export

pytestmark = pytest.mark.slow

SMALL = 4  # the models' gradients are so small that clipping at 1 would show nothing
CONFIGS = Path(__file__).parents[2] / "configs"


def objective_of(file: str, model, **changes) -> Seq2SeqObjective:
    """What the task of a config file trains, on another model."""
    config = load_config(f"{CONFIGS / file}:runlocal")
    config.update(changes)
    return dataclasses.replace(read_task(config).objective(99), config=model.config)


def answers(vocabulary: int, lengths: tuple[int, ...], places: int, seed: int) -> dict:
    """Answers of different lengths, each with the end token."""
    rng = np.random.default_rng(seed)
    return target_arrays([[*rng.integers(4, vocabulary, n - 1), 1] for n in lengths], places)


def published(key_map, config):
    once = dataclasses.replace(key_map(config), tied=())
    return lambda state: export(state, once)


# Fusion-in-Decoder and KAT


@pytest.mark.parametrize("file", ["webqa/fusion_in_decoder.py", "okvqa/kat.py"])
def test_updates_of_fid_and_kat(tmp_path_factory, file):
    """FiD train_reader.py:52-64, KAT train_KAT.py:50-62; src/util.py:134 and src/data.py:109.

    Each GPU has one question, DistributedDataParallel takes the mean of their gradients, which is
    clipped to 1; torch's AdamW decays all parameters.
    """
    theirs, _, ours = fid.make_older_pair(tmp_path_factory.getbasetemp() / "fid302")
    theirs = copy.deepcopy(theirs)  # other tests have this model, too
    rng = np.random.default_rng(3)
    batches = []
    for step in range(2):
        texts = [[rng.integers(4, 99, n).tolist() for n in (9, 4, 23)] for _ in range(3)]
        answer = answers(99, (2, 9, 4), fid.TARGET, step)
        batches.append(passage_arrays(texts, fid.SIZE) | answer)

    def loss_of(question: dict) -> torch.Tensor:
        states, mask = fid.encoded(theirs, question)
        ids, length = question["target_ids"], question["target_lengths"][:, None]
        labels = torch.from_numpy(np.where(np.arange(fid.TARGET) < length, ids, -100)).long()
        found = theirs(encoder_outputs=states, attention_mask=mask, labels=labels, use_cache=False)
        return nn.functional.cross_entropy(found.logits[0], labels[0], ignore_index=-100)

    gpus = [[{k: v[i : i + 1] for k, v in batch.items()} for i in range(3)] for batch in batches]
    optimizer = torch.optim.AdamW(theirs.parameters(), RATE, eps=1e-8 * EPS, weight_decay=0.01)
    wanted = their_updates(theirs, optimizer, gpus, loss_of, 1.0 / SMALL)
    section = optimizer_section(file)
    options = at_one_rate(section, clip_norm=section["clip_norm"] / SMALL)
    publish = published(t5_key_map, ours.config)
    got = our_updates(objective_of(file, ours), ours, options, batches, publish)
    same_updates(got, wanted)


@pytest.mark.parametrize(
    ("file", "rate", "warmup_steps", "total_steps"),
    [("webqa/fusion_in_decoder.py", 5e-5, 1000, 15_000), ("okvqa/kat.py", 3e-5, 1000, 8000)],
)
def test_schedule_of_fid_and_kat(file, rate, warmup_steps, total_steps):
    """src/util.py:105-114, WarmupLinearScheduler with min_ratio 0; README.md of both, "Train"."""
    steps = np.arange(0, total_steps, 37)
    rising, falling = steps / warmup_steps, (total_steps - steps) / (total_steps - warmup_steps)
    train = load_module(CONFIGS / file).get_config().train
    options = read_typed(OptimizerOptions, train.optimizer.to_dict(), "train.optimizer")
    assert train.steps == total_steps
    got = jax.jit(make_schedule(options, train.steps))(steps)
    wanted = rate * np.where(steps < warmup_steps, rising, falling)
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


# Multimodal-CoT


@pytest.mark.parametrize("labels", ["padded", "masked"])
def test_updates_of_multimodal_cot(tmp_path_factory, labels):
    """mm-cot model.py:457-459, utils_data.py:214-230, main.py:217-232.

    `padded`: labels hold the pad's id, which CrossEntropyLoss(ignore_index=-100) does not ignore.
    """
    theirs, ours = mmcot.make_pair(tmp_path_factory.getbasetemp() / "mm-cot")
    theirs = copy.deepcopy(theirs)
    rng, lengths = np.random.default_rng(4), np.array([17, 5, 11])
    features = rng.standard_normal((3, mmcot.VECTORS, mmcot.FEATURES)).astype(np.float32)
    features[1] = 0
    ids = rng.integers(4, 99, (3, 17)).astype(np.int32)
    ids[np.arange(17) >= lengths[:, None]] = 0
    inputs = {"input_ids": ids, "prompt_lengths": lengths, "features": features}
    batches = [inputs | answers(99, (12, 4, 7), 12, 0)]

    def loss_of(batch: dict) -> torch.Tensor:
        mask = torch.arange(17) < torch.from_numpy(batch["prompt_lengths"])[:, None]
        ids, features = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["features"])
        states = theirs.encoded(ids, mask.long(), features)
        targets = torch.from_numpy(batch["target_ids"]).long()  # pads are 0
        logits = theirs.t5(
            encoder_outputs=states, attention_mask=mask.long(), labels=targets
        ).logits  # of the targets shifted to the right
        if labels == "masked":
            targets[targets == 0] = -100
        return nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-100
        )

    # Trainer.create_optimizer: ALL_LAYERNORM_LAYERS, to which T5 adds its own, and biases.
    optimizer = TransformersAdamW(theirs, RATE, 1e-8 * EPS, 0.01, exempt="layer_norm|bias")
    wanted = [
        update._replace(
            gradient={k.removeprefix("t5."): v for k, v in update.gradient.items()},
            parameters={k.removeprefix("t5."): v for k, v in update.parameters.items()},
        )
        for update in their_updates(theirs, optimizer, [batches], loss_of, 1.0 / SMALL)
    ]
    file = "scienceqa/multimodal_cot.py"
    changes = {} if labels == "padded" else {"labels": labels}
    objective = objective_of(file, ours, **changes)
    section = optimizer_section(file, "rationale")
    options = at_one_rate(section, clip_norm=section["clip_norm"] / SMALL)
    publish = published(multimodal_t5_key_map, ours.config)
    got = our_updates(objective, ours, options, batches, publish)
    same_updates(got, wanted)


def test_multimodal_cot_takes_as_many_updates_at_the_same_rates():
    """Trainer: ceil(12,726 / 16) updates of each of 20 epochs, a linear schedule, no warm-up."""
    train = load_module(CONFIGS / "scienceqa/multimodal_cot.py").get_config().train
    assert train.steps == 20 * 796
    options = read_typed(OptimizerOptions, train.optimizer.to_dict(), "train.optimizer")
    at = np.arange(0, train.steps, 500)
    got = jax.jit(make_schedule(options, train.steps))(at)
    np.testing.assert_allclose(got, 5e-5 * (1 - at / train.steps), rtol=1e-4)


def test_a_new_fusion_starts_as_torchs():
    """JointEncoder.__init__, model.py:32-34: two Linears and a MultiheadAttention."""
    size = 64
    config = MultimodalT5Config(
        vocab_size=9, hidden=size, head_size=8, heads=2, mlp=8, encoder_layers=1, decoder_layers=1,
        features=24,
    )  # fmt: skip
    started = jax.jit(lambda key: nnx.state(PictureFusion(config, rngs=nnx.Rngs(key))))
    got = flatten_named(started(jax.random.key(0)))
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(size, 1, kdim=size, vdim=size, batch_first=True)
    wanted = {
        "picture": nn.Linear(24, size),
        "gate": nn.Linear(2 * size, size),
        "out": attention.out_proj,
    }
    pairs = {f"{name}/kernel": layer.weight for name, layer in wanted.items()}
    pairs |= {f"{name}/bias": layer.bias for name, layer in wanted.items()}
    pairs |= {
        "attention/kernel": attention.in_proj_weight,
        "attention/bias": attention.in_proj_bias,
    }
    assert got.keys() == pairs.keys()
    for name, value in pairs.items():
        ours, theirs = (float(np.abs(np.asarray(x)).max()) for x in (got[name], value.detach()))
        # The largest of n uniform values is about (1 - 1/n) of the bound: n is 64 at least.
        np.testing.assert_allclose(ours, theirs, rtol=0.12, err_msg=name)
