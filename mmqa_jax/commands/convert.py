"""`mmqa convert`: published weights to Orbax weights and back to safetensors; its check."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.bundled import MODELS
from mmqa_jax.weights.registry import check_declared, describe, model_of, names

SUMMARY = "turn published weights into Orbax weights for any mesh, or back into safetensors."
EXAMPLE = "mmqa convert --source=downloads/SmolLM2-135M --out=weights/smollm2"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        " A layout is recognized by its content. To convert back: --source=weights/smollm2 "
        "--export=hf. --check compares with transformers in float32, layer by layer: what --out "
        "is given, or without it what is read of --source (an encoder of texts or a reranker, "
        "too).\n\n"
        f"models, supported sources, and what --export=hf writes:\n{describe()}"
    )
    parser.add_argument(
        "--model",
        choices=names(),
        metavar="NAME",
        help=f"one of {', '.join(names())}; needed where the source does not say what it is",
    )
    parser.add_argument(
        "--source",
        required=True,
        metavar="PATH|NAME",
        help="checkpoint file or folder, ORG/NAME[@REVISION] in the Hugging Face cache, or an "
        f"installed package's: {', '.join(MODELS)}",
    )
    flags.add(parser, "download")
    parser.add_argument("--out", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print how far every layer and output deviates from transformers' (which needs torch, "
        "and memory for both models); exit code 1 beyond the bound that is printed",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the parameters (default: bfloat16 if the whole source is, otherwise float32)",
    )
    parser.add_argument(
        "--export",
        choices=("hf", "peft"),
        help="write safetensors and config.json instead, from a converted folder or any source; "
        "peft: what a LoRA run added to its base, as PEFT reads it (its folders are sources, too); "
        "of a run of the task retriever or reranker, hf is a folder of sentence-transformers",
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
        help="llava: its CLIP or SigLIP, if the checkpoint has no vision tower",
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
    """Converts, exports or checks."""
    _check_flags(arguments)
    import jax

    from mmqa_jax.runs.verbs.conversion import (
        compare_layers,
        export_retrieval_run,
        write_tokenizer,
    )
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
    if arguments.out is None:
        return compare_layers(arguments.model, source, None)
    if arguments.export == "hf":
        exported = export_retrieval_run(source, Path(arguments.out), overwrite=arguments.overwrite)
        if exported is not None:
            return exported
    model = arguments.model or model_of(source)
    if model is None:
        check_declared(source)
        raise UserError(
            f"--source={name}: does not say which model it holds, by a model_type in a config.json "
            f"or by its tensors; add the config.json that it was published with, or "
            f"--model={'|'.join(names())}."
        )
    made = convert(
        model,
        source,
        Path(arguments.out),
        dtype=arguments.dtype,
        export=arguments.export,
        overwrite=arguments.overwrite,
        changes=arguments.set,
        clip=Path(arguments.clip) if arguments.clip else None,
        preprocessing=arguments.preprocessing,
        write_more=write_tokenizer if source.suffix == ".gguf" else None,
    )
    if arguments.check:
        made |= compare_layers(model, source, Path(arguments.out))
    return made


# Flags that change what a conversion writes, so that --check has nothing to compare it with.
_CHANGES = ("export", "dtype", "set", "clip", "preprocessing")


def _check_flags(arguments: argparse.Namespace) -> None:
    """UserError for flags that are missing, or contradict each other."""
    if not arguments.check and arguments.out is None:
        raise UserError(
            "mmqa convert: the following arguments are required: --out; only --check does without."
        )
    if not arguments.check:
        return
    for name in _CHANGES:
        if getattr(arguments, name):
            raise UserError(
                f"--check: compares the source as it is, in float32; leave --{name} out, and check "
                "what it writes by --source."
            )
