"""VLP (Zhou et al. 2020) as WebQA uses it: one BERT trunk that selects sources and writes answers.

Sequence (vlp/webqa_loader.py): [CLS], region slots 1..R, source text, [SEP], question, answer,
[SEP]. Original: pytorch_pretrained_bert/modeling.py of WebQnA/WebQA_Baseline (BertForWebqa,
BertForWebqaDecoder).

What is ours overrides single methods: regions of pixels (vlp_pixels.py), the small reader of Atlas
(atlas_reader.py), sources encoded once for all questions (two_sided_vlp.py).
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.bert.network import Bert, BertConfig, MlmHead
from mmqa_jax.models.common.layers import Linear, dropout, normal_init, split_key, torch_linear
from mmqa_jax.models.vlp.mask_appending import (
    Prefix,
    WrittenCache,
    append_mask,
    empty_cache,
    encode_prefix,
)


@dataclasses.dataclass(frozen=True)
class VLPConfig:
    """The trunk and the visual frontend.

    A region's content vector [region_features] goes through one linear per size in
    `visual_hidden` and a last one to the trunk's width, its position vector [region_positions]
    through one linear; ReLU after each linear, then dropout. Those linears start as torch's
    nn.Linear (modeling.py:1011-1050, after init_bert_weights has run), or with kernels of
    the standard deviations `content_stddev` and `place_stddev` and biases 0.
    """

    bert: BertConfig
    region_features: int = 2048
    region_positions: int = 1607
    visual_hidden: tuple[int, ...] = (2048,)
    content_stddev: float | None = None
    place_stddev: float | None = None

    def build(self, *, rngs: nnx.Rngs) -> VLP:
        """A freshly initialized model."""
        return VLP(self, rngs=rngs)

    def make_region_content(self, rngs: nnx.Rngs) -> RegionEncoder:
        """What embeds the regions' content."""
        sizes = (*self.visual_hidden, self.bert.hidden)
        options = {"rngs": rngs, "stddev": self.content_stddev}
        return RegionEncoder(
            self.region_features, sizes, self.bert.dropout, self.bert.dtype, **options
        )


def _vlp_trunk(**changes) -> BertConfig:
    return dataclasses.replace(BertConfig(types=6, eps=1e-5), **changes)


def vlp_base_x101(**trunk) -> VLPConfig:
    """BERT-base-cased trunk over X101 detector features (WebQA's main model)."""
    return VLPConfig(_vlp_trunk(**trunk))


def vlp_base_vinvl(**trunk) -> VLPConfig:
    """BERT-base-cased trunk over VinVL features (6 box values + 1595 classes)."""
    return VLPConfig(_vlp_trunk(**trunk), region_positions=1601, visual_hidden=())


@flax.struct.dataclass
class VLPInputs:
    """A packed batch; positions 1..R hold regions, R = 0 in a text-only batch."""

    input_ids: jax.Array  # [B, L] int
    token_type_ids: jax.Array  # [B, L] int
    position_ids: jax.Array  # [B, L] int
    context_mask: jax.Array  # [B, L] bool: columns every row sees (source and question)
    answer_mask: jax.Array  # [B, L] bool: answer tokens and last [SEP], causal among themselves
    region_features: jax.Array  # [B, R, F]
    region_positions: jax.Array  # [B, R, P]

    def attention_mask(self) -> jax.Array:
        """Which columns every row sees, bool [B, 1, L, L]."""
        return mixed_mask(self.context_mask, self.answer_mask)


def mixed_mask(context_mask: jax.Array, answer_mask: jax.Array) -> jax.Array:
    """VLP's sequence-to-sequence mask: [B, L] each -> bool [B, 1, L, L] (row, column).

    Every row sees the context; an answer row also sees itself and the answer before it. With no
    answer it is the bidirectional mask of source selection.
    """
    length = context_mask.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    seen = context_mask[:, None, :] | (answer_mask[:, :, None] & answer_mask[:, None, :] & causal)
    return seen[:, None]


class RegionEncoder(nnx.Module):
    """Linear + ReLU, once per size, then dropout: [B, R, in] -> [B, R, sizes[-1]] of `dtype`.

    The linears start with kernels of standard deviation `stddev`; None: as torch's.
    """

    def __init__(
        self,
        in_features: int,
        sizes: tuple[int, ...],
        rate: float,
        dtype: str,
        *,
        rngs: nnx.Rngs,
        stddev: float | None,
    ):
        widths = (in_features, *sizes)
        names = [("patch", "proj")] * (len(sizes) - 1) + [("patch", "embed")]
        make = functools.partial(torch_linear, rngs=rngs)
        if stddev is not None:
            make = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(stddev))
        self.linears = nnx.List(make(*widths[i : i + 2], names[i]) for i in range(len(sizes)))
        self.rate, self.dtype = rate, dtype

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        x = x.astype(self.dtype)
        for linear in self.linears:
            x = jax.nn.relu(linear(x))
        return dropout(x, self.rate, dropout_key)


class VLP(nnx.Module):
    """One model, two heads: `source_logits` on [CLS], `mlm_logits` on any position."""

    def __init__(self, config: VLPConfig, *, rngs: nnx.Rngs):
        bert = config.bert
        self.config = config
        self.bert = Bert(bert, rngs=rngs)
        self.region_content = config.make_region_content(rngs)
        self.region_place = RegionEncoder(
            config.region_positions,
            (bert.hidden,),
            bert.dropout,
            bert.dtype,
            rngs=rngs,
            stddev=config.place_stddev,
        )
        self.source_head = torch_linear(bert.hidden, 2, ("embed", None), rngs=rngs)
        self.mlm_head = MlmHead(bert, rngs=rngs)

    def _embed_content(self, inputs: VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        """The regions' content, [B, R, H]."""
        return self.region_content(inputs.region_features, dropout_key=dropout_key)

    def _embed(self, inputs: VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        content_key, place_key, sum_key = split_key(dropout_key, 3)
        regions = None
        if inputs.region_features.shape[1]:
            content = self._embed_content(inputs, content_key)
            place = self.region_place(inputs.region_positions, dropout_key=place_key)
            regions = content, place  # [B, R, H] each
        return self.bert.embeddings(
            inputs.input_ids,
            inputs.position_ids,
            inputs.token_type_ids,
            regions=regions,
            dropout_key=sum_key,
        )

    def encode(self, inputs: VLPInputs, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Hidden states of the last layer under the mixed mask, [B, L, H]."""
        embed_key, layers_key = split_key(dropout_key, 2)
        x = self._embed(inputs, embed_key)
        return self.bert.encode(x, inputs.attention_mask(), dropout_key=layers_key)

    def source_logits(
        self, inputs: VLPInputs, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Source selection: [B, 2] in float32; class 0 = the source is relevant.

        The head reads [CLS], so that the last layer computes nothing else.
        """
        embed_key, layers_key = split_key(dropout_key, 2)
        x = self._embed(inputs, embed_key)
        mask = inputs.attention_mask()
        first = self.bert.encode_first(x, mask, dropout_key=layers_key)  # [B, H]
        return self.source_head(first).astype(jnp.float32)

    def mlm_logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states at the wanted positions [..., H] -> token logits [..., V], float32."""
        return self.mlm_head(hidden, self.bert.embeddings.word)

    def answer_log_probs(
        self,
        inputs: VLPInputs,
        positions: jax.Array,
        ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities of the tokens `ids` at the columns `positions`, for training.

        positions, ids: [B, P]. Returns [B, P] float32, and bool [B, P]: whether the model can say
        such a token at all; VLP can say every one.
        """
        _, at_masks = self._encode_at(inputs, positions, dropout_key)
        logits = self.mlm_logits(at_masks)
        chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.ones(ids.shape, bool)

    def _encode_at(
        self, inputs: VLPInputs, positions: jax.Array, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states of the last layer, [B, L, H], and those at `positions`, [B, P, H]."""
        hidden = self.encode(inputs, dropout_key=dropout_key)
        return hidden, jnp.take_along_axis(hidden, positions[:, :, None], axis=1)

    def prefill(self, inputs: VLPInputs) -> Prefix:
        """Encodes source and question once; what is in answer positions is never seen."""
        return self._encode_context(inputs)[1]

    def _encode_context(self, inputs: VLPInputs) -> tuple[jax.Array, Prefix]:
        """Hidden states of the last layer, [B, L, H], and what decoding keeps."""
        mask = inputs.context_mask[:, None, None, :]
        hidden, key, value = encode_prefix(self.bert, self._embed(inputs, None), mask)
        last = jnp.max(jnp.where(inputs.context_mask, inputs.position_ids, -1), axis=1)
        return hidden, Prefix(key, value, inputs.context_mask, last + 1)

    def empty_cache(self, rows: int, beams: int, max_new_tokens: int) -> WrittenCache:
        """Zeros for `beams` answers of `max_new_tokens` tokens to each of `rows` questions."""
        return empty_cache(self.config.bert, rows, beams, max_new_tokens)

    def decode_step(
        self,
        prefix: Prefix,
        cache: WrittenCache,
        generated: jax.Array,
        step: jax.Array,
        *,
        mask_id: int,
        token_type: int,
    ) -> tuple[jax.Array, WrittenCache]:
        """One token for every beam; the arguments are those of `mask_appending.append_mask`.

        Returns log-probabilities [N, V] of token number `step`, and the cache with the previous
        token added.
        """
        ids = {"mask_id": mask_id, "token_type": token_type}
        hidden, cache = append_mask(self.bert, prefix, cache, generated, step, **ids)
        log_probs = jax.nn.log_softmax(self.mlm_logits(hidden))  # [B, beams, V]
        return log_probs.reshape(len(generated), -1), cache
