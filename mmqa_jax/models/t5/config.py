"""Sizes and constants of a T5, the published ones, and transformers' config.json both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import AtLeast
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_known, check_layers, check_rate
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.registry import Base

FAMILIES = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}
_READ = kinds(
    size="vocab_size d_model d_kv d_ff num_layers num_heads relative_attention_num_buckets "
    "relative_attention_max_distance",
    size_or_null="num_decoder_layers",
    integer="pad_token_id decoder_start_token_id",
    number="dropout_rate layer_norm_epsilon initializer_factor",
    flag="tie_word_embeddings scale_decoder_outputs",
    name="feed_forward_proj",
)
_HARMLESS = (
    "n_positions",  # of the texts that it was trained on: distances have no end
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"),  # other names
)
_GATED = "gated-"


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and constants of a T5; the defaults are t5-base's.

    `family` is its model_type in transformers, of FAMILIES. A head has `head_size` dimensions,
    whatever `hidden` is. `buckets` are those of relative positions, `farthest` the distance from
    which on all share one. `gated` MLPs are down(activation(gate(x)) * up(x)), others
    down(activation(up(x))). `tied` models have no output head but the embedding table, `scaled`
    ones (T5 1.0) multiply what the head reads by hidden**-0.5. `pad` and `start` are the token ids
    of a decoder's padding and first input. `dropout` acts on embeddings, attention weights, the
    inside of the MLP, every residual branch and what leaves a stack. `init_factor` scales initial
    weights. `between`: the decoder's attention over the source has relative positions too, as in
    transformers before 4, with which Fusion-in-Decoder and KAT were trained. `dtype` is the compute
    dtype (parameters, norms, softmax and logits stay float32);
    `remat` and `unroll` go to `layers.scan_layers`.
    """

    family: str = "t5"
    vocab_size: int = 32128
    hidden: int = 768
    head_size: int = 64
    heads: int = 12
    mlp: int = 3072
    encoder_layers: int = 12
    decoder_layers: int = 12
    buckets: int = 32
    farthest: int = 128
    eps: float = 1e-6
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    scaled: bool = True
    pad: Annotated[int, AtLeast(0)] = 0
    start: Annotated[int, AtLeast(0)] = 0
    dropout: float = 0.1
    init_factor: float = 1.0
    between: bool = False
    dtype: str = "float32"
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_layers(self, "model", "encoder_layers", "decoder_layers")
        check_known("model.family", self.family, FAMILIES)
        check_known("model.activation", self.activation, ACTIVATIONS)
        check_rate("model.dropout", self.dropout)
        if self.gated and self.activation == "gelu":
            raise UserError(
                "model.activation is gelu with model.gated: no T5 has the exact GELU there; set it "
                "to gelu_new, which transformers calls gated-gelu."
            )
        if self.buckets < 4 or self.buckets % 4:
            raise UserError(
                f"model.buckets is {self.buckets}: expected a multiple of 4, since each direction "
                "has half of them and of these half are of one distance each; change it."
            )
        if self.farthest <= self.buckets // 2:
            raise UserError(
                f"model.farthest is {self.farthest}: expected more than half of model.buckets = "
                f"{self.buckets}; change one of the two."
            )
        if self.scaled and not self.tied:
            raise UserError(
                "model.scaled is true with model.tied false: no T5 with a head of its own scales "
                "what it reads; set one of the two otherwise."
            )

    @classmethod
    def from_hf(
        cls, published: Mapping[str, Any], where: str = "config.json", *, has_head: bool = True
    ) -> T5Config:
        """Our config from transformers' `config.json`; absent values are transformers' defaults.

        What `tie_word_embeddings` says is two things: transformers 4 saved false where a T5 has a
        head of its own (1.1, Flan, mT5) and scales what the head of any other reads; transformers 5
        always saves true, beside `scale_decoder_outputs`, and never scales an mT5's.

        Args:
          published: the file's content.
          where: its name, for messages.
          has_head: whether the checkpoint has a tensor of the head, which may be the table again.
        """
        family = published.get("model_type", "t5")
        if family not in FAMILIES:
            raise UserError(
                f"{where}: model_type is {family!r}, expected {' or '.join(map(repr, FAMILIES))}; "
                "give a checkpoint of T5, Flan-T5 or mT5."
            )
        projection = published.get("feed_forward_proj", "relu" if family == "t5" else "gated-gelu")
        name = str(projection)
        gated, activation = name.startswith(_GATED), name.removeprefix(_GATED)
        computed = "gelu_new" if name == "gated-gelu" else activation  # as the original T5's code
        fixed = {
            "is_encoder_decoder": (True,),
            "is_decoder": (False,),
            "dense_act_fn": (computed,),
            "is_gated_act": (gated,),
        }
        check_keys(published, where, read=_READ, harmless=_HARMLESS, fixed=fixed)
        check_known(f"{where}: feed_forward_proj, without {_GATED}", computed, ACTIVATIONS)
        scaled = family == "t5" and published.get(
            "scale_decoder_outputs", published.get("tie_word_embeddings") is not False
        )
        layers = published.get("num_layers", 6 if family == "t5" else 8)
        return cls(
            family=family,
            vocab_size=published.get("vocab_size", 32128 if family == "t5" else 250112),
            hidden=published.get("d_model", 512),
            head_size=published.get("d_kv", 64),
            heads=published.get("num_heads", 8 if family == "t5" else 6),
            mlp=published.get("d_ff", 2048 if family == "t5" else 1024),
            encoder_layers=layers,
            decoder_layers=published.get("num_decoder_layers") or layers,
            buckets=published.get("relative_attention_num_buckets", 32),
            farthest=published.get("relative_attention_max_distance", 128),
            eps=published.get("layer_norm_epsilon", 1e-6),
            activation=computed,
            gated=gated,
            tied=bool(scaled) or not has_head,
            scaled=bool(scaled),
            pad=published.get("pad_token_id", 0),
            start=published.get("decoder_start_token_id", 0),
            dropout=published.get("dropout_rate", 0.1),
            init_factor=published.get("initializer_factor", 1.0),
        )

    def to_hf(self) -> dict[str, Any]:
        """transformers' `config.json`; ids of other tokens are left at its defaults."""
        name = "gelu" if self.gated and self.activation == "gelu_new" else self.activation
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "is_encoder_decoder": True,
            "vocab_size": self.vocab_size,
            "d_model": self.hidden,
            "d_kv": self.head_size,
            "d_ff": self.mlp,
            "num_layers": self.encoder_layers,
            "num_decoder_layers": self.decoder_layers,
            "num_heads": self.heads,
            "relative_attention_num_buckets": self.buckets,
            "relative_attention_max_distance": self.farthest,
            "layer_norm_epsilon": self.eps,
            "feed_forward_proj": f"{_GATED}{name}" if self.gated else name,
            "tie_word_embeddings": self.tied and (self.scaled or self.family != "t5"),
            "pad_token_id": self.pad,
            "decoder_start_token_id": self.start,
            "dropout_rate": self.dropout,
            "initializer_factor": self.init_factor,
        }


@dataclasses.dataclass(frozen=True)
class MultimodalT5Config(T5Config):
    """A T5's, and `features`: the values of each of a picture's vectors (DETR's have 256)."""

    features: int = 256


def _gated(**sizes: Any) -> T5Config:
    """The kind of T5 1.1 and Flan-T5: a gated MLP and a head of its own."""
    kind = {"activation": "gelu_new", "gated": True, "tied": False, "scaled": False}
    return T5Config(**kind, **sizes)


_SMALL = {"hidden": 512, "heads": 8, "mlp": 2048, "encoder_layers": 6, "decoder_layers": 6}
_LARGE = {"hidden": 1024, "heads": 16, "mlp": 4096, "encoder_layers": 24, "decoder_layers": 24}
# T5 1.0's two largest have heads that are wider than the model.
_3B = {**_LARGE, "head_size": 128, "heads": 32, "mlp": 16384}
_11B = {**_LARGE, "head_size": 128, "heads": 128, "mlp": 65536}
# T5 1.1's and Flan-T5's; mT5's but for its vocabulary.
_GATED_SIZES: Mapping[str, dict[str, Any]] = {
    "small": {"hidden": 512, "heads": 6, "mlp": 1024, "encoder_layers": 8, "decoder_layers": 8},
    "base": {"mlp": 2048},
    "large": {**_LARGE, "mlp": 2816},
    "xl": {**_LARGE, "hidden": 2048, "heads": 32, "mlp": 5120},
    "xxl": {**_LARGE, "hidden": 4096, "heads": 64, "mlp": 10240},
}


def _published() -> dict[str, T5Config]:
    old = {"small": _SMALL, "base": {}, "large": _LARGE, "3b": _3B, "11b": _11B}
    sizes = {f"t5_{name}": T5Config(**size) for name, size in old.items()}
    for name, size in _GATED_SIZES.items():
        sizes[f"flan_t5_{name}"] = _gated(**size)
        sizes[f"mt5_{name}"] = _gated(family="mt5", vocab_size=250112, **size)
    return sizes


# t5_v1_1_* are flan_t5_*'s.
PRESETS: Mapping[str, Callable[[], T5Config]] = {
    name: (lambda config=config: config) for name, config in _published().items()
}


FREE = ("dtype", "dropout", "remat", "unroll")
BASE = Base("T5", "a folder or ORG/NAME", T5Config, {"changes": FREE})
# Wide as the pictures are where the base is a T5 without any.
MULTIMODAL_BASE = Base(
    "Multimodal-CoT or T5",
    "a published folder or ORG/NAME",
    MultimodalT5Config,
    {"changes": (*FREE, "features")},
    published_as="t5",
)
