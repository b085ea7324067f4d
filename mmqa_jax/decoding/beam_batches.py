"""Batches the engine's beam-search requests by shape; they take no slots."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import placement_of
from mmqa_jax.decoding.llama_beam import beam_search
from mmqa_jax.decoding.requests import Result, check_one_end
from mmqa_jax.decoding.scheduler import TokenizedRequest, TokenizedScoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama import Llama


class BeamBatches:
    """Collects requests with beams until a batch of one shape is full, then searches.

    A batch holds as many prompts as fill the engine's slots with beams, split over the devices that
    slots are, and padded to a multiple of the largest bucket: one compilation per padded length and
    set of beam parameters.
    """

    def __init__(
        self,
        model: Llama,
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
        own = placement.rows(size)
        searched = placement.call(
            beam_search,
            self._graphdef,
            self._state,
            *placement.put((ids[own], lengths[own])),
            placement.put(adapters[own]) if self._with_adapters else None,
            end_id=end_id,
            num_beams=beams,
            max_new_tokens=steps,
            length_penalty=penalty,
            only_best=only_best,
            mesh=placement.mesh,
        )
        found = jax.device_get(placement.copied(searched))
        results = []
        for row, request in enumerate(requests):
            candidates = []
            for n in range(request.original.n):
                tokens = found.tokens[row, n, : found.lengths[row, n]].tolist()
                finish = "end" if tokens[-1] == end_id else "length"
                score = float(found.scores[row, n])
                candidates.append(request.beam(tokens, score, finish))
            results.append(Result(request.original.id, tuple(candidates), len(request.prompt), 0))
        return results
