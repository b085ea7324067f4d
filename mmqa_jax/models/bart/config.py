"""Sizes and constants of a BART, the published ones, and transformers' config.json both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import (
    check_divides,
    check_known,
    check_layers,
    check_rate,
)
from mmqa_jax.weights.published_keys import check_keys, kinds

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
        check_layers(self, "model", "encoder_layers", "decoder_layers")
        for name in ("encoder_heads", "decoder_heads"):
            check_divides(f"model.{name}", getattr(self, name), "model.hidden", self.hidden)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            check_rate(f"model.{name}", getattr(self, name))
        check_known("model.activation", self.activation, ACTIVATIONS)

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
        check_known(f"{where}: activation_function", activation, ACTIVATIONS)
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
