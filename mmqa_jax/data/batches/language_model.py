"""Training batches of a language model: several examples in a row, which do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from mmqa_jax.data.batches.feed import (
    Batches,
    FeedConfig,
    PlannedBatch,
    Table,
    feed_batches,
    interleaved,
    mixture_epoch,
)
from mmqa_jax.data.batches.packing import Bucket, Packed


class TokenExample(NamedTuple):
    """A prompt with its completion, or a conversation.

    Attributes:
      tokens: of all of it, special tokens included.
      start: index of the first token that is learned.
      pictures: names of the pictures that a token each of the prompt stands for.
      learned: indices of the tokens that are learned, ascending; None: all from `start` on.
    """

    tokens: Int32[np.ndarray, " n"]
    start: int
    pictures: tuple[str, ...] = ()
    learned: Int32[np.ndarray, " t"] | None = None

    @property
    def places(self) -> np.ndarray:
        """Indices of the tokens that are learned."""
        return np.arange(self.start, len(self.tokens)) if self.learned is None else self.learned

    @property
    def targets(self) -> int:
        """Tokens that are learned."""
        return len(self.tokens) - self.start if self.learned is None else len(self.learned)


class RowSize(NamedTuple):
    """A row holds so many tokens, and so many of them are learned."""

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
    members: Sequence[int] = (),
) -> Batches:
    """Examples packed into rows; an epoch shows every example once, in one of its versions.

    A batch: the arrays of `packed_batch`, and index int32[B, M]: the examples of each row.

    Args:
      versions: of every example, as many as `probabilities`, each of which fits a row.
      probabilities: of each version in an epoch; they sum up to 1.
      length, targets: see RowSize.
      members: of a mixture (`feed.mixture`), the corpus of every example.
    """
    size, count = RowSize(length, targets), len(probabilities)
    flat = [example for forms in versions for example in forms]
    sizes = np.array([(len(example.tokens), example.targets) for example in flat])
    corpora = np.asarray(members)
    known: list[Table] = []  # of all epochs, if each example has one version for certain

    def sample(epoch: int) -> Table:
        if known:
            return known[0]
        rng = np.random.default_rng((14, feed.seed, epoch))
        order = np.arange(len(versions))
        if feed.mixture:
            parts = mixture_epoch(corpora, feed.mixture, feed.seed, epoch)
            order = np.concatenate([part for _, part in parts])
        chosen = order * count + rng.choice(count, len(order), p=probabilities)
        chosen = rng.permutation(chosen)
        if feed.mixture:
            chosen = chosen[interleaved(corpora[chosen // count])]
        packed = [chosen[row] for row in pack_rows(sizes[chosen], size)]
        members = np.empty(len(packed), object)
        members[:] = packed
        table = {"members": members, "bucket": np.zeros(len(packed), np.int64)}
        if max(probabilities) == 1 and not feed.mixture:
            known.append(table)
        return table

    def make(planned: PlannedBatch, table: Table) -> Packed:
        members = table["members"]
        most = max(map(len, members))
        named = [np.pad(row, (0, most - len(row)), constant_values=row[0]) for row in members]
        return {
            **packed_batch([[flat[i] for i in row] for row in members], size),
            "index": (np.stack(named) // count).astype(np.int32),
        }

    return feed_batches(sample, [Bucket(0, length)], make, feed)


def pack_rows(sizes: np.ndarray, size: RowSize) -> list[list[int]]:
    """Rows of example indices: each example goes to the first row with room for it.

    A tree over the rows holds the most room of each branch (node n has 2n and 2n + 1), so that a
    row is found in about as many steps as the tree is high.

    Args:
      sizes: int[N, 2], tokens and targets of every example; each fits an empty row.
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()  # as many rows as there can be
    tokens, targets = [size.length] * 2 * leaves, [size.targets] * 2 * leaves
    rows: list[list[int]] = []
    for example, (length, learned) in enumerate(sizes.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            # A branch may hold both maxima in different rows: then the search goes on behind it.
            while tokens[node] < length or targets[node] < learned:
                while node & 1:
                    node >>= 1
                node += 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(example)
        tokens[node] -= length
        targets[node] -= learned
        while node := node >> 1:
            most = max(tokens[2 * node], tokens[2 * node + 1])
            most_learned = max(targets[2 * node], targets[2 * node + 1])
            if most == tokens[node] and most_learned == targets[node]:
                break
            tokens[node], targets[node] = most, most_learned
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
            few["target_positions"][row, learned:last] = at + example.places - 1
            few["target_ids"][row, learned:last] = example.tokens[example.places]
            few["target_segments"][row, learned:last] = number
            at, learned = end, last
    return {**wide, **few}
