"""`mmqa embed` with an image tower: the grids of CLIP features that Prophet's MCAN reads.

prophet tools/extract_img_feats.py: CLIP RN50x64 without its attention pool, pictures squashed to
512 x 512, in a grid of 16 x 16.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh, serve
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.grid_records import write_grids
from mmqa_jax.data.images import BrokenPictures, PictureError, decode_to_pixels
from mmqa_jax.data.vqa_inputs import image_id
from mmqa_jax.models.clip.network import normalize_pixels
from mmqa_jax.models.modified_resnet.network import STRIDE
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.record import is_weights_folder

SIDE = 512  # of the pictures, in pixels (Prophet's IMG_RESOLUTION)


def is_image_tower(model: Path) -> bool:
    """Whether a folder holds a converted CLIP ResNet."""
    return is_weights_folder(model) and read_record(model).architecture.name == "modified_resnet"


def embed_grids(
    data: Path,
    model: Path,
    out: Path,
    *,
    side: int = SIDE,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Writes the grid of every picture of a benchmark's questions; continues an interrupted job.

    Args:
      side: of the pictures; the grid has side / 32 cells a side.
      batch_size: pictures of a call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    check_out(out, folder=True)
    corpus = open_corpus(data)
    pictures = {image_id(q): q.image for q in corpus.questions() if q.image is not None}
    if not pictures:
        raise UserError(
            f"--data={data}: its questions have no pictures; put the benchmark's pictures into the "
            "raw folder and run `mmqa prepare` again."
        )
    tower = load_converted(model, mesh=loading_mesh(mesh))
    broken = BrokenPictures(len(pictures), remedy="fetch those pictures again")
    shape = (side // STRIDE, side // STRIDE, tower.config.features)
    encoder = _Encoder(tower, corpus, side, batch_size)
    print(f"embed: {encoder.serving}", file=sys.stderr)
    with Progress("Grid features", len(pictures), "pictures") as progress:
        write_grids(
            out,
            pictures,
            encoder,
            shape=shape,
            model=encoder.fingerprint,
            broken=broken,
            advance=progress.advance,
        )
    sizes = " x ".join(map(str, shape))
    print(f"{len(pictures) - broken.count:,} pictures x {sizes}: {out}")
    found = {"pictures": len(pictures), "shape": list(shape), "broken_pictures": broken.count}
    return {**found, **encoder.serving.to_json()}


class _Encoder:
    """Names of pictures -> their grids, in batches of one size."""

    def __init__(self, tower: nnx.Module, corpus: Corpus, side: int, batch_size: BatchSize):
        self._corpus, self._side = corpus, side
        graphdef, self._state = nnx.split(tower)
        # Thrice the widest activations: floats at half of the side.
        cost = RowCost("pictures", 8, 8, 3 * 4 * tower.config.width * (side / 2) ** 2)
        self.serving = serve(batch_size, cost, self._state)
        self._run = jax.jit(
            lambda state, pixels: nnx.merge(graphdef, state).grid_features(normalize_pixels(pixels))
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the parameters and the pictures' size."""
        digest = hashlib.blake2b(f"{self._side} {self._corpus.fingerprint}".encode(), digest_size=8)
        for leaf in jax.tree.leaves(self._state):
            digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
        return digest.hexdigest()

    def __call__(self, names: Sequence[str]) -> list[np.ndarray | PictureError]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            decoded = list(pool.map(self._decode, names))
        found: list[np.ndarray | PictureError] = list(decoded)
        readable = [n for n, pixels in enumerate(decoded) if not isinstance(pixels, PictureError)]
        placement, size = self.serving.placement, self.serving.batch_size
        for start in range(0, len(readable), size):
            part = readable[start : start + size]
            pixels = np.zeros((size, self._side, self._side, 3), np.uint8)
            pixels[: len(part)] = [decoded[n] for n in part]
            grids = fetch(placement.call(self._run, self._state, placement.put(pixels)))
            for n, grid in zip(part, grids, strict=False):
                found[n] = np.asarray(grid, np.float32)
        return found

    def _decode(self, name: str) -> np.ndarray | PictureError:
        data = self._corpus.read_picture(name)
        if data is None:
            return PictureError(f"{name}: is not in the corpus.")
        try:
            # As the original: resized in the picture's own mode, then RGB.
            return decode_to_pixels(data, self._side, "squash", alpha="dropped", name=name)
        except PictureError as error:
            return error
