"""Short convolutions over the last tokens: in front of the gated delta rule, and LFM2's layers.

LFM2's layers without attention (transformers models/lfm2/modeling_lfm2.py) are one such convolution
between two gates that are linear in the layer's input. Of the past they hold its last inputs.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import Linear, normal_init, param, uniform_init
from mmqa_jax.models.llama.config import LlamaConfig


@flax.struct.dataclass
class ConvState:
    """What a layer holds of the tokens before: a row for each text."""

    inputs: jax.Array  # [R, taps - 1, H], the last ones of the convolution


def conv_state_shapes(config: LlamaConfig, rows: int) -> ConvState:
    """The shapes of a state of so many texts, in the compute dtype."""
    shape = (rows, config.conv_taps - 1, config.hidden)
    return ConvState(jax.ShapeDtypeStruct(shape, config.dtype))


class ShortConv(nnx.Module):
    """out(after(x) * convolution of (before(x) * value(x)))."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        size, taps = config.hidden, config.conv_taps
        init = normal_init(config.init_stddev)
        linear = functools.partial(Linear, size, size, rngs=rngs, kernel_init=init, use_bias=False)
        self.before, self.after, self.value = (linear(("embed", "heads")) for _ in range(3))
        self.out = linear(("heads", "embed"))
        self.taps = param(rngs, uniform_init(taps**-0.5), (taps, size), (None, "heads"))

    def __call__(
        self,
        x: jax.Array,
        state: ConvState | None = None,
        *,
        begins: jax.Array | None = None,
        ends: jax.Array | None = None,
        is_real: jax.Array | None = None,
    ) -> tuple[jax.Array, ConvState]:
        """Runs tokens [B, L, H] that follow what the state holds; see `GatedDelta.__call__`."""
        if is_real is not None:
            x = jnp.where(is_real[..., None], x, 0)
        taps = self.taps[...]
        inputs = self.before(x) * self.value(x)
        shape = (len(x), len(taps) - 1, x.shape[-1])
        held = jnp.zeros(shape, x.dtype) if state is None else state.inputs.astype(x.dtype)
        inputs = jnp.concatenate([held, inputs], axis=1)
        mixed = convolve(inputs, taps, same_text(begins, len(taps)))
        return self.out(self.after(x) * mixed), ConvState(last_of(inputs, ends, len(taps) - 1))


def same_text(begins: jax.Array | None, taps: int) -> list[jax.Array | None]:
    """Whether each token sees the one 0, 1, .. `taps` - 1 before it, bool [B, L, 1] each; None:
    all do."""
    if begins is None:
        return [None] * taps
    text = jnp.cumsum(begins, axis=1)
    behind = [jnp.pad(text, ((0, 0), (n, 0)))[:, : text.shape[1]] == text for n in range(taps)]
    return [same[..., None] for same in behind]


def convolve(x: jax.Array, taps: jax.Array, sees: list[jax.Array | None]) -> jax.Array:
    """Each channel's sum over its last tokens: x [B, taps - 1 + L, W], taps [taps, W] -> [B, L, W].

    sees: see `same_text`.
    """
    count = len(taps)
    length = x.shape[1] - count + 1
    out = jnp.zeros((x.shape[0], length, x.shape[2]), jnp.float32)
    for n in range(count):
        term = x[:, n : n + length].astype(jnp.float32) * taps[n].astype(jnp.float32)
        seen = sees[count - 1 - n]
        out = out + (term if seen is None else jnp.where(seen, term, 0))
    return out.astype(x.dtype)


def last_of(x: jax.Array, ends: jax.Array | None, count: int) -> jax.Array:
    """The `count` inputs before each row's end, of x [B, count + L, W]; [B, count, W]."""
    if ends is None:
        return x[:, x.shape[1] - count :]
    columns = ends[:, None] + jnp.arange(count)
    return jnp.take_along_axis(x, columns[..., None], axis=1)
