"""Batches the engine's beam-search requests by shape; they take no slots."""

import collections
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import placement_of
from mmqa_jax.decoding import beam, kv_cache
from mmqa_jax.decoding.beam import BeamResult, WrittenCache
from mmqa_jax.decoding.kv_cache import KVCache
from mmqa_jax.decoding.requests import Result, check_one_end
from mmqa_jax.decoding.scheduler import TokenizedRequest, TokenizedScoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.attention.masked import Ancestry, sink_rows
from mmqa_jax.models.common.layers import group_queries, prefix_attention, ungroup_queries
from mmqa_jax.models.llama import network as llama
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import with_chosen
from mmqa_jax.models.llama.network import layer_traits


class BeamBatches:
    """Collects requests with beams until a batch of one shape is full, then searches.

    A batch holds as many prompts as fill the engine's slots with beams, split over the devices that
    slots are, and padded to a multiple of the largest bucket: one compilation per padded length and
    set of beam parameters.
    """

    def __init__(
        self,
        model: llama.Llama,
        config: EngineConfig,
        end_ids: frozenset[int],
        *,
        with_adapters: bool = False,
    ):
        self._with_adapters = with_adapters
        self._graphdef, self._state = nnx.split(model)
        self._placement = placement_of(self._state)
        self._config, self._end_ids = config, end_ids
        self._positions = model.config.positions
        self._waiting: dict[tuple, list[TokenizedRequest]] = collections.defaultdict(list)

    def serve(
        self, requests: Sequence[TokenizedRequest | TokenizedScoring], *, rest: bool = False
    ) -> list[Result]:
        """Queues the requests with beams and searches full batches; with `rest`, all of them."""
        for request in requests:
            if isinstance(request, TokenizedRequest) and request.original.beams:
                self._waiting[self._shape(request)].append(request)
        results = []
        for shape, waiting in list(self._waiting.items()):
            size = self._placement.padded(max(1, self._config.slots // shape[1]))
            while len(waiting) >= size or (rest and waiting):
                results += self._search(shape, waiting[:size], size)
                del waiting[:size]
        return results

    def clear(self) -> None:
        """Drops the waiting requests."""
        self._waiting.clear()

    def _shape(self, tokenized: TokenizedRequest) -> tuple[int, int, int, float, bool]:
        """Padded length, and the search parameters that are compiled in."""
        request = tokenized.original
        check_one_end(request, self._end_ids)
        step = self._config.buckets[-1]
        length = len(tokenized.prompt)
        padded = -(-length // step) * step
        # Padding and answer must fit into the model's positions.
        padded = max(min(padded, self._positions - request.max_new_tokens), length)
        only_best = request.n == 1
        return padded, request.beams, request.max_new_tokens, request.length_penalty, only_best

    def _search(
        self,
        shape: tuple[int, int, int, float, bool],
        requests: Sequence[TokenizedRequest],
        size: int,
    ) -> list[Result]:
        length, beams, steps, penalty, only_best = shape
        (end_id,) = self._end_ids
        ids, lengths = np.zeros((size, length), np.int32), np.ones(size, np.int32)
        adapters = np.zeros((size, 1), np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            ids[row, : lengths[row]] = request.prompt
            adapters[row] = request.adapter
        placement = self._placement
        rows = placement.rows(size)
        searched = placement.call(
            beam_search,
            self._graphdef,
            self._state,
            *placement.put((ids[rows], lengths[rows])),
            placement.put(adapters[rows]) if self._with_adapters else None,
            end_id=end_id,
            num_beams=beams,
            max_new_tokens=steps,
            length_penalty=penalty,
            only_best=only_best,
            mesh=placement.mesh,
        )
        result = jax.device_get(placement.copied(searched))
        results = []
        for row, request in enumerate(requests):
            candidates = []
            for n in range(request.original.n):
                tokens = result.tokens[row, n, : result.lengths[row, n]].tolist()
                finish = "end" if tokens[-1] == end_id else "length"
                score = float(result.scores[row, n])
                candidates.append(request.beam(tokens, score, finish))
            results.append(Result(request.original.id, tuple(candidates), len(request.prompt), 0))
        return results


# Beam search for LLaMA, entirely inside one jit; the bookkeeping is VLP's (`decoding.beam`).
#
# A prompt is encoded and its keys and values cached once for all its beams; so are the few new
# tokens of the beams, which are never copied when beams are reordered (`attention.ancestry`).


def _empty(
    config: LlamaConfig, prompts: int, beams: int, max_new_tokens: int, mesh: Mesh | None
) -> WrittenCache:
    """Zeros for `beams` sequences of `max_new_tokens` tokens for each of `prompts` prompts."""
    layout = kv_cache.layout(config, prompts, beams * max_new_tokens, config.dtype, mesh)
    # Keys lie as values do: a token's are then written as whole vectors.
    layers = tuple((layer.value,) * 2 for layer in layout)
    return WrittenCache(kv_cache.zeros(layers), Ancestry.empty(prompts, beams, max_new_tokens))


@functools.partial(
    jax.jit,
    static_argnames=(
        "end_id",
        "num_beams",
        "max_new_tokens",
        "length_penalty",
        "only_best",
        "mesh",
    ),
)
def beam_search(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    input_ids: jax.Array,
    lengths: jax.Array,
    adapters: jax.Array | None = None,
    *,
    end_id: int,
    num_beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 0.0,
    only_best: bool = False,
    mesh: Mesh | None = None,
) -> BeamResult:
    """Continues a batch of prompts; (graphdef, state) = nnx.split(Llama).

    Args:
      input_ids: int [B, L], padded on the right.
      lengths: int [B], tokens of each prompt.
      adapters: int [B, 1], numbers of `lora.add_adapters`; None: the model has none.
      end_id: ends an answer.
      length_penalty: added to a finished answer's score per token (end token included).
      only_best: stops once every prompt's best answer is certain; the order of the others is not.
      mesh: over whose data axes prompts are split.

    One compilation per batch shape.
    """
    model = nnx.merge(graphdef, state)
    model = llama.for_length(model, input_ids.shape[1] + max_new_tokens)
    config, (prompts, length) = model.config, input_ids.shape
    beam.check_size(
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length=length,
        vocab_size=config.vocab_size,
        positions=config.positions,
    )
    hidden, prefix = kv_cache.forward(
        model,
        model.embed(input_ids),
        kv_cache.empty(config, prompts, length, config.dtype, mesh),
        table=kv_cache.page_each(prompts, mesh),
        starts=jnp.zeros_like(lengths),
        ends=lengths,
        adapters=adapters,
        mesh=mesh,
    )
    of_beams = None if adapters is None else jnp.repeat(adapters, num_beams)[None]
    first = jax.nn.log_softmax(model.logits(llama.last_token(hidden, lengths)))  # [B, V]
    mask = jnp.arange(length) < lengths[:, None]

    advance = functools.partial(beam.advance, end_id=end_id, length_penalty=length_penalty)

    def propose(beams, cache):
        tokens = beams.tokens[:, :, beams.step - 1]  # [B, K]
        step = beams.step - 1
        log_probs, cache = _decode(model, prefix, mask, lengths, cache, tokens, step, of_beams)
        return log_probs, cache

    log_probs = jnp.repeat(first, num_beams, axis=0)
    begun, _ = advance(beam.start(prompts, num_beams, max_new_tokens), log_probs)
    return beam.run(
        begun,
        _empty(config, prompts, num_beams, max_new_tokens, mesh),
        propose=propose,
        advance=advance,
        complete=functools.partial(
            beam.complete, only_best=only_best, length_penalty=length_penalty
        ),
    )


def _decode(
    model: llama.Llama,
    prefix: KVCache,
    prefix_mask: jax.Array,
    lengths: jax.Array,
    cache: WrittenCache,
    tokens: jax.Array,
    step: jax.Array,
    adapters: jax.Array | None,
) -> tuple[jax.Array, WrittenCache]:
    """One token per beam, the `step`-th after its prompt: tokens [B, K] -> log-probs, cache.

    adapters: int [1, B * K], see `beam_search`.
    """
    config, size = model.config, tokens.shape
    angles = jnp.repeat(lengths + step, size[1])[:, None, None] * llama.inverse_frequencies(config)
    cos, sin = llama.rotation(config, jnp.cos(angles)[None], jnp.sin(angles)[None])
    traits = layer_traits(config, prefix_mask.shape[1] + cache.ancestry.slots.shape[2])
    ancestry = cache.ancestry.written(step)
    seen = ancestry.visible(step + 1)  # [B, K, T * K]
    # All tokens as one sequence, for what works on each alone: [1, B * K, H].
    x, side = model.parted(model.embed(tokens.reshape(1, -1)))
    traits, written = traits.replace(side=side), []
    of_layers = zip(model.each_layer(), prefix, cache.layers, strict=True)
    for number, (layer, of_prompt, of_beams) in enumerate(of_layers):
        layer = with_chosen(layer, adapters)
        of_layer = traits.of(number)
        # The beams of a prompt are rows of one product: [B, K, heads, D].
        projected = layer.project(x, cos, sin, of_layer, apart=True)
        q, k, v = (y.reshape(*size, *y.shape[2:]) for y in projected)
        of_prefix, sinks = prefix_mask, layer.sink_logits
        of_own = jnp.tile(seen, (1, config.heads // k.shape[-2], 1))[:, None]
        if of_layer.window is not None:
            column = jnp.arange(prefix_mask.shape[1])
            of_prefix &= column > (lengths + step)[:, None] - of_layer.window
            number_of = jnp.arange(seen.shape[-1]) // size[1]  # of each new column's token
            of_own &= number_of > step - of_layer.window
        of_beams = tuple(
            jax.lax.dynamic_update_slice(held, new.swapaxes(1, 2), (0, 0, step * size[1], 0))
            for held, new in zip(of_beams, (k, v), strict=True)
        )
        attended = prefix_attention(
            group_queries(q, k.shape[-2]),
            of_prompt.key.transpose(0, 3, 1, 2),  # [B, L, kv_heads, D]
            of_prompt.value.swapaxes(1, 2),
            of_prefix,
            *(held.swapaxes(1, 2) for held in of_beams),
            mask=of_own,
            cap=config.attention_cap,
            sinks=None
            if sinks is None
            else sink_rows(sinks, config.kv_heads, size[1]).swapaxes(0, 1),
        )
        attended = ungroup_queries(attended, config.heads)
        x = layer.finish(x, attended.reshape(1, -1, *attended.shape[2:]), of_layer)
        written.append(of_beams)
    log_probs = jax.nn.log_softmax(model.logits(model.norm(x)[0]))  # [B * K, V]
    return log_probs, WrittenCache(tuple(written), ancestry)
