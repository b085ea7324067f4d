"""A decoder of transformers with random weights, and ours loaded from its checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from compare import compiled, forward, randomize

from mmqa_jax.models.llama.network import Llama
from mmqa_jax.weights.published import load_published


class Pair(NamedTuple):
    """A torch model, ours loaded from its checkpoint, and our compiled forward."""

    theirs: transformers.PreTrainedModel
    ours: Llama
    folder: Path
    forward: Callable  # (ids, mask, positions) -> logits


def save_pair(theirs: transformers.PreTrainedModel, folder: Path) -> Pair:
    """The pair of a model, which gets random weights and is saved to `folder`."""
    theirs = randomize(theirs, 0, 0.05)
    theirs.save_pretrained(folder)
    ours = load_published("llama", folder, unroll=1)
    return Pair(theirs, ours, folder, compiled(ours, forward))


def run_torch(model: torch.nn.Module, ids: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    """Logits [B, L, V] of token ids [B, L]."""
    with torch.no_grad():
        given = {name: torch.from_numpy(value) for name, value in inputs.items()}
        return model(torch.from_numpy(np.asarray(ids)), **given).logits.numpy()


def torch_layers(model: torch.nn.Module, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of all layers [N, B, L, H], and the logits [B, L, V]."""
    outputs: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out.numpy()))
        for layer in model.model.layers
    ]
    logits = run_torch(model, ids)
    for hook in hooks:
        hook.remove()
    return np.stack(outputs), logits
