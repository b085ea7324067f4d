"""`mmqa merge`: the last step of a job whose shards are done."""

import argparse
from typing import Any

from mmqa_jax.core.paths import as_path

SUMMARY = "put the parts of a job together that shards computed (--shard=I/N)."
EXAMPLE = "mmqa merge runs/retrieval/dense.jsonl"
STORE_OUTPUTS = ("path",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\nThe last shard to finish does this itself. Refused while parts are missing (they\n"
        "are named), damaged or of another run. The folder is data: no config file is read, no\n"
        "model opened, nothing computed again. The scores of a row of `mmqa run` need its\n"
        "questions, which are read where its config.json says; those of other verbs are shown\n"
        "by any of their shards that is started again."
    )
    parser.add_argument("path", help="the shards' --out or --workdir")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Puts the parts together, and says where the results are."""
    from mmqa_jax.commands.run import show_results
    from mmqa_jax.core.errors import UserError
    from mmqa_jax.core.store import check_no_link
    from mmqa_jax.runs.jobs import find_job
    from mmqa_jax.runs.merging import merge_parts
    from mmqa_jax.runs.verbs.indexing import merge_embeddings

    place = find_job(as_path(arguments.path))
    if place.parts == "records":
        raise UserError(
            f"{place.folder}: who writes the last of the records finishes them; see with "
            "`mmqa status` which are missing, and start that command again."
        )
    if place.parts == "embeddings":
        check_no_link(place.folder)
        return merge_embeddings(place.folder.parent)
    result = merge_parts(place.folder)
    if not isinstance(result, dict):
        return show_results(result, place.folder.parent)
    print(f"{result['rows']:,} rows: {result['out']}")
    return result
