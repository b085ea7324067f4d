"""Oscar and Oscar+ (Li et al. 2020, Zhang et al. 2021): BERT over text, object tags and regions.

Sequence: caption, labels (the tags), regions (`OscarLayout`). A caption sees itself causally, all
labels and regions; these see each other and never the caption.

Original: microsoft/Oscar oscar/modeling/modeling_bert.py (BertImgModel, BertForImageCaptioning,
BertCaptioningLoss), oscar/run_captioning.py (CaptionTensorizer).
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import network
from mmqa_jax.models.common.layers import LayerNorm, Linear, dropout, normal_init, split_key
from mmqa_jax.models.vlp.network import (
    Prefix,
    WrittenCache,
    append_mask,
    empty_cache,
    encode_prefix,
    mixed_mask,
)

CAPTION_TYPE, LABEL_TYPE = 0, 1


@dataclasses.dataclass(frozen=True)
class OscarConfig:
    """The trunk and the region embedding.

    `region_features` values of a region are 2048 of the detector and 6 of its box. With
    `region_norm` (published: use_img_layernorm) a LayerNorm with `region_eps` (published:
    img_layer_norm_eps) follows the linear map.
    """

    bert: network.BertConfig
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
    return OscarConfig(network.bert_base_uncased(**trunk))


def oscar_plus_large(**trunk) -> OscarConfig:
    """Oscar+ large on bert-large-uncased (VinVL_MODEL_ZOO.md, coco_captioning_large_*)."""
    return OscarConfig(network.bert_large_uncased(**trunk))


@flax.struct.dataclass
class OscarInputs:
    """A packed batch of T text columns and R region slots."""

    input_ids: jax.Array  # [B, T] int
    token_type_ids: jax.Array  # [B, T] int
    position_ids: jax.Array  # [B, T] int
    context_mask: jax.Array  # [B, T] bool: columns every row sees, of labels
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
        self.bert = network.Bert(bert, rngs=rngs)
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
        self.mlm_head = network.MlmHead(bert, rngs=rngs)
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
        return jax.nn.log_softmax(self.token_logits(hidden)), cache


# Captions, labels and regions in columns, as Oscar was trained on them.
#
# Original: microsoft/Oscar oscar/run_captioning.py (CaptionTensorizer).


Tokens = Sequence[int]


@dataclasses.dataclass(frozen=True)
class OscarLayout:
    """Sizes and special tokens; the defaults are the published captioner's."""

    # Columns of [CLS], caption, [SEP] and padding; the labels' positions start there.
    caption: int = 40
    text: int = 70  # columns of caption and labels
    regions: int = 50  # region slots; further regions are cut
    region_features: int = 2054  # values of a region
    # cls_id, sep_id, pad_id, mask_id: of the tokenizer (bert-base-uncased).
    cls_id: int = 101
    sep_id: int = 102
    pad_id: int = 0
    mask_id: int = 103

    def __post_init__(self):
        if not 3 <= self.caption <= self.text - 2:
            raise UserError(
                f"layout.caption is {self.caption}: expected 3 to {self.text - 2}, which leaves "
                "room for a token in the caption and in the labels; change it or layout.text."
            )

    def captioning(
        self,
        captions: Sequence[Tokens],
        labels: Sequence[Tokens],
        regions: Sequence[np.ndarray],
    ) -> OscarInputs:
        """Training's batch of captions with their pictures; captions may hold [MASK]s.

        Args:
          captions: token ids without special ones; the tail is cut.
          labels: token ids of each picture's tags, one after the other; [] for none.
          regions: float32[n, F] of each picture, the most certain first.

        Returns:
          numpy arrays; caption columns 0..caption-1, label columns from `caption` on.
        """
        rows = self._rows(captions, labels, regions)
        arrays = self._empty(rows, self.text)
        positions = np.arange(self.text)
        for row, (caption, tags) in enumerate(zip(captions, labels, strict=True)):
            tokens = [self.cls_id, *caption[: self.caption - 2], self.sep_id]
            arrays["input_ids"][row, : len(tokens)] = tokens
            arrays["caption_mask"][row, : len(tokens)] = True
            self._put_labels(arrays, row, self.caption, tags)
        return self._inputs(arrays, positions, regions)

    def prompt(self, labels: Sequence[Tokens], regions: Sequence[np.ndarray]) -> OscarInputs:
        """What a caption is written for: [CLS] in column 0, then the labels, and the regions.

        Labels have the positions that `captioning` gives them.
        """
        rows = self._rows(labels, labels, regions)
        arrays = self._empty(rows, 1 + self.text - self.caption)
        arrays["input_ids"][:, 0] = self.cls_id
        arrays["caption_mask"][:, 0] = True
        for row, tags in enumerate(labels):
            self._put_labels(arrays, row, 1, tags)
        positions = np.concatenate([[0], np.arange(self.caption, self.text)])
        return self._inputs(arrays, positions, regions)

    def _rows(self, captions, labels, regions) -> int:
        if not len(captions) == len(labels) == len(regions):
            raise UserError(
                f"{len(captions)} captions, {len(labels)} label lists and {len(regions)} pictures' "
                "regions were given: expected as many of each."
            )
        for row, features in enumerate(regions):
            if features.ndim != 2 or features.shape[1] != self.region_features:
                raise UserError(
                    f"regions of picture {row} of the batch have shape {features.shape}: expected "
                    f"(number, {self.region_features}); give the features the model was made for."
                )
        return len(captions)

    def _empty(self, rows: int, columns: int) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.full((rows, columns), self.pad_id, np.int32),
            "token_type_ids": np.full((rows, columns), CAPTION_TYPE, np.int32),
            "context_mask": np.zeros((rows, columns), bool),
            "caption_mask": np.zeros((rows, columns), bool),
        }

    def _put_labels(
        self, arrays: dict[str, np.ndarray], row: int, column: int, tags: Tokens
    ) -> None:
        """Labels and their [SEP] from `column` on, as many as there is room for."""
        if len(tags) == 0:
            return
        tokens = [*tags[: arrays["input_ids"].shape[1] - column - 1], self.sep_id]
        columns = slice(column, column + len(tokens))
        arrays["input_ids"][row, columns] = tokens
        arrays["token_type_ids"][row, columns] = LABEL_TYPE
        arrays["context_mask"][row, columns] = True

    def _inputs(
        self,
        arrays: dict[str, np.ndarray],
        positions: np.ndarray,
        regions: Sequence[np.ndarray],
    ) -> OscarInputs:
        rows = len(regions)
        features = np.zeros((rows, self.regions, self.region_features), np.float32)
        counts = np.array([min(len(region), self.regions) for region in regions], int)
        for row, region in enumerate(regions):
            features[row, : counts[row]] = region[: counts[row]]
        return OscarInputs(
            **arrays,
            position_ids=np.broadcast_to(positions, (rows, len(positions))).astype(np.int32),
            region_features=features,
            region_mask=np.arange(self.regions) < counts[:, None],
        )
