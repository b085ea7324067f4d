"""`mmqa prompt`: runs a language model over a file of prompts."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.paths import as_path, in_store
from mmqa_jax.weights.registry import nouns

SUMMARY = "answer a file of prompts with a language model; a rerun sends only the missing ones."
EXAMPLE = "mmqa prompt --prompts=questions.txt --model=smollm2 --out=answers.jsonl"
STORE_INPUTS = ("prompts", "model", "tokenizer")
STORE_OUTPUTS = ("out",)


_CHUNK = 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\nprompts: UTF-8, plain text with one per line, or .jsonl with, on each line,\n"
        "  prompt or messages [{role, content}], and optionally id, images, choices (to be\n"
        "  scored), meta, max_new_tokens, temperature, top_k, top_p, stop, n, seed, logprobs;\n"
        "  or a line of OpenAI's batch files (custom_id, body with messages and image_url)\n"
        "answers: id, answer (which `mmqa evaluate` reads; without thoughts), thinking (where\n"
        "  there are thoughts), text (all of it), finish, logprob, ...; of\n"
        "  choices answer and choice (the likeliest), and scores\n"
        "backend engine: on all devices of the process, in sizes chosen for model, memory and\n"
        "  prompts, which are printed; --config.model.mesh.* and --config.engine.* set them;\n"
        "  a mesh of all devices of a launch is one engine, whose answers process 0 writes\n"
        "backend openai: any server with OpenAI's API, at the address in the environment\n"
        "  variable OPENAI_BASE_URL, with the key in OPENAI_API_KEY if it requires one"
    )
    parser.add_argument("--prompts", required=True, metavar="FILE", help="the prompts")
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH|NAME",
        help="engine: `smollm2`, a folder of `mmqa convert`, or a published "
        f"{nouns('writes')} (folder, .gguf, or ORG/NAME[@REVISION] in the Hugging Face cache); "
        "openai: the server's name for it",
    )
    flags.add(parser, "download")
    parser.add_argument(
        "--backend",
        choices=("engine", "openai"),
        default="engine",
        help="this process, or a server (engine)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON-lines file to write")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="engine: the tokenizer, if --model has none"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue texts as they stand, as few-shot prompts need it; a chat model otherwise "
        "gets each `prompt` without choices as a user's message, by its own template",
    )
    parser.add_argument(
        "--cache",
        metavar="FILE",
        help="response cache, created if missing (~/.cache/mmqa_jax/responses)",
    )
    parser.add_argument("--no_cache", action="store_true", help="neither read nor write the cache")
    flags.add_thinking(parser, "", "auto")
    flags.add_shard(parser, "prompts", _CHUNK)
    flags.add_config(parser, default="configs/prompt/default.py")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers the prompts."""
    shard = flags.start(arguments, jax=arguments.backend == "engine")
    arguments = flags.fetched(arguments, STORE_INPUTS)
    from mmqa_jax.core.chunks import WHOLE
    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.files import check_out
    from mmqa_jax.core.host import cache_dir
    from mmqa_jax.prompting.backends.config import check_prompt_config, spans_processes
    from mmqa_jax.prompting.run import run_prompts
    from mmqa_jax.weights.hub import download_model

    out = as_path(arguments.out)
    check_out(out)
    if arguments.download:
        download_model(arguments.model)
    config = load_config(arguments.config, arguments.overrides)
    config.thinking = arguments.thinking or config.thinking
    check_prompt_config(config)
    together = spans_processes(arguments.backend, config)
    if together:
        shard = WHOLE
    parts = flags.job_folder(out)
    if arguments.cache:
        cache = as_path(arguments.cache)
    elif shard.count > 1 and not in_store(out):
        cache = parts / "responses"
    else:
        cache = cache_dir() / "responses"
    return run_prompts(
        Path(arguments.prompts),
        out,
        config,
        model=arguments.model,
        backend=arguments.backend,
        tokenizer=arguments.tokenizer,
        raw=arguments.raw,
        cache=None if arguments.no_cache else cache,
        parts=parts,
        shard=shard,
        chunk=arguments.chunk,
        engine=flags.engine(arguments),
        together=together,
    )
