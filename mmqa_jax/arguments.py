"""The flags of every verb of `mmqa`, with help and a working example.

argparse rather than absl flags: every verb has its own flags, and `mmqa --help` must answer before
any numerical library is loaded.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import NoReturn

from mmqa_jax.bench import SIZES as BENCH_SIZES
from mmqa_jax.bench import available as available_benches
from mmqa_jax.bench import describe as describe_benches
from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.registry import NAMES, describe

_CHECKOUT = Path(__file__).resolve().parent.parent


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one sentence."""

    def parse_known_args(self, args=None, namespace=None):
        # Where a verb's flags are known: the parser of all verbs could only point at its own help.
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see `{self.prog} --help`.")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `mmqa VERB ...`; a complaint of its is a UserError."""
    parser = _Parser(
        prog="mmqa",
        description="Multimodal, multi-hop question answering in JAX.",
        epilog="`mmqa VERB --help` shows a verb's flags and a working example.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, summary: str, example: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="last line: the result as JSON")
        added.add_argument("--traceback", action="store_true", help="show a mistake's traceback")
        return added

    demo = verb(
        "demo",
        "the whole path on Atlas: data to cited answers and report.",
        "mmqa demo --workdir=workdir-demo --json",
    )
    demo.add_argument("--workdir", default="workdir-demo", help="everything is written here")
    _add_config(demo, default="configs/atlas/demo.py")

    ask = verb(
        "ask",
        "answer one question from a demo's workdir, with its sources.",
        'mmqa ask --workdir=workdir-demo "What is the capital of Kenya?"',
    )
    ask.add_argument("--workdir", default="workdir-demo", help="a finished demo's workdir")
    ask.add_argument("--image", help="a picture file that belongs to the question")
    ask.add_argument("question", nargs="+", help="the question; several are answered in turn")

    prepare = verb(
        "prepare",
        "turn a benchmark's official files into ArrayRecord.",
        "mmqa prepare atlas --out=data/atlas",
    )
    prepare.add_argument(
        "dataset",
        choices=("atlas", "webqa", "corpus"),
        help="atlas is made on the spot; corpus is your own documents",
    )
    prepare.add_argument("--raw", help="folder with the official files (webqa, corpus)")
    prepare.add_argument("--out", required=True, help="folder to write")
    prepare.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the corpus in --out (atlas: prepared anew from the files in its raw folder)",
    )
    prepare.add_argument(
        "--max_broken_pictures",
        type=int,
        help="pictures that may be broken and are left out (1 in 100, at least 10)",
    )

    convert = verb(
        "convert",
        "turn published weights into Orbax weights for any mesh, or back into safetensors.",
        "mmqa convert --model=llama --source=downloads/SmolLM2-135M --out=weights/smollm2",
    )
    convert.description += (
        " A layout is known by its content. The way back: --source=weights/smollm2 --export=hf.\n\n"
        f"models, what is read, and what --export=hf writes:\n{describe()}"
    )
    convert.add_argument(
        "--model", required=True, choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}"
    )
    convert.add_argument(
        "--source", required=True, metavar="PATH", help="checkpoint file or folder"
    )
    convert.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    convert.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the parameters (the source's: bfloat16 if all of it is, float32 else)",
    )
    convert.add_argument(
        "--export",
        choices=("hf",),
        help="write safetensors and config.json instead, from a converted folder or any source",
    )
    convert.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a config value that the checkpoint does not tell, e.g. --set bert.heads=12",
    )
    convert.add_argument(
        "--clip",
        metavar="DIR",
        help="llava: its CLIP, where the checkpoint has no vision tower",
    )
    convert.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion in --out"
    )

    train = verb(
        "train",
        "train one model; continues where an interrupted run stopped.",
        "mmqa train --config=configs/atlas/rerank.py --config.data.dir=data/atlas "
        "--workdir=runs/rerank",
    )
    _add_config(train)
    train.add_argument("--workdir", required=True, help="checkpoints, metrics and weights go here")
    train.add_argument(
        "--only_start",
        action="store_true",
        help="take no step: make a workdir of the weights that config.init names, for other verbs",
    )

    embed = verb(
        "embed",
        "embed every source of a corpus with a trained dual encoder.",
        "mmqa embed --data=data/atlas --model=runs/contrastive --out=runs/index",
    )
    _add_data(embed)
    embed.add_argument(
        "--model", required=True, help="workdir of a contrastive run, or a converted CLIP"
    )
    embed.add_argument("--out", required=True, help="folder for the embeddings")
    embed.add_argument(
        "--shard",
        metavar="I/N",
        help="this process's part of a job that N share, from 0/N on (the hosts that jax knows)",
    )
    embed.add_argument(
        "--overwrite",
        action="store_true",
        help="replace embeddings of another model or corpus in --out",
    )

    index = verb(
        "index",
        "build a nearest-neighbour index over embeddings.",
        "mmqa index --embeddings=runs/index --kind=auto",
    )
    index.add_argument("--embeddings", required=True, help="folder written by `mmqa embed`")
    index.add_argument(
        "--kind",
        choices=("auto", "scann", "exact"),
        default="auto",
        help="auto: ScaNN where it can be had, exact otherwise",
    )

    search = verb(
        "search",
        "rank sources for every question.",
        "mmqa search --data=data/atlas --method=dense --model=runs/contrastive "
        "--index=runs/index --out=runs/retrieval/dense.jsonl",
    )
    _add_data(search)
    _add_split(search)
    search.add_argument(
        "--method",
        choices=("bm25", "dense", "fused"),
        required=True,
        help="fused: reciprocal-rank fusion of the other two",
    )
    search.add_argument(
        "--model", help="workdir of a contrastive run, or a converted CLIP (dense, fused)"
    )
    search.add_argument("--index", help="folder written by `mmqa index` (dense, fused)")
    search.add_argument(
        "--two_pass",
        action="store_true",
        help="search again with the title of the first hit (two-hop questions)",
    )
    search.add_argument(
        "--candidates",
        choices=("all", "restricted"),
        default="all",
        help="the whole collection, or each question's own gold and negative sources",
    )
    search.add_argument(
        "--modality",
        choices=("unknown", "known", "classified"),
        default="unknown",
        help="search all sources, those of the gold sources' modality, or of the modality that "
        "a classifier of the train questions guesses",
    )
    search.add_argument(
        "--webqa_compat",
        action="store_true",
        help="bm25: with the quirks of WebQA's baseline (gensim 3.8 over doc2bow pairs)",
    )
    search.add_argument("--top_k", type=int, default=100, help="sources per question (100)")
    search.add_argument("--out", required=True, help="JSON-lines file to write")

    rerank = verb(
        "rerank",
        "score candidate sources with a trained VLP source head.",
        "mmqa rerank --data=data/atlas --model=runs/rerank --candidates=restricted "
        "--out=runs/retrieval/restricted.jsonl",
    )
    _add_data(rerank)
    _add_split(rerank)
    rerank.add_argument("--model", required=True, help="workdir of a rerank training run")
    rerank.add_argument(
        "--candidates",
        default="restricted",
        help="`restricted` (each question's own), a file of `mmqa search`, or `all`: the whole "
        "collection, with a model of configs/atlas/rerank_cached.py's kind",
    )
    rerank.add_argument(
        "--top_k", type=int, default=20, help="candidates of a file to score, of all to keep (20)"
    )
    rerank.add_argument(
        "--cap",
        choices=("none", "webqa"),
        default="none",
        help="restricted: webqa reads 16 pictures and 16 snippets of a question, as its baseline",
    )
    rerank.add_argument(
        "--retriever",
        help="workdir of a contrastive run, or a converted CLIP: reads two-hop questions again "
        "with the title of its best source, and its cosines are the similarity",
    )
    rerank.add_argument("--index", help="folder written by `mmqa index`, of the retriever")
    rerank.add_argument(
        "--similarity_weight",
        type=float,
        default=0.0,
        metavar="W",
        help="of the similarity (the retriever's, or the scores in the file) beside the relevance; "
        "0 is VLP alone, the sweep tells the best on --split=val",
    )
    _add_select(rerank)
    rerank.add_argument("--out", required=True, help="JSON-lines file to write")

    answer = verb(
        "answer",
        "answer every question from given sources, with beam search.",
        "mmqa answer --data=data/atlas --model=runs/answer --sources=oracle "
        "--out=runs/predictions.jsonl",
    )
    _add_data(answer)
    _add_split(answer)
    answer.add_argument("--model", required=True, help="workdir of an answer training run")
    answer.add_argument(
        "--sources", default="oracle", help="`oracle`, `none`, or a file of `mmqa rerank`"
    )
    answer.add_argument(
        "--threshold",
        type=float,
        default=0.2,
        help="sources are cited above this probability (0.2); `mmqa rerank` sweeps it",
    )
    _add_select(answer)
    answer.add_argument("--out", required=True, help="predictions.jsonl to write")

    prompt = verb(
        "prompt",
        "let a language model answer a file of prompts; a rerun asks only what is missing.",
        "mmqa prompt --prompts=questions.txt --model=smollm2 --out=answers.jsonl",
    )
    prompt.description += (
        "\n\nprompts: plain text, one on a line, or .jsonl with on each line\n"
        "  prompt or messages [{role, content}], and where wanted id, images, choices (to be\n"
        "  scored), meta, max_new_tokens, temperature, top_k, top_p, stop, n, seed, logprobs\n"
        "backend openai: any server of OpenAI's API, at the address in the environment's\n"
        "  OPENAI_BASE_URL, with the key in OPENAI_API_KEY if it asks for one"
    )
    prompt.add_argument("--prompts", required=True, metavar="FILE", help="what is asked")
    prompt.add_argument(
        "--model",
        required=True,
        metavar="PATH|NAME",
        help="engine: `smollm2`, a folder of `mmqa convert`, or a published LLaMA or LLaVA "
        "(folder, .gguf); openai: what the server calls it",
    )
    prompt.add_argument(
        "--backend",
        choices=("engine", "openai"),
        default="engine",
        help="this process, or a server (engine)",
    )
    prompt.add_argument("--out", required=True, metavar="FILE", help="JSON-lines file to write")
    prompt.add_argument(
        "--tokenizer", metavar="PATH", help="engine: its tokenizer, where --model has none"
    )
    prompt.add_argument(
        "--cache",
        metavar="FILE",
        help="response cache, made if there is none (~/.cache/mmqa_jax/responses.sqlite)",
    )
    prompt.add_argument("--no_cache", action="store_true", help="ask everything, keep nothing")
    _add_config(prompt, default="configs/prompt/default.py")

    evaluate = verb(
        "evaluate",
        "score predictions or rankings against references.",
        "mmqa evaluate atlas --references=data/atlas --predictions=runs/predictions.jsonl --json",
    )
    evaluate.add_argument("dataset", choices=("atlas", "webqa", "corpus"), help="the benchmark")
    evaluate.add_argument(
        "--references",
        help="folder written by `mmqa prepare`, WebQA's own JSON, or an official output TSV "
        "(the predictions, where they are such a TSV)",
    )
    evaluate.add_argument(
        "--predictions",
        required=True,
        help="predictions.jsonl, WebQA's submission or end-to-end JSON, official output TSV, or a "
        "rankings file",
    )
    _add_split(evaluate)
    evaluate.add_argument(
        "--only_given",
        action="store_true",
        help="score only the questions in the file (a demo answers some of its split)",
    )
    evaluate.add_argument(
        "--lemmatizer",
        choices=("none", "spacy"),
        help="spacy: the official scorer, which webqa takes where it is installed (`lemma` extra)",
    )
    evaluate.add_argument(
        "--bart",
        metavar="DIR",
        help="bart-large-cnn's folder with BARTScore's bart.pth in it, for fluency (webqa_fl)",
    )
    evaluate.add_argument(
        "--submission",
        metavar="FILE",
        help="also write the predictions as WebQA's leaderboard takes them",
    )
    evaluate.add_argument(
        "--against",
        metavar="FILE",
        help="another system's predictions: differences, paired by question, with p-values",
    )
    evaluate.add_argument("--markdown", action="store_true", help="tables as markdown, to paste")

    report = verb(
        "report",
        "write report.html from a demo's workdir.",
        "mmqa report --workdir=workdir-demo",
    )
    report.add_argument("--workdir", default="workdir-demo", help="a finished demo's workdir")

    bench = verb(
        "bench",
        "measure speed or memory against a peer on the same inputs.",
        "mmqa bench models --only=clip_image --only=bert --json",
    )
    bench.description += f"\n\nbenches:\n{describe_benches()}"
    bench.add_argument("name", choices=available_benches(), metavar="NAME", help="one of the above")
    bench.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="a row to measure (all)"
    )
    bench.add_argument("--rounds", type=int, help="how often each side is timed (the bench's own)")
    bench.add_argument(
        "--size",
        choices=BENCH_SIZES,
        help="full: published sizes that ask for a large machine (the bench's choice)",
    )
    return parser


def _add_config(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    if default is not None and not Path(default).exists():  # called from outside the checkout
        default = str(_CHECKOUT / default)
    parser.add_argument(
        "--config",
        default=default,
        required=default is None,
        metavar="FILE[:MODE]",
        help="experiment file; :runlocal is a run of seconds; "
        "--config.KEY=VALUE overrides one value",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="folder written by `mmqa prepare`")


def _add_select(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--select",
        choices=("best", "above"),
        default="best",
        help="best: the best source always and a second one above the threshold (WebQA 6.2); "
        "above: all above it, perhaps none (the baseline's restricted setting)",
    )


def _add_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", default="test", help="train, val or test (test)")
