"""MPNet (Song et al. 2020): BERT's layers with a bias of relative positions, no token types."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.attention.masked import MASKED
from mmqa_jax.models.bert import keys as bert_keys
from mmqa_jax.models.bert.network import BertConfig, BertLayer
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.config_checks import check_length
from mmqa_jax.models.common.encoder_decoder import biased_attention, pair_buckets
from mmqa_jax.weights.keymap import KeyMap, Rule, norm_rules, transformer_rules

BUCKETS = 32  # of relative positions, half of them for each direction
_FARTHEST = 128  # positions from which on all share a bucket


class MPNetEmbeddings(nnx.Module):
    """Word + position embeddings, LayerNorm, dropout."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        init = layers.normal_init(config.init_stddev)
        size = config.hidden
        self.word = layers.Embedding(
            config.vocab_size, size, ("vocab", "embed"), rngs=rngs, init=init
        )
        self.position = layers.Embedding(
            config.positions, size, ("positions", "embed"), rngs=rngs, init=init
        )
        self.norm = layers.LayerNorm(size, config.eps, rngs=rngs)
        self.config = config

    def __call__(self, input_ids: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """ids [B, L] -> [B, L, H] in the compute dtype."""
        x = self.word(input_ids) + self.position.table[: input_ids.shape[1]]
        return layers.dropout(self.norm(x), self.config.dropout, dropout_key).astype(
            self.config.dtype
        )


class MPNetLayer(BertLayer):
    """BERT's layer, whose attention scores have a bias."""

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """x [B, L, H], bias float32 broadcastable to [B, heads, L, L] -> [B, L, H].

        The bias is MASKED where a column is not seen.
        """
        first, second = layers.split_key(dropout_key, 2)
        q, k, v = self.project(x)  # [B, L, heads, head_dim]
        attended = biased_attention(
            q,
            k,
            v,
            bias,
            scale=q.shape[-1] ** -0.5,
            dropout_rate=self.config.attention_dropout,
            dropout_key=first,
        )
        return self.finish(x, attended, second)


class MPNet(nnx.Module):
    """MPNet's encoder; `config.types` and `config.pooler` are not used."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.embeddings = MPNetEmbeddings(config, rngs=rngs)
        self.layers = layers.stack_layers(lambda r: MPNetLayer(config, rngs=r), config.layers, rngs)
        # One table for all layers.
        self.relative = layers.Embedding(
            BUCKETS,
            config.heads,
            (None, "heads"),
            rngs=rngs,
            init=layers.normal_init(config.init_stddev),
        )
        self.config = config

    def bias(self, mask: jax.Array) -> jax.Array:
        """Columns that are seen, bool[B, L] -> what scores get, float32 [B, heads, L, L]."""
        of_pairs = self.relative(
            pair_buckets(mask.shape[1], buckets=BUCKETS, farthest=_FARTHEST)
        )  # [L, L, heads]
        of_pairs = of_pairs.astype(jnp.float32).transpose(2, 0, 1)[None]
        return jnp.where(mask.astype(bool)[:, None, None, :], of_pairs, MASKED)

    def layer_outputs(self, embedded: jax.Array, mask: jax.Array) -> jax.Array:
        """Every layer's output, without dropout: [layers, B, L, H]; mask bool[B, L]."""
        bias = self.bias(mask)

        def body(layer: MPNetLayer, x, _, key):
            x = layer(x, bias, key)
            return x, x

        return layers.scan_layers(self.layers, embedded, body)[1]

    def __call__(
        self, input_ids: jax.Array, mask: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """input_ids int[B, L], mask bool[B, L] -> hidden states of the last layer [B, L, H]."""
        check_length(input_ids.shape[1], self.config.positions)
        first, second = layers.split_key(dropout_key, 2)
        embedded, bias = self.embeddings(input_ids, first), self.bias(mask)

        def body(layer: MPNetLayer, x, _, key):
            return layer(x, bias, key), None

        return layers.scan_layers(
            self.layers,
            embedded,
            body,
            dropout_key=second,
            remat=self.config.remat,
            products=False,
            unroll=self.config.unroll,
        )[0]


# MPNet encoders in transformers' layout.


_LINEARS = {
    "attention.attn.q": "query",
    "attention.attn.k": "key",
    "attention.attn.v": "value",
    "attention.attn.o": "out",
    "intermediate.dense": "up",
    "output.dense": "down",
}
_NORMS = {"attention.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"}
MPNET_PADDING = 1  # transformers' MPNet counts positions from it, whatever its config says


def mpnet_config(published: Mapping[str, Any], where: str = "config.json") -> BertConfig:
    """Our config from transformers' config.json of MPNetModel."""
    fixed = {"relative_attention_num_buckets": (BUCKETS,)}
    filled = {"vocab_size": 30527, **published, "type_vocab_size": 1}
    config = bert_keys.bert_config(filled, where, fixed=fixed)
    return bert_keys.without_first_positions(config, MPNET_PADDING, where)


def mpnet_key_map(config: BertConfig) -> KeyMap:
    """Key map of the encoder; keys may start with `mpnet.`. Heads and the pooler are ignored."""
    return KeyMap(
        rules=[
            Rule("embeddings.word_embeddings.weight", "embeddings/word/table"),
            Rule(
                bert_keys.POSITIONS,
                "embeddings/position/table",
                bert_keys.last_rows(config.positions),
            ),
            *norm_rules("embeddings.LayerNorm", "embeddings/norm"),
            Rule("encoder.relative_attention_bias.weight", "relative/table"),
            *transformer_rules("encoder.layer.{layer}.", "layers", _LINEARS, _NORMS),
        ],
        rename=[(r"^mpnet\.", "")],
        ignore=[bert_keys.BUFFERS, r"^(pooler|lm_head|classifier)\."],
    )
