"""`mmqa rerank`: source selection (WebQA section 5.1), with a sweep of its threshold."""

import argparse
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "score candidate sources with a trained VLP source head, or a cross-encoder."
EXAMPLE = (
    "mmqa rerank --data=data/atlas --model=runs/rerank --candidates=restricted "
    "--out=runs/retrieval/restricted.jsonl"
)
STORE_INPUTS = ("data", "model", "candidates", "retriever", "index")
STORE_OUTPUTS = ("out",)


# Questions of a chunk; of one search over the whole collection, which encodes all sources anew.
_CHUNK, _CHUNK_ALL = 256, 8192


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add(parser, "data", "split")
    parser.add_argument(
        "--model",
        required=True,
        help="workdir of a rerank training run, or its folder best; or a published cross-encoder "
        "or Qwen3-Reranker (folder or ORG/NAME), which reads pictures by their captions, or a "
        "Qwen3-VL-Reranker, which sees them",
    )
    flags.add(parser, "download")
    parser.add_argument(
        "--candidates",
        default="restricted",
        help="`restricted` (each question's own), a file of `mmqa search`, or `all`: the whole "
        "collection, with a model like that of configs/atlas/rerank_cached.py",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        default=20,
        help="candidates to score from a file, or to keep with --candidates=all (20)",
    )
    parser.add_argument(
        "--cap",
        choices=("none", "webqa"),
        default="none",
        help="restricted: webqa scores 16 pictures and 16 snippets per question, gold ones among "
        "them, like the baseline; all where gold sources are hidden",
    )
    parser.add_argument(
        "--retriever",
        help="workdir of a contrastive run, a CLIP or SigLIP, or another published encoder: "
        "scores two-hop questions again with the title of their best source, and provides cosines "
        "as the similarity",
    )
    parser.add_argument("--index", help="folder written by `mmqa index`, of the retriever")
    parser.add_argument(
        "--similarity_weight",
        type=float,
        default=0.0,
        metavar="W",
        help="of the similarity (the retriever's, or the scores in the file) against the "
        "relevance; 0 is VLP alone; the sweep shows the best on --split=val",
    )
    flags.add(parser, "select")
    flags.add_devices(parser, "pairs")
    flags.add_shard(parser, "questions", default=f"{_CHUNK}; --candidates=all: {_CHUNK_ALL}")
    flags.add(parser, "out")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Scores candidate sources; sweeps the threshold and the weight of the similarity."""
    flags.check_top_k(arguments.top_k)
    shard = flags.start(arguments)
    from mmqa_jax.runs.verbs import one_stage

    flags.fill(one_stage.RerankOptions, arguments).check()
    flags.download(arguments, "model", "retriever")
    arguments = flags.fetched(arguments, STORE_INPUTS)
    if arguments.chunk is None:
        arguments.chunk = _CHUNK_ALL if arguments.candidates == "all" else _CHUNK
    options = flags.fill(one_stage.RerankOptions, arguments)
    return one_stage.rerank(flags.stage_files(arguments, shard), options)
