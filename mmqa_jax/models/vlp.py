"""VLP (Zhou et al. 2020) as WebQA uses it: one BERT trunk that selects sources and writes answers.

Sequence (`reference.md` 2.2): [CLS], region slots 1..R, source text, [SEP], question, answer,
[SEP]. Original: pytorch_pretrained_bert/modeling.py of WebQnA/WebQA_Baseline (BertForWebqa,
BertForWebqaDecoder).
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import Bert, BertConfig, MlmHead, minilm_l6
from mmqa_jax.models.clip import VisionConfig, VisionTower, normalize_pixels
from mmqa_jax.models.layers import (
    Initializer,
    Linear,
    dropout,
    normal_init,
    split_key,
)
from mmqa_jax.models.mask_appending import (
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
    `visual_hidden` and a last one to the trunk's width, its place vector [region_positions]
    through one linear; ReLU after each linear, then dropout. With `vision` the regions are patches
    of raw pixels, of which a frozen CLIP makes the content vectors first.
    """

    bert: BertConfig
    region_features: int = 2048
    region_positions: int = 1607
    visual_hidden: tuple[int, ...] = (2048,)
    region_tags: bool = False  # ours: a slot's word embedding (a tag) is added to its content
    copy_head: bool = False  # ours, see CopyHead
    # Ours: the masked-LM head writes only the first words of the vocabulary, all others are
    # copied (as in pointer-generator networks, whose generator knows common words only).
    written_words: int | None = None
    vision: VisionConfig | None = None  # ours: see ClipRegionEncoder
    vision_layer: int = -2

    def __post_init__(self):
        if self.written_words is not None and self.written_words < 1:
            raise UserError(
                f"config key model.written_words={self.written_words}: at least 1 was expected; "
                "give a larger number or leave it out."
            )
        if self.written_words is not None and not self.copy_head:
            raise UserError(
                "config key model.written_words limits what is written, so that all else must be "
                "copied: set model.copy_head too, or leave it out."
            )


def _vlp_trunk(**changes) -> BertConfig:
    return dataclasses.replace(BertConfig(types=6, eps=1e-5), **changes)


def vlp_base_x101(**trunk) -> VLPConfig:
    """BERT-base-cased trunk over X101 detector features (WebQA's main model)."""
    return VLPConfig(_vlp_trunk(**trunk))


def vlp_base_vinvl(**trunk) -> VLPConfig:
    """BERT-base-cased trunk over VinVL features (6 box values + 1595 classes)."""
    return VLPConfig(_vlp_trunk(**trunk), region_positions=1601, visual_hidden=())


def vlp_patches(
    patch: int,
    *,
    bert: BertConfig | None = None,
    visual_hidden: tuple[int, ...] = (),
    region_positions: int = 6,
    region_tags: bool = False,
    copy_head: bool = False,
    written_words: int | None = None,
    **trunk,
) -> VLPConfig:
    """Regions are square patches of raw pixels: patch * patch * 3 values, places of 6 or more.

    The trunk is MiniLM-L6's shape with VLP's six token types unless `bert` is given; used on the
    Atlas corpus, where no detector runs.
    """
    bert = dataclasses.replace(bert or minilm_l6(types=6), **trunk)
    return VLPConfig(
        bert,
        region_features=patch * patch * 3,
        region_positions=region_positions,
        visual_hidden=tuple(visual_hidden),
        region_tags=region_tags,
        copy_head=copy_head,
        written_words=written_words,
    )


def vlp_clip(
    vision: VisionConfig, *, bert: BertConfig, layer: int = -2, visual_hidden: tuple[int, ...] = ()
) -> VLPConfig:
    """Regions are CLIP's patch features, made on the fly; places are the patches' 6 box values."""
    return VLPConfig(
        bert,
        region_features=vision.patch_size**2 * 3,
        region_positions=6,
        visual_hidden=tuple(visual_hidden),
        vision=vision,
        vision_layer=layer,
    )


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
    probe_mask: jax.Array | None = None  # [B, L] bool: [MASK]s that ask for one answer token each


@flax.struct.dataclass
class Context:
    """Source and question as the last layer sees them: what a copy head copies from."""

    hidden: jax.Array  # [B, L, H]
    ids: jax.Array  # [B, L] int
    mask: jax.Array  # [B, L] bool


@flax.struct.dataclass
class VLPPrefix:
    """What decoding keeps of source and question."""

    encoded: Prefix
    context: Context | None  # only for a model with a copy head


def said_before(inputs: VLPInputs, positions: jax.Array) -> jax.Array:
    """Which words of the sequence the answer holds before columns `positions` [B, P].

    Returns bool [B, P, L]; a word that is masked there is not held.
    """
    ids, places = inputs.input_ids, inputs.position_ids
    same = ids[:, :, None] == ids[:, None, :]  # [B, answer L, L]
    asked = jnp.take_along_axis(places, positions, axis=1)  # [B, P]
    earlier = inputs.answer_mask[:, None] & (places[:, None] < asked[:, :, None])  # [B, P, L]
    return jnp.einsum("bpa,bal->bpl", earlier.astype(jnp.float32), same.astype(jnp.float32)) > 0


def mixed_mask(
    context_mask: jax.Array,
    answer_mask: jax.Array,
    probe_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
) -> jax.Array:
    """VLP's sequence-to-sequence mask: [B, L] each -> bool [B, 1, L, L] (row, column).

    Every row sees the context; an answer row also sees itself and the answer before it. With no
    answer it is the bidirectional mask of source selection. A probe sees itself and the answer
    tokens whose position is before its own, as the [MASK] appended in decoding does; nothing
    else sees it.
    """
    length = context_mask.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    seen = context_mask[:, None, :] | (answer_mask[:, :, None] & answer_mask[:, None, :] & causal)
    if probe_mask is not None:
        earlier = position_ids[:, None, :] < position_ids[:, :, None]
        seen |= probe_mask[:, :, None] & answer_mask[:, None, :] & earlier
        seen |= probe_mask[:, :, None] & jnp.eye(length, dtype=bool)
    return seen[:, None]


# Log-probability of a word that cannot be written; finite, so that gradients stay numbers.
_NEVER = -1e9


def _mask_of(inputs: VLPInputs) -> jax.Array:
    return mixed_mask(
        inputs.context_mask, inputs.answer_mask, inputs.probe_mask, inputs.position_ids
    )


class RegionEncoder(nnx.Module):
    """Linear + ReLU, once per size, then dropout: [B, R, in] -> [B, R, sizes[-1]] of `dtype`."""

    def __init__(
        self,
        in_features: int,
        sizes: tuple[int, ...],
        rate: float,
        dtype: str,
        *,
        rngs: nnx.Rngs,
        kernel_init: Initializer,
    ):
        widths = (in_features, *sizes)
        names = [("patch", "proj")] * (len(sizes) - 1) + [("patch", "embed")]
        self.linears = nnx.List(
            Linear(*widths[i : i + 2], names[i], rngs=rngs, kernel_init=kernel_init)
            for i in range(len(sizes))
        )
        self.rate, self.dtype = rate, dtype

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        x = x.astype(self.dtype)
        for linear in self.linears:
            x = jax.nn.relu(linear(x))
        return dropout(x, self.rate, dropout_key)


class ClipRegionEncoder(RegionEncoder):
    """Patches of raw pixels -> CLIP's patch features -> linears, as RegionEncoder.

    The tower stands in front of the model within the same jitted step, not in the input pipeline:
    it then sees whole batches on the accelerator, and a picture travels as its pixels, which the
    host keeps decoded; float features of WebQA's 390,000 pictures would be 200 GB and more, and
    made one by one on the host they would hold up every step. It is frozen, and saved with the
    run, so that a trained model needs no second folder.
    """

    def __init__(
        self, vision: VisionConfig, layer: int, sizes: tuple[int, ...], rate: float, dtype: str,
        *, rngs: nnx.Rngs, kernel_init: Initializer,
    ):  # fmt: skip
        super().__init__(vision.width, sizes, rate, dtype, rngs=rngs, kernel_init=kernel_init)
        self.tower, self.layer = VisionTower(vision, rngs=rngs), layer

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        return super().__call__(self.features(x), dropout_key=dropout_key)

    def features(self, x: jax.Array) -> jax.Array:
        """Patches [B, R, patch * patch * 3], pixels in -1..1 -> features [B, R, width]."""
        vision = self.tower.config
        side, patch = vision.image_size // vision.patch_size, vision.patch_size
        pixels = (x + 1) / 2  # 0..1
        pixels = pixels.reshape(-1, side, side, patch, patch, 3)  # [B * pictures, row, column, ...]
        pixels = pixels.transpose(0, 1, 3, 2, 4, 5)
        pixels = pixels.reshape(-1, vision.image_size, vision.image_size, 3)
        found = self.tower.patch_features(normalize_pixels(pixels), self.layer)
        return jax.lax.stop_gradient(found).reshape(*x.shape[:2], vision.width)


class CopyHead(nnx.Module):
    """Copies answer words out of source and question (See et al. 2017, pointer-generator).

    Ours, not VLP's. A position attends once over the last layer's context and mixes the words
    found there with those of the masked-LM head; a small model then writes names that training
    never showed it.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.query = Linear(width, width, ("embed", None), rngs=rngs)
        self.key = Linear(width, width, ("embed", None), rngs=rngs)
        self.gate = Linear(width, 1, ("embed", None), rngs=rngs)
        self.again = Linear(width, 1, ("embed", None), rngs=rngs)

    def __call__(
        self,
        hidden: jax.Array,
        logits: jax.Array,
        context: Context,
        said: jax.Array,
        vocabulary: int,
    ) -> jax.Array:
        """hidden [B, P, H], logits [B, P, W] of the first words -> log-probabilities [B, P, V].

        said [B, P, L] bool: context words that the answer holds before the asked place.
        """
        rows, places, written = logits.shape
        copied, gate = self._attend(hidden, context, said)
        index = (jnp.arange(rows)[:, None, None], jnp.arange(places)[:, None], context.ids[:, None])
        words = jnp.zeros((rows, places, vocabulary)).at[index].add(copied)
        unwritten = ((0, 0), (0, 0), (0, vocabulary - written))
        log_written = jnp.pad(
            jax.nn.log_softmax(logits), unwritten, constant_values=_NEVER
        )  # [B, P, V]
        return _mix(gate[:, :, None], log_written, words)

    def of_words(
        self,
        hidden: jax.Array,
        logits: jax.Array,
        context: Context,
        said: jax.Array,
        ids: jax.Array,
    ) -> jax.Array:
        """As `__call__`, but only of the words ids [B, P]: log-probabilities [B, P].

        Training needs no others; whole distributions over the vocabulary would cost it more
        than the trunk's layers.
        """
        copied, gate = self._attend(hidden, context, said)
        same = context.ids[:, None] == ids[:, :, None]  # [B, P, L]
        return _mix(gate, _log_probs_of(logits, ids), jnp.where(same, copied, 0.0).sum(axis=-1))

    def _attend(
        self, hidden: jax.Array, context: Context, said: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Share of every context word [B, P, L], and the log-odds of copying [B, P].

        What was said already gets a score of its own: a list names each of its items once
        (See et al. 2017, coverage).
        """
        query, key = self.query(hidden), self.key(context.hidden)
        scores = jnp.einsum("bph,blh->bpl", query, key) / key.shape[-1] ** 0.5
        scores = (scores + said * self.again(hidden)).astype(jnp.float32)
        scores = jnp.where(context.mask[:, None], scores, -jnp.inf)
        return jax.nn.softmax(scores), self.gate(hidden)[:, :, 0].astype(jnp.float32)


def _mix(gate: jax.Array, log_word: jax.Array, copied: jax.Array) -> jax.Array:
    """log((1 - g) * p(word) + g * p(copied)), g = sigmoid(gate)."""
    return jnp.logaddexp(
        jax.nn.log_sigmoid(-gate) + log_word, jax.nn.log_sigmoid(gate) + jnp.log(copied + 1e-20)
    )


def _log_probs_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax(logits [..., W]) at ids [...]; a word beyond W is never written."""
    there = jnp.minimum(ids, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(logits, there[..., None], axis=-1)[..., 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(ids < logits.shape[-1], log_probs, _NEVER)


class VLP(nnx.Module):
    """One model, two heads: `source_logits` on [CLS], `word_log_probs` on any position."""

    def __init__(self, config: VLPConfig, *, rngs: nnx.Rngs):
        bert = config.bert
        self.bert = Bert(bert, rngs=rngs)
        # Small first weights of the content and larger ones of the place, which has few values,
        # so that neither drowns the other, nor a tag.
        sizes, rest = (*config.visual_hidden, bert.hidden), (bert.dropout, bert.dtype)
        small, larger = normal_init(0.01), normal_init(0.03)
        if config.vision is None:
            self.region_content = RegionEncoder(
                config.region_features, sizes, *rest, rngs=rngs, kernel_init=small
            )
        else:
            self.region_content = ClipRegionEncoder(
                config.vision, config.vision_layer, sizes, *rest, rngs=rngs, kernel_init=small
            )
        self.region_place = RegionEncoder(
            config.region_positions, (bert.hidden,), *rest, rngs=rngs, kernel_init=larger
        )
        self.source_head = Linear(bert.hidden, 2, ("embed", None), rngs=rngs)
        self.mlm_head = MlmHead(bert, rngs=rngs)
        self.copy_head = CopyHead(bert.hidden, rngs=rngs) if config.copy_head else None
        self.config = config

    def _embed(self, inputs: VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        content_key, place_key, sum_key = split_key(dropout_key, 3)
        regions = None
        if inputs.region_features.shape[1]:
            content = self.region_content(inputs.region_features, dropout_key=content_key)
            if self.config.region_tags:
                slots = inputs.input_ids[:, 1 : 1 + content.shape[1]]
                content = content + self.bert.embeddings.word(slots).astype(content.dtype)
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
        return self.bert.encode(x, _mask_of(inputs), dropout_key=layers_key)

    def source_logits(
        self, inputs: VLPInputs, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Source selection: [B, 2] in float32; class 0 = the source is relevant.

        The head reads [CLS], so that the last layer computes nothing else.
        """
        embed_key, layers_key = split_key(dropout_key, 2)
        x = self._embed(inputs, embed_key)
        first = self.bert.encode_first(x, _mask_of(inputs), dropout_key=layers_key)  # [B, H]
        return self.source_head(first).astype(jnp.float32)

    def mlm_logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states at the wanted positions [..., H] -> word logits [..., V], float32.

        With `config.written_words` = W only those of the first W words.
        """
        return self.mlm_head(hidden, self.bert.embeddings.word, self.config.written_words)

    def word_log_probs(
        self, hidden: jax.Array, context: Context | None, said: jax.Array | None
    ) -> jax.Array:
        """Hidden states [B, P, H] -> log-probabilities of words [B, P, V], float32.

        `context` is what a copy head copies from, `said` [B, P, L] bool which of its words the
        answer holds already; a model without a copy head ignores both.
        """
        logits = self.mlm_logits(hidden)
        if self.copy_head is None:
            return jax.nn.log_softmax(logits)
        return self.copy_head(hidden, logits, context, said, self.config.bert.vocab_size)

    def sayable(self, context: Context, ids: jax.Array) -> jax.Array:
        """Whether the words ids [B, P] can be written or copied at all, bool [B, P]."""
        written = self.config.written_words
        if written is None:
            return jnp.ones(ids.shape, bool)
        same = (context.ids[:, None] == ids[:, :, None]) & context.mask[:, None]  # [B, P, L]
        return (ids < written) | same.any(axis=-1)

    def log_probs_of(
        self, hidden: jax.Array, context: Context, said: jax.Array, ids: jax.Array
    ) -> jax.Array:
        """`word_log_probs` of the words ids [B, P] alone: [B, P], for training."""
        logits = self.mlm_logits(hidden)
        if self.copy_head is None:
            return _log_probs_of(logits, ids)
        return self.copy_head.of_words(hidden, logits, context, said, ids)

    def prefill(self, inputs: VLPInputs) -> VLPPrefix:
        """Encode source and question once; whatever lies in answer positions is never seen."""
        mask = inputs.context_mask[:, None, None, :]
        hidden, key, value = encode_prefix(self.bert, self._embed(inputs, None), mask)
        last = jnp.max(jnp.where(inputs.context_mask, inputs.position_ids, -1), axis=1)
        context = None
        if self.copy_head is not None:
            context = Context(hidden, inputs.input_ids, inputs.context_mask)
        return VLPPrefix(Prefix(key, value, inputs.context_mask, last + 1), context)

    def empty_cache(self, rows: int, max_new_tokens: int) -> WrittenCache:
        """Zeros for `rows` = questions * beams sequences of `max_new_tokens`."""
        return empty_cache(self.config.bert, rows, max_new_tokens)

    def decode_step(
        self,
        prefix: VLPPrefix,
        cache: WrittenCache,
        generated: jax.Array,
        step: jax.Array,
        *,
        mask_id: int,
        token_type: int,
    ) -> tuple[jax.Array, WrittenCache]:
        """One word for every beam; the arguments are those of `mask_appending.append_mask`.

        Returns log-probabilities [N, V] of token number `step`, and the cache with the previous
        token added.
        """
        asked, cache = append_mask(
            self.bert,
            prefix.encoded,
            cache,
            generated,
            step,
            mask_id=mask_id,
            token_type=token_type,
        )  # [B, beams, H]
        said = None
        if prefix.context is not None:
            answer = generated.reshape(*asked.shape[:2], -1)  # [B, beams, T]
            same = answer[..., None] == prefix.context.ids[:, None, None]  # [B, beams, T, L]
            written = jnp.arange(answer.shape[2]) < step
            said = (same & written[:, None]).any(axis=2)  # [B, beams, L]
        log_probs = self.word_log_probs(asked, prefix.context, said)
        return log_probs.reshape(len(generated), -1), cache
