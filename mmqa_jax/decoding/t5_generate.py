"""Generation by a T5, each way entirely inside one jit: sampling, beam search, scores of answers.

The source is encoded once, and each decoder layer's keys and values of it are computed once for all
beams of a prompt. The beams' own keys and values are never copied when beams are reordered
(`models.attention.masked`). All beams of a prompt are rows of one product.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult, BeamState, WrittenCache
from mmqa_jax.decoding.sampling import SamplingParameters, choose
from mmqa_jax.models.attention.masked import Ancestry
from mmqa_jax.models.common.encoder_decoder import relative_buckets
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5, T5Layer, Texts, bias_of


def _empty(config: T5Config, prompts: int, beams: int, most: int) -> WrittenCache:
    """Zeros for `beams` sequences of `most` tokens for each of `prompts` prompts."""
    shape = (prompts, most * beams, config.heads, config.head_size)
    zeros = jnp.zeros(shape, config.dtype)
    layers = ((zeros, zeros),) * config.decoder_layers
    return WrittenCache(layers, Ancestry.empty(prompts, beams, most))


class _Decoder:
    """A T5's decoder over an encoded batch, token by token; of the trace of one program.

    Args:
      inputs: of its encoder.
      most: new tokens at most.
    """

    def __init__(self, model: T5, inputs: Texts, most: int):
        source = inputs.encode(model)
        self._model, self._mask = model, source.mask[:, None, None, :]
        # Taken apart here, not in the loop, in which every step would copy them out of the stack.
        self._layers: list[T5Layer] = list(model.decoder.each_layer())
        self._source = [layer.cross.keys_values(source.states) for layer in self._layers]
        config = model.config
        self._buckets = relative_buckets(
            np.arange(most), buckets=config.buckets, farthest=config.farthest, bidirectional=False
        )
        self._between = model.decoder.source_buckets(np.arange(most), source.states.shape[1])

    def step(
        self, cache: WrittenCache, tokens: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, WrittenCache]:
        """Logits [B * K, V] behind tokens [B, K], the `step`-th decoder inputs, and the cache."""
        model, beams, most = self._model, tokens.shape[1], len(self._buckets)
        ancestry = cache.ancestry.written(step)
        seen = ancestry.visible(step + 1)[:, None]  # [B, 1, K, T * K]
        back = jnp.maximum(step - jnp.arange(most), 0)
        of_token = model.decoder.relative(jnp.asarray(self._buckets)[back])  # [T, heads]
        bias = jnp.repeat(of_token.astype(jnp.float32), beams, axis=0).T[None, :, None]
        between = None
        if model.decoder.between is not None:
            row = jax.lax.dynamic_slice_in_dim(jnp.asarray(self._between), step, 1)
            between = bias_of(model.decoder.between, row)  # [1, heads, 1, S]
        x, written = model.embed(tokens), []  # [B, K, H]
        for layer, of_source, columns in zip(self._layers, self._source, cache.layers, strict=True):
            y = layer.attention_norm(x)
            columns = tuple(
                jax.lax.dynamic_update_slice(held, new, (0, step * beams, 0, 0))
                for held, new in zip(columns, layer.attention.keys_values(y), strict=True)
            )
            x = x + layer.attention.attend(layer.attention.queries(y), *columns, bias, seen)
            q = layer.cross.queries(layer.cross_norm(x))
            x = x + layer.cross.attend(q, *of_source, between, self._mask)
            x = x + layer.feed_forward(x)
            written.append(columns)
        logits = model.logits(model.decoder.norm(x).reshape(tokens.size, -1))
        return logits, WrittenCache(tuple(written), ancestry)


@flax.struct.dataclass
class Drawn:
    """Generated sequences."""

    tokens: jax.Array  # int [B, T], end token included
    log_probs: jax.Array  # float32 [B, T], of each token under the model itself
    lengths: jax.Array  # int [B], end token included


@functools.partial(jax.jit, static_argnames=("end_ids", "max_new_tokens"))
def draw(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    inputs: Texts,
    parameters: SamplingParameters,
    most: jax.Array,
    *,
    end_ids: tuple[int, ...],
    max_new_tokens: int,
) -> Drawn:
    """Greedy decoding and sampling, one sequence a row; (graphdef, state) = nnx.split(T5).

    Args:
      inputs: Texts, Passages or PicturedTexts, which the model's encoder reads.
      parameters: of the rows.
      most: int [B], new tokens of each row, up to `max_new_tokens`.
      end_ids: end an answer.

    One compilation per batch shape.
    """
    model, rows = nnx.merge(graphdef, state), inputs.input_ids.shape[0]
    decoder = _Decoder(model, inputs, max_new_tokens)
    shape = (rows, max_new_tokens)

    def unfinished(carry):
        return ~jnp.all(carry[3])

    def step(carry):
        number, last, drawn, ended, cache = carry
        logits, cache = decoder.step(cache, last[:, None], number)
        counts = jnp.full(rows, number)
        tokens, log_probs = choose(logits, parameters, counts, ~ended)
        place = (0, number)
        drawn = Drawn(
            jax.lax.dynamic_update_slice(drawn.tokens, tokens[:, None], place),
            jax.lax.dynamic_update_slice(drawn.log_probs, log_probs[:, None], place),
            drawn.lengths + ~ended,
        )
        ended |= jnp.isin(tokens, jnp.array(end_ids, jnp.int32)) | (number + 1 >= most)
        return number + 1, tokens, drawn, ended, cache

    carry = (
        jnp.zeros((), jnp.int32),
        jnp.full(rows, model.config.start, jnp.int32),
        Drawn(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(rows, jnp.int32)),
        most < 1,
        _empty(model.config, rows, 1, max_new_tokens),
    )
    return jax.lax.while_loop(unfinished, step, carry)[2]


@functools.partial(
    jax.jit,
    static_argnames=("end_id", "num_beams", "max_new_tokens", "length_penalty", "early_stopping"),
)
def beam_search(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    inputs: Texts,
    *,
    end_id: int,
    num_beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 0.0,
    early_stopping: bool = False,
) -> BeamResult:
    """The `num_beams` best answers to a batch of sources, as transformers' `generate` finds them.

    Args:
      inputs: Texts, Passages or PicturedTexts, which the model's encoder reads.
      end_id: ends an answer.
      length_penalty, early_stopping: see `advance` and `complete`.

    One compilation per batch shape.
    """
    model, prompts = nnx.merge(graphdef, state), inputs.input_ids.shape[0]
    if not 1 <= num_beams <= model.config.vocab_size // 2:
        raise UserError(
            f"num_beams is {num_beams}: expected 1 to half of the vocabulary, "
            f"{model.config.vocab_size // 2}; change it."
        )
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}: expected 1 or more; raise it.")
    decoder = _Decoder(model, inputs, max_new_tokens)
    scoring = {"length_penalty": length_penalty, "early_stopping": early_stopping}

    def propose(beams, cache):
        before = jnp.maximum(beams.step - 1, 0)
        last = jnp.where(beams.step == 0, model.config.start, beams.tokens[:, :, before])
        logits, cache = decoder.step(cache, last, beams.step)
        return jax.nn.log_softmax(logits), cache

    return beam.run(
        beam.start(prompts, num_beams, max_new_tokens),
        _empty(model.config, prompts, num_beams, max_new_tokens),
        propose=propose,
        advance=functools.partial(advance, end_id=end_id, **scoring),
        complete=functools.partial(complete, **scoring),
    )


def advance(
    state: BeamState,
    log_probs: jax.Array,
    *,
    end_id: int,
    length_penalty: float = 0.0,
    early_stopping: bool = False,
) -> tuple[BeamState, jax.Array]:
    """One step: log_probs [B * K, V] of the next token -> new state and parents [B, K].

    Those among the first K of the 2 K best continuations that end become hypotheses. V is at least
    2 K. A row that is complete stays so: its beams get the score -inf. Original: transformers
    generation/utils.py (GenerationMixin._beam_search), one end token, no processors.
    """
    beams = state.tokens.shape[1]
    new_state, parents = beam.advance_hypotheses(
        state,
        log_probs,
        ends=(end_id,),
        length_penalty=length_penalty,
        candidates=2 * beams,
        closing=lambda ending, last: (ending | last) & (jnp.arange(2 * beams) < beams),
    )
    done = complete(new_state, length_penalty=length_penalty, early_stopping=early_stopping)
    return new_state.replace(scores=jnp.where(done[:, None], -jnp.inf, new_state.scores)), parents


def complete(
    state: BeamState, *, length_penalty: float = 0.0, early_stopping: bool = False
) -> jax.Array:
    """[B] bool: the hypotheses of a row are final.

    With `early_stopping` once there are K; otherwise once the best beam, were it to end now, would
    not be better than the worst of them. With a positive length penalty that is a guess, since
    longer ones count for more; it is transformers' own.
    """
    full = jnp.all(state.final_lengths > 0, axis=1)
    if early_stopping:
        return full
    reachable = state.scores.max(axis=1) / jnp.maximum(state.step, 1) ** length_penalty
    return full & (reachable <= state.final_scores.min(axis=1))


@flax.struct.dataclass
class Scored:
    """What a model gives every token of given answers, [B, T] each."""

    log_probs: jax.Array  # float32, of the token
    likeliest: jax.Array  # int, the likeliest token in its place
    highest: jax.Array  # float32, log-probability of that


@jax.jit
def score(graphdef: nnx.GraphDef, state: nnx.State, inputs: Texts, target_ids: jax.Array) -> Scored:
    """Log-probabilities of given answers, teacher forced; (graphdef, state) = nnx.split(T5).

    Args:
      inputs: Texts, Passages or PicturedTexts, which the model's encoder reads.
      target_ids: int [B, T], padded on the right; what stands there is the caller's to leave out.
    """
    model = nnx.merge(graphdef, state)
    source = inputs.encode(model)
    log_probs = jax.nn.log_softmax(model.encoded_target_logits(*source, target_ids))
    of_target = jnp.take_along_axis(log_probs, target_ids[:, :, None], axis=-1)[..., 0]
    likeliest = log_probs.argmax(-1)
    return Scored(of_target, likeliest.astype(jnp.int32), log_probs.max(-1))
