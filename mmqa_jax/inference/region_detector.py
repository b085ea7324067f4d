"""A detector in use: pictures in, their regions out, in batches of few shapes on all devices."""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from PIL import Image

from mmqa_jax.core.mesh import fetch, partition_spec
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, serve
from mmqa_jax.data.detector_pictures import (
    BOTTOM_UP,
    VINVL,
    VLP,
    DetectorPicture,
    DetectorPictures,
    bucket,
    detector_batch,
    detector_picture,
    detector_size,
)
from mmqa_jax.data.pictures.decode import PictureError
from mmqa_jax.data.records.picture_records import processors
from mmqa_jax.data.region_records import DetectedRegions
from mmqa_jax.models.detection.faster_rcnn import (
    DetectorConfig,
    FasterRCNN,
    Pictures,
    Regions,
    bottom_up_r101,
    vinvl_x152c4,
    vlp_x101,
)


class DetectorKind(NamedTuple):
    """An original.

    Attributes:
      name: of its preset.
      config: the preset.
      pictures: as it reads them.
    """

    name: str
    config: DetectorConfig
    pictures: DetectorPictures


KINDS = tuple(
    DetectorKind(preset.__name__, preset(), pictures)
    for preset, pictures in ((vlp_x101, VLP), (vinvl_x152c4, VINVL), (bottom_up_r101, BOTTOM_UP))
)


def kind_of(config: DetectorConfig) -> DetectorKind:
    """The original that a config is of: told by the pyramid and by Caffe's first pool."""
    vlp, vinvl, bottom_up = KINDS
    if config.pyramid:
        return vlp
    return bottom_up if config.backbone.stem_pool == bottom_up.config.backbone.stem_pool else vinvl


@functools.lru_cache(maxsize=8)  # detectors of one config share their programs
def make_find(graphdef: nnx.GraphDef) -> Callable[[nnx.State, Pictures], Regions]:
    """The jitted function that finds the regions of a batch.

    On a mesh (that of `jax.set_mesh`) each device has a copy of the weights and pictures of its
    own: XLA would gather the batch in front of convolutions of groups.
    """

    def regions(state: nnx.State, pictures: Pictures) -> Regions:
        return nnx.merge(graphdef, state).regions(pictures)

    def find(state: nnx.State, pictures: Pictures) -> Regions:
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
Load = Callable[[int], DetectorPicture]


class RegionDetector:
    """Pictures -> regions. There is a program for each padded size, and the size of its batch.

    Args:
      model: the detector.
      pictures: how they are prepared; None: as its original does.
      batch_size: pictures of a call, over all devices.
      beside_training: see core.serving.serve.

    Attributes:
      kind: its original.
      pictures: as given.
      serving: devices and batches.
    """

    def __init__(
        self,
        model: FasterRCNN,
        pictures: DetectorPictures | None = None,
        batch_size: BatchSize = AUTO,
        *,
        beside_training: bool = False,
    ):
        self.config: DetectorConfig = model.config
        self.kind = kind_of(self.config)
        self.pictures = pictures or self.kind.pictures
        graphdef, self._state = nnx.split(model)
        cost = detector_cost(self.config, self.pictures)
        self.serving = serve(batch_size, cost, self._state, beside_training=beside_training)
        self._find = make_find(graphdef)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of weights, rules and how pictures are prepared."""
        digest = hashlib.blake2b(repr((self.config, self.pictures)).encode(), digest_size=8)
        for leaf in jax.tree.leaves(self._state):
            digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
        return digest.hexdigest()

    def __call__(self, images: Sequence[Image.Image]) -> list[DetectedRegions]:
        """The regions of RGB pictures, in their order.

        Raises:
          PictureError: a picture would become too large.
        """
        found: list[DetectedRegions] = []
        for regions in self.find(
            [image.size for image in images], lambda n: detector_picture(images[n], self.pictures)
        ):
            if isinstance(regions, PictureError):
                raise regions
            found.append(regions)
        return found

    def find(
        self,
        sizes: Sequence[tuple[int, int]],
        load: Load,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[DetectedRegions | PictureError]:
        """The regions of pictures that are prepared in threads while devices compute.

        Args:
          sizes: width and height of each, before resizing.
          load: see Load; called in threads, at most for two batches at a time.
          advance: called with the number of pictures done.
        """
        found: list[DetectedRegions | PictureError | None] = [None] * len(sizes)
        groups = self._groups(sizes)
        with ThreadPoolExecutor(processors()) as pool:
            running: tuple[list[int], Regions, list[tuple[int, int]]] | None = None
            coming: list[Future] = []
            for turn, (shape, numbers) in enumerate(groups):
                loads = coming or _submitted(pool, load, numbers)
                prepared = []
                for number, future in zip(numbers, loads, strict=True):
                    made = _result(future, shape, number)
                    if isinstance(made, PictureError):
                        found[number] = made
                        advance(1)
                    else:
                        prepared.append((number, made))
                more = groups[turn + 1 : turn + 2]
                coming = _submitted(pool, load, more[0][1]) if more else []
                started = self._started(prepared, shape)
                if running is not None:
                    _collect(found, *running)
                    advance(len(running[0]))
                running = started
            if running is not None:
                _collect(found, *running)
                advance(len(running[0]))
        assert all(one is not None for one in found)
        return found

    def _groups(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], list[int]]]:
        """Pictures of one padded size in batches."""
        by_shape = collections.defaultdict(list)
        for number, (width, height) in enumerate(sizes):
            made = detector_size(width, height, self.pictures)
            by_shape[bucket((made[1], made[0]))].append(number)
        most = self.serving.batch_size
        return [
            (shape, numbers[start : start + most])
            for shape, numbers in sorted(by_shape.items())
            for start in range(0, len(numbers), most)
        ]

    def _started(
        self, prepared: Sequence[tuple[int, DetectorPicture]], shape: tuple[int, int]
    ) -> tuple[list[int], Regions, list[tuple[int, int]]] | None:
        """A batch whose computation has begun; None where no picture could be prepared."""
        if not prepared:
            return None
        numbers, made = [n for n, _ in prepared], [picture for _, picture in prepared]
        size = self.serving.size_for(len(made))
        batch = detector_batch([*made, *[made[-1]] * (size - len(made))], shape)
        placement = self.serving.placement
        placed = placement.put(Pictures(*batch))
        found = placement.call(self._find, self._state, placed)
        return numbers, found, [picture.original for picture in made]


def _submitted(pool: ThreadPoolExecutor, load: Load, numbers: Sequence[int]) -> list[Future]:
    return [pool.submit(load, number) for number in numbers]


def _result(future: Future, shape: tuple[int, int], number: int) -> DetectorPicture | PictureError:
    try:
        made = future.result()
    except PictureError as error:
        return error
    if bucket(made.pixels.shape[:2]) != shape:
        return PictureError(
            f"picture {number}: has another size than its header says; give the file again."
        )
    return made


def _collect(
    found: list[DetectedRegions | PictureError | None],
    numbers: Sequence[int],
    regions: Regions,
    sizes: Sequence[tuple[int, int]],
) -> None:
    """Puts what a batch gave where it belongs."""
    regions = fetch(regions)
    for row, (number, size) in enumerate(zip(numbers, sizes, strict=True)):
        found[number] = detected(regions, row, size)


def detected(regions: Regions, row: int, size: tuple[int, int]) -> DetectedRegions:
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
    return DetectedRegions(size=size, **arrays)


def detector_cost(config: DetectorConfig, pictures: DetectorPictures) -> RowCost:
    """The cost of a picture: a dozen of the widest maps, half of its sides, in float32."""
    cells = pictures.shorter * pictures.longer / 4
    return RowCost("pictures", 1, 16, 12 * 4.0 * config.backbone.stem * cells)
