"""Search over embedded sources: ScaNN (approximate, CPU, Linux), or exact where it is missing.

For sources that outgrow a machine: ScaNN in shards, or split over a mesh (mesh.py), or in Milvus
(milvus.py). `build_index` and `load_index` make and open all kinds but the last.

An index stores only what is derived from the embeddings; the vectors themselves stay in their
memory-mapped file and are passed in again when an index is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from mmqa_jax.core.checkpoints.checksums import check_sums, find_damage
from mmqa_jax.core.errors import UserError, try_disk
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import (
    INDEX_WHAT,
    DenseIndex,
    ExactIndex,
    check_embeddings,
    check_wrapped,
    index_manifest,
)
from mmqa_jax.retrieval.indexes.max_sim import KIND as MAX_SIM
from mmqa_jax.retrieval.indexes.max_sim import MaxSimIndex
from mmqa_jax.retrieval.indexes.mesh import MeshIndex
from mmqa_jax.retrieval.indexes.milvus import FLAT_ROWS, GRAPH
from mmqa_jax.retrieval.manifest import check_manifest, read_manifest, replace_folder

Kind = Literal["auto", "scann", "exact", "mesh", "mesh_approx", "maxsim", "tokens"]
KINDS = get_args(Kind)
_ON_MESH = ("mesh", "mesh_approx")
TOKENS = "tokens"
_HITS = 512  # tokens that are near to each of a query's
_HIT = 1e-6  # so that the farthest hit counts too
_FEWEST = 100  # hit sources, below which all are ranked
_MANY, _MOST_HELD = 20_000, 4 << 30  # sources and bytes of float32: those that `auto` indexes so
_VERB = "mmqa index"
_REMEDY = f"delete the folder and run `{_VERB}` again"
_QUERY_BATCH = 1024  # a top 2,000 of one modality needs about 7,000 results per query in memory


@dataclasses.dataclass(frozen=True)
class ScannParameters:
    """How ScaNN searches; `for_rows` chooses from the corpus size."""

    leaves: int = 0  # partitions; 0 scores every row exactly (brute force)
    leaves_to_search: int = 0  # partitions searched per query
    reorder: int = 200  # candidates of the quantized scoring that are rescored exactly
    training_rows: int = 0  # rows, drawn at random, to train the partitions on; 0: all
    # Weight of the second partition that every row is assigned to, chosen to find it when the first
    # one does not (SOAR, Sun et al. 2023, who use 1.5); 0: one partition per row.
    soar: float = 1.5

    @classmethod
    def for_rows(cls, rows: int) -> ScannParameters:
        """Brute force below 20,000 rows, where it answers in under 0.1 ms and never misses.

        Above, 2 sqrt(rows) partitions, of which enough are searched to score about 13,500 rows,
        but at most a quarter and at least a 48th of the partitions (61 of 894 at 200,000 rows,
        which find .996 of the exact top 10 of MiniLM's vectors of real texts:
        tests/bench/RESULTS.md). At equal time, many small partitions find more than a few large
        ones, and assigning rows to two partitions (`soar`) finds much more than doubling their
        number: 0.93 against 0.86 of the top 20 of a trained encoder's 11,000 vectors, with hard
        queries. More than 100 candidates find no more. k-means
        needs about a hundred rows per partition.
        """
        if rows < _MANY:
            return cls()
        leaves = round(2 * math.sqrt(rows))
        return cls(
            leaves=leaves,
            leaves_to_search=max(round(leaves / 48), min(leaves // 4, 13_500 * leaves // rows + 1)),
            reorder=100,
            training_rows=min(rows, 100 * leaves),
        )

    @classmethod
    def for_tokens(cls, tokens: int) -> ScannParameters:
        """For the vectors of all tokens: sqrt(tokens) partitions, of which a 64th is searched, at
        least 16."""
        if tokens < _MANY:
            return cls(reorder=0, soar=0)
        leaves = round(math.sqrt(tokens))
        searched = min(leaves, max(leaves // 64, 16))
        return cls(leaves, searched, reorder=0, training_rows=min(tokens, 60 * leaves), soar=0)


class ScannIndex(DenseIndex):
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

    def _search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches approximately above 20,000 rows.

        With `allowed`, more rows are fetched and filtered; queries left with fewer than `top_k`
        (all of the best are of the other modality) are searched exactly.
        """
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
        fetched, scores = self._fetch(queries, fetch)
        valid = np.isfinite(scores)  # ScaNN pads with NaN where its partitions hold too few rows
        if allowed is not None:
            valid &= allowed[fetched]
        short = np.flatnonzero(np.count_nonzero(valid, axis=1) < top_k)
        # Stable: valid results first, in ScaNN's order.
        order = np.argsort(~valid, axis=1, kind="stable")[:, :top_k]
        rows = np.take_along_axis(fetched, order, axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        if len(short):
            rows[short], scores[short] = self._exact.search(queries[short], top_k, allowed)
        return rows, scores

    def _parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self.parameters)

    def _write(self, folder: Path) -> None:
        write_scann(self._searcher, folder)

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


class TokenIndex(MaxSimIndex):
    """ScaNN over the vectors of all tokens: candidates of MaxSim are the sources of those that are
    nearest to a query's tokens. Made by `build_index` and `load_index`.

    A source's score as a candidate is the sum of its hits' products over the query's tokens, each
    less that of the token's farthest hit, which stands for what was not found (XTR, Lee et al.
    2023, "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval").
    """

    def __init__(self, embeddings: Embeddings, searcher: Any, parameters: ScannParameters):
        super().__init__(ExactIndex(embeddings), embeddings.tokens)
        self.kind, self.parameters, self._searcher = TOKENS, parameters, searcher
        self._source_of = np.repeat(
            np.arange(len(embeddings.vectors), dtype=np.int32), self.tokens.counts()
        )

    @classmethod
    def build(cls, embeddings: Embeddings, parameters: ScannParameters | None = None) -> TokenIndex:
        """Builds the index, for which all vectors of tokens are in memory as float32."""
        tokens = embeddings.tokens
        vectors, scales = tokens.format.decode(np.asarray(tokens.codes), tokens.dim)
        vectors *= scales
        parameters = parameters or ScannParameters.for_tokens(len(vectors))
        return cls(embeddings, scann_builder(vectors, parameters).build(), parameters)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes what `load_index` opens."""
        parameters = dataclasses.asdict(self.parameters)
        with replace_folder(folder, index_manifest(self.embeddings, TOKENS, parameters)) as filled:
            write_scann(self._searcher, filled)

    def _find(
        self, fixed: np.ndarray, tokens: np.ndarray, most: int, allowed: np.ndarray | None
    ) -> list[np.ndarray]:
        leaves = self.parameters.leaves_to_search
        options = {"leaves_to_search": leaves} if leaves else {}
        hits = min(_HITS, len(self._source_of))
        rows = []
        for query in tokens:
            near, products = self._searcher.search_batched(
                query[query.any(axis=1)], final_num_neighbors=hits, **options
            )
            rows.append(self._best_sources(near, products, most, allowed))
        return rows

    def _best_sources(
        self, near: np.ndarray, products: np.ndarray, most: int, allowed: np.ndarray | None
    ) -> np.ndarray:
        """The rows of the best sources of a query's tokens' hits [Q, hits]; all that are allowed
        where too few were hit."""
        valid = np.isfinite(products)  # ScaNN pads with NaN where its partitions hold too few rows
        gains = products - np.where(valid, products, np.inf).min(axis=1, keepdims=True)
        gains = np.where(valid, gains, 0) + _HIT
        sources = self._source_of[np.where(valid, near, 0)]
        # Hits are in descending order: of a token's in one source the first is the best.
        number = np.arange(len(sources))[:, None]
        _, best = np.unique(sources + number * len(self), return_index=True)
        gain = np.where(valid, gains, 0).ravel()[best]
        total = np.bincount(sources.ravel()[best], weights=gain, minlength=len(self))
        if allowed is not None:
            total = np.where(allowed, total, 0)
        hits = np.flatnonzero(total)
        if len(hits) < min(most, _FEWEST):
            return np.arange(len(self)) if allowed is None else np.flatnonzero(allowed)
        return hits[np.argsort(-total[hits], kind="stable")[:most]]


def build_index(
    embeddings: Embeddings, kind: Kind = "auto", parameters: ScannParameters | None = None
) -> DenseIndex:
    """Builds an index of a kind of KINDS: "auto" is ScaNN if it can be imported, otherwise exact,
    with a note on stderr. ScaNN's parameters are chosen from the number of rows if they are None.
    TypeError for an array in place of Embeddings."""
    check_wrapped(embeddings)
    if kind not in KINDS:
        raise UserError(f"index: kind {kind!r} is not known; use one of {', '.join(KINDS)}.")
    if kind in ("scann", TOKENS) and not scann_available():
        raise UserError(
            "index: ScaNN cannot be imported (it is Linux-only); install `scann` or use kind "
            "auto or exact."
        )
    kind = _chosen(embeddings, kind)
    if kind in _ON_MESH:
        return MeshIndex(embeddings, approximate=kind == "mesh_approx")
    if kind in (MAX_SIM, TOKENS) and embeddings.tokens is None:
        raise UserError(
            f"index: --kind={kind} needs the vectors of tokens; run `mmqa embed` with a "
            "late-interaction encoder, and not with --tokens=none."
        )
    if kind == MAX_SIM:
        return MaxSimIndex(ExactIndex(embeddings), embeddings.tokens, exhaustive=True)
    if kind == TOKENS:
        return TokenIndex.build(embeddings, parameters)
    if kind == "exact" or not scann_or_note(kind):
        return ExactIndex(embeddings)
    return ScannIndex.build(embeddings, parameters)


def _chosen(embeddings: Embeddings, kind: Kind) -> Kind:
    """The kind that is built: `auto` is `tokens` of a late-interaction encoder's many sources, if
    the vectors of their tokens fit into memory."""
    tokens, many = embeddings.tokens, len(embeddings.vectors) >= _MANY
    if kind == "auto" and tokens is not None and many and scann_available():
        held = 4 * tokens.dim * len(tokens.codes)
        return TOKENS if held <= _MOST_HELD else kind
    return kind


def is_current(
    folder: str | os.PathLike,
    embeddings: Embeddings,
    kind: Kind = "auto",
    parameters: ScannParameters | None = None,
) -> bool:
    """Whether `folder` holds the index that `build_index` would build from these embeddings."""
    kind = _chosen(embeddings, kind)
    if parameters is None and kind == TOKENS and embeddings.tokens is not None:
        parameters = ScannParameters.for_tokens(len(embeddings.tokens.codes))
    parameters = parameters or ScannParameters.for_rows(len(embeddings.vectors))
    scann = kind in ("scann", TOKENS) or (kind == "auto" and scann_available())
    recorded = dataclasses.asdict(parameters) if scann else {}
    built = kind if kind == TOKENS else "scann" if scann else "exact" if kind == "auto" else kind
    expected = index_manifest(embeddings, built, recorded)
    try:
        same = read_manifest(folder, INDEX_WHAT, _VERB) == expected
    except UserError:
        return False
    return same and find_damage(folder) is None


def load_index(
    folder: str | os.PathLike, embeddings: Embeddings, model_fingerprint: str | None = None
) -> DenseIndex:
    """Opens a saved index over the embeddings it was built from; `model_fingerprint` is of the
    encoder that will embed the queries."""
    folder = Path(folder)
    manifest = read_manifest(folder, INDEX_WHAT, _VERB)
    check_sums(folder, remedy=_REMEDY)
    check_manifest(folder, manifest, {"model_fingerprint": model_fingerprint}, _VERB)
    expected = index_manifest(embeddings, manifest.get("kind", ""))
    expected.pop("parameters")
    check_manifest(folder, manifest, expected, _VERB)
    if manifest["kind"] == IN_SHARDS:
        return _open_shards(folder, embeddings, manifest)
    if manifest["kind"] in (*_ON_MESH, MAX_SIM):
        return build_index(embeddings, manifest["kind"])
    if manifest["kind"] == "exact" or not scann_or_note("auto"):
        return ExactIndex(embeddings)
    parameters, searcher = load_scann(folder, manifest)
    made = TokenIndex if manifest["kind"] == TOKENS else ScannIndex
    return made(embeddings, searcher, parameters)


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


# ScaNN in shards, for more vectors than one machine holds, which are searched one shard at a time.
#
# A shard has the codes of some consecutive rows, a sixth of their float32 vectors or so, and not
# the vectors: its best candidates are scored exactly by those in the embeddings' memory-mapped
# file, and so is the order of all. Whoever searches loads a shard, asks it all the queries, and
# lets go of it: give many queries at once. Building takes the memory of one shard's vectors,
# twice; killed, it goes on behind the last whole shard.

IN_SHARDS = "scann_shards"
LEAST_ROWS = 40_000  # of a shard; half of it is searched exactly in no time
_SHARD = "a shard of a ScaNN index"


class ScannShards(DenseIndex):
    """ScaNN indexes of consecutive rows, one a span, over memory-mapped vectors. Made by
    `load_index`."""

    kind = IN_SHARDS
    is_exact = False

    def __init__(self, embeddings: Embeddings, folder: Path, spans: Sequence[range]):
        self.embeddings, self.folder, self.spans = embeddings, folder, spans
        self._exact = ExactIndex(embeddings)

    def _search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Orders the best of all shards' candidates by exact scores.

        With `allowed`, more candidates are fetched and filtered; queries left with fewer than
        `top_k` are searched exactly.
        """
        rows = np.full((len(queries), top_k), -1, np.int32)
        scores = np.full((len(queries), top_k), -np.inf, np.float32)
        if not len(queries):
            return rows, scores
        for number, span in enumerate(self.spans):
            mask = None if allowed is None else allowed[span.start : span.stop]
            if mask is not None and not mask.any():
                continue
            for i, candidates in enumerate(self._candidates(number, span, queries, top_k, mask)):
                vectors = np.asarray(self.embeddings.vectors[candidates])
                new_rows = np.concatenate([rows[i], candidates])
                new_scores = np.concatenate([scores[i], vectors @ queries[i]])
                order = np.lexsort((new_rows, -new_scores))[:top_k]  # -1, of no score, stays behind
                rows[i], scores[i] = new_rows[order], new_scores[order]
        short = np.flatnonzero((rows < 0).any(axis=1))
        if len(short):
            rows[short], scores[short] = self._exact.search(queries[short], top_k, allowed)
        return rows, scores

    def _candidates(
        self, number: int, span: range, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> list[np.ndarray]:
        """Returns each query's rows of one shard to score, ascending; loads the shard for it."""
        place = self.folder / _name(number)
        parameters, searcher = load_scann(place, read_manifest(place, _SHARD, _VERB))
        fetch = max(parameters.reorder, 4 * top_k)
        if allowed is not None:
            fetch = math.ceil(1.5 * fetch * len(span) / np.count_nonzero(allowed))
        fetch = min(fetch, len(span))
        needed = math.ceil(8 * fetch / 4 * parameters.leaves / len(span))
        leaves = min(parameters.leaves, max(parameters.leaves_to_search, needed))
        options = {"leaves_to_search": leaves} if parameters.leaves else {}
        nearest, codes = searcher.search_batched_parallel(
            queries, final_num_neighbors=fetch, **options
        )
        candidates = []
        for rows, scores in zip(nearest, codes, strict=True):
            rows = rows[np.isfinite(scores)].astype(np.int64)
            rows = np.unique(rows if allowed is None else rows[allowed[rows]])
            candidates.append(rows + span.start)
        return candidates


def build_shards(
    folder: str | os.PathLike,
    embeddings: Embeddings,
    shard_rows: int,
    parameters: ScannParameters | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Writes the shards that are missing, of `shard_rows` rows at most, and at last the manifest;
    returns whether there were any. The parameters are every shard's; None: chosen from its rows.
    `on_progress` is called with (rows done, rows)."""
    if not scann_available():
        raise UserError(
            "--shard_rows: ScaNN cannot be imported (it is Linux-only); install `scann`, or give "
            "--kind=exact without this flag."
        )
    folder = Path(folder)
    manifest, spans = _manifest(embeddings, shard_rows), spans_of(embeddings, shard_rows)
    parameters = parameters or ScannParameters.for_rows(min(map(len, spans)))
    shards, built = _shards(folder, manifest), False
    for number, span in enumerate(spans):
        about = {
            "what": _SHARD,
            "rows": [span.start, span.stop],
            "parameters": dataclasses.asdict(parameters),
        }
        if not _is_whole(shards / _name(number), about):
            _build_shard(shards / _name(number), embeddings.vectors[span.start : span.stop], about)
            built = True
        if on_progress is not None:
            on_progress(span.stop, len(embeddings.vectors))
    if built or _manifest_of(folder) != manifest:
        with replace_folder(folder, manifest):
            pass
        built = True
    for old in folder.parent.glob(f"{folder.name}-shards-*"):
        if old != shards:
            with contextlib.suppress(OSError):
                remove_tree(old)
    return built


def _open_shards(
    folder: Path, embeddings: Embeddings, manifest: Mapping[str, Any]
) -> ScannShards | ExactIndex:
    """Opens an index in shards; where ScaNN cannot be imported, search is exact."""
    spans = spans_of(embeddings, manifest["parameters"]["shard_rows"])
    shards = _shards(folder, manifest)
    for number in range(len(spans)):
        read_manifest(shards / _name(number), _SHARD, _VERB)
        check_sums(shards / _name(number), remedy=_REMEDY)
    if not scann_or_note("auto"):
        return ExactIndex(embeddings)
    return ScannShards(embeddings, shards, spans)


def _build_shard(place: Path, vectors: np.ndarray, about: dict[str, Any]) -> None:
    searcher = scann_builder(vectors, ScannParameters(**about["parameters"])).build()
    with replace_folder(place, about) as filled:
        write_scann(searcher, filled)


def _is_whole(place: Path, about: dict[str, Any]) -> bool:
    try:
        same = read_manifest(place, _SHARD, _VERB) == about
    except UserError:
        return False
    return same and find_damage(place) is None


def _manifest_of(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = read_manifest(folder, INDEX_WHAT, _VERB)
    except UserError:
        return None
    return manifest if find_damage(folder) is None else None


def spans_of(embeddings: Embeddings, shard_rows: int) -> list[range]:
    """The rows of every shard."""
    rows = len(embeddings.vectors)
    if shard_rows < LEAST_ROWS:
        raise UserError(
            f"--shard_rows={shard_rows}: a shard of ScaNN has at least {LEAST_ROWS:,} sources; "
            "give more, such as 1000000."
        )
    count = -(-rows // shard_rows)
    ends = [rows * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def _manifest(embeddings: Embeddings, shard_rows: int) -> dict[str, Any]:
    return index_manifest(embeddings, IN_SHARDS, {"shard_rows": shard_rows})


def _shards(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Beside the index's folder, which is replaced as a whole."""
    job = json.dumps(manifest, sort_keys=True).encode()
    name = hashlib.blake2b(job, digest_size=8).hexdigest()
    return folder.with_name(f"{folder.name}-shards-{name}")


def _name(number: int) -> str:
    return f"{number:05d}"


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
    rows, exact_rows = index.search(queries, top_k)[0], exact.search(queries, top_k)[0]
    shared = [len({*a} & {*b}) for a, b in zip(rows.tolist(), exact_rows.tolist(), strict=True)]
    return float(np.mean(shared) / top_k)


# What each kind of index holds and reads for so many sources, before there are any.

_FLOAT = 4  # bytes
SHARD_ROWS = 1_000_000  # of `mmqa index --kind=scann --shard_rows`, as planned here


@dataclasses.dataclass(frozen=True)
class IndexSize:
    """Bytes of an index outside of accelerators."""

    kind: str
    place: str  # what holds them: `disk`, `host memory` or `Milvus`
    held: float  # while it is searched; building needs more
    # Per batch of queries if `shared`, else per query; None: not known beforehand.
    read: float | None
    shared: bool = False  # one pass over the sources serves a whole batch


def index_sizes(rows: int, dim: int) -> tuple[IndexSize, ...]:
    """Exact search from disk, ScaNN on one host and in shards, and Milvus, for float32 vectors
    [rows, dim]."""
    vectors = float(rows * dim * _FLOAT)
    return (
        IndexSize("exact", "disk", vectors, vectors, shared=True),
        _scann_size(rows, dim),
        *([_shards_size(rows, dim)] if rows > SHARD_ROWS else []),
        _milvus_size(rows, dim),
    )


def _scann_size(rows: int, dim: int) -> IndexSize:
    """Vectors for reordering; codes of two dimensions each, in one or two partitions of a row.

    A code is a byte in the files, of which searching reads 4 bits.
    """
    parameters, vectors = ScannParameters.for_rows(rows), rows * dim * _FLOAT
    if not parameters.leaves:
        return IndexSize("scann", "host memory", vectors, vectors)
    codes, centers = _codes(rows, dim, parameters), parameters.leaves * dim * _FLOAT
    members = _partitions(parameters) * rows * 4  # the numbers of the partitions
    share = parameters.leaves_to_search / parameters.leaves
    read = centers + share * codes / 2 + parameters.reorder * dim * _FLOAT
    return IndexSize("scann", "host memory", vectors + codes + members + centers, read)


def _shards_size(rows: int, dim: int) -> IndexSize:
    """What of SHARD_ROWS is in memory but the vectors; a batch of queries reads all shards' codes.

    Building one takes its vectors twice, as ScaNN copies them.
    """
    whole = _scann_size(SHARD_ROWS, dim).held - SHARD_ROWS * dim * _FLOAT
    return IndexSize("scann_shards", "host memory", whole, whole * rows / SHARD_ROWS, shared=True)


def _codes(rows: int, dim: int, parameters: ScannParameters) -> float:
    return _partitions(parameters) * rows * dim / 2


def _partitions(parameters: ScannParameters) -> int:
    """Returns in how many partitions a row lies."""
    return 2 if parameters.soar else 1


def _milvus_size(rows: int, dim: int) -> IndexSize:
    """HNSW: vectors, and 2 M neighbors of each on the lowest level, where nearly all of them are.

    How many of them a search visits depends on the vectors.
    """
    vectors = rows * dim * _FLOAT
    if rows <= FLAT_ROWS:
        return IndexSize("milvus", "Milvus", vectors, vectors)
    links = rows * 2 * GRAPH["M"] * 4
    return IndexSize("milvus", "Milvus", vectors + links, None)
