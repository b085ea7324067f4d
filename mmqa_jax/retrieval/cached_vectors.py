"""Embeddings kept on disk, found again by the content that was embedded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.files import atomic_write


def cached_vectors(
    folder: Path,
    fingerprint: str,
    contents: Sequence[str | bytes],
    embed: Callable[[], Float32[np.ndarray, "n D"]],
) -> Float32[np.ndarray, "n D"]:
    """The vectors of `contents`, computed by `embed` unless an earlier run kept them.

    Args:
      folder: of the cache; one .npy file per list of contents.
      fingerprint: of the encoder and of how it is used.
      contents: what is embedded, texts or encoded pictures, in order.
    """
    digest = hashlib.sha256(fingerprint.encode())
    for content in contents:
        data = content.encode() if isinstance(content, str) else content
        digest.update(hashlib.sha256(data).digest())
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    if path.is_file():
        try:
            kept = np.load(path, allow_pickle=False)
        except (ValueError, OSError, EOFError):
            kept = np.zeros((0, 0), np.float32)  # damaged: computed again
        if len(kept) == len(contents):
            return kept
    vectors = embed()
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as file:
        np.save(file, vectors, allow_pickle=False)
    return vectors
