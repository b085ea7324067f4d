"""`mmqa index`: a nearest-neighbor index over embeddings."""

from __future__ import annotations

import argparse
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

SUMMARY = "build a nearest-neighbor index over embeddings."
EXAMPLE = "mmqa index --embeddings=runs/index --kind=auto"
STORE_OUTPUTS = ("embeddings",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument("--embeddings", required=True, help="folder written by `mmqa embed`")
    parser.add_argument(
        "--kind",
        choices=("auto", "scann", "exact", "mesh", "mesh_approx"),
        default="auto",
        help="auto: ScaNN where it is available, exact otherwise; mesh: exact, the sources split "
        "over all devices; mesh_approx: the same with half the memory and TPU-KNN",
    )
    parser.add_argument(
        "--index",
        default="",
        metavar="milvus://HOST:PORT/COLLECTION",
        help="fill a collection of Milvus instead, or finish filling it; give the same to the "
        "--index of other verbs (a server's token: MILVUS_TOKEN)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds the index."""
    if arguments.index and arguments.kind != "auto":
        raise UserError(
            f"--index and --kind={arguments.kind}: Milvus has its own kind; give one of them."
        )
    from mmqa_jax.core import distributed

    distributed.start()
    from mmqa_jax.runs.indexing import index

    return index(as_path(arguments.embeddings), arguments.kind, arguments.index)
