"""The batched generation engine: many requests over a fixed number of slots.

Continuous batching (Orca, Yu et al. 2022): whenever slots are free, the next prompts are encoded
into them, piece by piece; then all slots decode together, and who is finished makes room. Every
program has one fixed shape and no row reads another's, so that an answer does not depend on who
else is being served.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.decoding.beam_batches import BeamBatches
from mmqa_jax.decoding.pictures import PictureReader
from mmqa_jax.decoding.prefix import Piece, SlotBook, bucket_of
from mmqa_jax.decoding.quantize import quantize_weights
from mmqa_jax.decoding.requests import Request, Result, Score, Scores, Scoring, Tokenizer, TooLong
from mmqa_jax.decoding.sampling import SamplingParameters, seed_words
from mmqa_jax.decoding.slot_cache import SlotCache
from mmqa_jax.decoding.slot_runner import EngineConfig, SlotRunner
from mmqa_jax.decoding.tasks import (
    GenerationJob,
    GenerationTask,
    Intake,
    ScoringJob,
    ScoringTask,
    Task,
)
from mmqa_jax.decoding.throughput import Throughput
from mmqa_jax.models.llama import Llama, unstack_layers
from mmqa_jax.models.llava import Llava

if TYPE_CHECKING:
    from mmqa_jax.core.progress import Progress

Shorten = Callable[[Request, int], Request | None]

_LOOK_AHEAD = 4  # times the slots: so many requests are sorted by their beginnings
_PATIENCE = 8  # decode steps that a free slot waits for others, to be filled together with them


class Engine:
    """Generates and scores with a LLaMA or LLaVA, batched.

        engine = Engine(load_llama(path), tokenizer, end_ids=[2])
        for result in engine.generate(Request(n, prompt) for n, prompt in enumerate(prompts)):
            print(result.id, result.text)

    Args:
      model: the engine takes it over: its stacked layers are unstacked (and quantised).
      tokenizer: for texts and stop strings; without one prompts are token ids and texts None.
      end_ids: tokens that end an answer.
      config: sizes, see EngineConfig.
      mesh, rules: of a model that lies on a mesh; slots go to `data`, heads to `tensor`.
      compiler_options: of XLA, for all programs.

    Raises:
      UserError: `engine.length` exceeds the model's positions, or an unknown end token.
    """

    def __init__(
        self,
        model: Llama | Llava,
        tokenizer: Tokenizer | None = None,
        *,
        end_ids: Sequence[int] = (),
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        rules: Rules = DEFAULT_RULES,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        llava = model if isinstance(model, Llava) else None
        model = model if llava is None else llava.llama
        config = config or EngineConfig(length=min(EngineConfig.length, model.config.positions))
        if config.length > model.config.positions:
            raise UserError(
                f"engine.length is {config.length}: expected at most model.positions = "
                f"{model.config.positions}; lower it."
            )
        vocab_size = model.config.vocab_size
        for end in end_ids:
            if not 0 <= end < vocab_size:
                raise UserError(
                    f"end token {end}: expected 0 to {vocab_size - 1}; use the model's own."
                )
        if not isinstance(model.layers, nnx.List):
            unstack_layers(model)
        if config.weights == "int8":
            quantize_weights(model)
        self.config, self.throughput = config, Throughput()
        self._runner = SlotRunner(model, config, mesh, rules, compiler_options)
        self._pictures = llava and PictureReader(llava, self._runner.put, compiler_options)
        self._intake = Intake(
            tokenizer,
            frozenset(end_ids),
            vocab_size,
            config.length,
            config.buckets,
            self._pictures,
        )
        self._book = SlotBook(config.slots)
        self._beams = BeamBatches(model, config, frozenset(end_ids))
        self._running = False
        self._unread: tuple[dict[int, GenerationTask], Any] | None = None  # a decode step's output

    def generate(
        self,
        requests: Iterable[Request],
        *,
        shorten: Shorten | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Result]:
        """Serves requests and yields each result as it is finished, in any order.

        Args:
          requests: read a few ahead of the slots.
          shorten: called with a request that is too long and by how many tokens; returns a shorter
            one (fewer examples) or None. It may be called again.
          progress: advanced by 1 per request, with prefill and decode tokens/s.

        Raises:
          TooLong: a request exceeds the context and `shorten` gave none that fits.
          UserError: a request that cannot be served, or an id that came before.
        """
        yield from self._run(requests, shorten, progress)

    def score(
        self, requests: Iterable[Scoring], *, progress: Progress | None = None
    ) -> Iterator[Scores]:
        """Scores continuations and yields each request's scores, in any order; as `generate`."""
        yield from self._run(requests, None, progress)

    def loglikelihood(
        self, prompt: str | Sequence[int], continuations: Sequence[str] | Sequence[Sequence[int]]
    ) -> tuple[Score, ...]:
        """How probable each continuation of one prompt is; `score` batches many prompts."""
        (scores,) = self.score([Scoring(0, prompt, continuations)])
        return scores.scores

    @property
    def cache(self) -> SlotCache:
        """The slots' keys and values on the device; every program takes it and makes a new one."""
        return self._runner.cache

    def forget(self) -> None:
        """Drops what the slots hold of earlier prompts: nothing of them is reused any more."""
        self._book.forget()

    def _run(self, requests, shorten, progress) -> Iterator[Result | Scores]:
        if self._running:
            raise RuntimeError("the engine is already serving: finish or close that iterator first")
        self._running, self._unread = True, None
        try:
            yield from self._serve(self._jobs(requests, shorten), progress)
        except GeneratorExit:  # closed between two results: what the slots hold stays true
            raise
        except BaseException:
            self._book.forget()  # a prompt may be in the book that is not in the cache
            raise
        finally:
            self._beams.forget()
            self._running = False

    def _jobs(
        self, requests: Iterable[Request | Scoring], shorten: Shorten | None
    ) -> Iterator[GenerationJob | ScoringJob]:
        seen: set[Hashable] = set()
        for request in requests:
            if request.id in seen:
                raise UserError(f"request {request.id!r}: the id came before; give each its own.")
            seen.add(request.id)
            excess, request_id = None, request.id
            while True:
                try:
                    job = self._intake.job(request)
                    break
                except TooLong as error:
                    if shorten is None or (excess is not None and error.excess >= excess):
                        raise
                    excess = error.excess
                    shorter = shorten(request, excess)
                    if shorter is None:
                        raise
                    if shorter.id != request_id:
                        raise UserError(
                            f"request {request_id!r}: its shortened one has the id {shorter.id!r}; "
                            "keep the id."
                        ) from error
                    request = shorter
            yield job

    def _serve(
        self, jobs: Iterator[GenerationJob | ScoringJob], progress: Progress | None
    ) -> Iterator[Result | Scores]:
        slots = self.config.slots
        waiting: collections.deque[Task] = collections.deque()
        active: list[GenerationTask | None] = [None] * slots
        waited, exhausted = 0, False
        while True:
            finished: list[Result | Scores] = []
            while not exhausted and len(waiting) < slots:
                more = list(itertools.islice(jobs, _LOOK_AHEAD * slots))
                exhausted = not more
                finished += self._beams.serve(more, rest=exhausted)
                tasks = [task for job in more for task in job.tasks]
                # Those that begin alike come together, so that one slot's beginning serves all.
                waiting.extend(sorted(tasks, key=lambda task: task.pieces))
            free = [slot for slot in range(slots) if active[slot] is None]
            ended: list[Task] = []
            if waiting and free and (self._fills(waiting, len(free)) or waited >= _PATIENCE):
                waited = 0
                admitted = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
                ended = self._prefill(admitted, free)
                for task in admitted:
                    if isinstance(task, GenerationTask) and not task.finish:
                        active[task.slot] = task
            elif any(task is not None for task in active):
                waited += len(free) > 0
                ended = self._decode(active)
            elif not waiting and not finished:
                return
            results = [job.result() for job in dict.fromkeys(task.job for task in ended)]
            for result in finished + [result for result in results if result is not None]:
                self.throughput.requests += 1
                if progress is not None:
                    progress.advance(1, **self._rates())
                yield result

    def _fills(self, waiting: Sequence[Task], free: int) -> bool:
        """Whether the free slots are worth a prefill now: all of them, or a full batch."""
        rows = self.config.rows(bucket_of(waiting[0].pieces[-1].end, self.config.buckets))
        return free >= min(rows, len(waiting))

    def _prefill(self, tasks: list[Task], free: list[int]) -> list[Task]:
        """Encodes the prompts of `tasks` into free slots; returns those already finished."""
        began = time.perf_counter()
        of_slot: dict[int, Task] = {}
        for task in tasks:
            place = self._book.place(task.pieces, free, task.reusable)
            free.remove(place.slot)
            task.slot, task.source, task.reused = place
            of_slot[task.slot] = task
            if task.reused:
                self.throughput.reused_tokens += task.pieces[task.reused - 1].end
                if task.source == task.slot:
                    task.done = task.reused
        outputs: list[tuple[Callable[..., list[Task]], Any]] = []
        while open_tasks := [task for task in tasks if task.done < len(task.pieces)]:
            ready = [task for task in open_tasks if self._fetch(task, of_slot)]
            batches = collections.defaultdict(list)
            for task in ready:
                size = len(task.pieces[task.done].tokens)
                batches[bucket_of(size, self.config.buckets)].append(task)
            for bucket, batch in batches.items():
                rows = self.config.rows(bucket)
                for n in range(0, len(batch), rows):
                    outputs += self._encode(batch[n : n + rows], bucket)
        finished = []
        for read, output in outputs:
            finished += read(*jax.device_get(output))
        self.throughput.prefill_seconds += time.perf_counter() - began
        return finished

    def _fetch(self, task: Task, of_slot: Mapping[int, Task]) -> bool:
        """Copies the task's beginning if its source has it by now; true if the task can go on."""
        if task.done or not task.reused:
            return True
        source = of_slot.get(task.source)  # of this very prefill, or long there
        if source is not None and source.done < task.reused:
            return False
        self._runner.copy(task.source, task.slot, task.pieces[task.reused - 1].end)
        task.done = task.reused
        return True

    def _encode(
        self, batch: Sequence[Task], bucket: int
    ) -> list[tuple[Callable[..., list[Task]], Any]]:
        """Encodes the next piece of every task of a batch.

        Returns what must be read afterwards: a function, and the device arrays that it takes.
        """
        count = self.config.rows(bucket)
        tokens = np.zeros((count, bucket), np.int32)
        starts, ends = np.zeros(count, np.int32), np.zeros(count, np.int32)
        rows = np.full(count, self.config.slots, np.int32)  # of padding: written nowhere
        pieces = [task.pieces[task.done] for task in batch]
        for row, (task, piece) in enumerate(zip(batch, pieces, strict=True)):
            tokens[row, : len(piece.tokens)] = piece.tokens
            starts[row], ends[row], rows[row] = piece.start, piece.end, task.slot
            task.done += 1
            self.throughput.prefill_tokens += len(piece.tokens)
        patches = None
        if (tokens < 0).any():
            found = {
                row: self._pictures.features(piece.tokens, task.pictures)
                for row, (task, piece) in enumerate(zip(batch, pieces, strict=True))
                if min(piece.tokens) < 0
            }
            width = next(iter(found.values())).shape[1]
            patches = np.zeros((count, bucket, width), np.float32)
            for row, features in found.items():
                patches[row, : len(features)] = features
        hidden = self._runner.encode(tokens, starts, ends, rows, patches)

        outputs = []
        begun = {
            row: task
            for row, task in enumerate(batch)
            if isinstance(task, GenerationTask) and task.done == len(task.pieces)
        }
        if begun:
            outputs.append((functools.partial(_take_tokens, begun), self._begin(begun, hidden)))
        scored = {
            row: (task, piece)
            for row, (task, piece) in enumerate(zip(batch, pieces, strict=True))
            if isinstance(task, ScoringTask) and task.wants(piece)
        }
        if scored:
            targets = np.zeros((count, bucket), np.int32)
            for row, (task, piece) in scored.items():
                targets[row] = task.targets(piece, bucket)
            outputs.append(
                (functools.partial(_take_scores, scored), self._runner.score(hidden, targets))
            )
        return outputs

    def _begin(self, begun: Mapping[int, GenerationTask], hidden: jax.Array):
        """Draws the first tokens of prompts that are whole in the cache."""
        count = hidden.shape[0]
        last, positions = np.zeros(count, np.int32), np.zeros(count, np.int32)
        rows = np.full(count, self.config.slots, np.int32)
        parameters = SamplingParameters(
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            np.ones(count, np.float32),
            np.zeros((count, 2), np.uint32),
        )
        for row, task in begun.items():
            request = task.job.request
            last[row] = len(task.pieces[-1].tokens) - 1
            positions[row] = task.pieces[-1].end
            rows[row] = task.slot
            parameters.temperature[row] = request.temperature
            parameters.top_k[row] = request.top_k
            parameters.top_p[row] = request.top_p
            parameters.key[row] = seed_words(request.seed, task.draw)
        return self._runner.begin(hidden, last, rows, positions, parameters)

    def _decode(self, active: list[GenerationTask | None]) -> list[Task]:
        """Starts a step of all slots and reads the one before; returns the tasks that it finished.

        So the device does not wait for the host. A slot whose task was finished by the step
        before has decoded one token for nothing, which nobody reads.
        """
        began = time.perf_counter()
        # A task whose last token is still unread is not decoded further.
        rows = {slot: task for slot, task in enumerate(active) if task and task.lacks > 0}
        unread = self._unread
        self._unread = None
        if rows:
            mask = np.isin(np.arange(self.config.slots), list(rows))
            self._unread = rows, self._runner.step(mask)
            for task in rows.values():
                task.lacks -= 1
            self.throughput.steps += 1
        finished = []
        if unread is not None:
            rows, output = unread
            rows = {slot: task for slot, task in rows.items() if not task.finish}
            finished = _take_tokens(rows, *jax.device_get(output))
            self.throughput.decode_tokens += len(rows)
        for task in finished:
            active[task.slot] = None
        self.throughput.decode_seconds += time.perf_counter() - began
        return finished

    def _rates(self) -> dict[str, str]:
        return {
            "prefill": f"{self.throughput.prefill_rate:.0f} tokens/s",
            "decode": f"{self.throughput.decode_rate:.0f} tokens/s",
        }


def _take_tokens(
    rows: Mapping[int, GenerationTask], tokens: np.ndarray, logprobs: np.ndarray
) -> list[Task]:
    """Gives every task the token of its row; returns those that it finished."""
    return [task for row, task in rows.items() if task.take(int(tokens[row]), float(logprobs[row]))]


def _take_scores(
    rows: Mapping[int, tuple[ScoringTask, Piece]], logprobs: np.ndarray, likeliest: np.ndarray
) -> list[Task]:
    """Gives every task the log-probabilities of its row; returns those that it finished."""
    for row, (task, piece) in rows.items():
        task.take(piece, logprobs[row], likeliest[row])
    return [task for task, _ in rows.values() if task.finished]
