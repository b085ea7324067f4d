"""Embeddings as an index of FAISS, for other tools: every source by exact inner product.

    FOLDER/index     IndexFlatIP, a row a source in the order of the corpus
    FOLDER/docid     the ids of the rows, one a line

These are the names that pyserini's FaissSearcher and Tevatron read. Vectors have length 1, so that
inner products are cosines. Questions have to be embedded by the encoder that made the vectors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.files import atomic_write, check_out
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import check_embeddings

INDEX, IDS = "index", "docid"  # files of the folder
_BLOCK = 65_536  # rows that are read from disk together


def check_export(folder: Path, ids: Sequence[str]) -> None:
    """UserError if an export cannot be written there: before the vectors are read."""
    import_optional("faiss", "--export=faiss:", "faiss", "faiss-cpu")
    check_out(folder, folder=True)
    for name in (IDS, INDEX):
        check_out(folder / name)
    for name in ids:
        if name != name.strip() or len(name.splitlines()) != 1:
            raise UserError(
                f"{folder / IDS}: the id {name!r:.80} is empty, or has a line break or spaces at "
                "its ends, which a line of ids loses; prepare the corpus with other ids."
            )


def export_faiss(folder: str | os.PathLike, embeddings: Embeddings, ids: Sequence[str]) -> None:
    """Writes the two files; the index, without which the ids are of no use, last.

    FAISS holds all vectors in memory: 4 bytes a value.

    Args:
      ids: of the sources, by row.
    """
    folder = Path(folder)
    check_embeddings(embeddings)
    rows, dim = embeddings.vectors.shape
    if len(ids) != rows:
        raise UserError(
            f"{folder}: {len(ids):,} sources but {rows:,} vectors; give the corpus that was "
            "embedded."
        )
    check_export(folder, ids)
    faiss = import_optional("faiss", "--export=faiss:", "faiss", "faiss-cpu")
    index = faiss.IndexFlatIP(dim)
    for start in range(0, rows, _BLOCK):
        index.add(embeddings.vectors[start : start + _BLOCK])
    with atomic_write(folder / IDS) as file:
        file.writelines(f"{name}\n" for name in ids)
    with atomic_write(folder / INDEX, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
