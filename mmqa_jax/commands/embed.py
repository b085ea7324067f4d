"""`mmqa embed`: every source of a corpus as a vector, or a benchmark's pictures as grids."""

import argparse
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path, in_store

SUMMARY = "embed every source of a corpus, or a benchmark's pictures as grids of features."
EXAMPLE = "mmqa embed --data=data/atlas --model=runs/contrastive --out=runs/index"
STORE_INPUTS = ("data", "model")
STORE_OUTPUTS = ("out",)


_CHUNK = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add(parser, "data")
    parser.add_argument(
        "--model",
        required=True,
        help="workdir of a contrastive run, its folder best, a CLIP or SigLIP (converted, or of "
        "transformers), a Qwen3-VL-Embedding, a ColPali or its like, or a published encoder of "
        "texts (folder, ORG/NAME or minilm); or a converted CLIP ResNet (modified_resnet), for the "
        "grids that Prophet's MCAN reads",
    )
    flags.add(parser, "download")
    parser.add_argument("--out", required=True, help="folder for the embeddings")
    parser.add_argument(
        "--tokens",
        choices=("float16", "int8", "binary", "none"),
        help="of a late-interaction encoder: how the vectors of tokens are stored, by which MaxSim "
        "ranks; none: search encodes some candidates again (int8)",
    )
    parser.add_argument(
        "--pool",
        type=int,
        metavar="N",
        help="of a late-interaction encoder: a source keeps about one vector for N tokens (1)",
    )
    flags.add_devices(parser, "sources")
    flags.add_shard(parser, "sources", _CHUNK)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace embeddings of another model or corpus in --out",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Embeds the sources, or the questions' pictures."""
    shard = flags.start(arguments)
    flags.download(arguments, "model")
    from mmqa_jax.core.local_copies import local_copy
    from mmqa_jax.runs.verbs.indexing import embed, embed_grids, is_image_tower

    options = flags.serving_options(arguments)
    data, model, out = map(as_path, (arguments.data, arguments.model, arguments.out))
    if is_image_tower(local_copy(model)):
        if not flags.is_alone(arguments, shard) or arguments.overwrite:
            raise UserError(
                "--shard, --engine and --overwrite: are for the embeddings of sources; leave them "
                "out."
            )
        if in_store(out):
            raise UserError(
                f"--out={out}: grids are written to the file system only; name a folder there."
            )
        return embed_grids(local_copy(data), local_copy(model), out, **options)
    return embed(
        data,
        model,
        out,
        shard=shard,
        chunk=arguments.chunk,
        engine=flags.engine(arguments),
        overwrite=arguments.overwrite,
        tokens=arguments.tokens,
        pool=arguments.pool,
        options=options,
    )
