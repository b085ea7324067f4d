"""The layers that every model shares: named parameters, linear, norm, attention, layer stacks.

Three conventions hold for all models built on this file:

* **Names.** Every parameter carries the logical names of its axes as Flax metadata
  (`out_sharding`); `nnx.get_partition_spec` reads them and the rules of the config map them to
  mesh axes. Names: "layers", "embed", "mlp", "experts", "heads", "head_dim", "vocab", "positions",
  "patch", "proj". Parameters are created with `eager_sharding=False`, so that building a model
  needs no mesh; on a mesh, build under `jax.jit` with `out_shardings` from those specs.
* **Dropout.** Functions take `dropout_key: jax.Array | None`. None means no dropout
  (deterministic). A key is split explicitly (`split_key`), never stored in a module, which keeps
  a step a plain function of arrays under `jax.jit`, `jax.lax.scan` and `jax.value_and_grad`.
* **Precision.** Parameters float32; matrix products run in the dtype of the activations; norms
  and softmax in float32.

`nnx.Linear` is not used because it keeps its initialisers in the graph definition: two models of
one config would then have unequal graph definitions, and a jitted step would compile twice.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import column_shards, gather_features, on_device, platform, split_rows
from mmqa_jax.models.attention import flash
from mmqa_jax.models.attention.masked import MASKED, Window, capped, sink_rows, softmax
from mmqa_jax.models.common.config_checks import check_known

Names = tuple[str | None, ...]

ones_init = jax.nn.initializers.ones
zeros_init = jax.nn.initializers.zeros


def normal_init(stddev: float) -> Initializer:
    """Gaussian initialiser with the given standard deviation (BERT: 0.02)."""
    return jax.nn.initializers.normal(stddev)


def uniform_init(bound: float) -> Initializer:
    """Uniform within -bound..bound; torch's Linear: 1 / sqrt(in), its LSTM: 1 / sqrt(hidden)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


default_init = normal_init(0.02)

_IMPLEMENTATIONS = ("auto", "xla", "cudnn", "blocks", "splash")


def param(
    rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], names: Names
) -> nnx.Param[jax.Array]:
    """A float32 parameter whose axes carry logical names; needs no mesh to be created.

    With `nnx.Rngs()`, which has no stream of keys, it is zeros: enough, and quicker to trace, where
    only the module's structure and shapes are wanted.
    """
    assert len(names) == len(shape), f"{len(names)} axis names {names} for the shape {shape}"
    initial = init(rngs.params(), shape, jnp.float32) if len(rngs) else jnp.zeros(shape)
    return nnx.Param(initial, out_sharding=names, eager_sharding=False)


class Linear(nnx.Module):
    """y = x @ kernel (+ bias); kernel [in, out], names one logical name per kernel axis."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        names: Names,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        kernel_init: Initializer = default_init,
        bias_init: Initializer = zeros_init,
    ):
        self.kernel = param(rngs, kernel_init, (in_features, out_features), names)
        self.bias = param(rngs, bias_init, (out_features,), names[1:]) if use_bias else None

    def __call__(self, x: jax.Array, *, constant_bias: bool = False) -> jax.Array:
        """[..., in] -> [..., out]; a constant bias gets no gradient here (`attention` has it)."""
        y = product(x, self.kernel[...].astype(x.dtype), 0)
        if self.bias is None:
            return y
        bias = self.bias[...]
        return (
            _plainly_biased(y, jax.lax.stop_gradient(bias)) if constant_bias else _biased(y, bias)
        )


def torch_linear(
    in_features: int, out_features: int, names: Names, *, rngs: nnx.Rngs, use_bias: bool = True
) -> Linear:
    """A Linear that starts as torch's nn.Linear: kernel and bias uniform within 1 / sqrt(in)."""
    init = uniform_init(in_features**-0.5)
    inits = {"kernel_init": init, "bias_init": init}
    return Linear(in_features, out_features, names, rngs=rngs, use_bias=use_bias, **inits)


class TransposedLinear(nnx.Module):
    """A Linear with its kernel as [out, in], for generation.

    With few rows XLA on CPU multiplies faster so, most of all in bfloat16.
    """

    def __init__(self, kernel: nnx.Param, bias: nnx.Param | None):
        self.kernel, self.bias = kernel, bias

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = product(x, self.kernel[...].astype(x.dtype), 1)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def _biased(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [..., N] plus a bias [N], in y's dtype."""
    return (_biased_on_tpu if platform() == "tpu" else _plainly_biased)(y, bias)


def _plainly_biased(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias.astype(y.dtype)


# With the bias's gradient summed in float32: XLA's own estimate of a sum over rows in bfloat16 is
# twice as long. A bias that is added in float32 keeps XLA from fusing two products into one.
_biased_on_tpu = jax.custom_vjp(_plainly_biased)
_biased_on_tpu.defvjp(
    lambda y, bias: (_plainly_biased(y, bias), bias[:0]),
    lambda none, dy: (dy, dy.sum(range(dy.ndim - 1), dtype=jnp.float32).astype(none.dtype)),
)
_with_constant_bias = jax.custom_vjp(lambda y, bias: y)  # to which the bias was added
_with_constant_bias.defvjp(
    lambda y, bias: (y, bias[:0]),
    lambda none, dy: (dy, dy.sum(range(dy.ndim - 1), dtype=jnp.float32).astype(none.dtype)),
)


def biases_apart(*linears: nnx.Module) -> tuple[jax.Array, ...] | None:
    """The biases of the linears for queries, keys and values, if they are to be added as constants
    (`Linear.__call__`) and given to `attention` for their gradients: on a TPU."""
    plain = all(type(linear) is Linear and linear.bias is not None for linear in linears)
    return tuple(f.bias[...] for f in linears) if plain and platform() == "tpu" else None


def product(
    x: jax.Array, matrix: jax.Array, axis: int, dtype: jnp.dtype | None = None
) -> jax.Array:
    """x [..., K] times a matrix with K along `axis`: [..., N] in `dtype`, x's by default.

    Under `jax.default_matmul_precision("bfloat16")` float32 operands are rounded to bfloat16 and
    the products summed in float32, forward and backward: what that setting means on a TPU. XLA
    ignores it on CPU, where it makes training up to twice as fast with AVX512_BF16 or AMX.
    """
    dtype = dtype or x.dtype
    on_cpu = platform() == "cpu"
    # Two-dimensional: 1.1x in the backward pass on CPU. Of columns that `sequence` splits XLA would
    # gather all.
    is_split = x.ndim == 3 and column_shards(x.shape[1]) > 1
    rows = x if is_split and not on_cpu else x.reshape(-1, x.shape[-1])
    if on_cpu and dtype == jnp.float32 and jax.config.jax_default_matmul_precision == "bfloat16":
        y = _rounded_product(rows, matrix, axis)
    else:
        # XLA on CPU has fast bfloat16 products (AMX) only where the result is float32, and copies
        # a matrix that is transposed on the way.
        y = _contract(rows, rows.ndim - 1, matrix, axis, jnp.float32 if on_cpu else dtype)
    return y.astype(dtype).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded_product(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """float32 x [M, K], matrix with K along `axis` -> [M, N]; operands rounded to bfloat16."""
    return _rounded_forward(x, matrix, axis)[0]


def _rounded_forward(
    x: jax.Array, matrix: jax.Array, axis: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    return _contract(x, 1, matrix, axis, jnp.float32), (x, matrix)


def _rounded_backward(
    axis: int, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, matrix = saved
    dy = dy.astype(jnp.bfloat16)  # [M, N]; left in float32, XLA would multiply in float32
    dx = _contract(dy, 1, matrix, 1 - axis, jnp.float32)
    first, second = (x, dy) if axis == 0 else (dy, x)
    return dx, _contract(first, 0, second, 0, jnp.float32)


_rounded_product.defvjp(_rounded_forward, _rounded_backward)


def _contract(a: jax.Array, a_axis: int, b: jax.Array, b_axis: int, dtype: jnp.dtype) -> jax.Array:
    """Sum of products along one axis of each of two matrices."""
    numbers = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=dtype)


# (operands, gradients) of products in 8 bits.
_ROUNDED = {
    "int8": (jnp.int8, jnp.int8),
    "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2),  # Micikevicius et al. 2022
}


def with_rounded_products(
    module: nnx.Module, call: Callable[..., Any], kind: str, *arguments: Any
) -> Any:
    """`call(module, *arguments)`, whose products with stacked linears round both operands; traced.

    By qwix, with a scale for each row of the activations and each column of a matrix (the largest
    absolute value); gradients pass the rounding, and are rounded where they are multiplied. The
    module is one of this trace alone.

    `kind`: int8 or fp8.
    """
    try:
        import qwix
    except ImportError as error:
        raise UserError(
            f"config key train.precision.products={kind}: the package qwix is not installed; "
            'run `pip install "mmqa-jax[qwix]"`, or leave products empty.'
        ) from error
    paths = [
        "/".join(map(str, ("module", *path)))
        for path, inner in nnx.iter_modules(module)
        if isinstance(inner, Linear) and inner.kernel.get_value().ndim == 3
    ]
    if not paths:
        raise UserError(
            f"config key train.precision.products={kind}: the model has no linears in stacked "
            "layers whose matrices are plain (LoRA's are not); leave products empty."
        )

    class Called(nnx.Module):  # qwix replaces the products of a module's call
        def __init__(self):
            self.module = module

        def __call__(self, *arguments: Any) -> Any:
            return call(self.module, *arguments)

    factors, gradients = _ROUNDED[kind]
    rule = qwix.QtRule(
        module_path="|".join(map(re.escape, paths)),
        weight_qtype=factors,
        act_qtype=factors,
        bwd_qtype=gradients,
    )
    rounded = qwix.quantize_model(Called(), qwix.QtProvider([rule]), *arguments, skip_nnx_init=True)
    return rounded(*arguments)


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis, computed in float32, returned in x's dtype.

    unit: it is multiplied by 1 + scale.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        *,
        rngs: nnx.Rngs,
        name: str = "embed",
        use_bias: bool = True,
        unit: bool = False,
    ):
        self.scale = param(rngs, zeros_init if unit else ones_init, (features,), (name,))
        self.bias = param(rngs, zeros_init, (features,), (name,)) if use_bias else None
        self.eps, self.unit = eps, unit

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = _keep_sums(x.astype(jnp.float32).mean(-1, keepdims=True))
        scale = self.scale[...] + 1 if self.unit else self.scale[...]
        y = (x - mean) * (_keep_sums(self.factor(x, mean)) * scale)
        y = y if self.bias is None else y + self.bias[...]
        return y.astype(x.dtype)

    def factor(self, x: jax.Array, mean: jax.Array) -> jax.Array:
        """One over the deviation of rows: x [..., features], float32 mean [..., 1] -> [..., 1]."""
        x32 = x.astype(jnp.float32)
        if x.dtype == jnp.bfloat16 and platform() != "cpu":
            # In one pass with the mean: what cancels is small beside the rounding of x itself.
            variance = jnp.maximum(jnp.square(x32).mean(-1, keepdims=True) - jnp.square(mean), 0)
        else:
            variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
        return jax.lax.rsqrt(variance + self.eps)


class Embedding(nnx.Module):
    """A table [count, features]; `attend` is the tied output product x @ table[:first].T."""

    def __init__(
        self,
        count: int,
        features: int,
        names: Names,
        *,
        rngs: nnx.Rngs,
        init: Initializer = default_init,
    ):
        self.table = param(rngs, init, (count, features), names)

    def __call__(self, ids: jax.Array) -> jax.Array:  # int [...] -> [..., features]
        return gather_features(self.table[...])[ids]

    def attend(self, x: jax.Array, first: int | None = None) -> jax.Array:
        # [..., features] -> [..., first], all by default
        return product(x, self.table[:first].astype(x.dtype), 1)


def word_head(config: Any, init: Initializer, rngs: nnx.Rngs) -> Linear | None:
    """The product with all words, [..., hidden] -> [..., vocab_size]; None where it is tied."""
    if config.tied:
        return None
    return Linear(
        config.hidden,
        config.vocab_size,
        ("embed", "vocab"),
        rngs=rngs,
        use_bias=False,
        kernel_init=init,
    )


def split_key(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """`count` independent keys, or `count` times None when there is no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity when `key` is None or `rate` is 0.

    The keep decision uses 16 random bits per element (half the cost of 32 on CPU); the keep
    probability is exact to 2^-16 and the scale uses that very value, so the mean is unbiased.
    On a TPU they are cheap enough (`drop_bits`) for the backward pass to draw them again.
    """
    surviving = round((1.0 - rate) * 65536)
    if key is None or surviving == 65536:
        return x
    if platform() == "tpu":
        from mmqa_jax.models.attention.fused import drop_bits_of  # imports Pallas: half a second

        drawn = drop_bits_of(key, x.shape) < surviving
    else:
        drawn = keep(jax.random.bits(key, x.shape, jnp.uint16) < surviving)
    return jnp.where(drawn, x * (65536 / surviving), 0).astype(x.dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    segments: jax.Array | None = None,
    window: Window | None = None,
    is_causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "xla",
    mesh: Mesh | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    biases: tuple[jax.Array, ...] | None = None,
) -> jax.Array:
    """Multi-head scaled dot-product attention, the one of the project.

    q [B, Lq, heads, head_dim]; k, v [B, Lk, kv_heads, head_dim]; query heads
    n * heads / kv_heads onwards read key head n, and none is repeated in memory. mask bool,
    broadcastable to [B, heads, Lq, Lk], True = attend; one mask for all heads where kv_heads are
    fewer. `segments` int [B, L], of rows that attend to themselves: a token sees those of its own
    segment alone (several texts in a row). `window`: of what else is visible a token sees the
    nearest. Scores are divided by sqrt(head_dim), and bent to stay within `cap` (`masked.capped`);
    softmax in float32, with `sinks`, float32 [heads], in its denominator (`masked.softmax`).
    A row without a visible column gives the mean of the values, never NaN.

    `implementation`: "auto", by device and shape (`flash.auto_implementation`); "xla", whose memory
    is quadratic in the lengths, or a linear one: "blocks" (on every device), "cudnn" (flash
    attention on NVIDIA GPUs; of segments by a Pallas kernel) or "splash" (a Pallas kernel for TPU).
    The linear ones take masks without heads ([B or 1, 1, Lq or 1, Lk]), and align a causal mask
    with the last key, so that what precedes the queries is seen whole; with "cudnn" and "splash"
    every query must see a key. "splash" takes segments, or masks of keys alone (Lq 1); `mesh` is
    where its heads lie. What these two do not take (types, sizes, masks, another platform:
    `flash.cudnn_fits`, `splash.splash_fits`; for cuDNN a cap, sinks, columns that `sequence`
    splits, and segments or a mask beside a window) goes to "blocks".
    Dropout acts on the attention weights (BERT), for which only "auto" and "xla" serve.
    `biases`: those of `biases_apart`, [heads * head_dim] each, whose gradients are made here.
    Returns [B, Lq, heads, head_dim] in q's dtype, which is kept for the backward pass
    (`scan_layers`); "splash" keeps it in the kernel's own layout, with the sums of its softmax.
    """
    drops = dropout_key is not None and dropout_rate > 0.0
    if implementation == "auto":
        implementation = flash.auto_implementation(
            q,
            k,
            mask,
            segmented=segments is not None,
            windowed=window is not None,
            is_causal=is_causal,
            drops=drops,
            capped=cap is not None,
            sinks=sinks is not None,
        )
        if implementation == "fused":
            from mmqa_jax.models.attention.fused import (
                fused_attention,  # imports Pallas: half a second
            )

            if window is not None:
                mask = window.mask(mask, q.shape[1], k.shape[1], is_causal=is_causal)
            drop = {"dropout_rate": dropout_rate, "dropout_key": dropout_key} if drops else {}
            same = {"mask": mask, "is_causal": is_causal, "mesh": mesh, "biases": biases}
            out = fused_attention(q, k, v, **same, **drop)
            return keep(out)
    if biases is not None:
        flat = zip(map(merge_heads, (q, k, v)), biases, strict=True)
        q, k, v = (split_heads(_with_constant_bias(x, b), q.shape[2]) for x, b in flat)
    if implementation != "xla":
        if drops:
            raise UserError(
                f"attention implementation {implementation!r} cannot drop attention weights; set "
                "the model's attention_dropout to 0, or its attention to 'xla'."
            )
        return _linear_attention(
            q,
            k,
            v,
            mask=mask,
            segments=segments,
            window=window,
            is_causal=is_causal,
            implementation=implementation,
            mesh=mesh,
            cap=cap,
            sinks=sinks,
        )
    if window is not None:
        mask = window.mask(mask, q.shape[1], k.shape[1], is_causal=is_causal)
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same if mask is None else mask & same
    heads, kv_heads = q.shape[2], k.shape[2]
    if is_causal:
        causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        mask = causal if mask is None else mask & causal
    if kv_heads < heads:
        if mask is not None and mask.shape[-2] > 1:
            mask = jnp.concatenate([mask] * (heads // kv_heads), axis=-2)
        q = group_queries(q, kv_heads)
    # Head-major matrices: plain batched products, 1.1x in the backward pass on CPU.
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, heads, L, head_dim]
    scores = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32)
    scores = capped(scores * q.shape[-1] ** -0.5, cap)  # [B, heads, Lq, Lk]
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
    if sinks is not None:
        sinks = sink_rows(sinks, kv_heads, scores.shape[2] * kv_heads // heads)
    weights = dropout(softmax(scores, sinks), dropout_rate, dropout_key)
    out = jnp.matmul(weights.astype(v.dtype), v).swapaxes(1, 2)
    return keep(ungroup_queries(out, heads) if kv_heads < heads else out)


def _linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    segments: jax.Array | None,
    window: Window | None,
    is_causal: bool,
    implementation: str,
    mesh: Mesh | None,
    cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """`attention` by "blocks", "cudnn" or "splash"."""
    check_known("attention implementation", implementation, _IMPLEMENTATIONS)
    length, columns = q.shape[1], k.shape[1]
    shards = column_shards(length) if length == columns else 1
    options = {"mask": mask, "segments": segments, "is_causal": is_causal}
    if implementation == "cudnn" and cap is None and sinks is None and shards == 1:
        kind = {"segmented": segments is not None, "windowed": window is not None}
        if flash.cudnn_fits(q, k, mask, is_causal=is_causal, **kind):
            kernel = functools.partial(flash.cudnn_attention, q, k, v, **options)
            return keep(kernel() if window is None else window.choose(kernel, columns))
    of_keys = mask is None or (mask.ndim == 4 and mask.shape[1:3] == (1, 1))
    if implementation == "splash" and of_keys and (mask is None or segments is None):
        from mmqa_jax.models.attention import splash  # it imports Pallas, which takes half a second

        if splash.splash_fits(length, columns, shards):
            keys = None if mask is None else jnp.broadcast_to(mask[:, 0, 0], k.shape[:2])
            if window is not None and keys is not None:  # what is masked sees what is masked
                keys, segments = None, keys
            kernel = functools.partial(
                splash.splash_attention, q, k, v,
                key_mask=keys, segments=segments, is_causal=is_causal, mesh=mesh, cap=cap,
                residual_name=_KEPT, sinks=sinks,
            )  # fmt: skip
            return kernel() if window is None else window.choose(kernel, columns)
    return keep(flash.block_attention(q, k, v, **options, window=window, cap=cap, sinks=sinks))


def group_queries(q: jax.Array, kv_heads: int) -> jax.Array:
    """The query heads of a key head as further rows of it: [B, L, heads, D] ->
    [B, groups * L, kv_heads, D]."""
    batch, _, heads, size = q.shape
    apart = q.reshape(batch, -1, kv_heads, heads // kv_heads, size).transpose(0, 3, 1, 2, 4)
    return apart.reshape(batch, -1, kv_heads, size)


def ungroup_queries(x: jax.Array, heads: int) -> jax.Array:
    """The reverse of `group_queries`: [B, groups * L, kv_heads, D] -> [B, L, heads, D]."""
    batch, _, kv_heads, size = x.shape
    apart = x.reshape(batch, heads // kv_heads, -1, kv_heads, size).transpose(0, 2, 3, 1, 4)
    return apart.reshape(batch, -1, heads, size)


def prefix_attention(
    q: jax.Array,
    prefix_k: jax.Array,
    prefix_v: jax.Array,
    prefix_mask: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of several sequences that share a prefix, without repeating the prefix (decoding).

    q [B * K, Lq, heads, head_dim] for K sequences side by side per prefix; prefix_k, prefix_v
    [B, Lp, heads, head_dim], prefix_mask bool [B, Lp]; k, v [B * K, Lk, heads, head_dim] each
    sequence's own columns, mask bool broadcastable to [B * K, heads, Lq, Lk]. `cap` as in
    `attention`; `sinks` of `masked.softmax`, [Lq, heads, 1]. One softmax over prefix and own
    columns. Returns [B * K, Lq, heads, head_dim]: what `attention` gives for the concatenation.
    """
    rows, length, heads, size = q.shape
    prefixes, columns = prefix_mask.shape
    grouped = (q * size**-0.5).reshape(prefixes, -1, heads, size)  # [B, K * Lq, heads, head_dim]
    shared = jnp.einsum("bqhd,bkhd->bqhk", grouped, prefix_k, preferred_element_type=jnp.float32)
    shared = jnp.where(prefix_mask[:, None, None, :], capped(shared, cap), MASKED)
    shared = shared.reshape(rows, length, heads, columns)
    scores = jnp.einsum("nqhd,nkhd->nhqk", q * size**-0.5, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, capped(scores, cap), MASKED).swapaxes(1, 2)  # [B * K, Lq, heads, Lk]
    weights = softmax(jnp.concatenate([shared, scores], axis=-1), sinks).astype(v.dtype)
    of_prefix = weights[..., :columns].reshape(prefixes, -1, heads, columns)
    out = jnp.einsum("bqhk,bkhd->bqhd", of_prefix, prefix_v).reshape(q.shape)
    return out + jnp.einsum("nqhk,nkhd->nqhd", weights[..., columns:], v)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., heads * head_dim] -> [..., heads, head_dim]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: jax.Array) -> jax.Array:
    """[..., heads, head_dim] -> [..., heads * head_dim]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class Attention(nnx.Module):
    """Multi-head attention of x over a context (x itself, or what it looks at)."""

    def __init__(
        self,
        size: int,
        heads: int,
        *,
        rngs: nnx.Rngs,
        kernel_init: Initializer = default_init,
        bias_init: Initializer = zeros_init,
        value_bias: bool = True,
        dropout_rate: float = 0.0,
        implementation: str = "xla",
    ):
        """`dropout_rate` and `implementation` are those of the function `attention`."""
        inits = {"kernel_init": kernel_init, "bias_init": bias_init}
        linear = functools.partial(Linear, size, size, rngs=rngs, **inits)
        self.query = linear(("embed", "heads"))
        self.key = linear(("embed", "heads"))
        self.value = linear(("embed", "heads"), use_bias=value_bias)
        self.out = linear(("heads", "embed"))
        self.heads = heads
        self.dropout_rate = dropout_rate
        self.implementation = implementation

    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        mask: jax.Array | None,
        *,
        is_causal: bool = False,
        rotate: Callable[[jax.Array], jax.Array] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """x [B, Lx, H], context [B, Lc, H] -> [B, Lx, H].

        mask bool, broadcastable to [B, heads, Lx, Lc], or None (nothing masked); `rotate` rotates
        queries and keys [B, L, heads, head_dim] by their positions.
        """
        query = split_heads(self.query(x), self.heads)
        key, value = (split_heads(f(context), self.heads) for f in (self.key, self.value))
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        attended = attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            implementation=self.implementation,
        )
        return self.out(keep(merge_heads(attended)))


def stack_layers(
    make_layer: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs
) -> nnx.Module:
    """`count` independently initialized copies of one layer, parameters stacked on axis 0.

    The new axis is named "layers". Run the result with `scan_layers`.
    """
    build = nnx.vmap(
        make_layer,
        in_axes=0,
        out_axes=0,
        axis_size=count,
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    return nnx.split_rngs(splits=count)(build)(rngs)


_KEPT, _PRODUCT, _SUMS = "kept", "product", "sums"


def keep(x: jax.Array) -> jax.Array:
    """Marks what `scan_layers` keeps for the backward pass, besides products with weights."""
    return checkpoint_name(x, _KEPT)


def keep_product(x: jax.Array) -> jax.Array:
    """Marks a sum of products with weights, which `scan_layers` keeps in place of its terms."""
    return checkpoint_name(x, _PRODUCT)


def _products_and(*names: str) -> Callable[..., bool]:
    return jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(_PRODUCT, *names),
    )


def _keep_sums(x: jax.Array) -> jax.Array:
    """Marks one value a row, which is kept whatever else is: it costs a pass over the row."""
    return checkpoint_name(x, _SUMS)


def keep_kernel(x: jax.Array) -> jax.Array:
    """`keep` of what a kernel gives, which on a TPU is kept as integers.

    JAX rounds floats that are kept once more (`reduce_precision`). XLA does that in the fusion of
    the product that makes them, but behind a kernel in a pass over memory of its own.
    """
    return _keep_bits(x) if platform() == "tpu" and x.dtype == jnp.bfloat16 else keep(x)


@jax.custom_vjp
def _keep_bits(x: jax.Array) -> jax.Array:
    return _through_bits(x)


def _through_bits(x: jax.Array) -> jax.Array:
    bits = keep(jax.lax.bitcast_convert_type(x, jnp.uint16))
    return jax.lax.bitcast_convert_type(bits, x.dtype)


_keep_bits.defvjp(lambda x: (_through_bits(x), None), lambda _, gradient: (gradient,))


_MARKED = jax.checkpoint_policies.save_only_these_names(_KEPT, _PRODUCT, _SUMS)
_REMAT_POLICIES = {
    "none": _products_and(_KEPT, _SUMS),
    "dots": _products_and(),
    "full": jax.checkpoint_policies.save_only_these_names(_SUMS),  # beside the layer inputs
}


def split_last(layers: nnx.Module) -> tuple[nnx.Module, nnx.Module]:
    """A stack made by `stack_layers` as the stack of all layers but the last, and the last."""
    graphdef, params = nnx.split(layers)
    params = on_device(params)
    before = jax.tree.map(lambda p: p[:-1], params)
    return nnx.merge(graphdef, before), nnx.merge(graphdef, jax.tree.map(lambda p: p[-1], params))


def scan_layers(
    layers: nnx.Module,
    carry: Any,
    body: Callable[[Any, Any, Any, jax.Array | None], tuple[Any, Any]],
    *,
    xs: Any = None,
    dropout_key: jax.Array | None = None,
    remat: str = "none",
    products: bool = True,
    unroll: int | bool | None = None,
) -> tuple[Any, Any]:
    """Run a stack made by `stack_layers` with `jax.lax.scan`.

    `body(layer, carry, x, key) -> (carry, y)` gets one layer's module, one slice of `xs` (arrays
    with a leading layer axis, or None) and that layer's own dropout key (None when `dropout_key`
    is None). Returns the last carry and the stacked y. The carry is activations [B, ...].

    `remat` says what the backward pass computes again: "full" each layer but the sums of its norms;
    "dots" all but products with weights; "none" nothing, where layers are unrolled. In a loop
    "none" is elementwise work and attention scores: a loop stacks all that it keeps, and three
    quarters of that are such values ([B, heads, L, L] and [B, L, mlp] in float32 above all), while
    they cost 1 to 3 % of the FLOPs. What is kept besides products with weights is marked by `keep`;
    of layers that mark all that is dear to compute (`products` False) nothing else is, such as a
    product before its bias.

    `unroll` goes to `jax.lax.scan`; None unrolls wholly on CPU, where a loop costs 1.3x in the
    backward pass, and keeps one compiled layer elsewhere, and where `remat` asks for memory: of
    layers that are unrolled XLA merges what is computed again with what it was.

    Parameters that lie in the host's memory come to the devices layer by layer, again in the
    backward pass, and each layer's gradient goes to the host.
    """
    if unroll is None:
        unroll = platform() == "cpu" and remat == "none"
    check_known("model.remat", remat, _REMAT_POLICIES)
    graphdef, params = nnx.split(layers)
    count = jax.tree.leaves(params)[0].shape[0]
    keys = None if dropout_key is None else jax.random.split(dropout_key, count)

    def step(carry, inputs):
        layer_params, x, key = inputs
        carry = jax.tree.map(split_rows, carry)
        return body(nnx.merge(graphdef, on_device(layer_params)), carry, x, key)

    if remat != "none" or unroll is not True:
        policy = _MARKED if remat == "none" and not products else _REMAT_POLICIES[remat]
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    carry, ys = jax.lax.scan(step, carry, (params, xs, keys), length=count, unroll=unroll)
    return jax.tree.map(split_rows, carry), ys
