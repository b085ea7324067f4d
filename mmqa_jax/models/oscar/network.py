"""Oscar and Oscar+ (Li et al. 2020, Zhang et al. 2021): BERT over text, object tags and regions.

Sequence: caption, labels (the tags), regions. Two layouts share the weights (oscar_layout.py):

* captioning: a caption sees itself causally, all labels and regions; these see each other and
  never the caption;
* tagging: everything sees everything, as in pre-training; [MASK]ed tags are read by the same head.

Original: microsoft/Oscar oscar/modeling/modeling_bert.py (BertImgModel, BertForImageCaptioning,
BertCaptioningLoss), oscar/run_captioning.py (CaptionTensorizer).
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import (
    Bert,
    BertConfig,
    MlmHead,
    bert_base_uncased,
    bert_large_uncased,
)
from mmqa_jax.models.common.layers import LayerNorm, Linear, dropout, normal_init, split_key
from mmqa_jax.models.vlp.mask_appending import (
    Prefix,
    WrittenCache,
    append_mask,
    empty_cache,
    encode_prefix,
)
from mmqa_jax.models.vlp.network import mixed_mask

CAPTION_TYPE, LABEL_TYPE = 0, 1


@dataclasses.dataclass(frozen=True)
class OscarConfig:
    """The trunk and the region embedding.

    `region_features` values of a region are 2048 of the detector and 6 of its box. With
    `region_norm` (published: use_img_layernorm) a LayerNorm with `region_eps` (published:
    img_layer_norm_eps) follows the linear map.
    """

    bert: BertConfig
    region_features: int = 2054
    region_norm: bool = False
    region_eps: float = 1e-12

    def __post_init__(self):
        if self.region_features < 1:
            raise UserError(
                f"model.region_features is {self.region_features}: expected at least 1; "
                "published models take 2054."
            )
        if self.bert.types <= LABEL_TYPE:
            raise UserError(
                f"model.types is {self.bert.types}: expected at least {LABEL_TYPE + 1}, one for "
                "captions and one for labels; raise it."
            )


def oscar_plus_base(**trunk) -> OscarConfig:
    """Oscar+ base on bert-base-uncased (VinVL_MODEL_ZOO.md, coco_captioning_base_*)."""
    return OscarConfig(bert_base_uncased(**trunk))


def oscar_plus_large(**trunk) -> OscarConfig:
    """Oscar+ large on bert-large-uncased (VinVL_MODEL_ZOO.md, coco_captioning_large_*)."""
    return OscarConfig(bert_large_uncased(**trunk))


@flax.struct.dataclass
class OscarInputs:
    """A packed batch of T text columns and R region slots."""

    input_ids: jax.Array  # [B, T] int
    token_type_ids: jax.Array  # [B, T] int
    position_ids: jax.Array  # [B, T] int
    context_mask: jax.Array  # [B, T] bool: columns every row sees (labels; in tagging all text)
    caption_mask: jax.Array  # [B, T] bool: caption columns, causal among themselves
    region_features: jax.Array  # [B, R, F]
    region_mask: jax.Array  # [B, R] bool


def attention_mask(inputs: OscarInputs) -> jax.Array:
    """bool [B, 1, T + R, T + R] (row, column): CaptionTensorizer's, in VLP's terms.

    Labels and regions are the context, the caption is what is written. A padding row sees the
    context, where the original's sees nothing; no row sees it.
    """
    context = jnp.concatenate([inputs.context_mask, inputs.region_mask], axis=1)
    written = jnp.pad(inputs.caption_mask, ((0, 0), (0, inputs.region_mask.shape[1])))
    return mixed_mask(context, written)


class Oscar(nnx.Module):
    """One trunk and one head: `token_logits` of hidden states at any text column."""

    def __init__(self, config: OscarConfig, *, rngs: nnx.Rngs):
        bert = config.bert
        self.bert = Bert(bert, rngs=rngs)
        self.region_embedding = Linear(
            config.region_features,
            bert.hidden,
            ("patch", "embed"),
            rngs=rngs,
            kernel_init=normal_init(bert.init_stddev),
        )
        self.region_norm = (
            LayerNorm(bert.hidden, config.region_eps, rngs=rngs) if config.region_norm else None
        )
        self.mlm_head = MlmHead(bert, rngs=rngs)
        self.config = config

    def embed(self, inputs: OscarInputs, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Text and region embeddings, [B, T + R, H]; regions have neither position nor type."""
        text_key, region_key = split_key(dropout_key, 2)
        text = self.bert.embeddings(
            inputs.input_ids, inputs.position_ids, inputs.token_type_ids, dropout_key=text_key
        )  # [B, T, H]
        regions = self.region_embedding(inputs.region_features.astype(text.dtype))  # [B, R, H]
        if self.region_norm is not None:
            regions = self.region_norm(regions)
        regions = dropout(regions, self.config.bert.dropout, region_key)
        return jnp.concatenate([text, regions], axis=1)

    def encode(self, inputs: OscarInputs, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Hidden states of the last layer, [B, T + R, H]."""
        embed_key, layers_key = split_key(dropout_key, 2)
        embedded = self.embed(inputs, dropout_key=embed_key)
        return self.bert.encode(embedded, attention_mask(inputs), dropout_key=layers_key)

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., H] -> logits [..., V] in float32, by the tied embedding table."""
        return self.mlm_head(hidden, self.bert.embeddings.word)

    def prefill(self, inputs: OscarInputs) -> Prefix:
        """Encodes the picture and the caption's beginning ([CLS]) once per picture."""
        embedded, mask = self.embed(inputs), attention_mask(inputs)
        _, key, value = encode_prefix(self.bert, embedded, mask)
        text = inputs.context_mask | inputs.caption_mask
        columns = jnp.concatenate([text, inputs.region_mask], axis=1)  # [B, T + R]
        last = jnp.max(jnp.where(inputs.caption_mask, inputs.position_ids, -1), axis=1)
        return Prefix(key, value, columns, last + 1)

    def empty_cache(self, rows: int, beams: int, max_new_tokens: int) -> WrittenCache:
        """Zeros for `beams` captions of `max_new_tokens` tokens of each of `rows` pictures."""
        return empty_cache(self.config.bert, rows, beams, max_new_tokens)

    def decode_step(
        self,
        prefix: Prefix,
        cache: WrittenCache,
        generated: jax.Array,
        step: jax.Array,
        *,
        mask_id: int,
        token_type: int = CAPTION_TYPE,
    ) -> tuple[jax.Array, WrittenCache]:
        """Log-probabilities [N, V] of token number `step`, and the cache; see `append_mask`."""
        hidden, cache = append_mask(
            self.bert, prefix, cache, generated, step, mask_id=mask_id, token_type=token_type
        )
        log_probs = jax.nn.log_softmax(self.token_logits(hidden))
        return log_probs.reshape(len(generated), -1), cache


def caption_loss(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    label_smoothing: float = 0.0,
    drop_worst: float = 0.0,
) -> jax.Array:
    """Loss of masked caption tokens (BertCaptioningLoss), a scalar.

    logits [B, P, V] at the masked columns, targets [B, P] int, weights [B, P]: 0 where nothing
    was masked. Divergence from the target's one-hot distribution, of which `label_smoothing` is
    spread over the other tokens, averaged over the batch's masked tokens; of these the share
    `drop_worst` with the highest loss is left out (the original rounds the kept number down).
    """
    vocabulary = logits.shape[-1]
    log_probs = jax.nn.log_softmax(logits)
    of_target = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]  # [B, P]
    losses = -of_target
    if label_smoothing:
        spread = label_smoothing / (vocabulary - 1)
        others = log_probs.sum(axis=-1) - of_target
        entropy = (1 - label_smoothing) * np.log(1 - label_smoothing)
        entropy += label_smoothing * np.log(spread)
        losses = entropy - (1 - label_smoothing) * of_target - spread * others
    chosen = (weights > 0).reshape(-1)
    losses = losses.reshape(-1)
    # The kept number for every possible number of masked tokens, rounded as Python does it.
    kept = np.array([int(count * (1 - drop_worst)) for count in range(chosen.size + 1)])
    kept = jnp.asarray(kept)[chosen.sum()]
    if drop_worst:
        order = jnp.argsort(jnp.where(chosen, jax.lax.stop_gradient(losses), jnp.inf))
        chosen = jnp.zeros_like(chosen).at[order].set(jnp.arange(chosen.size) < kept)
    return jnp.sum(jnp.where(chosen, losses, 0.0)) / kept
