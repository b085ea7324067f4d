"""What `python -m tests.bench NAME` measures, always against a peer on the same inputs in the same run.

A bench is a module of this package that gives its cases to `runner.measure`; its
`run(options) -> dict` returns the object that `--json` prints:

    {"bench": "models", "device": "Intel(R) Xeon(R) Processor, 2 threads",
     "rows": [{"name": "bert", "ours": 310.2, "peer": 520.1, "ratio": 1.68, "unit": "ms",
               "floor": 240.0, ...}]}

`ours` and `peer` are in `unit`; `ratio` is how many times better ours is (None without a peer);
`floor` is the best that arithmetic and memory allow, in `unit`. Rows and object may have further
keys; a row's further values are shown in the table too.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError

# Name of a bench, which is that of its module, and what it measures, for help.
BENCHES = {
    "models": "forward and train step of CLIP, BERT, VLP, BART, LLaMA against transformers",
    "convert": "peak memory of `mmqa convert`, of its export, and of loading onto devices",
    "llm": "the generation engine against transformers' generate",
    "cpu_profile": "where a processor's seconds of `mmqa prompt` go, by code and by operation",
    "retrieval": "embedding, indexing and search against exact search",
    "neighbors": "ScaNN, FAISS's lists and its graph over MiniLM's vectors of 200,000 real texts",
    "late_interaction": "MaxSim of MiniLM's tokens over 100,000 documents, beside fast-plaid",
    "harnesses": "SmolLM2 in lm-eval and MiniLM in MTEB, ours beside their own classes",
    "train": "the loop, checkpoints, and runs and jobs of several processes",
    "input": "reading and decoding pictures against Pillow alone; waiting for batches",
    "families": "models by family: deviation from transformers, memory, plan on v5e:2x4",
    "lists": "which models of CiteVQA, tpu-inference and colpali_engine are read here",
    "plan": "what the compiler makes of the programs that `mmqa plan` judges",
    "store": "keeping finished work: core/store.py against ArrayRecord, SQLite and LMDB",
    "evidence": "five folders, 20 questions each: answer, passage, place and refusals right",
    "refusals": "the threshold below which `mmqa ask --data` refuses, chosen on --data",
    "citations": "citations by cause beside those that SmolLM2 is asked for, on --data",
    "rerank": "VLP on every pair of WebQA: each encoded in full, or sources and questions once",
    "wikipedia": "BM25 from disk at 0.1 to 21 million passages: time, memory, queries a second",
    "detector": "VLP's, VinVL's and bottom-up attention's detectors, feature maps and whole, against PyTorch",
    "parsers": "what libraries read of documents, their time, memory and license, beside our readers",
    "rectangles": "whether passages of the PDFs in --data stand in the rectangles that they state",
    "folders": "passages found in five folders of --data, against docling, bm25s, sentence-transformers",
    "speculation": "steps of several tokens against steps of one, of SmolLM2 reading OpenStax",
    "follow_ups": "ways to search for the second question of a conversation, on Atlas in --data",
    "rollouts": "how long slots wait for a searcher's episodes, simulated from those in --data",
    "serve": "20 and 80 users of `mmqa serve` at once against the same asked one by one",
}
SIZES = ("small", "full")
_ON_DATA = (
    "input",
    "rectangles",
    "refusals",
    "citations",
    "evidence",
    "folders",
    "follow_ups",
    "rollouts",
)  # benches that can measure on a user's corpus
_COLUMNS = ("name", "ours", "peer", "ratio", "unit", "floor")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of `python -m tests.bench`.

    Attributes:
      rounds: how often each side is timed; None is the bench's own number.
      only: names of rows; empty is all.
      size: one of SIZES; None is the bench's choice for the device.
      data: folder of a prepared corpus to measure on; None is what the bench generates.
    """

    rounds: int | None = None
    only: tuple[str, ...] = ()
    size: str | None = None
    data: str | None = None

    def __post_init__(self):
        if self.rounds is not None and self.rounds < 1:
            raise UserError(f"--rounds={self.rounds}: at least 1 was expected; give more or none.")

    def chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The rows to measure, of a bench that has `names`.

        Raises:
          UserError: `only` names another.
        """
        for name in self.only:
            if name not in names:
                raise UserError(f"--only={name}: no such row; use one of {', '.join(names)}.")
        return tuple(name for name in names if not self.only or name in self.only)


def describe() -> str:
    """The benches with what they measure, as lines for the command's help."""
    return "\n".join(f"  {name:<18}{what}" for name, what in BENCHES.items())


def run_bench(name: str, options: Options) -> dict[str, Any]:
    """Runs one bench; returns what `--json` prints.

    Raises:
      UserError: `data` for a bench that generates its own.
    """
    if options.data is not None and name not in _ON_DATA:
        raise UserError(
            f"--data={options.data}: `tests.bench {name}` generates its data; leave it out."
        )
    return importlib.import_module(f"{__name__}.{name}").run(options)


def show(result: Mapping[str, Any]) -> None:
    """Prints the rows of a bench as a table on stdout."""
    import sys

    from rich.console import Console
    from rich.table import Table

    if "lines" in result:  # a table for a page
        print("\n".join(result["lines"]))
        return
    rows = result["rows"]
    more = dict.fromkeys(key for row in rows for key in row if key not in _COLUMNS)
    table = Table(title=f"{result['bench']}, {result['device']}", title_justify="left")
    columns = [*_COLUMNS, *more]
    for column in columns:
        numeric = not any(isinstance(row.get(column), str) for row in rows)
        justify = "right" if numeric else "left"
        table.add_column(
            column.replace("_", " "),
            justify=justify,
            overflow="fold",
            no_wrap=column in ("name", "work"),
        )
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    for sentence in result.get("left_out", ()):
        console.print(sentence, highlight=False)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return "–".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
