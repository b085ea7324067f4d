"""A detector in use: pictures in, their regions out, in batches of few shapes on all devices."""

import collections
import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from PIL import Image

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch, init_sharded, partition_spec
from mmqa_jax.core.paths import as_path
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh, serve
from mmqa_jax.core.store import Store
from mmqa_jax.data import region_records
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures import resize
from mmqa_jax.data.pictures.decode import PictureError, decode_upright, upright_size_of
from mmqa_jax.data.records.picture_records import processors
from mmqa_jax.data.regions import RegionError
from mmqa_jax.models.detection import faster_rcnn
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder


class DetectorKind(NamedTuple):
    """An original."""

    name: str  # of its preset
    config: faster_rcnn.DetectorConfig  # the preset
    pictures: resize.DetectorPictures  # as it reads them


KINDS = tuple(
    DetectorKind(preset.__name__, preset(), pictures)
    for preset, pictures in (
        (faster_rcnn.vlp_x101, resize.VLP),
        (faster_rcnn.vinvl_x152c4, resize.VINVL),
        (faster_rcnn.bottom_up_r101, resize.BOTTOM_UP),
    )
)


def kind_of(config: faster_rcnn.DetectorConfig) -> DetectorKind:
    """The original that a config is of: told by the pyramid and by Caffe's first pool."""
    vlp, vinvl, bottom_up = KINDS
    if config.pyramid:
        return vlp
    return bottom_up if config.backbone.stem_pool == bottom_up.config.backbone.stem_pool else vinvl


@functools.lru_cache(maxsize=8)  # detectors of one config share their programs
def make_find(
    graphdef: nnx.GraphDef,
) -> Callable[[nnx.State, faster_rcnn.Pictures], faster_rcnn.Regions]:
    """The jitted function that finds the regions of a batch.

    On a mesh (that of `jax.set_mesh`) each device has a copy of the weights and pictures of its
    own: XLA would gather the batch in front of convolutions of groups.
    """

    def regions(state: nnx.State, pictures: faster_rcnn.Pictures) -> faster_rcnn.Regions:
        return nnx.merge(graphdef, state).regions(pictures)

    def find(state: nnx.State, pictures: faster_rcnn.Pictures) -> faster_rcnn.Regions:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.shape:
            return regions(state, pictures)
        (rows,) = partition_spec(("batch",), pictures.scales.shape, mesh)
        split = jax.shard_map(
            regions,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(rows)),
            out_specs=PartitionSpec(rows),
            check_vma=False,
        )
        return split(state, pictures)

    return jax.jit(find)


# A picture by its place among those asked for, prepared; PictureError where it cannot be.
Load = Callable[[int], resize.DetectorPicture]


class RegionDetector:
    """Pictures -> regions. There is a program for each padded size, and the size of its batch.

    Args:
      model: the detector.
      pictures: how they are prepared; None: as its original does.
      batch_size: pictures of a call, over all devices.
      beside_training: see core.serving.serve.
    """

    def __init__(
        self,
        model: faster_rcnn.FasterRCNN,
        pictures: resize.DetectorPictures | None = None,
        batch_size: BatchSize = AUTO,
        *,
        beside_training: bool = False,
    ):
        self.config: faster_rcnn.DetectorConfig = model.config
        self.kind = kind_of(self.config)  # its original
        self.pictures = pictures or self.kind.pictures  # as given
        graphdef, self._state = nnx.split(model)
        cost = detector_cost(self.config, self.pictures)
        # Devices and batches.
        self.serving = serve(batch_size, cost, self._state, beside_training=beside_training)
        self._find = make_find(graphdef)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of weights, rules and how pictures are prepared."""
        digest = hashlib.blake2b(repr((self.config, self.pictures)).encode(), digest_size=8)
        for leaf in jax.tree.leaves(self._state):
            digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
        return digest.hexdigest()

    def __call__(self, images: Sequence[Image.Image]) -> list[region_records.DetectedRegions]:
        """The regions of RGB pictures, in their order.

        Raises:
          PictureError: a picture would become too large.
        """
        regions_of_all: list[region_records.DetectedRegions] = []
        for regions in self.find(
            [image.size for image in images],
            lambda n: resize.detector_picture(images[n], self.pictures),
        ):
            if isinstance(regions, PictureError):
                raise regions
            regions_of_all.append(regions)
        return regions_of_all

    def find(
        self,
        sizes: Sequence[tuple[int, int]],
        load: Load,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[region_records.DetectedRegions | PictureError]:
        """The regions of pictures that are prepared in threads while devices compute.

        Args:
          sizes: width and height of each, before resizing.
          load: see Load; called in threads, at most for two batches at a time.
          advance: called with the number of pictures done.
        """
        results: list[region_records.DetectedRegions | PictureError | None] = [None] * len(sizes)
        groups = self._groups(sizes)
        with ThreadPoolExecutor(processors()) as pool:
            running: tuple[list[int], faster_rcnn.Regions, list[tuple[int, int]]] | None = None
            coming: list[Future] = []
            for turn, (shape, numbers) in enumerate(groups):
                loads = coming or _submitted(pool, load, numbers)
                prepared = []
                for number, future in zip(numbers, loads, strict=True):
                    made = _result(future, shape, number)
                    if isinstance(made, PictureError):
                        results[number] = made
                        advance(1)
                    else:
                        prepared.append((number, made))
                more = groups[turn + 1 : turn + 2]
                coming = _submitted(pool, load, more[0][1]) if more else []
                started = self._started(prepared, shape)
                if running is not None:
                    _collect(results, *running)
                    advance(len(running[0]))
                running = started
            if running is not None:
                _collect(results, *running)
                advance(len(running[0]))
        assert all(result is not None for result in results)
        return results

    def _groups(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], list[int]]]:
        """Pictures of one padded size in batches."""
        by_shape = collections.defaultdict(list)
        for number, (width, height) in enumerate(sizes):
            made = resize.detector_size(width, height, self.pictures)
            by_shape[resize.bucket((made[1], made[0]))].append(number)
        most = self.serving.batch_size
        return [
            (shape, numbers[start : start + most])
            for shape, numbers in sorted(by_shape.items())
            for start in range(0, len(numbers), most)
        ]

    def _started(
        self,
        prepared: Sequence[tuple[int, resize.DetectorPicture]],
        shape: tuple[int, int],
    ) -> tuple[list[int], faster_rcnn.Regions, list[tuple[int, int]]] | None:
        """A batch whose computation has begun; None where no picture could be prepared."""
        if not prepared:
            return None
        numbers, made = [n for n, _ in prepared], [picture for _, picture in prepared]
        size = self.serving.size_for(len(made))
        batch = resize.detector_batch([*made, *[made[-1]] * (size - len(made))], shape)
        placement = self.serving.placement
        placed = placement.put(faster_rcnn.Pictures(*batch))
        computed = placement.call(self._find, self._state, placed)
        return numbers, computed, [picture.original for picture in made]


def _submitted(pool: ThreadPoolExecutor, load: Load, numbers: Sequence[int]) -> list[Future]:
    return [pool.submit(load, number) for number in numbers]


def _result(
    future: Future, shape: tuple[int, int], number: int
) -> resize.DetectorPicture | PictureError:
    try:
        made = future.result()
    except PictureError as error:
        return error
    if resize.bucket(made.pixels.shape[:2]) != shape:
        return PictureError(
            f"picture {number}: has another size than its header says; give the file again."
        )
    return made


def _collect(
    results: list[region_records.DetectedRegions | PictureError | None],
    numbers: Sequence[int],
    regions: faster_rcnn.Regions,
    sizes: Sequence[tuple[int, int]],
) -> None:
    """Puts what a batch gave where it belongs."""
    regions = fetch(regions)
    for row, (number, size) in enumerate(zip(numbers, sizes, strict=True)):
        results[number] = detected(regions, row, size)


def detected(
    regions: faster_rcnn.Regions, row: int, size: tuple[int, int]
) -> region_records.DetectedRegions:
    """One picture's regions of a batch on the host; `size` is its height and width."""
    count = int(np.sum(regions.valid[row]))  # those there are come first
    arrays = {
        name: np.asarray(value[row, :count])
        for name, value in regions._asdict().items()
        if name != "valid" and value is not None
    }
    if "attributes" in arrays:
        logits = arrays["attributes"]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        arrays["attributes"] = powers / powers.sum(axis=1, keepdims=True)
    return region_records.DetectedRegions(size=size, **arrays)


def detector_cost(config: faster_rcnn.DetectorConfig, pictures: resize.DetectorPictures) -> RowCost:
    """The cost of a picture: a dozen of the widest maps, half of its sides, in float32."""
    cells = pictures.shorter * pictures.longer / 4
    return RowCost("pictures", 1, 16, 12 * 4.0 * config.backbone.stem * cells)


# Opens a detector: its published file, a converted folder, or a preset of random weights.

_PRESETS = {
    "vlp_x101": faster_rcnn.vlp_x101,
    "vinvl": faster_rcnn.vinvl_x152c4,
    "bua": faster_rcnn.bottom_up_r101,
}


@dataclasses.dataclass(frozen=True)
class DetectorChoice:
    """The choice of a detector and of its rules."""

    model: str  # folder of `mmqa convert`, published file, or a name of _PRESETS for random weights
    random: int | None = None  # seed of random weights; None: the weights are read
    regions: tuple[int, int] | None = None  # fewest and most of a picture; None: the detector's
    # Of resized pictures, the short one and what the long one has at most; None: its own.
    sides: tuple[int, int] | None = None
    unrectified: bool = False  # features in front of fc6's ReLU, as WebQA's VLP reads them
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the convolutions
    # key, unrectified_key: the flags or config keys that `model` and `unrectified` come from.
    key: str = "--model"
    unrectified_key: str = "--unrectified"

    def changed(self, config: faster_rcnn.DetectorConfig) -> faster_rcnn.DetectorConfig:
        """The config with these rules; UserError where they do not fit the detector."""
        if self.unrectified and not config.head:
            raise UserError(
                f"{self.unrectified_key}: {kind_of(config).name} has no fc6, its features are "
                "means of res5; leave it out, or give another detector."
            )
        changes: dict[str, Any] = {"dtype": self.dtype}
        if self.regions is not None:
            changes["fewest"], changes["most"] = self.regions
        if self.unrectified:
            changes["rectified"] = False
        return replace_fields(config, **changes)


def open_detector(
    choice: DetectorChoice,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
    *,
    beside_training: bool = False,
) -> RegionDetector:
    """The detector of a choice, on the devices.

    Args:
      batch_size: pictures of a call, over all devices.
      mesh: see core.serving.serving_mesh.
      beside_training: on the first device of this process alone. A thread can then call it while
        the step runs: programs of several devices wait for one another, in an order that must be
        the same on all, those of one device for nobody.
    """
    model = _opened(choice, None if beside_training else loading_mesh(mesh))
    pictures = kind_of(model.config).pictures
    if choice.sides is not None:
        shorter, longer = choice.sides
        pictures = dataclasses.replace(pictures, shorter=shorter, longer=longer)
    return RegionDetector(model, pictures, batch_size, beside_training=beside_training)


def _opened(choice: DetectorChoice, placed: Mesh | None) -> faster_rcnn.FasterRCNN:
    path = Path(choice.model)
    if choice.model in _PRESETS and not path.exists():
        if choice.random is None:
            raise UserError(
                f"{choice.key}={choice.model}: its weights are needed; give their file or a folder "
                "of `mmqa convert --model=detector`, or --random=0 for random ones, which prove "
                "only the plumbing."
            )
        config = choice.changed(_PRESETS[choice.model]())

        def build() -> faster_rcnn.FasterRCNN:
            return faster_rcnn.FasterRCNN(config, rngs=nnx.Rngs(choice.random))

        return build() if placed is None else init_sharded(build, placed)
    if choice.random is not None:
        raise UserError(
            f"--random: is for the names {', '.join(_PRESETS)}, and --model={choice.model} is a "
            "file or folder; leave one of them out."
        )
    if not path.exists():
        raise UserError(
            f"{choice.key}={choice.model}: no such file or folder; give a detector's weights, "
            f"or one of {', '.join(_PRESETS)} with --random."
        )
    if is_weights_folder(path):
        record = read_record(path)
        if record.architecture.name != "detector":
            raise UserError(
                f"{choice.key}={path}: holds a model of kind {record.architecture.name!r}, "
                "detector was expected; convert one with `mmqa convert --model=detector`."
            )
        return load_converted(path, mesh=placed, config=choice.changed(record.config))
    return _read_published(path, choice, placed)


def _read_published(
    path: Path, choice: DetectorChoice, mesh: Mesh | None
) -> faster_rcnn.FasterRCNN:
    from mmqa_jax.models.detection.keys import open_detector as open_checkpoint

    config = choice.changed(open_checkpoint(path).config)
    rule = config.rule
    return load_published(
        "detector",
        path,
        mesh=mesh,
        dtype=choice.dtype,
        fewest=rule.fewest,
        most=rule.most,
        rectified=config.rectified,
    )


# Pictures to records of their regions, and a cache of such records by the pictures' content.
#
# `mmqa features` writes the records of a whole corpus; a training run on raw pictures detects
# what its batches show, beside the steps, and finds it in the cache from then on.

_TOGETHER = 64  # pictures, the most that are in memory at once, and that a kill loses


def facts_of(
    detector: RegionDetector, precision: region_records.Precision
) -> region_records.RegionFacts:
    """Returns the facts that all records of a detector share."""
    config = detector.config
    return region_records.RegionFacts(
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
        precision: region_records.Precision,
        advance: Callable[[int], None] = lambda count: None,
    ):
        self._read, self._detector = read, detector
        self._precision, self._advance = precision, advance

    def __call__(self, names: Sequence[str]) -> list[bytes | PictureError]:
        with ThreadPoolExecutor(processors()) as pool:
            encoded = list(pool.map(self._sized, names))
        records: list[bytes | PictureError | None] = [
            encoded_picture if isinstance(encoded_picture, PictureError) else None
            for encoded_picture in encoded
        ]
        readable = [n for n, record in enumerate(records) if record is None]
        self._advance(len(names) - len(readable))

        def load(number: int) -> resize.DetectorPicture:
            data, name = encoded[readable[number]][0], names[readable[number]]
            return resize.detector_picture(
                decode_upright(data, name), self._detector.pictures, name
            )

        sizes = [encoded[n][1] for n in readable]
        results = self._detector.find(sizes, load, self._advance)
        for n, regions in zip(readable, results, strict=True):
            if isinstance(regions, PictureError):
                records[n] = regions
                continue
            try:
                records[n] = region_records.pack_regions(regions, self._precision)
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
    """A picture by its name, whose encoded bytes are read only where its regions are missing.

    `read` raises PictureError or UserError where there are none.
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
        self,
        detector: RegionDetector,
        folder: str | os.PathLike,
        precision: region_records.Precision,
        name: str,
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
        """Detects the missing pictures (by digest) together."""
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
        """Detects pictures and commits the results, whole or not at all."""
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

    def read(self, digest: str, picture: EncodedPicture) -> region_records.DetectedRegions:
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
            return region_records.unpack_regions(record, self.facts)
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

    Its `folder` names the detector, for messages.
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

    def read(self, image_id: Any) -> region_records.DetectedRegions:
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
