"""Feature pyramid (Lin et al. 2017, section 3; Detectron lib/modeling/FPN.py, add_fpn)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.detection.convolution import Conv, strided, within


class FPN(nnx.Module):
    """Coarse maps, enlarged, are added to finer ones; each sum is smoothed.

    Args:
      in_channels: of the maps of res2 to res5.
      dim: channels of each level.
    """

    def __init__(self, in_channels: list[int], dim: int, *, rngs: nnx.Rngs):
        def convolutions(sizes: list[int], size: int, names) -> nnx.List:
            return nnx.List([Conv(n, dim, size, names, rngs=rngs, use_bias=True) for n in sizes])

        self.lateral = convolutions(in_channels, 1, ("embed", "mlp"))
        self.output = convolutions([dim] * len(in_channels), 3, ("embed", "mlp"))

    def __call__(
        self, maps: list[jax.Array], extents: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Maps of res2 to res5 -> P2 to P6, finest first, with extents.

        Sides must halve without rest from level to level: pictures padded to multiples of 32. P6
        is every other cell of P5.
        """
        summed = [conv(x) for conv, x in zip(self.lateral, maps, strict=True)]
        for level in reversed(range(len(summed) - 1)):
            coarse = jnp.repeat(jnp.repeat(summed[level + 1], 2, axis=1), 2, axis=2)
            summed[level] = summed[level] + coarse
        levels = [
            conv(within(x, extent))
            for conv, x, extent in zip(self.output, summed, extents, strict=True)
        ]
        return [*levels, levels[-1][:, ::2, ::2]], [*extents, strided(extents[-1], 2)]
