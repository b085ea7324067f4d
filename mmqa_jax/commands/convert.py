"""`mmqa convert`: published weights to Orbax weights, and back to safetensors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.weights.bundled import MODELS
from mmqa_jax.weights.registry import NAMES, describe

SUMMARY = "turn published weights into Orbax weights for any mesh, or back into safetensors."
EXAMPLE = "mmqa convert --model=llama --source=downloads/SmolLM2-135M --out=weights/smollm2"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        " A layout is recognized by its content. To convert back: --source=weights/smollm2 "
        f"--export=hf.\n\nmodels, supported sources, and what --export=hf writes:\n{describe()}"
    )
    parser.add_argument(
        "--model", required=True, choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--source",
        required=True,
        metavar="PATH|NAME",
        help="checkpoint file or folder, ORG/NAME[@REVISION] in the Hugging Face cache, or an "
        f"installed package's: {', '.join(MODELS)}",
    )
    flags.add_download(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the parameters (default: bfloat16 if the whole source is, otherwise float32)",
    )
    parser.add_argument(
        "--export",
        choices=("hf",),
        help="write safetensors and config.json instead, from a converted folder or any source",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a config value that the checkpoint does not contain, e.g. --set bert.heads=12",
    )
    parser.add_argument(
        "--clip",
        metavar="DIR",
        help="llava: its CLIP, if the checkpoint has no vision tower",
    )
    parser.add_argument(
        "--preprocessing",
        choices=("openai", "transformers"),
        help="clip: whose code prepares texts and pictures (default: whose layout the source has)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion in --out"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Converts or exports."""
    import jax

    from mmqa_jax.weights.convert import convert
    from mmqa_jax.weights.hub import download_model, find_model, is_hub_name

    jax.config.update("jax_platforms", "cpu")  # leaves accelerators to other processes
    name = arguments.source
    if arguments.download:
        download_model(name, "--source")
    if name in MODELS and not Path(name).exists():
        source = MODELS[name]()
    else:
        source = find_model(name, "--source") if is_hub_name(name) else Path(name)
    return convert(
        arguments.model,
        source,
        Path(arguments.out),
        dtype=arguments.dtype,
        export=arguments.export,
        overwrite=arguments.overwrite,
        changes=arguments.set,
        clip=Path(arguments.clip) if arguments.clip else None,
        preprocessing=arguments.preprocessing,
        write_more=_write_tokenizer if source.suffix == ".gguf" else None,
    )


def _write_tokenizer(source: Path, folder: Path) -> list[str]:
    """Writes the tokenizer of a GGUF file as files; returns their names."""
    from mmqa_jax.core.errors import UserError
    from mmqa_jax.prompting.text_tokenizer import open_tokenizer

    try:
        tokenizer = open_tokenizer(source)
    except UserError as error:  # the weights are of use without it
        print(f"{source}: its tokenizer is not written ({error})", file=sys.stderr)
        return []
    before = set(folder.iterdir())
    tokenizer.save(folder)
    return sorted(file.name for file in set(folder.iterdir()) - before)
