"""`mmqa merge`: the last step of a job whose shards are done."""

from __future__ import annotations

import argparse
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

SUMMARY = "put the parts of a job together that shards computed (--shard=I/N)."
EXAMPLE = "mmqa merge runs/retrieval/dense.jsonl"
STORE_OUTPUTS = ("path",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\nThe last shard to finish does this itself. Refused while parts are missing (they\n"
        "are named) or where one is of another run. Start it in the folder of the shards' job,\n"
        "whose last step it is: nothing is computed again."
    )
    parser.add_argument("path", help="the shards' --out or --workdir")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Puts the parts together, and prints what the command prints at its end."""
    from mmqa_jax.commands import answer, prompt, rerank, run, search
    from mmqa_jax.core.chunks import read_job
    from mmqa_jax.systems.indexing import merge_embeddings
    from mmqa_jax.systems.jobs import find_job

    place = find_job(as_path(arguments.path))
    if place.embeddings:
        return merge_embeddings(place.folder.parent)
    command = read_job(place.folder).get("command")
    verbs = {"search": search, "rerank": rerank, "answer": answer, "prompt": prompt, "run": run}
    if not isinstance(command, dict) or command.get("verb") not in verbs:
        raise UserError(f"{place.folder}: names no command; start one of its shards again.")
    return verbs[command["verb"]].run(argparse.Namespace(**command))
