"""A vision-language model's tower as the engine runs it: pictures in batches, each once.

On a mesh every device has the whole tower and encodes its own pictures, so that nothing is
exchanged within it: LLaVA-1.5's is 0.6 GB in bfloat16. Features are then split by columns over all
devices, so that a device holds its share of every picture, whichever slot needs it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mmqa_jax.core.mesh import replicated
from mmqa_jax.models.clip import blocks_before
from mmqa_jax.models.llava import Llava, LlavaConfig, picture_features
from mmqa_jax.models.pictures import PictureConfig
from mmqa_jax.models.qwen_vl import QwenVL, QwenVLConfig
from mmqa_jax.models.qwen_vl_layout import PatchBatch, bucket_of, grid_of, lay_out

# Pictures that a device encodes at once, one of these; a CPU gains nothing by more than one, and
# would compute the padding.
_AT_ONCE = (1, 8)
_AT_ONCE_ON_CPU = (1,)

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
    """

    def __init__(
        self,
        of_pictures: Callable[[Any, Any], jax.Array],
        features: int,
        rows: Sharding,
        mesh: Mesh | None = None,
    ):
        if mesh is None:
            device = jax.local_devices()[0]
            count, one = 1, SingleDeviceSharding(device)
            self.parameters = self.pixels = self.features = one
        else:
            device, count, axes = mesh.devices.flat[0], mesh.size, mesh.axis_names
            columns = axes if features % count == 0 else None
            self.parameters = replicated(mesh)
            self.pixels = NamedSharding(mesh, PartitionSpec(axes))
            self.features = NamedSharding(mesh, PartitionSpec(None, columns))
        each = _AT_ONCE_ON_CPU if device.platform == "cpu" else _AT_ONCE
        self.batches = tuple(size * count for size in each)
        self.rows = rows

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
    def kind(self, picture: np.ndarray) -> Hashable:
        """Pictures of one kind are encoded in one batch, by one program."""

    @abc.abstractmethod
    def inputs(self, pictures: Sequence[np.ndarray], count: int) -> Any:
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
    """LLaVA's: its tower and the projector; all pictures have one size.

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

        super().__init__(of_pictures, config.llama.hidden, rows, mesh)
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


class QwenTower(TowerPrograms):
    """Qwen-VL's; there are programs for each bucket of patches (`qwen_vl_layout`).

    `put(placed, features, patch)`: features of one picture into [R, L, features], where int32
    [R, L] says which of its patches a token is; -1: none.
    """

    def __init__(
        self, tower: nnx.Dict, config: QwenVLConfig, rows: Sharding, mesh: Mesh | None = None
    ):
        graphdef, dtype = nnx.graphdef(tower), config.llama.dtype

        def of_pictures(state, pictures: PatchBatch):
            return nnx.merge(graphdef, state).vision(pictures).astype(dtype)

        def put(placed, features, patch):  # those of one picture; -1: of none
            own = features.at[jnp.maximum(patch, 0)].get(mode="promise_in_bounds")
            return jnp.where(patch[..., None] < 0, placed, own)

        width = config.vision.features
        super().__init__(of_pictures, width, rows, mesh)
        self._vision = config.vision
        self.put = jax.jit(put, donate_argnums=0, out_shardings=rows)
        self._empty = jax.jit(
            lambda shape: jnp.zeros((*shape, width), dtype), static_argnums=0, out_shardings=rows
        )

    def kind(self, picture: np.ndarray) -> Hashable:
        return bucket_of(grid_of(picture.shape, self._vision), self._vision)

    def inputs(self, pictures: Sequence[np.ndarray], count: int) -> PatchBatch:
        bucket = bucket_of(grid_of(pictures[0].shape, self._vision), self._vision)
        laid = lay_out(pictures, self._vision, bucket)
        missing = count - len(pictures)

        def padded(x: np.ndarray) -> np.ndarray:
            return np.concatenate([x, np.repeat(x[:1], missing, axis=0)]) if missing else x

        return jax.device_put(jax.tree.map(padded, laid), self.pixels)

    def place(
        self, run: Run, features: Sequence[jax.Array], which: np.ndarray, patch: np.ndarray
    ) -> jax.Array:
        placed = run(self._empty, which.shape)
        for number, of_picture in enumerate(features):
            own = np.where(which == number, patch, -1).astype(np.int32)
            placed = run(self.put, placed, of_picture, jax.device_put(own, self.parameters))
        return placed


def tower_of(model: Llava | QwenVL) -> nnx.Dict:
    """What is computed of a picture: of a LLaVA the tower up to the layer that is read, and the
    projector."""
    if isinstance(model, QwenVL):
        return nnx.Dict(vision=model.vision)
    parts = nnx.Dict(vision=model.vision, projector=model.projector)
    parts = nnx.merge(*nnx.split(parts))  # the model keeps its own
    graphdef, layers = nnx.split(parts.vision.layers)
    count = blocks_before(model.config.feature_layer, model.config.vision.layers)
    # Cut once, not in every call.
    parts.vision.layers = nnx.merge(graphdef, jax.tree.map(lambda x: x[:count], layers))
    del parts.vision.ln_post
    if hasattr(parts.vision, "head"):
        del parts.vision.head
    return parts


def tower_programs_of(
    tower: nnx.Dict, config: PictureConfig, rows: Sharding, mesh: Mesh | None = None
) -> TowerPrograms:
    """The programs of a tower of `tower_of`.

    Args:
      tower: arrays or ShapeDtypeStructs.
      config: of its model.
      rows, mesh: see TowerPrograms.
    """
    kind = QwenTower if isinstance(config, QwenVLConfig) else LlavaTower
    return kind(tower, config, rows, mesh)
