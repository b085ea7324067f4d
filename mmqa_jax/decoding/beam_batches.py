"""Beam searches of an engine's requests: batches of one shape, beside the slots."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.llama_beam import beam_search
from mmqa_jax.decoding.requests import Result
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.decoding.tasks import GenerationJob, ScoringJob, make_candidate
from mmqa_jax.models.llama import Llama


class BeamBatches:
    """Collects requests with beams until a batch of one shape is full, then searches.

    A batch holds as many prompts as fill the engine's slots with beams, padded to a multiple of
    the largest bucket: one compilation per padded length and set of beam parameters.
    """

    def __init__(self, model: Llama, config: EngineConfig, end_ids: frozenset[int]):
        self._graphdef, self._state = nnx.split(model)
        self._config, self._end_ids = config, end_ids
        self._positions = model.config.positions
        self._waiting: dict[tuple, list[GenerationJob]] = collections.defaultdict(list)

    def serve(
        self, jobs: Sequence[GenerationJob | ScoringJob], *, rest: bool = False
    ) -> list[Result]:
        """Takes the jobs that want beams; returns what is ready, with `rest` all that waits."""
        for job in jobs:
            if isinstance(job, GenerationJob) and job.request.beams:
                self._waiting[self._shape(job)].append(job)
        results = []
        for shape, waiting in list(self._waiting.items()):
            size = max(1, self._config.slots // shape[1])
            while len(waiting) >= size or (rest and waiting):
                results += self._search(shape, waiting[:size], size)
                del waiting[:size]
        return results

    def forget(self) -> None:
        """Drops what waits."""
        self._waiting.clear()

    def _shape(self, job: GenerationJob) -> tuple[int, int, int, float, bool]:
        """Padded length, and what is compiled into the search."""
        request = job.request
        if len(self._end_ids) != 1:
            raise UserError(
                f"request {request.id!r}: beam search needs exactly one end token, the engine has "
                f"{len(self._end_ids)}; set end_ids."
            )
        step = self._config.buckets[-1]
        padded = -(-len(job.prompt) // step) * step
        # Beyond the model's positions there is no room for padding and answer.
        padded = max(min(padded, self._positions - request.max_new_tokens), len(job.prompt))
        # Who wants the best alone need not wait for the others.
        best = request.n == 1
        return padded, request.beams, request.max_new_tokens, request.length_penalty, best

    def _search(
        self, shape: tuple[int, int, int, float, bool], jobs: Sequence[GenerationJob], size: int
    ) -> list[Result]:
        length, beams, steps, penalty, best = shape
        (end_id,) = self._end_ids
        ids, lengths = np.zeros((size, length), np.int32), np.ones(size, np.int32)
        for row, job in enumerate(jobs):
            ids[row, : len(job.prompt)], lengths[row] = job.prompt, len(job.prompt)
        found = jax.device_get(
            beam_search(
                self._graphdef,
                self._state,
                *jax.device_put((ids, lengths)),
                end_id=end_id,
                num_beams=beams,
                max_new_tokens=steps,
                length_penalty=penalty,
                only_best=best,
            )
        )
        results = []
        for row, job in enumerate(jobs):
            candidates = []
            for n in range(job.request.n):
                tokens = found.tokens[row, n, : found.lengths[row, n]].tolist()
                finish = "end" if tokens[-1] == end_id else "length"
                score = float(found.scores[row, n])
                candidates.append(make_candidate(job, tokens, score, None, finish))
            results.append(Result(job.request.id, tuple(candidates), len(job.prompt), 0))
        return results
