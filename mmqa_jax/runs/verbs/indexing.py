"""`mmqa embed` and `mmqa index`: embeddings of a corpus's sources, and indexes over them."""

import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.chunks import WHOLE, Engine, Shard, check_chunk
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, read_json, write_json
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.paths import as_path, check_store
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh, serve
from mmqa_jax.data.batches.vqa import image_id
from mmqa_jax.data.corpus import Corpus, open_corpus, open_sources
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import BrokenPictures, decode_to_pixels
from mmqa_jax.data.records.corpus_records import MANIFEST as CORPUS
from mmqa_jax.data.records.corpus_records import write_notice
from mmqa_jax.data.records.grid_records import write_grids
from mmqa_jax.data.schema import source_text
from mmqa_jax.models.modified_resnet.network import STRIDE
from mmqa_jax.models.two_towers.network import normalize_pixels
from mmqa_jax.retrieval.bm25.on_disk import build_bm25
from mmqa_jax.retrieval.embeddings import (
    Embeddings,
    TokenFormat,
    join_embeddings,
    open_embeddings,
    read_unfinished,
)
from mmqa_jax.retrieval.indexes import exact
from mmqa_jax.retrieval.indexes.exact import IDS as FAISS_IDS
from mmqa_jax.retrieval.indexes.exact import INDEX as FAISS_INDEX
from mmqa_jax.retrieval.indexes.index import (
    build_index,
    build_shards,
    is_current,
    load_index,
    recall_against,
)
from mmqa_jax.retrieval.indexes.milvus import ingest, open_milvus
from mmqa_jax.retrieval.late_interaction import TokenEmbedder
from mmqa_jax.retrieval.manifest import BM25_INDEX, EMBEDDINGS, INDEX, MANIFEST
from mmqa_jax.tasks.embedder import open_embedder
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.record import is_weights_folder

_COMPARED_ROWS = 5_000_000  # beyond them exact search takes longer than the comparison is worth


def embed(
    data: Path,
    model: Path,
    out: Path,
    *,
    shard: Shard = WHOLE,
    chunk: int = 1024,
    overwrite: bool = False,
    engine: Engine | None = None,
    tokens: str | None = None,
    pool: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Embeds every source of a corpus; continues an interrupted job, or computes its shard.

    `data`, `model` and `out` may be in an object store; `overwrite` replaces embeddings of another
    model or corpus; an engine computes the chunks instead of this process; `tokens` and `pool`: how
    a late-interaction encoder's tokens are stored, see TokenFormat, or "none"; `options`: see
    tasks.embedder.open_embedder.
    """
    check_chunk(chunk)
    check_out(out / EMBEDDINGS, folder=True)
    corpus = open_corpus(local_copy(data))
    if engine is not None:
        count = -(-len(corpus) // chunk)  # a part for each chunk

        def open_one() -> Callable[[int], None]:
            embedder, pictures = open_embedder(local_copy(model), corpus, options)
            _store_tokens(embedder, tokens, pool)

            def embed_part(number: int) -> None:
                embedder.embed_sources(
                    corpus, pictures, out / EMBEDDINGS,
                    shard_rows=chunk, part=(number, count), overwrite=overwrite,
                )  # fmt: skip

            return embed_part

        engine.compute(_missing(out / EMBEDDINGS, count), open_one)
        write_json(out / "embed.json", {"data": str(data), "model": str(model)})
        return merge_embeddings(out)
    embedder, pictures = open_embedder(local_copy(model), corpus, options)
    _store_tokens(embedder, tokens, pool)
    with Progress("Embedding sources", len(corpus), "sources") as progress:
        embeddings = embedder.embed_sources(
            corpus,
            pictures,
            out / EMBEDDINGS,
            shard_rows=chunk,
            part=shard,
            overwrite=overwrite,
            on_progress=progress.reach,
        )
    write_json(out / "embed.json", {"data": str(data), "model": str(model)})
    result = {"sources": len(corpus), "dim": embedder.dim, "broken_pictures": pictures.broken.count}
    result |= embedder.serving.to_json()
    print(f"embed: {embedder.serving}", file=sys.stderr)
    if embeddings is None:
        print(f"This process's part is in {out}; other processes have not finished theirs.")
        return {**result, "waiting_for_other_shards": True}
    print(f"{len(corpus):,} sources x {embedder.dim}: {out}")
    return result


def _store_tokens(embedder: Any, precision: str | None, pool: int | None) -> None:
    """Makes a late-interaction encoder store its tokens' vectors, unless `precision` is "none"."""
    if isinstance(embedder, TokenEmbedder):
        if precision != "none":
            embedder.store_tokens(TokenFormat(precision or "int8", 1 if pool is None else pool))
    elif precision is not None or pool is not None:
        raise UserError(
            "--tokens and --pool: --model has one vector a text, and no late interaction; leave "
            "them out."
        )


def _missing(folder: Path, count: int) -> list[int]:
    """The chunks to compute; of another job's folder all, of a finished job one, to compare it."""
    if not (folder / MANIFEST).exists():
        return list(range(count))
    unfinished = read_unfinished(folder)
    if unfinished is None:
        return [0]
    return unfinished.missing if len(unfinished.parts) == count else list(range(count))


def merge_embeddings(out: Path) -> dict[str, Any]:
    """The last step of `embed`: puts together what its shards wrote to `out`."""
    rows, dim = join_embeddings(out / EMBEDDINGS).vectors.shape
    print(f"{rows:,} sources x {dim}: {out}")
    return {"sources": rows, "dim": dim}


def index(folder: Path, kind: str, place: str = "", shard_rows: int = 0) -> dict[str, Any]:
    """Builds the index over the embeddings in `folder`, unless it is up to date.

    `kind`: see retrieval.indexes.index.build_index. A `place` is a collection of Milvus that is
    filled instead (milvus://HOST:PORT/COLLECTION); with `shard_rows` ScaNN is built in shards of so
    many sources.
    """
    check_store(folder)
    embeddings = open_embeddings(folder / EMBEDDINGS)
    exact.check_embeddings(embeddings)  # also where the index is up to date
    if place:
        return _fill(place, embeddings)
    if shard_rows:
        return _index_shards(folder, embeddings, shard_rows)
    current = is_current(folder / INDEX, embeddings, kind)
    distributed.barrier("index: all have looked")
    if not current and jax.process_index() == 0:
        build_index(embeddings, kind).save(folder / INDEX)
    distributed.barrier("index: written")
    kind = read_json(folder / INDEX / "manifest.json")["kind"]
    rows, state = len(embeddings.vectors), "is up to date" if current else "built"
    print(f"Index of {rows:,} sources ({kind}) {state}: {folder / INDEX}")
    result = {"rows": rows, "kind": kind, "built": not current}
    if kind == "mesh_approx":
        result |= _recall(load_index(folder / INDEX, embeddings), embeddings)
    return result


def _index_shards(folder: Path, embeddings: Embeddings, shard_rows: int) -> dict[str, Any]:
    rows = len(embeddings.vectors)
    with Progress("Indexing sources", rows, "sources") as progress:
        built = build_shards(
            folder / INDEX, embeddings, shard_rows, on_progress=lambda done, _: progress.reach(done)
        )
    made = load_index(folder / INDEX, embeddings)
    state = "built" if built else "is up to date"
    print(f"Index of {rows:,} sources ({len(made.spans)} shards) {state}: {folder / INDEX}")
    result = {"rows": rows, "kind": made.kind, "shards": len(made.spans), "built": built}
    return result | _recall(made, embeddings)


def index_bm25(data: Path, out: Path) -> dict[str, Any]:
    """Writes BM25's index over a corpus's sources below `out`, or finishes that."""
    check_out(out / BM25_INDEX, folder=True)
    corpus = open_sources(local_copy(data))
    with Progress("Indexing sources", len(corpus), "sources") as progress:
        built = build_bm25(
            out / BM25_INDEX,
            lambda start: _texts_from(corpus, start),
            len(corpus),
            corpus.fingerprint,
            on_progress=progress.reach,
        )
    state = "built" if built else "is up to date"
    print(f"Index of {len(corpus):,} sources (bm25) {state}: {out / BM25_INDEX}")
    return {"rows": len(corpus), "kind": "bm25", "built": built}


def _texts_from(corpus: Corpus, start: int) -> Iterator[str]:
    if corpus.on_disk:
        return map(source_text, corpus.sources.from_row(start))
    return map(source_text, itertools.islice(corpus.sources, start, None))


def export(folder: Path, out: Path, data: Path | None = None) -> dict[str, Any]:
    """Writes the embeddings in `folder` as an index of FAISS, with the ids of its rows.

    `data` is the corpus that was embedded; None: the one that `embed` was given.
    """
    check_store(folder)
    embeddings = open_embeddings(folder / EMBEDDINGS)
    if data is None:
        record = folder / "embed.json"
        data = as_path(read_json(record)["data"]) if record.is_file() else None
    if data is None or not (local_copy(data) / CORPUS).is_file():
        raise UserError(
            f"--data: the corpus of {folder} {'' if data is None else f'({data}) '}is not there, "
            "and the ids of its sources are needed; name its folder."
        )
    corpus = open_sources(local_copy(data))
    if corpus.fingerprint != embeddings.corpus_fingerprint:
        raise UserError(
            f"--data={data}: is not the corpus that was embedded in {folder}; name that one, or "
            "run `mmqa embed` again."
        )
    exact.check_export(out, corpus.ids)
    exact.export_faiss(out, embeddings, corpus.ids)
    write_notice(out, corpus.materials)
    rows, dim = embeddings.vectors.shape
    print(f"Index of {rows:,} sources x {dim} (faiss): {out / FAISS_INDEX}, {out / FAISS_IDS}")
    return {"rows": rows, "dim": dim, "kind": "faiss", "out": str(out)}


def _fill(place: str, embeddings: Embeddings) -> dict[str, Any]:
    """Fills a collection of Milvus, or finishes that, and compares it with exact search."""
    rows, sent = len(embeddings.vectors), False
    if jax.process_index() == 0:
        with Progress("Filling Milvus", rows, "sources") as progress:
            sent = ingest(place, embeddings, on_progress=lambda done: progress.reach(done, rows))
    distributed.barrier("index: filled")
    made = open_milvus(place, embeddings.model_fingerprint, embeddings.corpus_fingerprint)
    print(f"Index of {rows:,} sources (milvus) {'built' if sent else 'is up to date'}: {place}")
    return {"rows": rows, "kind": made.kind, "built": sent, **_recall(made, embeddings)}


def _recall(index: Any, embeddings: Embeddings) -> dict[str, float]:
    """Prints and returns what an approximate index finds of exact search's results."""
    rows = len(embeddings.vectors)
    if rows > _COMPARED_ROWS:
        return {}
    top_k = min(20, rows)
    recall = recall_against(index, exact.ExactIndex(embeddings), top_k)
    print(f"recall@{top_k} against exact search: {recall:.4f}")
    return {f"recall@{top_k}": recall}


# `mmqa embed` with an image tower: the grids of CLIP features that Prophet's MCAN reads.
#
# prophet tools/extract_img_feats.py: CLIP RN50x64 without its attention pool, pictures squashed
# to 512 x 512, in a grid of 16 x 16.


SIDE = 512  # of the pictures, in pixels (Prophet's IMG_RESOLUTION)


def is_image_tower(model: Path) -> bool:
    """Whether a folder holds a converted CLIP ResNet."""
    return is_weights_folder(model) and read_record(model).architecture.name == "modified_resnet"


def embed_grids(
    data: Path,
    model: Path,
    out: Path,
    *,
    side: int = SIDE,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Writes the grid of every picture of a benchmark's questions; continues an interrupted job.

    The pictures have `side` pixels a side, their grids side / 32 cells; a call takes `batch_size`
    pictures over all devices; `mesh`: see core.serving.serving_mesh.
    """
    check_out(out, folder=True)
    corpus = open_corpus(data)
    pictures = {image_id(q): q.image for q in corpus.questions() if q.image is not None}
    if not pictures:
        raise UserError(
            f"--data={data}: its questions have no pictures; put the benchmark's pictures into the "
            "raw folder and run `mmqa prepare` again."
        )
    tower = load_converted(model, mesh=loading_mesh(mesh))
    broken = BrokenPictures(len(pictures), remedy="fetch those pictures again")
    shape = (side // STRIDE, side // STRIDE, tower.config.features)
    encoder = _Encoder(tower, corpus, side, batch_size)
    print(f"embed: {encoder.serving}", file=sys.stderr)
    with Progress("Grid features", len(pictures), "pictures") as progress:
        write_grids(
            out,
            pictures,
            encoder,
            shape=shape,
            model=encoder.fingerprint,
            broken=broken,
            advance=progress.advance,
        )
    sizes = " x ".join(map(str, shape))
    print(f"{len(pictures) - broken.count:,} pictures x {sizes}: {out}")
    counts = {"pictures": len(pictures), "shape": list(shape), "broken_pictures": broken.count}
    return {**counts, **encoder.serving.to_json()}


class _Encoder:
    """Names of pictures -> their grids, in batches of one size."""

    def __init__(self, tower: nnx.Module, corpus: Corpus, side: int, batch_size: BatchSize):
        self._corpus, self._side = corpus, side
        graphdef, self._state = nnx.split(tower)
        # Thrice the widest activations: floats at half of the side.
        cost = RowCost("pictures", 8, 8, 3 * 4 * tower.config.width * (side / 2) ** 2)
        self.serving = serve(batch_size, cost, self._state)
        self._run = jax.jit(
            lambda state, pixels: nnx.merge(graphdef, state).grid_features(normalize_pixels(pixels))
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the parameters and the pictures' size."""
        digest = hashlib.blake2b(f"{self._side} {self._corpus.fingerprint}".encode(), digest_size=8)
        for leaf in jax.tree.leaves(self._state):
            digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
        return digest.hexdigest()

    def __call__(self, names: Sequence[str]) -> list[np.ndarray | PictureError]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            decoded = list(pool.map(self._decode, names))
        results: list[np.ndarray | PictureError] = list(decoded)
        readable = [n for n, pixels in enumerate(decoded) if not isinstance(pixels, PictureError)]
        placement, size = self.serving.placement, self.serving.batch_size
        for start in range(0, len(readable), size):
            part = readable[start : start + size]
            pixels = np.zeros((size, self._side, self._side, 3), np.uint8)
            pixels[: len(part)] = [decoded[n] for n in part]
            grids = fetch(placement.call(self._run, self._state, placement.put(pixels)))
            for n, grid in zip(part, grids, strict=False):
                results[n] = np.asarray(grid, np.float32)
        return results

    def _decode(self, name: str) -> np.ndarray | PictureError:
        data = self._corpus.read_picture(name)
        if data is None:
            return PictureError(f"{name}: is not in the corpus.")
        try:
            # As the original: resized in the picture's own mode, then RGB.
            return decode_to_pixels(data, self._side, "squash", alpha="dropped", name=name)
        except PictureError as error:
            return error
