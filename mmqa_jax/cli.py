"""The command line: `mmqa VERB ...`. The verbs, and nothing else; arguments.py has their flags.

Config files are ml_collections: `--config=FILE[:MODE] --config.train.steps=500`.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.arguments import make_parser
from mmqa_jax.core.errors import RunError, UserError

Result = dict[str, Any]
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code (0 done, 1 the run failed, 2 wrong input)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in argv
    try:
        argv, overrides = _split_config_overrides(argv)
        arguments = make_parser().parse_args(argv)
        if overrides and not hasattr(arguments, "config"):
            raise UserError(f"{overrides[0]}: `mmqa {arguments.verb}` takes no --config.")
        arguments.overrides = overrides
        result = VERBS[arguments.verb](arguments)
    except (UserError, RunError) as error:
        if show_traceback:
            traceback.print_exc()
        print(f"mmqa: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("mmqa: interrupted; start the same command again to continue.", file=sys.stderr)
        return _INTERRUPTED
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
    return 0


def _split_config_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--config.a.b=value` arguments from the verb's own."""
    kept, overrides = [], []
    for argument in argv:
        if argument.startswith("--config."):
            if "=" not in argument:
                raise UserError(f"{argument}: write it as --config.KEY=VALUE, in one word.")
            overrides.append(argument.removeprefix("--config."))
        else:
            kept.append(argument)
    return kept, overrides


# Each verb loads what it needs when it runs, and nothing before.


def _demo(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.core.config import load_config
    from mmqa_jax.systems.demo import run_demo

    return run_demo(load_config(arguments.config, arguments.overrides), Path(arguments.workdir))


def _ask(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.ask import ask

    return ask(Path(arguments.workdir), arguments.question, arguments.image)


def _prepare(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.stages import prepare

    raw = Path(arguments.raw) if arguments.raw else None
    return prepare(
        arguments.dataset,
        raw,
        Path(arguments.out),
        overwrite=arguments.overwrite,
        max_broken_pictures=arguments.max_broken_pictures,
    )


def _convert(arguments: argparse.Namespace) -> Result:
    import jax

    from mmqa_jax.weights.convert import convert

    jax.config.update("jax_platforms", "cpu")  # needs no accelerator, nor shall it hold one
    return convert(
        arguments.model,
        Path(arguments.source),
        Path(arguments.out),
        dtype=arguments.dtype,
        export=arguments.export,
        overwrite=arguments.overwrite,
        changes=arguments.set,
        clip=Path(arguments.clip) if arguments.clip else None,
    )


def _train(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.core.config import load_config
    from mmqa_jax.training.run import run_training

    config = load_config(arguments.config, arguments.overrides)
    return run_training(config, Path(arguments.workdir), only_start=arguments.only_start)


def _embed(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.retrieval_stages import embed

    return embed(
        Path(arguments.data),
        Path(arguments.model),
        Path(arguments.out),
        shard=arguments.shard,
        overwrite=arguments.overwrite,
    )


def _index(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.retrieval_stages import index

    return index(Path(arguments.embeddings), arguments.kind)


def _search(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.retrieval_stages import search

    return search(
        Path(arguments.data),
        arguments.method,
        Path(arguments.out),
        model=arguments.model,
        index_dir=arguments.index,
        split=arguments.split,
        top_k=arguments.top_k,
        two_pass=arguments.two_pass,
        candidates=arguments.candidates,
        modality=arguments.modality,
        webqa_compat=arguments.webqa_compat,
    )


def _rerank(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.selection import Candidates, rerank

    candidates = Candidates(
        arguments.candidates,
        arguments.top_k,
        arguments.cap,
        retriever=Path(arguments.retriever) if arguments.retriever else None,
        index_dir=Path(arguments.index) if arguments.index else None,
        similarity_weight=arguments.similarity_weight,
    )
    return rerank(
        Path(arguments.data),
        Path(arguments.model),
        candidates,
        Path(arguments.out),
        split=arguments.split,
        select=arguments.select,
    )


def _answer(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.stages import answer

    return answer(
        Path(arguments.data),
        Path(arguments.model),
        arguments.sources,
        Path(arguments.out),
        split=arguments.split,
        threshold=arguments.threshold,
        select=arguments.select,
    )


def _prompt(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.files import check_out
    from mmqa_jax.core.startup import cache_dir
    from mmqa_jax.prompting.run import run_prompts

    check_out(Path(arguments.out))
    cache = Path(arguments.cache) if arguments.cache else cache_dir() / "responses.sqlite"
    return run_prompts(
        Path(arguments.prompts),
        Path(arguments.out),
        load_config(arguments.config, arguments.overrides),
        model=arguments.model,
        backend=arguments.backend,
        tokenizer=arguments.tokenizer,
        cache=None if arguments.no_cache else cache,
    )


def _evaluate(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.scoring import evaluate

    return evaluate(
        arguments.dataset,
        Path(arguments.references) if arguments.references else None,
        Path(arguments.predictions),
        split=arguments.split,
        lemmatizer=arguments.lemmatizer,
        only_given=arguments.only_given,
        bart=Path(arguments.bart) if arguments.bart else None,
        submission=Path(arguments.submission) if arguments.submission else None,
        against=Path(arguments.against) if arguments.against else None,
        markdown=arguments.markdown,
    )


def _report(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.systems.demo import write_demo_report

    return write_demo_report(Path(arguments.workdir))


def _bench(arguments: argparse.Namespace) -> Result:
    from mmqa_jax.bench import Options, run_bench, show

    options = Options(arguments.rounds, tuple(arguments.only), arguments.size)
    result = run_bench(arguments.name, options)
    show(result)
    return result


VERBS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "demo": _demo,
    "ask": _ask,
    "prepare": _prepare,
    "convert": _convert,
    "train": _train,
    "embed": _embed,
    "index": _index,
    "search": _search,
    "rerank": _rerank,
    "answer": _answer,
    "prompt": _prompt,
    "evaluate": _evaluate,
    "report": _report,
    "bench": _bench,
}


if __name__ == "__main__":
    sys.exit(main())
