"""Places a trained model on devices, and chooses how many examples a call takes.

`mmqa embed`, `rerank`, `answer`, `candidates`, `caption` and what `mmqa plan` compiles for them ask
the functions here. By default every device of the process holds a copy of the model, and the rows
of a batch are split over all of them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.chips import chip_of_kind
from mmqa_jax.core.errors import UserError, decimal_number
from mmqa_jax.core.mesh import MESH_AXES, RowPlacement, batch_blocks, make_mesh, placement_of

AUTO: Literal["auto"] = "auto"
BatchSize = int | Literal["auto"]

_SHARE = 0.5  # of what is free: other parts of a row have their own batches
_PARTS = (4, 2)  # of a batch, for what is left of a bucket
_BESIDE_TRAINING = 8  # examples a device: the training state has the memory


@dataclasses.dataclass(frozen=True)
class RowCost:
    """The costs that limit the examples of a call."""

    unit: str  # what the examples are
    on_cpu: int  # examples of a call on CPUs, which larger ones do not make faster
    # Examples of a call for each device of another kind; beyond them its units are busy, and the
    # last batch of a bucket only has more padding.
    most: int
    bytes: float  # of an example's inputs and activations on a device, with room


@dataclasses.dataclass(frozen=True)
class Serving:
    """How a model's batches run, as given or chosen."""

    placement: RowPlacement
    batch_size: int  # examples of a whole call, a multiple of what the mesh splits them into
    unit: str  # what they are
    # Sizes for batches that are not full, each a program more, ascending.
    smaller: tuple[int, ...] = ()

    def size_for(self, count: int) -> int:
        """The size of the batch that takes so many examples, at most `batch_size`."""
        return next((size for size in self.smaller if count <= size), self.batch_size)

    def to_json(self) -> dict[str, Any]:
        """`devices`, `mesh` (axis -> size) and `batch_size`."""
        mesh = self.placement.mesh
        shape = dict.fromkeys(MESH_AXES, 1) if mesh is None else dict(mesh.shape)
        return {"devices": math.prod(shape.values()), "mesh": shape, "batch_size": self.batch_size}

    def __str__(self) -> str:
        """`8 devices (data=8), 1,024 pairs a batch`."""
        facts = self.to_json()
        axes = " ".join(f"{axis}={size}" for axis, size in facts["mesh"].items() if size > 1)
        devices = f"{facts['devices']} devices ({axes})" if axes else "1 device"
        return f"{devices}, {self.batch_size:,} {self.unit} a batch"


# Told of each model of a part: the key of the part's config that names it, and the model, whose
# `serving` says where and how it runs.
OnModel = Callable[[str, Any], None]


def ignored(key: str, model: Any) -> None:
    """An OnModel of who does not ask."""


def serving_mesh(
    shape: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh that a trained model is used on.

    Args:
      shape: size of each mesh axis, as of `make_mesh`; None: a copy on each device.
      devices: those of this process by default; of a launch of several, each has its own mesh and
        does its share of the job.
    """
    return make_mesh(shape or None, jax.local_devices() if devices is None else devices)


def loading_mesh(shape: Mapping[str, int] | None = None) -> Mesh | None:
    """`serving_mesh` for weights that are loaded; None where it has one device, the default one."""
    mesh = serving_mesh(shape)
    return mesh if mesh.size > 1 else None


def serve(
    batch_size: BatchSize, cost: RowCost, parameters: Any, *, beside_training: bool = False
) -> Serving:
    """How batches run with a model's parameters, which are on their devices.

    Args:
      batch_size: examples of a whole call, or AUTO.
      parameters: pytree of arrays.
      beside_training: with AUTO few examples a device, the same on all processes of the mesh.
    """
    placement = placement_of(parameters)
    devices = [jax.local_devices()[0]] if placement.mesh is None else placement.mesh.devices.flat
    blocks = placement.padded(1)
    if batch_size != AUTO:
        size = batch_size
    elif beside_training:
        size = max(cost.on_cpu, 0 if _is_cpu(devices[0]) else _BESIDE_TRAINING * blocks)
    else:
        size = chosen_batch_size(cost, blocks, devices[0])
    size, smaller = placement.padded(size), ()
    if batch_size == AUTO and not beside_training and not _is_cpu(devices[0]):
        smaller = tuple(sorted({placement.padded(size // parts) for parts in _PARTS}))
    return Serving(placement, size, cost.unit, smaller)


class ServedModel:
    """A trained model in use; it may be abstract (nnx.eval_shape) if `use` gives the parameters."""

    def __init__(self, model: nnx.Module, batch_size: BatchSize, cost: RowCost):
        self._graphdef, self._state = nnx.split(model)
        self._batch_size, self._cost = batch_size, cost
        self.serving = serve(batch_size, cost, self._state)  # its devices and batches

    def use(self, model: nnx.Module) -> None:
        """Continues with the parameters of another model of the same config; compiles nothing."""
        _, self._state = nnx.split(model)
        self.serving = serve(self._batch_size, self._cost, self._state, beside_training=True)


def planned_batch_size(size: BatchSize, cost: RowCost, mesh: Mesh, held: float) -> int:
    """Examples of a whole call on a mesh of absent devices that hold `held` bytes of parameters
    each.
    """
    if size == AUTO:
        size = chosen_batch_size(cost, batch_blocks(mesh), mesh.devices.flat[0], held)
    return RowPlacement(mesh).padded(size)


def chosen_batch_size(
    cost: RowCost, blocks: int, device: jax.Device, held: float | None = None
) -> int:
    """Examples of a whole call whose rows are split into `blocks`, on devices of this kind.

    `held` are the bytes of parameters on a device that is absent; None: what this device holds.
    """
    if _is_cpu(device):
        return cost.on_cpu
    rows = min(cost.most, _SHARE * free_bytes(device, held) / cost.bytes)
    return blocks * 2 ** int(math.log2(max(rows, 1)))


def _is_cpu(device: jax.Device) -> bool:
    return device.platform == "cpu"


def free_bytes(device: jax.Device, held: float | None = None) -> float:
    """Bytes of a device's memory beside what it, or an absent one, holds; no limit where it is
    mute.
    """
    stats = {} if held is not None else device.memory_stats() or {}
    chip = chip_of_kind(device.device_kind)
    limit = stats.get("bytes_limit") or (math.inf if chip is None else chip.hbm_bytes)
    return max(limit - (stats.get("bytes_in_use", 0) if held is None else held), 0.0)


def read_batch_size(text: str) -> BatchSize:
    """Parses `--batch_size`; UserError unless it is a positive number or `auto`."""
    if text == AUTO:
        return AUTO
    if size := decimal_number(text):
        return size
    raise UserError(f"--batch_size={text}: at least 1 was expected, or auto; correct it.")


def read_mesh(text: str) -> dict[str, int]:
    """`--mesh`: `fsdp=4,tensor=2` -> sizes by axis; UserError for another form."""
    shape = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or decimal_number(size.removeprefix("-")) is None:
            raise UserError(
                f"--mesh={text}: AXIS=SIZE,... was expected, with the axes {', '.join(MESH_AXES)}, "
                "such as fsdp=4,tensor=2; correct it."
            )
        shape[axis] = int(size)
    return shape


def tower_bytes(model: Any, length: int) -> float:
    """Activations of one sequence in a model whose config says its width as `hidden` or `width`."""
    if hasattr(model, "hidden"):
        return layer_bytes(length, model.hidden, model.heads, model.mlp, model.dtype)
    return layer_bytes(length, model.width, model.heads, model.mlp_width, model.dtype)


def layer_bytes(length: int, width: int, heads: int, mlp: int, dtype: str) -> float:
    """Activations of one layer of a transformer on one sequence."""
    size = value_bytes(dtype)
    return heads * length**2 * (4.0 + size) + length * (mlp + 4.0 * width) * size


def value_bytes(dtype: str) -> int:
    """Bytes of one value."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
