"""BART (Lewis et al. 2020): the encoder-decoder of BARTScore, which measures WebQA's fluency.

Post-norm layers, learned positions, one embedding table for encoder, decoder and output. Original:
transformers models/bart/modeling_bart.py (BartForConditionalGeneration), named below where a
detail is its own. It scores given texts (`Bart.log_probs`); it does not generate.
"""

from __future__ import annotations

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
from mmqa_jax.models.common.encoder_decoder import EncoderDecoder
from mmqa_jax.models.common.layers import (
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    dropout,
    normal_init,
    param,
    scan_layers,
    split_key,
    stack_layers,
    zeros_init,
)
from mmqa_jax.weights.config_json import check_keys, kinds

# Sizes and constants of a BART, the published ones, and transformers' config.json both ways.


_READ = kinds(
    size="vocab_size d_model encoder_layers decoder_layers encoder_attention_heads "
    "decoder_attention_heads encoder_ffn_dim decoder_ffn_dim max_position_embeddings",
    integer="pad_token_id decoder_start_token_id",
    number="dropout attention_dropout activation_dropout init_std",
    flag="scale_embedding",
    name="activation_function",
)
_HARMLESS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads"),  # transformers' other names
    *("force_bos_token_to_be_generated", "save_step", "replacing_rate"),
    *("student_encoder_layers", "student_decoder_layers"),
)
# Entries of config.json that our BART does not support, with the only value it accepts.
_FIXED = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
    "tie_word_embeddings": True,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "add_bias_logits": False,
    "extra_pos_embeddings": 2,
    "is_causal": True,
}


@dataclasses.dataclass(frozen=True)
class BartConfig:
    """Sizes and constants of a BART; the defaults are bart-large-cnn's.

    `positions` is the longest source and the longest target. `scale_embedding` multiplies token
    embeddings by sqrt(hidden). `dropout` acts after the embeddings and on every residual branch,
    `attention_dropout` on attention weights, `activation_dropout` inside the MLP. `pad` and
    `start` are the token ids of `shift_tokens_right`. `dtype` is the compute dtype (parameters,
    norms, softmax and logits stay float32), `attention` the implementation of
    `layers.attention`; `remat` and `unroll` go to `layers.scan_layers`.
    """

    vocab_size: int = 50264
    hidden: int = 1024
    encoder_layers: int = 12
    decoder_layers: int = 12
    encoder_heads: int = 16
    decoder_heads: int = 16
    encoder_mlp: int = 4096
    decoder_mlp: int = 4096
    positions: int = 1024
    activation: str = "gelu"
    scale_embedding: bool = False
    pad: int = 1
    start: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "xla"
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        config_checks.check_layers(self, "model", "encoder_layers", "decoder_layers")
        for name in ("encoder_heads", "decoder_heads"):
            config_checks.check_divides(
                f"model.{name}", getattr(self, name), "model.hidden", self.hidden
            )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            config_checks.check_rate(f"model.{name}", getattr(self, name))
        config_checks.check_known("model.activation", self.activation, ACTIVATIONS)

    @classmethod
    def from_hf(cls, published: Mapping[str, Any], where: str = "config.json") -> BartConfig:
        """Our config from transformers' `config.json`; absent values are transformers' defaults.

        Args:
          published: the file's content.
          where: its name, for messages.
        """
        model_type = published.get("model_type", "bart")
        if model_type != "bart":
            raise UserError(
                f"{where}: model_type is {model_type!r}, expected 'bart'; give a BART checkpoint."
            )
        for option, fixed in _FIXED.items():
            if published.get(option, fixed) not in (None, fixed):
                raise UserError(
                    f"{where}: {option} {published[option]!r} is not supported; use a checkpoint "
                    f"with {fixed!r}, or set it so if you know that the weights allow it."
                )
        fixed = {key: (value,) for key, value in (_FIXED | {"is_encoder_decoder": True}).items()}
        check_keys(published, where, read=_READ, harmless=_HARMLESS, fixed=fixed)
        activation = published.get("activation_function", "gelu")
        config_checks.check_known(f"{where}: activation_function", activation, ACTIVATIONS)
        return cls(
            vocab_size=published.get("vocab_size", 50265),
            hidden=published.get("d_model", 1024),
            encoder_layers=published.get("encoder_layers", 12),
            decoder_layers=published.get("decoder_layers", 12),
            encoder_heads=published.get("encoder_attention_heads", 16),
            decoder_heads=published.get("decoder_attention_heads", 16),
            encoder_mlp=published.get("encoder_ffn_dim", 4096),
            decoder_mlp=published.get("decoder_ffn_dim", 4096),
            positions=published.get("max_position_embeddings", 1024),
            activation=activation,
            scale_embedding=published.get("scale_embedding", False),
            pad=published.get("pad_token_id", 1),
            start=published.get("decoder_start_token_id", 2),
            dropout=published.get("dropout", 0.1),
            attention_dropout=published.get("attention_dropout", 0.0),
            activation_dropout=published.get("activation_dropout", 0.0),
            init_stddev=published.get("init_std", 0.02),
        )

    def to_hf(self) -> dict[str, Any]:
        """transformers' `config.json`; ids of other tokens are left at its defaults."""
        return {
            "architectures": ["BartForConditionalGeneration"],
            "model_type": "bart",
            "is_encoder_decoder": True,
            "vocab_size": self.vocab_size,
            "d_model": self.hidden,
            "encoder_layers": self.encoder_layers,
            "decoder_layers": self.decoder_layers,
            "encoder_attention_heads": self.encoder_heads,
            "decoder_attention_heads": self.decoder_heads,
            "encoder_ffn_dim": self.encoder_mlp,
            "decoder_ffn_dim": self.decoder_mlp,
            "max_position_embeddings": self.positions,
            "activation_function": self.activation,
            "scale_embedding": self.scale_embedding,
            "pad_token_id": self.pad,
            "decoder_start_token_id": self.start,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "init_std": self.init_stddev,
            "tie_word_embeddings": True,
        }


def bart_large_cnn(**changes) -> BartConfig:
    """facebook/bart-large-cnn, the architecture of BARTScore."""
    return BartConfig(**changes)


def bart_base(**changes) -> BartConfig:
    """facebook/bart-base."""
    base = BartConfig(
        vocab_size=50265,
        hidden=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_heads=12,
        decoder_heads=12,
        encoder_mlp=3072,
        decoder_mlp=3072,
        attention_dropout=0.1,
        activation_dropout=0.1,
    )
    return dataclasses.replace(base, **changes)


PRESETS: Mapping[str, Callable[..., BartConfig]] = {"bart_large_cnn": bart_large_cnn}


EPS = 1e-5  # of every LayerNorm; the published configs have no entry for it
POSITION_OFFSET = 2  # row of position 0: the first rows were fairseq's padding index and below


class BartLayer(nnx.Module):
    """Post-norm layer: x = LN(x + attention), in the decoder LN(x + cross), then LN(x + mlp)."""

    def __init__(self, config: BartConfig, heads: int, mlp: int, *, cross: bool, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init)
        norm = functools.partial(LayerNorm, config.hidden, EPS, rngs=rngs)
        attention = functools.partial(
            Attention,
            config.hidden,
            heads,
            rngs=rngs,
            kernel_init=init,
            dropout_rate=config.attention_dropout,
            implementation=config.attention,
        )
        self.attention = attention()
        self.attention_norm = norm()
        self.cross = attention() if cross else None
        self.cross_norm = norm() if cross else None
        self.up = linear(config.hidden, mlp, ("embed", "mlp"))
        self.down = linear(mlp, config.hidden, ("mlp", "embed"))
        self.mlp_norm = norm()
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        source: jax.Array | None = None,
        source_mask: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """One layer, causal in the decoder.

        Args:
          x: [B, L, H].
          mask: bool, broadcastable to [B, heads, L, L]; None masks nothing.
          source, source_mask: the encoded source [B, S, H], bool [B, 1, 1, S]; in the decoder.

        Returns:
          [B, L, H].
        """
        config = self.config
        keys = split_key(dropout_key, 6)
        causal = self.cross is not None
        y = self.attention(x, x, mask, is_causal=causal, dropout_key=keys[0])
        x = self.attention_norm(x + dropout(y, config.dropout, keys[1]))
        if self.cross is not None:
            y = self.cross(x, source, source_mask, dropout_key=keys[2])
            x = self.cross_norm(x + dropout(y, config.dropout, keys[3]))
        y = ACTIVATIONS[config.activation](self.up(x))  # [B, L, mlp]
        y = self.down(dropout(y, config.activation_dropout, keys[4]))
        return self.mlp_norm(x + dropout(y, config.dropout, keys[5]))


class BartStack(nnx.Module):
    """Encoder or decoder: positions, LayerNorm of the embeddings, layers."""

    def __init__(
        self, config: BartConfig, layers: int, heads: int, mlp: int, *, cross: bool, rngs: nnx.Rngs
    ):
        self.positions = Embedding(
            config.positions + POSITION_OFFSET,
            config.hidden,
            ("positions", "embed"),
            rngs=rngs,
            init=normal_init(config.init_stddev),
        )
        self.norm = LayerNorm(config.hidden, EPS, rngs=rngs)
        self.layers = stack_layers(
            lambda r: BartLayer(config, heads, mlp, cross=cross, rngs=r), layers, rngs
        )
        self.config = config

    def embed(self, embedded: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Word embeddings [B, L, H] with their positions -> [B, L, H] in the compute dtype."""
        length = embedded.shape[1]
        config_checks.check_length(length, self.config.positions)
        x = embedded + self.positions(jnp.arange(length) + POSITION_OFFSET)
        return dropout(self.norm(x), self.config.dropout, dropout_key).astype(self.config.dtype)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        source: jax.Array | None = None,
        source_mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """All layers: [B, L, H] -> same; `mask` and the others as in BartLayer."""

        def body(layer: BartLayer, x, _, key):
            return layer(x, mask, source, source_mask, dropout_key=key), None

        return scan_layers(
            self.layers,
            x,
            body,
            dropout_key=dropout_key,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )[0]


class Bart(EncoderDecoder):
    """Encoder, decoder and the output product with the embedding table."""

    def __init__(self, config: BartConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(
            config.vocab_size,
            config.hidden,
            ("vocab", "embed"),
            rngs=rngs,
            init=normal_init(config.init_stddev),
        )
        self.encoder = BartStack(
            config,
            config.encoder_layers,
            config.encoder_heads,
            config.encoder_mlp,
            cross=False,
            rngs=rngs,
        )
        self.decoder = BartStack(
            config,
            config.decoder_layers,
            config.decoder_heads,
            config.decoder_mlp,
            cross=True,
            rngs=rngs,
        )
        self.final_logits_bias = param(rngs, zeros_init, (config.vocab_size,), ("vocab",))
        self.config = config

    def embed(self, ids: jax.Array) -> jax.Array:
        """int [B, L] -> token embeddings [B, L, H], scaled if the config says so."""
        embedded = self.tokens(ids)
        return embedded * self.config.hidden**0.5 if self.config.scale_embedding else embedded

    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoded source.

        input_ids int [B, S]; attention_mask [B, S], true (or 1) at real tokens; positions count
        from 0 in every row, padding included. Returns [B, S, H]; padding's rows mean nothing.
        """
        first, second = split_key(dropout_key, 2)
        x = self.encoder.embed(self.embed(input_ids), dropout_key=first)
        return self.encoder(x, _columns(attention_mask), dropout_key=second)

    def decode(
        self,
        decoder_input_ids: jax.Array,
        source: jax.Array,
        attention_mask: jax.Array,
        decoder_attention_mask: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Decoder states of given tokens.

        decoder_input_ids int [B, T]; source [B, S, H] from `encode`, attention_mask [B, S] of it;
        decoder_attention_mask [B, T], needed only for padding on the left, since a token never
        sees what follows it. Returns [B, T, H].
        """
        first, second = split_key(dropout_key, 2)
        x = self.decoder.embed(self.embed(decoder_input_ids), dropout_key=first)
        mask = None if decoder_attention_mask is None else _columns(decoder_attention_mask)
        return self.decoder(x, mask, source, _columns(attention_mask), dropout_key=second)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Decoder states [..., H] -> token logits [..., V], float32."""
        weights = self.tokens.table[...].T.astype(hidden.dtype)
        logits = jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)
        # A buffer in transformers, not trained.
        return logits + jax.lax.stop_gradient(self.final_logits_bias[...].astype(jnp.float32))

    def log_probs(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        target_ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """log p(target token | source, earlier target tokens), teacher forced.

        target_ids int [B, T], padded on the right with the pad id or -100; what stands there is
        the caller's to leave out. BARTScore (Yuan et al. 2021) is the mean over a row's real
        tokens, `<s>` and `</s>` among them. Returns [B, T] float32.
        """
        logits = self.target_logits(input_ids, attention_mask, target_ids, dropout_key=dropout_key)
        wanted = jnp.maximum(target_ids, 0)[..., None]  # -100 is no token
        picked = jnp.take_along_axis(logits, wanted, axis=-1)[..., 0]
        return picked - jax.nn.logsumexp(logits, axis=-1)


def _columns(mask: jax.Array) -> jax.Array:
    """[B, L] of visible columns -> bool [B, 1, 1, L]."""
    return mask.astype(bool)[:, None, None, :]
