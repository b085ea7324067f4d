"""VLP's source head over two sides that are encoded apart and meet in the upper layers (ours).

WebQA (section 6.2) gives up ranking its whole collection with VLP: every pair of question and
source is encoded by all layers again. Here the same parameters attend otherwise:

    source side      [CLS] regions, source text     sees the source alone, in every layer
    question side    [CLS] question                 the lower layers: sees the question alone
                                                    the upper `joint_layers`: the source too

So all that a pair needs of its source are the keys and values of the upper layers, computed once
per source (`encode_sources`); the lower layers of a question are computed once per question
(`encode_questions`); a pair costs the upper layers of the question's few tokens (`pair_logits`),
with one layer the computation of a single token. The question's [CLS] is what the head reads; it
takes the column of VLP's first [SEP], with position 0, whatever the source's length.

`source_logits` computes the same from VLP's packed sequence with a mask per group of layers: what
training runs. Deformer (Cao et al. 2020) and PreTTR (MacAvaney et al. 2020) split BERT's lower
layers so; that source tokens never see the question, in any layer, is what makes the upper ones
cacheable too.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import BertLayer
from mmqa_jax.models.common.layers import prefix_attention, scan_layers, split_key
from mmqa_jax.models.vlp.atlas_reader import AtlasVLP
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs


@dataclasses.dataclass(frozen=True)
class TwoSides:
    """How the two sides of a sequence are distinguished and where they meet."""

    # Upper layers in which the question sees the source; the others, and all of the source's, know
    # one side only.
    joint_layers: int
    question_type: int = 5  # token type of the question (VLP: 5)
    # Token type of question tokens that are in the source too; None: no such mark. It replaces
    # `question_type` where the joint layers begin. What PackingConfig's `match_types` says on the
    # source's tokens would make the source depend on the question.
    match_type: int | None = None

    def check(self, config: VLPConfig) -> None:
        """Raises UserError if a VLP of this config has no such layers or token types."""
        layers, types = config.bert.layers, config.bert.types
        if not 1 <= self.joint_layers <= layers:
            raise UserError(
                f"config key model.joint_layers={self.joint_layers}: 1 to the {layers} layers of "
                "the model were expected; change it."
            )
        if self.match_type is not None and not 0 <= self.match_type < types:
            raise UserError(
                f"config key model.match_type={self.match_type}: the model has no such token type; "
                f"use 0 to {types - 1}, or None for no mark."
            )
        if not 0 <= self.question_type < types:
            raise UserError(
                f"config key packing.segments: the model has no token type {self.question_type}; "
                f"use 0 to {types - 1}."
            )


class Sides(NamedTuple):
    """A packed sequence with its sides separated."""

    inputs: VLPInputs  # the question with its own positions, its [CLS] instead of [SEP]
    source: jax.Array  # [B, L] bool: columns of the source side
    question: jax.Array  # [B, L] bool: columns of the question side, its [CLS] included
    text: jax.Array  # [B, L] bool: the same without its [CLS]
    readout: jax.Array  # [B] int: column of the question's [CLS]
    ids: jax.Array  # [B, L] int: token ids of the source, -1 elsewhere


@flax.struct.dataclass
class SourceMemory:
    """What pairs need of their sources; L columns."""

    key: jax.Array  # [S, joint_layers, L, heads, head_dim]
    value: jax.Array  # [S, joint_layers, L, heads, head_dim]
    mask: jax.Array  # [S, L] bool
    ids: jax.Array  # [S, L] int: token ids, -1 where there is none


@flax.struct.dataclass
class QuestionStates:
    """What pairs need of their questions: T tokens, the question's [CLS] first.

    With a type for matches every token is there twice, K = 2 T: plain, then marked; a pair sees
    one of the two. R = K, but with one joint layer R = 1, the [CLS], which is never marked.
    """

    hidden: jax.Array  # [Q, R, H] as the joint layers receive them
    query: jax.Array  # [Q, R, heads, head_dim] in the first joint layer
    key: jax.Array  # [Q, K, heads, head_dim]
    value: jax.Array  # [Q, K, heads, head_dim]
    mask: jax.Array  # [Q, T] bool
    ids: jax.Array  # [Q, T] int: token ids, -2 where there is none


class TwoSidedVLP(AtlasVLP):
    """VLP's parameters under the attention that this file describes."""

    def __init__(self, config: VLPConfig, sides: TwoSides, *, rngs: nnx.Rngs):
        sides.check(config)
        super().__init__(config, rngs=rngs)
        self.sides = sides

    @classmethod
    def of(cls, model: VLP, sides: TwoSides) -> TwoSidedVLP:
        """A VLP with its parameters, arrays shared, under the two-sided attention."""
        built = nnx.eval_shape(lambda: cls(model.config, sides, rngs=nnx.Rngs()))
        return nnx.merge(nnx.graphdef(built), nnx.state(model))

    def source_logits(
        self, inputs: VLPInputs, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Source selection from packed sequences: [B, 2] in float32; class 0 = relevant.

        For training: as much work as VLP itself, nothing is kept.
        """
        embedding, in_lower, in_upper, of_weights, in_last = split_key(dropout_key, 5)
        laid = self._split_sides(inputs)
        source, question = laid.source, laid.question
        apart = _outer(question, question) | _outer(source, source)
        joint = apart | _outer(question, source)
        x = self._embed(laid.inputs, embedding)  # [B, L, H]
        x = self._run(0, self._lower, x, apart, in_lower)
        if self.sides.match_type is not None:
            matched = laid.text & is_among(laid.inputs.input_ids, laid.ids)
            x = x + jnp.where(matched[..., None], self._mark(laid.inputs), 0)
        x = self._run(self._lower, -1, x, joint, in_upper)
        last = self._layer(-1)
        asking = jnp.take_along_axis(x, laid.readout[:, None, None], axis=1)  # [B, 1, H]
        _, key, value = last.project(x)
        seen = (source | question)[:, None, None]
        attended = last.attend(last.project(asking)[0], key, value, seen, of_weights)
        asking = last.finish(asking, attended, in_last)
        return self.source_head(asking[:, 0]).astype(jnp.float32)

    def encode_sources(self, inputs: VLPInputs) -> SourceMemory:
        """Sequences packed without a question, [CLS] regions, text [SEP] -> what pairs need."""
        laid = self._split_sides(inputs)
        mask = laid.source[:, None, None]

        def body(layer: BertLayer, x, _, key):
            query, *pair = layer.project(x)
            return layer.finish(x, layer.attend(query, *pair, mask)), pair

        x = self._run(0, self._lower, self._embed(laid.inputs, None), mask)
        pair = [[], []]
        if self.sides.joint_layers > 1:
            x, pair = scan_layers(self._stack(self._lower, -1), x, body, unroll=self._unroll)
            pair = [list(part) for part in pair]
        for part, last in zip(pair, self._layer(-1).project(x)[1:], strict=True):
            part.append(last)  # its queries and what follows would not be used
        key, value = (jnp.stack(part, axis=1) for part in pair)
        return SourceMemory(key, value, laid.source, laid.ids)

    def encode_questions(self, inputs: VLPInputs) -> QuestionStates:
        """Sequences packed without a source and without region slots, [CLS] [SEP] question."""
        laid = self._split_sides(inputs)
        x = self._embed(laid.inputs, None)
        x = self._run(0, self._lower, x, laid.question[:, None, None])
        tokens = x[:, 1:]  # without VLP's [CLS], which is the source's
        if self.sides.match_type is not None:
            tokens = jnp.concatenate([tokens, (x + self._mark(laid.inputs))[:, 1:]], axis=1)
        rows = 1 if self.sides.joint_layers == 1 else tokens.shape[1]
        query, key, value = self._layer(self._lower).project(tokens)
        ids = jnp.where(laid.text, laid.inputs.input_ids, -2)[:, 1:]
        return QuestionStates(
            tokens[:, :rows], query[:, :rows], key, value, laid.question[:, 1:], ids
        )

    def pair_logits(self, sources: SourceMemory, questions: QuestionStates) -> jax.Array:
        """Every question with every source: [S, Q, 2] in float32, as `source_logits` gives."""
        number, length = questions.mask.shape
        pairs = (len(sources.mask), number)
        matched = is_among(questions.ids, sources.ids[:, None])  # [S, Q, T]
        seen = jnp.broadcast_to(questions.mask, matched.shape)
        if self.sides.match_type is not None:
            seen = jnp.concatenate([seen & ~matched, seen & matched], axis=-1)  # [S, Q, K]

        def of_pairs(x: jax.Array) -> jax.Array:  # [Q, R, ...] -> [S, Q, T or 1, ...]
            if x.shape[1] != 2 * length:
                return jnp.broadcast_to(x, (*pairs, *x.shape[1:]))
            which = matched.reshape(*matched.shape, *[1] * (x.ndim - 2))
            return jnp.where(which, x[:, length:], x[:, :length])

        first = _pair_attention(
            of_pairs(questions.query),
            sources.key[:, 0],
            sources.value[:, 0],
            sources.mask,
            questions.key,
            questions.value,
            seen,
        )
        x = self._layer(self._lower).finish(of_pairs(questions.hidden), first)  # [S, Q, T or 1, H]
        if self.sides.joint_layers > 1:
            x = self._later_layers(x.reshape(-1, *x.shape[2:]), sources, questions.mask)
        return self.source_head(x.reshape(*pairs, -1)).astype(jnp.float32)

    def _later_layers(self, x: jax.Array, sources: SourceMemory, mask: jax.Array) -> jax.Array:
        """The joint layers behind the first: x [S * Q, T, H] -> [S * Q, H] of the [CLS]."""
        question_mask = jnp.tile(mask, (len(sources.mask), 1))[:, None, None]  # [S * Q, 1, 1, T]
        keys, values = (jnp.moveaxis(part, 1, 0)[1:] for part in (sources.key, sources.value))

        def attend(query, key, value, own_key, own_value):
            return prefix_attention(
                query, key, value, sources.mask, own_key, own_value, mask=question_mask
            )

        def body(layer: BertLayer, x, memory, _):
            query, *of_question = layer.project(x)
            return layer.finish(x, attend(query, *memory, *of_question)), None

        if self.sides.joint_layers > 2:
            between, memory = self._stack(self._lower + 1, -1), (keys[:-1], values[:-1])
            x, _ = scan_layers(between, x, body, xs=memory, unroll=self._unroll)
        last = self._layer(-1)
        _, *of_question = last.project(x)
        query = last.project(x[:, :1])[0]
        return last.finish(x[:, :1], attend(query, keys[-1], values[-1], *of_question))[:, 0]

    def _split_sides(self, inputs: VLPInputs) -> Sides:
        """Separates the sides of packed sequences: the question is their last part."""
        ids, context = inputs.input_ids, inputs.context_mask
        columns = jnp.arange(ids.shape[1])
        text = context & (inputs.token_type_ids == self.sides.question_type)
        end = jnp.max(jnp.where(context, columns, -1), axis=1)
        readout = end - text.sum(axis=1)  # where VLP has its first [SEP]
        there = columns == readout[:, None]
        question = text | there
        source = context & ~question
        first_token = 1 if self.region_tags else 1 + inputs.region_features.shape[1]
        laid = inputs.replace(
            input_ids=jnp.where(there, ids[:, :1], ids),
            position_ids=jnp.where(question, columns - readout[:, None], inputs.position_ids),
        )
        source_ids = jnp.where(source & (columns >= first_token), ids, -1)
        return Sides(laid, source, question, text, readout, source_ids)

    def _mark(self, inputs: VLPInputs) -> jax.Array:
        """What the embedding of a token gains by the type for matches: [B, L, H]."""
        types = jnp.full_like(inputs.token_type_ids, self.sides.match_type)
        marked, plain = (
            self.bert.embeddings(inputs.input_ids, inputs.position_ids, kind)
            for kind in (types, inputs.token_type_ids)
        )
        return marked - plain

    @property
    def _lower(self) -> int:
        return self.config.bert.layers - self.sides.joint_layers

    @property
    def _unroll(self) -> int | bool | None:
        return self.config.bert.unroll

    def _stack(self, start: int, stop: int) -> nnx.Module:
        graphdef, params = nnx.split(self.bert.layers)
        return nnx.merge(graphdef, jax.tree.map(lambda p: p[start:stop], params))

    def _layer(self, index: int) -> BertLayer:
        graphdef, params = nnx.split(self.bert.layers)
        return nnx.merge(graphdef, jax.tree.map(lambda p: p[index], params))

    def _run(
        self,
        start: int,
        stop: int,
        x: jax.Array,
        mask: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Layers start to stop (not included) over x [B, L, H], mask as in `Bert.encode`."""

        def body(layer: BertLayer, x, _, key):
            return layer(x, mask, key), None

        trunk = self.config.bert
        if start == stop % trunk.layers:
            return x
        return scan_layers(
            self._stack(start, stop),
            x,
            body,
            dropout_key=dropout_key,
            remat=trunk.remat,
            products=False,
            unroll=trunk.unroll,
        )[0]


def _outer(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """bool [B, L] each -> [B, 1, L, L]: the rows that see the columns."""
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def is_among(ids: jax.Array, others: jax.Array) -> jax.Array:
    """Which of ids [..., T] are among others [..., L]: bool [..., T]."""
    return (ids[..., :, None] == others[..., None, :]).any(axis=-1)


def _pair_attention(
    query: jax.Array,
    source_key: jax.Array,
    source_value: jax.Array,
    source_mask: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Attention of every question over every source and over the question itself.

    query [S, Q, R, heads, head_dim] of R tokens; source_key, source_value [S, L, heads, head_dim],
    source_mask bool [S, L]; key, value [Q, K, heads, head_dim] of the question's own columns, mask
    bool [S, Q, K]. Neither side is repeated for the other. One softmax, in float32.
    Returns [S, Q, R, heads, head_dim]: what `layers.attention` gives for the concatenation.
    """
    query = query * query.shape[-1] ** -0.5
    exact = {"preferred_element_type": jnp.float32}
    there = jnp.einsum("sqrhd,slhd->sqrhl", query, source_key, **exact)
    own_scores = jnp.einsum("sqrhd,qkhd->sqrhk", query, key, **exact)
    there = jnp.where(source_mask[:, None, None, None], there, -jnp.inf)
    # No row is masked alone: a question sees its [CLS].
    own_scores = jnp.where(mask[:, :, None, None], own_scores, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([there, own_scores], axis=-1)).astype(value.dtype)
    length = source_mask.shape[1]
    out = jnp.einsum("sqrhl,slhd->sqrhd", weights[..., :length], source_value)
    return out + jnp.einsum("sqrhk,qkhd->sqrhd", weights[..., length:], value)
