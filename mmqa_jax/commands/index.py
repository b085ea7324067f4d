"""`mmqa index`: a nearest-neighbor index over embeddings, or BM25's over texts."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

SUMMARY = "build a nearest-neighbor index over embeddings, or BM25's over texts."
EXAMPLE = "mmqa index --embeddings=runs/index --kind=auto"
STORE_INPUTS = ("data",)
STORE_OUTPUTS = ("embeddings",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument("--embeddings", default="", help="folder written by `mmqa embed`")
    parser.add_argument(
        "--kind",
        choices=("auto", "scann", "exact", "mesh", "mesh_approx", "maxsim", "tokens", "bm25"),
        default="auto",
        help="auto: ScaNN where it is available, exact otherwise; mesh: exact, the sources split "
        "over all devices; mesh_approx: the same with half the memory and TPU-KNN; maxsim: of a "
        "late-interaction encoder, every source by MaxSim, on all devices; tokens: of one, sources "
        "whose tokens are near to the question's, by MaxSim (auto from 20,000 sources); bm25: of "
        "the texts of --data in --out, read from disk by `mmqa search --index`; killed, it goes on",
    )
    parser.add_argument(
        "--shard_rows",
        type=int,
        default=0,
        metavar="N",
        help="scann: an index for each N sources, which are searched one after another in the "
        "memory of one; killed, it goes on (one index of all)",
    )
    parser.add_argument(
        "--export",
        choices=("faiss",),
        help="write the embeddings for another tool instead, to --out; faiss: exact inner product "
        "(IndexFlatIP), and the ids of its rows beside it (package faiss-cpu)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="of --export and --kind=bm25")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="the corpus of --kind=bm25; with --export, the one that `mmqa embed` was given",
    )
    parser.add_argument(
        "--index",
        default="",
        metavar="milvus://HOST:PORT/COLLECTION",
        help="fill a collection of Milvus instead, or finish filling it; give the same to the "
        "--index of other verbs (a server's token: MILVUS_TOKEN)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds the index, or exports it."""
    if arguments.kind == "bm25":
        return _bm25(arguments)
    if not arguments.embeddings:
        raise UserError(
            "--embeddings: is missing, the folder written by `mmqa embed`; name it, or give "
            "--kind=bm25 with --data and --out."
        )
    if arguments.export:
        return _export(arguments)
    for flag in ("out", "data"):
        if getattr(arguments, flag):
            raise UserError(
                f"--{flag}: is of an export; give --export=faiss or --kind=bm25 with it, or leave "
                "it out."
            )
    if arguments.index and arguments.kind != "auto":
        raise UserError(
            f"--index and --kind={arguments.kind}: Milvus has its own kind; give one of them."
        )
    if arguments.shard_rows and (arguments.kind != "scann" or arguments.index):
        raise UserError("--shard_rows: is of ScaNN; give --kind=scann with it, or leave it out.")
    from mmqa_jax.core.hosts import distributed

    distributed.start()
    from mmqa_jax.runs.verbs.indexing import index

    return index(
        as_path(arguments.embeddings), arguments.kind, arguments.index, arguments.shard_rows
    )


def _bm25(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds BM25's index, which needs no embeddings."""
    for flag in ("embeddings", "export", "index", "shard_rows"):
        if getattr(arguments, flag):
            raise UserError(
                f"--{flag} and --kind=bm25: BM25 is built of texts, by --data and --out; leave "
                f"--{flag} out."
            )
    for flag, what in (("data", "the corpus"), ("out", "the folder to write, such as runs/index")):
        if not getattr(arguments, flag):
            raise UserError(f"--kind=bm25: needs --{flag}; give {what}.")
    from mmqa_jax.runs.verbs.indexing import index_bm25

    return index_bm25(as_path(arguments.data), Path(arguments.out))


def _export(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the embeddings for another tool."""
    if arguments.index or arguments.kind != "auto":
        flag = "--index" if arguments.index else f"--kind={arguments.kind}"
        raise UserError(f"{flag} and --export: an export is exact; leave {flag} out.")
    if not arguments.out:
        raise UserError(
            "--export=faiss: needs --out; give the folder to write, such as runs/faiss."
        )
    from mmqa_jax.runs.verbs.indexing import export

    data = as_path(arguments.data) if arguments.data else None
    return export(as_path(arguments.embeddings), Path(arguments.out), data)
