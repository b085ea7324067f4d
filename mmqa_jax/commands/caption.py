"""`mmqa caption`: captions and tags of pictures from a detector's regions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "caption pictures with Oscar+ from a detector's regions."
EXAMPLE = (
    "mmqa caption --features=downloads/vinvl/val2014.tsv --sizes=downloads/vinvl/val2014.hw.tsv "
    "--model=weights/oscar --tokenizer=downloads/bert-base-uncased/tokenizer.json "
    "--out=data/captions.tsv --tags=data/tags.tsv"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "--features", required=True, help="TSV of VinVL's detections; its lineidx lies beside it"
    )
    parser.add_argument("--model", required=True, help="converted Oscar captioner")
    parser.add_argument("--tokenizer", required=True, help="its tokenizer.json")
    parser.add_argument(
        "--sizes", help="VinVL's hw.tsv, where the features do not hold the pictures' sizes"
    )
    parser.add_argument(
        "--names", help="names of the detector's classes, a line each, where they do not hold them"
    )
    parser.add_argument("--out", required=True, help="captions TSV to write")
    parser.add_argument("--tags", help="tags TSV to write: the detector's labels")
    flags.add_devices(parser, "pictures")
    parser.add_argument("--num_beams", type=int, default=5, help="beams; 1 is greedy (5)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the captions; continues an interrupted job."""
    from mmqa_jax.runs.captioning import caption_pictures

    return caption_pictures(
        Path(arguments.features),
        Path(arguments.model),
        Path(arguments.tokenizer),
        Path(arguments.out),
        tags=flags.optional_path(arguments.tags),
        sizes=flags.optional_path(arguments.sizes),
        names=flags.optional_path(arguments.names),
        num_beams=arguments.num_beams,
        **flags.serving_options(arguments),
    )
