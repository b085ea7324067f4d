"""Prophet's improved MCAN (Shao et al. 2023; MILVLG/prophet prophet/stage1/model/mcan.py).

The question comes from BERT-large, the image as a 16 x 16 grid of CLIP RN50x64 features
(models.modified_resnet.network), whose self-attention has two-dimensional rotary positions. It is
Prophet's source of answer candidates (`answer_logits`) and of examples (`latent`).

The original's decoder swaps queries and keys by mistake (its `rope(q, k)` is declared
`forward(k, q)`): `linear_k` makes its queries and `linear_q` its keys. Both are linears of one
shape, so that the key map (weights.mcan) puts each where it is used, and the model is plain.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import Bert, BertConfig, bert_large_uncased
from mmqa_jax.models.common.layers import split_key, torch_linear
from mmqa_jax.models.mcan.layers import Fusion, FusionConfig, grid_rotation

PAD = 0  # BERT's


@dataclasses.dataclass(frozen=True)
class MCANConfig:
    """Question encoder, fusion, image and answers; `mcan_prophet` has the published sizes.

    Attributes:
      text: the question encoder; it has compute options of its own.
      fusion: encoder, decoder, pooling.
      image_features: size of a grid cell's features.
      grid: cells per side of the grid.
      rope_base: of the grid's rotary positions.
      answers: size of the pretraining vocabulary.
      new_answers: answers of the benchmark that are not among those; the head of finetuning
        (mcan_for_finetune.py) appends them.
    """

    text: BertConfig
    fusion: FusionConfig
    image_features: int = 4096
    grid: int = 16
    rope_base: float = 40.0
    answers: int = 3129
    new_answers: int = 0

    def __post_init__(self):
        if self.head_dim % 4:
            raise UserError(
                f"mcan: fusion.hidden {self.fusion.hidden} over {self.fusion.heads} heads gives "
                f"heads of {self.head_dim}; two-dimensional rotary positions need a multiple of 4."
            )

    @property
    def head_dim(self) -> int:
        """Size of an attention head of the fusion."""
        return self.fusion.hidden // self.fusion.heads


def mcan_prophet(*, new_answers: int = 0, **both) -> MCANConfig:
    """Prophet's published sizes (configs/pretrain.yml, finetune.yml).

    Args:
      new_answers: answers that finetuning appends to VQAv2's 3,129.
      both: fields that BERT and the fusion have both: dropout, dtype, attention, remat, unroll.
    """
    fusion = FusionConfig(
        hidden=1024,
        heads=8,
        mlp=4096,
        layers=6,
        flat_mlp=1024,
        flat_out=2048,
        value_bias=False,
        norm="layer",
        eps=1e-5,
    )
    return MCANConfig(
        text=bert_large_uncased(**both),
        fusion=dataclasses.replace(fusion, **both),
        new_answers=new_answers,
    )


class MCAN(nnx.Module):
    """Answers a question on a grid of image features by classification."""

    def __init__(self, config: MCANConfig, *, rngs: nnx.Rngs):
        fusion = config.fusion
        self.bert = Bert(config.text, rngs=rngs)
        self.text_adapter = torch_linear(
            config.text.hidden, fusion.hidden, ("proj", "embed"), rngs=rngs
        )
        self.image_adapter = torch_linear(
            config.image_features, fusion.hidden, ("patch", "embed"), rngs=rngs, use_bias=False
        )
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.new_head = (
            torch_linear(fusion.flat_out, config.new_answers, ("proj", "vocab"), rngs=rngs)
            if config.new_answers
            else None
        )
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The fused feature; Prophet picks examples by its cosine similarity.

        question_ids [B, L] int, WordPieces with [CLS] and [SEP], 0 = padding; image
        [B, grid * grid, image_features], the grid row by row. Returns [B, flat_out] float32.
        """
        config = self.config
        wanted = (config.grid**2, config.image_features)
        if image.shape[1:] != wanted:
            raise UserError(
                f"mcan: image features of shape {image.shape[1:]}, the model takes {wanted}, a "
                f"grid of {config.grid} x {config.grid}; extract them again or set mcan.grid."
            )
        text_key, fusion_key = split_key(dropout_key, 2)
        mask = question_ids != PAD
        question = self.bert(question_ids, mask, dropout_key=text_key)  # [B, L, bert hidden]
        dtype = config.fusion.dtype
        return self.fusion(
            jnp.tanh(self.text_adapter(question.astype(dtype))),
            self.image_adapter(image.astype(dtype)),
            mask,
            None,
            rotation=grid_rotation(config.grid, config.head_dim, config.rope_base),
            dropout_key=fusion_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers + new_answers] float32; a sigmoid gives scores."""
        logits = self.head(latent)
        if self.new_head is None:
            return logits
        return jnp.concatenate([logits, self.new_head(latent)], axis=-1)

    def __call__(
        self,
        question_ids: jax.Array,
        image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """`answer_logits` of `latent`: [B, answers + new_answers] float32."""
        return self.answer_logits(self.latent(question_ids, image, dropout_key=dropout_key))
