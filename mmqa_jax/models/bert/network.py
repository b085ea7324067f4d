"""BERT (Devlin et al. 2019): the post-norm encoder of VLP, MiniLM and Prophet's questions.

Weights of Hugging Face's `BertModel` and of VLP's `pytorch_pretrained_bert` fit it; the two
differ in LayerNorm's eps (1e-12 and 1e-5) and in the number of token types (2 and 6). With rotary
positions it is NomicBERT, GTE and jina-embeddings-v3 (`rotary.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import config_checks
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.array_layout import as_rows, in_rows
from mmqa_jax.models.common.layers import (
    Embedding,
    LayerNorm,
    Linear,
    attention,
    biases_apart,
    dropout,
    keep,
    keep_kernel,
    merge_heads,
    normal_init,
    param,
    scan_layers,
    split_heads,
    split_key,
    split_last,
    stack_layers,
    zeros_init,
)
from mmqa_jax.models.common.rope import RopeScaling, frequencies, rotate


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and constants of a BERT encoder; the defaults are BERT-base, cased.

    `dropout` acts after the embeddings and on both residual branches, `attention_dropout` on the
    attention weights. `dtype` is the compute dtype (parameters, norms and softmax stay float32),
    `attention` the implementation of `layers.attention`; `remat` and `unroll` go to
    `layers.scan_layers`.

    With `rope_theta` queries and keys are rotated by their positions, by this base and
    `rope_scaling`, and there is no table of positions. `gated`: the activation of one linear is
    multiplied by another's result. `attention_bias` is on the four linears of attention, `up_bias`
    on those that widen, `down_bias` on the last. With `types` 0 there are no token types.
    """

    vocab_size: int = 28996
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    positions: int = 512
    types: int = 2
    eps: float = 1e-12
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pooler: bool = False
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    unroll: int | bool | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    gated: bool = False
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True

    def __post_init__(self):
        config_checks.check_layers(self, "model", "layers")
        config_checks.check_divides("model.heads", self.heads, "model.hidden", self.hidden)
        if self.rope_theta is not None and (self.hidden // self.heads) % 2:
            raise UserError(
                f"model.heads is {self.heads}: a head of {self.hidden // self.heads} values was "
                "expected to have an even number, since rotary embeddings rotate pairs; change it."
            )
        for name in ("dropout", "attention_dropout"):
            config_checks.check_rate(f"model.{name}", getattr(self, name))
        config_checks.check_known("model.activation", self.activation, ACTIVATIONS)


def bert_base_cased(**changes) -> BertConfig:
    """google-bert/bert-base-cased (Hugging Face eps)."""
    return BertConfig(**changes)


def bert_base_uncased(**changes) -> BertConfig:
    """google-bert/bert-base-uncased."""
    return dataclasses.replace(BertConfig(vocab_size=30522), **changes)


def bert_large_uncased(**changes) -> BertConfig:
    """google-bert/bert-large-uncased (Prophet's question encoder)."""
    large = BertConfig(vocab_size=30522, hidden=1024, layers=24, heads=16, mlp=4096)
    return dataclasses.replace(large, **changes)


def minilm_l6(**changes) -> BertConfig:
    """sentence-transformers/all-MiniLM-L6-v2."""
    small = BertConfig(vocab_size=30522, hidden=384, layers=6, heads=12, mlp=1536)
    return dataclasses.replace(small, **changes)


def bert_tiny(**changes) -> BertConfig:
    """A small encoder to train from scratch on a CPU."""
    tiny = BertConfig(vocab_size=4096, hidden=192, layers=4, heads=6, mlp=768, positions=256)
    return dataclasses.replace(tiny, **changes)


class BertEmbeddings(nnx.Module):
    """Word + position + token-type embeddings, LayerNorm, dropout."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        size = config.hidden
        self.word = Embedding(config.vocab_size, size, ("vocab", "embed"), rngs=rngs, init=init)
        self.position = (
            Embedding(config.positions, size, ("positions", "embed"), rngs=rngs, init=init)
            if config.rope_theta is None
            else None
        )
        self.token_type = (
            Embedding(config.types, size, (None, "embed"), rngs=rngs, init=init)
            if config.types
            else None
        )
        self.norm = LayerNorm(size, config.eps, rngs=rngs)
        self.config = config

    def __call__(
        self,
        input_ids: jax.Array,
        position_ids: jax.Array,
        token_type_ids: jax.Array,
        *,
        regions: tuple[jax.Array, jax.Array] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """ids [B, L] -> [B, L, H] in the compute dtype.

        `regions` = (content, place), both [B, R, H], replace the token and the position embedding
        of slots 1..R (VLP); the token type is added to them too.
        """
        tokens = self.word(input_ids)  # [B, L, H]
        positions = 0.0 if self.position is None else self.position(position_ids)
        types = 0.0 if self.token_type is None else self.token_type(token_type_ids)
        if regions is not None:
            tokens, positions = (
                jnp.concatenate([text[:, :1], region, text[:, 1 + region.shape[1] :]], axis=1)
                for text, region in zip((tokens, positions), regions, strict=True)
            )
        x = self.norm(tokens + positions + types)
        return dropout(x, self.config.dropout, dropout_key).astype(self.config.dtype)


class BertLayer(nnx.Module):
    """Post-norm transformer layer: x = LN(x + attention(x)); x = LN(x + mlp(x))."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        of_heads = functools.partial(
            linear, config.hidden, config.hidden, use_bias=config.attention_bias
        )
        widens = functools.partial(
            linear, config.hidden, config.mlp, ("embed", "mlp"), use_bias=config.up_bias
        )
        self.query = of_heads(("embed", "heads"))
        self.key = of_heads(("embed", "heads"))
        self.value = of_heads(("embed", "heads"))
        self.out = of_heads(("heads", "embed"))
        self.attention_norm = LayerNorm(config.hidden, config.eps, rngs=rngs)
        self.gate = widens() if config.gated else None
        self.up = widens()
        self.down = linear(config.mlp, config.hidden, ("mlp", "embed"), use_bias=config.down_bias)
        self.mlp_norm = LayerNorm(config.hidden, config.eps, rngs=rngs)
        self.config = config

    def project(
        self, x: jax.Array, shape: tuple[int, ...] | None = None, **bias: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, L, H], or rows of such a `shape` -> query, key, value [B, L, heads, head_dim].

        `bias`: of `Linear.__call__`.
        """
        shape, rows = shape or x.shape, as_rows(x)
        linears = self.query, self.key, self.value
        projected = (keep(linear(rows, **bias)).reshape(shape) for linear in linears)
        return tuple(split_heads(p, self.config.heads) for p in projected)

    def finish(
        self, x: jax.Array, attended: jax.Array, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """The rest: x [B, L, H] or its rows, attended [B, L, heads, head_dim] -> [B, L, H].

        What it and `project` mark is all that the backward pass keeps.
        """
        rate = self.config.dropout
        first, second = split_key(dropout_key, 2)
        x = as_rows(x)  # [B, L, H] or [B * L, H]
        attended = merge_heads(attended)  # [B, L, H]
        mark = keep if dropout_key is None else keep_kernel
        y = self.out(mark(attended).reshape(x.shape))
        x = self.attention_norm(keep(x + dropout(y, rate, first)))
        activation, hidden = ACTIVATIONS[self.config.activation], keep(self.up(x))  # [..., mlp]
        hidden = activation(hidden) if self.gate is None else activation(self.gate(x)) * hidden
        x = self.mlp_norm(keep(x + dropout(self.down(hidden), rate, second)))
        return x.reshape(attended.shape)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array,
        dropout_key: jax.Array | None = None,
        biases: tuple[jax.Array, ...] | None = None,
    ) -> jax.Array:
        """[B, L, heads, head_dim] each, mask as in `__call__` -> [B, L, heads, head_dim].

        `biases`: as `layers.attention` has them.
        """
        return attention(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.config.attention_dropout,
            dropout_key=dropout_key,
            implementation=self.config.attention,
            biases=biases,
        )

    def __call__(
        self, x: jax.Array, mask: jax.Array, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """x [B, L, H], mask bool broadcastable to [B, heads, L, L] -> [B, L, H]."""
        first, second = split_key(dropout_key, 2)
        rotary = (
            self.config.rope_theta is not None
        )  # biases are rotated with what they are added to
        rows = as_rows(x)
        biases = None if rotary else biases_apart(self.query, self.key, self.value)
        apart = {} if biases is None else {"constant_bias": True}
        query, key, value = self.project(rows, x.shape, **apart)
        if rotary:
            query, key = rotate_by_position(self.config, query, key)
        attended = self.attend(query, key, value, mask, first, biases)
        return self.finish(rows, attended, second)


def rotate_by_position(config: BertConfig, *heads: jax.Array) -> tuple[jax.Array, ...]:
    """Rotates queries or keys [B, L, heads, head_dim] of positions 0..L-1 each."""
    turning = frequencies(config.hidden // config.heads, config.rope_theta, config.rope_scaling)
    angles = jnp.arange(heads[0].shape[1], dtype=jnp.float32)[:, None] * turning  # [L, D / 2]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    return tuple(rotate(x, cos, sin) for x in heads)


class Bert(nnx.Module):
    """BERT encoder. `embeddings` and `encode` are separate, so that VLP can put regions between."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.embeddings = BertEmbeddings(config, rngs=rngs)
        self.layers = stack_layers(lambda r: BertLayer(config, rngs=r), config.layers, rngs)
        self.pooler = (
            Linear(
                config.hidden,
                config.hidden,
                ("embed", "proj"),
                rngs=rngs,
                kernel_init=normal_init(config.init_stddev),
            )
            if config.pooler
            else None
        )
        self.config = config

    def encode(
        self, embedded: jax.Array, mask: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """embedded [B, L, H], mask bool broadcastable to [B, heads, L, L] -> hidden [B, L, H]."""

        def body(layer: BertLayer, x, _, key):
            return layer(x, mask, key), None

        return self._scan(embedded, body, dropout_key)[0]

    def encode_first(
        self, embedded: jax.Array, mask: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the first position's hidden state [B, H] alone.

        The last layer then computes one row instead of L: a quarter less work with three layers.
        """
        before, last = split_last(self.layers)
        of_before, of_weights, of_last = split_key(dropout_key, 3)

        def body(layer: BertLayer, x, _, key):
            return layer(x, mask, key), None

        x, _ = self._scan(embedded, body, of_before, before)
        _, key, value = last.project(x)
        query, _, _ = last.project(x[:, :1])
        if self.config.rope_theta is not None:  # position 0 turns nothing
            (key,) = rotate_by_position(self.config, key)
        attended = last.attend(query, key, value, mask[:, :, :1], of_weights)
        return last.finish(x[:, :1], attended, of_last)[:, 0]

    def layer_outputs(self, embedded: jax.Array, mask: jax.Array) -> jax.Array:
        """Every layer's output, without dropout: [layers, B, L, H]."""

        def body(layer: BertLayer, x, _, key):
            x = layer(x, mask, key)
            return x, x

        return self._scan(embedded, body, None)[1]

    def _scan(self, x, body, dropout_key, layers=None):
        trains = dropout_key is not None  # else rows between layers cost more than they save
        rows, body = in_rows(x, body) if trains else (x, body)
        rows, ys = scan_layers(
            layers or self.layers,
            rows,
            body,
            dropout_key=dropout_key,
            remat=self.config.remat,
            products=False,
            unroll=self.config.unroll,
        )
        return rows.reshape(x.shape), ys

    def __call__(
        self,
        input_ids: jax.Array,
        mask: jax.Array,
        token_type_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states of the last layer.

        input_ids [B, L] int; mask [B, L] (columns that every row sees) or [B, L, L] (row, column),
        bool or 0/1; token types default to 0 and positions to 0..L-1. Returns [B, L, H].
        """
        length = input_ids.shape[1]
        assert position_ids is None or self.config.rope_theta is None, "they are 0..L-1 there"
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        if position_ids is None:
            config_checks.check_length(length, self.config.positions)
            position_ids = jnp.broadcast_to(jnp.arange(length), input_ids.shape)
        mask = mask.astype(bool)
        mask = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
        first, second = split_key(dropout_key, 2)
        embedded = self.embeddings(input_ids, position_ids, token_type_ids, dropout_key=first)
        return self.encode(embedded, mask, dropout_key=second)

    def pool(self, hidden: jax.Array) -> jax.Array:
        """hidden [B, L, H] -> tanh of a linear map of the first position [B, H]."""
        if self.pooler is None:
            raise UserError("this BERT was built without its pooler: set model.pooler to True.")
        return jnp.tanh(self.pooler(hidden[:, 0]))


class MlmHead(nnx.Module):
    """BERT's masked-LM head: linear, activation, LayerNorm, the embedding table, bias."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dense = Linear(
            config.hidden,
            config.hidden,
            ("embed", "proj"),
            rngs=rngs,
            kernel_init=normal_init(config.init_stddev),
        )
        self.norm = LayerNorm(config.hidden, config.eps, rngs=rngs)
        self.bias = param(rngs, zeros_init, (config.vocab_size,), ("vocab",))
        self.config = config

    def __call__(self, hidden: jax.Array, tokens: Embedding, first: int | None = None) -> jax.Array:
        """hidden [..., H] -> logits [..., V] in float32; `tokens` is the tied embedding.

        `first` limits them to the first tokens of the vocabulary.
        """
        x = self.norm(ACTIVATIONS[self.config.activation](self.dense(hidden)))
        return tokens.attend(x, first).astype(jnp.float32) + self.bias[:first]


TRUNKS: dict[str, Callable[..., BertConfig]] = {
    "bert_base_cased": bert_base_cased,
    "bert_base_uncased": bert_base_uncased,
    "bert_large_uncased": bert_large_uncased,
    "minilm_l6": minilm_l6,
}


def trunk_config(name: str, changes: Mapping[str, Any], vocab_size: int, types: int) -> BertConfig:
    """The config of the section `model`, whose `trunk` is a name of TRUNKS."""
    sizes = {"vocab_size": vocab_size, "types": types, **changes}
    return config_checks.with_fields(
        config_checks.published_sizes("model.trunk", name, TRUNKS), sizes
    )
