"""Arrays of vectors: finite wherever they are used."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int

from mmqa_jax.core.errors import UserError

_BLOCK = 65_536  # rows that are looked at together


def not_finite(vectors: Float32[np.ndarray, "n D"]) -> Int[np.ndarray, " m"]:
    """The rows of which a product can be no number: with NaN or inf, or a length beyond float32.

    Of the others every dot product is finite (Cauchy-Schwarz); one that is NaN would rank first.
    """
    bad = []
    for start in range(0, len(vectors), _BLOCK):
        block = np.asarray(vectors[start : start + _BLOCK], np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("nd,nd->n", block, block)
        bad.append(start + np.flatnonzero(~np.isfinite(squares)))
    return np.concatenate(bad) if bad else np.zeros(0, int)


def check_finite(vectors: Float32[np.ndarray, "n D"], what: str, remedy: str) -> None:
    """UserError if a row is not finite.

    Args:
      what: begins the sentence, before `row 3 of 5`.
      remedy: ends it.
    """
    bad = not_finite(vectors)
    if len(bad):
        more = f", nor {len(bad) - 1:,} more" if len(bad) > 1 else ""
        raise UserError(
            f"{what}: row {bad[0]} of {len(vectors):,} is not finite{more} (NaN, infinity or too "
            f"large for float32); {remedy}."
        )
