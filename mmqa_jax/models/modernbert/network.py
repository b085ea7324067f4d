"""ModernBERT (Warner et al. 2024): an encoder with rotary positions and layers that see a window.

Pre-norm blocks of attention and a gated MLP. Some layers see all tokens, the others those near by,
each kind with rotary frequencies of its own; the first layer's attention gets the normed embeddings
as they are. Original: transformers models/modernbert/modeling_modernbert.py. For inference: nothing
is dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_divides, check_known, check_length
from mmqa_jax.models.common.layers import (
    Embedding,
    LayerNorm,
    Linear,
    attention,
    keep,
    merge_heads,
    normal_init,
    scan_layers,
    split_heads,
    stack_layers,
)
from mmqa_jax.models.common.rope import frequencies
from mmqa_jax.models.llama.network import rotate

POOLINGS = ("cls", "mean")


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """Sizes and switches; the defaults are ModernBERT-base's.

    `local` says of each layer whether it sees only tokens at most `window / 2` away, () is all but
    every third. `classifier_*` are of the head of a classifier of sequences. `dtype` is the compute
    dtype (parameters, norms, softmax and rotary angles stay float32), `attention` the
    implementation of `layers.attention`; `remat` and `unroll` go to `layers.scan_layers`.
    """

    vocab_size: int = 50368
    hidden: int = 768
    layers: int = 22
    heads: int = 12
    mlp: int = 1152
    positions: int = 8192
    eps: float = 1e-5
    activation: str = "gelu"
    window: int = 128
    local: tuple[bool, ...] = ()
    global_theta: float = 160000.0
    local_theta: float = 10000.0
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_divides("model.heads", self.heads, "model.hidden", self.hidden)
        if self.head_size % 2:
            raise UserError(
                f"model.heads is {self.heads}: a head of {self.head_size} values was expected to "
                "have an even number, since rotary embeddings rotate pairs; change it."
            )
        for name in ("activation", "classifier_activation"):
            check_known(f"model.{name}", getattr(self, name), ACTIVATIONS)
        check_known("model.classifier_pooling", self.classifier_pooling, POOLINGS)
        local = tuple(self.local) or tuple(n % 3 != 0 for n in range(self.layers))
        object.__setattr__(self, "local", local)
        if len(local) != self.layers or self.layers < 2:
            raise UserError(
                f"model.local has {len(local)} values: expected one for each of model.layers = "
                f"{self.layers}, of which there are at least 2; correct it."
            )

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


def modernbert_base(**changes) -> ModernBertConfig:
    """answerdotai/ModernBERT-base, and gte-modernbert-base and modernbert-embed-base."""
    return ModernBertConfig(**changes)


def modernbert_large(**changes) -> ModernBertConfig:
    """answerdotai/ModernBERT-large, and modernbert-embed-large."""
    return ModernBertConfig(**{"hidden": 1024, "layers": 28, "heads": 16, "mlp": 2624, **changes})


class ModernBertLayer(nnx.Module):
    """x = x + attention(norm(x)); x = x + down(act(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs, normed: bool = True):
        """`normed`: whether attention gets x normed; False in the first layer."""
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        size, of_heads, of_mlp = config.hidden, config.attention_bias, config.mlp_bias
        self.attention_norm = _norm(config, rngs) if normed else None
        self.query = linear(size, size, ("embed", "heads"), use_bias=of_heads)
        self.key = linear(size, size, ("embed", "heads"), use_bias=of_heads)
        self.value = linear(size, size, ("embed", "heads"), use_bias=of_heads)
        self.out = linear(size, size, ("heads", "embed"), use_bias=of_heads)
        self.mlp_norm = _norm(config, rngs)
        self.gate = linear(size, config.mlp, ("embed", "mlp"), use_bias=of_mlp)
        self.up = linear(size, config.mlp, ("embed", "mlp"), use_bias=of_mlp)
        self.down = linear(config.mlp, size, ("mlp", "embed"), use_bias=of_mlp)
        self.config = config

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, L, H], cos and sin float32 [1, L, 1, D / 2], mask bool [B, 1, 1 or L, L]."""
        config = self.config
        y = x if self.attention_norm is None else self.attention_norm(x)
        q, k, v = (split_heads(f(y), config.heads) for f in (self.query, self.key, self.value))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = attention(q, k, v, mask=mask, implementation=config.attention)
        x = x + self.out(keep(merge_heads(attended)))
        y = self.mlp_norm(x)
        return x + self.down(ACTIVATIONS[config.activation](self.gate(y)) * self.up(y))


class ModernBert(nnx.Module):
    """ModernBERT's encoder."""

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(
            config.vocab_size,
            config.hidden,
            ("vocab", "embed"),
            rngs=rngs,
            init=normal_init(config.init_stddev),
        )
        self.embedding_norm = _norm(config, rngs)
        self.first = ModernBertLayer(config, rngs=rngs, normed=False)
        self.layers = stack_layers(
            lambda r: ModernBertLayer(config, rngs=r), config.layers - 1, rngs
        )
        self.norm = _norm(config, rngs)
        self.config = config

    def embed(self, input_ids: jax.Array) -> jax.Array:
        """int [B, L] -> [B, L, H] in the compute dtype."""
        return self.normed(self.tokens(input_ids))

    def normed(self, tokens: jax.Array) -> jax.Array:
        """Normalizes rows of the table, or a picture's tokens, [B, L, H] for the first layer."""
        return self.embedding_norm(tokens).astype(self.config.dtype)

    def layer_outputs(self, embedded: jax.Array, mask: jax.Array) -> jax.Array:
        """Every layer's output before the last norm: [layers, B, L, H]; mask bool [B, L]."""
        x, of_layer = self._first(embedded, mask)

        def body(layer: ModernBertLayer, x, local, _):
            x = layer(x, *of_layer(local))
            return x, x

        outputs = scan_layers(self.layers, x, body, xs=self._local()[1:], unroll=True)[1]
        return jnp.concatenate([x[None], outputs])

    def __call__(self, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """input_ids int [B, L], mask bool [B, L] -> normed states of the last layer [B, L, H]."""
        return self.encode(self.embed(input_ids), mask)

    def encode(self, embedded: jax.Array, mask: jax.Array) -> jax.Array:
        """Normed states of the last layer, of what `embed` gives: [B, L, H]; mask bool [B, L]."""
        check_length(embedded.shape[1], self.config.positions)
        x, of_layer = self._first(embedded, mask)

        def body(layer: ModernBertLayer, x, local, _):
            return layer(x, *of_layer(local)), None

        x, _ = scan_layers(
            self.layers,
            x,
            body,
            xs=self._local()[1:],
            remat=self.config.remat,
            unroll=self.config.unroll,
        )
        return self.norm(x)

    def _first(self, embedded: jax.Array, mask: jax.Array):
        """The first layer's output, and what gives a layer its angles and mask, by `local`."""
        config, length = self.config, embedded.shape[1]
        thetas = (config.global_theta, config.local_theta)
        turning = np.stack([frequencies(config.head_size, theta, None) for theta in thetas])
        angles = jnp.arange(length)[:, None] * turning[:, None]  # [2, L, D / 2]
        cos, sin = (f(angles)[:, None, :, None] for f in (jnp.cos, jnp.sin))
        seen = mask.astype(bool)[:, None, None, :]  # [B, 1, 1, L]
        near = None
        if length > config.window // 2 + 1:  # else nothing is too far
            position = np.arange(length)
            near = np.abs(position[:, None] - position) <= config.window // 2

        def of_layer(local: jax.Array):
            attended = seen if near is None else seen & (near | ~local)
            number = local.astype(jnp.int32)
            return cos[number], sin[number], attended

        return self.first(embedded, *of_layer(self._local()[0])), of_layer

    def _local(self) -> jax.Array:
        return jnp.array(self.config.local)


class ModernBertCrossEncoder(nnx.Module):
    """transformers' ModernBertForSequenceClassification with one label."""

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        size = config.hidden
        self.bert = ModernBert(config, rngs=rngs)
        self.dense = linear(size, size, ("embed", "proj"), use_bias=config.classifier_bias)
        self.norm = _norm(config, rngs)
        self.classifier = linear(size, 1, ("embed", None))
        self.config = config

    def __call__(
        self, input_ids: jax.Array, attention_mask: jax.Array, token_type_ids: jax.Array
    ) -> jax.Array:
        """Pairs of right-padded texts, int or bool [B, L] each -> logits float32 [B].

        `token_type_ids` are not used: there are none.
        """
        config = self.config
        hidden = self.bert(input_ids, attention_mask)  # [B, L, H]
        if config.classifier_pooling == "mean":
            weights = attention_mask.astype(jnp.float32)[:, :, None]
            pooled = (hidden.astype(jnp.float32) * weights).sum(1) / weights.sum(1)
            pooled = pooled.astype(hidden.dtype)
        else:
            pooled = hidden[:, 0]
        pooled = self.norm(ACTIVATIONS[config.classifier_activation](self.dense(pooled)))
        return self.classifier(pooled)[:, 0].astype(jnp.float32)


def _norm(config: ModernBertConfig, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm(config.hidden, config.eps, rngs=rngs, use_bias=config.norm_bias)
