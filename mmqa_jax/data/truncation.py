"""How texts that are too long for a sequence are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

Tokens = Sequence[int] | Int[np.ndarray, " N"]


def coins(*ids: str) -> np.random.Generator:
    """A generator that depends on `ids` (of question, source) alone.

    So what an example loses at inference depends neither on batches and processes nor on where
    an interrupted run resumed.
    """
    digest = hashlib.sha256("\0".join(ids).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def cut(tokens: Tokens, budget: int, rng: np.random.Generator | None) -> Tokens:
    """`tokens` cut to `budget`: each surplus token from head or tail with equal probability.

    Without `rng` the tail is cut.
    """
    budget = max(budget, 0)
    surplus = len(tokens) - budget
    if surplus <= 0:
        return tokens
    head = int(rng.binomial(surplus, 0.5)) if rng is not None else 0
    return tokens[head : head + budget]


def cut_before_end(tokens: Tokens, budget: int) -> Tokens:
    """Cuts `tokens` to `budget` and keeps the last one: the end token is learned and read."""
    return tokens if len(tokens) <= budget else [*tokens[: budget - 1], tokens[-1]]


def cut_pair(
    question: Tokens, answer: Tokens, budget: int, rng: np.random.Generator | None
) -> tuple[Tokens, Tokens]:
    """Question and answer cut as one text (see `cut`): its head is the question's."""
    surplus = max(0, len(question) + len(answer) - budget)
    head = int(rng.binomial(surplus, 0.5)) if rng is not None else 0
    question = question[head:][:budget]  # a tail longer than the answer reaches the question
    return question, answer[: max(0, budget - len(question))]


def fair_shares(lengths: Sequence[int], budget: int) -> list[int]:
    """Shares of `budget` so that short texts stay whole and long ones get equal parts."""
    shares = [0] * len(lengths)
    rest = max(budget, 0)
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for served, index in enumerate(by_length):
        shares[index] = min(lengths[index], rest // (len(lengths) - served))
        rest -= shares[index]
    return shares
