"""Models with random weights, and such models as they are published."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.weights.keymap import abstract_model
from mmqa_jax.weights.published import write_published
from mmqa_jax.weights.registry import architecture


def random_state(build: Callable[[], nnx.Module]) -> nnx.State:
    """Every parameter at random, none where a fresh model has it, signals of about size 1; in NumPy,
    whose arrays cost no program a shape."""
    rng = np.random.default_rng(1)
    filled = []
    for path, leaf in nnx.to_flat_state(abstract_model(build)[1]):
        shape = leaf.get_value().shape
        noise = rng.normal(size=shape).astype(np.float32)
        if path[-1] == "kernel":
            stacked = leaf.get_metadata()["out_sharding"][0] == "layers"
            value = noise / math.sqrt(math.prod(shape[stacked:-1]))
        elif path[-1] in ("scale", "variance", "logit_scale"):
            value = np.abs(1 + 0.2 * noise)
        else:
            value = 0.3 * noise
        filled.append((path, leaf.replace(value)))
    return nnx.from_flat_state(filled)


def publish(name: str, config: Any, folder: Path) -> Path:
    """Writes a checkpoint of random weights with the registry's layout; its folder."""
    entry = architecture(name)
    state = random_state(lambda: entry.build(config, rngs=nnx.Rngs()))
    write_published(folder, entry.publish(config, state))
    return folder
