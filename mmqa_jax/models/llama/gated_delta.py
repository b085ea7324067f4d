"""Recurrent layers: the gated delta rule (Yang et al. 2024) and short convolutions.

Each head holds a memory [key, value] that every token first lets decay and then corrects: what the
memory answers to the token's key moves towards the token's value. Short convolutions over the last
tokens come before it. As in Qwen3.5 (transformers models/qwen3_5/modeling_qwen3_5.py).

Texts are computed in chunks, in which the corrections of all tokens are the solution of one
triangular system (Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule); a step
of decoding updates the memory. Memories are float32, whatever the compute dtype.

LFM2's layers without attention (transformers models/lfm2/modeling_lfm2.py) are one such convolution
between two gates that are linear in the layer's input. Of the past they hold its last inputs.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import columns_of_all, heads_over_tensor, platform
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.layers import (
    Linear,
    normal_init,
    ones_init,
    param,
    split_heads,
    uniform_init,
)
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


_CHUNK = 64  # tokens of one triangular system
_TINY = 1e-6  # beside the squared length of a key
_einsum = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


@flax.struct.dataclass
class DeltaState:
    """What a layer holds of the tokens before: a row for each text."""

    memory: jax.Array  # float32 [R, value_heads, key_size, value_size]
    q: jax.Array  # [R, taps - 1, width], the last inputs of each convolution
    k: jax.Array
    v: jax.Array


State = DeltaState | ConvState  # of a recurrent layer


def state_shapes(config: LlamaConfig, rows: int) -> State:
    """The shapes of a state of so many texts, in the compute dtype."""
    delta = config.delta
    if delta is None:
        return conv_state_shapes(config, rows)

    def inputs(heads: int, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, delta.taps - 1, heads * size), config.dtype)

    of_keys = inputs(delta.key_heads, delta.key_size)
    shape = (rows, delta.value_heads, delta.key_size, delta.value_size)
    memory = jax.ShapeDtypeStruct(shape, jnp.float32)
    return DeltaState(memory, of_keys, of_keys, inputs(delta.value_heads, delta.value_size))


class GatedDelta(nnx.Module):
    """Queries, keys and values, the gated delta rule, and a norm that is gated by the input."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        init, delta, size = normal_init(config.init_stddev), config.delta, config.hidden
        widths = {
            "q": delta.key_heads * delta.key_size,
            "k": delta.key_heads * delta.key_size,
            "v": delta.value_heads * delta.value_size,
            "gate": delta.value_heads * delta.value_size,
            "correction": delta.value_heads,
            "decay": delta.value_heads,
        }
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init, use_bias=False)
        for name, width in widths.items():
            setattr(self, name, linear(size, width, ("embed", "heads")))
        self.out = linear(widths["v"], size, ("heads", "embed"))
        taps = uniform_init(delta.taps**-0.5)  # as torch's Conv1d
        for name in "qkv":
            shape = (delta.taps, widths[name])
            setattr(self, f"{name}_taps", param(rngs, taps, shape, (None, "heads")))
        heads = (delta.value_heads,)
        self.decay_rate = param(rngs, _log_uniform, heads, ("heads",))
        self.decay_bias = param(rngs, ones_init, heads, ("heads",))
        self.norm = param(rngs, ones_init, (delta.value_size,), ("head_dim",))
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        state: DeltaState | None = None,
        *,
        begins: jax.Array | None = None,
        ends: jax.Array | None = None,
        is_real: jax.Array | None = None,
    ) -> tuple[jax.Array, DeltaState]:
        """Runs tokens [B, L, H] that follow what the state holds.

        Args:
          state: of the rows; None: nothing is before the tokens.
          begins: bool [B, L], where a text begins that does not see what is before it.
          ends: int [B], how many of a row's tokens are real: what follows changes no state. None:
            all are.
          is_real: bool [B, L], false at tokens that are not seen, such as padding on the left.

        Returns:
          [B, L, H], and the state after the rows' last real tokens.
        """
        delta, length = self.config.delta, x.shape[1]
        if is_real is not None:
            x = jnp.where(is_real[..., None], x, 0)
        x = columns_of_all(x)
        held = state or jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, shape.dtype), state_shapes(self.config, len(x))
        )
        sees = same_text(begins, delta.taps)
        mixed, inputs = {}, {}
        for name in "qkv":
            y = getattr(self, name)(x)
            before = jnp.concatenate([getattr(held, name).astype(y.dtype), y], axis=1)
            taps = getattr(self, f"{name}_taps")[...]
            mixed[name] = ACTIVATIONS[self.config.activation](convolve(before, taps, sees))
            inputs[name] = last_of(before, ends, delta.taps - 1)
        heads = {"q": delta.key_heads, "k": delta.key_heads, "v": delta.value_heads}
        q, k, v = (heads_over_tensor(split_heads(mixed[name], heads[name])) for name in "qkv")
        decay = -jnp.exp(self.decay_rate[...].astype(jnp.float32)) * jax.nn.softplus(
            self.decay(x).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
        )
        share = jax.nn.sigmoid(self.correction(x).astype(jnp.float32))  # [B, L, heads]
        decay, share = heads_over_tensor(decay), heads_over_tensor(share)
        if ends is not None:
            counts = (jnp.arange(length) < ends[:, None])[..., None]
            decay, share = jnp.where(counts, decay, 0), jnp.where(counts, share, 0)
        if length == 1 and begins is None:
            out, memory = one_token(q, k, v, decay, share, held.memory)
        else:
            out, memory = in_chunks(q, k, v, decay, share, held.memory, begins)
        out = self._gated(out, split_heads(self.gate(x), delta.value_heads), x.dtype)
        return self.out(out), DeltaState(memory, **inputs)

    def _gated(self, out: jax.Array, gate: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """float32 [B, L, heads, D] by its norm and the gate -> [B, L, heads * D] in the dtype."""
        out = out.astype(dtype).astype(jnp.float32)
        out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + self.config.eps)
        out = self.norm[...].astype(jnp.float32) * out.astype(dtype).astype(jnp.float32)
        out = (out * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)
        return out.reshape(*out.shape[:2], -1)


def _log_uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The logarithm of rates between .01 and 16, as Qwen3.5 begins."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def _prepared(q: jax.Array, k: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Queries and keys [B, L, key heads, D] of length 1, float32, one for each of the value heads;
    queries are divided by the root of D."""

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _TINY)
        return jnp.repeat(x, heads // x.shape[2], axis=2)

    return unit(q) * q.shape[-1] ** -0.5, unit(k)


def one_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    share: jax.Array,
    memory: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`in_chunks` of one token a row: L is 1."""
    q, k = (x[:, 0] for x in _prepared(q, k, v.shape[2]))  # [B, heads, D]
    memory = memory * jnp.exp(decay[:, 0])[..., None, None]
    answer = (memory * k[..., None]).sum(-2)
    change = (v[:, 0].astype(jnp.float32) - answer) * share[:, 0, :, None]
    memory = memory + k[..., None] * change[..., None, :]
    return (memory * q[..., None]).sum(-2)[:, None], memory


def in_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    share: jax.Array,
    memory: jax.Array,
    begins: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over rows of tokens.

    Args:
      q, k: [B, L, key heads, key size].
      v: [B, L, value heads, value size].
      decay: float32 [B, L, value heads], at most 0: the logarithm of what a memory is multiplied
        by before a token.
      share: float32 [B, L, value heads]: how far a memory's answer moves to the token's value.
      memory: float32 [B, value heads, key size, value size], before the first token.
      begins: see `GatedDelta.__call__`.

    Returns:
      float32 [B, L, value heads, value size], and the memory after the last token.
    """
    (batch, length, heads), size = v.shape[:3], v.shape[3]
    q, k = _prepared(q, k, heads)
    rest = -length % _CHUNK

    def chunked(x: jax.Array) -> jax.Array:  # [B, L, heads, ...] -> [n, B, heads, C, ...]
        x = jnp.pad(x, ((0, 0), (0, rest), *((0, 0) for _ in x.shape[2:])))
        x = x.reshape(batch, -1, _CHUNK, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    q, k, v, decay, share = map(chunked, (q, k, v.astype(jnp.float32), decay, share))
    passed = jnp.cumsum(decay, axis=-1)  # [n, B, heads, C], since the chunk began
    sees = jnp.tril(jnp.ones((_CHUNK, _CHUNK), bool))
    before = after = jnp.ones((), bool)  # sees what is before the chunk; is seen behind it
    if begins is not None:
        text = jnp.cumsum(chunked(begins[:, :, None]), axis=-1)  # [n, B, 1, C], within the chunk
        sees = sees & (text[..., None] == text[..., None, :])
        before, after = text == 0, text == text[..., -1:]
    between = passed[..., None] - passed[..., None, :]
    between = jnp.exp(jnp.where(sees, between, -jnp.inf))  # [n, B, heads, C, C]
    since_begin = jnp.where(before, jnp.exp(passed), 0)[..., None]
    corrected = k * share[..., None]
    system = _einsum("nbhik,nbhjk->nbhij", corrected, k) * between
    wanted = jnp.concatenate([v * share[..., None], corrected * since_begin], axis=-1)
    if platform() == "tpu":
        solved = solved_by_products(system, wanted)
    else:
        solved = jax.scipy.linalg.solve_triangular(system, wanted, lower=True, unit_diagonal=True)
    values, keys = solved[..., :size], solved[..., size:]
    scores = _einsum("nbhik,nbhjk->nbhij", q, k) * between
    to_end = jnp.where(after, jnp.exp(passed[..., -1:] - passed), 0)[..., None]
    of_chunk = jnp.where(before, jnp.exp(passed), 0)[..., -1, None, None]

    def apply_chunk(memory: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, keys, q, k, scores, of_chunk = chunk
        new = values - _einsum("bhck,bhkv->bhcv", keys, memory)
        out = _einsum("bhck,bhkv->bhcv", q, memory) + _einsum("bhij,bhjv->bhiv", scores, new)
        return memory * of_chunk + _einsum("bhck,bhcv->bhkv", k, new), out

    chunks = (values, keys, q * since_begin, k * to_end, scores, of_chunk)
    memory, out = jax.lax.scan(apply_chunk, memory, chunks)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [B, n, C, heads, D]
    return out.reshape(batch, -1, heads, size)[:, :length], memory


@jax.custom_vjp
def solved_by_products(system: jax.Array, wanted: jax.Array) -> jax.Array:
    """Solves lower triangular systems by products of matrices alone, as a TPU wants it: XLA solves
    them there row by row, which takes longer than all other products of a layer.

    Args:
      system: float32 [..., C, C], zero above its diagonal, which counts as ones; C is a power of
        two.
      wanted: float32 [..., C, D].

    Returns:
      float32 [..., C, D], which the systems multiply to `wanted`.
    """
    return _solved_forward(system, wanted)[0]


def _solved_forward(
    system: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The inverses of two blocks on the diagonal, A and B, and what is below A, C, give that of a
    # block of twice the size: A', B' and -B' C A' below A'.
    size = system.shape[-1]
    place, inverse = np.arange(size), jnp.eye(size)
    for doubling in range(size.bit_length() - 1):
        block = place >> doubling
        below = (block[:, None] == block + 1) & (block % 2 == 0)
        joined = jnp.where(below, system, 0)
        if doubling:
            joined = _einsum("...ij,...jk,...kl->...il", inverse, joined, inverse)
        inverse = inverse - joined
    solved = _einsum("...ij,...jd->...id", inverse, wanted)
    return solved, (inverse, solved)


def _solved_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inverse, solved = saved
    of_wanted = _einsum("...ji,...jd->...id", inverse, gradient)
    return -jnp.tril(_einsum("...id,...jd->...ij", of_wanted, solved), -1), of_wanted


solved_by_products.defvjp(_solved_forward, _solved_backward)
