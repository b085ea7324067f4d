"""What an example costs an encoder's program, for `auto` batch sizes.

Activations are estimated from the sizes of one layer: the scores of its attention (float32, and
once more as weights) and what is live beside its MLP, without the fusions of a compiler. Compiled
for a v5e the programs of configs/webqa use 0.7 to 0.9 of that (`mmqa plan`,
memory_gib.temporaries over the examples).
"""

from __future__ import annotations

import numpy as np

from mmqa_jax.core.serving import RowCost
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.clip import TextConfig, VisionConfig
from mmqa_jax.models.dual_encoder import DualEncoderConfig


def dual_encoder_cost(model: DualEncoderConfig, length: int) -> RowCost:
    """Sources with a picture and a text of `length` tokens; the towers run one after the other."""
    pixels = model.vision.image_size**2 * 3 * 5.0  # bytes, and floats
    shown = tower_bytes(model.vision, model.vision.patches + 1)
    return RowCost("sources", 64, 256, max(shown, tower_bytes(model.text, length)) + pixels)


def text_cost(model: BertConfig, length: int) -> RowCost:
    """Texts of `length` tokens."""
    return RowCost("texts", 64, 512, tower_bytes(model, length))


def tower_bytes(model: BertConfig | TextConfig | VisionConfig, length: int) -> float:
    """Activations of one sequence."""
    if isinstance(model, BertConfig):
        return layer_bytes(length, model.hidden, model.heads, model.mlp, model.dtype)
    return layer_bytes(length, model.width, model.heads, model.mlp_width, model.dtype)


def layer_bytes(length: int, width: int, heads: int, mlp: int, dtype: str) -> float:
    """Activations of one layer of a transformer on one sequence."""
    size = value_bytes(dtype)
    return heads * length**2 * (4.0 + size) + length * (mlp + 4.0 * width) * size


def value_bytes(dtype: str) -> int:
    """Bytes of one value."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
