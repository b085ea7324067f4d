"""What stands on an encoder or decoder that reads texts: a vector, a class, a judgement."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.typed import changes_of
from mmqa_jax.models.bert.network import Bert, BertConfig, trunk_config
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.common.layers import Linear, dropout, normal_init, split_key
from mmqa_jax.models.encoders.sentence_pooling import DENSE_ACTIVATIONS, POOLINGS, last_token
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llama.network import last_token as state_at_end
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import Llava, among_words
from mmqa_jax.models.modernvbert.network import ModernVBert
from mmqa_jax.models.qwen_vl.network import PatchBatch, QwenVL, QwenVLConfig, spread
from mmqa_jax.models.two_towers.network import l2_normalize


class Dense(nnx.Module):
    """sentence-transformers' layer Dense: [..., in] -> [..., out].

    Args:
      activation: one of DENSE_ACTIVATIONS.
      residual: adds what the layer gets to what it gives; by this linear layer if it is one.
    """

    def __init__(self, linear: Linear, activation: str, residual: Linear | bool = False):
        self.linear, self.activation, self.residual = linear, activation, residual

    def __call__(self, x: jax.Array) -> jax.Array:
        y = DENSE_ACTIVATIONS[self.activation](self.linear(x))
        if not self.residual:
            return y
        return y + (self.residual(x) if isinstance(self.residual, Linear) else x)


class SentenceEncoder(nnx.Module):
    """An encoder of tokens with a pooling over its last layer.

    Args:
      bert: the encoder: a Bert, MPNet, ModernBert or TextDecoder, (ids, mask) -> states.
      pooling: one of POOLINGS.
      truncate_dim: the first so many values are kept (Matryoshka); None: all.
      dense: layers over what is pooled, in order.
    """

    def __init__(
        self,
        bert: nnx.Module,
        pooling: str = "mean",
        truncate_dim: int | None = None,
        dense: Sequence[Dense] = (),
    ):
        self.bert, self.dense = bert, nnx.List(dense)
        self.pooling, self.truncate_dim = pooling, truncate_dim

    def encode_text(self, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Texts, input_ids int[B, L] and attention_mask bool[B, L] -> float32 [B, D], of length 1.

        They are right-padded; a row has at least one token.
        """
        hidden = self.bert(input_ids, attention_mask)  # [B, L, H]
        pooled = POOLINGS[self.pooling](hidden, attention_mask)
        for layer in self.dense:
            pooled = layer(pooled)
        return l2_normalize(pooled[:, : self.truncate_dim])


# A cross-encoder: a BERT that reads two texts together, for their relevance or their class.


class CrossEncoder(nnx.Module):
    """transformers' BERT and RoBERTa classifiers of sequences.

    Their heads are alike: a linear layer and tanh of the first token (BERT's pooler), then logits.
    Rerankers have one label, the relevance.
    """

    def __init__(self, config: BertConfig, labels: int = 1, *, rngs: nnx.Rngs):
        self.bert = Bert(dataclasses.replace(config, pooler=True), rngs=rngs)
        self.classifier = Linear(
            config.hidden,
            labels,
            ("embed", None),
            rngs=rngs,
            kernel_init=normal_init(config.init_stddev),
        )
        self.config = config

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        token_type_ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Pairs of right-padded texts, int or bool [B, L] each -> logits float32 [B].

        With several labels [B, labels]. Dropout is that of BertForSequenceClassification; RoBERTa's
        head has one more, which is left out.
        """
        of_input, of_layers, of_head = split_key(dropout_key, 3)
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        embedded = self.bert.embeddings(input_ids, positions, token_type_ids, dropout_key=of_input)
        mask = attention_mask.astype(bool)[:, None, None, :]
        first = self.bert.encode_first(embedded, mask, dropout_key=of_layers)  # [B, H]
        pooled = dropout(self.bert.pool(first[:, None]), self.config.dropout, of_head)
        logits = self.classifier(pooled).astype(jnp.float32)
        return logits[:, 0] if logits.shape[1] == 1 else logits


# A Qwen-VL that writes nothing: one vector of a prompt, or a judgement of yes or no.
#
# Texts and pictures stand in one prompt, and the state of its last token is what is kept:
# Qwen3-VL-Embedding makes a vector of it, Qwen3-VL-Reranker compares two next tokens by it.
# Originals: QwenLM/Qwen3-VL-Embedding src/models/qwen3_vl_embedding.py and qwen3_vl_reranker.py.


class QwenVLPooled(QwenVL):
    """A Qwen-VL whose tokens' states are asked for."""

    def last_states(self, input_ids: jax.Array, mask: jax.Array, *pictured: Any) -> jax.Array:
        """Prompts as `states` takes them -> the state of each one's last token, float32 [B, H]."""
        return last_token(self.states(input_ids, mask, *pictured), mask)

    def states(
        self,
        input_ids: jax.Array,
        mask: jax.Array,
        pictures: PatchBatch | None = None,
        rows: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Right-padded prompts -> the normed states of their tokens [B, L, H].

        Args:
          input_ids: int [B, L], one placeholder for each token of a picture.
          mask: bool [B, L], true at real tokens.
          pictures: K of each prompt, arrays [B, K, ...] of one bucket of U units; None: none has
            any, and `rows` and `positions` are not needed.
          rows: int [B, L], which of its pictures' K * U units a token takes; -1: none.
          positions: int [B, L, 3].
        """
        tokens, deepstack = self.llama.embed(input_ids), None
        if pictures is not None:
            assert rows is not None, "pictures have places in the prompt"
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pictures)
            features = self.encode_images(flat)  # [B * K, U, features]
            features = features.reshape(len(input_ids), -1, features.shape[-1])
            units = jnp.take_along_axis(features, jnp.maximum(rows, 0)[..., None], axis=1)
            tokens, deepstack = spread(tokens, units, rows >= 0)
        seen = mask if self.config.llama.bidirectional else None
        return self.llama.encode(tokens, seen, positions, deepstack=deepstack)


class QwenVLReader(QwenVLPooled):
    """A Qwen-VL without an output head."""

    def __init__(self, config: QwenVLConfig, *, rngs: nnx.Rngs):
        headless = dataclasses.replace(config.llama, tied=True)
        super().__init__(dataclasses.replace(config, llama=headless), rngs=rngs)
        self.width = config.llama.hidden


class LlavaReader(Llava):
    """A tower and a decoder without an output head, whose tokens' states are asked for."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        headless = dataclasses.replace(config.llama, tied=True)
        super().__init__(dataclasses.replace(config, llama=headless), rngs=rngs)
        self.width = config.llama.hidden

    def states(
        self, input_ids: jax.Array, mask: jax.Array, pictures: jax.Array | None = None
    ) -> jax.Array:
        """Right-padded prompts -> the normed states of their tokens [B, L, H].

        Args:
          input_ids: int [B, L], one placeholder for each token of a picture.
          mask: bool [B, L], true at real tokens.
          pictures: uint8 [B, K, S, S, 3], squares in the order of their placeholders; None: none.
        """
        placeholder = input_ids == self.config.image_token  # [B, L]
        words = jnp.where(placeholder, 0, input_ids)
        tokens = self.llama.words_of(words)
        if pictures is not None:
            flat = pictures.reshape(-1, *pictures.shape[2:])  # [B * K, S, S, 3]
            features = self.encode_images(self.vision.normalize(flat))
            tokens = among_words(tokens, features, placeholder)
        tokens = self.llama.with_side(tokens, words)
        seen_whole = self.seen_whole(input_ids, mask)
        is_causal = self.config.llama.picture_sight == "causal"  # then none sees the padding
        return self.llama.encode(tokens, None if is_causal else mask, pictures=seen_whole)


class TokenHead(nnx.Module):
    """ColPali's head (Faysse et al. 2024) on a reader of prompts: a vector of length 1 for each
    token."""

    def __init__(self, config: Any, dim: int | None = None, *, rngs: nnx.Rngs):
        """`dim`: the values of a vector; None: those of a state."""
        super().__init__(config, rngs=rngs)
        if dim is not None:
            self.projection = Linear(self.width, dim, ("embed", None), rngs=rngs)

    def __call__(self, *prompts: Any) -> jax.Array:
        """Prompts as the reader's `states` takes them -> float32 [B, L, D]."""
        states = self.states(*prompts)
        states = self.projection(states) if hasattr(self, "projection") else states
        return l2_normalize(states.astype(jnp.float32))


OF_PICTURE = "picture"  # the mean of a picture's tokens, of a prompt without one that of all


class PooledHead(nnx.Module):
    """One vector of length 1 of a prompt, on a reader of prompts."""

    def __init__(
        self,
        config: Any,
        truncate_dim: int | None = None,
        pooling: str = "lasttoken",
        dim: int | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        """Adds a pooling and a linear layer to a reader.

        Args:
          config: the reader's.
          truncate_dim: the first so many values are kept (Matryoshka); None: all.
          pooling: one of POOLINGS, or OF_PICTURE.
          dim: values behind a linear layer over what is pooled; None: there is none.
          rngs: of the first parameters.
        """
        super().__init__(config, rngs=rngs)
        self.truncate_dim, self.pooling = truncate_dim, pooling
        if dim is not None:
            self.projection = Linear(self.width, dim, ("embed", None), rngs=rngs)

    def encode_text(self, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Prompts without pictures, [B, L] each -> float32 [B, D], of length 1."""
        return self.encode_prompts(input_ids, attention_mask)

    def encode_prompts(self, *prompts: Any) -> jax.Array:
        """Prompts as the reader's `states` takes them -> float32 [B, D], of length 1."""
        pooling, mask = self.pooling, prompts[1]
        if pooling == OF_PICTURE:
            pooling, mask = "mean", self._of_picture(prompts[0], mask)
        pooled = POOLINGS[pooling](self.states(*prompts), mask)
        if hasattr(self, "projection"):
            pooled = self.projection(pooled).astype(jnp.float32)
        return l2_normalize(pooled[:, : self.truncate_dim])

    def _of_picture(self, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Which tokens are a picture's or the marks around it, bool [B, L]; all where none is."""
        ends = input_ids == self.config.vision_end_token
        begun = jnp.cumsum(input_ids == self.config.vision_start_token, axis=1)
        within = begun - jnp.cumsum(ends, axis=1) + ends > 0
        return mask & (within | ~within.any(1, keepdims=True))


class QwenVLTokens(TokenHead, QwenVLReader):
    """ColQwen."""


class QwenVLEncoder(PooledHead, QwenVLReader):
    """Qwen3-VL-Embedding, BiQwen."""


class LlavaTokens(TokenHead, LlavaReader):
    """ColPali, ColIdefics3, ColGemma."""


class LlavaEncoder(PooledHead, LlavaReader):
    """BiPali, BiIdefics3, BiGemma."""


class ModernVBertTokens(TokenHead, ModernVBert):
    """ColModernVBERT."""


class ModernVBertEncoder(PooledHead, ModernVBert):
    """BiModernVBERT."""


class QwenVLYesNo(QwenVLPooled):
    """How much likelier yes is than no behind a prompt."""

    def __init__(self, config: QwenVLConfig, yes: int, no: int, *, rngs: nnx.Rngs):
        """`yes` and `no`: the ids of the two tokens."""
        super().__init__(config, rngs=rngs)
        self.yes, self.no = yes, no

    def __call__(self, *prompts: Any) -> jax.Array:
        """Prompts as `last_states` takes them -> log-odds of yes, float32 [B]."""
        states = self.last_states(*prompts)
        logits = self.llama.logits(states.astype(self.config.llama.dtype))  # [B, V]
        return logits[:, self.yes] - logits[:, self.no]


# Decoders that read texts and write none: the state of every token, or a judgement of yes or no.
#
# Qwen3-Embedding, E5-Mistral and EmbeddingGemma pool the states
# (`heads.SentenceEncoder`); Qwen3-Reranker is asked whether a text answers a question.


class TextDecoder(Llama):
    """A decoder without its output head."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(dataclasses.replace(config, tied=True), rngs=rngs)

    def __call__(self, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Right-padded texts, int [B, L] -> normed states of the last layer [B, L, H].

        mask: bool [B, L], not used where no token sees the padding behind it.
        """
        return self.encode(self.embed(input_ids), mask if self.config.bidirectional else None)


class YesNoDecoder(Llama):
    """A decoder that says how much likelier yes is than no behind a prompt."""

    def __init__(self, config: LlamaConfig, yes: int, no: int, *, rngs: nnx.Rngs):
        """`yes` and `no`: the ids of the two tokens."""
        super().__init__(config, rngs=rngs)
        self.yes, self.no = yes, no

    def __call__(
        self, input_ids: jax.Array, attention_mask: jax.Array, token_type_ids: jax.Array
    ) -> jax.Array:
        """Right-padded prompts, int or bool [B, L] each -> log-odds of yes, float32 [B].

        `token_type_ids` are not used: there are none.
        """
        hidden = self.encode(self.embed(input_ids))  # [B, L, H]
        lengths = attention_mask.astype(jnp.int32).sum(1)
        logits = self.logits(state_at_end(hidden, lengths))  # [B, V]
        return logits[:, self.yes] - logits[:, self.no]


# BERT with a linear classifier over its first position: WebQA's modality classifier.
#
# WebQA_Baseline vlp/CLIP_retrieval_experiments/bert_classifier.py:26-45: BertModel's pooled
# output (a tanh layer over [CLS]), then Linear(768, 2), without dropout in between.


@dataclasses.dataclass(frozen=True)
class TextClassifierConfig:
    """Sizes of the classifier."""

    bert: BertConfig  # the encoder; `with_pooler` says whether it has a pooler
    classes: int = 2  # how many
    # `pooler` is BERT's pooled output, as in the original; `cls` the last hidden state of [CLS]
    # itself, for encoders whose pooler was never trained (MiniLM).
    pooling: str = "pooler"

    def __post_init__(self):
        check_known("model.pooling", self.pooling, ("pooler", "cls"))

    @property
    def with_pooler(self) -> BertConfig:
        """The encoder with a pooler, or without one where it is not used."""
        return dataclasses.replace(self.bert, pooler=self.pooling == "pooler")


class TextClassifier(nnx.Module):
    """Classifies texts."""

    def __init__(self, config: TextClassifierConfig, *, rngs: nnx.Rngs):
        self.bert = Bert(config.with_pooler, rngs=rngs)
        init = normal_init(config.bert.init_stddev)
        size = config.bert.hidden
        self.head = Linear(size, config.classes, ("embed", None), rngs=rngs, kernel_init=init)
        self.config = config

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        frozen: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Texts -> logits [B, classes] in float32.

        Args:
          input_ids: [B, L] int, `[CLS] text [SEP]`, right-padded.
          attention_mask: [B, L], true at real tokens.
          frozen: no gradient reaches BERT.
          dropout_key: of BERT's dropout; None for none.
        """
        hidden = self.bert(input_ids, attention_mask, dropout_key=dropout_key)  # [B, L, H]
        pooled = self.bert.pool(hidden) if self.config.pooling == "pooler" else hidden[:, 0]
        if frozen:
            pooled = jax.lax.stop_gradient(pooled)  # [B, H]
        return self.head(pooled).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class TextClassifierModel:
    """A BERT with a linear layer."""

    trunk: str  # a name of TRUNKS
    pooling: str  # see TextClassifierConfig
    frozen: bool  # only the linear layer is trained
    changes: Mapping[str, Any] = changes_of(BertConfig)  # fields of BertConfig that differ

    def config(self, vocab_size: int, classes: int) -> TextClassifierConfig:
        """The model's sizes; `vocab_size`: of the tokenizer."""
        trunk = trunk_config(self.trunk, self.changes, vocab_size, types=2)
        return TextClassifierConfig(trunk, classes, self.pooling)
