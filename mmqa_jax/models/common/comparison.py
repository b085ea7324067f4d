"""A model beside transformers': what both get, and what they compute, layer by layer.

A family's `CHECK` says how: `mmqa convert --check` (models/check.py) runs both sides.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TOKENS = 520  # short texts hide mistakes in rotary positions
# Rows and columns of a picture of any size, in units or patches: no window divides them.
GRID = (5, 7)


class Outputs(NamedTuple):
    """What one side computes."""

    # Name of a stack of layers ("" if there is one) -> what goes into each of its layers, and what
    # the last gives, [layers + 1, ...].
    stacks: Mapping[str, Any]
    ends: Mapping[str, Any]  # name -> what the model gives

    def named(self) -> dict[str, np.ndarray]:
        """Every layer and output by its name."""
        states_by_name = {}
        for stack, states in self.stacks.items():
            for number, state in enumerate(states):
                layer = f"layer {number}" if number else "embeddings"
                states_by_name[f"{stack} {layer}".strip()] = np.asarray(state)
        return states_by_name | {name: np.asarray(value) for name, value in self.ends.items()}


def texts_for_transformers(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Texts as transformers' models name them."""
    return {"input_ids": inputs["ids"], "attention_mask": inputs["mask"].astype(np.int64)}


def texts(config: Any) -> dict[str, np.ndarray]:
    """A text as long as the model takes, up to TOKENS; one without an end to its positions too."""
    ids = tokens(config.vocab_size, getattr(config, "positions", TOKENS))
    return {"ids": ids, "mask": np.ones(ids.shape, bool)}


@dataclasses.dataclass(frozen=True)
class Check:
    """How a family is compared."""

    model: str  # transformers' class
    run: Callable[[Any, Mapping[str, Any]], Outputs]  # (model, inputs) -> Outputs of ours
    ends: Mapping[str, str]  # name in Outputs.ends -> attribute of transformers' output
    # Name in Outputs.stacks -> path of transformers' module with the layers, "" for all; of several
    # paths the first that it has.
    stacks: Mapping[str, str | tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"": ""}
    )
    # Our model's config -> inputs by their names in `run`, numpy arrays or trees of them.
    inputs: Callable[[Any], dict[str, Any]] = texts
    # Inputs -> transformers' own, numpy arrays by name.
    peer_inputs: Callable[[Mapping[str, Any]], dict[str, np.ndarray]] = texts_for_transformers


def noise() -> np.random.Generator:
    """Draws the same numbers in every check."""
    return np.random.default_rng(0)


def tokens(vocabulary: int, positions: int, length: int = TOKENS) -> np.ndarray:
    """int32 [1, L]; without the first few tokens, which are special ones in most models."""
    first = min(5, vocabulary - 1)
    return noise().integers(first, vocabulary, (1, min(length, positions))).astype(np.int32)


def picture(vision: Any) -> np.ndarray:
    """Pixels [1, H, W, 3] of a tower that takes one size."""
    shape = (1, vision.image_size, vision.image_size, 3)
    return noise().standard_normal(shape).astype(np.float32)


def channels_first(pixels: np.ndarray) -> np.ndarray:
    """[..., H, W, 3] -> [..., 3, H, W]."""
    return np.ascontiguousarray(np.moveaxis(pixels, -1, -3))


def around_a_picture(config: Any, places: int) -> list[int]:
    """Words with one placeholder, whose picture will be so many tokens."""
    llama = config.llama
    length = min(max(TOKENS - places, 64), llama.positions - places)
    words = tokens(llama.vocab_size, llama.positions, length)[0]
    special = [value for name, value in vars(config).items() if name.endswith("_token")]
    words = np.where(np.isin(words, special), 0, words)
    return [*words[:9], config.image_token, *words[9:]]


def states_of(embedded: jax.Array, layers: jax.Array) -> jax.Array:
    """Returns the first layer's input and each layer's output: [layers + 1, ...].

    Behind the first layer's state may stand inputs of layers' own, as Gemma 4's E2B has them.
    """
    return jnp.concatenate([embedded[None, ..., : layers.shape[-1]], layers])
