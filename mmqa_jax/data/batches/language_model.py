"""Training batches of a language model: several examples in a row, which do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from mmqa_jax.data.batches.feed import FeedConfig, Table, feed_batches
from mmqa_jax.data.batches.reading import Batches
from mmqa_jax.data.batches.sampling import PlannedBatch
from mmqa_jax.data.packing import Bucket, Packed


class TokenExample(NamedTuple):
    """A prompt with its completion.

    Attributes:
      tokens: of both, special tokens included.
      start: index of the first token that is learned; all after it are too.
      picture: name of the picture that one token of the prompt stands for; None: there is none.
    """

    tokens: Int32[np.ndarray, " n"]
    start: int
    picture: str | None = None

    @property
    def targets(self) -> int:
        """Tokens that are learned."""
        return len(self.tokens) - self.start


class RowSize(NamedTuple):
    """What a row holds: so many tokens, and so many of them learned."""

    length: int
    targets: int

    def holds(self, example: TokenExample) -> bool:
        """Whether an example fits a row of its own."""
        return len(example.tokens) <= self.length and example.targets <= self.targets


def language_model_batches(
    versions: Sequence[Sequence[TokenExample]],
    probabilities: Sequence[float],
    feed: FeedConfig,
    *,
    length: int,
    targets: int,
) -> Batches:
    """Examples packed into rows; an epoch shows every example once, in one of its versions.

    A batch: the arrays of `packed_batch`, and index int32[B, M]: the examples of each row.

    Args:
      versions: of every example, as many as `probabilities`, each of which fits a row.
      probabilities: of each version in an epoch; they sum up to 1.
      length, targets: see RowSize.
    """
    size, count = RowSize(length, targets), len(probabilities)
    flat = [example for own in versions for example in own]
    sizes = np.array([(len(example.tokens), example.targets) for example in flat])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((14, feed.seed, epoch))
        chosen = np.arange(len(versions)) * count + rng.choice(
            count, len(versions), p=probabilities
        )
        rows = pack_rows(sizes[chosen := rng.permutation(chosen)], size)
        members = np.full((len(rows), max(map(len, rows))), -1)
        for row, own in enumerate(rows):
            members[row, : len(own)] = chosen[own]
        return {"members": members, "bucket": np.zeros(len(rows), np.int64)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        members = table["members"]
        rows = [[flat[i] for i in own if i >= 0] for own in members]
        named = np.where(members < 0, members[:, :1], members) // count
        return {**packed_batch(rows, size), "index": named.astype(np.int32)}

    return feed_batches(sample, [Bucket(0, length)], make, feed)


def pack_rows(sizes: np.ndarray, size: RowSize) -> list[list[int]]:
    """Rows of example indices: each example goes to the first row with room for it.

    Args:
      sizes: int[N, 2], tokens and targets of every example; each fits an empty row.
    """
    room = np.tile(np.array(size), (len(sizes), 1))  # as many rows as there can be
    rows: list[list[int]] = []
    for example, needed in enumerate(sizes):
        row = int((room[: len(rows) + 1] >= needed).all(axis=1).argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(example)
        room[row] -= needed
    return rows


def packed_batch(rows: Sequence[Sequence[TokenExample]], size: RowSize) -> Packed:
    """Rows of examples as arrays of a static shape.

    Returns:
      input_ids, segments, positions int32[B, L]: tokens; the number of the token's example in its
      row, from 1, 0 at padding; its position within the example.
      target_positions, target_ids, target_segments int32[B, T]: where a target is predicted, which
      is one before it; the target; its example, 0 where there is no target.
    """
    wide = {name: np.zeros((len(rows), size.length), np.int32)
            for name in ("input_ids", "segments", "positions")}  # fmt: skip
    few = {name: np.zeros((len(rows), size.targets), np.int32)
           for name in ("target_positions", "target_ids", "target_segments")}  # fmt: skip
    for row, examples in enumerate(rows):
        at = learned = 0
        for number, example in enumerate(examples, start=1):
            end, last = at + len(example.tokens), learned + example.targets
            wide["input_ids"][row, at:end] = example.tokens
            wide["segments"][row, at:end] = number
            wide["positions"][row, at:end] = np.arange(end - at)
            few["target_positions"][row, learned:last] = np.arange(at + example.start, end) - 1
            few["target_ids"][row, learned:last] = example.tokens[example.start :]
            few["target_segments"][row, learned:last] = number
            at, learned = end, last
    return {**wide, **few}
