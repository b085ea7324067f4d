"""What differs between the layers of one stack, as numbers: one compiled layer serves for all."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mmqa_jax.models.attention.masked import Window
from mmqa_jax.models.llama.config import LlamaConfig

_ALL = 2**30  # tokens, a window that nothing is outside of


@flax.struct.dataclass
class LayerTraits:
    """What differs between layers: of all [N], or of one []; None: nothing does."""

    window: jax.Array | np.ndarray | None = None  # int32: tokens that one sees, itself included
    rotated: jax.Array | np.ndarray | None = None  # bool: whether positions are
    local: jax.Array | np.ndarray | None = None  # bool: whether by `LlamaConfig.local_theta`
    number: jax.Array | np.ndarray | None = None  # int32: in the stack
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())  # of all windows

    def of(self, number: int) -> LayerTraits:
        """One layer's."""
        return jax.tree.map(lambda x: x[number], self)

    def turned(self, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rotation of one layer, [.., D / 2], from cosines and sines of all that rotate.

        Where some are local these are [.., D], those of the others before theirs.
        """
        if self.local is not None:
            half = cos.shape[-1] // 2
            cos, sin = (jnp.where(self.local, x[..., half:], x[..., :half]) for x in (cos, sin))
        if self.rotated is None:
            return cos, sin
        return jnp.where(self.rotated, cos, 1), jnp.where(self.rotated, sin, 0)

    @property
    def sight(self) -> Window | None:
        """Returns what tokens of one layer see; None is all."""
        return None if self.window is None else Window(self.window, self.sizes)


NO_TRAITS = LayerTraits()


def layer_traits(config: LlamaConfig, columns: int, *, numbered: bool = False) -> LayerTraits:
    """The traits of all layers, for texts of up to `columns` tokens.

    numbered: something is added after some of them, which must know their number.
    """
    window = rotated = local = None
    if config.windowed(columns):
        window = np.array([size or _ALL for size in config.windows], np.int32)
    if config.rotated:
        rotated = np.array(config.rotated)
    if config.local:
        local = np.array(config.local)
    number = np.arange(config.layers, dtype=np.int32) if numbered else None
    sizes = () if window is None else tuple(map(int, np.unique(window)))
    return LayerTraits(window, rotated, local, number, sizes)
