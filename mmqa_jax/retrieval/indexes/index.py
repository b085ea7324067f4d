"""Search over embedded sources: ScaNN (approximate, CPU, Linux), or exact where it is missing.

For sources that outgrow a machine: split over a mesh (mesh.py), or in Milvus (milvus.py).

An index stores only what is derived from the embeddings; the vectors themselves stay in their
memory-mapped file and are passed in again when an index is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float32, Int32

from mmqa_jax.core.checksums import check_sums, find_damage
from mmqa_jax.core.disk_errors import try_disk
from mmqa_jax.core.errors import UserError
from mmqa_jax.retrieval.bm25.in_memory import check_top_k
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import (
    INDEX_WHAT,
    ExactIndex,
    check_embeddings,
    check_queries,
    check_wrapped,
    index_manifest,
    search_within,
)
from mmqa_jax.retrieval.indexes.mesh import MeshIndex
from mmqa_jax.retrieval.manifest import check_manifest, read_manifest, replace_folder

Kind = Literal["auto", "scann", "exact", "mesh", "mesh_approx"]
KINDS = get_args(Kind)
_ON_MESH = ("mesh", "mesh_approx")
_VERB = "mmqa index"
_REMEDY = f"delete the folder and run `{_VERB}` again"
_QUERY_BATCH = 1024  # a top 2,000 of one modality needs about 7,000 results per query in memory


@dataclasses.dataclass(frozen=True)
class ScannParameters:
    """How ScaNN searches; `for_rows` chooses from the corpus size.

    Attributes:
      leaves: partitions; 0 scores every row exactly (brute force).
      leaves_to_search: partitions searched per query.
      reorder: candidates of the quantized scoring that are rescored exactly.
      training_rows: rows, drawn at random, to train the partitions on; 0: all.
      soar: weight of the second partition that every row is assigned to, chosen to find it when
        the first one does not (SOAR, Sun et al. 2023, who use 1.5); 0: one partition per row.
    """

    leaves: int = 0
    leaves_to_search: int = 0
    reorder: int = 200
    training_rows: int = 0
    soar: float = 1.5

    @classmethod
    def for_rows(cls, rows: int) -> ScannParameters:
        """Brute force below 20,000 rows, where it answers in under 0.1 ms and never misses.

        Above, 2 sqrt(rows) partitions, of which enough are searched to score about 13,500 rows,
        but at most a quarter and at least a 48th of the partitions (40 of 1,933 at 934,000 rows,
        which find the exact top 20 of clustered vectors in full). At equal time, many small
        partitions find more than a few large ones, and assigning rows to two partitions (`soar`)
        finds much more than doubling their number: 0.93 against 0.86 of the top 20 of a trained
        encoder's 11,000 vectors, with hard queries. More than 100 candidates find no more. k-means
        needs about a hundred rows per partition.
        """
        if rows < 20_000:
            return cls()
        leaves = round(2 * math.sqrt(rows))
        return cls(
            leaves=leaves,
            leaves_to_search=max(round(leaves / 48), min(leaves // 4, 13_500 * leaves // rows + 1)),
            reorder=100,
            training_rows=min(rows, 100 * leaves),
        )


class ScannIndex:
    """ScaNN (Guo et al., 2020): partitions, anisotropic quantization, exact reordering.

    Made by `build_index` and `load_index`.
    """

    kind = "scann"
    is_exact = False

    def __init__(self, embeddings: Embeddings, searcher: Any, parameters: ScannParameters):
        self.embeddings = embeddings
        self.parameters = parameters
        self._searcher = searcher
        self._exact = ExactIndex(embeddings)

    @classmethod
    def build(cls, embeddings: Embeddings, parameters: ScannParameters | None = None) -> ScannIndex:
        """Builds the index; training takes seconds at 40,000 rows, minutes at a million."""
        check_embeddings(embeddings)
        vectors = embeddings.vectors
        parameters = parameters or ScannParameters.for_rows(len(vectors))
        builder = scann_builder(vectors, parameters)
        if parameters.leaves:
            builder = builder.reorder(parameters.reorder)
        return cls(embeddings, builder.build(), parameters)

    def __len__(self) -> int:
        return len(self._exact)

    def search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None = None
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Searches as ExactIndex.search, approximately above 20,000 rows.

        With `allowed`, more rows are fetched and filtered; queries left with fewer than `top_k`
        (all of the best are of the other modality) are searched exactly.
        """
        check_top_k(top_k, len(self), allowed, "index")
        queries = check_queries(queries, self.embeddings)
        rows = np.zeros((len(queries), top_k), np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = slice(start, start + _QUERY_BATCH)
            rows[batch], scores[batch] = self._search_batch(queries[batch], top_k, allowed)
        return rows, scores

    def _search_batch(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        fetch = top_k
        if allowed is not None:
            share = np.count_nonzero(allowed) / len(self)
            fetch = min(len(self), math.ceil(1.5 * top_k / share) + 10)
        found, scores = self._fetch(queries, fetch)
        valid = np.isfinite(scores)  # ScaNN pads with NaN where its partitions hold too few rows
        if allowed is not None:
            valid &= allowed[found]
        short = np.flatnonzero(np.count_nonzero(valid, axis=1) < top_k)
        # Stable: valid results first, in ScaNN's order.
        order = np.argsort(~valid, axis=1, kind="stable")[:, :top_k]
        rows = np.take_along_axis(found, order, axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        if len(short):
            rows[short], scores[short] = self._exact.search(queries[short], top_k, allowed)
        return rows, scores

    def search_within(
        self, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Searches as ExactIndex.search_within (exact)."""
        return search_within(self.embeddings, queries, rows, top_k)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes ScaNN's files and the manifest, whole or not at all."""
        manifest = index_manifest(self.embeddings, self.kind, dataclasses.asdict(self.parameters))
        with replace_folder(folder, manifest) as temporary:
            write_scann(self._searcher, temporary)

    def _fetch(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        options: dict[str, int] = {}
        if self.parameters.leaves:
            p = self.parameters
            # A large top_k needs more partitions and candidates.
            options["pre_reorder_num_neighbors"] = max(p.reorder, 4 * count)
            rows_per_leaf = len(self) / p.leaves
            needed = math.ceil(8 * count / rows_per_leaf)
            options["leaves_to_search"] = min(p.leaves, max(p.leaves_to_search, needed))
        search = (
            self._searcher.search_batched
            if len(queries) == 1
            else self._searcher.search_batched_parallel
        )
        rows, scores = search(queries, final_num_neighbors=count, **options)
        return rows.astype(np.int32), scores.astype(np.float32)


def build_index(
    embeddings: Embeddings, kind: Kind = "auto", parameters: ScannParameters | None = None
) -> ExactIndex | ScannIndex | MeshIndex:
    """Builds an index.

    Args:
      kind: "scann", "exact", "mesh" or "mesh_approx" (see indexes/mesh.py), or "auto": ScaNN if it
        can be imported, otherwise exact, with a note on stderr.
      parameters: ScaNN's, chosen from the number of rows if None.

    Raises:
      TypeError: an array in place of Embeddings.
    """
    check_wrapped(embeddings)
    if kind not in KINDS:
        raise UserError(f"index: kind {kind!r} is not known; use one of {', '.join(KINDS)}.")
    if kind == "scann" and not scann_available():
        raise UserError(
            "index: ScaNN cannot be imported (it is Linux-only); install `scann` or use kind "
            "auto or exact."
        )
    if kind in _ON_MESH:
        return MeshIndex(embeddings, approximate=kind == "mesh_approx")
    if kind == "exact" or not scann_or_note(kind):
        return ExactIndex(embeddings)
    return ScannIndex.build(embeddings, parameters)


def is_current(
    folder: str | os.PathLike,
    embeddings: Embeddings,
    kind: Kind = "auto",
    parameters: ScannParameters | None = None,
) -> bool:
    """Whether `folder` holds the index that `build_index` would build from these embeddings."""
    parameters = parameters or ScannParameters.for_rows(len(embeddings.vectors))
    scann = kind == "scann" or (kind == "auto" and scann_available())
    recorded = dataclasses.asdict(parameters) if scann else {}
    built = "scann" if scann else "exact" if kind == "auto" else kind
    expected = index_manifest(embeddings, built, recorded)
    try:
        same = read_manifest(folder, INDEX_WHAT, _VERB) == expected
    except UserError:
        return False
    return same and find_damage(folder) is None


def load_index(
    folder: str | os.PathLike, embeddings: Embeddings, model_fingerprint: str | None = None
) -> ExactIndex | ScannIndex | MeshIndex:
    """Opens a saved index over the embeddings it was built from.

    Args:
      model_fingerprint: of the encoder that will embed the queries.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, INDEX_WHAT, _VERB)
    check_sums(folder, remedy=_REMEDY)
    check_manifest(folder, manifest, {"model_fingerprint": model_fingerprint}, _VERB)
    expected = index_manifest(embeddings, manifest.get("kind", ""))
    expected.pop("parameters")
    check_manifest(folder, manifest, expected, _VERB)
    if manifest["kind"] in _ON_MESH:
        return MeshIndex(embeddings, approximate=manifest["kind"] == "mesh_approx")
    if manifest["kind"] == "exact" or not scann_or_note("auto"):
        return ExactIndex(embeddings)
    parameters, searcher = load_scann(folder, manifest)
    return ScannIndex(embeddings, searcher, parameters)


def load_scann(folder: Path, manifest: Mapping[str, Any]) -> tuple[ScannParameters, Any]:
    """ScaNN's files in a folder, whose checksums have been checked, as parameters and searcher."""
    if (folder / "scann_docids.pkl").exists():  # ScaNN would unpickle it; we never write one
        raise UserError(f"{folder / 'scann_docids.pkl'}: pickles are not loaded; remove it.")
    try:
        return ScannParameters(**manifest["parameters"]), _scann().load_searcher(str(folder))
    except (KeyError, TypeError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: ScaNN cannot open this index ({error}); {_REMEDY}.") from error


def write_scann(searcher: Any, folder: Path) -> None:
    """Writes ScaNN's files into an empty folder."""
    try:
        searcher.serialize(str(folder), relative_path=True)
    except RuntimeError:  # "I/O error", whatever it was
        try_disk(folder)
        raise


def scann_builder(vectors: np.ndarray, parameters: ScannParameters) -> Any:
    """ScaNN's builder without reordering: brute force, or partitions and their codes."""
    builder = _scann().builder(vectors, min(20, len(vectors)), "dot_product")
    if not parameters.leaves:
        return builder.score_brute_force()
    builder = builder.tree(
        num_leaves=parameters.leaves,
        num_leaves_to_search=parameters.leaves_to_search,
        training_sample_size=parameters.training_rows or len(vectors),
        # Partition by direction: the plain mean of a mixed partition is short and its dot product
        # with a query small, so it would never be searched (and recall@20 would stay below 0.99
        # however many partitions are searched).
        spherical=True,
        soar_lambda=parameters.soar or None,
    )
    # 2 dimensions per block and threshold 0.2, as ScaNN recommends for unit vectors.
    return builder.score_ah(2, anisotropic_quantization_threshold=0.2)


def scann_available() -> bool:
    """Whether ScaNN can be imported here."""
    try:
        _scann()
    except ImportError:
        return False
    return True


def _scann() -> Any:
    # Imported on use: ScaNN is Linux-only, and imports TensorFlow if it is installed.
    return importlib.import_module("scann.scann_ops.py.scann_ops_pybind")


def scann_or_note(kind: str) -> bool:
    """Whether ScaNN can be imported here; if not, "auto" says what happens instead."""
    if scann_available():
        return True
    if kind == "auto":
        print("ScaNN cannot be imported here; searching exactly instead.", file=sys.stderr)
    return False


# How much of exact search's results an approximate index finds.

_QUERIES = 200
_NOISE = 0.6  # length of what is added to a source: near it, but not it


def recall_against(index: Any, exact: ExactIndex, top_k: int, *, seed: int = 0) -> float:
    """The mean share of the exact top k that the index finds too.

    The queries are drawn sources with noise added, so that their neighbors are those of a question
    about them; real questions may be harder.
    """
    rng = np.random.default_rng(seed)
    vectors = exact.embeddings.vectors
    drawn = np.sort(rng.choice(len(vectors), min(_QUERIES, len(vectors)), replace=False))
    noise = rng.standard_normal((len(drawn), vectors.shape[1]))
    queries = vectors[drawn] + _NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)
    rows, wanted = index.search(queries, top_k)[0], exact.search(queries, top_k)[0]
    shared = [len({*a} & {*b}) for a, b in zip(rows.tolist(), wanted.tolist(), strict=True)]
    return float(np.mean(shared) / top_k)
