"""Pictures to records of their regions, and a cache of such records by the pictures' content.

`mmqa features` writes the records of a whole corpus; a training run on raw pictures detects what
its batches show, beside the steps, and finds it in the cache from then on.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path
from mmqa_jax.core.store import Store
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.detector_pictures import DetectorPicture, detector_picture
from mmqa_jax.data.pictures.decode import PictureError, decode_upright, upright_size_of
from mmqa_jax.data.records.picture_records import processors
from mmqa_jax.data.region_records import (
    DetectedRegions,
    Precision,
    RegionFacts,
    pack_regions,
    unpack_regions,
)
from mmqa_jax.data.regions import RegionError
from mmqa_jax.inference.region_detector import RegionDetector

_TOGETHER = 64  # pictures, the most that are in memory at once, and that a kill loses


def facts_of(detector: RegionDetector, precision: Precision) -> RegionFacts:
    """What all records of a detector have in common."""
    config = detector.config
    return RegionFacts(
        detector=detector.kind.name,
        model=detector.fingerprint,
        features=config.features,
        classes=config.classes,
        attributes=config.attributes,
        rectified=config.rectified,
        precision=precision,
    )


class RegionEncoder:
    """Names of pictures -> their records, in batches of few shapes.

    Args:
      read: the encoded bytes of a picture; PictureError or UserError where there are none.
      precision: of the records.
      advance: called with the number of pictures done.
    """

    def __init__(
        self,
        read: Callable[[str], bytes],
        detector: RegionDetector,
        precision: Precision,
        advance: Callable[[int], None] = lambda count: None,
    ):
        self._read, self._detector = read, detector
        self._precision, self._advance = precision, advance

    def __call__(self, names: Sequence[str]) -> list[bytes | PictureError]:
        with ThreadPoolExecutor(processors()) as pool:
            encoded = list(pool.map(self._sized, names))
        records: list[bytes | PictureError | None] = [
            one if isinstance(one, PictureError) else None for one in encoded
        ]
        readable = [n for n, record in enumerate(records) if record is None]
        self._advance(len(names) - len(readable))

        def load(number: int) -> DetectorPicture:
            data, name = encoded[readable[number]][0], names[readable[number]]
            return detector_picture(decode_upright(data, name), self._detector.pictures, name)

        sizes = [encoded[n][1] for n in readable]
        found = self._detector.find(sizes, load, self._advance)
        for n, regions in zip(readable, found, strict=True):
            if isinstance(regions, PictureError):
                records[n] = regions
                continue
            try:
                records[n] = pack_regions(regions, self._precision)
            except UserError as error:
                raise UserError(f"picture {names[n]}: {error}") from error
        return records

    def _sized(self, name: str) -> tuple[bytes, tuple[int, int]] | PictureError:
        """Encoded bytes, and width and height by the header."""
        try:
            data = self._read(name)
            return data, upright_size_of(data, name)
        except PictureError as error:
            return error
        except UserError as error:  # of the file system
            return PictureError(str(error))


class EncodedPicture(NamedTuple):
    """A picture that is read only where its regions are missing.

    Attributes:
      name: of the picture, no other one's.
      read: its encoded bytes; PictureError or UserError where there are none.
    """

    name: str
    read: Callable[[], bytes]


class RegionCache:
    """Regions of pictures by the SHA-256 of their encoded bytes, detected once.

    Each detector (its weights, rules and pictures: RegionDetector.fingerprint) and precision has a
    folder of its own, a core.store.Store: what is damaged in it is detected again, and any number
    of processes may share it. A record has 0.8 MB for 100 regions of 2,048 values and 1,601
    classes; none is kept in memory. Safe to share between threads: one of them detects at a time,
    so that no picture is detected twice in a process.

    Args:
      detector: finds what is missing.
      folder: of the caches of all detectors; may be in an object store.
      precision: of the records.
      name: of the detector, for messages.

    Attributes:
      facts: of all records.
      name: as given.
      detected: pictures that were detected here.
    """

    def __init__(
        self, detector: RegionDetector, folder: str | os.PathLike, precision: Precision, name: str
    ):
        self.facts, self.name, self.detected = facts_of(detector, precision), name, 0
        self._detector = detector
        what = {"detector": self.facts.model, "precision": precision}
        self._store = Store(
            as_path(folder) / f"{self.facts.model}-{precision}", what, damage="drop", sync=False
        )
        self._storing, self._detecting = threading.Lock(), threading.Lock()
        self._broken: dict[str, str] = {}  # digest -> why there are no regions

    def find(self, pictures: Mapping[str, EncodedPicture]) -> None:
        """Detects those of the pictures (by digest) that are missing, together."""
        if not self._missing(pictures):
            return
        with self._detecting:
            with self._storing:
                self._store.refresh()  # what other processes have found meanwhile
            missing = self._missing(pictures)
            if not missing:
                return
            for start in range(0, len(missing), _TOGETHER):
                self._detect(missing[start : start + _TOGETHER], pictures)

    def _detect(self, digests: Sequence[str], pictures: Mapping[str, EncodedPicture]) -> None:
        """Detects pictures and commits what was found, whole or not at all."""
        read = {pictures[digest].name: pictures[digest].read for digest in digests}
        encode = RegionEncoder(lambda name: read[name](), self._detector, self.facts.precision)
        records = {}
        for digest, record in zip(digests, encode(list(read)), strict=True):
            if isinstance(record, PictureError):
                self._broken[digest] = str(record)
            else:
                records[digest] = np.frombuffer(record, np.uint8)
        self.detected += len(digests)
        with self._storing:
            self._store.add(records)

    def read(self, digest: str, picture: EncodedPicture) -> DetectedRegions:
        """The regions of a picture, detected if they are missing or damaged.

        Raises:
          PictureError: it cannot be decoded.
        """
        record = self._kept(digest)
        if record is None:
            self.find({digest: picture})
            if digest in self._broken:
                raise PictureError(self._broken[digest])
            record = self._kept(digest)
        try:
            if record is None:
                raise ValueError("what was just written cannot be read")
            return unpack_regions(record, self.facts)
        except ValueError as error:
            raise UserError(
                f"{self._store.folder}: regions of {picture.name}: {error}; delete the folder, and "
                "its pictures are detected again."
            ) from error

    def _kept(self, digest: str) -> bytes | None:
        with self._storing:
            record = self._store.get(digest)
        return None if record is None else np.asarray(record).tobytes()

    def _missing(self, digests: Iterable[str]) -> list[str]:
        with self._storing:
            return [d for d in self._store.missing(digests) if d not in self._broken]


class CorpusRegions:
    """The regions of a corpus's sources by id, as RegionRecords has them.

    Attributes:
      facts: of all regions.
      folder: the detector, for messages.
    """

    def __init__(self, corpus: Corpus, cache: RegionCache):
        self.facts, self.folder = cache.facts, cache.name
        self._corpus, self._cache = corpus, cache
        self._digests: dict[str, str] = {}  # of the encoded pictures, by name

    def find(self, ids: Iterable[Any]) -> None:
        """Detects the regions of these sources' pictures together, where they are missing."""
        pictures = {}
        for image_id in ids:
            try:
                digest, picture = self._picture(image_id)
            except UserError:  # is raised again where it is read
                continue
            pictures.setdefault(digest, picture)
        self._cache.find(pictures)

    def read(self, image_id: Any) -> DetectedRegions:
        """The regions of a source's picture.

        Raises:
          RegionError: it has no picture, or one that cannot be decoded.
        """
        try:
            return self._cache.read(*self._picture(image_id))
        except PictureError as error:
            raise RegionError(str(error)) from error

    def _picture(self, image_id: Any) -> tuple[str, EncodedPicture]:
        """The digest of a source's picture, and the picture."""
        name = self._corpus.sources[self._corpus.row[image_id]].image

        def read() -> bytes:
            data = self._corpus.read_picture(name)
            if data is None:
                raise PictureError(f"source {image_id}: its picture is not in the corpus.")
            return data

        key = str(name)
        if key not in self._digests:
            self._digests[key] = hashlib.sha256(read()).hexdigest()
        return self._digests[key], EncodedPicture(key, read)
