"""Decoded pictures of a corpus, kept in a bounded memory, and vectors of pictures in a file."""

from __future__ import annotations

import collections
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Float32, UInt8

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.pictures.decode import Alpha, BrokenPictures, PictureError, decode_to_pixels
from mmqa_jax.data.pictures.resize import PictureShape
from mmqa_jax.data.schema import Question

_OWN = ("_lock", "_cache", "_digests")  # what every process has for itself


class EncodedPicture(NamedTuple):
    """A picture that is decoded only where its pixels are needed."""

    digest: bytes  # of its encoded bytes and of how they are decoded
    decode: Callable[[], np.ndarray | None]  # uint8[S, S, 3]; None where the picture is broken
    caption: str = ""  # what stands for a broken picture


class PictureStore:
    """Pixels of a corpus's pictures, decoded on demand and kept in a bounded memory.

    Safe to share between threads; a copy sent to another process starts with an empty cache.

    Args:
      corpus: where the encoded pictures come from.
      size: side of the pixels; of NaFlex and PictureSizes, of a square picture's, the largest one.
      resize: see `to_pixels`.
      alpha, scaled: see `decode_to_pixels`.
      cache_bytes: memory for decoded pixels; the least recently used are dropped first.
      max_broken: see BrokenPictures; broken pictures are counted in `.broken`.
    """

    def __init__(
        self,
        corpus: Corpus,
        size: int,
        resize: PictureShape = "crop",
        *,
        alpha: Alpha = "white",
        scaled: bool = False,
        cache_bytes: int = 512 * 2**20,
        max_broken: int | None = None,
    ):
        self.corpus, self.size, self.resize = corpus, size, resize
        self.alpha, self.scaled = alpha, scaled
        total = corpus.picture_count()
        self.broken = BrokenPictures(total, max_broken, "run `mmqa prepare` again")
        self._max_broken, self._cache_bytes = max_broken, cache_bytes
        self._capacity = cache_bytes // (size * size * 3)
        self._start_cache()

    def over(self, corpus: Corpus) -> Self:
        """A store of another corpus's pictures, decoded in the same way."""
        return type(self)(
            corpus,
            self.size,
            self.resize,
            alpha=self.alpha,
            scaled=self.scaled,
            cache_bytes=self._cache_bytes,
            max_broken=self._max_broken,
        )

    def pixels(self, row: int) -> UInt8[np.ndarray, "H W 3"] | None:
        """Pixels of the source in `row`, read-only; None for a snippet or a broken picture."""
        return self._cached(self.corpus.sources[row].image)

    def look_ahead(self, rows: Iterable[int]) -> None:
        """Called with the rows of sources before their pixels are asked for."""
        names = {self.corpus.sources[row].image for row in rows}
        with self._lock:
            missing = names - self._cache.keys()
        self.corpus.look_ahead(missing)

    def question_pixels(self, question: Question) -> UInt8[np.ndarray, "H W 3"] | None:
        """Pixels of a question's picture; None where it has none."""
        return self._cached(question.image)

    def encoded(self, name: str | None, caption: str = "") -> EncodedPicture | None:
        """A picture by its name, not decoded yet; None where the corpus has no such picture.

        Its pixels are not kept in this store's memory.
        """
        if name is None:
            return None
        if name not in self._digests:
            self._digests[name] = self._digest(self.corpus.read_picture(name))
        digest = self._digests[name]
        return digest and EncodedPicture(digest, lambda: self._decode(name), caption)

    def warn_missing(self) -> None:
        """Warns on stderr of pictures that could not be decoded."""
        if self.broken.count:
            print(
                f"pictures that cannot be decoded, read as their captions alone: "
                f"{self.broken.count} ({first_names(self.broken.names)}).",
                file=sys.stderr,
            )

    def _digest(self, data: bytes | None) -> bytes | None:
        if data is None:
            return None
        decoding = f"{self.size} {self.resize} {self.alpha} {self.scaled}"
        return hashlib.sha256(decoding.encode() + hashlib.sha256(data).digest()).digest()

    def _cached(self, name: str | None) -> np.ndarray | None:
        if name is None:
            return None
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name]
        pixels = self._decode(name)
        with self._lock:
            self._cache[name] = pixels
            while len(self._cache) > self._capacity:
                self._cache.popitem(last=False)
        return pixels

    def _decode(self, name: str) -> np.ndarray | None:
        data = self.corpus.read_picture(name)
        if data is None:
            return None
        try:
            pixels = decode_to_pixels(
                data, self.size, self.resize, alpha=self.alpha, name=name, scaled=self.scaled
            )
        except PictureError as error:
            self.broken.add(name, str(error))
            return None
        pixels.flags.writeable = False
        return pixels

    def _start_cache(self) -> None:
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[str, np.ndarray | None] = collections.OrderedDict()
        self._digests: dict[str, bytes | None] = {}  # of the encoded pictures, by name

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_cache()


# Vectors of ScienceQA's pictures as Multimodal-CoT publishes them.


_TORCH = (".pth", ".pt")


class PictureVectors:
    """The vectors of questions' pictures, read one by one from a file that is mapped.

    Args:
      file: of the vectors.
      names: file of the rows; "" is name_map.json beside `file`.
    """

    def __init__(self, file: str, names: str = ""):
        path = Path(file)
        if path.suffix in _TORCH:
            raise UserError(
                f"{path}: vectors are read from .npy, which needs not be held in memory; write it "
                "once with python -c \"import numpy, torch; numpy.save('vit.npy', "
                "torch.load('vit.pth', weights_only=True).numpy())\"."
            )
        try:
            self._vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file; fetch it from mm-cot's page.") from error
        except Exception as error:  # numpy parses the header as Python, which can raise nearly any
            reason = " ".join(str(error).split())
            raise UserError(
                f"{path}: no array of numpy ({reason:.150}); fetch it again from mm-cot's page."
            ) from error
        if not isinstance(self._vectors, np.ndarray):
            raise UserError(f"{path}: an archive of arrays; save the one array by numpy.save.")
        if self._vectors.ndim == 2:
            self._vectors = self._vectors[:, None]
        if self._vectors.ndim != 3 or self._vectors.dtype.kind != "f":
            raise UserError(
                f"{path}: has shape {self._vectors.shape} and type {self._vectors.dtype}; pictures "
                "x vectors x values in floating point were expected; fetch it again from mm-cot's "
                "page."
            )
        # (vectors of a picture, values of each).
        self.shape: tuple[int, int] = self._vectors.shape[1:]
        rows_file = Path(names) if names else path.with_name("name_map.json")
        rows = read_json(rows_file)
        if not isinstance(rows, dict) or None in map(whole_number, rows.values()):
            raise UserError(
                f"{rows_file}: question ids with rows were expected; fetch name_map.json again."
            )
        self._rows = {key: whole_number(row) for key, row in rows.items()}
        last = max(self._rows.values(), default=0)
        if last >= len(self._vectors):
            raise UserError(
                f"{rows_file}: names row {last}, but {path} has {len(self._vectors)}; the two "
                "files are not of one set."
            )

    def of(self, question: Question) -> Float32[np.ndarray, "P D"]:
        """Returns the vectors of a question's picture; zeros where there is none."""
        row = self._rows.get(question.id)
        if row is None:
            return np.zeros(self.shape, np.float32)
        return np.asarray(self._vectors[row], np.float32)
