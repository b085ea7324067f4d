"""Kinds of layers of one decoder, and the sizes of those that are not attention."""

from __future__ import annotations

import dataclasses

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.config_checks import check_divides

KINDS = ("full", "linear")  # attention, and the gated delta rule (`llama.gated_delta`)
DELTA_LINEARS = ("q", "k", "v", "gate", "correction", "decay", "out")  # of the latter


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Sizes of the gated delta rule's heads, and of its convolutions in tokens."""

    key_heads: int = 16
    value_heads: int = 32
    key_size: int = 128
    value_size: int = 128
    taps: int = 4

    def __post_init__(self):
        names = ("model.delta.key_heads", "model.delta.value_heads")
        check_divides(names[0], self.key_heads, names[1], self.value_heads)
        if self.taps < 2:
            raise UserError(f"model.delta.taps is {self.taps}: expected at least 2; raise it.")
