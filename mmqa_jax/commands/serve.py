"""`mmqa serve`: a page and OpenAI's API over models that stay loaded."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.serve import ServeOptions

SUMMARY = "serve a page that answers with its sources, and OpenAI's API, from one process."
EXAMPLE = "mmqa serve --data=manuals"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\n--data=FOLDER: documents and pictures, or what `mmqa prepare` wrote, as `mmqa ask`\n"
        "--workdir=DIR: a finished demo with its rows, or a row of `mmqa run`\n"
        "--model=M: a language model alone (smollm2), or the one that reads the folder's passages\n"
        "the page is at /, OpenAI's API under /v1 (models, completions, chat/completions,\n"
        "  embeddings), /healthz says whether requests are taken, /metrics is Prometheus's;\n"
        "  requests join the running batch; a chat with the model `passages` or `demo` answers\n"
        "  its last message from the sources, which stand in the reply's `sources`\n"
        "SIGTERM and Ctrl-C: what has begun is answered to its end, nothing new is taken"
    )
    parser.add_argument(
        "--adapter",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME=FOLDER,...",
        help="LoRA adapters over --model, each of which answers as the model NAME of the API: "
        "folders of LoRA runs, or of PEFT; a batch mixes them",
    )
    flags.add_reading(parser, "a finished demo's workdir, or that of a row of `mmqa run`")
    parser.add_argument(
        "--also",
        type=lambda text: text.split(","),
        default=[],
        metavar="FOLDER,...",
        help="further folders beside --data: choices of the page, models `passages:NAME` and "
        "`search:NAME` of the API",
    )
    default = ServeOptions()
    parser.add_argument(
        "--host", default=default.host, help=f"address to listen at ({default.host})"
    )
    parser.add_argument(
        "--port", type=int, default=default.port, help=f"its port; 0: a free one ({default.port})"
    )
    parser.add_argument(
        "--key_env",
        metavar="NAME",
        help="environment variable with the key that requests must carry (none is required)",
    )
    parser.add_argument(
        "--mcp",
        nargs="?",
        const="http",
        choices=("http", "stdio"),
        help="tools over the sources for assistants (search, open_page, read, cite, ask), by the "
        "Model Context Protocol: at /mcp beside the page, or over stdin and stdout alone",
    )
    parser.add_argument(
        "--follow_up",
        choices=("both", "joined", "rewritten", "alone"),
        default=default.follow_up,
        help="how the folder is searched for a question behind others: joined with the last of "
        f"them, alone, both in turn, or rewritten by the reader ({default.follow_up})",
    )
    parser.add_argument(
        "--uploads",
        type=int,
        default=default.uploads,
        metavar="N",
        help="documents, each up to three quarters of --body, that users may add to the folder of "
        f"--data from the page ({default.uploads})",
    )
    parser.add_argument(
        "--origins",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="URL,...",
        help="sites whose pages may ask, such as http://localhost:3000; *: all (none)",
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=default.queue,
        metavar="N",
        help="requests that wait or are answered at once, each prompt of a completion counted; "
        f"beyond them 429 ({default.queue})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=default.timeout,
        metavar="S",
        help=f"seconds for an answer ({default.timeout:g})",
    )
    parser.add_argument(
        "--body",
        type=float,
        default=default.body,
        metavar="MIB",
        help=f"largest request ({default.body:g})",
    )
    flags.add_config(parser, default="configs/prompt/default.py")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serves until it is told to end."""
    _check_flags(arguments)
    adapters = _adapters(arguments)
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401

        if arguments.mcp is not None:
            import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"mmqa serve: {error.name} is not installed; `pip install 'mmqa-jax[serve]'`."
        ) from error
    from mmqa_jax.serve.run import bind, key_of, open_parts, serve, serve_stdio

    options = flags.fill(
        ServeOptions, arguments, key=key_of(arguments.key_env), mcp=arguments.mcp == "http"
    )
    listening = None if arguments.mcp == "stdio" else bind(options)
    try:
        from mmqa_jax.core.config import load_config
        from mmqa_jax.core.hosts import distributed
        from mmqa_jax.prompting.backends.config import check_prompt_config, open_backend
        from mmqa_jax.prompting.backends.thinking import read_thinking

        distributed.start()
        config = load_config(arguments.config, arguments.overrides)
        if thinking := arguments.thinking or (arguments.data and "off"):
            config.thinking = thinking
        check_prompt_config(config)
        name = arguments.model or ("" if arguments.workdir else "smollm2")
        flags.download(arguments, "model", "encoder", "reranker", "ocr")
        backend = arguments.backend or "engine"
        asking, reading = flags.reading_options(arguments)
        if room := read_thinking(config.thinking, "--thinking").room:
            most = reading.max_new_tokens + room
            reading = dataclasses.replace(reading, max_new_tokens=most)
        parts = open_parts(
            (lambda: open_backend(backend, name, None, config, adapters=adapters))
            if name
            else None,
            name,
            options,
            data=flags.optional_path(arguments.data),
            also=[Path(folder) for folder in arguments.also],
            workdir=flags.optional_path(arguments.workdir),
            cache=flags.optional_path(arguments.cache),
            folder=flags.folder_options(arguments),
            asking=asking,
            reading=reading,
            adapters=tuple(adapters),
        )
        if listening is None:
            serve_stdio(parts)
        else:
            serve(parts, listening, options)
    finally:
        if listening is not None:
            listening.close()
    return {"served": True}


def _adapters(arguments: argparse.Namespace) -> dict[str, str]:
    """The folders of adapters by name."""
    folders: dict[str, str] = {}
    for pair in arguments.adapter:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in folders:
            raise UserError(
                f"--adapter={pair}: NAME=FOLDER was expected, each name once; separate several by "
                "commas."
            )
        folders[name] = folder
    if folders and (arguments.backend == "openai" or arguments.workdir is not None):
        raise UserError(
            "--adapter: is for a language model in this process; name its base as --model, without "
            "--backend=openai and --workdir."
        )
    return folders


def _check_flags(arguments: argparse.Namespace) -> None:
    flags.check_reading(arguments)
    named = [("data", arguments.data), ("workdir", arguments.workdir)]
    for flag, value in [*named, *(("also", folder) for folder in arguments.also)]:
        if value is not None and not Path(value).is_dir():
            raise UserError(f"--{flag}={value}: no such folder; check the path.")
    if arguments.also and arguments.data is None:
        raise UserError("--also: names folders beside --data; give the first one as --data.")
    if arguments.backend == "openai" and arguments.data is None:
        raise UserError(
            "--backend=openai: reads the passages of --data=FOLDER; a server's own API is served "
            "by itself."
        )
    if arguments.mcp is not None and arguments.data is None and arguments.workdir is None:
        raise UserError("--mcp: its tools search sources; give --data=FOLDER or --workdir=DIR.")
    if arguments.uploads < 0:
        raise UserError(f"--uploads={arguments.uploads}: 0 (none) or more was expected.")
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"--port={arguments.port}: 0 to 65535 was expected; give such a port.")
    for flag in ("queue", "timeout", "body"):
        if not (value := getattr(arguments, flag)) > 0:
            raise UserError(f"--{flag}={value}: more than 0 was expected; give a larger number.")
