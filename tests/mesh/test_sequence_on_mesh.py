"""Rows that the mesh axis `sequence` splits: a training step is that of one device."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from steps import same_step, take_step
from test_vision_language_on_mesh import CONFIG as PICTURED
from test_vision_language_on_mesh import Shown

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.data.batches.texts import RowSize, TokenExample
from mmqa_jax.models.attention import splash
from mmqa_jax.models.attention.masked import Window
from mmqa_jax.models.common.layers import attention
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.plan.exchange import Placement, least_exchanges
from mmqa_jax.tasks import language_model
from mmqa_jax.tasks.language_model import LanguageModelObjective
from mmqa_jax.tasks.registry import check_config
from mmqa_jax.tasks.vision_language import PicturedRows, VisionLanguageObjective
from tests.hlo.counts import count

ROWS, LENGTH, TARGETS = 4, 32, 16
CONFIG = LlamaConfig(
    vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, mlp=64, positions=LENGTH, unroll=1,
    init_stddev=0.3, attention="blocks",
)  # fmt: skip
# Layers that see all, or the last nine tokens.
WINDOWED = dataclasses.replace(CONFIG, windows=(9, 0), remat="full")
LORA = LoraConfig(rank=4, alpha=8.0, targets=(), base="float32")
MIXTURE = dataclasses.replace(
    CONFIG, family="qwen3_moe", qk_norm="head", experts=6, active_experts=2
)
WINDOWED_TOWER = QwenVLConfig(  # of 16 units each, the second layer without windows
    QwenVisionConfig(
        width=16, layers=2, heads=2, mlp=24, out=32, patch=2, window=16, full_layers=(1,),
        init_stddev=0.3, unroll=1,
    ),
    dataclasses.replace(PICTURED.llama, family="qwen2", qk_norm="none", mrope_interleaved=False),
    image_token=60,
)  # fmt: skip


def packed():
    """Rows of several texts, their targets anywhere in the row; the last columns are padding."""
    rng = np.random.default_rng(0)
    ends = np.sort(rng.integers(2, LENGTH - 2, (ROWS, 3)), axis=1)
    columns = np.arange(LENGTH)
    before = (columns[None, :, None] >= ends[:, None]).sum(-1)  # texts that end before a column
    starts = np.concatenate([np.zeros((ROWS, 1), int), ends], axis=1)
    return {
        "input_ids": rng.integers(0, 64, (ROWS, LENGTH), np.int32),
        "segments": np.where(before == 3, 0, before + 1).astype(np.int32),
        "positions": (columns - np.take_along_axis(starts, before, axis=1)).astype(np.int32),
        "target_positions": rng.integers(0, ends[:, 2:], (ROWS, TARGETS), np.int32),
        "target_ids": rng.integers(0, 64, (ROWS, TARGETS), np.int32),
        "target_segments": (np.arange(TARGETS) < rng.integers(3, TARGETS, (ROWS, 1))).astype("i4"),
    }


def pictured(config):
    """Rows of up to three pictures, whose targets are anywhere behind them."""
    rng, examples = np.random.default_rng(0), []
    for number in range(ROWS):
        tokens = rng.integers(0, 60, 9 + number).astype(np.int32)
        tokens[[1, 3, 6][:number]] = config.image_token
        examples.append(TokenExample(tokens, 7, tuple("aba"[:number])))
    return PicturedRows(RowSize(16, 8), config, Shown()).batch(examples, Bucket(4, 64))


CASES = {
    "blocks": (LanguageModelObjective(CONFIG), {"sequence": 4, "tensor": 2}, 1),
    "lora": (
        LanguageModelObjective(dataclasses.replace(CONFIG, attention="auto"), LORA),
        {"fsdp": 2, "sequence": 2, "tensor": 2},
        3,
    ),
    "words": (LanguageModelObjective(CONFIG), {"data": 2, "fsdp": 2, "tensor": 2}, 3),
    "windows": (LanguageModelObjective(WINDOWED), {"data": 2, "sequence": 4}, 1),
    "experts": (LanguageModelObjective(MIXTURE), {"sequence": 4, "tensor": 2}, 1),
    "deepstack": (
        VisionLanguageObjective(PICTURED, LORA, tower=True),
        {"sequence": 4, "tensor": 2},
        1,
    ),
    "tower": (
        VisionLanguageObjective(WINDOWED_TOWER, None, tower=True),
        {"data": 2, "sequence": 2, "tensor": 2},
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_device(name, monkeypatch, capfd):
    """The logits are made whole, or for a third of the targets after another."""
    task, mesh, parts = CASES[name]
    share = 4 * ROWS * TARGETS * CONFIG.vocab_size // 8
    monkeypatch.setattr(language_model, "_LOGITS_BYTES", -(-share // parts))
    options = {"trainable": task.trained} if task.trained else {}
    batch = pictured(task.config) if isinstance(task, VisionLanguageObjective) else packed()
    alone = take_step(task, batch, {}, jax.devices()[:1], **options)
    capfd.readouterr()
    step = take_step(task, batch, mesh, None, start=alone.start, **options)
    assert "full rematerialization" not in capfd.readouterr().err
    same_step(step, alone)


@pytest.mark.parametrize(
    ("shape", "is_causal"),
    [({"sequence": 4, "tensor": 2}, True), ({"data": 2, "sequence": 2}, False)],
)
def test_the_kernel_of_a_tpu_with_split_queries(shape, is_causal):
    """Values and gradients of texts in rows; the kernel is interpreted."""
    rng, length = np.random.default_rng(0), 1024 if is_causal else 512
    shapes = ((2, length, 4, 8), *((2, length, 2, 8),) * 2, (2, length, 4, 8))
    q, k, v, weights = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    ends = np.array([[length // 3, length // 2], [10, length - 5]])
    segments = (np.arange(length)[:, None] >= ends[:, None]).sum(-1)
    mesh = make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])

    def loss(attend, q, k, v):
        return (attend(q, k, v, segments=segments, is_causal=is_causal) * weights).sum()

    def of_kernel(q, k, v, **options):
        return splash.splash_attention(q, k, v, key_mask=None, mesh=mesh, interpret=True, **options)

    def run(attend):
        gradient = jax.value_and_grad(lambda *x: loss(attend, *x), argnums=(0, 1, 2))
        return jax.device_get(jax.jit(gradient)(q, k, v))

    got, want = run(of_kernel), run(attention)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for ours, theirs in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_devices_see_equally_many_keys(shards):
    """Under the causal mask, where by their own columns the last would see the most."""
    order = splash.balanced_order(48 * shards, shards)
    assert sorted(order) == list(range(len(order)))
    assert len(set((order + 1).reshape(shards, -1).sum(axis=1))) == 1


@pytest.mark.parametrize("windows", [1, 2])
def test_keys_and_values_are_gathered_and_nothing_else(windows):
    """Their gradients are scattered; as `mmqa plan` counts it, of layers with any window."""
    mesh = make_mesh({"sequence": 4, "tensor": 2})
    shapes = ((2, 64, 8, 4), (2, 64, 2, 4), (2, 64, 2, 4))
    split = jax.NamedSharding(mesh, jax.P(None, "sequence", "tensor"))
    arrays = [jax.ShapeDtypeStruct(shape, np.float32, sharding=split) for shape in shapes]

    def attend(q, k, v, size):
        def of_window(_):
            return attention(q, k, v, is_causal=True, implementation="blocks")

        return Window(size, tuple(range(1, windows + 1))).choose(of_window, 64).sum()

    arrays.append(jax.ShapeDtypeStruct((), np.int32, sharding=jax.NamedSharding(mesh, jax.P())))
    with jax.set_mesh(mesh):
        gradient = jax.value_and_grad(attend, argnums=(0, 1, 2))
        traced = jax.jit(gradient, out_shardings=(None, split)).trace(*arrays)
        text = traced.lower().compile().as_text()
    least = least_exchanges(traced.jaxpr.jaxpr, arrays, [], [], mesh.shape, Placement((0,) * 8))
    planned = {(one.kind, one.axis): one.bytes for one in least}
    keys = 2 * 64 * 1 * 4 * 4  # of a device's head, in bytes
    assert planned == {
        ("all-gather", "sequence"): 2 * keys,
        ("reduce-scatter", "sequence"): 2 * keys,
    }
    counted = count(text).on_mesh(dict(mesh.shape))
    counted = {(one.kind, one.axis): one.bytes for one in counted if one.bytes > 8}  # no sum
    assert counted == planned


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            "scienceqa/rmr_finetune",
            {"batches.length": 1026},
            "mesh.sequence=4: does not divide a row of 1026 tokens; make batches.length a",
        ),
        (
            "aokvqa/vlm_finetune",
            {"batches.length": 1026},
            "mesh.sequence=4: does not divide a row of 1026 tokens; make batches.length a",
        ),
        (
            "okvqa/mcan",
            {},
            "mesh.sequence=4: task=vqa has no rows of a decoder that could be split; set it to 1",
        ),
    ],
)
def test_rows_that_cannot_be_split(config, changes, message):
    path = Path(__file__).parents[2] / "configs" / f"{config}.py"
    loaded = load_config(f"{path}:runlocal")
    with loaded.unlocked():
        loaded.mesh = {"data": 2, "sequence": 4}
        loaded.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        check_config(loaded, jax.devices(), files=False)
