"""`mmqa caption`: captions of pictures, from a detector's regions or by a vision-language model."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError

SUMMARY = "caption pictures: Oscar+ from a detector's regions, or a vision-language model."
EXAMPLE = (
    "mmqa caption --features=downloads/vinvl/val2014.tsv --sizes=downloads/vinvl/val2014.hw.tsv "
    "--model=weights/oscar --tokenizer=downloads/bert-base-uncased/tokenizer.json "
    "--out=data/captions.tsv --tags=data/tags.tsv"
)
# Flags of one of the two ways alone.
_OF_REGIONS = ("tokenizer", "sizes", "names", "tags", "batch_size", "mesh")
_OF_QUESTIONS = ("split", "backend", "prompt", "max_new_tokens", "thinking")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        " With --data the pictures of questions are described by a vision-language model, as "
        "PromptCap does it: mmqa caption --data=data/okvqa --split=test "
        "--model=Qwen/Qwen2.5-VL-7B-Instruct --out=data/captions.json writes the file that "
        "parts.captions of a row reads."
    )
    parser.add_argument("--features", help="TSV of VinVL's detections; its lineidx lies beside it")
    parser.add_argument("--data", help="a prepared corpus, whose questions have pictures")
    parser.add_argument(
        "--model",
        required=True,
        help="converted Oscar captioner; with --data a model that `mmqa prompt --model` takes",
    )
    flags.add(parser, "download")
    parser.add_argument("--out", required=True, help="captions to write: TSV, with --data JSON")
    regions = parser.add_argument_group("of --features")
    regions.add_argument("--tokenizer", help="Oscar's tokenizer.json")
    regions.add_argument(
        "--sizes", help="VinVL's hw.tsv, where the features do not hold the pictures' sizes"
    )
    regions.add_argument(
        "--names", help="names of the detector's classes, a line each, where they do not hold them"
    )
    regions.add_argument("--tags", help="tags TSV to write: the detector's labels")
    flags.add_devices(regions, "pictures")
    regions.add_argument("--num_beams", type=int, default=5, help="beams; 1 is greedy (5)")
    questions = parser.add_argument_group("of --data")
    questions.add_argument("--split", help="of the questions (all)")
    questions.add_argument(
        "--backend", choices=("engine", "openai"), help="this process or a server (engine)"
    )
    questions.add_argument(
        "--prompt",
        help="to the model, {question} is the question's text (please describe this image "
        "according to the given question: {question})",
    )
    questions.add_argument("--max_new_tokens", type=int, help="of a caption (64)")
    flags.add_thinking(questions, "", "off")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the captions; continues an interrupted job."""
    _check(arguments)
    flags.download(arguments, "model")
    if arguments.data:
        return _of_questions(arguments)
    from mmqa_jax.runs.verbs.captioning import caption_pictures

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


def _of_questions(arguments: argparse.Namespace) -> dict[str, Any]:
    from mmqa_jax.core.host import cache_dir
    from mmqa_jax.runs.parts import LLMSpec, open_llm
    from mmqa_jax.runs.verbs.captioning import PROMPT, caption_questions

    spec = LLMSpec(
        arguments.model, arguments.backend or "engine", thinking=arguments.thinking or "off"
    )
    model = open_llm(spec, cache_dir() / "responses", "--model")
    try:
        return caption_questions(
            Path(arguments.data),
            Path(arguments.out),
            model,
            split=arguments.split,
            prompt=arguments.prompt or PROMPT,
            max_new_tokens=arguments.max_new_tokens or 64,
        )
    finally:
        model.close()


def _check(arguments: argparse.Namespace) -> None:
    """UserError for flags that are missing, or of the other way."""
    if bool(arguments.features) == bool(arguments.data):
        raise UserError(
            "--features and --data: give one of them, a detector's regions for Oscar+ or a corpus "
            "for a vision-language model."
        )
    others = _OF_REGIONS if arguments.data else _OF_QUESTIONS
    chosen = "data" if arguments.data else "features"
    for name in others:
        if getattr(arguments, name, None) not in (None, "auto"):
            raise UserError(f"--{name}: is not used with --{chosen}; leave it out.")
    if arguments.features and not arguments.tokenizer:
        raise UserError("--tokenizer: is missing; give Oscar's tokenizer.json.")
    flags.check_at_least_1(arguments, "max_new_tokens")
