"""Arrays of vectors: finite wherever they are used, and in files that notice their own damage."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int

from mmqa_jax.core.checksums import open_bytes, seal_bytes
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write

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


def write_vectors(path: Path, vectors: np.ndarray) -> None:
    """Writes a .npy file with a checksum of array and name behind it, whole or not at all."""
    content = io.BytesIO()
    np.save(content, vectors, allow_pickle=False)
    with atomic_write(path, "wb") as file:
        file.write(content.getbuffer())
        file.write(seal_bytes(content.getbuffer(), path.name))


def read_vectors(path: Path) -> np.ndarray | None:
    """The array of `write_vectors`, or of an older file without a checksum.

    None: there is no file, or it is damaged or another's, or holds what is not finite.
    """
    try:
        content = open_bytes(path.read_bytes(), path.name)
        file = io.BytesIO(content)
        vectors = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError):  # Damaged among them
        return None
    whole = file.tell() == len(content)
    is_kind = vectors.ndim == 2 and np.issubdtype(vectors.dtype, np.floating)
    return vectors if whole and is_kind and not len(not_finite(vectors)) else None
