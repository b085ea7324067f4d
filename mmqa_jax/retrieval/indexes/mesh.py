"""Dense search over all devices of a mesh, for sources that fill more memory than one has.

The rows are split over the devices; each finds its own best rows, and only those are gathered and
merged: [devices, queries, top_k] scores, whatever the number of rows. `mesh` is exact and returns
what ExactIndex does. `mesh_approx` is TPU-KNN (Chern et al., 2022, `jax.lax.approx_max_k`) over
bfloat16 vectors, half the memory, with the best candidates scored again in float32; on CPU and GPU
approx_max_k is exact, so that only the rounding of the vectors remains.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import DenseIndex, check_embeddings

_AXIS = "rows"
_BLOCK_ROWS = 65_536  # rows of a device that are scored at once
_QUERY_BATCH = 256
_RECALL_TARGET = 0.98  # of approx_max_k, per block
_CANDIDATES = 4  # per result, of which float32 finds the best


class MeshIndex(DenseIndex):
    """Vectors split over devices, searched on all of them at once.

    Every process of a launch makes it and calls `search` with the same queries; all get the result.

    Args:
      embeddings: what to search; each process reads the rows of its own devices.
      approximate: see the module.
      devices: all of them by default.
      block_rows: rows of a device that are scored at once.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        *,
        approximate: bool = False,
        devices: Sequence[jax.Device] | None = None,
        block_rows: int = _BLOCK_ROWS,
    ):
        check_embeddings(embeddings)
        self.embeddings = embeddings
        self.kind = "mesh_approx" if approximate else "mesh"
        self.is_exact = not approximate
        devices = list(devices or jax.devices())
        self._mesh = _row_mesh(devices)
        self._block, self._blocks = _block_counts(len(self), len(devices), block_rows)
        self._dtype = _dtype(approximate)
        self._check_fits()

    def _search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        mask = self._mask(allowed)
        available = len(self) if allowed is None else int(np.count_nonzero(allowed))
        fetch = _fetched(top_k, available, self.is_exact)
        search = _search_program(self._mesh, self._block, self._blocks, fetch, self.is_exact)
        size = 1 if len(queries) == 1 else _QUERY_BATCH
        rows = np.zeros((len(queries), top_k), np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        for start in range(0, len(queries), size):
            batch = np.zeros((size, queries.shape[1]), np.float32)
            part = queries[start : start + size]
            batch[: len(part)] = part
            on_all = self._on_all(batch)
            best_scores, best_rows = map(_local, search(on_all, self._vectors, mask))
            here = slice(start, start + len(part))
            best_rows, best_scores = best_rows[: len(part)], best_scores[: len(part)]
            if not self.is_exact:
                best_rows, best_scores = self._rescored(part, best_rows, best_scores)
            rows[here], scores[here] = best_rows[:, :top_k], best_scores[:, :top_k]
        return rows, scores

    def _rescored(
        self, queries: np.ndarray, rows: np.ndarray, rounded: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Candidates by their float32 scores, best first; equal scores in row order."""
        candidates = self.embeddings.vectors[rows]  # [n, candidates, D]
        scores = np.einsum("nd,ncd->nc", queries, candidates).astype(np.float32)
        scores = np.where(np.isfinite(rounded), scores, -np.inf)  # masked rows stay out
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)

    def _split(self, whole: np.ndarray, dtype: np.dtype) -> jax.Array:
        """Rows in padded equal parts, one a device; only the parts of this process are read."""
        shape = (self._mesh.size * self._blocks * self._block, *whole.shape[1:])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop = index[0].start or 0, index[0].stop or shape[0]
            rows = np.zeros((stop - start, *shape[1:]), dtype)
            held = whole[start : min(stop, len(whole))]
            rows[: len(held)] = held
            return rows

        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        return jax.make_array_from_callback(shape, sharding, part)

    @functools.cached_property
    def _vectors(self) -> jax.Array:  # read when the first search needs them
        return self._split(self.embeddings.vectors, self._dtype)

    @functools.cached_property
    def _everything(self) -> jax.Array:
        return self._split(np.ones(len(self), bool), np.dtype(bool))

    def _mask(self, allowed: np.ndarray | None) -> jax.Array:
        return self._everything if allowed is None else self._split(allowed, np.dtype(bool))

    def _on_all(self, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _check_fits(self) -> None:
        stats = self._mesh.local_devices[0].memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        dim = self.embeddings.vectors.shape[1]
        needed = self._blocks * self._block * dim * self._dtype.itemsize
        needed += 3 * _QUERY_BATCH * self._block * 4  # scores of a block, and what sorts them
        if free and needed > free:
            raise UserError(
                f"index: {len(self):,} rows of {dim} need {needed / 2**30:.1f} GiB on each of "
                f"{self._mesh.size} devices, {free / 2**30:.1f} are free; use more devices"
                f"{', --kind=mesh_approx (half the memory)' if self.is_exact else ''}, ScaNN or "
                "Milvus."
            )


def abstract_search(
    devices: Sequence[jax.Device], rows: int, dim: int, top_k: int, *, approximate: bool
) -> tuple[Callable[[], jax.stages.Traced], Mesh, dict[str, jax.ShapeDtypeStruct]]:
    """Describes the search of so many sources over devices that need not be there, for `mmqa plan`:
    a function that traces it, the mesh, and its arguments `queries` (a batch of 256), `vectors` and
    `mask`."""
    mesh = _row_mesh(list(devices))
    block, blocks = _block_counts(rows, len(devices), _BLOCK_ROWS)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (_AXIS,)))
    padded, exact = block * blocks * len(devices), not approximate
    arguments = {
        "queries": jax.ShapeDtypeStruct((_QUERY_BATCH, dim), np.float32, sharding=whole),
        "vectors": jax.ShapeDtypeStruct((padded, dim), _dtype(approximate), sharding=split),
        "mask": jax.ShapeDtypeStruct((padded,), np.bool_, sharding=split),
    }
    program = _search_program(mesh, block, blocks, _fetched(top_k, rows, exact), exact)
    return lambda: program.trace(*arguments.values()), mesh, arguments


def _row_mesh(devices: Sequence[jax.Device]) -> Mesh:
    placed = make_mesh(devices=devices).devices.reshape(-1)  # those of a slice side by side
    return Mesh(placed, (_AXIS,), axis_types=(AxisType.Auto,))


def _block_counts(rows: int, devices: int, block_rows: int) -> tuple[int, int]:
    """Rows of a block, and blocks of a device; the last rows are padding."""
    each = -(-rows // devices)
    block = min(block_rows, each)
    return block, -(-each // block)


def _dtype(approximate: bool) -> np.dtype:
    return np.dtype(jnp.bfloat16 if approximate else jnp.float32)


def _fetched(top_k: int, available: int, exact: bool) -> int:
    """How many sources the devices return for `top_k` results."""
    return top_k if exact else min(available, _CANDIDATES * top_k)


def _local(array: jax.Array) -> np.ndarray:
    """A replicated array, from this process's own copy."""
    return np.asarray(array.addressable_data(0))


@functools.lru_cache(maxsize=32)
def _search_program(mesh: Mesh, block: int, blocks: int, top_k: int, exact: bool):
    """The search: (queries [Q, D], vectors [R, D], mask [R]) -> scores and rows [Q, top_k]."""

    def of_device(queries: jax.Array, vectors: jax.Array, mask: jax.Array):
        # [blocks * block, D] and [blocks * block], this device's rows.
        first = jax.lax.axis_index(_AXIS) * (blocks * block)
        queries = queries.astype(vectors.dtype)
        count = min(top_k, blocks * block)

        def with_block(best, number):
            start = number * block
            part = jax.lax.dynamic_slice_in_dim(vectors, start, block)
            scores = jnp.matmul(
                queries,
                part.T,
                precision="highest" if exact else None,
                preferred_element_type=jnp.float32,
            )  # [Q, block]
            scores = jnp.where(jax.lax.dynamic_slice_in_dim(mask, start, block), scores, -jnp.inf)
            block_best = _top(scores, min(count, block), exact)
            rows = block_best[1] + first + start
            return _merge(best, (block_best[0], rows), count), None

        empty = (
            jnp.full((len(queries), count), -jnp.inf, jnp.float32),
            jnp.full((len(queries), count), -1, jnp.int32),
        )
        empty = jax.tree.map(lambda x: jax.lax.pcast(x, _AXIS, to="varying"), empty)
        (scores, rows), _ = jax.lax.scan(with_block, empty, jnp.arange(blocks))
        # Devices in order, so that equal scores stay in row order: [Q, devices * kept].
        scores = jax.lax.all_gather(scores, _AXIS, axis=1, tiled=True)
        rows = jax.lax.all_gather(rows, _AXIS, axis=1, tiled=True)
        scores, places = jax.lax.top_k(scores, top_k)
        return scores, jnp.take_along_axis(rows, places, axis=1)

    split, whole = PartitionSpec(_AXIS), PartitionSpec()
    # Gathered values are alike on all devices, which the checker of varying values cannot see.
    return jax.jit(
        jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(whole, split, split),
            out_specs=(whole, whole),
            check_vma=False,
        )
    )


def _top(scores: jax.Array, top_k: int, exact: bool) -> tuple[jax.Array, jax.Array]:
    if exact:
        return jax.lax.top_k(scores, top_k)
    return jax.lax.approx_max_k(scores, top_k, recall_target=_RECALL_TARGET)


def _merge(best, block_best, top_k: int):
    """The top of two lists of (scores, rows); of equal scores the first list's come first."""
    scores = jnp.concatenate([best[0], block_best[0]], axis=1)
    rows = jnp.concatenate([best[1], block_best[1]], axis=1)
    scores, places = jax.lax.top_k(scores, top_k)
    return scores, jnp.take_along_axis(rows, places, axis=1)
