"""The batched generation engine: many requests over a fixed number of slots.

Continuous batching (Orca, Yu et al. 2022): free slots take the next prompts, which are encoded
chunk by chunk, in full batches where possible; between these all slots whose prompts are encoded
decode together, and a finished sequence frees its slot.
Every program has one fixed shape and no row reads another's, so that an answer does not depend on
what else is being served, nor on a CPU its bits (`EngineConfig.exact`).
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
from mmqa_jax.decoding import scheduler
from mmqa_jax.decoding.beam_batches import BeamBatches
from mmqa_jax.decoding.cached_attention import Branches
from mmqa_jax.decoding.image_features import PictureFeatures
from mmqa_jax.decoding.image_tower import PatchIds, marked
from mmqa_jax.decoding.kv_cache import KVCache
from mmqa_jax.decoding.page_pool import PagePool
from mmqa_jax.decoding.requests import (
    Likeliest,
    Request,
    Result,
    Score,
    Scores,
    Scoring,
    Throughput,
    Tokenizer,
    TooLong,
    check_end_ids,
)
from mmqa_jax.decoding.sampling import TopLogprobs, parameters_of, shaping_of
from mmqa_jax.decoding.scheduler import Chunk, Chunking, bucket_of, chunks_within, prefix_keys
from mmqa_jax.decoding.sizes import repeat_key_heads
from mmqa_jax.decoding.slot_runner import EngineConfig, SlotRunner, check_draft, for_kinds, scans
from mmqa_jax.models.llama.experts import widen_routers
from mmqa_jax.models.llama.lora import Additions, add_adapters
from mmqa_jax.models.llama.network import Llama, for_length, transpose_head, unstack_layers
from mmqa_jax.models.llama.quantize import holds_codes, quantize_weights
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.qwen_vl.network import QwenVL

if TYPE_CHECKING:
    from mmqa_jax.core.progress import Progress

Shorten = Callable[[Request, int], Request | None]
AnySequence = scheduler.GeneratedSequence | scheduler.ScoredSequence
Batch = dict[int, tuple[AnySequence, Chunk]]  # by row
Tokenized = scheduler.TokenizedRequest | scheduler.TokenizedScoring
OnToken = Callable[
    [scheduler.GeneratedSequence], None
]  # called after a sequence got its next token

_END: Any = object()  # of an iterator of requests
_LOOK_AHEAD = 4  # times the slots: this many requests are sorted so that common prefixes meet
_PATIENCE = 8  # decode steps that a prompt's next chunk waits for others, to fill a batch with them


class Engine:
    """Generates and scores with a LLaMA, a LLaVA, a LLaVA-OneVision or a Qwen-VL, batched.

        engine = Engine(load_published("llama", path), tokenizer, end_ids=[2])
        for result in engine.generate(Request(n, prompt) for n, prompt in enumerate(prompts)):
            print(result.id, result.text)

    Args:
      model: the engine owns it: its layers are unstacked, unless scanned, (and quantized) in
        place, and its key heads repeated where `tensor` does not divide them.
      tokenizer: for texts and stop strings; without one, prompts are token ids and texts None.
      end_ids: tokens that end an answer.
      config: sizes, see EngineConfig.
      mesh: of a sharded model; slots are sharded over `data`, heads over `tensor`.
      adapters: by the names that requests give; a batch may mix them.
      draft: a smaller model of the same vocabulary that proposes tokens, `config.speculate` - 1 a
        step; the engine owns it. None: they are looked up in the text so far.
    """

    def __init__(
        self,
        model: Llama | Llava | QwenVL,
        tokenizer: Tokenizer | None = None,
        *,
        end_ids: Sequence[int] = (),
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        adapters: Mapping[str, Additions] | None = None,
        draft: Llama | None = None,
    ):
        whole = None if isinstance(model, Llama) else model  # with a tower
        model = model if whole is None else whole.llama
        most = model.config.served_positions
        config = config or EngineConfig(length=min(EngineConfig.length, most))
        model.config.check_served(config.length)
        if model.config.bidirectional:
            raise UserError(
                "the model's tokens see what follows them (use_bidirectional_attention): it writes "
                "no texts; use it as an encoder of texts."
            )
        check_end_ids(end_ids, model.config.vocab_size)
        config = for_kinds(config, model.config)
        serve_ready(model, config, mesh)
        if draft is not None:
            check_draft(draft.config, config, sees=whole is not None)
            serve_ready(draft, config, mesh)
        self._draft = draft
        self._adapters = tuple(adapters or ())
        if adapters:
            add_adapters(model, list(adapters.values()), mesh)
        self.mesh, self.throughput = mesh, Throughput()
        self._model, self._whole = model, whole
        self._text, self._end_ids = tokenizer, frozenset(end_ids)
        self._running = False
        self._allocate(config)

    def resize(self, config: EngineConfig) -> None:
        """Other sizes, with a new cache; weights and what they are held as stay the same."""
        assert not self._running, "an engine cannot be resized while it serves"
        del self._runner, self._pictures  # their memory is free before the new is taken
        self._allocate(config)

    def use(self, model: Llama) -> None:
        """Serves with other weights from now on, as a policy that is being trained; no program is
        compiled again.

        `model`: of the same config and on the same devices; the engine owns it, as its first one;
        the tower stays.
        """
        assert not self._running, "an engine cannot get other weights while it serves"
        assert not self._adapters, "only a model without adapters gets other weights"
        serve_ready(model, self.config, self.mesh)
        self._model = model
        if self._whole is not None:
            self._whole.llama = model
        self._runner.use(for_length(model, self.config.length))
        self._beams = BeamBatches(model, self.config, self._end_ids)
        self.forget()

    def _allocate(self, config: EngineConfig) -> None:
        model, whole = for_length(self._model, config.length), self._whole
        self.config = config = for_kinds(config, model.config)
        self._vocab_size = model.config.vocab_size
        draft = self._draft and for_length(self._draft, config.length)
        self._runner = SlotRunner(model, config, self.mesh, draft)
        patches = whole and PatchIds(whole.config)
        sight = patches.sight if patches else "causal"
        self._tokenizer = scheduler.RequestTokenizer(
            self._text,
            self._end_ids,
            model.config.vocab_size,
            config.length,
            Chunking(config.buckets, sight, tight=self._runner.joins_chunks),
            patches,
            self._adapters,
            recurrent=model.config.recurrent,
            has_beams=not (model.config.recurrent or model.config.borrowers),
        )
        self._pool = PagePool(
            config.slots,
            self._runner.pages_of_shard,
            self._runner.page,
            config.buckets[-1],
            self._runner.shards,
        )
        self._pictures = whole and PictureFeatures(
            whole,
            config.slots,
            self._runner.rows,
            self._reusable,
            self.throughput,
            self.mesh,
        )
        self._beams = BeamBatches(model, config, self._end_ids, with_adapters=bool(self._adapters))
        self._encoding: list[AnySequence] = []  # in slots, their prompts not yet in the cache
        self._on_token: OnToken | None = None
        self._cancelling = self._taking_all = False
        # The output of a decode step that the host has not read yet.
        self._unread: tuple[dict[int, scheduler.GeneratedSequence], Any] | None = None

    def generate(
        self,
        requests: Iterable[Request],
        *,
        shorten: Shorten | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Result]:
        """Serves requests and yields each result as soon as it is finished, in any order.

        Args:
          requests: read a few ahead of the slots.
          shorten: called with a request that is too long and by how many tokens; returns a shorter
            one (fewer examples) or None. It may be called again.
          progress: advanced by 1 per request, with prefill and decode tokens/s.

        Raises:
          TooLong: a request exceeds the context and `shorten` returned none that fits.
        """
        yield from self.serve(requests, shorten=shorten, progress=progress)

    def score(
        self, requests: Iterable[Scoring], *, progress: Progress | None = None
    ) -> Iterator[Scores]:
        """Scores continuations and yields each request's scores in any order, as `generate`."""
        yield from self.serve(requests, progress=progress)

    def loglikelihood(
        self, prompt: str | Sequence[int], continuations: Sequence[str] | Sequence[Sequence[int]]
    ) -> tuple[Score, ...]:
        """Scores the continuations of one prompt; `score` batches many prompts."""
        (scores,) = self.score([Scoring(0, prompt, continuations)])
        return scores.scores

    @property
    def cache(self) -> KVCache:
        """The slots' keys and values on the device; every program donates and replaces them."""
        return self._runner.cache

    @property
    def look_ahead(self) -> int:
        """How many requests are read at once."""
        return _LOOK_AHEAD * self.config.slots

    def forget(self) -> None:
        """Drops the cached prefixes of earlier prompts: nothing of them is reused."""
        self._pool.clear()

    def tokenized(self, request: Request | Scoring) -> Tokenized:
        """A request as `serve` takes it too; may be called from any thread, while it serves.

        Raises:
          TooLong, UserError: it cannot be served.
        """
        return self._tokenizer.tokenize(request)

    def serve(
        self,
        requests: Iterable[Request | Scoring | Tokenized | None],
        *,
        shorten: Shorten | None = None,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
    ) -> Iterator[Result | Scores]:
        """Serves requests of both kinds together, as `generate`.

        Args:
          requests: also already tokenized; None says that no other one is there yet, so that those
            that are there are served without waiting, and that more may follow. Where the engine
            has nothing to do, the iterator waits itself.
          on_token: called with a sequence after each of its tokens.
        """
        if self._running:
            raise RuntimeError("the engine is already serving: finish or close that iterator first")
        self._running, self._unread, self._on_token = True, None, on_token
        try:
            yield from self._serve(self._tokenized(requests, shorten), progress)
        finally:  # also where it is closed between two results: what is in the cache stays valid
            self._pool.release_all()
            self._beams.clear()
            if self._pictures is not None:
                self._pictures.clear()
            self._encoding = []
            self._running = False

    def cancel(self, request: scheduler.TokenizedRequest) -> None:
        """Drops a request that was handed to `serve`; it gives no result.

        To be called in the thread that serves, between two results or while it takes requests.
        What is being encoded is encoded to its end, since others may share its prefix.
        """
        for sequence in request.sequences:
            if not sequence.finish:
                sequence.finish = scheduler.CANCELLED
        self._cancelling = True

    def take_all(self) -> None:
        """Lets `serve` take all requests that are there, although enough wait for a slot.

        To be called in any thread, when what is there says which request to cancel.
        """
        self._taking_all = True

    def _tokenized(
        self, requests: Iterable[Request | Scoring | Tokenized | None], shorten: Shorten | None
    ) -> Iterator[Tokenized | None]:
        seen: set[Hashable] = set()
        for request in requests:
            if request is None or isinstance(request, Tokenized):
                yield request
                continue
            if request.id in seen:
                raise UserError(
                    f"request {request.id!r}: its id is not unique; give each request its own."
                )
            seen.add(request.id)
            excess, request_id = None, request.id
            while True:
                try:
                    yield self._tokenizer.tokenize(request)
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
                            f"request {request_id!r}: `shorten` changed its id to {shorter.id!r}; "
                            "keep the id."
                        ) from error
                    request = shorter

    def _serve(
        self, requests: Iterator[Tokenized | None], progress: Progress | None
    ) -> Iterator[Result | Scores]:
        slots = self.config.slots
        waiting: collections.deque[AnySequence] = collections.deque()
        active: dict[int, scheduler.GeneratedSequence] = {}  # by slot
        waited, exhausted, all_here = 0, False, False
        while True:
            finished: list[Result | Scores] = []
            all_here = exhausted
            if take_all := self._taking_all:
                self._taking_all = False  # another thread sets it behind what it hands over
            while not all_here and (take_all or len(waiting) < slots):
                more, all_here, exhausted = _next_requests(requests, self.look_ahead)
                finished += self._beams.serve(more, rest=all_here)
                sequences = [sequence for request in more for sequence in request.sequences]
                # Common prefixes next to each other, so that they are encoded once.
                sequences.sort(key=lambda sequence: sequence.chunks)
                if not self._model.config.recurrent:  # a state is of no prefix
                    for sequence in sequences:
                        sequence.keys = prefix_keys(sequence.chunks, self._pool.unit)
                waiting.extend(sequences)
                if self._pictures is not None:
                    self._pictures.expect(sequences)
            if self._cancelling:
                self._drop_cancelled(waiting, active)
            self._admit(waiting)
            last = all_here and not waiting
            batches = self._batches(partial=last or not active or waited >= _PATIENCE)
            # Those that decode wait for one batch at most, unless more are still to be encoded.
            mixed = len(active) >= len(self._encoding)
            ended: list[AnySequence] = []
            if active and (mixed or not batches):
                waited += not batches and len(self._encoding) > 0
                ended += self._decode(active)
            if batches:
                ended += self._prefill(batches[:1] if mixed else batches, active)
            elif exhausted and not waiting and not active and not finished and not ended:
                return
            if not self._encoding:
                waited = 0
            results = [
                request.result()
                for request in dict.fromkeys(sequence.request for sequence in ended)
            ]
            for result in finished + [result for result in results if result is not None]:
                self.throughput.requests += 1
                if progress is not None:
                    progress.advance(1, **self._rates())
                yield result

    def _drop_cancelled(
        self,
        waiting: collections.deque[AnySequence],
        active: dict[int, scheduler.GeneratedSequence],
    ) -> None:
        """Takes what was cancelled out of those that wait, and out of the slots that decode."""
        self._cancelling = False
        for sequence in [sequence for sequence in waiting if _is_cancelled(sequence)]:
            waiting.remove(sequence)
            if self._pictures is not None:
                self._pictures.forget(sequence)
        for slot in [slot for slot, sequence in active.items() if _is_cancelled(sequence)]:
            del active[slot]
            self._pool.release(slot)

    def _reusable(self, sequence: AnySequence) -> int:
        """How many of a waiting sequence's first chunks are there."""
        columns = self._pool.reusable(sequence.keys, sequence.reusable_columns)
        return chunks_within(sequence.chunks, columns)

    def _admit(self, waiting: collections.deque[AnySequence]) -> None:
        """Gives sequences, in their order, slots and pages as far as these are free; their prompts
        are encoded from now on."""
        while waiting:
            sequence = waiting[0]
            placement = self._pool.place(
                sequence.keys, sequence.most_columns, sequence.reusable_columns
            )
            if placement is None:
                return
            waiting.popleft()
            self._runner.assign(placement.slot, placement.pages)
            sequence.slot, sequence.awaited = placement.slot, placement.awaited
            sequence.encoded = sequence.reused = chunks_within(sequence.chunks, placement.reused)
            self.throughput.reused_tokens += placement.reused
            self._encoding.append(sequence)
            if self._pictures is not None:
                self._pictures.place(sequence)

    def _batches(self, *, partial: bool) -> list[Batch]:
        """Sequences and next chunks of theirs that fill a batch of one program, by row.

        Each shard of the slots has its own rows. Where a program's rows read what its other rows
        write, several chunks of a sequence lie in one batch.

        `partial`: if none is full, the fullest will do.
        """
        groups = collections.defaultdict(list)
        for sequence in self._encoding:
            if sequence.ready:
                of_program, *others = map(self._program, sequence.chunks[sequence.encoded :])
                same = itertools.takewhile(of_program.__eq__, others)
                count = 1 + len(list(same)) if self._runner.joins_chunks else 1
                next_chunks = sequence.chunks[sequence.encoded : sequence.encoded + count]
                groups[of_program].extend((sequence, chunk) for chunk in next_chunks)
        shards = self._runner.shards
        full, rest = [], []
        for (bucket, *_), group in groups.items():
            count = self.config.rows(bucket, shards)
            share = count // shards
            of_shard: list[list[tuple[AnySequence, Chunk]]] = [[] for _ in range(shards)]
            for sequence, chunk in group:
                of_shard[self._pool.shard(sequence.slot)].append((sequence, chunk))
            for first in range(0, max(map(len, of_shard)), share):
                batch = {
                    shard * share + row: pair
                    for shard, pairs in enumerate(of_shard)
                    for row, pair in enumerate(pairs[first : first + share])
                }
                if len(batch) == count:
                    full.append(batch)
                else:
                    rest.append((len(batch) / count, batch))
        if full or not partial or not rest:
            return full
        return [max(rest, key=lambda share_and_batch: share_and_batch[0])[1]]

    def _program(self, chunk: Chunk) -> tuple[int, bool, bool]:
        """Chunks with equal ones are encoded by one program: branches may have another."""
        bucket = bucket_of(len(chunk.tokens), self.config.buckets)
        return bucket, chunk.trunk > 0, bool(chunk.hidden)

    def _prefill(
        self, batches: Sequence[Batch], active: dict[int, scheduler.GeneratedSequence]
    ) -> list[AnySequence]:
        """Encodes the next chunks of batches; returns the sequences that this finished, and makes
        those active that go on."""
        began = time.perf_counter()
        outputs: list[tuple[Callable[..., list[AnySequence]], Any]] = []
        for batch in batches:
            _, chunk = next(iter(batch.values()))
            outputs += self._encode(batch, bucket_of(len(chunk.tokens), self.config.buckets))
        encoded = [sequence for sequence in self._encoding if sequence.whole]
        self._encoding = [sequence for sequence in self._encoding if not sequence.whole]
        finished = []
        for read, output in outputs:
            finished += read(*jax.device_get(output))
        for sequence in encoded:
            if isinstance(sequence, scheduler.GeneratedSequence) and not sequence.finish:
                active[sequence.slot] = sequence
            else:
                self._pool.release(sequence.slot)
        self.throughput.prefill_seconds += time.perf_counter() - began
        return finished

    def _encode(
        self, batch: Batch, bucket: int
    ) -> list[tuple[Callable[..., list[AnySequence]], Any]]:
        """Encodes the chunks of a batch.

        Returns what must be read afterwards: a function, and the device arrays that it takes.
        """
        count = self.config.rows(bucket, self._runner.shards)
        tokens = np.zeros((count, bucket), np.int32)
        starts, ends = np.zeros(count, np.int32), np.zeros(count, np.int32)
        rows = np.full(count, self.config.slots, np.int32)  # slots; this of padding rows
        branches = Branches(np.zeros(count, np.int32), np.zeros((count, bucket), np.int32))
        hidden = np.zeros((2, count, bucket), np.int32)
        for row, (sequence, chunk) in batch.items():
            tokens[row, : len(chunk.tokens)] = marked(chunk.tokens)
            starts[row], ends[row], rows[row] = chunk.start, chunk.end, sequence.slot
            branches.trunk[row] = chunk.trunk
            branches.begin[row, : len(chunk.branches)] = chunk.branches
            hidden[:, row, : len(chunk.hidden)] = np.reshape(chunk.hidden, (-1, 2)).T
            sequence.encoded += 1
            self.throughput.prefill_tokens += len(chunk.tokens)
        if any(chunk.hidden for _, chunk in batch.values()):
            branches = branches.replace(hidden=tuple(hidden))
        patches = None
        if self._pictures is not None:
            patches = self._pictures.rows(batch, tokens.shape)
        shifts = None
        if self._model.config.mrope:
            shifts = np.zeros((count, bucket, 3), np.int32)
            for row, (sequence, chunk) in batch.items():
                shifts[row, : len(chunk.tokens)] = sequence.shifts(chunk.start, chunk.end)
        adapters = self._numbers(count, {row: sequence for row, (sequence, _) in batch.items()})
        inputs = tokens, starts, ends, rows, branches, patches, shifts, adapters
        hidden = self._runner.encode(*inputs)
        for sequence, chunk in batch.values():
            self._pool.encoded(sequence.slot, chunk.end)
        outputs = []
        begun = {
            row: sequence
            for row, (sequence, chunk) in batch.items()
            if isinstance(sequence, scheduler.GeneratedSequence) and chunk is sequence.chunks[-1]
        }
        if begun:
            outputs.append(
                (functools.partial(self._append_tokens, begun), self._begin(begun, hidden))
            )
        targets = [
            (row, offset, sequence, target)
            for row, (sequence, chunk) in batch.items()
            if isinstance(sequence, scheduler.ScoredSequence)
            for offset, target in sequence.targets(chunk)
        ]
        most = self.config.scored_tokens
        outputs += [
            self._score(targets[n : n + most], hidden) for n in range(0, len(targets), most)
        ]
        return outputs

    def _begin(self, begun: Mapping[int, scheduler.GeneratedSequence], hidden: jax.Array):
        """Draws the first tokens after prompts that are completely encoded."""
        count = hidden.shape[0]
        lengths, positions = np.ones(count, np.int32), np.zeros(count, np.int32)
        shifts = np.zeros(count, np.int32) if self._model.config.mrope else None
        rows = np.full(count, self.config.slots, np.int32)
        parameters = parameters_of(
            count,
            {row: (sequence.request.original, sequence.draw) for row, sequence in begun.items()},
        )
        for row, sequence in begun.items():
            lengths[row] = len(sequence.chunks[-1].tokens)
            positions[row] = end = sequence.chunks[-1].end
            if shifts is not None:  # the three are the same behind a prompt
                shifts[row] = np.max(sequence.shifts(end, end + 1))
            rows[row] = sequence.slot
        text = None
        if columns := self._runner.text_columns:
            text = np.zeros((count, columns), np.int32)
            for row, sequence in begun.items():
                prompt = sequence.request.prompt
                text[row, : len(prompt)] = marked(prompt)
        shaping = shaping_of(
            count, {row: sequence.shape for row, sequence in begun.items()}, self._vocab_size
        )
        inputs = hidden, lengths, rows, positions, parameters, shifts, text, shaping
        return self._runner.begin(*inputs)

    def _score(
        self,
        targets: Sequence[tuple[int, int, scheduler.ScoredSequence, scheduler.Target]],
        hidden: jax.Array,
    ):
        """Log-probabilities of (row, offset, sequence, target); returns as `_encode`."""
        rows, offsets, tokens = np.zeros((3, self.config.scored_tokens), np.int32)
        for n, (row, offset, _, target) in enumerate(targets):
            rows[n], offsets[n], tokens[n] = row, offset, target.token
        read = functools.partial(
            _append_scores, [(sequence, target) for _, _, sequence, target in targets]
        )
        return read, self._runner.score(hidden, rows, offsets, tokens)

    def _decode(self, active: dict[int, scheduler.GeneratedSequence]) -> list[AnySequence]:
        """Starts a step of all slots and reads the previous one; returns what that one finished.

        The device then does not wait for the host. Where an answer's shape depends on its last
        token, the previous step is read first. A slot whose sequence was finished by the
        previous step decodes one token too many, which is not read; whoever gets its pages next
        writes them after that.
        """
        began = time.perf_counter()
        finished = []
        if any(sequence.shape for sequence in active.values()):
            finished += self._read_step(active)
        # A sequence whose last token is still unread is not decoded further.
        rows = {slot: sequence for slot, sequence in active.items() if sequence.undecoded > 0}
        started = None
        if rows:
            mask = np.isin(np.arange(self.config.slots), list(rows))
            # As far as they come if this step and the unread one write all that they take.
            beyond = 2 * (self.config.speculate - 1)
            columns = max(sequence.columns for sequence in rows.values()) + beyond
            adapters = self._numbers(self.config.slots, rows)
            shapes = {slot: sequence.shape for slot, sequence in rows.items()}
            shaping = shaping_of(self.config.slots, shapes, self._vocab_size)
            started = rows, self._runner.step(mask, columns, adapters, shaping)
            for sequence in rows.values():
                sequence.undecoded -= 1
            self.throughput.steps += 1
        finished += self._read_step(active)
        self._unread = started
        self.throughput.decode_seconds += time.perf_counter() - began
        return finished

    def _read_step(self, active: dict[int, scheduler.GeneratedSequence]) -> list[AnySequence]:
        """Reads the step that is not read yet, if there is one; returns what it finished, which is
        active no more."""
        if self._unread is None:
            return []
        (rows, output), self._unread = self._unread, None
        rows = {slot: sequence for slot, sequence in rows.items() if not sequence.finish}
        before = sum(len(sequence.tokens) for sequence in rows.values())
        finished = self._append_tokens(rows, *jax.device_get(output))
        written = sum(len(sequence.tokens) for sequence in rows.values()) - before
        self.throughput.decode_tokens += written
        self.throughput.turns += len(rows)
        for sequence in finished:
            del active[sequence.slot]
            self._pool.release(sequence.slot)
        return finished

    def _numbers(self, count: int, rows: Mapping[int, AnySequence]) -> np.ndarray | None:
        """The adapters of `count` rows, int32 [count, 1]; None: the engine has none."""
        if not self._adapters:
            return None
        numbers = np.zeros((count, 1), np.int32)
        for row, sequence in rows.items():
            numbers[row] = sequence.chunks[0].adapter
        return numbers

    def _append_tokens(
        self,
        rows: Mapping[int, scheduler.GeneratedSequence],
        tokens: np.ndarray,
        logprobs: np.ndarray | TopLogprobs,
    ) -> list[AnySequence]:
        """Gives every sequence the token, or tokens, of its row; returns those that it finished.

        Args:
          tokens: int [R], or [R, L] with -1 behind the last one.
          logprobs: float, of each, and of the likeliest in its place where some rows are shaped.
        """
        finished: list[AnySequence] = []
        top = logprobs if isinstance(logprobs, TopLogprobs) else None
        chosen = logprobs if top is None else top.chosen
        tokens, logprobs = (x.reshape(len(x), -1).tolist() for x in (tokens, chosen))
        for row, sequence in rows.items():
            for number, token in enumerate(tokens[row]):
                if token < 0 or (number and sequence.finish):
                    break
                sequence.undecoded -= number > 0  # the first is the one that was started
                likeliest = _likeliest(top, row, number) if top and sequence.shape else ()
                if sequence.append(token, logprobs[row][number], likeliest):
                    finished.append(sequence)
                if self._on_token is not None and sequence.finish != scheduler.CANCELLED:
                    self._on_token(sequence)
        return finished

    def _rates(self) -> dict[str, str]:
        return {
            "prefill": f"{self.throughput.prefill_rate:.0f} tokens/s",
            "decode": f"{self.throughput.decode_rate:.0f} tokens/s",
        }


def serve_ready(model: Llama, config: EngineConfig, mesh: Mesh | None) -> None:
    """Brings a model's arrays into the form in which they serve, in place."""
    repeat_key_heads(model, mesh)
    if not scans(config, mesh) and not isinstance(model.layers, nnx.List):
        unstack_layers(model)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    if config.exact and device.platform == "cpu":
        transpose_head(model)
        widen_routers(model)
    if config.weights == "int8":
        quantize_weights(model)
    elif config.weights != "given" and not holds_codes(model):
        raise UserError(
            f"engine.weights={config.weights}: the model holds no matrices in codes; open it by "
            "`load_in_codes` from a checkpoint that is published so, or set it to given."
        )


def _likeliest(top: TopLogprobs, row: int, number: int) -> list[Likeliest]:
    """The likeliest tokens in the place of a row's token; arrays are [R, K], or [R, L, K]."""
    tokens, logprobs = (x.reshape(len(x), -1, x.shape[-1])[row, number].tolist() for x in top[1:])
    return list(map(Likeliest, tokens, logprobs))


def _is_cancelled(sequence: AnySequence) -> bool:
    return (
        isinstance(sequence, scheduler.GeneratedSequence) and sequence.finish == scheduler.CANCELLED
    )


def _next_requests(
    requests: Iterator[Tokenized | None], most: int
) -> tuple[list[Tokenized], bool, bool]:
    """Up to `most` requests, whether no other one is there yet, and whether none will follow."""
    taken: list[Tokenized] = []
    while len(taken) < most:
        request = next(requests, _END)
        if request is None or request is _END:
            return taken, True, request is _END
        taken.append(request)
    return taken, False, False


def _append_scores(
    scored: Sequence[tuple[scheduler.ScoredSequence, scheduler.Target]],
    logprobs: np.ndarray,
    likeliest: np.ndarray,
    highest: np.ndarray,
) -> list[AnySequence]:
    """Gives every sequence the log-probabilities of its targets; returns those that it finished."""
    for n, (sequence, target) in enumerate(scored):
        sequence.append(target, float(logprobs[n]), Likeliest(int(likeliest[n]), float(highest[n])))
    return [
        sequence
        for sequence in dict.fromkeys(sequence for sequence, _ in scored)
        if sequence.finished
    ]
