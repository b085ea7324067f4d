"""A vision-language model's tower as the engine runs it: pictures in batches, each once.

On a mesh every device has the whole tower and encodes its own pictures, so that nothing is
exchanged within it: LLaVA-1.5's is 0.6 GB in bfloat16. Features are then split by columns over all
devices, so that a device holds its share of every picture, whichever slot needs it.
"""

import abc
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import replicated
from mmqa_jax.models.llava.config import LlavaConfig, PictureConfig
from mmqa_jax.models.llava.network import picture_features
from mmqa_jax.models.mistral3 import network as mistral3
from mmqa_jax.models.mistral3.network import Mistral3Config, RowBatch, row_features
from mmqa_jax.models.onevision import network as onevision
from mmqa_jax.models.onevision.network import (
    OnevisionConfig,
    TileBatch,
    TiledPicture,
    tile_features,
)
from mmqa_jax.models.qwen_vl import network

# Pictures of one size that a device encodes at once, one of these. A CPU gains nothing by more than
# one, nor does a TPU by several of the models whose pictures have more tokens (RESULTS.md).
_AT_ONCE = (1, 8)
_ALONE = (1,)
# Pictures of a usual size, for plans: 1,008 x 1,008 pixels for Qwen2.5-VL, 2 x 2 of OneVision's
# tiles.
_SHOWN, _SHOWN_TILES = network.Grid(36, 36), 2

Run = Callable[..., Any]  # calls a program on its mesh


class TowerPrograms(abc.ABC):
    """The jitted programs of a tower; nothing is allocated.

    `encode(state, inputs)`: of `inputs`, for B pictures -> B arrays [patches, features] in the
    language model's dtype; B is one of `batches`.

    Args:
      of_pictures: (state, inputs) -> [B, patches, features].
      features: their number.
      rows: where `place` leaves its result.
      mesh: where all lies; None is the default device.
      at_once: pictures that a device encodes at once, of devices that are no CPU.
    """

    def __init__(
        self,
        of_pictures: Callable[[Any, Any], jax.Array],
        features: int,
        rows: Sharding,
        mesh: Mesh | None = None,
        at_once: tuple[int, ...] = _ALONE,
    ):
        if mesh is None:
            device = jax.local_devices()[0]
            count, single = 1, SingleDeviceSharding(device)
            self.parameters = self.pixels = self.features = single
        else:
            device, count, axes = mesh.devices.flat[0], mesh.size, mesh.axis_names
            columns = axes if features % count == 0 else None
            self.parameters = replicated(mesh)
            self.pixels = NamedSharding(mesh, PartitionSpec(axes))
            self.features = NamedSharding(mesh, PartitionSpec(None, columns))
        each = _ALONE if device.platform == "cpu" else at_once
        self.batches = tuple(size * count for size in each)
        self.rows, self.width = rows, features

        def encode(state, pixels):
            if mesh is None:
                return tuple(of_pictures(state, pixels))
            of_batch = jax.shard_map(
                of_pictures,
                mesh=mesh,
                in_specs=(PartitionSpec(), self.pixels.spec),
                out_specs=self.pixels.spec,
                check_vma=False,
            )
            by_columns = NamedSharding(mesh, PartitionSpec(None, *self.features.spec))
            return tuple(jax.lax.with_sharding_constraint(of_batch(state, pixels), by_columns))

        self.encode = jax.jit(encode, out_shardings=self.features)

    @abc.abstractmethod
    def kind(self, picture: Any) -> Hashable:
        """Pictures of one kind are encoded in one batch, by one program."""

    @abc.abstractmethod
    def inputs(self, pictures: Sequence[Any], count: int) -> Any:
        """What `encode` takes for pictures of one kind, padded to a batch, on the devices."""

    @abc.abstractmethod
    def place(
        self, run: Run, features: Sequence[jax.Array], which: np.ndarray, patch: np.ndarray
    ) -> jax.Array:
        """The features of patches in the rows of a batch of chunks.

        Args:
          run: calls a program.
          features: of the pictures that are used, at least one.
          which: int32 [R, L], which of them; -1: the token is none.
          patch: int32 [R, L], which of its patches.

        Returns:
          [R, L, features], what `SlotRunner.encode` takes; anything where there is no patch.
        """


class LlavaTower(TowerPrograms):
    """LLaVA's: its tower and the connector; all pictures, and tiles of pictures, have one size.

    `gather(features, index)`: features of pictures and int32 [R, L], rows of all their patches in
    order -> [R, L, H].
    """

    def __init__(
        self, tower: nnx.Dict, config: LlavaConfig, rows: Sharding, mesh: Mesh | None = None
    ):
        graphdef = nnx.graphdef(tower)

        def of_pictures(state, pixels):  # [B, S, S, 3] -> [B, features, H]
            parts = nnx.merge(graphdef, state)
            normalized = parts.vision.normalize(pixels)
            return picture_features(parts.vision, parts.projector, normalized, config)

        def gather(features, index):
            rows = jnp.concatenate(features)  # [K * patches, H]
            return rows.at[index].get(mode="promise_in_bounds")

        super().__init__(of_pictures, config.llama.hidden, rows, mesh, _AT_ONCE)
        self._patches = config.features
        self.gather = jax.jit(gather, out_shardings=rows)

    def in_chunk(self, tokens: int) -> int:
        """The most pictures of which so many consecutive tokens can have patches."""
        return 1 + -(-(tokens - 1) // self._patches)

    def kind(self, picture: np.ndarray) -> Hashable:
        return None

    def inputs(self, pictures: Sequence[np.ndarray], count: int) -> jax.Array:
        pixels = np.zeros((count, *pictures[0].shape), np.uint8)
        pixels[: len(pictures)] = pictures
        return jax.device_put(pixels, self.pixels)

    def place(
        self, run: Run, features: Sequence[jax.Array], which: np.ndarray, patch: np.ndarray
    ) -> jax.Array:
        most = len(which) * self.in_chunk(which.shape[1])  # of any such batch: one program
        features = [*features, *[features[0]] * (most - len(features))]
        index = np.where(which < 0, 0, which * self._patches + patch).astype(np.int32)
        return run(self.gather, tuple(features), jax.device_put(index, self.parameters))


class SizedTower(TowerPrograms):
    """That of a model whose pictures have several sizes: there are programs for each bucket of them
    (`kind`).

    `put(placed, features, patch)`: features of one picture into [R, L, features], where int32
    [R, L] says which of its patches a token is; -1: none.

    Args:
      of_pictures, features, rows, mesh: see TowerPrograms.
      dtype: of features.
    """

    def __init__(
        self,
        of_pictures: Callable[[Any, Any], jax.Array],
        features: int,
        dtype: str,
        rows: Sharding,
        mesh: Mesh | None = None,
    ):
        def put(placed, features, patch):  # those of one picture; -1: of none
            chosen = features.at[jnp.maximum(patch, 0)].get(mode="promise_in_bounds")
            return jnp.where(patch[..., None] < 0, placed, chosen)

        super().__init__(of_pictures, features, rows, mesh)
        self.put = jax.jit(put, donate_argnums=0, out_shardings=rows)
        self._empty = jax.jit(
            lambda shape: jnp.zeros((*shape, features), dtype), static_argnums=0, out_shardings=rows
        )

    @abc.abstractmethod
    def laid(self, pictures: Sequence[Any]) -> Any:
        """Pictures of one kind as a batch: arrays whose rows are pictures."""

    @abc.abstractmethod
    def length(self, kind: Hashable) -> int:
        """Features of a picture of a kind, with their padding."""

    @abc.abstractmethod
    def usual(self) -> Any:
        """A picture of a usual size, for plans."""

    def inputs(self, pictures: Sequence[Any], count: int) -> Any:
        missing = count - len(pictures)

        def padded(x: np.ndarray) -> np.ndarray:
            return np.concatenate([x, np.repeat(x[:1], missing, axis=0)]) if missing else x

        return jax.device_put(jax.tree.map(padded, self.laid(pictures)), self.pixels)

    def place(
        self, run: Run, features: Sequence[jax.Array], which: np.ndarray, patch: np.ndarray
    ) -> jax.Array:
        placed = run(self._empty, which.shape)
        for number, of_picture in enumerate(features):
            of_this = np.where(which == number, patch, -1).astype(np.int32)
            placed = run(self.put, placed, of_picture, jax.device_put(of_this, self.parameters))
        return placed


class QwenTower(SizedTower):
    """Qwen-VL's; a bucket holds so many patches (`qwen_vl.network.lay_out`)."""

    def __init__(
        self,
        tower: nnx.Dict,
        config: network.QwenVLConfig,
        rows: Sharding,
        mesh: Mesh | None = None,
    ):
        graphdef, dtype = nnx.graphdef(tower), config.llama.dtype

        def of_pictures(state, pictures: network.PatchBatch):
            return nnx.merge(graphdef, state).vision(pictures).astype(dtype)

        super().__init__(of_pictures, config.vision.features, dtype, rows, mesh)
        self._vision = config.vision

    def kind(self, picture: np.ndarray) -> Hashable:
        return network.bucket_of(network.grid_of(picture.shape, self._vision), self._vision)

    def laid(self, pictures: Sequence[np.ndarray]) -> network.PatchBatch:
        return network.lay_out(pictures, self._vision, self.kind(pictures[0]))

    def length(self, kind: Hashable) -> int:
        return kind

    def usual(self) -> np.ndarray:
        unit = self._vision.unit
        return np.zeros((_SHOWN.rows * unit, _SHOWN.columns * unit, 3), np.uint8)


class OnevisionTower(SizedTower):
    """LLaVA-OneVision's; a bucket holds so many tiles (`onevision.network.lay_out`)."""

    def __init__(
        self, tower: nnx.Dict, config: OnevisionConfig, rows: Sharding, mesh: Mesh | None = None
    ):
        graphdef = nnx.graphdef(tower)

        def of_pictures(state, pictures: TileBatch):
            parts = nnx.merge(graphdef, state)
            newline = parts.newline[...]
            return tile_features(parts.vision, parts.projector, newline, pictures, config)

        super().__init__(of_pictures, config.llama.hidden, config.llama.dtype, rows, mesh)
        self._sizes = config.tiles

    def kind(self, picture: TiledPicture) -> Hashable:
        return onevision.bucket_of(len(picture.pixels), self._sizes)

    def laid(self, pictures: Sequence[TiledPicture]) -> TileBatch:
        return onevision.lay_out(pictures, self._sizes, self.kind(pictures[0]))

    def length(self, kind: Hashable) -> int:
        return onevision.most_tokens(kind, self._sizes)

    def usual(self) -> TiledPicture:
        side, size = self._sizes.image_size, _SHOWN_TILES * self._sizes.image_size
        canvas = onevision.best_resolution((size, size), self._sizes.resolutions)
        tiles = 1 + math.prod(self._sizes.grid(canvas))
        return TiledPicture(np.zeros((tiles, side, side, 3), np.uint8), (size, size))


class UnitTower(SizedTower):
    """Gemma 4's and LFM2-VL's: pictures of any size; a bucket holds so many units, each of which is
    a token."""

    def __init__(
        self, tower: nnx.Dict, config: LlavaConfig, rows: Sharding, mesh: Mesh | None = None
    ):
        graphdef = nnx.graphdef(tower)

        def of_pictures(state, pictures: network.PatchBatch | RowBatch):
            return self._encoded(nnx.merge(graphdef, state), pictures)

        super().__init__(of_pictures, config.llama.hidden, config.llama.dtype, rows, mesh)
        self._config = config

    def _encoded(self, parts: nnx.Dict, pictures: Any) -> jax.Array:
        pictures = parts.vision.normalize(pictures)
        return picture_features(parts.vision, parts.projector, pictures, self._config)

    def kind(self, picture: np.ndarray) -> Hashable:
        units = self._config.units
        return network.bucket_of(network.grid_of(picture.shape, units), units)

    def laid(self, pictures: Sequence[np.ndarray]) -> Any:
        return network.lay_out(pictures, self._config.units, self.kind(pictures[0]))

    def length(self, kind: Hashable) -> int:
        return kind

    def usual(self) -> np.ndarray:
        unit, rows, columns = self._config.units.unit, *_SHOWN
        if most := self._config.most_tokens:
            rows = columns = math.isqrt(most)
        return np.zeros((rows * unit, columns * unit, 3), np.uint8)


class RowTower(UnitTower):
    """Mistral 3's; a bucket holds so many tokens (`mistral3.network.lay_out`)."""

    _config: Mistral3Config

    def _encoded(self, parts: nnx.Dict, pictures: RowBatch) -> jax.Array:
        return row_features(
            parts.vision, parts.projector, parts.breaks[...], pictures, self._config
        )

    def kind(self, picture: np.ndarray) -> Hashable:
        return mistral3.bucket_of(picture.shape, self._config)

    def laid(self, pictures: Sequence[np.ndarray]) -> RowBatch:
        return mistral3.lay_out(pictures, self._config, self.kind(pictures[0]))


def tower_programs_of(
    tower: nnx.Dict, config: PictureConfig, rows: Sharding, mesh: Mesh | None = None
) -> TowerPrograms:
    """The programs of what a model computes of a picture (its `tower`).

    Args:
      tower: arrays or ShapeDtypeStructs.
      config: of its model.
      rows, mesh: see TowerPrograms.
    """
    kinds = {
        "square": LlavaTower,
        "first": LlavaTower,
        "marked": LlavaTower,
        "tiles": LlavaTower,
        "pieces": UnitTower,
        "anyres": OnevisionTower,
        "units": QwenTower,
        "budget": UnitTower,
        "rows": RowTower,
    }
    return kinds[config.picture_kind](tower, config, rows, mesh)


# Pictures in the engine's prompts: their tokens under ids of their own.
#
# A patch (what becomes one token) gets a negative id that encodes its picture's content and its
# position. A prompt with pictures is then a sequence of ids like any other: it is split into
# chunks, which prompts that begin with the same picture share. What a chunk's patches are is
# looked up in `image_features`.

_DIGEST = 16  # bytes of SHA-256 that number a picture
_MOST = 1 << 32  # patches of a picture


class PatchIds:
    """Numbers a model's pictures by their content, and their patches by picture and position."""

    def __init__(self, config: PictureConfig):
        self.token, self._config = config.image_token, config
        self.sight = config.llama.picture_sight

    def expand(
        self, request_id: object, tokens: Sequence[int], images: Sequence[np.ndarray]
    ) -> tuple[list[int], dict[int, np.ndarray]]:
        """Replaces every placeholder by its picture's patches.

        Args:
          request_id: for messages.
          tokens: with one placeholder (`token`) per picture, in order.
          images: uint8 each, as the config expects them.

        Returns:
          Token ids, negative for patches, and the pictures by number.
        """
        placeholders = sum(token == self.token for token in tokens)
        if placeholders != len(images):
            raise UserError(
                f"request {request_id!r}: its prompt has {placeholders} image placeholders (token "
                f"{self.token}) for {len(images)} pictures; put one into the prompt for each."
            )
        pictures, expanded, waiting = {}, [], iter(images)
        for token in tokens:
            if token != self.token:
                expanded.append(token)
                continue
            image = next(waiting)
            count = self._config.picture_tokens(image.shape)
            if not count or image.dtype != np.uint8:
                raise UserError(
                    f"request {request_id!r}: a picture is {image.dtype} {list(image.shape)}, "
                    f"expected {self._config.expected_pixels}."
                )
            digest = hashlib.sha256(repr(image.shape).encode())
            digest.update(np.ascontiguousarray(image))
            number = int.from_bytes(digest.digest()[:_DIGEST], "big")
            pictures[number] = image
            first = -1 - number * _MOST
            expanded.extend(range(first, first - count, -1))
        return expanded, pictures

    def shifts(self, tokens: Sequence[int], images: Sequence[np.ndarray]) -> np.ndarray | None:
        """Shifts positions of the tokens that `expand` gives (`PictureConfig.position_shifts`)."""
        return self._config.position_shifts(tokens, [np.shape(image) for image in images])

    def of(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where the patches among tokens are: (position, number of the picture, patch) of each."""
        return [
            (position, *divmod(-1 - token, _MOST))
            for position, token in enumerate(tokens)
            if token < 0
        ]


def marked(tokens: Sequence[int]) -> list[int]:
    """The ids as the device gets them: -1 for every patch."""
    return [max(token, -1) for token in tokens]
