"""The model of Atlas's small reader (ours; configs/atlas): VLP that copies words and reads tags.

The data's part is data/atlas/reader.py, the tasks' part tasks/vlp.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.vlp import network as vlp

# Log-probability of a token that cannot be written; finite, so that gradients stay numbers.
_NEVER = -1e9
_LEAST = 1e-20  # added to the share of a copied token, so that none has the logarithm of 0


@dataclasses.dataclass(frozen=True)
class AtlasVLPConfig(vlp.VLPConfig):
    """A VLP with some additions; with none of them it is VLP itself."""

    # The embedding of a region slot's token (a tag) is added to its content.
    region_tags: bool = False
    copy_head: bool = False  # see CopyHead
    # The masked-LM head writes only the first tokens of the vocabulary, all others are copied (as
    # in pointer-generator networks, whose generator knows only common words).
    written_words: int | None = None

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

    def build(self, *, rngs: nnx.Rngs) -> AtlasVLP:
        return AtlasVLP(self, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class AtlasVLPModel(vlp.VLPModel):
    """The section `model` of VLP with additions."""

    # whole, where, colors, tags: of the frontend patches: further regions and position values (see
    # data.atlas.reader.AtlasRegions); with `tags` slots hold tokens.
    whole: bool = False
    where: bool = False
    colors: bool = False
    tags: bool = False
    copy_head: bool = False  # whether answers may copy the context's tokens
    # With a copy head: how many tokens are written, the first ones.
    written_words: int | None = None

    def config(self, vocab_size: int, region_positions: int = 6) -> vlp.VLPConfig:
        config = super().config(vocab_size, region_positions)
        added = self.tags or self.copy_head or self.written_words is not None
        if self.frontend != "patches" or not added:
            return config
        return AtlasVLPConfig(
            **vars(config),
            region_tags=self.tags,
            copy_head=self.copy_head,
            written_words=self.written_words,
        )


@flax.struct.dataclass
class ProbedInputs(vlp.VLPInputs):
    """A packed batch with probes: [MASK]s behind the answer that each predict one token of it.

    A probe sees itself and the answer tokens whose position is before its own, as the [MASK]
    appended in decoding does; nothing else sees it.
    """

    probe_mask: jax.Array = dataclasses.field(kw_only=True)  # [B, L] bool

    def attention_mask(self) -> jax.Array:
        order, probes = self.position_ids, self.probe_mask[:, :, None]
        earlier = order[:, None, :] < order[:, :, None]
        seen = probes & self.answer_mask[:, None, :] & earlier
        seen |= probes & jnp.eye(order.shape[-1], dtype=bool)
        return super().attention_mask() | seen[:, None]


@flax.struct.dataclass
class Context:
    """Source and question as the last layer sees them: what a copy head copies from."""

    hidden: jax.Array  # [B, L, H]
    ids: jax.Array  # [B, L] int
    mask: jax.Array  # [B, L] bool


@flax.struct.dataclass
class AtlasPrefix:
    """What decoding keeps of source and question."""

    encoded: vlp.Prefix
    context: Context | None  # only for a model with a copy head


# Parameters that no published checkpoint has (a KeyMap's `fresh`).
FRESH = (r"^copy_head/",)


def add_types(model: vlp.VLP, numbers: Sequence[int]) -> None:
    """Makes token types mean something that the model's pretrained weights have no type for.

    To each a random vector of length 1, that of a token, is added, in place: a copy of another
    type, like those VLP starts from, is distinguished only after hundreds of steps.
    """
    trunk = model.config.bert
    if not all(0 <= number < trunk.types for number in numbers):
        raise UserError(
            f"config key new_types={tuple(numbers)}: token types 0 to {trunk.types - 1} were "
            "expected; change the config."
        )
    table = model.bert.embeddings.token_type.table
    for number in numbers:
        vector = jax.random.normal(jax.random.key(number), (trunk.hidden,), table.dtype)
        table[...] = table[...].at[number].add(vector / jnp.linalg.norm(vector))


def said_before(inputs: vlp.VLPInputs, positions: jax.Array) -> jax.Array:
    """Which tokens of the sequence the answer holds before columns `positions` [B, P].

    Returns bool [B, P, L]; a token that is masked there is not held.
    """
    ids, order = inputs.input_ids, inputs.position_ids
    same = ids[:, :, None] == ids[:, None, :]  # [B, answer L, L]
    wanted = jnp.take_along_axis(order, positions, axis=1)  # [B, P]
    earlier = inputs.answer_mask[:, None] & (order[:, None] < wanted[:, :, None])  # [B, P, L]
    return jnp.einsum("bpa,bal->bpl", earlier.astype(jnp.float32), same.astype(jnp.float32)) > 0


class AtlasVLP(vlp.VLP):
    """VLP with the additions that its config names.

    The config of a model without them (TwoSidedVLP's) may be any VLP's.
    """

    def __init__(self, config: vlp.VLPConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        copies = isinstance(config, AtlasVLPConfig) and config.copy_head
        self.copy_head = CopyHead(config.bert.hidden, rngs=rngs) if copies else None

    @property
    def region_tags(self) -> bool:
        """Whether region slots hold tokens."""
        return isinstance(self.config, AtlasVLPConfig) and self.config.region_tags

    @property
    def _written_words(self) -> int | None:
        return self.config.written_words if isinstance(self.config, AtlasVLPConfig) else None

    def _embed_content(self, inputs: vlp.VLPInputs, dropout_key: jax.Array | None) -> jax.Array:
        content = super()._embed_content(inputs, dropout_key)
        if not self.region_tags:
            return content
        slots = inputs.input_ids[:, 1 : 1 + content.shape[1]]
        return content + self.bert.embeddings.word(slots).astype(content.dtype)

    def mlm_logits(self, hidden: jax.Array) -> jax.Array:
        """Computes VLP's logits; with `config.written_words` = W those of the first W tokens."""
        return self.mlm_head(hidden, self.bert.embeddings.word, self._written_words)

    def answer_log_probs(
        self,
        inputs: vlp.VLPInputs,
        positions: jax.Array,
        ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes VLP's log-probabilities; tokens neither written nor in the context have none."""
        hidden, at_masks = self._encode_at(inputs, positions, dropout_key)
        context = Context(hidden, inputs.input_ids, inputs.context_mask)
        already_said = said_before(inputs, positions)  # [B, P, L]
        log_probs = self.log_probs_of(at_masks, context, already_said, ids)
        return log_probs, self.sayable(context, ids)

    def token_log_probs(
        self, hidden: jax.Array, context: Context | None, already_said: jax.Array | None
    ) -> jax.Array:
        """Hidden states [B, P, H] -> log-probabilities of tokens [B, P, V], float32.

        `context` is what a copy head copies from, `already_said` [B, P, L] bool which of its
        tokens the answer holds already; a model without a copy head ignores both.
        """
        logits = self.mlm_logits(hidden)
        if self.copy_head is None:
            return jax.nn.log_softmax(logits)
        return self.copy_head(hidden, logits, context, already_said, self.config.bert.vocab_size)

    def sayable(self, context: Context, ids: jax.Array) -> jax.Array:
        """Whether the tokens ids [B, P] can be written or copied at all, bool [B, P]."""
        written = self._written_words
        if written is None:
            return jnp.ones(ids.shape, bool)
        same = (context.ids[:, None] == ids[:, :, None]) & context.mask[:, None]  # [B, P, L]
        return (ids < written) | same.any(axis=-1)

    def log_probs_of(
        self, hidden: jax.Array, context: Context, already_said: jax.Array, ids: jax.Array
    ) -> jax.Array:
        """`token_log_probs` of only the tokens ids [B, P]: [B, P], for training."""
        logits = self.mlm_logits(hidden)
        if self.copy_head is None:
            return _log_probs_of(logits, ids)
        return self.copy_head.of_tokens(hidden, logits, context, already_said, ids)

    def prefill(self, inputs: vlp.VLPInputs) -> AtlasPrefix:
        """Encodes the prompt as VLP does, with what a copy head copies from."""
        hidden, encoded = self._encode_context(inputs)
        context = None
        if self.copy_head is not None:
            context = Context(hidden, inputs.input_ids, inputs.context_mask)
        return AtlasPrefix(encoded, context)

    def decode_step(
        self,
        prefix: AtlasPrefix,
        cache: vlp.WrittenCache,
        generated: jax.Array,
        step: jax.Array,
        *,
        mask_id: int,
        token_type: int,
    ) -> tuple[jax.Array, vlp.WrittenCache]:
        """Computes one step as VLP does."""
        ids = {"mask_id": mask_id, "token_type": token_type}
        hidden, cache = vlp.append_mask(self.bert, prefix.encoded, cache, generated, step, **ids)
        prefixes, beams, _ = cache.ancestry.slots.shape
        hidden, already_said = hidden.reshape(prefixes, beams, -1), None
        if prefix.context is not None:
            answer = generated.reshape(prefixes, beams, -1)  # [B, beams, T]
            same = answer[..., None] == prefix.context.ids[:, None, None]  # [B, beams, T, L]
            written = jnp.arange(answer.shape[2]) < step
            already_said = (same & written[:, None]).any(axis=2)  # [B, beams, L]
        log_probs = self.token_log_probs(hidden, prefix.context, already_said)
        return log_probs.reshape(len(generated), -1), cache


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
        already_said: jax.Array,
        vocabulary: int,
    ) -> jax.Array:
        """hidden [B, P, H], logits [B, P, W] of the first tokens -> log-probabilities [B, P, V].

        already_said [B, P, L] bool: context tokens that the answer holds before that position.
        """
        rows, length, written = logits.shape
        copied, gate = self._attend(hidden, context, already_said)
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
        already_said: jax.Array,
        ids: jax.Array,
    ) -> jax.Array:
        """Computes log-probabilities [B, P] of the tokens ids [B, P] alone.

        Training needs no others; whole distributions over the vocabulary would cost it more
        than the trunk's layers.
        """
        copied, gate = self._attend(hidden, context, already_said)
        same = context.ids[:, None] == ids[:, :, None]  # [B, P, L]
        return _mix(gate, _log_probs_of(logits, ids), jnp.where(same, copied, 0.0).sum(axis=-1))

    def _attend(
        self, hidden: jax.Array, context: Context, already_said: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Share of every context token [B, P, L], and the log-odds of copying [B, P].

        What was said already is scored differently: a list names each of its items once
        (See et al. 2017, coverage).
        """
        query, key = self.query(hidden), self.key(context.hidden)
        scores = jnp.einsum("bph,blh->bpl", query, key) / key.shape[-1] ** 0.5
        scores = (scores + already_said * self.again(hidden)).astype(jnp.float32)
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
