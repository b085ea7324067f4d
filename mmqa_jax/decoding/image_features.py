"""The features of the pictures in flight, on the device from their first chunk to their last.

A picture is encoded when a chunk needs it, together with those that the next chunks need, and its
features are dropped with the last chunk of all requests in flight that use it. Which pictures meet
in a batch depends on the requests alone, so that all processes of a mesh do the same.
"""

import collections
import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from mmqa_jax.decoding.image_tower import PatchIds, tower_programs_of
from mmqa_jax.decoding.requests import Throughput
from mmqa_jax.decoding.scheduler import Chunk, SlotSequence
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.qwen_vl.network import QwenVL

_LOOKED_AT = 4  # batches of pictures that follow, among which are those that fill one


class PictureFeatures:
    """Encodes every picture once while requests in flight use it.

    On the device are at most the pictures of the prompts in slots, or as many as slots if these are
    more, and a batch: pictures that only waiting requests use stay while there is room.

    Args:
      model: its tower is used; its language model is the engine's.
      slots: of the engine.
      rows: where the embeddings of a batch of chunks go.
      reusable: how many chunks of a waiting sequence would be copied from a slot now.
      throughput: counts the encoded pictures.
      mesh: of the model.
    """

    def __init__(
        self,
        model: Llava | QwenVL,
        slots: int,
        rows: Sharding,
        reusable: Callable[[SlotSequence], int],
        throughput: Throughput,
        mesh: Mesh | None = None,
    ):
        tower = model.tower()
        self._programs = tower_programs_of(tower, model.config, rows, mesh)
        self._state = jax.device_put(nnx.state(tower), self._programs.parameters)
        self._ids, self._slots, self._mesh = PatchIds(model.config), slots, mesh
        self._reusable, self._throughput = reusable, throughput
        self._resident: dict[int, jax.Array] = {}  # by number: [patches, features]
        # Of sequences in slots: the column of each picture's last patch that is not yet encoded.
        self._placed: dict[SlotSequence, dict[int, int]] = {}
        self._waiting: dict[SlotSequence, None] = {}  # for slots, in order
        # How many sequences use a picture: of those in slots, of those that wait.
        self._now: collections.Counter[int] = collections.Counter()
        self._later: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        """How many pictures' features are on the device."""
        return len(self._resident)

    def expect(self, sequences: Iterable[SlotSequence]) -> None:
        """Sequences that wait for slots, behind those that do already."""
        for sequence in sequences:
            if sequence.pictures:
                self._waiting[sequence] = None
                self._later.update(sequence.pictures.keys())

    def forget(self, sequence: SlotSequence) -> None:
        """A sequence that waits will get no slot."""
        if sequence.pictures:
            del self._waiting[sequence]
            _remove(self._later, sequence.pictures)
            self._drop()

    def place(self, sequence: SlotSequence) -> None:
        """A sequence has got a slot; its first `reused` chunks are copied there."""
        if not sequence.pictures:
            return
        del self._waiting[sequence]
        _remove(self._later, sequence.pictures)
        if needed := self._last_columns(sequence.chunks[sequence.reused :]):
            self._placed[sequence] = needed
            self._now.update(needed.keys())
        self._drop()

    def rows(
        self, batch: Mapping[int, tuple[SlotSequence, Chunk]], shape: tuple[int, int]
    ) -> jax.Array | None:
        """The embeddings of the patches in chunks that are about to be encoded.

        Args:
          batch: by row, sequences in slots and chunks of theirs.
          shape: [R, L] of the batch with its padding.

        Returns:
          [R, L, features] on the device in the language model's dtype, anything where a token is
          no patch; None if there is no patch at all.
        """
        patches_of = [self._ids.of(chunk.tokens) for _, chunk in batch.values()]
        needed = {
            number: sequence.pictures[number]
            for (sequence, _), patches in zip(batch.values(), patches_of, strict=True)
            for _, number, _ in patches
        }
        if not needed:
            return None
        self._encode({n: pixels for n, pixels in needed.items() if n not in self._resident})
        features = [self._resident[number] for number in needed]
        order = {number: n for n, number in enumerate(needed)}
        which, patch_of = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        for row, patches in zip(batch, patches_of, strict=True):
            for position, number, patch in patches:
                which[row, position], patch_of[row, position] = order[number], patch
        embedded = self._programs.place(self._run, features, which, patch_of)
        for sequence, chunk in batch.values():
            self._release(sequence, chunk.end)
        self._drop()
        return embedded

    def clear(self) -> None:
        """Forgets all sequences, and drops all features."""
        for held in (self._resident, self._placed, self._waiting, self._now, self._later):
            held.clear()

    def _last_columns(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """The pictures of chunks, each with the column of its last patch."""
        return {
            number: chunk.start + position
            for chunk in chunks
            for position, number, _ in self._ids.of(chunk.tokens)
        }

    def _release(self, sequence: SlotSequence, end: int) -> None:
        """A sequence is encoded up to a column."""
        last = self._placed.get(sequence, {})
        done = [number for number, column in last.items() if column < end]
        _remove(self._now, done)
        for number in done:
            del last[number]
        if not last:
            self._placed.pop(sequence, None)

    @property
    def _room(self) -> int:
        """How many pictures may be on the device."""
        return max(self._slots, len(self._now)) + self._programs.batches[-1]

    def _drop(self) -> None:
        """Drops what nobody uses, then what is used last while there is no room for it."""
        for number in self._resident.keys() - self._now.keys() - self._later.keys():
            del self._resident[number]
        if len(self._resident) > self._room:
            order = dict.fromkeys(
                number for sequence in self._waiting for number in sequence.pictures
            )
            spare = [n for n in order if n in self._resident and n not in self._now]
            for number in spare[self._room - len(self._resident) :]:
                del self._resident[number]

    def _encode(self, missing: dict[int, np.ndarray]) -> None:
        """Encodes pictures by kind, and those that follow as far as they fill a batch: padding
        takes as long as pictures do."""
        if not missing:
            return
        of_kind: dict[Hashable, dict[int, np.ndarray]] = collections.defaultdict(dict)
        for number, pixels in missing.items():
            of_kind[self._programs.kind(pixels)][number] = pixels
        smallest, largest = self._programs.batches[0], self._programs.batches[-1]
        free = max(0, self._room - len(self._resident) - len(missing))
        for number, pixels in itertools.islice(self._following(), _LOOKED_AT * largest):
            waiting = of_kind.get(self._programs.kind(pixels), {})
            if free and len(waiting) % largest and number not in waiting:
                waiting[number] = pixels
                free -= 1
        for waiting in of_kind.values():
            pictures = list(waiting.items())
            while pictures:
                size = largest if len(pictures) >= largest else smallest
                now, pictures = pictures[:size], pictures[size:]
                inputs = self._programs.inputs([pixels for _, pixels in now], size)
                encoded = self._run(self._programs.encode, self._state, inputs)
                self._resident.update(
                    (number, features) for (number, _), features in zip(now, encoded, strict=False)
                )
                self._throughput.pictures += len(now)

    def _following(self) -> Iterator[tuple[int, np.ndarray]]:
        """Pictures that are not on the device, in the order in which they will be needed."""
        for sequence, needed in self._placed.items():
            for number in needed:
                if number not in self._resident:
                    yield number, sequence.pictures[number]
        for sequence in self._waiting:
            if sequence.pictures.keys() <= self._resident.keys():
                continue
            for number in self._last_columns(sequence.chunks[self._reusable(sequence) :]):
                if number not in self._resident:
                    yield number, sequence.pictures[number]

    def _run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a program on the mesh: while it is traced, it asks for that one's platform."""
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            return program(*arguments)


def _remove(counts: collections.Counter[int], numbers: Iterable[int]) -> None:
    """Counts each number once less."""
    for number in numbers:
        counts[number] -= 1
        if not counts[number]:
            del counts[number]
