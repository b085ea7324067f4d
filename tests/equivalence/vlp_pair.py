"""Tiny VLPs in torch and here, with the same weights, for test_vlp*.py."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from vlp_torch import TorchVLP

from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.vlp.keys import open_vlp
from mmqa_jax.models.vlp.network import VLP, VLPConfig
from mmqa_jax.weights.published import load_checkpoint

# Nothing at its published value.
TRUNK = BertConfig(
    vocab_size=61, hidden=24, layers=3, heads=4, mlp=40, positions=48, types=6, eps=1e-3, unroll=1
)
CONFIGS = {
    "x101": VLPConfig(TRUNK, 20, 17, visual_hidden=(22,)),
    "vinvl": VLPConfig(TRUNK, 20, 11, visual_hidden=()),
}


class Pair(NamedTuple):
    """A torch model and ours, loaded from its checkpoint, with the config of both."""

    ours: VLP
    theirs: TorchVLP
    config: VLPConfig


def make_pair(
    name: str, folder: Path, change: Callable[[TorchVLP], None] = lambda theirs: None
) -> Pair:
    """Random weights; `change` edits them in the torch model."""
    config = CONFIGS[name]
    torch.manual_seed(0)
    theirs = TorchVLP(config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(0.25 * torch.randn(p.shape) + name.endswith("LayerNorm.weight"))
        change(theirs)
    pooler = {"weight": torch.zeros(24, 24), "bias": torch.zeros(24)}  # there, and used nowhere
    unused = {f"bert.pooler.dense.{kind}": tensor for kind, tensor in pooler.items()}
    torch.save(theirs.state_dict() | unused, folder / "model.11.bin")
    return Pair(loaded(folder / "model.11.bin", config), theirs, config)


def loaded(path: Path, config: VLPConfig, kind: type[VLP] = VLP) -> VLP:
    """A model that was never initialized, filled from a file."""
    return load_checkpoint(kind, open_vlp(path), config)


def batch(config: VLPConfig, regions: int, rows=3, length=30) -> dict[str, np.ndarray]:
    """Rows of different lengths; in image rows some region slots are closed."""
    rng = np.random.default_rng(regions)
    columns = np.arange(length)[None]
    question_end = np.resize([18, 12, 21], rows)[:, None]
    answer_end = np.resize([24, 13, 30], rows)[:, None]
    open_regions = np.resize([2, regions, 1], rows)[:, None]
    closed_slot = (columns > open_regions) & (columns <= regions)
    return {
        "input_ids": rng.integers(0, config.bert.vocab_size, (rows, length)),
        "token_type_ids": np.where(columns < 9, 4, np.where(columns < answer_end, 5, 0)),
        "position_ids": np.where(columns < answer_end, columns, 0),
        "context_mask": (columns < question_end) & ~closed_slot,
        "answer_mask": (columns >= question_end) & (columns < answer_end),
        "region_features": rng.normal(size=(rows, regions, config.region_features)).astype("f4"),
        "region_positions": rng.normal(size=(rows, regions, config.region_positions)).astype("f4"),
    }


def loop_mask(x: dict[str, np.ndarray]) -> np.ndarray:
    """The published mask, entry by entry: [B, row, column]."""
    rows, length = x["input_ids"].shape
    mask = np.zeros((rows, length, length), bool)
    for b in range(rows):
        for i in range(length):
            for j in range(length):
                both = x["answer_mask"][b, i] and x["answer_mask"][b, j]
                mask[b, i, j] = x["context_mask"][b, j] or (both and j <= i)
    return mask


def run_torch(theirs: TorchVLP, x: dict[str, np.ndarray], dtype=torch.float32):
    """Embeddings and each layer's states."""
    tensors = {name: torch.tensor(array) for name, array in x.items()}
    tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    return theirs(tensors, torch.tensor(loop_mask(x)))
