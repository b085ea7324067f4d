"""Prompts in chunks, as they are encoded.

The boundaries of a prompt's chunks depend only on its length. Prompts with a common prefix
therefore begin with the same chunks, computed by the same program on the same input: whoever has
computed them, no bit differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import marshal
from collections.abc import Sequence
from typing import NamedTuple

Buckets = tuple[int, ...]  # chunk sizes, ascending, each a multiple of the one before


class Chunk(NamedTuple):
    """Tokens in consecutive columns of the cache that are encoded together.

    Attributes:
      start: column of the first token.
      tokens: ids; negative ones are patches of pictures.
      trunk: where the prompt ends whose continuations follow as branches; 0: one sequence.
      branches: of every token the column where its branch begins (0 in the trunk); () without.
      adapter: its number, on which keys and values depend as they do on the tokens.
      hidden: of every token the first column of the trunk that it does not see, and the one behind
        the last; () without.
    """

    start: int
    tokens: tuple[int, ...]
    trunk: int = 0
    branches: tuple[int, ...] = ()
    adapter: int = 0
    hidden: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The column after the last token."""
        return self.start + len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How prompts are cut into chunks.

    Attributes:
      buckets: sizes of chunks.
      sight: `LlamaConfig.picture_sight`; but for "causal" no picture is cut, nor the prompt where
        all of it is seen: a chunk may then be several of the largest bucket.
      tight: in place of the last chunk there are several of a smaller bucket where these have less
        padding.
    """

    buckets: Buckets
    sight: str = "causal"
    tight: bool = False

    def split(self, tokens: Sequence[int], *, adapter: int = 0, prompt: int = 0) -> list[Chunk]:
        """Splits into chunks of the largest bucket, and a last one of the smallest that fits.

        A chunk of bucket b begins at a multiple of b, so that with its padding it fits into columns
        that are a multiple of the largest bucket.

        Args:
          tokens: of a prompt and what follows it.
          adapter: its number.
          prompt: tokens of it.
        """
        starts = [
            start
            for start in range(0, len(tokens), self.buckets[-1])
            if not start or not _joins(self.sight, tokens, start, prompt)
        ]
        if self.tight and self.sight == "causal" and starts:
            rest = len(tokens) - starts[-1]
            padded = {bucket: -(-rest // bucket) * bucket for bucket in reversed(self.buckets)}
            starts += range(starts[-1], len(tokens), min(padded, key=padded.__getitem__))[1:]
        ends = [*starts[1:], len(tokens)]
        return [
            Chunk(start, tuple(tokens[start:end]), adapter=adapter)
            for start, end in zip(starts, ends, strict=True)
        ]


def _joins(sight: str, tokens: Sequence[int], start: int, prompt: int) -> bool:
    """Whether the token at `start` must be encoded with the one before it."""
    if sight == "prompt":
        return start < prompt
    return sight != "causal" and max(tokens[start - 1 : start + 1]) < 0


def bucket_of(count: int, buckets: Buckets) -> int:
    """The smallest bucket that holds `count` tokens, or else as many of the largest as do."""
    largest = buckets[-1]
    return next((bucket for bucket in buckets if bucket >= count), -(-count // largest) * largest)


def chunks_within(chunks: Sequence[Chunk], columns: int) -> int:
    """How many of a prompt's first chunks end within so many columns."""
    return sum(chunk.end <= columns for chunk in chunks)


def prefix_keys(chunks: Sequence[Chunk], size: int) -> list[bytes]:
    """A key for each of the prompt's beginnings of n * `size` tokens that other prompts may share.

    Equal keys are equal tokens (by BLAKE2) and the same adapter.

    Args:
      chunks: of a prompt; its first ones are of the largest bucket.
      size: tokens, a multiple of the largest bucket.
    """
    keys: list[bytes] = []
    tokens: list[int] = []
    key = b""
    for chunk in chunks:
        # A continuation may begin in it, or a picture lies in it that is not cut.
        if chunk.trunk or len(chunk.tokens) > size:
            break
        tokens.extend(chunk.tokens)
        if len(tokens) == size:
            # Version 2 writes equal numbers alike; those of pictures have more than 64 bits.
            text = marshal.dumps([chunk.adapter, *tokens], 2)
            key = hashlib.blake2b(key + text, digest_size=16).digest()
            keys.append(key)
            tokens = []
    return keys
