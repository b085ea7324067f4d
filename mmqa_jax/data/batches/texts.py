"""Batches of texts that a model reads and texts that it writes: of a decoder, and of an encoder
with a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    mixed,
    mixture_epoch,
)
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.tokenizers import cut_before_end

# Training batches of a language model: several examples in a row, which do not see each other.


class TokenExample(NamedTuple):
    """A prompt with its completion, or a conversation."""

    tokens: Int32[np.ndarray, " n"]  # of all of it, special tokens included
    start: int  # index of the first token that is learned
    # Names of the pictures that a token each of the prompt stands for.
    pictures: tuple[str, ...] = ()
    # Indices of the tokens that are learned, ascending; None: all from `start` on.
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

    `sizes`: int[N, 2], tokens and targets of every example; each fits an empty row.
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


# Training batches of an encoder-decoder: one example in a row, prompts in buckets of lengths.


class PairSize(NamedTuple):
    """A row holds a prompt of `length` tokens and an answer of `targets`."""

    length: int
    targets: int

    def holds(self, example: TokenExample) -> bool:
        """Whether an example fits a row."""
        return example.start <= self.length and example.targets <= self.targets


def seq2seq_batches(
    versions: Sequence[Sequence[TokenExample]],
    probabilities: Sequence[float],
    feed: FeedConfig,
    *,
    lengths: Sequence[int],
    targets: int,
    more: Callable[[Sequence[int]], Packed] | None = None,
    members: Sequence[int] = (),
) -> Batches:
    """Prompts and answers; an epoch shows every example once, in one of its versions.

    A batch: the arrays of `pair_batch`, and index int32[B]: the examples.

    Args:
      versions: of every example, as many as `probabilities`, each of which fits the longest row.
      probabilities: of each version in an epoch; they sum up to 1.
      lengths: of prompts, ascending; each is padded to the first that holds it, and a batch has
        prompts of one.
      targets: tokens of an answer.
      more: of the numbers of a batch's examples: further arrays of it.
      members: of a mixture (`feed.mixture`), the corpus of every example.
    """

    def make(examples: Sequence[TokenExample], bucket: Bucket) -> Packed:
        return pair_batch(examples, PairSize(bucket.text, targets))

    return example_batches(
        versions,
        probabilities,
        feed,
        shapes=[Bucket(0, length) for length in lengths],
        bucket_of=lambda example: int(np.searchsorted(np.array(lengths), example.start)),
        make=make,
        more=more,
        members=members,
    )


def pair_batch(examples: Sequence[TokenExample], size: PairSize, rows: int = 0) -> Packed:
    """Examples as arrays of a static shape.

    `rows`: at least so many; those without an example have a prompt of one token and no target.

    Returns:
      input_ids int32[B, length], prompt_lengths int32[B]; target_ids int32[B, targets],
      target_lengths int32[B].
    """
    rows = max(rows, len(examples))
    answers = [example.tokens[example.start :] for example in examples]
    batch = {
        "input_ids": np.zeros((rows, size.length), np.int32),
        "prompt_lengths": np.ones(rows, np.int32),
        **target_arrays(answers, size.targets, rows),
    }
    for row, example in enumerate(examples):
        batch["input_ids"][row, : example.start] = example.tokens[: example.start]
        batch["prompt_lengths"][row] = example.start
    return batch


def target_arrays(answers: Sequence[Sequence[int]], targets: int, rows: int = 0) -> Packed:
    """Answers of at most `targets` tokens as target_ids int32[B, targets], target_lengths int32[B].

    rows: at least so many; those without an answer have no target.
    """
    rows = max(rows, len(answers))
    ids, lengths = np.zeros((rows, targets), np.int32), np.zeros(rows, np.int32)
    for row, answer in enumerate(answers):
        ids[row, : len(answer)] = answer
        lengths[row] = len(answer)
    return {"target_ids": ids, "target_lengths": lengths}


# Training batches with one example in a row, in buckets of shapes.


def example_batches(
    versions: Sequence[Sequence[TokenExample]],
    probabilities: Sequence[float],
    feed: FeedConfig,
    *,
    shapes: Sequence[Bucket],
    bucket_of: Callable[[TokenExample], int],
    make: Callable[[Sequence[TokenExample], Bucket], Packed],
    more: Callable[[Sequence[int]], Packed] | None = None,
    broken: Sequence[BrokenPictures] = (),
    members: Sequence[int] = (),
) -> Batches:
    """An epoch shows every example once, in one of its versions; a batch has one shape.

    A batch: what `make` gives, and index int32[B]: the examples.

    Args:
      versions: of every example, as many as `probabilities`.
      probabilities: of each version in an epoch; they sum up to 1.
      shapes: the buckets; rare ones are merged (feed.merge_rare).
      bucket_of: the smallest of `shapes` that holds an example.
      make: a batch's arrays; a pure function.
      more: further ones, of the numbers of its examples.
      broken: what `make` counts.
      members: of a mixture (`feed.mixture`), the corpus of every example.
    """
    count, flat = len(probabilities), [example for forms in versions for example in forms]
    buckets = np.array([bucket_of(example) for example in flat])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((15, feed.seed, epoch))
        chosen = np.arange(len(versions)) * count + rng.choice(
            count, len(versions), p=probabilities
        )
        return {"example": chosen, "question": chosen // count, "bucket": buckets[chosen]}

    def make_planned(planned: PlannedBatch, table: Table) -> Packed:
        examples = table["example"]
        arrays = make([flat[i] for i in examples], shapes[planned.bucket])
        named = table["question"].astype(np.int32)
        added = {} if more is None else more(named.tolist())
        return {**arrays, "index": named, **added}

    return feed_batches(mixed(sample, members, feed), shapes, make_planned, feed, broken)


# Training batches of Fusion-in-Decoder: a question with N passages, one of its answers.


Tokens = Sequence[int]


class PassagesSize(NamedTuple):
    """A row holds `count` passages of `length` tokens and an answer of `targets`."""

    count: int
    length: int
    targets: int


def passage_batches(
    passages: Callable[[int], tuple[Sequence[Tokens], int]],
    answers: Sequence[Sequence[Tokens]],
    feed: FeedConfig,
    size: PassagesSize,
) -> Batches:
    """Passages and answers; an epoch shows every question once, with one of its answers by chance.

    A batch: the arrays of `passage_arrays` and `target_arrays`, index int32[B]: the questions, and
    truncated int32[B]: tokens lost.

    Args:
      passages: of a question, by its number, each as tokens; and how many tokens they have lost.
      answers: of every question, each with its end token, which stays where tokens beyond
        `size.targets` are cut.
    """
    counts = np.array([len(texts) for texts in answers])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((16, feed.seed, epoch))
        numbers = np.arange(len(answers))
        return {
            "question": numbers,
            "answer": rng.integers(0, counts),
            "bucket": np.zeros_like(numbers),
        }

    def make(planned: PlannedBatch, table: Table) -> Packed:
        questions = table["question"]
        whole = [answers[q][a] for q, a in zip(questions, table["answer"], strict=True)]
        chosen = [cut_before_end(answer, size.targets) for answer in whole]
        passage_ids, lost = zip(*map(passages, questions), strict=True)
        lost_targets = [len(a) - len(b) for a, b in zip(whole, chosen, strict=True)]
        return {
            **passage_arrays(passage_ids, size),
            **target_arrays(chosen, size.targets),
            "index": questions.astype(np.int32),
            "truncated": np.add(lost, lost_targets).astype(np.int32),
        }

    return feed_batches(sample, [Bucket(0, size.count * size.length)], make, feed)


def passage_arrays(
    questions: Sequence[Sequence[Tokens]], size: PassagesSize, rows: int = 0
) -> Packed:
    """Returns passages as arrays of a static shape; longer passages are cut.

    `rows`: at least so many; those without a question have one passage of one token.

    Returns:
      input_ids int32[B, count, length], prompt_lengths int32[B, count]: 0 where there is none.
    """
    rows = max(rows, len(questions))
    ids = np.zeros((rows, size.count, size.length), np.int32)
    lengths = np.zeros((rows, size.count), np.int32)
    lengths[len(questions) :, 0] = 1
    for row, passages in enumerate(questions):
        for place, tokens in enumerate(passages[: size.count]):
            cut = tokens[: size.length]
            ids[row, place, : len(cut)] = cut
            lengths[row, place] = len(cut)
    return {"input_ids": ids, "prompt_lengths": lengths}
