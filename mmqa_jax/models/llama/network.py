"""LLaMA (Touvron et al. 2023): the decoder of LLaMA-1/2/3, Vicuna, SmolLM2 and llama2.c's stories,
and with other switches of its relatives (`families.FAMILIES`).

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP; weights in
transformers' order (rotary pairs are the two halves of a head). Originals: meta-llama/llama
llama/model.py, transformers models/llama/modeling_llama.py.

Training and scoring run the stacked layers (`Llama.__call__`). Generation on CPU and GPU runs them
one by one over a KV cache (`decoding.kv_cache.forward`), best after `unstack_layers`: XLA copies a
slice of a stack before it multiplies by it, which doubles the cost of a decode step on CPU. On TPU,
where it does not, generation scans the stack (`decoding.scanned_cache`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import platform
from mmqa_jax.models.attention.masked import Window, capped, last_of_pictures
from mmqa_jax.models.common.activations import ACTIVATIONS, LEARNED, gated, xielu
from mmqa_jax.models.common.config_checks import check_length
from mmqa_jax.models.common.layers import (
    Embedding,
    Linear,
    TransposedLinear,
    attention,
    merge_heads,
    normal_init,
    ones_init,
    param,
    product,
    scan_layers,
    split_heads,
    split_key,
    stack_layers,
    word_head,
)
from mmqa_jax.models.common.rope import axes_of_pairs, frequencies, rotate
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.experts import Experts, SharedExpert
from mmqa_jax.models.llama.gated_delta import GatedDelta, ShortConv, State
from mmqa_jax.models.llama.latent import FarTokens, Latent, far_tokens
from mmqa_jax.models.llama.layer_kinds import CONV_LINEARS, DELTA_LINEARS
from mmqa_jax.models.llama.norms import RMSNorm, norm_of, unit_rms

LINEARS = ("q", "k", "v", "out", "gate", "up", "down")  # of a layer


# What differs between the layers of one stack, as numbers: one compiled layer serves for all.


_ALL = 2**30  # tokens, a window that nothing is outside of


@flax.struct.dataclass
class LayerTraits:
    """What differs between layers: of all [N], or of one []; None: nothing does."""

    window: jax.Array | np.ndarray | None = None  # int32: tokens that one sees, itself included
    rotated: jax.Array | np.ndarray | None = None  # bool: whether positions are
    local: jax.Array | np.ndarray | None = None  # bool: whether by `LlamaConfig.local_theta`
    number: jax.Array | np.ndarray | None = None  # int32: in the stack
    side: jax.Array | None = None  # [N, B, L, P] or [B, L, P]: of `LlamaConfig.side`
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())  # of all windows
    # Keys and values of the last layer of each kind, which it writes or borrows.
    lent: dict[str, tuple[jax.Array, jax.Array]] | None = flax.struct.field(
        pytree_node=False, default=None
    )

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
    if config.local and not config.full_layers:
        local = np.array(config.local)
    number = np.arange(config.layers, dtype=np.int32) if numbered else None
    sizes = () if window is None else tuple(map(int, np.unique(window)))
    return LayerTraits(window, rotated, local, number, sizes=sizes)


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angle per position of each rotary pair, float32 [head_size / 2], with the config's scaling.

    Where a part of a head is rotated, the rest are pairs that do not turn. Where some layers are
    local, theirs follow those of the others, [head_size]; of `full_layers` the heads' sizes differ.
    """
    if full := config.full_layers:
        far = frequencies(full.head_dim, config.rope_theta, config.rope_scaling)
        return np.concatenate([far, frequencies(config.head_size, config.local_theta, None)])
    turning = frequencies(config.rotary_size, config.rope_theta, config.rope_scaling)
    turning = np.pad(turning, (0, (config.head_size - config.rotary_size) // 2))
    if config.local:
        near = frequencies(config.head_size, config.local_theta, None)
        turning = np.concatenate([turning, near])
    return turning


def turned_by(config: LlamaConfig, positions: jax.Array) -> np.ndarray | jax.Array:
    """`inverse_frequencies` for whole texts with these positions: of LongRoPE's two sets the one
    for the longest of them, as transformers chooses it for a batch."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.by_length:
        return inverse_frequencies(config)
    short, long = (
        inverse_frequencies(config.within(length))
        for length in (scaling.original_positions, scaling.original_positions + 1)
    )
    return jnp.where(positions.max() < scaling.original_positions, short, long)


def rotary_angles(
    config: LlamaConfig, positions: jax.Array, turning: np.ndarray | jax.Array | None = None
) -> jax.Array:
    """Positions times angles per position, float32 [B, L, 1, as many].

    Args:
      config: of the model.
      positions: int [B, L]; or [B, L, 3] of time, row and column, for `config.mrope`.
      turning: angles per position; None is `inverse_frequencies`.
    """
    turning = inverse_frequencies(config) if turning is None else turning
    if positions.ndim == 2:
        positions = positions[:, :, None, None]
    else:
        axes = axes_of_pairs(config.mrope, config.mrope_interleaved)
        axes = np.pad(axes, (0, config.head_size // 2 - len(axes)))  # pairs that do not turn
        positions = positions[:, :, None, axes]
    return positions.astype(jnp.float32) * turning


def shifted(positions: jax.Array, shifts: jax.Array | None) -> jax.Array:
    """int [B, L], and by how much they move: None, [B, L] or [B, L, 3]; as `rotary_angles` takes
    them."""
    if shifts is None:
        return positions
    return (positions if shifts.ndim == 2 else positions[..., None]) + shifts


def added(x: jax.Array, deepstack: jax.Array | None, number: jax.Array | int) -> jax.Array:
    """What follows layer `number`: x [B, L, H] with its part of `deepstack` [n, B, L, H] added."""
    if deepstack is None:
        return x
    if isinstance(number, int):
        return x + deepstack[number] if number < len(deepstack) else x
    last = len(deepstack) - 1
    part = deepstack[jnp.minimum(number, last)]
    return x + jnp.where(number <= last, part, 0).astype(x.dtype)


def rotation(config: LlamaConfig, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `rotate` takes, [..., head_size / 2], of cosines and sines of positions times
    `inverse_frequencies`: YaRN multiplies what is rotated."""
    factor = rotary_factor(config)
    return (cos, sin) if factor is None else (cos * factor, sin * factor)


def rotary_factor(config: LlamaConfig) -> np.ndarray | None:
    """What the rotation of each pair of `inverse_frequencies` is multiplied by; None is 1."""
    scaling = config.rope_scaling
    if scaling is None or scaling.attention_factor == 1:
        return None
    size = config.full_layers.head_dim if config.full_layers else config.rotary_size
    turned = np.full(size // 2, scaling.attention_factor, np.float32)
    rest = len(inverse_frequencies(config.within(config.positions))) - len(turned)
    return np.pad(turned, (0, rest), constant_values=1)


@jax.custom_vjp
def rotate_rows(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`rotate` of whole texts in training; cos and sin get no gradient.

    On TPU the halves of a head change places by a product with a permutation, which is exact in
    bfloat16: XLA else writes both halves to memory in float32, each padded to a whole head.
    """
    if platform() != "tpu" or x.dtype != jnp.bfloat16:
        return rotate(x, cos, sin)
    x = jax.lax.optimization_barrier(x)  # else the product before it writes float32
    swap = jnp.roll(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, axis=1)
    swapped = jnp.einsum("blhd,de->blhe", x, swap, preferred_element_type=jnp.float32)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _rotated_forward(x: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
    return rotate_rows(x, cos, sin), (cos, sin)


def _rotated_backward(angles: tuple[jax.Array, jax.Array], dy: jax.Array) -> Any:
    cos, sin = angles  # the gradient is rotated back
    return rotate_rows(dy, cos, -sin), None, None


rotate_rows.defvjp(_rotated_forward, _rotated_backward)


class LlamaLayer(nnx.Module):
    """x = x + attention(norm(x)); x = x + down(act(gate(norm(x))) * up(norm(x))).

    By `norms` they are outside, x + norm(attention(x)), or inside and outside. With experts
    `Experts` are in the place of the MLP, or beside it.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        biases = config.biases
        size, width = config.hidden, config.heads * config.head_size
        kv_width = config.kv_heads * config.head_size
        norm = functools.partial(norm_of, config, rngs=rngs)
        # In this order, since each parameter's draw depends on its place.
        if config.norms == "after":
            self.out_norm = norm(size)
        else:
            self.input_norm = norm(size)
        if config.recurrent and config.delta:
            self.delta = GatedDelta(config, rngs=rngs)
        elif config.recurrent:
            self.conv = ShortConv(config, rngs=rngs)
        elif config.latent:
            self.latent = Latent(config, rngs=rngs)
            width = config.heads * config.latent.value
            self.out = linear(width, size, ("heads", "embed"), use_bias=False)
        else:
            self.q = linear(size, width, ("embed", "heads"), use_bias="q" in biases)
            if "k" in config.linears:
                self.k = linear(size, kv_width, ("embed", "heads"), use_bias="k" in biases)
            if "v" in config.linears:
                self.v = linear(size, kv_width, ("embed", "heads"), use_bias="v" in biases)
            self.out = linear(width, size, ("heads", "embed"), use_bias="out" in biases)
        if config.gated and not config.recurrent:
            has_bias = "out_gate" in biases
            self.out_gate = linear(size, config.gates, ("embed", "heads"), use_bias=has_bias)
        if config.norms == "after":
            self.down_norm = norm(size)
        elif not config.parallel:
            self.mlp_norm = norm(size)
        if config.experts:
            self.experts = Experts(config, rngs=rngs)
            if config.shared_expert:
                self.shared = SharedExpert(config, rngs=rngs)
        if "up" in config.linears:
            if config.activation in LEARNED:
                of_curve = normal_init(config.init_stddev), (1,), (None,)
                self.rising, self.falling = param(rngs, *of_curve), param(rngs, *of_curve)
            if config.gated_mlp:
                self.gate = linear(size, config.mlp, ("embed", "mlp"), use_bias=config.mlp_bias)
            self.up = linear(size, config.mlp, ("embed", "mlp"), use_bias=config.mlp_bias)
            self.down = linear(config.mlp, size, ("mlp", "embed"), use_bias=config.mlp_bias)
        if config.recurrent:
            pass  # it has norms of its own
        elif config.qk_norm == "head":
            self.q_norm = norm(config.head_size, name="head_dim")
            if not config.borrows:
                self.k_norm = norm(config.head_size, name="head_dim")
        elif config.qk_norm == "whole":
            self.q_norm = norm(width, name="heads")
            self.k_norm = norm(kv_width, name="heads")
        if config.norms == "both":
            self.out_norm, self.down_norm = norm(size), norm(size)
        if config.experts_beside:
            self.dense_norm, self.experts_norm = norm(size), norm(size)
        if config.side:
            self.side_gate = linear(size, config.side, ("embed", None), use_bias=False)
            self.side_out = linear(config.side, size, (None, "embed"), use_bias=False)
            self.side_norm = norm(size)
        if config.layer_scales:
            self.scale = param(rngs, ones_init, (1,), (None,))
        of_sinks = normal_init(config.init_stddev), (config.heads,), ("heads",)
        self.sinks = param(rngs, *of_sinks) if config.sinks else None
        self.config = config

    @property
    def sink_logits(self) -> jax.Array | None:
        """`sinks` of `layers.attention`."""
        return None if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def project(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        traits: LayerTraits = NO_TRAITS,
        *,
        apart: bool = False,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """x [B, L, H] -> rotated query [B, L, heads, D] and key, and value [B, L, kv_heads, D]; the
        latter are None where the layer borrows them."""
        q, k, v = self.products(x, traits, apart=apart)
        cos, sin = self.turned(*traits.turned(cos, sin))
        return rotate_rows(q, cos, sin), None if k is None else rotate_rows(k, cos, sin), v

    def turned(self, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rotation of this layer's heads, of that of all kinds of layers side by side, those of
        "near" ones behind."""
        pairs = self.config.head_size // 2
        near = self.config.kinds == ("near",)
        cos, sin = (x[..., -pairs:] if near else x[..., :pairs] for x in (cos, sin))
        return cos, sin

    def products(
        self, x: jax.Array, traits: LayerTraits = NO_TRAITS, *, apart: bool = False
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """`project` without the rotation.

        apart: the products end before they are split into heads. XLA on TPU else gives them the
        heads' layout, for which it transposes the weights of a layer that is read from a stack.
        """
        config = self.config
        y = x if config.norms == "after" else self.input_norm(x)
        if config.latent:
            q, k, v = self.latent.products(y, config.kv_heads)
            return self._asked(q), k, v
        if config.borrows:
            return self._asked(self.q_norm(split_heads(self.q(y), config.heads))), None, None
        q, k = self.q(y), self.k(y)
        v = k if config.keys_are_values else self.v(y)
        if apart:
            q, k, v = jax.lax.optimization_barrier((q, k, v))
        if config.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = split_heads(k, config.kv_heads), split_heads(v, config.kv_heads)
        q = split_heads(q, config.heads)
        if config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if config.value_norm:
            v = unit_rms(v, config.eps)
        if config.qk_norm == "rotated":  # Llama 4 norms what is rotated, which has the same length
            turns = True if traits.rotated is None else traits.rotated
            q, k = (jnp.where(turns, unit_rms(x, config.eps), x) for x in (q, k))
        return self._asked(q), k, v

    def _asked(self, q: jax.Array) -> jax.Array:
        """Queries for attention, which divides by the root of a head's size."""
        scale = self.config.attention_scale
        return q if scale is None else q * (scale * self.config.head_size**0.5)

    def finish(
        self, x: jax.Array, attended: jax.Array, traits: LayerTraits = NO_TRAITS
    ) -> jax.Array:
        """The rest of the layer: x [B, L, H], attended [B, L, heads, D] -> [B, L, H]."""
        if self.config.latent:
            attended = self.latent.values(attended)
        if self.config.gated:
            gates = jax.nn.sigmoid(self.out_gate(self.input_norm(x)))
            attended = attended * split_heads(gates, self.config.heads)  # of one number or all
        return self.with_mlp(x, self.out(merge_heads(attended)), traits)

    def with_mlp(
        self, x: jax.Array, mixed: jax.Array, traits: LayerTraits = NO_TRAITS
    ) -> jax.Array:
        """The layer after its attention, or what is in its place: both [B, L, H] -> [B, L, H]."""
        config = self.config
        y = self.input_norm(x) if config.parallel else None
        x = x + self._given(mixed, "out_norm")
        if y is None:
            y = x if config.norms == "after" else self.mlp_norm(x)
        if config.experts and not config.experts_beside:
            y = self.experts(y) + self.shared(y) if config.shared_expert else self.experts(y)
        elif not config.gated_mlp:
            y = self.down(self._curved(self.up(y)))
        else:
            y = self.down(gated(config.activation, config.gate_limit)(self.gate(y), self.up(y)))
        if config.experts_beside:
            of_experts = self.experts(unit_rms(x, config.eps))
            y = self.dense_norm(y) + self.experts_norm(of_experts)
        x = x + self._given(y, "down_norm")
        if config.side:
            y = ACTIVATIONS[config.activation](self.side_gate(x)) * traits.side
            x = x + self.side_norm(self.side_out(y))
        if config.layer_scales:
            x = x * jax.lax.stop_gradient(self.scale[...]).astype(x.dtype)
        return x

    def _curved(self, y: jax.Array) -> jax.Array:
        """The activation of an MLP without a gate."""
        if self.config.activation not in LEARNED:
            return ACTIVATIONS[self.config.activation](y)
        return xielu(y, *(x[...].astype(jnp.float32) for x in (self.rising, self.falling)))

    def continued(
        self, x: jax.Array, state: State | None = None, **rows: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """A recurrent layer: x [B, L, H] and the state before and after it; `rows` are those of
        `GatedDelta.__call__`."""
        mixer = self.delta if self.config.delta else self.conv
        mixed, state = mixer(self.input_norm(x), state, **rows)
        return self.with_mlp(x, mixed), state

    def each_linear(self) -> Iterator[tuple[nnx.Module, str]]:
        """What holds each linear of the layer, and its name there; without those of experts."""
        if self.config.recurrent and self.config.delta:
            yield from ((self.delta, name) for name in DELTA_LINEARS)
        elif self.config.recurrent:
            yield from ((self.conv, name) for name in CONV_LINEARS)
        elif self.config.latent:
            yield from self.latent.each_linear()
        if self.config.shared_expert:
            yield from ((self.shared, name) for name in ("gate", "up", "down"))
        yield from ((self, name) for name in self.config.linears)

    def _given(self, y: jax.Array, norm: str) -> jax.Array:
        """What attention or MLP adds to x."""
        y = y if self.config.norms == "before" else getattr(self, norm)(y)
        return y if self.config.residual_scale == 1 else y * self.config.residual_scale

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        traits: LayerTraits = NO_TRAITS,
        segments: jax.Array | None = None,
        last: jax.Array | None = None,
        far: FarTokens = FarTokens(),  # noqa: B008 - frozen
    ) -> jax.Array:
        """x [B, L, H], mask bool [B, 1, 1, L], false at keys that are not seen -> [B, L, H].

        Causal, unless the config is bidirectional. traits: this layer's. segments int [B, L]: a
        token sees its own segment alone. last: of `last_of_pictures`; None: each sees up to itself.
        """
        if self.config.recurrent:
            is_real = None if mask is None else mask[:, 0, 0]
            return self.continued(x, begins=_begins(segments), is_real=is_real)[0]
        both, window = self.config.bidirectional, traits.sight
        if last is not None and self.config.picture_sight != "causal":
            length = x.shape[1]
            seen = (jnp.arange(length) <= last[:, :, None])[:, None]  # [B, 1, L, L]
            mask = seen if mask is None else seen & mask
            if window is not None:
                near = window.mask(mask, length, length, is_causal=True)
                if self.config.picture_sight == "prompt":  # whose tokens have no window
                    near = near | (mask & (last == last[:, :1])[:, None, :, None])
                mask = near
            both, window = True, None
        q, k, v = self.project(x, cos, sin, traits)
        if self.config.borrows:
            k, v = traits.lent[self.config.kinds[0]]
        elif traits.lent is not None:
            traits.lent[self.config.kinds[0]] = k, v
        q = far.grown(q, traits.rotated)
        attended = attention(
            q,
            k,
            v,
            mask=mask,
            segments=far.segments(segments, traits.rotated, x.shape[:2]),
            window=window,
            is_causal=not both,
            implementation=self.config.attention,
            dropout_rate=self.config.attention_dropout,
            dropout_key=dropout_key,
            cap=self.config.attention_cap,
            sinks=self.sink_logits,
        )
        return self.finish(x, attended, traits)


def _begins(segments: jax.Array | None) -> jax.Array | None:
    """bool [B, L]: whether a token of these texts, int [B, L], is the first of its own."""
    if segments is None:
        return None
    return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)


class Period(nnx.Module):
    """The layers, each of its own kind, that repeat through a decoder (`LlamaConfig.kinds`).

    A decoder of several kinds of layers is a stack of these: layer n is `places[n % period]` of
    number n // period. Scans run over periods, whose places they write out one after another.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        places = range(config.period)
        self.places = nnx.List([LlamaLayer(config.of_layer(n), rngs=rngs) for n in places])


def stacks(layers: nnx.Module) -> list[nnx.Module]:
    """The stacks of layers of one kind that a decoder's stack is, or consists of, by place."""
    return [*layers.places] if isinstance(layers, Period) else [layers]


class Llama(nnx.Module):
    """Decoder with its output head; `embed` and `encode` are separate for LLaVA."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        self.tokens = Embedding(
            config.vocab_size, config.hidden, ("vocab", "embed"), rngs=rngs, init=init
        )
        kind, count = LlamaLayer, config.layers
        if config.kinds:
            kind, count = Period, count // config.period
        self.layers = stack_layers(lambda r: kind(config, rngs=r), count, rngs)
        self.norm = norm_of(config, config.hidden, rngs=rngs)
        if width := config.layers * (config.side or 0):
            names = ("embed", None)
            self.side_projection = Linear(
                config.hidden, width, names, rngs=rngs, use_bias=False, kernel_init=init
            )
            self.side_norm = RMSNorm(config.side, config.eps, rngs=rngs, name="head_dim")
            if config.side_table:
                names = ("vocab", None)
                self.side_tokens = Embedding(config.vocab_size, width, names, rngs=rngs, init=init)
        self.head = word_head(config, init, rngs)
        self.config = config

    def embed(self, input_ids: jax.Array) -> jax.Array:
        """int [B, L] -> [B, L, H] in the compute dtype; with `LlamaConfig.side` what the layers get
        is behind it, [B, L, H + layers * side], see `parted`."""
        return self.with_side(self.words_of(input_ids), input_ids)

    def words_of(self, input_ids: jax.Array) -> jax.Array:
        """int [B, L] -> [B, L, H] in the compute dtype."""
        x, scale = self.tokens(input_ids).astype(self.config.dtype), self.config.embedding_scale
        return x if scale == 1 else x * scale

    def with_side(self, x: jax.Array, input_ids: jax.Array) -> jax.Array:
        """What `embed` gives of [B, L, H], of words or pictures; these have the id 0."""
        if not self.config.side:
            return x
        config, shape = self.config, (*x.shape[:-1], self.config.layers, self.config.side)
        side = self.side_norm((self.side_projection(x) * config.hidden**-0.5).reshape(shape))
        if config.side_table:
            of_tokens = self.side_tokens(input_ids).astype(x.dtype) * config.side**0.5
            side = (side + of_tokens.reshape(shape)) * 0.5**0.5
        return jnp.concatenate([x, merge_heads(side)], axis=-1)

    def parted(self, embedded: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """What `embed` gives as the layers' first input [B, L, H], and their inputs of their own
        [layers, B, L, side] or None."""
        config = self.config
        if not config.side:
            return embedded, None
        side = embedded[..., config.hidden :]
        side = side.reshape(*side.shape[:-1], config.layers, config.side)
        return embedded[..., : config.hidden], jnp.moveaxis(side, -2, 0)

    @property
    def words(self) -> tuple[jax.Array, int]:
        """The output head's matrix, [V, H] or [H, V], and the axis of the words."""
        if self.head is None:
            return self.tokens.table[...], 0
        return self.head.kernel[...], 0 if isinstance(self.head, TransposedLinear) else 1

    def logits(self, hidden: jax.Array, words: jax.Array | None = None) -> jax.Array:
        """Hidden states as `encode` gives them [..., H] -> token logits [..., V], float32.

        words: the matrix of the property, split otherwise.
        """
        table, axis = self.words
        words = (table if words is None else words).astype(hidden.dtype)
        logits = product(hidden, words, 1 - axis, jnp.float32)
        divisor = self.config.logit_divisor
        return capped(logits if divisor == 1 else logits / divisor, self.config.logit_cap)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token at every position, [B, L, V] float32; see `encode`."""
        embedded = self.embed(input_ids)
        return self.logits(
            self.encode(embedded, attention_mask, positions, dropout_key=dropout_key)
        )

    def encode(
        self,
        embedded: jax.Array,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        deepstack: jax.Array | None = None,
        pictures: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Normed hidden states of the last layer.

        Args:
          embedded: [B, L, H].
          attention_mask: [B, L], true at real tokens; not needed where padding is on the right
            and no token sees what follows it.
          positions: int [B, L] of rotary positions; None is 0..L-1 in every row, also behind
            padding on the left (only distances matter). Or [B, L, 3], see `LlamaConfig.mrope`.
          segments: int [B, L], the number of a token's text in its row: several texts in a row do
            not see each other.
          deepstack: [n, B, L, H], added to what the first n layers give (Qwen3-VL); None: nothing.
          pictures: bool [B, L], of pictures' tokens, or of those of the prompt, as
            `LlamaConfig.picture_sight` says; None: none.
          dropout_key: drops attention weights at `config.attention_dropout`.

        Returns:
          [B, L, H]. Rows of padding are finite and mean nothing.
        """

        def body(layer: LlamaLayer, x, traits, key):
            x = layer(x, *angles, mask, key, traits, segments, last, far)
            return added(x, deepstack, traits.number), None

        angles, mask, far = self._prepare(embedded, attention_mask, positions)
        last = self._last(pictures)
        numbered = deepstack is not None
        return self.norm(self._scan(embedded, body, dropout_key, numbered)[0])

    def layer_outputs(
        self,
        embedded: jax.Array,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        deepstack: jax.Array | None = None,
        segments: jax.Array | None = None,
        pictures: jax.Array | None = None,
    ) -> jax.Array:
        """Every layer's output before the last norm: [layers, B, L, H]; see `encode`."""

        def body(layer: LlamaLayer, x, traits, key):
            x = layer(x, *angles, mask, None, traits, segments, last, far)
            x = added(x, deepstack, traits.number)
            return x, x

        angles, mask, far = self._prepare(embedded, attention_mask, positions)
        last = self._last(pictures)
        return self._scan(embedded, body, None, deepstack is not None)[1]

    def each_layer(self) -> Iterator[LlamaLayer]:
        """The layers one by one, stacked or not."""
        if isinstance(self.layers, nnx.List):
            yield from self.layers
            return
        of_places = [nnx.split(stack) for stack in stacks(self.layers)]
        for number in range(self.config.layers):
            in_stack, place = divmod(number, len(of_places))
            graphdef, params = of_places[place]
            yield nnx.merge(graphdef, jax.tree.map(lambda p, n=in_stack: p[n], params))

    def _last(self, pictures: jax.Array | None) -> jax.Array | None:
        """The last place that each token sees, int32 [B, L]; None: each sees up to itself."""
        if pictures is None or self.config.picture_sight == "causal":
            return None
        return last_of_pictures(pictures)

    def _prepare(self, embedded, attention_mask, positions):
        """((cos, sin) [B or 1, L, 1, D / 2] float32, mask [B, 1, 1, L] or None, far tokens)."""
        length, longest = embedded.shape[1], None
        if positions is None:
            longest = length
            check_length(length, self.config.positions)
            positions = jnp.arange(length)[None]
        angles = rotary_angles(self.config, positions, turned_by(self.config, positions))
        if attention_mask is not None:
            attention_mask = attention_mask.astype(bool)[:, None, None]
        far = far_tokens(self.config, positions, longest)
        return rotation(self.config, jnp.cos(angles), jnp.sin(angles)), attention_mask, far

    def _scan(
        self, x: jax.Array, body: Callable, dropout_key: jax.Array | None, numbered: bool = False
    ):
        if isinstance(self.layers, nnx.List):
            raise TypeError("unstacked layers only run in decoding.kv_cache.forward")
        x, side = self.parted(x)
        traits = layer_traits(self.config, x.shape[1], numbered=numbered).replace(side=side)
        if period := isinstance(self.layers, Period) and self.config.period:
            traits = jax.tree.map(lambda x: x.reshape(-1, period, *x.shape[1:]), traits)
            body = functools.partial(_of_period, body)
        x, ys = scan_layers(
            self.layers,
            x,
            body,
            xs=traits,
            dropout_key=dropout_key,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )
        if period:
            ys = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)
        return x, ys


def _of_period(
    body: Callable, period: Period, x: jax.Array, traits: LayerTraits, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    """What `body` makes of one layer after another, and what it gives besides, stacked."""
    ys, lent = [], {}
    for place, of_layer in enumerate(split_key(key, len(period.places))):
        x, y = body(period.places[place], x, traits.of(place).replace(lent=lent), of_layer)
        ys.append(y)
    return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def last_token(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """hidden [B, L, H], lengths int [B] -> the state of each row's last real token, [B, H]."""
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]


def for_length(model: Llama, length: int) -> Llama:
    """The model, of the same arrays, for texts of up to `length` tokens and no others, so that of
    LongRoPE's two sets of frequencies one is used."""
    config = model.config.within(length)
    if config == model.config:
        return model
    model = nnx.merge(*nnx.split(model))
    model.config = config
    return model


def unstack_layers(model: Llama) -> None:
    """Replaces the stack of layers by one array per layer, in place, for generation.

    Kernels are transposed (see TransposedLinear). The stacks are freed one by one (whoever else
    held them loses them): the peak is the model and its largest stack. Shardings are kept, since
    the layer axis is never split.
    """
    of_places = [_unstacked(stack) for stack in stacks(model.layers)]
    model.layers = nnx.List(layer for period in zip(*of_places, strict=True) for layer in period)


_TURNED = ("kernel", "scale", "zero")


def _unstacked(stack: nnx.Module) -> list[LlamaLayer]:
    graphdef, state = nnx.split(stack)
    state = nnx.to_flat_state(state)
    layers: list[list] = [[] for _ in range(state[0][1].shape[0])]
    kernels = {path[:-1]: stack.ndim for path, stack in state if path[-1] == "kernel"}
    for path, stack in state:
        value, names = stack.get_value(), stack.get_metadata()["out_sharding"][1:]
        # A kernel, and what has its axes: scales and zeros of groups of a rounded one's inputs.
        transposed = path[-1] in _TURNED and kernels.get(path[:-1]) == stack.ndim
        names = names[::-1] if transposed else names
        for number, layer in enumerate(layers):
            of_layer = _take_layer(value, number, transposed)
            layer.append((path, nnx.Param(of_layer, out_sharding=names, eager_sharding=False)))
        if not isinstance(value, jax.core.Tracer):
            value.delete()
    unstacked = [nnx.merge(graphdef, nnx.from_flat_state(layer)) for layer in layers]
    for layer in unstacked:
        for owner, name in layer.each_linear():
            linear = getattr(owner, name)
            if isinstance(linear, Linear):
                setattr(owner, name, TransposedLinear(linear.kernel, linear.bias))
            else:
                linear.inputs = 1  # of a rounded one, see quantize.py
    return unstacked


def transpose_head(model: Llama) -> None:
    """Holds a head of words that is not tied as a TransposedLinear, in place: its products then
    have equal rows on a CPU, however many they are."""
    if isinstance(model.head, Linear):
        kernel = model.head.kernel
        names = kernel.get_metadata()["out_sharding"][::-1]
        transposed = jax.jit(jnp.transpose)(kernel[...])
        param = nnx.Param(transposed, out_sharding=names, eager_sharding=False)
        model.head = TransposedLinear(param, None)


@functools.partial(jax.jit, static_argnums=2)
def _take_layer(stack: jax.Array, number: int, transposed: bool) -> jax.Array:
    taken = jax.lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)
    return taken.T if transposed else taken


def unstacked_llama(config: LlamaConfig, *, rngs: nnx.Rngs) -> Llama:
    """A new model as `unstack_layers` leaves it."""
    model = Llama(config, rngs=rngs)
    unstack_layers(model)
    return model
