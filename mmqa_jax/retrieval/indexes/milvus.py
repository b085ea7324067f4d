"""Dense search in a Milvus collection, for sources that outgrow the machines at hand.

A collection is named `milvus://HOST:PORT/COLLECTION`, or `milvus:///path/to/FILE.db/COLLECTION` for
Milvus Lite, its embedded form. It holds a row's number (the primary key) and its vector; the
fingerprints of the encoder and the corpus are among its properties, so that it can be searched
without the embeddings' folder and is never searched with another encoder. A server's token is read
from MILVUS_TOKEN. Milvus ranks by inner product, with HNSW, or exactly (FLAT) where rows are few.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from mmqa_jax.core.errors import UserError
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import DenseIndex, check_embeddings, search_within
from mmqa_jax.retrieval.rankings import candidate_rows

PREFIX = "milvus://"
_VERB = "mmqa index"
_KEY, _VECTOR = "row", "vector"
_PROPERTY = "mmqa."  # in front of the names of our properties
_CHUNK_BYTES = 8 << 20  # of vectors sent at once; a message may have 64 MiB
FLAT_ROWS = 20_000  # up to here every row is scored: as fast, and nothing is missed
_MOST_RESULTS = 16_384  # Milvus gives no more per query
_QUERY_BATCH = 256
_FEW_RUNS = 256  # of allowed rows that are named by their ends
GRAPH = {"M": 32, "efConstruction": 256}  # HNSW: neighbors, and candidates when they are chosen


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a collection is: `uri` as pymilvus takes it, and its name."""

    uri: str
    collection: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.uri.removeprefix('http://')}/{self.collection}"


def parse_place(text: str) -> Place:
    """Reads `milvus://HOST:PORT/COLLECTION` or `milvus:///FILE.db/COLLECTION`; or UserError."""
    where, _, collection = text.removeprefix(PREFIX).rpartition("/")
    named = re.fullmatch(r"[\w.-]+:(\d{1,5})", where)
    server = named and 0 < int(named[1]) < 1 << 16
    if not re.fullmatch(r"[A-Za-z_]\w{0,254}", collection) or not (server or where.endswith(".db")):
        raise UserError(
            f"--index={text}: {PREFIX}HOST:PORT/COLLECTION or {PREFIX}/path/to/FILE.db/COLLECTION "
            "was expected; write it so, with a PORT below 65536, and letters, digits and _ in "
            "COLLECTION."
        )
    return Place(f"http://{where}" if server else where, collection)


class MilvusIndex(DenseIndex):
    """The rows of a finished collection.

    Made by `open_milvus`. Search is approximate above 20,000 rows; the vectors stay in Milvus, and
    those of candidates are fetched.
    """

    kind = "milvus"

    def __init__(self, client: Any, place: Place, record: dict[str, Any]):
        self._client, self._place = client, place
        self._rows, self._dim = record["rows"], record["dim"]
        self._fingerprints = record["model_fingerprint"], record["corpus_fingerprint"]
        # Queries are checked by its dimension.
        self.embeddings = Embeddings(np.zeros((0, self._dim), np.float32), *self._fingerprints)
        self.is_exact = self._rows <= FLAT_ROWS

    def __len__(self) -> int:
        return self._rows

    def _search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if top_k > _MOST_RESULTS:
            raise UserError(
                f"index: top_k={top_k} is more than Milvus gives, {_MOST_RESULTS}; ask for less or "
                "search with --kind=mesh."
            )
        within = "" if allowed is None else _expression(allowed)
        # Graph search keeps a list of `ef` candidates: at least top_k.
        options = {
            "metric_type": "IP",
            "params": {} if self.is_exact else {"ef": max(100, 2 * top_k)},
        }
        rows = np.full((len(queries), top_k), -1, np.int32)
        scores = np.full((len(queries), top_k), -np.inf, np.float32)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = queries[start : start + _QUERY_BATCH]
            with _spoken_to(self._place):
                hits_of_queries = self._client.search(
                    self._place.collection,
                    data=list(batch),
                    anns_field=_VECTOR,
                    filter=within,
                    limit=top_k,
                    search_params=options,
                    output_fields=[_KEY],
                )
            for number, hits in enumerate(hits_of_queries, start):
                # Of equal scores the earlier row comes first, as everywhere.
                best = sorted((-hit["distance"], hit[_KEY]) for hit in hits)
                rows[number, : len(best)] = [row for _, row in best]
                scores[number, : len(best)] = [-score for score, _ in best]
        return rows, scores

    def search_within(
        self, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Fetches the candidates' vectors, and ranks them as every index does."""
        distinct = sorted({int(row) for candidates in rows for row in candidates})
        candidate_rows(distinct, len(self), "index")
        vectors = np.zeros((max(1, len(distinct)), self._dim), np.float32)
        for start in range(0, len(distinct), 1024):
            part = distinct[start : start + 1024]
            with _spoken_to(self._place):
                entities = self._client.get(
                    self._place.collection, ids=part, output_fields=[_KEY, _VECTOR]
                )
            for row in entities:
                vectors[np.searchsorted(distinct, row[_KEY])] = row[_VECTOR]
        held = Embeddings(vectors, *self._fingerprints)
        places = [np.searchsorted(distinct, candidates).tolist() for candidates in rows]
        found_places, scores = search_within(held, queries, places, top_k)
        numbers = np.asarray(distinct or [0], np.int32)
        return np.where(found_places < 0, -1, numbers[found_places]).astype(np.int32), scores


def ingest(
    text: str, embeddings: Embeddings, *, on_progress: Callable[[int], None] | None = None
) -> bool:
    """Puts embeddings into a collection, or what a killed job has left; makes it searchable.

    Rows are sent in chunks under their own numbers, and a chunk that is there is not sent again: it
    does not matter how often, or by how many processes in turn, this is called.

    Args:
      text: see the module.
      on_progress: called with the number of rows that are in the collection.

    Returns:
      Whether anything was sent.
    """
    check_embeddings(embeddings)
    place = parse_place(text)
    client = _connect(place)
    rows, dim = embeddings.vectors.shape
    record = {
        "rows": rows,
        "dim": dim,
        "model_fingerprint": embeddings.model_fingerprint,
        "corpus_fingerprint": embeddings.corpus_fingerprint,
    }
    with _spoken_to(place):
        if not client.has_collection(place.collection):
            _create(client, place, record)
        recorded = _record(client, place)
        for name, value in record.items():
            if recorded.get(name) != value:
                raise UserError(
                    f"{place}: holds embeddings with {name} {recorded.get(name)!r}, these have "
                    f"{value!r}; name another collection."
                )
        client.load_collection(place.collection)  # rows are counted in loaded collections alone
        sent = False
        chunk = max(1, _CHUNK_BYTES // (4 * dim))
        for start in range(0, rows, chunk):
            stop = min(start + chunk, rows)
            if _count(client, place, start, stop) < stop - start:
                vectors = np.asarray(embeddings.vectors[start:stop], np.float32)
                chunk_rows = [
                    {_KEY: start + number, _VECTOR: vector} for number, vector in enumerate(vectors)
                ]
                client.upsert(place.collection, chunk_rows)
                sent = True
            if on_progress is not None:
                on_progress(stop)
        if not recorded["complete"]:
            client.flush(place.collection)
            client.alter_collection_properties(
                place.collection, properties={f"{_PROPERTY}complete": "yes"}
            )
    return sent


def open_milvus(text: str, model_fingerprint: str, corpus_fingerprint: str) -> MilvusIndex:
    """Opens a finished collection, of the encoder that will embed the queries and the corpus that
    is searched."""
    place = parse_place(text)
    client = _connect(place)
    with _spoken_to(place):
        if not client.has_collection(place.collection):
            raise UserError(f"{place}: no such collection; run `{_VERB}` with it first.")
        record = _record(client, place)
        expected = {
            "model_fingerprint": model_fingerprint,
            "corpus_fingerprint": corpus_fingerprint,
        }
        for name, value in expected.items():
            if record.get(name) != value:
                raise UserError(
                    f"{place}: {name} is {record.get(name)!r} but {value!r} was expected (it was "
                    f"filled with another model or corpus); run `{_VERB}` with another collection."
                )
        if not record["complete"]:
            raise UserError(f"{place}: is not filled yet; run `{_VERB}` again to finish it.")
        client.load_collection(place.collection)
    return MilvusIndex(client, place, record)


def _connect(place: Place) -> Any:
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError as error:
        raise UserError(
            f"{place}: the package pymilvus is missing; install the extra: pip install "
            '"mmqa-jax[milvus]".'
        ) from error
    token = os.environ.get("MILVUS_TOKEN", "")
    try:
        return MilvusClient(place.uri, token=token, timeout=20)
    except (MilvusException, OSError) as error:
        raise UserError(
            f"{place}: {_first_line(error)}; start Milvus there or correct it."
        ) from error


@contextlib.contextmanager
def _spoken_to(place: Place) -> Iterator[None]:
    """Milvus's errors as ours."""
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as error:
        raise UserError(
            f"{place}: Milvus refuses ({_first_line(error)}); look at its log or name another "
            "collection."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _create(client: Any, place: Place, record: dict[str, Any]) -> None:
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(_KEY, DataType.INT64, is_primary=True)
    schema.add_field(_VECTOR, DataType.FLOAT_VECTOR, dim=record["dim"])
    kind = {"index_type": "FLAT"}
    if record["rows"] > FLAT_ROWS:
        kind = {"index_type": "HNSW", "params": GRAPH}
    index = client.prepare_index_params()
    index.add_index(_VECTOR, metric_type="IP", **kind)
    client.create_collection(
        place.collection,
        schema=schema,
        index_params=index,
        # Reads see all writes that were acknowledged: a resumed job counts what is there.
        consistency_level="Strong",
        properties={f"{_PROPERTY}{name}": str(value) for name, value in record.items()},
    )


def _record(client: Any, place: Place) -> dict[str, Any]:
    """What our properties of a collection say."""
    properties = client.describe_collection(place.collection).get("properties", {})
    ours = {
        name.removeprefix(_PROPERTY): value
        for name, value in properties.items()
        if name.startswith(_PROPERTY)
    }
    if not {"rows", "dim"} <= ours.keys():
        raise UserError(f"{place}: was not made by `{_VERB}`; name another collection.")
    numbers = {name: int(ours[name]) for name in ("rows", "dim")}
    return {**ours, **numbers, "complete": ours.get("complete") == "yes"}


def _count(client: Any, place: Place, start: int, stop: int) -> int:
    """How many of the rows from start to stop are in the collection."""
    answer = client.query(
        place.collection,
        filter=f"{_KEY} >= {start} and {_KEY} < {stop}",
        output_fields=["count(*)"],
    )
    return int(answer[0]["count(*)"])


def _expression(allowed: np.ndarray) -> str:
    """The allowed rows in Milvus's language: by the ends of their runs, or one by one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], allowed.astype(np.int8), [0]])))
    runs = edges.reshape(-1, 2).tolist()
    if len(runs) <= _FEW_RUNS:
        return " or ".join(f"({_KEY} >= {a} and {_KEY} < {b})" for a, b in runs)
    few = np.flatnonzero(allowed)
    some = "in"
    if 2 * len(few) > len(allowed):
        few, some = np.flatnonzero(~allowed), "not in"
    return f"{_KEY} {some} {few.tolist()}"
