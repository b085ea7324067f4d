"""Dual-stream retriever: questions and sources embedded apart, compared by cosine.

The text tower is CLIP's causal one, or a BERT with mean pooling over the real tokens
(sentence-transformers' MiniLM). The vision tower is CLIP's. With a CLIP text tower this is CLIP,
and parameters have the same paths, so CLIP's key map fills it. Or both towers are SigLIP's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import mapping, spec_of
from mmqa_jax.models.bert.network import Bert, BertConfig, trunk_config
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.config_checks import published_sizes, with_fields
from mmqa_jax.models.encoders.sentence_pooling import mean_pool
from mmqa_jax.models.two_towers.config import (
    CLIPS,
    INITIAL_LOGIT_SCALE,
    MAX_LOGIT_SCALE,
    SIGLIP_LOGIT_BIAS,
    SIGLIP_LOGIT_SCALE,
    SIGLIPS,
    CLIPConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
    TextConfig,
    VisionConfig,
)
from mmqa_jax.models.two_towers.network import Pictures, TextTower, VisionTower, l2_normalize

FUSIONS = ("mean", "image", "sum")
_MARKS = 2  # tokens of a text without words


@dataclasses.dataclass(frozen=True)
class DualEncoderConfig:
    """Both towers and how a captioned picture becomes one vector."""

    # A BertConfig (mean pooling, no projection: the embedding is the pooled vector itself, which
    # keeps MiniLM's own quality), a CLIP TextConfig, or SigLIP's.
    text: BertConfig | TextConfig | SiglipTextConfig
    # CLIP's or SigLIP's vision tower; its embed_dim must be the text embedding's size.
    vision: VisionConfig | SiglipVisionConfig
    # `mean` embeds a picture source as (caption + picture) / 2, renormalized (RMR's bi-modal
    # vector); `image` by its picture alone (WebQA's CLIP retrieval); `sum` as the towers' vectors
    # of both, before they are scaled, added (UniIR's CLIP_SF), of a text without words the
    # picture's alone.
    fusion: str = "mean"
    # Initial value of the learned factor on the picture's part in `mean`. 1 is RMR's formula. A
    # vision tower that starts from random weights beside a trained text tower gives all pictures
    # nearly one vector, which at 1 lowers every picture's score by a factor of about sqrt(2)
    # against snippets: start it near 0 (0.1) then.
    picture_gate: float = 1.0
    # Initial log of the temperature's inverse (CLIP: log(1 / 0.07)).
    logit_scale: float = INITIAL_LOGIT_SCALE
    # Initial value of what the sigmoid loss adds to all logits; None: there is none.
    logit_bias: float | None = None

    def __post_init__(self):
        if self.vision.embed_dim != self.embed_dim:
            raise UserError(
                f"dual encoder: vision.embed_dim is {self.vision.embed_dim}, the text tower gives "
                f"{self.embed_dim}; set vision.embed_dim to {self.embed_dim}."
            )
        if self.fusion not in FUSIONS:
            raise UserError(
                f"dual encoder: fusion is {self.fusion!r}, expected one of {', '.join(FUSIONS)}; "
                "change it."
            )

    @property
    def embed_dim(self) -> int:
        """Size of the embeddings."""
        return self.text.hidden if isinstance(self.text, BertConfig) else self.text.embed_dim


def of_towers(config: CLIPConfig | SiglipConfig, **changes) -> DualEncoderConfig:
    """CLIP or SigLIP itself; the fusion `image` is WebQA's retriever, `mean` RMR's."""
    base = DualEncoderConfig(text=config.text, vision=config.vision)
    base = base if isinstance(config, CLIPConfig) else with_logit_bias(base)
    return dataclasses.replace(base, **changes)


def with_logit_bias(config: DualEncoderConfig) -> DualEncoderConfig:
    """The config for the sigmoid loss, with SigLIP's initial temperature and bias."""
    return dataclasses.replace(config, logit_scale=SIGLIP_LOGIT_SCALE, logit_bias=SIGLIP_LOGIT_BIAS)


class DualEncoder(nnx.Module):
    """Embeds questions, snippets and captioned pictures into one space."""

    def __init__(self, config: DualEncoderConfig, *, rngs: nnx.Rngs):
        tower = Bert if isinstance(config.text, BertConfig) else TextTower
        self.text = tower(config.text, rngs=rngs)
        self.vision = VisionTower(config.vision, rngs=rngs)
        constant = jax.nn.initializers.constant
        self.logit_scale = layers.param(rngs, constant(config.logit_scale), (), ())
        self.picture_gate = layers.param(rngs, constant(config.picture_gate), (), ())
        if config.logit_bias is not None:
            self.logit_bias = layers.param(rngs, constant(config.logit_bias), (), ())
        self.config = config

    def encode_text(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Texts -> [B, D] float32, of length 1; arguments as of `text_features`."""
        return l2_normalize(self.text_features(input_ids, attention_mask, dropout_key=dropout_key))

    def text_features(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Texts -> [B, D] float32, as the tower gives them.

        Args:
          input_ids: [B, L] int, with special tokens, right-padded; of SigLIP to its full length.
          attention_mask: [B, L], true at real tokens. A row without any (padding of a batch)
            gives some finite vector. SigLIP sees its padding, as in training.
          dropout_key: BERT's dropout; None for none. CLIP has no dropout.
        """
        if isinstance(self.config.text, BertConfig):
            hidden = self.text(input_ids, attention_mask, dropout_key=dropout_key)  # [B, L, D]
            return mean_pool(hidden, attention_mask)
        if isinstance(self.config.text, SiglipTextConfig):
            if input_ids.shape[1] != self.config.text.length:
                raise UserError(
                    f"siglip text: rows of {input_ids.shape[1]} tokens, the model reads texts "
                    f"padded to {self.config.text.length}; set the lengths to that."
                )
            return self.text(input_ids)
        return self.text(input_ids, attention_mask)

    def encode_image(self, pixels: Pictures) -> jax.Array:
        """Pictures -> [B, D] float32, of length 1; arguments as of `image_features`."""
        return l2_normalize(self.image_features(pixels))

    def image_features(self, pixels: Pictures) -> jax.Array:
        """Pictures -> [B, D] float32, as the tower gives them.

        They are [B, S, S, 3] RGB, uint8 0..255 or float 0..1, or NaFlex's patches and their rows
        and columns; the tower's normalization happens here, on the device.
        """
        return self.vision(self.vision.normalize(pixels))

    def encode_source(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        pixels: Pictures,
        has_image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Snippets and captioned pictures, mixed in one batch -> [B, D], of length 1.

        Also fits a question that comes with a picture. A batch of snippets alone is cheaper
        through `encode_text`: here the vision tower runs on every row.

        Args:
          input_ids, attention_mask: [B, L] snippet or caption.
          pixels: as in `encode_image`; any finite values where there is no picture.
          has_image: [B] bool.
          dropout_key: as in `encode_text`.
        """
        if self.config.fusion == "sum":
            text = self.text_features(input_ids, attention_mask, dropout_key=dropout_key)
            has_text = ~has_image | (attention_mask.sum(1) > _MARKS)
            image = self.image_features(pixels)
            parts = (jnp.where(has_text[:, None], text, 0), jnp.where(has_image[:, None], image, 0))
            return l2_normalize(sum(parts))
        text = self.encode_text(input_ids, attention_mask, dropout_key=dropout_key)
        image = self.encode_image(pixels)
        if self.config.fusion == "mean":
            image = l2_normalize((text + self.picture_gate[...] * image) / 2)
        return jnp.where(has_image[:, None], image, text)

    def temperature(self) -> jax.Array:
        """Factor on the cosines in the loss: exp(logit_scale), without a bias at most 100."""
        if self.config.logit_bias is not None:  # SigLIP's own go beyond
            return jnp.exp(self.logit_scale[...])
        return jnp.exp(jnp.minimum(self.logit_scale[...], MAX_LOGIT_SCALE))


def _text_changes(section: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = TextConfig if section.get("clip") else BertConfig
    kind = SiglipTextConfig if section.get("siglip") else kind
    return spec_of(kind, minimum=1, partial=True)


def _vision_changes(section: Mapping[str, Any]) -> Mapping[str, Any]:
    if section.get("siglip"):  # pictures of training have one size
        return spec_of(SiglipVisionConfig, "flexible", minimum=1, partial=True)
    return spec_of(VisionConfig, minimum=1, partial=True)


@dataclasses.dataclass(frozen=True)
class DualEncoderModel:
    """A text tower and a vision tower with one space of embeddings."""

    # fusion, picture_gate: how a source's caption and picture become one vector (DualEncoder).
    fusion: str
    picture_gate: float
    # clip, siglip: a name of CLIPS or SIGLIPS, then that model itself; or both "":
    clip: str = ""
    siglip: str = ""
    trunk: str = ""  # of a BERT text tower, a name of TRUNKS
    # Fields of the text tower's config that differ.
    changes: Mapping[str, Any] = mapping(_text_changes)
    # Fields of VisionConfig (of SigLIP its own) that differ; unless given its dtype is the text
    # tower's, and its embed_dim a BERT tower's hidden size.
    vision: Mapping[str, Any] = mapping(_vision_changes)

    def __post_init__(self):
        if self.clip and self.siglip:
            raise UserError(
                f"config keys model.clip={self.clip} and model.siglip={self.siglip}: name one of "
                "the two."
            )
        if not self.published and not self.trunk:
            raise UserError("config key model.trunk is missing; add it.")

    @property
    def published(self) -> str:
        """`clip` or `siglip`, of which both towers are; "": the text tower is a BERT."""
        return "clip" if self.clip else "siglip" if self.siglip else ""

    def config(self, vocab_size: int) -> DualEncoderConfig:
        """The model's sizes, with the tokenizer's `vocab_size` but for CLIP and SigLIP."""
        fusion = {"fusion": self.fusion, "picture_gate": self.picture_gate}
        if self.published:
            presets = CLIPS if self.clip else SIGLIPS
            towers = published_sizes(f"model.{self.published}", self.clip or self.siglip, presets)
            text: Any = with_fields(towers.text, self.changes)
        else:
            text = trunk_config(self.trunk, self.changes, vocab_size, types=2)
        changes = {"dtype": text.dtype, **self.vision}
        vision = towers.vision if self.published else VisionConfig(embed_dim=text.hidden)
        vision = with_fields(vision, changes)
        if self.siglip:
            return of_towers(SiglipConfig(vision, text), **fusion)
        return DualEncoderConfig(text, vision, **fusion)
