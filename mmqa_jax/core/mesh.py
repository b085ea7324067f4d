"""Device mesh, logical-axis rules, models initialized straight onto their shards, and options of
XLA's compilers for programs of a mesh.

Every parameter carries logical axis names ("embed", "heads", ...) as Flax metadata
(`out_sharding`). The rules map logical axes to mesh axes; they are plain tuples, so a config can
replace them. Mesh axes: `data` (batch), `fsdp` (batch and parameters), `tensor` (heads and hidden
units of a layer); where rows are long, `sequence` (columns of a batch, and parameters) before
`tensor`. Between slices, which a data-center network joins, `data` and `fsdp` alone may cross: they
exchange parameters and gradients once a step, the others activations in every layer.
"""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")
SEQUENCE = "sequence"  # the axis that splits the columns of a batch; a mesh has it on request
_BATCH_AXES = ("data", "fsdp")
_FEWEST_COLUMNS = 16  # of a device: a tile of bfloat16 on a TPU
DCN_AXES = ("dcn_data", "dcn_fsdp")  # how many slices `data` and `fsdp` cross
_PROCESS_IS_SLICE = "MMQA_PROCESS_IS_SLICE"

MeshAxes = str | tuple[str, ...] | None
Rules = Sequence[tuple[str, MeshAxes]]

# Megatron-style: the hidden side of each matrix on `tensor`, the residual side on `fsdp`.
DEFAULT_RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("experts", "tensor"),
    ("embed", ("fsdp", SEQUENCE)),
    ("layers", None),  # scanned over: splitting it would move every layer at every step
    ("head_dim", None),
    ("positions", None),
    ("patch", None),
    ("proj", None),
)

M = TypeVar("M", bound=nnx.Module)
R = TypeVar("R")


def make_mesh(
    shape: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes the mesh (data, fsdp, tensor), or (data, fsdp, sequence, tensor), over all devices.

    Args:
      shape: size of each mesh axis over all slices; an axis left out is 1, at most one may be -1
        and takes the devices that remain. `dcn_data` and `dcn_fsdp` are the numbers of slices that
        `data` and `fsdp` cross; one left out or -1 takes the slices that remain, of both `data`
        as many as divide it. None means all devices on `data`.
      devices: the devices to use, all of them by default (`jax.devices()`).

    Returns:
      A mesh with the three axes of MESH_AXES, and with SEQUENCE if its size is not 1, all of type
      Auto (the compiler places activations; jax.make_mesh's own default, Explicit, would put
      shardings into types).
    """
    shape = {"data": -1} if shape is None else dict(shape)
    devices = jax.devices() if devices is None else list(devices)
    unknown = sorted(set(shape) - {*MESH_AXES, SEQUENCE, *DCN_AXES})
    if unknown:
        raise UserError(
            f"mesh: unknown axis {unknown[0]!r}; the axes are {', '.join(MESH_AXES)}, of long rows "
            f"{SEQUENCE}, and over several slices {' and '.join(DCN_AXES)}, rename it."
        )
    names = MESH_AXES
    if shape.get(SEQUENCE, 1) != 1:
        names = (*_BATCH_AXES, SEQUENCE, "tensor")
    sizes = [shape.get(axis, 1) for axis in names]
    named = ", ".join(f"{axis}={size}" for axis, size in zip(names, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(
            f"mesh: {named}: sizes must be positive, with at most one -1 (all remaining devices)."
        )
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: {named} does not fit {len(devices)} devices: the product of the sizes must "
            "be the number of devices; set one axis to -1 and let the others divide it."
        )
    crossed = _crossed(sizes, [shape.get(axis, -1) for axis in DCN_AXES], devices)
    # A slice's own axes may be split over two of the mesh (fsdp=8 on 4x4x4 chips).
    if set(crossed) == {1}:
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        placed = mesh_utils.create_hybrid_device_mesh(
            [size // slices for size, slices in zip(sizes, crossed, strict=True)],
            crossed,
            devices,
            process_is_granule=_process_is_slice(devices[0]),
            allow_split_physical_axes=True,
        )
    return Mesh(placed, names, axis_types=(AxisType.Auto,) * len(names))


def mesh_in_use(mesh: Mesh) -> Mesh:
    """The mesh (data, fsdp, tensor) of a training run's devices, where what it trains is used.

    Decoding has no long rows to split. `sequence` becomes a part of `fsdp`, so that parameters lie
    where they are.
    """
    if SEQUENCE not in mesh.shape:
        return mesh
    shape = (mesh.shape["data"], mesh.shape["fsdp"] * mesh.shape[SEQUENCE], mesh.shape["tensor"])
    return Mesh(mesh.devices.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def slice_of(device: jax.Device) -> int:
    """The number of the slice, whose devices are linked without the data-center network.

    Of GPUs it is the host, or the hosts that one NVLink network joins, as JAX finds them. With
    MMQA_PROCESS_IS_SLICE=1 in the environment each process is a slice by name, but for TPUs.
    """
    if _process_is_slice(device):
        return device.process_index
    return getattr(device, "slice_index", 0)


def _process_is_slice(device: jax.Device) -> bool:
    return device.platform != "tpu" and os.environ.get(_PROCESS_IS_SLICE) == "1"


def _crossed(sizes: Sequence[int], wanted: list[int], devices: Sequence[jax.Device]) -> list[int]:
    """Counts the slices that each mesh axis crosses; axes after `fsdp` stay in one.

    GPUs of several hosts are one slice unless `wanted` names an axis: in their plain order `data`
    and `fsdp` are the first to cross hosts, and an engine's `tensor` may span them.

    `wanted`: of DCN_AXES; -1 takes what remains.
    """
    each = Counter(map(slice_of, devices))
    slices, (data, fsdp) = len(each), wanted
    if wanted == [-1, -1]:
        if slices == 1 or (devices[0].platform == "gpu" and not _process_is_slice(devices[0])):
            return [1] * len(sizes)
        data = math.gcd(sizes[0], slices)
    elif data == -1:
        data = slices // max(fsdp, 1)
    fsdp = slices // max(data, 1) if fsdp == -1 else fsdp
    counts = sorted(set(each.values()))
    if len(counts) > 1:
        raise UserError(
            f"mesh: the {slices} slices have {' and '.join(map(str, counts))} devices; start the "
            "run on slices of one size."
        )
    if min(data, fsdp) < 1 or data * fsdp != slices:
        pairs = zip(DCN_AXES, wanted, strict=True)
        named = ", ".join(f"{axis}={size}" for axis, size in pairs if size != -1)
        raise UserError(
            f"mesh: {named} does not fit {slices} slice{'s' * (slices > 1)}: the product must be "
            "their number; leave these axes out, or one of them, which takes what remains."
        )
    for axis, size, parts in zip(MESH_AXES, sizes, (data, fsdp), strict=False):
        if size % parts:
            raise UserError(
                f"mesh: {axis}={size} cannot be split over {parts} slices of {counts[0]} devices; "
                f"only data and fsdp may cross slices: make mesh.{axis} a multiple of {parts}, and "
                f"{'mesh.sequence x ' * (len(sizes) > 3)}mesh.tensor at most {counts[0]}."
            )
    return [data, fsdp, *[1] * (len(sizes) - 2)]


def platform() -> str:
    """Platform ("cpu", "gpu", "tpu") of the devices that a program is traced for.

    That of the mesh of `jax.set_mesh`, which need not be of this machine's devices; without one,
    of the default device. Code that is traced asks this, never `jax.default_backend()`, which is
    that of the machine that compiles.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].platform if device is None else device.platform


def partition_spec(
    names: Sequence[str | None] | None,
    shape: Sequence[int],
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
) -> PartitionSpec:
    """Translates the logical axis names of one array into a PartitionSpec.

    A mesh axis is used once per array: of two dimensions that want it, the first has it and
    the second is replicated. A dimension that its mesh axes do not divide evenly (a
    vocabulary of 28,996 over 8, a bias of length 2) is replicated too: XLA would pad uneven
    shards, which costs memory and makes a checkpoint depend on the mesh it was written on.

    Args:
      names: one logical name (or None) per dimension; None or empty replicates the array.
      shape: the array's shape.
      mesh: the mesh of the result.
      rules: logical name -> mesh axis, tuple of mesh axes, or None.
    """
    if not names:
        return PartitionSpec()
    assert len(names) == len(shape), f"{tuple(names)} does not fit shape {tuple(shape)}"
    table = dict(rules)
    used: set[str] = set()
    spec: list[MeshAxes] = []
    for name, size in zip(names, shape, strict=True):
        if name is not None and name not in table:
            raise UserError(
                f"sharding rules: no rule for logical axis {name!r}; add ({name!r}, None) to "
                "replicate it or name a mesh axis."
            )
        target = table[name] if name is not None else None
        axes = (target,) if isinstance(target, str) else tuple(target or ())
        for axis in axes:
            if axis not in mesh.shape and axis != SEQUENCE:
                raise UserError(
                    f"sharding rules: {name!r} is mapped to {axis!r}, which is not a mesh axis; "
                    f"use one of {', '.join(mesh.axis_names)}."
                )
        # Axes of size 1 split nothing; leaving them out keeps specs equal across meshes.
        axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        splits = math.prod(mesh.shape[axis] for axis in axes)
        if splits == 1 or size % splits or used.intersection(axes):
            spec.append(None)
            continue
        used.update(axes)
        spec.append(axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*spec)


def split_over(model: nnx.Module, mesh: Mesh | None) -> tuple[nnx.GraphDef, nnx.State]:
    """`nnx.split` of a model, whose parameters go to the devices of a mesh if there is one."""
    graphdef, state = nnx.split(model)
    if mesh is not None:
        state = jax.device_put(state, state_shardings(state, mesh))
    return graphdef, state


def state_shardings(state: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Returns `state` with every leaf replaced by its NamedSharding.

    Args:
      state: an nnx.State, or any pytree that holds nnx Variables (optimizer states keep the
        parameters' metadata), of arrays or ShapeDtypeStructs. Leaves without axis names are
        replicated, and so are dimensions that do not divide (see `partition_spec`).
      mesh: mesh of the shardings.
      rules: logical axis -> mesh axis.

    Returns:
      The same tree structure: fit for jax.jit's in_shardings and out_shardings, for
      jax.device_put and as a restore target.
    """

    def sharding_of(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            value = leaf.get_value()
            if not hasattr(value, "shape"):
                return leaf
            names = leaf.get_metadata().get("out_sharding")
            spec = partition_spec(names, value.shape, mesh, rules)
            return leaf.replace(NamedSharding(mesh, spec))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(sharding_of, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def on_shardings(state: Any, shardings: Any) -> Any:
    """The shapes and dtypes of a tree of arrays, with a tree of shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch: first dimension over `data` and `fsdp`, the rest replicated."""
    return NamedSharding(mesh, PartitionSpec(_BATCH_AXES))


def on_device(tree: Any) -> Any:
    """The arrays of the host's memory (pinned_host) in the devices', others as they are; traced or
    not. A gradient takes the way back."""
    device, host = jax.memory.Space.Device, jax.memory.Space.Host
    return jax.tree.map(
        lambda x: jax.device_put(x, device) if jax.typeof(x).memory_space == host else x, tree
    )


def split_rows(x: jax.Array) -> jax.Array:
    """Activations [B, ...] split as a batch is, over the mesh of `jax.set_mesh`; traced.

    Left to itself, XLA follows the parameters: where these are split over `fsdp`, it gathers the
    batch on every device and splits what it computes instead. The columns of activations [B, L, H]
    are split over `sequence`. Without a mesh, or where rows and columns do not divide, x as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if x.ndim < 2 or mesh.manual_axes:
        return x
    axes = batch_axes(mesh, x.shape[0])
    columns = SEQUENCE if x.ndim > 2 and column_shards(x.shape[1]) > 1 else None
    if axes is None and columns is None:
        return x
    spec = PartitionSpec(axes) if columns is None else PartitionSpec(axes, columns)
    return jax.lax.with_sharding_constraint(x, spec)


def columns_over_tensor(x: jax.Array) -> jax.Array:
    """Activations [B, L, H] between products with split weights, whose columns `tensor` splits;
    traced.

    Each device then adds and norms some columns, where it else does all, and a sum over `tensor` is
    scattered and gathered again before the next product (Korthikanti et al. 2022). Where the
    columns are too few, x as it is.
    """
    if tensor_columns(x.shape[1]) == 1:
        return x
    axes = batch_axes(jax.sharding.get_abstract_mesh(), x.shape[0])
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, "tensor"))


def columns_of_all(x: jax.Array) -> jax.Array:
    """Gathers what `columns_over_tensor` split on every device of its rows; traced. Products that
    take columns in different orders would else gather them each by itself."""
    if tensor_columns(x.shape[1]) == 1:
        return x
    axes = batch_axes(jax.sharding.get_abstract_mesh(), x.shape[0])
    columns = SEQUENCE if column_shards(x.shape[1]) > 1 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, columns))


def heads_over_tensor(x: jax.Array) -> jax.Array:
    """Queries, keys or values [B, L, heads, ...], whose heads `tensor` splits; traced."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or x.shape[2] % mesh.shape["tensor"]:
        return x
    axes = batch_axes(mesh, x.shape[0])
    columns = SEQUENCE if column_shards(x.shape[1]) > 1 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, columns, "tensor"))


def tensor_columns(length: int) -> int:
    """Into how many parts `columns_over_tensor` splits so many columns; traced."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty or mesh.manual_axes else mesh.shape["tensor"]
    return 1 if length % (_FEWEST_COLUMNS * parts) else parts


def column_shards(length: int, mesh: Mesh | jax.sharding.AbstractMesh | None = None) -> int:
    """Into how many parts `sequence` splits rows of so many columns; traced.

    1 without that axis, inside jax.shard_map and where it does not divide the columns. `mesh` None
    is that of `jax.set_mesh`.
    """
    mesh = mesh or jax.sharding.get_abstract_mesh()
    shards = 1 if mesh.manual_axes else mesh.shape.get(SEQUENCE, 1)
    return shards if length and length % shards == 0 else 1


def gather_columns(x: jax.Array) -> jax.Array:
    """Activations [B, L, H] whose columns every device of a row has, though `sequence` split them;
    traced. Where XLA reads columns in another order it else adds up what all devices have."""
    if column_shards(x.shape[1]) == 1:
        return x
    axes = batch_axes(jax.sharding.get_abstract_mesh(), len(x))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def gather_features(table: jax.Array) -> jax.Array:
    """A table [vocabulary, features] whose features every device has; traced.

    Where a mesh splits a table over `tensor` and `fsdp`, or rows over `sequence`, XLA cannot bring
    what is looked up in it to the devices of its rows, and copies it whole to all of them. So the
    features are gathered first, as the weights of a layer are. On other meshes the table is
    returned as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    fsdp, sequence, tensor = (mesh.shape.get(axis, 1) for axis in ("fsdp", SEQUENCE, "tensor"))
    rows = "tensor" if tensor > 1 and len(table) % tensor == 0 else None
    if mesh.manual_axes or not (sequence > 1 or (fsdp > 1 and rows)):
        return table
    return jax.lax.with_sharding_constraint(table, PartitionSpec(rows, None))


def gather_frozen(matrix: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """A matrix without gradient whose "embed" axis every device has; traced.

    Left to itself, XLA on TPU multiplies by one device's part of it after the other as they come,
    and passes over the sum in memory for each. A gathered matrix comes beside other products.

    `names`: the logical names of its axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or mesh.shape.get("fsdp", 1) * mesh.shape.get(SEQUENCE, 1) == 1:
        return matrix
    whole = [None if name == "embed" else name for name in names]
    return jax.lax.with_sharding_constraint(matrix, partition_spec(whole, matrix.shape, mesh))


def share_words(
    words: jax.Array, axis: int, rows: int, targets: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Splits a table of words so that its products with states move few bytes; traced.

    Left to itself, XLA gathers a table whose features `fsdp` splits on every device, for the states
    of each. Where the states are less than the words, each device has some words instead, and
    multiplies the states of all devices by them.

    Args:
      words: [V, H] or [H, V], with the words along `axis`.
      rows, targets: states [rows, targets, H], which move three times: they are gathered for the
        product and once more for its gradient, and their own gradient is summed.

    Returns:
      The table, and what splits the states for the product.
    """
    mesh, count = jax.sharding.get_abstract_mesh(), words.shape[axis]
    among = [name for name in ("fsdp", SEQUENCE) if mesh.shape.get(name, 1) > 1]
    split, data = (*among, "tensor"), mesh.shape.get("data", 1)
    fit = rows % data == 0 and count % math.prod(mesh.shape.get(name, 1) for name in split) == 0
    if mesh.manual_axes or not among or not fit or 3 * rows // data * targets > 2 * count:
        return words, split_rows
    spec: list[MeshAxes] = [None, None]
    spec[axis] = split
    states = functools.partial(jax.lax.with_sharding_constraint, shardings=PartitionSpec("data"))
    return jax.lax.with_sharding_constraint(words, PartitionSpec(*spec)), states


def batch_axes(mesh: jax.sharding.AbstractMesh, rows: int) -> tuple[str, ...] | None:
    """The mesh axes that split a batch of so many rows; None where they do not divide them."""
    parts = math.prod(mesh.shape.get(axis, 1) for axis in _BATCH_AXES)
    return None if parts == 1 or rows % parts else _BATCH_AXES


@functools.lru_cache(maxsize=8)
def local_blocks(mesh: Mesh) -> tuple[int, ...]:
    """Returns this process's share of the equal blocks that `batch_sharding` cuts a batch into.

    Ascending. They need not be neighbours: jax.make_mesh orders the chips of some slices in
    rings. Processes that hold the same block, since `tensor` spans them, both feed it.
    """
    count = batch_blocks(mesh)
    held = batch_sharding(mesh).addressable_devices_indices_map((count,))
    return tuple(sorted({(index[0].start or 0) for index in held.values()}))


def batch_blocks(mesh: Mesh) -> int:
    """Into how many blocks `batch_sharding` cuts a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def local_rows(mesh: Mesh, batch_size: int) -> tuple[int, ...] | None:
    """The rows of a global batch, a multiple of `batch_blocks(mesh)`, that this process feeds;
    None: all.
    """
    count, blocks = batch_blocks(mesh), local_blocks(mesh)
    if len(blocks) == count:
        return None
    size = batch_size // count
    return tuple(block * size + row for block in blocks for row in range(size))


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """Returns a batch's global arrays from each process's own rows (`local_blocks`)."""
    sharding, count, blocks = batch_sharding(mesh), batch_blocks(mesh), local_blocks(mesh)
    place = {block: n for n, block in enumerate(blocks)}

    def put(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        size = len(leaf) // len(blocks)  # rows of a block

        def block_at(index: tuple[slice, ...]) -> np.ndarray:
            first = place[(index[0].start or 0) // size] * size
            return leaf[first : first + size]

        shape = (size * count, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, sharding, block_at)

    return jax.tree.map(put, batch)


@dataclasses.dataclass(frozen=True)
class RowPlacement:
    """Says where the rows of a batch go: they are split over a mesh's data axes, or go to the
    default device (None). See `placement_of`.
    """

    mesh: Mesh | None

    def padded(self, size: int) -> int:
        """The smallest batch of `size` rows or more that can be split."""
        blocks = 1 if self.mesh is None else batch_blocks(self.mesh)
        return -(-size // blocks) * blocks

    def rows(self, size: int) -> np.ndarray:
        """The rows int64[n] of a padded batch that this process makes, ascending."""
        rows = None if self.mesh is None else local_rows(self.mesh, size)
        return np.arange(size) if rows is None else np.array(rows, np.int64)

    def put(self, batch: Any) -> Any:
        """The arrays of a batch on the devices; a pytree of this process's rows [n, ...]."""
        if self.mesh is None:
            return jax.device_put(batch)  # explicit: allowed under the transfer guard
        return put_batch(self.mesh, batch)

    def copied(self, arrays: Any) -> Any:
        """Returns a pytree of computed arrays with a copy on every device."""
        return arrays if self.mesh is None else _copying(self.mesh)(arrays)

    def call(self, function: Callable[..., R], *arguments: Any, **options: Any) -> R:
        """Calls a jitted function, traced for the mesh: kernels are split as `split_rows` is."""
        if self.mesh is None:
            return function(*arguments, **options)
        with jax.set_mesh(self.mesh):
            return function(*arguments, **options)


DEFAULT_DEVICE = RowPlacement(None)


def placement_of(parameters: Any) -> RowPlacement:
    """Batches for `parameters`, a pytree, are split over the mesh that these are on, if it is one.

    All processes of the mesh then make and compute parts of the same batches, in the same order,
    and `fetch` gathers the results.
    """
    leaves = jax.tree.leaves(parameters)
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    on_mesh = isinstance(sharding, NamedSharding) and set(_BATCH_AXES) <= set(
        sharding.mesh.axis_names
    )
    return RowPlacement(sharding.mesh if on_mesh and sharding.mesh.size > 1 else None)


def fetch(tree: Any) -> Any:
    """The arrays of a pytree on the host, whole, on every process.

    Arrays that are split over several processes are gathered: all must call this together.
    """
    if all(x.is_fully_addressable or x.is_fully_replicated for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


@functools.lru_cache(maxsize=8)
def _copying(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda arrays: arrays, out_shardings=replicated(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that gives every device a full copy."""
    return NamedSharding(mesh, PartitionSpec())


def init_sharded(build: Callable[[], M], mesh: Mesh, rules: Rules = DEFAULT_RULES) -> M:
    """Initializes a model so that each device makes only its own shards.

    `build` is traced, never run on concrete arrays: no host holds the whole model. Values do
    not depend on the mesh (JAX's partitionable threefry).

    Args:
      build: makes the module, e.g. `lambda: VLP(config, rngs=nnx.Rngs(0))`.
      mesh: where the parameters go.
      rules: logical axis -> mesh axis.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    shardings = state_shardings(abstract, mesh, rules)
    # On CPU LLVM takes most of the time: dozens of random initializers, each run once. Level 1
    # compiles 2 to 3 times faster than the default and runs as fast (measured with MiniLM).
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if on_cpu else {}
    init = jax.jit(lambda: nnx.state(build()), out_shardings=shardings, compiler_options=options)
    state = init()
    return nnx.merge(graphdef, state)


# Options of XLA's compilers for programs of a mesh, where the defaults are not wanted.


# Chips with SparseCores can reduce gradients on them while the TensorCores go on with the backward
# pass: each layer's reduction then starts beside the products of the layer before it. Without these
# a chip waits for each layer's reduction. TPU v5e has no such cores.
_REDUCE_ON_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_ici_ar_pipelining": True,
}
_DATA_PARALLEL = {  # by jax's device_kind
    "TPU v5": _REDUCE_ON_SPARSE_CORES,  # v5p
    "TPU v5p": _REDUCE_ON_SPARSE_CORES,
    "TPU v6 lite": _REDUCE_ON_SPARSE_CORES,
    "TPU v6e": _REDUCE_ON_SPARSE_CORES,
}
# XLA for CUDA (jax 0.10.2) fuses a softmax over one query, as in VLP's last layer, with the
# gradient behind it, and then refuses the bfloat16 sum in it ("tt.splat op requires the same
# element type"). Without the fusion a training step of VLP's answers moves 7 % more bytes.
_GPU = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}


def training_options(mesh: Mesh) -> dict[str, bool | str]:
    """`compiler_options` of `jax.jit` for a training step on a mesh, present or not.

    They concern gradients that are reduced over the axis "data"; with "fsdp" alone the compiler
    splits gathers and reductions into steps that run beside products by itself.
    """
    if mesh.devices.flat[0].platform == "gpu":
        return _GPU
    if mesh.shape.get("data", 1) == 1:
        return {}
    return _DATA_PARALLEL.get(mesh.devices.flat[0].device_kind, {})


# XLA for TPUs by itself sends a product's operand around a ring, part by part, beside the product
# (a windowed einsum). It then copies matrices out of their stack, and all of its parts take 1.4 to
# 2 times as long as the whole by its own estimate: gathered before the product it is less.
_PROMPTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def prompt_options(mesh: Mesh | None) -> dict[str, bool | str]:
    """`compiler_options` of `jax.jit` for an engine's chunks of prompts, see `training_options`."""
    on_tpus = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    return _PROMPTS if on_tpus and mesh.shape["tensor"] > 1 else {}


# A row's bits then do not depend on how many rows are beside it: XLA on a CPU else takes sums, and
# what follows a product, from YNNPACK where arrays are large, which rounds in another order.
# YNNPACK's products alone have equal rows, of two rows and more, but for those of bfloat16 on
# processors with AMX, and of matrices of fewer than WIDE_ON_CPU columns on processors without
# AVX-512, whose last rows XLA adds up without fused multiplication. Roundings to bfloat16 are never
# left out, which else depends on what is
# compiled together.
EXACT_ON_CPU: dict[str, bool | str] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_allow_excess_precision": False,
}
WIDE_ON_CPU = 16  # columns; narrower matrices of an engine are padded with zeros
