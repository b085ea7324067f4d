"""LLaMA configs: published sizes, and conversion from and to transformers' config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.activations import ACTIVATIONS
from mmqa_jax.models.config_checks import check_divides, check_known, check_rate
from mmqa_jax.models.published_keys import check_keys, kinds

SCALINGS = ("linear", "llama3")
# Our fields that are plain values in transformers' config.json, with transformers' defaults.
_HF_KEYS = {
    "vocab_size": ("vocab_size", 32000),
    "hidden": ("hidden_size", 4096),
    "layers": ("num_hidden_layers", 32),
    "heads": ("num_attention_heads", 32),
    "mlp": ("intermediate_size", 11008),
    "positions": ("max_position_embeddings", 2048),
    "eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "activation": ("hidden_act", "silu"),
    "attention_dropout": ("attention_dropout", 0.0),
}
_READ = kinds(
    size="vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings",
    size_or_null="num_key_value_heads head_dim original_max_position_embeddings",
    number="rms_norm_eps",
    number_or_null="attention_dropout rope_theta partial_rotary_factor",
    flag="tie_word_embeddings attention_bias mlp_bias",
    name="hidden_act",
    object_or_null="rope_scaling rope_parameters",
)
# pretraining_tp splits products (the same but for rounding); a LLaMA is a decoder in any case.
_HARMLESS = ("pretraining_tp", "max_sequence_length", "is_llama_config")
_FIXED = {
    "is_causal": (True,),
    "rope_interleaved": (False,),  # SmolLM's
    "is_decoder": (True, False),
}
_ROPE_READ = kinds(
    size_or_null="original_max_position_embeddings",
    number="factor low_freq_factor high_freq_factor",
    number_or_null="rope_theta partial_rotary_factor",
    name="rope_type type",
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")  # transformers has no defaults


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than in pretraining.

    `linear` divides all by `factor` (LongChat, Vicuna 16k); `llama3` (LLaMA-3.1) only the low
    ones, as the other numbers say. `original_positions` is the context length of pretraining.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self):
        check_known("rope_scaling type", self.kind, SCALINGS)
        if self.factor < 1.0 or self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"rope_scaling {self}: expected a factor of at least 1 and low_freq_factor below "
                "high_freq_factor; correct the config."
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a LLaMA; the defaults are LLaMA-2 7B's.

    `kv_heads` below `heads` is grouped-query attention. `head_dim` None is hidden / heads.
    `positions` is the longest context; nothing is allocated for it. `tied`: the output head is
    the embedding table. `attention_bias` is on all four projections of the attention, `mlp_bias` on
    all three of the MLP, as in transformers. `attention_dropout` acts on attention weights.
    `dtype` is the compute dtype (norms, softmax, rotary angles and logits stay float32),
    `attention` the implementation of `layers.attention`; `remat` and `unroll` go to
    `layers.scan_layers`.
    """

    vocab_size: int = 32000
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    mlp: int = 11008
    head_dim: int | None = None
    positions: int = 4096
    eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    attention_dropout: float = 0.0
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "xla"
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        if self.head_dim is None:
            check_divides("model.heads", self.heads, "model.hidden", self.hidden)
        check_divides("model.kv_heads", self.kv_heads, "model.heads", self.heads)
        if self.head_size % 2:
            raise UserError(
                f"model.head_dim is {self.head_size}: expected an even number, since rotary "
                "embeddings rotate pairs; change it."
            )
        if not self.rope_theta > 0:
            raise UserError(
                f"model.rope_theta is {self.rope_theta}: expected a number above 0; correct it."
            )
        check_rate("model.attention_dropout", self.attention_dropout)
        check_known("model.activation", self.activation, ACTIVATIONS)

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @classmethod
    def from_hf(cls, published: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
        """Our config from transformers' `config.json`; absent values are transformers' defaults.

        Reads `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (5).

        Args:
          published: the file's content, or the `text_config` of a LLaVA's.
          where: its name, for messages.

        Raises:
          UserError: another model's config, or an unsupported option.
        """
        model_type = published.get("model_type", "llama")
        if model_type != "llama":
            raise UserError(
                f"{where}: model_type is {model_type!r}, expected 'llama'; give a LLaMA checkpoint."
            )
        check_keys(published, where, read=_READ, harmless=_HARMLESS, fixed=_FIXED)
        rope = published.get("rope_scaling") or published.get("rope_parameters") or {}
        partial = rope.get("partial_rotary_factor", published.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise UserError(
                f"{where}: partial_rotary_factor {partial} is not supported; use a checkpoint "
                "whose heads are rotated whole."
            )
        fields = {field: published.get(key, default) for field, (key, default) in _HF_KEYS.items()}
        check_known(f"{where}: hidden_act", fields["activation"], ACTIVATIONS)
        heads, head_dim = fields["heads"], published.get("head_dim")
        return cls(
            **fields | {"attention_dropout": fields["attention_dropout"] or 0.0},
            kv_heads=published.get("num_key_value_heads") or heads,
            head_dim=None if head_dim == fields["hidden"] // heads else head_dim,
            rope_theta=_first(rope.get("rope_theta"), published.get("rope_theta"), 10000.0),
            rope_scaling=_rope_scaling(
                rope,
                published.get("original_max_position_embeddings"),
                fields["positions"],
                where,
            ),
        )

    def to_hf(self) -> dict[str, Any]:
        """transformers' `config.json`, without token ids; versions 4 and 5 read it."""
        scaling = self.rope_scaling
        rope: dict[str, Any] | None = None
        if scaling is not None:
            rope = {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                rope |= {
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_positions,
                }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: getattr(self, field) for field, (key, _) in _HF_KEYS.items()},
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "initializer_range": self.init_stddev,
        }


def _first(*values: float | None) -> float:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _rope_scaling(
    rope: Mapping[str, Any], original: int | None, positions: int, where: str
) -> RopeScaling | None:
    """The scaling; `original` positions beside it take precedence over those in it."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise UserError(
            f"{where}: rope scaling {kind!r} is not supported; use a checkpoint without scaling, "
            "or with linear or llama3."
        )
    check_keys(rope, f"{where}, rope scaling", read=_ROPE_READ)
    needed = ("factor",) if kind == "linear" else _LLAMA3
    if missing := [f"`{key}`" for key in needed if key not in rope]:
        raise UserError(f"{where}: rope scaling {kind!r} lacks its {', '.join(missing)}; add it.")
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    return RopeScaling(
        kind,
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        original or rope.get("original_max_position_embeddings", positions),
    )


def llama_7b(**changes) -> LlamaConfig:
    """LLaMA-1 7B (eps 1e-6, 2,048 positions)."""
    return LlamaConfig(**{"eps": 1e-6, "positions": 2048, **changes})


def llama_13b(**changes) -> LlamaConfig:
    """LLaMA-1 13B."""
    return llama2_13b(**{"eps": 1e-6, "positions": 2048, **changes})


def llama2_7b(**changes) -> LlamaConfig:
    """LLaMA-2 7B, chat or not, and Vicuna-1.5 7B (LLaVA-1.5)."""
    return LlamaConfig(**changes)


def llama2_13b(**changes) -> LlamaConfig:
    """LLaMA-2 13B and Vicuna-1.5 13B."""
    sizes = {"hidden": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "mlp": 13824}
    return LlamaConfig(**sizes | changes)


def llama2_70b(**changes) -> LlamaConfig:
    """LLaMA-2 70B."""
    sizes = {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "mlp": 28672}
    return LlamaConfig(**sizes | changes)


def llama3_8b(**changes) -> LlamaConfig:
    """LLaMA-3 8B."""
    sizes = LlamaConfig(
        vocab_size=128256, kv_heads=8, mlp=14336, positions=8192, rope_theta=500000.0
    )
    return dataclasses.replace(sizes, **changes)


def llama31_8b(**changes) -> LlamaConfig:
    """LLaMA-3.1 8B: LLaMA-3's sizes, 131,072 positions by llama3 scaling."""
    return llama3_8b(**{"positions": 131072, "rope_scaling": RopeScaling("llama3", 8.0), **changes})


def smollm2_135m(**changes) -> LlamaConfig:
    """HuggingFaceTB/SmolLM2-135M-Instruct."""
    sizes = LlamaConfig(
        vocab_size=49152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        mlp=1536,
        positions=8192,
        rope_theta=100000.0,
        tied=True,
    )
    return dataclasses.replace(sizes, **changes)


def stories260k(**changes) -> LlamaConfig:
    """karpathy/tinyllamas stories260K: a 260 K-parameter story generator for tests."""
    sizes = LlamaConfig(
        vocab_size=512, hidden=64, layers=5, heads=8, kv_heads=4, mlp=172, positions=512, tied=True
    )
    return dataclasses.replace(sizes, **changes)
