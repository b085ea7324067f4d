"""Frequent checkpoints on the hosts' own disks, beside the rare ones in the workdir.

Each process saves the blocks of all arrays that its devices hold, to a local disk or RAM disk. A
restart takes the newest step of which the processes hold every block together, whatever their
numbers and mesh are; who lacks a block gets it from a process that has it.

    FOLDER/RUN/STEP-ATTEMPT-PROCESS/arrays        the blocks, one behind the other
                                    index.json    what they are, and the step's record
                                    SHA256SUMS

A copy that is damaged, cut or gone is one that was lost with its host: it is named and left out.

Why not Orbax 0.12.8's own classes (tried on two CPU processes as two slices): in
`emergency.CheckpointManager` slice 0 keeps no local copy, so that of two slices the loss of slice 1
is that of all copies, and one slice alone reads another layout than two wrote; it takes no metrics,
checks no files, and its replica axis has to be an axis of the mesh. `p2p.CheckpointManager` reads
copies only under the process number that wrote them and on as many devices. The replicator of
`multi_tier_checkpointing` is a service of GKE's.
"""

import math
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.checkpoints.checksums import SUMS, find_damage, write_sums
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.paths import in_store
from mmqa_jax.core.progress import announce

_VARIABLE = "MMQA_LOCAL_CHECKPOINTS"
_COPY = re.compile(r"(\d{1,12})-([0-9a-f]{8})-(\d{1,12})")
_UNFINISHED = ".unfinished"
_ARRAYS, _INDEX = "arrays", "index.json"
_SENT_BYTES = 2**24  # at once

Block = tuple[tuple[int, int], ...]  # (start, stop) in each dimension of an array


class HeldStep(NamedTuple):
    """A step that the processes hold together."""

    # step, record: as they were saved.
    step: int
    record: dict[str, Any]
    # Array name -> block -> the processes that have it, ascending.
    holders: dict[str, dict[Block, list[int]]]
    # Array name -> block -> file and offset, of the blocks that this process has.
    places: dict[str, dict[Block, tuple[Path, int]]]


def local_folder(environment: Mapping[str, str], every: int) -> Path | None:
    """The folder of MMQA_LOCAL_CHECKPOINTS, which `train.checkpoint_local_every` needs, or None."""
    place = environment.get(_VARIABLE, "")
    if not place:
        if every:
            raise UserError(
                f"config key train.checkpoint_local_every={every}: set {_VARIABLE} on every host "
                "to a folder on its own disk or RAM disk."
            )
        return None
    if in_store(place) or not Path(place).is_absolute():
        raise UserError(
            f"environment: {_VARIABLE}={place}: an absolute path on the host's own disk was "
            "expected."
        )
    try:
        Path(place).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"environment: {_VARIABLE}={place}: the folder cannot be made ({error.strerror}); name "
            "one that can be written."
        ) from error
    return Path(place)


class LocalCheckpoints:
    """The local checkpoints of one run; all processes make the same calls.

    Two are on a disk at the same time at most, one of them being written, and besides what the run
    was resumed from.

    Args:
      folder: of this host, for all runs.
      run: name of this run, the same in all its attempts.
    """

    def __init__(self, folder: Path, run: str):
        self.folder = folder / run
        # Of two attempts at one step the numbers may differ: their blocks are never mixed.
        self._attempt = distributed.gather("attempt", secrets.token_hex(4))[0]
        self._process = distributed.process_index()
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._committed: int | None = None
        self._is_whole = False  # this process has all blocks of what it saved
        for leftover in self.folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(leftover, ignore_errors=True)
        distributed.barrier("local leftovers are gone")

    def committed_step(self) -> int | None:
        """The step that a restart of this process alone can take; None if there is none.

        That is the last one of this attempt, if the process has all blocks of all arrays.
        """
        return self._committed if self._is_whole else None

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> None:
        """Starts to save arrays and a record, JSON values that are the same in all processes;
        returns once all is copied, so that the arrays may be donated.
        """
        self.wait()
        distributed.barrier("local checkpoint")  # all have the one before: older ones may go
        if self._committed is not None:
            self._remove_all_but(f"{self._committed}-{self._attempt}-")
        held = {
            name: {
                _block(shard.index, array.shape): shard.data for shard in array.addressable_shards
            }
            for name, array in arrays.items()
        }
        for blocks in held.values():
            for data in blocks.values():
                data.copy_to_host_async()
        self._is_whole = all(
            sum(map(_size, blocks)) == arrays[name].size for name, blocks in held.items()
        )
        described, copies, offset = {}, [], 0
        for name, blocks in held.items():
            placed = []
            for block, data in blocks.items():
                copy = np.array(data)
                placed.append([block, offset])
                copies.append(copy)
                offset += copy.nbytes
            described[name] = [*_kind(arrays[name]), placed]
        index = {"record": record, "arrays": described}
        self._writing = self._writer.submit(self._write, step, index, copies)

    def wait(self) -> None:
        """Waits until the last save is on the disk; raises what went wrong with it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def remove(self) -> None:
        """Removes all local checkpoints of the run on this host."""
        self.wait()
        distributed.barrier("local checkpoints are written")  # by others of this host
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Waits for the last save and frees the thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def newest(self, after: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> HeldStep | None:
        """Returns the newest step above `after` with every block of the `wanted` arrays."""
        names = sorted(name for name in self._names() if _COPY.fullmatch(name))
        here = [socket.gethostname(), str(self.folder), names]
        everywhere = distributed.gather("local checkpoints", here)
        # Processes of one host see the same copies: each reads its share of them.
        neighbors = [process for process, other in enumerate(everywhere) if other == here]
        mine = names[neighbors.index(self._process) :: len(neighbors)]
        attempts = {_step_and_attempt(name) for _, _, there in everywhere for name in there}
        for step, attempt in sorted(attempts, reverse=True):
            if step <= after:
                break
            prefix = f"{step}-{attempt}-"
            held_step = self._together(step, [n for n in mine if n.startswith(prefix)], wanted)
            if held_step is not None:
                return held_step
        return None

    def restore(
        self, held_step: HeldStep, targets: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """The arrays by name, with the shardings of `targets`, which may be of another mesh."""
        sent, arrays = 0, {}
        for name, target in targets.items():
            needed: dict[int, set[Block]] = {}
            indices = target.sharding.devices_indices_map(target.shape)
            for device, index in indices.items():
                needed.setdefault(device.process_index, set()).add(_block(index, target.shape))
            blocks = {}
            for block, holders in sorted(held_step.holders[name].items()):
                wanting = {
                    p for p, wanted in needed.items() if any(_meet(block, w) for w in wanted)
                }
                is_sent = not wanting.issubset(holders)
                readers = holders[:1] if is_sent else wanting
                reads = self._process in readers
                data = self._read(held_step, name, block, target) if reads else None
                if is_sent:
                    data = _broadcast(data, _size(block) * target.dtype.itemsize, holders[0])
                    sent += data.nbytes
                if self._process in wanting:
                    shape = [stop - start for start, stop in block]
                    blocks[block] = data.view(target.dtype).reshape(shape)
            arrays[name] = jax.make_array_from_callback(
                target.shape,
                target.sharding,
                lambda index, blocks=blocks, target=target: _assembled(
                    _block(index, target.shape), blocks, target.dtype
                ),
            )
        if self._process == 0:
            where = f", {sent / 2**20:.1f} MiB of it sent between hosts" if sent else ""
            announce(f"step {held_step.step} is restored from the hosts' own disks{where}.")
        return arrays

    def _names(self) -> list[str]:
        return os.listdir(self.folder) if self.folder.is_dir() else []

    def _remove_all_but(self, prefix: str) -> None:
        for name in self._names():
            if _COPY.fullmatch(name) and not name.startswith(prefix):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write(self, step: int, index: dict[str, Any], copies: list[np.ndarray]) -> None:
        place = self.folder / f"{step}-{self._attempt}-{self._process}"
        begun = place.with_name(place.name + _UNFINISHED)
        try:
            begun.mkdir(parents=True)
            # Nothing waits for the disk: what a power failure cuts, the checksums tell.
            with open(begun / _ARRAYS, "wb") as file:
                for copy in copies:
                    file.write(copy.reshape(-1).view(np.uint8))
            write_json(begun / _INDEX, index)
            write_sums(begun)
            begun.rename(place)
        except BaseException:
            shutil.rmtree(begun, ignore_errors=True)
            raise
        self._committed = step

    def _together(
        self, step: int, names: list[str], wanted: Mapping[str, jax.ShapeDtypeStruct]
    ) -> HeldStep | None:
        """Joins the processes' records of one attempt's step; None if a block is missing."""
        places: dict[str, dict[Block, tuple[Path, int]]] = {name: {} for name in wanted}
        record = None
        for copy in names:
            place = self.folder / copy
            problem = find_damage(place) if (place / SUMS).exists() else f"{SUMS} is missing"
            if problem is not None:
                announce(f"{place}: {problem}; this local checkpoint is left out.")
                continue
            index = read_json(place / _INDEX)
            kinds = {name: (shape, dtype) for name, (shape, dtype, _) in index["arrays"].items()}
            if kinds != {name: _kind(array) for name, array in wanted.items()}:
                continue
            record = index["record"]
            for name, (_, _, placed) in index["arrays"].items():
                for block, offset in placed:
                    places[name][_tuples(block)] = (place / _ARRAYS, offset)
        held = {name: list(blocks) for name, blocks in places.items()}
        holders: dict[str, dict[Block, list[int]]] = {name: {} for name in wanted}
        for process, blocks_of in enumerate(distributed.gather("local blocks", held)):
            for name, blocks in blocks_of.items():
                for block in blocks:
                    holders[name].setdefault(_tuples(block), []).append(process)
        if any(sum(map(_size, holders[name])) != math.prod(wanted[name].shape) for name in wanted):
            return None
        records = distributed.gather("local record", record if self._tells(holders) else None)
        record = next(known_record for known_record in records if known_record is not None)
        return HeldStep(step, record, holders, places)

    def _tells(self, holders: dict[str, dict[Block, list[int]]]) -> bool:
        """Whether this process is the first that holds anything, and so tells the record."""
        return self._process == min(min(p) for blocks in holders.values() for p in blocks.values())

    def _read(
        self, held_step: HeldStep, name: str, block: Block, target: jax.ShapeDtypeStruct
    ) -> np.ndarray:
        """The bytes of a block that this process has."""
        file, offset = held_step.places[name][block]
        size = _size(block) * target.dtype.itemsize
        return np.fromfile(file, np.uint8, count=size, offset=offset)


def _step_and_attempt(name: str) -> tuple[int, str]:
    step, attempt, _ = name.split("-")
    return int(step), attempt


def _kind(array: Any) -> tuple[list[int], str]:
    return list(array.shape), str(array.dtype)


def _block(index: tuple[slice, ...], shape: tuple[int, ...]) -> Block:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _tuples(block: list[list[int]]) -> Block:
    return tuple((start, stop) for start, stop in block)


def _size(block: Block) -> int:
    return math.prod(stop - start for start, stop in block)


def _meet(first: Block, other: Block) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(first, other, strict=True))


def _assembled(wanted: Block, blocks: Mapping[Block, np.ndarray], dtype: np.dtype) -> np.ndarray:
    """A block of an array, from the saved ones that it meets."""
    if wanted in blocks:
        return blocks[wanted]
    whole = np.empty([stop - start for start, stop in wanted], dtype)
    for block, data in blocks.items():
        if _meet(block, wanted):
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, wanted, strict=True)]
            to, of = (
                tuple(
                    slice(a - start, b - start)
                    for (a, b), (start, _) in zip(common, frame, strict=True)
                )
                for frame in (wanted, block)
            )
            whole[to] = data[of]
    return whole


def _broadcast(data: np.ndarray | None, size: int, source: int) -> np.ndarray:
    """The bytes that process `source` has, on all processes."""
    from jax.experimental import multihost_utils

    parts = [np.empty(0, np.uint8)]
    for start in range(0, size, _SENT_BYTES):
        length = min(_SENT_BYTES, size - start)
        # Of few lengths, for each of which a program is compiled.
        padded = np.zeros(1 << max(12, (length - 1).bit_length()), np.uint8)
        if data is not None:
            padded[:length] = data[start : start + length]
        is_source = jax.process_index() == source
        part = multihost_utils.broadcast_one_to_all(padded, is_source=is_source)
        parts.append(np.asarray(part)[:length])
    return np.concatenate(parts)
