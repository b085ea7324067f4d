"""Serves a T5: requests of one shape in batches, sources padded to buckets of lengths.

An encoder-decoder has nothing that a prompt could share with another, and its answers are short, so
that batches run to their end: each is one program. No row reads another's.

Each way of generation is entirely inside one jit: sampling, beam search, scores of answers. The
source is encoded once, and each decoder layer's keys and values of it are computed once for all
beams of a prompt. The beams' own keys and values are never copied when beams are reordered
(`models.attention.masked`). All beams of a prompt are rows of one product.
"""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch, placement_of
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult, BeamState, WrittenCache
from mmqa_jax.decoding.requests import (
    Candidate,
    Likeliest,
    Request,
    Result,
    Score,
    Scores,
    Scoring,
    StopDetector,
    Throughput,
    Tokenizer,
    TooLong,
    Unanswerable,
    check_end_ids,
    check_one_end,
    text_of,
)
from mmqa_jax.decoding.sampling import SamplingParameters, choose, parameters_of
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


_LEAST = 16  # new tokens that a program has room for; more in powers of two


@dataclasses.dataclass(frozen=True)
class T5EngineConfig:
    """Sizes of a T5's batches; results do not depend on them beyond the last bits."""

    slots: int = 16  # sequences of a batch at most, beams and draws among them
    tokens: int = 4096  # of a batch's padded sources at most, unless one alone has more
    length: int = 2048  # the most tokens of a source, and of an answer
    # Lengths that sources are padded to, ascending; beyond the last, its multiples.
    buckets: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)

    def __post_init__(self):
        object.__setattr__(self, "buckets", tuple(self.buckets))
        for name in ("slots", "tokens", "length"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"engine.{name} is {getattr(self, name)}: expected at least 1; raise it."
                )
        if (
            not self.buckets
            or self.buckets[0] < 1
            or list(self.buckets) != sorted(set(self.buckets))
        ):
            raise UserError(
                f"engine.buckets is {self.buckets}: expected ascending lengths of at least 1, such "
                "as (64, 128, 256); change them."
            )

    def padded(self, length: int) -> int:
        """The padded length of a source."""
        for bucket in self.buckets:
            if length <= bucket:
                return bucket
        return -(-length // self.buckets[-1]) * self.buckets[-1]


class _Program(NamedTuple):
    """What is compiled for a batch."""

    kind: Literal["draw", "beam", "score"]  # `draw`, `beam` or `score`
    source: int  # padded length of the sources
    target: int  # new tokens at most, or padded length of the scored answers
    # beams, length_penalty: of beam search.
    beams: int = 1
    length_penalty: float = 0.0


class _Row(NamedTuple):
    """One row of a batch: a draw, a whole beam search or a continuation of a request."""

    request: Request | Scoring
    source: tuple[int, ...]
    number: int


class T5Engine:
    """Generates and scores with a T5, batched.

        engine = T5Engine(load_published("t5", path), tokenizer, end_ids=[1])
        for result in engine.serve(Request(n, ids) for n, ids in enumerate(prompts)):
            print(result.id, result.text)

    Args:
      model: on one device or a mesh, over whose data axes rows are split.
      tokenizer: for texts and stop strings.
      end_ids: tokens that end an answer.
      config: sizes.
    """

    def __init__(
        self,
        model: T5,
        tokenizer: Tokenizer,
        *,
        end_ids: Sequence[int],
        config: T5EngineConfig | None = None,
    ):
        self._vocab_size = model.config.vocab_size
        check_end_ids(end_ids, self._vocab_size)
        self._graphdef, self._state = nnx.split(model)
        self._placement = placement_of(self._state)
        self._text, self._end_ids = tokenizer, tuple(end_ids)
        self.config, self.throughput = config or T5EngineConfig(), Throughput()
        self.mesh = self._placement.mesh

    def check(self, request: Request | Scoring) -> None:
        """Rejects what cannot be served.

        Raises:
          TooLong, Unanswerable, UserError: as `check_servable` and `check_one_end`, or a token that
            the model lacks.
        """
        check_servable(request, self.config.length)
        check_one_end(request, self._end_ids)
        answers = request.continuations if isinstance(request, Scoring) else ()
        for ids in (request.prompt, *answers):
            if not 0 <= min(ids) <= max(ids) < self._vocab_size:
                raise UserError(
                    f"request {request.id!r}: it has a token that the model lacks, expected 0 to "
                    f"{self._vocab_size - 1}; use the model's tokenizer."
                )

    def serve(self, requests: Iterable[Request | Scoring]) -> Iterator[Result | Scores]:
        """Answers requests, whose prompts are token ids, in any order.

        All are read first, so that a batch holds what is equally long.
        """
        waiting: dict[_Program, list[_Row]] = collections.defaultdict(list)
        answered: dict[Any, dict[int, Any]] = {}
        for request in requests:
            answered[request.id] = {}
            for program, row in self._rows(request):
                waiting[program].append(row)
        for program in sorted(waiting):
            rows, size = waiting[program], self._size(program)
            for start in range(0, len(rows), size):
                batch = rows[start : start + size]
                for row, output in zip(batch, self._run(program, batch, size), strict=True):
                    parts = answered[row.request.id]
                    parts[row.number] = output
                    if len(parts) == self._parts(row.request):
                        outputs = [parts[number] for number in range(len(parts))]
                        yield self._result(row, outputs)

    def _parts(self, request: Request | Scoring) -> int:
        """Rows of a request."""
        if isinstance(request, Scoring):
            return len(request.continuations)
        return 1 if request.beams else request.n

    def _rows(self, request: Request | Scoring) -> Iterator[tuple[_Program, _Row]]:
        source = tuple(request.prompt)
        length = self.config.padded(len(source))
        for number in range(self._parts(request)):
            row = _Row(request, source, number)
            if isinstance(request, Scoring):
                yield _Program("score", length, room(len(request.continuations[number]))), row
            elif request.beams:
                check_one_end(request, self._end_ids)
                # The last step ends all beams, so that their number of steps is not rounded up.
                beams, penalty = request.beams, request.length_penalty
                yield _Program("beam", length, request.max_new_tokens, beams, penalty), row
            else:
                yield _Program("draw", length, room(request.max_new_tokens)), row

    def _size(self, program: _Program) -> int:
        """Rows of a batch."""
        size = min(self.config.slots // program.beams, self.config.tokens // program.source)
        return self._placement.padded(max(size, 1))

    def _run(self, program: _Program, rows: Sequence[_Row], size: int) -> Sequence[Any]:
        """What a batch's program gives for each row."""
        began = time.monotonic()
        ids, lengths = np.zeros((size, program.source), np.int32), np.ones(size, np.int32)
        for place, row in enumerate(rows):
            lengths[place] = len(row.source)
            ids[place, : lengths[place]] = row.source
        outputs, steps = {"draw": self._draw, "beam": self._search, "score": self._score}[
            program.kind
        ](program, rows, ids, lengths)
        counted = self.throughput
        counted.requests += len(rows)
        counted.prefill_tokens += sum(len(row.source) for row in rows)
        counted.decode_tokens += sum(steps)
        counted.steps += max(steps)
        counted.decode_seconds += time.monotonic() - began
        return outputs

    def _call(self, function: Any, arrays: tuple[Any, ...], **options: Any) -> Any:
        """The outputs of a program on the host; `arrays` have a row for each of the batch."""
        placement = self._placement
        rows = placement.rows(len(jax.tree.leaves(arrays)[0]))
        put = placement.put(jax.tree.map(lambda array: array[rows], arrays))
        made = placement.call(function, self._graphdef, self._state, *put, **options)
        return fetch(placement.copied(made))

    def _draw(
        self, program: _Program, rows: Sequence[_Row], ids: np.ndarray, lengths: np.ndarray
    ) -> tuple[list[tuple[list[int], list[float]]], list[int]]:
        size = len(ids)
        most = np.zeros(size, np.int32)  # rows of padding end at once
        most[: len(rows)] = [row.request.max_new_tokens for row in rows]
        pairs = {place: (row.request, row.number) for place, row in enumerate(rows)}
        parameters = parameters_of(size, pairs)
        arrays = (Texts(ids, lengths), parameters, most)
        drawn = self._call(draw, arrays, end_ids=self._end_ids, max_new_tokens=program.target)
        counts = drawn.lengths[: len(rows)].tolist()
        pairs = [
            (drawn.tokens[place, :count].tolist(), drawn.log_probs[place, :count].tolist())
            for place, count in enumerate(counts)
        ]
        return pairs, counts

    def _search(
        self, program: _Program, rows: Sequence[_Row], ids: np.ndarray, lengths: np.ndarray
    ) -> tuple[list[list[tuple[list[int], float]]], list[int]]:
        result = self._call(
            beam_search,
            (Texts(ids, lengths),),
            end_id=self._end_ids[0],
            num_beams=program.beams,
            max_new_tokens=program.target,
            length_penalty=program.length_penalty,
        )
        of_rows = [
            [
                (result.tokens[place, n, : result.lengths[place, n]].tolist(), float(score))
                for n, score in enumerate(result.scores[place][: row.request.n])
            ]
            for place, row in enumerate(rows)
        ]
        return of_rows, [len(best[0][0]) for best in of_rows]

    def _score(
        self, program: _Program, rows: Sequence[_Row], ids: np.ndarray, lengths: np.ndarray
    ) -> tuple[list[Score], list[int]]:
        targets = np.zeros((len(ids), program.target), np.int32)
        counts = [len(row.request.continuations[row.number]) for row in rows]
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            targets[place, :count] = row.request.continuations[row.number]
        result = self._call(score, (Texts(ids, lengths), targets))
        scores = []
        for place, count in enumerate(counts):
            log_probs = result.log_probs[place, :count].tolist()
            likeliest = result.likeliest[place, :count].tolist()
            highest = result.highest[place, :count].tolist()
            scores.append(
                Score(
                    math.fsum(log_probs),
                    tuple(log_probs),
                    likeliest == targets[place, :count].tolist(),
                    tuple(map(Likeliest, likeliest, highest)),
                )
            )
        return scores, counts

    def _result(self, row: _Row, outputs: Sequence[Any]) -> Result | Scores:
        request = row.request
        if isinstance(request, Scoring):
            return Scores(request.id, tuple(outputs), len(row.source))
        if request.beams:
            candidates = [self._beam(request, *beam) for beam in outputs[0]]
        else:
            drawn = (self._drawn(request, *output) for output in outputs)
            candidates = sorted(drawn, key=lambda candidate: -candidate.total)
        return Result(request.id, tuple(candidates), len(row.source), 0)

    def _beam(self, request: Request, tokens: list[int], total: float) -> Candidate:
        finish = self._finish(tokens)
        text, _ = text_of(tokens, finish, request.stop, self._text)
        return Candidate(text, tuple(tokens), total, None, finish)

    def _drawn(self, request: Request, tokens: list[int], log_probs: list[float]) -> Candidate:
        finish = self._finish(tokens)
        detector = StopDetector(self._text, request.stop)
        for count, token in enumerate(tokens if request.stop else (), start=1):
            if detector.push(token):
                tokens, finish = tokens[:count], "stop"
                break
        text, visible = text_of(tokens, finish, request.stop, self._text)
        logprobs = tuple(log_probs[: len(tokens)]) if request.logprobs else None
        return Candidate(text, tuple(tokens), math.fsum(log_probs[:visible]), logprobs, finish)

    def _finish(self, tokens: Sequence[int]) -> str:
        return "end" if tokens[-1] in self._end_ids else "length"


def check_servable(request: Request | Scoring, length: int) -> None:
    """Rejects a request whose prompt or answer is empty or has more than `length` tokens, and one
    whose logits were to be changed.

    Raises:
      TooLong: the prompt has more.
      Unanswerable: the prompt, or a continuation, has none.
    """
    if isinstance(request, Request) and request.is_shaped:
        raise UserError(
            f"request {request.id!r}: a T5 has neither min_p, penalties, logit_bias, forms of "
            "answers nor likeliest tokens but at temperature 0; leave them out, or use a decoder."
        )
    if not len(request.prompt):
        raise Unanswerable(f"request {request.id!r}: its prompt is empty; give some text.")
    if len(request.prompt) > length:
        raise TooLong(request.id, len(request.prompt), 0, length)
    longest = [request.max_new_tokens] if isinstance(request, Request) else []
    if isinstance(request, Scoring):
        longest = [len(ids) for ids in request.continuations]
        if not min(longest):
            raise Unanswerable(
                f"request {request.id!r}: a continuation has no token; give some text."
            )
    if max(longest) > length:
        raise UserError(
            f"request {request.id!r}: its answer has up to {max(longest)} tokens, expected at most "
            f"engine.length = {length}; lower max_new_tokens or raise engine.length."
        )


def room(tokens: int) -> int:
    """New tokens that a program has room for: the next power of two, and a few at least."""
    return max(_LEAST, 1 << (tokens - 1).bit_length())


# A T5's engine for requests that arrive one by one (see online.py): what waits is one batch.


@dataclasses.dataclass
class ArrivedRequest:
    """A request that has been checked."""

    original: Request | Scoring


class T5Arrivals:
    """Serves what has arrived while the batches before it ran.

    Nobody hears of tokens as they are decoded, and what was begun is not cancelled: a batch is one
    program, which runs to its end.
    """

    def __init__(self, engine: T5Engine):
        self._engine = engine

    def tokenized(self, request: Request | Scoring) -> ArrivedRequest:
        """The request, checked; see `T5Engine.check`."""
        self._engine.check(request)
        return ArrivedRequest(request)

    def serve(
        self, arrivals: Iterable[ArrivedRequest | None], on_token: Any = None
    ) -> Iterator[Result | Scores]:
        """Answers requests; None among them says that no other waits."""
        waiting: list[Request | Scoring] = []
        for arrived in arrivals:
            if arrived is not None:
                waiting.append(arrived.original)
            elif waiting:
                batch, waiting = waiting, []
                yield from self._engine.serve(batch)
        yield from self._engine.serve(waiting)
