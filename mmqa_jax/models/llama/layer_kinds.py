"""Kinds of layers of one decoder, and the sizes of those that are not attention."""

import dataclasses

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.config_checks import check_divides

# Attention; the gated delta rule (`llama.gated_delta`); attention with a window, in a model whose
# layers that see all have heads of their own (`FullLayers`); a short convolution
# (`llama.gated_delta`); attention or a convolution with one MLP, in a model whose other layers have
# experts.
KINDS = ("full", "linear", "near", "conv", "plain", "plain_conv")
RECURRENT = {"linear", "conv", "plain_conv"}  # of these
DELTA_LINEARS = ("q", "k", "v", "gate", "correction", "decay", "out")
CONV_LINEARS = ("before", "after", "value", "out")


def plain_first(kinds: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The kinds of layers of which the first have one MLP in the place of experts."""
    plain = {"full": "plain", "conv": "plain_conv"}
    return tuple(plain[kind] for kind in kinds[:count]) + kinds[count:]


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


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Sizes of attention over latents (`llama.latent`).

    `rank` is the width of a token's latent, `query_rank` of what queries are made of (None: of the
    layer's input); `resting` and `turning` are the parts of a head's query that positions leave
    and rotate, `value` is the width of a head's value.
    """

    rank: int = 512
    query_rank: int | None = 1536
    resting: int = 128
    turning: int = 64
    value: int = 128

    def __post_init__(self):
        if self.rank % 2 or self.turning % 2:
            raise UserError(
                f"model.latent has rank {self.rank} and turning {self.turning}: expected even "
                "numbers, since both are halved; correct them."
            )


@dataclasses.dataclass(frozen=True)
class FullLayers:
    """Heads of the layers that see all, in a model whose other layers have a window (Gemma 4).

    With `keys_are_values` a value is what is projected for the key, before norm and rotation.
    """

    head_dim: int
    kv_heads: int
    keys_are_values: bool = False
