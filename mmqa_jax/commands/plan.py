"""`mmqa plan`: compiles a config's programs for devices that need not be there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_OF_ROW = ("questions", "prices", "workdir")
SUMMARY = "what a config's programs need on a TPU slice or GPUs, by the compiler, without them."
EXAMPLE = "mmqa plan --config=configs/webqa/vlp_select.py --topology=v5e:4x4"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\ntopologies: v5e:AxB, v6e:AxB, v4:AxBxC, v5p:AxBxC, v7x:AxBxC, v5e-8 and tpu7x-8 as\n"
        "  Google names slices, of two slices 2xv5e:AxB (need the extra `plan`), a100:N, h100:N,\n"
        "  h200:N, b200:N, 2x h100:N (needs the extra `cuda12`), local\n"
        "programs: those of train, and of what uses the trained model (embed, rerank, answer);\n"
        "  of configs/prompt/default.py decode and prefill, of a LLaVA its tower too, of a T5\n"
        "  generate (a batch; FLOPs and time are those with one new token); without a\n"
        "  config --model=bart_large_cnn: fluency, the BARTScore of evaluate webqa, and of an\n"
        "  encoder such as bge_base or qwen3_embedding_06b: texts, what embeds 512 tokens each,\n"
        "  and of a detector such as vlp_x101: regions, of photos 4 wide to 3 high\n"
        "rows: configs/*/tables.py:ROW, whose parts add up to hours on each chip and to money\n"
        "Neither data nor weights are read: shapes come from the config, the largest of several."
    )
    add_program_flags(parser)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="what launch/device_check.sh wrote on such a device (device_check/device_check.json)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="the fastest mesh, remat and batch size of the first program, by bounds, that fits",
    )
    parser.add_argument(
        "--sources",
        metavar="N,N",
        help="what embedding, indexing and searching so many sources takes, such as 10M,1B",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        metavar="N",
        help="how long a detector takes for so many pictures, such as 390000",
    )
    parser.add_argument(
        "--questions", type=int, metavar="N", help="of a row (the prepared corpus' split)"
    )
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="of a row: TOML with what an hour of each chip costs you (mmqa_jax/plan/prices.toml)",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="of a row: of `mmqa run`, whose finished questions take no more time",
    )


def add_program_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that name the programs and the devices."""
    flags.add_config(parser, required=False)
    parser.add_argument(
        "--topology", default="local", help="what to compile for (this machine's devices)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="of a language model: smollm2, llama2_7b, llama2_70b, llava15_7b, qwen25_vl_7b, "
        "flan_t5_xl, ...; bart_large_cnn; an encoder of texts: bge_base, bge_m3, "
        "qwen3_embedding_06b, ...; or a detector: vlp_x101, vinvl_x152c4, bottom_up_r101",
    )
    flags.add_only(parser, "PROGRAM", "of the config's programs (all)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compiles, and prints the table and the verdict."""
    # Without distributed.start: one process plans alone, and what is compiled for devices that are
    # not there cannot be read back from the compilation cache.
    from mmqa_jax.runs.verbs.plan import run_plan

    names = ("model", "only", "sources", "pictures", "search", "measured", *_OF_ROW)
    options = {name: getattr(arguments, name) for name in names}
    return run_plan(config_of(arguments), arguments.topology, **options)


def config_of(arguments: argparse.Namespace) -> ConfigDict:
    """The config as given; an empty one without --config."""
    from ml_collections import ConfigDict

    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.errors import UserError

    if arguments.config is not None:
        return load_config(arguments.config, arguments.overrides, adds=True)
    if arguments.overrides:
        raise UserError(f"--config.{arguments.overrides[0]}: of which --config? Name it, too.")
    return ConfigDict()
