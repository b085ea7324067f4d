"""`mmqa embed` and `mmqa index`: embeddings of a corpus's sources, and the index over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmqa_jax.core.chunks import check_chunk
from mmqa_jax.core.files import check_out, read_json, write_json
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.shards import WHOLE, Shard
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.retrieval.embeddings import join_embeddings, open_embeddings
from mmqa_jax.retrieval.index import build_index, is_current
from mmqa_jax.systems.parts import EMBEDDINGS, INDEX, open_embedder


def embed(
    data: Path,
    model: Path,
    out: Path,
    *,
    shard: Shard = WHOLE,
    chunk: int = 1024,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Embeds every source of a corpus; continues an interrupted job.

    Args:
      shard: this process's share of the job.
      chunk: sources that are written together.
      overwrite: replace embeddings of another model or corpus in `out`.
    """
    check_chunk(chunk)
    check_out(out / EMBEDDINGS, folder=True)
    corpus = open_corpus(data)
    embedder, pictures = open_embedder(model, corpus)
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
    if embeddings is None:
        print(f"This process's part is in {out}; other processes have not finished theirs.")
        return {**result, "waiting_for_other_shards": True}
    print(f"{len(corpus):,} sources x {embedder.dim}: {out}")
    return result


def merge_embeddings(out: Path) -> dict[str, Any]:
    """The last step of `embed`: puts together what its shards wrote to `out`."""
    rows, dim = join_embeddings(out / EMBEDDINGS).vectors.shape
    print(f"{rows:,} sources x {dim}: {out}")
    return {"sources": rows, "dim": dim}


def index(folder: Path, kind: str) -> dict[str, Any]:
    """Builds the index over the embeddings in `folder`, unless it is up to date."""
    embeddings = open_embeddings(folder / EMBEDDINGS)
    current = is_current(folder / INDEX, embeddings, kind)
    if not current:
        build_index(embeddings, kind).save(folder / INDEX)
    kind = read_json(folder / INDEX / "manifest.json")["kind"]
    rows, state = len(embeddings.vectors), "is up to date" if current else "built"
    print(f"Index of {rows:,} sources ({kind}) {state}: {folder / INDEX}")
    return {"rows": rows, "kind": kind, "built": not current}
