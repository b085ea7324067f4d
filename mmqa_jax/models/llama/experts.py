"""Mixture of experts in the place of a layer's MLP, as Qwen3 has it (Qwen3 Technical Report,
section 2; transformers models/qwen3_moe/modeling_qwen3_moe.py).

A router chooses a few experts for each token; the token's output is the sum of theirs, weighted by
the router's probabilities. None is dropped, and none depends on which others are in the batch: an
expert has no fixed capacity.

Of few tokens, as in a step of decoding, every one goes to every expert and most count nothing:
reading the matrices is what takes time. Many prompts' tokens go to their own experts alone, on a
TPU by a kernel that reads these from the stack of layers (`expert_kernel`). A training step on a
TPU sorts the copies of tokens by expert for `jax.lax.ragged_dot`, which has gradients. Elsewhere
JAX writes ragged_dot out as a product over all pairs of rows and experts, k times the work.

On a mesh the experts are split over `tensor`: each device computes what its own give to its rows,
and one sum over `tensor` adds these up.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mmqa_jax.core.flops import one_in
from mmqa_jax.core.mesh import (
    SEQUENCE,
    WIDE_ON_CPU,
    batch_axes,
    column_shards,
    platform,
    tensor_columns,
)
from mmqa_jax.models.common.activations import ACTIVATIONS, gated
from mmqa_jax.models.common.layers import Linear, normal_init, ones_init, param, product, zeros_init
from mmqa_jax.models.llama.config import LlamaConfig

_SPLIT = "tensor"  # the mesh axis of the logical axis "experts"
# Tokens whose products with all experts take a TPU no longer than reading these: a v5e computes 240
# FLOPs while it reads a byte, and a token needs one for each byte of a bfloat16 matrix.
FEW = 256


class GroupedLinear(nnx.Module):
    """A linear of each expert: kernels [E, in, out], bias [E, out] or None."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        names: tuple,
        *,
        rngs: nnx.Rngs,
        init,
        use_bias: bool = False,
    ):
        self.kernels = param(rngs, init, (experts, inputs, outputs), ("experts", *names))
        of_bias = (experts, outputs), ("experts", names[1])
        self.bias = param(rngs, zeros_init, *of_bias) if use_bias else None

    scale = None  # its kernels are not rounded

    def of_groups(self, rows: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        """Rows [N, in], the first sizes[0] of them expert 0's and so on -> [N, out].

        group: int [N], the expert of each row; where it is none of [E], the result is 0.
        """
        y = grouped_product(rows, self.kernels[...].astype(rows.dtype), sizes)
        return jnp.where((group < len(sizes))[:, None], with_bias(y, self.bias, group), 0)

    def of_all(self, x: jax.Array) -> jax.Array:
        """x [E, T, in], of each expert its own rows -> [E, T, out]."""
        return with_bias(batched_product(x, self.kernels[...].astype(x.dtype)), self.bias)


def with_bias(
    y: jax.Array, bias: nnx.Param | jax.Array | None, group: jax.Array | None = None
) -> jax.Array:
    """y [E, T, out], or [N, out] of the experts `group` [N], plus bias [E, out]; None is none."""
    if bias is None:
        return y
    bias = bias[...].astype(y.dtype)
    return y + (bias[:, None] if group is None else bias.at[group].get(mode="clip"))


def grouped_product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """rows [N, in], kernels [E, in, out], int32 sizes [E] -> [N, out] in the rows' type."""
    y = jax.lax.ragged_dot(rows, kernels, sizes, preferred_element_type=_sums(rows.dtype))
    return y.astype(rows.dtype)


def batched_product(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """x [E, T, in], kernels [E, in, out] -> [E, T, out] in x's type."""
    return jnp.matmul(x, kernels, preferred_element_type=_sums(x.dtype)).astype(x.dtype)


def _sums(dtype: jnp.dtype) -> jnp.dtype:
    """XLA on CPU has fast bfloat16 products only where the result is float32 (layers.product)."""
    return jnp.float32 if platform() == "cpu" else dtype


class Experts(nnx.Module):
    """sum over the chosen experts e of weight_e(x) * down_e(act(gate_e(x)) * up_e(x)).

    The router is float32, whatever the compute dtype. Experts beside an MLP (Gemma 4) scale what
    they get and what their router gets, each by numbers of its own, and each expert's weight.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        init, count = normal_init(config.init_stddev), config.experts
        self.router = param(rngs, init, (config.hidden, count), ("embed", None))
        grouped = functools.partial(
            GroupedLinear, count, rngs=rngs, init=init, use_bias=config.mlp_bias
        )
        width = config.expert_mlp
        self.gate = grouped(config.hidden, width, ("embed", None))
        self.up = grouped(config.hidden, width, ("embed", None))
        self.down = grouped(width, config.hidden, (None, "embed"))
        self.router_bias = param(rngs, zeros_init, (count,), (None,)) if config.mlp_bias else None
        of_choice = zeros_init, (count,), (None,)
        self.choice_bias = param(rngs, *of_choice) if config.choice_bias else None
        if config.experts_beside:
            self.router_scale = param(rngs, ones_init, (config.hidden,), ("embed",))
            self.expert_scale = param(rngs, ones_init, (count,), (None,))
            self.input_scale = param(rngs, ones_init, (config.hidden,), ("embed",))
        self.config = config

    def __call__(self, x: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """x [B, L, H] -> [B, L, H].

        layer: int32 [], of parameters that are a stack's (`apart`); None: they are one layer's.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1 or mesh.manual_axes:
            return self._own(x, layer)
        parts = mesh.shape[_SPLIT]
        parts = 1 if self.config.experts % parts else parts  # else all are on every device
        experts = PartitionSpec(*[None] * (layer is not None), _SPLIT if parts > 1 else None)
        columns = SEQUENCE if column_shards(x.shape[1]) > 1 else None
        # Out of a stack: see `columns_over_tensor`.
        scattered = layer is not None and parts == tensor_columns(x.shape[1]) > 1
        rows = PartitionSpec(batch_axes(mesh, x.shape[0]), _SPLIT if scattered else columns)
        graphdef, router, kernels = nnx.split(self, lambda path, _: len(path) == 1, ...)

        def local(router: nnx.State, kernels: nnx.State, x: jax.Array, layer: jax.Array | None):
            y = nnx.merge(graphdef, router, kernels)._own(x, layer, parts, scattered)
            if scattered:
                return jax.lax.psum_scatter(y, _SPLIT, scatter_dimension=1, tiled=True)
            return jax.lax.psum(y, _SPLIT) if parts > 1 else y

        whole = PartitionSpec()
        specs = (whole, experts, rows, whole)
        split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return split(router, kernels, x, layer)

    def _own(
        self, x: jax.Array, layer: jax.Array | None, parts: int = 1, scattered: bool = False
    ) -> jax.Array:
        """What the experts of this device, one of `parts`, give to x [B, L, H].

        scattered: x are this device's columns of L, and the result is of all.
        """
        routed = self.choose(x.reshape(-1, x.shape[-1]), layer)
        if scattered:
            whole = functools.partial(jax.lax.all_gather, axis_name=_SPLIT, axis=1, tiled=True)
            routed = [whole(part.reshape(*x.shape[:2], -1)) for part in routed]
            x = whole(x)
        rows = x.reshape(-1, x.shape[-1])
        if self.config.experts_beside:
            rows = rows * self._of_layer("input_scale", layer).astype(rows.dtype)
        chosen, weights = (part.reshape(len(rows), -1) for part in routed)
        if parts > 1:
            chosen = chosen - jax.lax.axis_index(_SPLIT) * (self.config.experts // parts)
        if layer is not None and _in_codes(self.gate):
            y = self.by_all(rows, chosen, weights, layer)
        elif layer is not None:
            y = self.by_kernel(rows, chosen, weights, layer, parts)
        elif platform() == "tpu" and len(rows) > FEW:
            y = self.by_groups(rows, chosen, weights, parts)
        else:
            y = self.by_all(rows, chosen, weights)
        return y.astype(x.dtype).reshape(x.shape)

    def choose(
        self, rows: jax.Array, layer: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """rows [T, H] -> the experts of each, int32 [T, k], and their weights, float32 [T, k]."""
        router = self._of_layer("router", layer)
        if self.config.experts_beside:
            scale = self._of_layer("router_scale", layer).astype(jnp.float32)
            router = router * (scale * self.config.hidden**-0.5)[:, None]
        # Of two bfloat16 factors one pass gives the products exactly.
        exact = {rows.dtype, router.dtype} == {jnp.dtype("bfloat16")} and platform() != "cpu"
        kind = jnp.bfloat16 if exact else jnp.float32
        logits = jnp.matmul(
            rows.astype(kind),
            router.astype(kind),
            precision=None if exact else jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )[:, : self.config.experts]  # see widen_routers
        if self.router_bias is not None:
            bias = self.router_bias[...] if layer is None else self.router_bias[...][layer]
            logits += bias.astype(jnp.float32)
        if self.config.weighted_input:
            weights, chosen = jax.lax.top_k(logits, self.config.active_experts)
            return chosen, jax.nn.sigmoid(weights)
        by_scores = jax.nn.sigmoid if self.config.router == "sigmoid" else jax.nn.softmax
        scores = by_scores(logits)
        if self.choice_bias is None:
            ranked = self.within_groups(scores, best=1)
            weights, chosen = jax.lax.top_k(ranked, self.config.active_experts)
        else:
            bias = jax.lax.stop_gradient(self._of_layer("choice_bias", layer))
            ranked = self.within_groups(scores + bias, best=2)
            _, chosen = jax.lax.top_k(ranked, self.config.active_experts)
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.config.normed_experts:
            weights = weights / weights.sum(-1, keepdims=True)
        if self.config.expert_weight != 1:
            weights = weights * self.config.expert_weight
        if self.config.experts_beside:
            weights = weights * self._of_layer("expert_scale", layer)[chosen]
        return chosen, weights

    def within_groups(self, ranked: jax.Array, *, best: int) -> jax.Array:
        """Numbers by which experts are chosen, [T, E], -inf outside of the groups in which the sum
        of the `best` is largest (DeepSeek-V2, section 2.2.2; V3, with two); without groups as they
        are."""
        groups = self.config.expert_groups
        if not groups:
            return ranked
        apart = ranked.reshape(len(ranked), groups, -1)
        of_group = jax.lax.top_k(apart, best)[0].sum(-1)
        _, chosen = jax.lax.top_k(of_group, self.config.active_groups)
        is_chosen = jax.nn.one_hot(chosen, groups, dtype=bool).any(1)
        return jnp.where(is_chosen[..., None], apart, -jnp.inf).reshape(ranked.shape)

    def _of_layer(self, name: str, layer: jax.Array | None) -> jax.Array:
        """Returns a parameter of the layer; `layer` is None where all are of one layer."""
        values = getattr(self, name)[...]
        return values if layer is None else values[layer]

    def by_groups(
        self, rows: jax.Array, chosen: jax.Array, weights: jax.Array, parts: int = 1
    ) -> jax.Array:
        """Each token by its experts alone: rows [T, H], chosen and weights [T, k] -> [T, H].

        chosen: may be none of this device's experts. parts: devices that share the rows' experts.
        """
        count, k = self._count, chosen.shape[1]
        group = chosen.reshape(-1)
        group = jnp.where((group >= 0) & (group < count), group, count)  # others' last
        order = jnp.argsort(group, stable=True)
        sizes = jnp.bincount(group, length=count + 1)[:count].astype(jnp.int32)
        group = group[order]
        with one_in(parts):
            sent = jnp.where((group < count)[:, None], rows[order // k], 0)
            if self.config.weighted_input:
                sent = (sent * weights.reshape(-1)[order][:, None]).astype(rows.dtype)
            gate, up = (part.of_groups(sent, sizes, group) for part in (self.gate, self.up))
            inner = gated(self.config.activation, self.config.gate_limit)(gate, up)
            y = self.down.of_groups(inner, sizes, group)[jnp.argsort(order)]
        y = y.reshape(*chosen.shape, -1).astype(jnp.float32)
        return (y if self.config.weighted_input else y * weights[..., None]).sum(1)

    def by_kernel(
        self,
        rows: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        layer: jax.Array,
        parts: int = 1,
        *,
        interpret: bool = False,
    ) -> jax.Array:
        """Computes the same out of a stack: each device the rows of its own experts, whatever the
        number of these."""
        from mmqa_jax.models.llama.expert_kernel import Stack, multiply  # imports Pallas

        linears = (self.gate, self.up, self.down)
        return multiply(
            rows,
            self._shares(chosen, weights),
            tuple(
                Stack(x.kernels[...], None if x.scale is None else x.scale[...]) for x in linears
            ),
            layer,
            activation=self.config.activation,
            copies=chosen.size / parts,
            interpret=interpret,
        )

    def by_all(
        self,
        rows: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        layer: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the same with every token sent to every expert; most products count nothing.

        layer: of a stack, whose kernel takes the same rows for all experts.
        """
        with one_in(self.config.experts / self.config.active_experts):
            sent, shares = rows, self._shares(chosen, weights).T[..., None]  # [E, T, 1]
            if self.config.weighted_input:  # of the others it is 0, as what they give
                sent, shares = (rows * shares).astype(rows.dtype), 1
            in_stack = {} if layer is None else {"layer": layer}
            if not in_stack:
                sent = jnp.broadcast_to(sent, (self._count, *rows.shape))
            gate, up = (part.of_all(sent, **in_stack) for part in (self.gate, self.up))
            inner = gated(self.config.activation, self.config.gate_limit)(gate, up)
            y = self.down.of_all(inner, **in_stack)  # [E, T, H]
        return (y.astype(jnp.float32) * shares).sum(0)

    def _shares(self, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """The weight of each of this device's experts for each token, float32 [T, E]."""
        return (jax.nn.one_hot(chosen, self._count) * weights[..., None]).sum(1)

    @property
    def _count(self) -> int:
        """Of this device's experts."""
        return self.gate.kernels.shape[-3]


def widen_routers(model: nnx.Module) -> None:
    """Pads routers of few experts with zeros to WIDE_ON_CPU columns, in place: their products then
    have equal rows on a CPU, however many they are."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts) and (absent := WIDE_ON_CPU - module.config.experts) > 0:
            router = module.router[...]
            names = module.router.get_metadata()["out_sharding"]
            padded = jnp.pad(router, [(0, 0)] * (router.ndim - 1) + [(0, absent)])
            module.router = nnx.Param(padded, out_sharding=names, eager_sharding=False)


class SharedExpert(nnx.Module):
    """sigmoid(x . choice) * down(act(gate(x)) * up(x)): an MLP that sees every token; the sigmoid
    is there if `shared_gate`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init, use_bias=False)
        self.gate = linear(config.hidden, config.shared_expert, ("embed", "mlp"))
        self.up = linear(config.hidden, config.shared_expert, ("embed", "mlp"))
        self.down = linear(config.shared_expert, config.hidden, ("mlp", "embed"))
        choice = init, (config.hidden, 1), ("embed", None)
        self.choice = param(rngs, *choice) if config.shared_gate else None
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, L, H] -> [B, L, H]."""
        y = self.down(ACTIVATIONS[self.config.activation](self.gate(x)) * self.up(x))
        if self.choice is None:
            return y
        return y * jax.nn.sigmoid(product(x, self.choice[...].astype(x.dtype), 0))


def apart(layers: nnx.Module, x: jax.Array) -> tuple[nnx.Module, Experts | None]:
    """A stack of layers without its experts, and these, where tokens x [B, L, H] are multiplied by
    a kernel that takes the layer's number; traced. None: the layers keep theirs."""
    config: LlamaConfig = layers.config
    mesh = jax.sharding.get_abstract_mesh()
    split = () if mesh.empty else batch_axes(mesh, x.shape[0]) or ()
    tokens = x.shape[0] * x.shape[1] // math.prod(mesh.shape[axis] for axis in split)
    if config.experts and _in_codes(layers.experts.gate):
        each = layers.experts.gate, layers.experts.up, layers.experts.down
        few = platform() == "tpu" and tokens <= FEW and x.dtype == jnp.bfloat16
        if not few or not all(linear.multiplies_by_kernel() for linear in each):
            return layers, None
    elif not multiplies_by_kernel(config, platform(), tokens):
        return layers, None
    layers = nnx.merge(*nnx.split(layers))  # one of this trace
    experts, layers.experts = layers.experts, None
    return layers, experts


def _in_codes(linear: nnx.Module) -> bool:
    """Whether experts are in a published form."""
    return linear.scale is not None and (
        linear.scale.ndim == linear.kernels.ndim or linear.kernels.dtype != jnp.int8
    )


def multiplies_by_kernel(config: LlamaConfig, platform: str, tokens: int) -> bool:
    """Whether experts of scanned layers multiply so many tokens of a device by `by_kernel`, which
    knows no biases, limits and weights of what experts get."""
    unknown = config.mlp_bias or config.gate_limit is not None or config.weighted_input
    if not config.experts or unknown or platform != "tpu" or tokens <= FEW:
        return False
    from mmqa_jax.models.llama.expert_kernel import fits  # Pallas takes long to import

    return fits(config.hidden, config.expert_mlp, tokens)


def reached(config: LlamaConfig, tokens: float) -> float:
    """The share of a layer's experts that some of so many tokens go to, where each expert is as
    likely as another."""
    return 1 - (1 - config.active_experts / config.experts) ** tokens
