"""The original MCAN (Yu et al. 2019; MILVLG/openvqa openvqa/models/mcan).

GloVe words and an LSTM on the question, detector regions as the image, openvqa's own LayerNorm.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import Embedding, Linear, normal_init, torch_linear, uniform_init
from mmqa_jax.models.mcan.network import Fusion, FusionConfig

PAD = 0


@dataclasses.dataclass(frozen=True)
class MCANOpenVQAConfig:
    """Word table, regions, fusion and answers.

    Attributes:
      vocab_size: rows of the embedding table; 0 is padding, 1 the unknown token. It depends on the
        questions that the vocabulary was built from.
      fusion: encoder, decoder, pooling; its `hidden` is the LSTM's too.
      word_features: size of a word vector (GloVe: 300).
      region_features: size of a region's feature vector.
      answers: size of the answer vocabulary.
    """

    vocab_size: int
    fusion: FusionConfig
    word_features: int = 300
    region_features: int = 2048
    answers: int = 3129


def mcan_small(vocab_size: int, **changes) -> MCANOpenVQAConfig:
    """configs/vqa/mcan_small.yml; `changes` are fields of FusionConfig."""
    return MCANOpenVQAConfig(vocab_size, FusionConfig(**changes))


def mcan_large(vocab_size: int, **changes) -> MCANOpenVQAConfig:
    """configs/vqa/mcan_large.yml; `changes` are fields of FusionConfig."""
    large = FusionConfig(hidden=1024, mlp=4096, flat_mlp=512, flat_out=2048)
    return MCANOpenVQAConfig(vocab_size, dataclasses.replace(large, **changes))


class LSTM(nnx.Module):
    """One layer, from left to right, as torch.nn.LSTM: gates input, forget, cell, output.

    The cell state is kept in float32.
    """

    def __init__(self, in_features: int, hidden: int, *, rngs: nnx.Rngs):
        init = uniform_init(hidden**-0.5)
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init, bias_init=init)
        self.input = linear(in_features, 4 * hidden, ("patch", "mlp"))
        self.recurrent = linear(hidden, 4 * hidden, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, L, in] -> [B, L, hidden]
        projected = self.input(x).swapaxes(0, 1)  # [L, B, 4 * hidden]

        def step(carry, now):
            hidden, cell = carry
            gates = (now + self.recurrent(hidden)).astype(jnp.float32)
            write, keep, new, read = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(new)
            hidden = (jax.nn.sigmoid(read) * jnp.tanh(cell)).astype(x.dtype)
            return (hidden, cell), hidden

        start = jnp.zeros((x.shape[0], projected.shape[-1] // 4))
        _, states = jax.lax.scan(step, (start.astype(x.dtype), start), projected)
        return states.swapaxes(0, 1)


class MCANOpenVQA(nnx.Module):
    """Answers a question on a set of regions by classification."""

    def __init__(self, config: MCANOpenVQAConfig, *, rngs: nnx.Rngs):
        fusion = config.fusion
        self.words = Embedding(
            config.vocab_size,
            config.word_features,
            ("vocab", "patch"),
            rngs=rngs,
            init=normal_init(1.0),
        )
        self.lstm = LSTM(config.word_features, fusion.hidden, rngs=rngs)
        self.region_adapter = torch_linear(
            config.region_features, fusion.hidden, ("patch", "embed"), rngs=rngs
        )
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        regions: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """question_ids [B, L] int, 0 = padding (at the end); regions [B, R, region_features],
        wholly zero = padding -> fused feature [B, flat_out] float32.
        """
        config = self.config
        if regions.shape[-1] != config.region_features:
            raise UserError(
                f"mcan: regions of {regions.shape[-1]} features, the model takes "
                f"{config.region_features}; give the features it was trained on or set "
                "mcan.region_features."
            )
        dtype = config.fusion.dtype
        question = self.lstm(self.words(question_ids).astype(dtype))  # [B, L, hidden]
        return self.fusion(
            question,
            self.region_adapter(regions.astype(dtype)),  # [B, R, hidden]
            question_ids != PAD,
            jnp.any(regions != 0, axis=-1),
            dropout_key=dropout_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers] float32; a sigmoid gives scores."""
        return self.head(latent)

    def __call__(
        self,
        question_ids: jax.Array,
        regions: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """`answer_logits` of `latent`: [B, answers] float32."""
        return self.answer_logits(self.latent(question_ids, regions, dropout_key=dropout_key))
