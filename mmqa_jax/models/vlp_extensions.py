"""Our additions to VLP: a copy head, tags on regions, and CLIP in front of the model."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import BertConfig, minilm_l6
from mmqa_jax.models.clip import VisionConfig, VisionTower, normalize_pixels
from mmqa_jax.models.layers import Linear
from mmqa_jax.models.mask_appending import Prefix, WrittenCache, append_mask
from mmqa_jax.models.vlp import VLP, RegionEncoder, VLPConfig, VLPInputs

# First weights of patches: small ones of the content and larger ones of the position, which has
# few values, so that neither drowns the other, nor a tag.
_PATCH_STDDEVS = {"content_stddev": 0.01, "place_stddev": 0.03}
# Log-probability of a token that cannot be written; finite, so that gradients stay numbers.
_NEVER = -1e9
_LEAST = 1e-20  # added to the share of a copied token, so that none has the logarithm of 0


@dataclasses.dataclass(frozen=True)
class ExtendedVLPConfig(VLPConfig):
    """A VLP with some of our additions; with none of them it is VLP itself.

    Attributes:
      region_tags: the embedding of a region slot's token (a tag) is added to its content.
      copy_head: see CopyHead.
      written_words: the masked-LM head writes only the first tokens of the vocabulary, all
        others are copied (as in pointer-generator networks, whose generator knows only common
        words).
      vision: the regions are patches of raw pixels, of which a frozen CLIP makes the content
        vectors first; see ClipRegionEncoder.
      vision_layer: of the tower, whose features are taken.
    """

    region_tags: bool = False
    copy_head: bool = False
    written_words: int | None = None
    vision: VisionConfig | None = None
    vision_layer: int = -2

    @classmethod
    def of(cls, config: VLPConfig) -> ExtendedVLPConfig:
        """The same config; VLP's own gets none of the additions."""
        return config if isinstance(config, cls) else cls(**vars(config))

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
) -> ExtendedVLPConfig:
    """Regions are square patches of raw pixels: patch * patch * 3 values, 6 or more of position.

    The trunk is MiniLM-L6's shape with VLP's six token types unless `bert` is given; used on the
    Atlas corpus, where no detector runs.
    """
    bert = dataclasses.replace(bert or minilm_l6(types=6), **trunk)
    return ExtendedVLPConfig(
        bert,
        region_features=patch * patch * 3,
        region_positions=region_positions,
        visual_hidden=tuple(visual_hidden),
        region_tags=region_tags,
        copy_head=copy_head,
        written_words=written_words,
        **_PATCH_STDDEVS,
    )


def vlp_clip(
    vision: VisionConfig, *, bert: BertConfig, layer: int = -2, visual_hidden: tuple[int, ...] = ()
) -> ExtendedVLPConfig:
    """Regions are CLIP's patch features, made on the fly; positions are the patches' box values."""
    return ExtendedVLPConfig(
        bert,
        region_features=vision.patch_size**2 * 3,
        region_positions=6,
        visual_hidden=tuple(visual_hidden),
        vision=vision,
        vision_layer=layer,
        **_PATCH_STDDEVS,
    )


@flax.struct.dataclass
class Context:
    """Source and question as the last layer sees them: what a copy head copies from."""

    hidden: jax.Array  # [B, L, H]
    ids: jax.Array  # [B, L] int
    mask: jax.Array  # [B, L] bool


@flax.struct.dataclass
class ExtendedPrefix:
    """What decoding keeps of source and question."""

    encoded: Prefix
    context: Context | None  # only for a model with a copy head


def said_before(inputs: VLPInputs, positions: jax.Array) -> jax.Array:
    """Which tokens of the sequence the answer holds before columns `positions` [B, P].

    Returns bool [B, P, L]; a token that is masked there is not held.
    """
    ids, order = inputs.input_ids, inputs.position_ids
    same = ids[:, :, None] == ids[:, None, :]  # [B, answer L, L]
    wanted = jnp.take_along_axis(order, positions, axis=1)  # [B, P]
    earlier = inputs.answer_mask[:, None] & (order[:, None] < wanted[:, :, None])  # [B, P, L]
    return jnp.einsum("bpa,bal->bpl", earlier.astype(jnp.float32), same.astype(jnp.float32)) > 0


class ExtendedVLP(VLP):
    """VLP with the additions that its config names."""

    config: ExtendedVLPConfig

    def __init__(self, config: ExtendedVLPConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.copy_head = CopyHead(config.bert.hidden, rngs=rngs) if config.copy_head else None

    def _make_region_content(self, rngs: nnx.Rngs) -> RegionEncoder:
        config, bert = self.config, self.config.bert
        if config.vision is None:
            return super()._make_region_content(rngs)
        sizes = (*config.visual_hidden, bert.hidden)
        vision = config.vision, config.vision_layer
        options = {"rngs": rngs, "stddev": config.content_stddev}
        return ClipRegionEncoder(*vision, sizes, bert.dropout, bert.dtype, **options)

    def _embed_content(self, inputs: VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        content = super()._embed_content(inputs, dropout_key)
        if not self.config.region_tags:
            return content
        slots = inputs.input_ids[:, 1 : 1 + content.shape[1]]
        return content + self.bert.embeddings.word(slots).astype(content.dtype)

    def mlm_logits(self, hidden: jax.Array) -> jax.Array:
        """As VLP's; with `config.written_words` = W only the logits of the first W tokens."""
        return self.mlm_head(hidden, self.bert.embeddings.word, self.config.written_words)

    def token_log_probs(
        self, hidden: jax.Array, context: Context | None, said: jax.Array | None
    ) -> jax.Array:
        """Hidden states [B, P, H] -> log-probabilities of tokens [B, P, V], float32.

        `context` is what a copy head copies from, `said` [B, P, L] bool which of its tokens the
        answer holds already; a model without a copy head ignores both.
        """
        logits = self.mlm_logits(hidden)
        if self.copy_head is None:
            return jax.nn.log_softmax(logits)
        return self.copy_head(hidden, logits, context, said, self.config.bert.vocab_size)

    def sayable(self, context: Context, ids: jax.Array) -> jax.Array:
        """Whether the tokens ids [B, P] can be written or copied at all, bool [B, P]."""
        written = self.config.written_words
        if written is None:
            return jnp.ones(ids.shape, bool)
        same = (context.ids[:, None] == ids[:, :, None]) & context.mask[:, None]  # [B, P, L]
        return (ids < written) | same.any(axis=-1)

    def log_probs_of(
        self, hidden: jax.Array, context: Context, said: jax.Array, ids: jax.Array
    ) -> jax.Array:
        """`token_log_probs` of only the tokens ids [B, P]: [B, P], for training."""
        logits = self.mlm_logits(hidden)
        if self.copy_head is None:
            return _log_probs_of(logits, ids)
        return self.copy_head.of_tokens(hidden, logits, context, said, ids)

    def prefill(self, inputs: VLPInputs) -> ExtendedPrefix:
        """As VLP's, with what a copy head copies from."""
        hidden, encoded = self._encode_context(inputs)
        context = None
        if self.copy_head is not None:
            context = Context(hidden, inputs.input_ids, inputs.context_mask)
        return ExtendedPrefix(encoded, context)

    def decode_step(
        self,
        prefix: ExtendedPrefix,
        cache: WrittenCache,
        generated: jax.Array,
        step: jax.Array,
        *,
        mask_id: int,
        token_type: int,
    ) -> tuple[jax.Array, WrittenCache]:
        """As VLP's."""
        ids = {"mask_id": mask_id, "token_type": token_type}
        hidden, cache = append_mask(self.bert, prefix.encoded, cache, generated, step, **ids)
        said = None
        if prefix.context is not None:
            answer = generated.reshape(*hidden.shape[:2], -1)  # [B, beams, T]
            same = answer[..., None] == prefix.context.ids[:, None, None]  # [B, beams, T, L]
            written = jnp.arange(answer.shape[2]) < step
            said = (same & written[:, None]).any(axis=2)  # [B, beams, L]
        log_probs = self.token_log_probs(hidden, prefix.context, said)
        return log_probs.reshape(len(generated), -1), cache


class ClipRegionEncoder(RegionEncoder):
    """Patches of raw pixels -> CLIP's patch features -> linears, as RegionEncoder.

    The tower is in front of the model within the same jitted step, not in the input pipeline:
    it then sees whole batches on the accelerator, and a picture travels as its pixels, which the
    host keeps decoded; float features of WebQA's 390,000 pictures would be 200 GB and more, and
    made one by one on the host they would hold up every step. It is frozen, and saved with the
    run, so that a trained model needs no second folder.
    """

    def __init__(
        self, vision: VisionConfig, layer: int, sizes: tuple[int, ...], rate: float, dtype: str,
        *, rngs: nnx.Rngs, stddev: float | None,
    ):  # fmt: skip
        super().__init__(vision.width, sizes, rate, dtype, rngs=rngs, stddev=stddev)
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
    """Copies answer tokens from source and question (See et al. 2017, pointer-generator).

    Ours, not VLP's. A position attends once over the last layer's context and mixes the tokens
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
        """hidden [B, P, H], logits [B, P, W] of the first tokens -> log-probabilities [B, P, V].

        said [B, P, L] bool: context tokens that the answer holds before that position.
        """
        rows, length, written = logits.shape
        copied, gate = self._attend(hidden, context, said)
        same = context.ids[:, :, None] == context.ids[:, None]  # [B, L, L]
        # Every occurrence of a token together:
        copied = jnp.einsum("bpl,blk->bpk", copied, same.astype(jnp.float32))
        # Only W written and L copied tokens need logarithms: those of all V would cost more than
        # the rest of a step of decoding.
        log_gate = jax.nn.log_sigmoid(gate)[:, :, None]
        index = (jnp.arange(rows)[:, None, None], jnp.arange(length)[:, None], context.ids[:, None])
        log_probs = jnp.broadcast_to(log_gate + jnp.log(_LEAST), (rows, length, vocabulary))
        log_probs = log_probs.at[index].set(log_gate + jnp.log(copied + _LEAST))
        log_written = jax.nn.log_sigmoid(-gate)[:, :, None] + jax.nn.log_softmax(logits)
        mixed = jnp.logaddexp(log_written, log_probs[:, :, :written])
        return jnp.concatenate([mixed, log_probs[:, :, written:]], axis=-1)

    def of_tokens(
        self,
        hidden: jax.Array,
        logits: jax.Array,
        context: Context,
        said: jax.Array,
        ids: jax.Array,
    ) -> jax.Array:
        """As `__call__`, but only of the tokens ids [B, P]: log-probabilities [B, P].

        Training needs no others; whole distributions over the vocabulary would cost it more
        than the trunk's layers.
        """
        copied, gate = self._attend(hidden, context, said)
        same = context.ids[:, None] == ids[:, :, None]  # [B, P, L]
        return _mix(gate, _log_probs_of(logits, ids), jnp.where(same, copied, 0.0).sum(axis=-1))

    def _attend(
        self, hidden: jax.Array, context: Context, said: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Share of every context token [B, P, L], and the log-odds of copying [B, P].

        What was said already is scored differently: a list names each of its items once
        (See et al. 2017, coverage).
        """
        query, key = self.query(hidden), self.key(context.hidden)
        scores = jnp.einsum("bph,blh->bpl", query, key) / key.shape[-1] ** 0.5
        scores = (scores + said * self.again(hidden)).astype(jnp.float32)
        scores = jnp.where(context.mask[:, None], scores, -jnp.inf)
        return jax.nn.softmax(scores), self.gate(hidden)[:, :, 0].astype(jnp.float32)


def _mix(gate: jax.Array, log_token: jax.Array, copied: jax.Array) -> jax.Array:
    """log((1 - g) * p(token) + g * p(copied)), g = sigmoid(gate)."""
    return jnp.logaddexp(
        jax.nn.log_sigmoid(-gate) + log_token, jax.nn.log_sigmoid(gate) + jnp.log(copied + _LEAST)
    )


def _log_probs_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax(logits [..., W]) at ids [...]; a token beyond W is never written."""
    there = jnp.minimum(ids, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(logits, there[..., None], axis=-1)[..., 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(ids < logits.shape[-1], log_probs, _NEVER)
