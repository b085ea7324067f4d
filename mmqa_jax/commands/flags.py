"""Flags that several verbs share."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmqa_jax.core.errors import UserError

if TYPE_CHECKING:
    from mmqa_jax.core.chunks import Shard
    from mmqa_jax.data.documents.ocr import PageReader
    from mmqa_jax.data.folder import FolderOptions
    from mmqa_jax.data.text_analysis import Analyzer
    from mmqa_jax.prompting.llm_reader import LLMReaderOptions
    from mmqa_jax.runs.ask_folder import AskOptions
    from mmqa_jax.runs.verbs.one_stage import StageFiles

T = TypeVar("T")

_GIVEN = "as_given"  # what `fetched` keeps the arguments under
# Wikipedia as knowledge, which `prepare` reads as a stream; it has no questions.
KNOWLEDGE = ("wikipedia", "kilt", "dpr", "infoseek_wiki")


def add_config(
    parser: argparse.ArgumentParser, default: str | None = None, *, required: bool = True
) -> None:
    """`--config=FILE[:MODE]`, required where there is no default; cli.py handles
    `--config.KEY=VALUE`."""
    parser.add_argument(
        "--config",
        default=default,
        required=required and default is None,
        metavar="FILE[:MODE]",
        help="experiment file; :runlocal is a run of a few seconds; "
        "--config.KEY=VALUE overrides one value",
    )


def add_only(parser: argparse.ArgumentParser, what: str, help: str) -> None:
    """`--only=A,B`, which may be given several times."""
    parser.add_argument(
        "--only",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar=f"{what},...",
        help=help,
    )


# Flags that mean the same to every verb that has them, as `add_argument` takes them.
_SHARED: dict[str, dict[str, Any]] = {
    "data": {"required": True, "help": "folder written by `mmqa prepare`"},
    "sources": {
        "default": "",
        "metavar": "DIR",
        "help": "another folder of `mmqa prepare`, such as Wikipedia's, whose sources are meant "
        "(the questions' own)",
    },
    "split": {"default": "test", "help": "train, val or test (test)"},
    "out": {  # of a verb that writes rankings
        "required": True,
        "help": "file to write: JSON lines, or a run of TREC if the name ends in .trec; other "
        "verbs read both",
    },
    "select": {
        "choices": ("best", "above"),
        "default": "best",
        "help": "best: always the best source, and the second from the threshold on (WebQA's full "
        "scale, 6.2); above: all above it, possibly none (WebQA's restricted setting)",
    },
    "workdir": {"required": True, "help": "everything is written here"},
    "limit": {"type": int, "metavar": "N", "help": "only the first N questions of the split (all)"},
    "markdown": {"action": "store_true", "help": "tables as markdown, to paste"},
    "download": {
        "action": "store_true",
        "help": "first fetch what the Hugging Face cache lacks of ORG/NAME (token: HF_TOKEN)",
    },
}


def add(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds flags of `_SHARED`."""
    for name in names:
        parser.add_argument(f"--{name}", **_SHARED[name])


def add_shard(
    parser: argparse.ArgumentParser, items: str = "", chunk: int | None = None, default: str = ""
) -> None:
    """`--shard`, and with the name of the `items` `--chunk`, whose default may depend on other
    flags: then `chunk` is None, and --help shows `default`.
    """
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="this process's share of a job that N share, from 0/N; the last to finish, or `mmqa "
        "merge`, puts the parts together; N may change between starts. auto: I and N of a Slurm "
        "job array or a Kubernetes Indexed Job (default: JAX's processes, or the whole)",
    )
    parser.add_argument(
        "--engine",
        choices=("process", "ray"),
        default="process",
        help="who computes: this process, or the workers of a Ray cluster, which may come and go "
        "(process)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="ray: workers at once, at most (the cluster's GPUs, or 1); the cluster is that of "
        "RAY_ADDRESS, or this machine",
    )
    if items:
        parser.add_argument(
            "--chunk",
            type=int,
            default=chunk,
            metavar="C",
            help=f"{items} that are computed and kept together, the most that a kill loses "
            f"({default or chunk})",
        )


def add_devices(parser: argparse.ArgumentParser, examples: str) -> None:
    """`--batch_size` and `--mesh`, of a model that this process uses."""
    parser.add_argument(
        "--batch_size",
        metavar="N",
        help=f"{examples} at a time, over all devices; auto: from their kind and memory (default: "
        "what the model's run says, or auto)",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="how the process's devices share the work, such as fsdp=-1 (data=-1: a copy of the "
        "model on each, the rows of a batch split over all)",
    )


def serving_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags of `add_devices` as keys of a config's section `inference`."""
    from mmqa_jax.core.serving import read_batch_size, read_mesh

    options: dict[str, Any] = {}
    if arguments.batch_size is not None:
        options["batch_size"] = read_batch_size(arguments.batch_size)
    if arguments.mesh is not None:
        options["mesh"] = read_mesh(arguments.mesh)
    return options


def stage_files(arguments: argparse.Namespace, shard: Shard) -> StageFiles:
    """Returns the files that `search`, `rerank` or `answer` reads and writes, by its flags."""
    from mmqa_jax.core.paths import as_path
    from mmqa_jax.runs.verbs.one_stage import StageFiles

    return StageFiles(
        Path(arguments.data),
        arguments.split,
        as_path(arguments.out),
        arguments.chunk,
        getattr(arguments, "sources", ""),
        serving_options(arguments) if hasattr(arguments, "mesh") else None,
        shard,
        engine(arguments),
    )


def start(arguments: argparse.Namespace, *, jax: bool = True) -> Shard:
    """Prepares JAX, if the verb computes with it; returns this process's share of the job.

    A shard is a program of its own: only without `--shard` the processes of a launch are joined,
    and then share the job.
    """
    from mmqa_jax.core.chunks import launched_shard, parse_shard

    share = None if arguments.shard is None else parse_shard(arguments.shard, os.environ)
    if jax:
        from mmqa_jax.core.hosts import distributed

        distributed.start(join=arguments.shard is None)
    return share or launched_shard()


def fetched(arguments: argparse.Namespace, inputs: Sequence[str]) -> argparse.Namespace:
    """The arguments, with a copy on this host in place of each of the verb's STORE_INPUTS that is
    in an object store; `engine` still gives its workers what they were.
    """
    from mmqa_jax.core.paths import in_store

    values = vars(arguments)
    remote = [name for name in inputs if isinstance(values[name], str) and in_store(values[name])]
    if not remote:
        return arguments
    from mmqa_jax.core.local_copies import local_copy

    copies = {name: str(local_copy(values[name])) for name in remote}
    return argparse.Namespace(**{**values, **copies, _GIVEN: values})


def is_alone(arguments: argparse.Namespace, shard: Shard) -> bool:
    """Whether this process does all of a job."""
    return shard.count == 1 and arguments.engine == "process"


def engine(arguments: argparse.Namespace) -> Any:
    """Opens the engine of a job's chunks (core.chunks.Engine); None: this process computes them."""
    if arguments.engine != "ray":
        return None if arguments.engine == "process" else arguments.engine
    if arguments.shard is not None:
        raise UserError("--engine=ray and --shard: each shares the job its own way; give one.")
    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers={arguments.workers}: at least 1 was expected.")
    from mmqa_jax.commands.ray_engine import RayEngine

    return RayEngine(vars(arguments).get(_GIVEN, vars(arguments)), arguments.workers)


def job_folder(out: Path) -> Path:
    """The folder of a file's parts while it is made."""
    return out.with_name(f"{out.name}.parts")


def add_reading(parser: argparse.ArgumentParser, workdir: str) -> None:
    """Adds the flags on a folder's passages, for `mmqa ask` and `mmqa serve`."""
    parser.add_argument("--data", metavar="FOLDER", help="the documents")
    parser.add_argument("--workdir", help=workdir)
    parser.add_argument(
        "--model",
        metavar="PATH|NAME",
        help="with --data, who reads the passages: as `mmqa prompt --model` (smollm2)",
    )
    add(parser, "download")
    parser.add_argument(
        "--backend", choices=("engine", "openai"), help="this process, or a server (engine)"
    )
    parser.add_argument(
        "--pictures",
        choices=("auto", "pixels", "captions"),
        help="with --data, how the model is shown pictures; auto: by pixels if it is in this "
        "process and sees, else by captions (auto)",
    )
    parser.add_argument(
        "--encoder",
        metavar="NAME|PATH",
        help="with --data, who finds the passages beside BM25: minilm, a published encoder of "
        "texts (folder or ORG/NAME), a CLIP or SigLIP, or a contrastive run (minilm); pictures are "
        "seen by a Qwen3-VL-Embedding, a CLIP or SigLIP",
    )
    add_pages(parser, "with --data, ")
    add_thinking(parser, "with --data, ", "off")
    parser.add_argument(
        "--max_new_tokens", type=int, metavar="N", help="with --data, tokens of an answer (64)"
    )
    parser.add_argument(
        "--citations",
        choices=("asked", "cause"),
        help="with --data, what an answer cites: passages that it names itself, or those without "
        "which its sentences are less likely to the model (asked)",
    )
    parser.add_argument(
        "--quote_below",
        type=float,
        metavar="P",
        help="with --data, the model's confidence (0 to 1) below which the passages' best sentence "
        "stands before its words; 0: never (.9 of a model of fewer than 500 million parameters, "
        "else 0)",
    )
    parser.add_argument("--top_k", type=int, help="passages that the model reads (5)")
    parser.add_argument(
        "--reranker",
        metavar="PATH|NAME",
        help="with --data, who orders the best 20 passages anew: a rerank run, a cross-encoder or "
        "a Qwen3-Reranker (nobody)",
    )
    parser.add_argument(
        "--least_similarity",
        type=float,
        metavar="COSINE",
        help="questions whose nearest passage is less similar are refused; -1: none is (chosen on "
        "val, mmqa_jax/data/ANSWERS.md)",
    )
    add_words(parser, "with --data, ")
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="where what was read of the documents is kept (~/.cache/mmqa_jax/folders)",
    )


# Flags of `add_reading` that are for a folder alone.
READING = (
    *("model", "backend", "pictures", "encoder", "pages", "ocr", "top_k", "least_similarity"),
    *("cache", "language", "stemming", "thinking", "max_new_tokens", "reranker", "citations"),
    "quote_below",
)


def check_reading(arguments: argparse.Namespace) -> None:
    """UserError for flags of `add_reading` that contradict each other or are out of range."""
    if arguments.data is not None and arguments.workdir is not None:
        raise UserError("--data and --workdir: one of them is asked; leave one.")
    if arguments.data is not None and not Path(arguments.data).exists():  # before JAX starts
        raise UserError(f"--data={arguments.data}: no such folder; check the path.")
    if arguments.top_k is not None:
        check_top_k(arguments.top_k)
    check_at_least_1(arguments, "max_new_tokens")
    if arguments.quote_below is not None and not 0 <= arguments.quote_below <= 1:
        raise UserError(
            f"--quote_below={arguments.quote_below:g}: a confidence from 0 (never) to 1 (always) "
            "was expected; change it."
        )
    for name, known in (("reranker", ""), ("encoder", "minilm")):  # before JAX starts
        value = getattr(arguments, name)
        if value in (None, known) or Path(value).exists():
            continue
        from mmqa_jax.weights.hub import is_hub_name

        if not is_hub_name(value):
            others = f", nor {known}" if known else ""
            raise UserError(
                f"--{name}={value}: no such folder{others}, nor ORG/NAME on the Hugging Face hub; "
                "check the path."
            )
    if arguments.pages in ("pictures", "both") and arguments.encoder in (None, "minilm"):
        from mmqa_jax.runs.ask_folder import no_pictures

        raise UserError(f"--pages={arguments.pages}: {no_pictures('minilm')}")


def add_thinking(parser: argparse.ArgumentParser, condition: str, default: str) -> None:
    """`--thinking`; `condition`: where it holds, for the help."""

    def read(text: str) -> str:
        from mmqa_jax.prompting.backends.thinking import read_thinking

        read_thinking(text, "--thinking")  # which is refused by the flag's name, not a key's
        return text

    parser.add_argument(
        "--thinking",
        type=read,
        metavar="off|on|low|medium|high|TOKENS",
        help=f"{condition}whether a chat model thinks before it answers: auto (as it does by "
        "itself), off, on, an effort of models that know it (gpt-oss), or the tokens that thoughts "
        f"may have beside the answer's ({default})",
    )


def add_pages(parser: argparse.ArgumentParser, condition: str) -> None:
    """`--pages` and `--ocr`; `condition`: where they hold, for the help."""
    parser.add_argument(
        "--pages",
        choices=("text", "pictures", "both"),
        help=f"{condition}what is taken of a PDF: its text and figures, its pages as pictures, or "
        "both (text)",
    )
    parser.add_argument(
        "--ocr",
        metavar="NAME",
        help="of documents, the vision-language model that reads a PDF's pages that are pictures: "
        "as --model of `mmqa ask`, or openai:NAME of a server (mmqa-jax[ocr], if installed)",
    )


def add_words(parser: argparse.ArgumentParser, condition: str = "") -> None:
    """`--language` and `--stemming` of BM25; `condition`: where they hold, for the help."""
    parser.add_argument(
        "--language",
        help=f"{condition}whose most common words BM25 leaves out, such as german (english)",
    )
    parser.add_argument(
        "--stemming",
        action="store_true",
        default=None,
        help=f"{condition}BM25 compares the stems of words, by the rules of --language "
        "(package PyStemmer)",
    )


def analyzer(arguments: argparse.Namespace) -> Analyzer:
    """How BM25 makes words, as the flags of `add_words` say."""
    from mmqa_jax.data.text_analysis import Analyzer

    return Analyzer(arguments.language or "english", stemming=bool(arguments.stemming))


def folder_options(arguments: argparse.Namespace) -> FolderOptions | None:
    """Reads from `--pages` and `--ocr` how documents become sources; None: as by default."""
    if arguments.pages is None and arguments.ocr is None:
        return None
    from mmqa_jax.data.folder import FolderOptions

    return FolderOptions(pages=arguments.pages or "text", ocr=page_reader(arguments))


def page_reader(arguments: argparse.Namespace) -> PageReader | None:
    """The model of `--ocr`; None without one."""
    if arguments.ocr is None:
        return None
    from mmqa_jax.runs.page_reader import open_page_reader

    return open_page_reader(arguments.ocr)


def reading_options(arguments: argparse.Namespace) -> tuple[AskOptions, LLMReaderOptions]:
    """How passages are found and read, as the flags of `add_reading` say."""
    from mmqa_jax.prompting.llm_reader import LLMReaderOptions
    from mmqa_jax.runs.ask_folder import AskOptions

    def options_set(*names: str) -> dict[str, Any]:
        values = {name: getattr(arguments, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    retrieval = options_set("encoder", "top_k", "least_similarity", "reranker", "quote_below")
    asking = AskOptions(**retrieval, words=analyzer(arguments))
    return asking, LLMReaderOptions(**options_set("pictures", "max_new_tokens", "citations"))


def check_top_k(top_k: int) -> None:
    """UserError for a --top_k below 1."""
    if top_k < 1:
        raise UserError(f"--top_k={top_k}: at least 1 was expected; give a larger number.")


def download(arguments: argparse.Namespace, *names: str) -> None:
    """Fetches what flags name on the Hugging Face hub, if `--download` is given.

    `names` are those of the flags that may name a model, the chief one first.
    """
    if not arguments.download:
        return
    from mmqa_jax.weights.hub import download_model, is_hub_name

    named = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    for name in [name for name in named if is_hub_name(named[name])] or list(named)[:1]:
        download_model(named[name], f"--{name}")
    if not named:
        raise UserError(
            f"--download: fetches what {' or '.join(f'--{name}' for name in names)} names; give "
            "ORG/NAME there, or leave --download out."
        )


def fill(kind: type[T], arguments: argparse.Namespace, **values: Any) -> T:
    """A dataclass whose fields are the flags of these names; `values` are its other fields."""
    flags = vars(arguments)
    names = [field.name for field in dataclasses.fields(kind) if field.name in flags]
    return kind(**{**{name: flags[name] for name in names}, **values})


def check_at_least_1(arguments: argparse.Namespace, name: str) -> None:
    """UserError for a flag that was given and is below 1."""
    value = getattr(arguments, name)
    if value is not None and value < 1:
        raise UserError(f"--{name}={value}: expected at least 1; raise it.")


def optional_path(text: str | None) -> Path | None:
    """The path given by an optional flag."""
    return Path(text) if text else None
