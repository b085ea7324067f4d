"""`python -m tests.bench wikipedia`: BM25 from disk at up to Wikipedia's size, on generated passages.

A row for each number of passages: indexing by `build_bm25` and searching the top 100, each in a
process of its own, so that its peak memory can be measured. Half of the queries are 2 to 8 words
drawn as those of the passages are, the other half questions with common words around such words.
The peer is BM25 in memory, up to 100,000 passages. A search takes one processor, `search_cpu_ms`
a query. `required` is what a row must reach. Besides, the
rate of the matrix product shows how fast the machine was.

--only=5M measures one number, --size=small the first two. 21M needs 23 GB in $TMPDIR: the passages'
file, 0.63 GB a million, and the index, 0.45 GB. This module loads no numerical library at import:
what a process holds counts as its children's.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.host import host_name
from tests.bench import Options
from tests.bench.runner import Case, measure, row_of, time_case
from tests.bench.timing import run_child

_DPR_PASSAGES = 21_015_324
PASSAGES = {"0.1M": 100_000, "1M": 1_000_000, "5M": 5_000_000, "21M": _DPR_PASSAGES}
_SMALL = ("0.1M", "1M")
_MATMUL = "matmul"
_IN_MEMORY = 100_000  # the most that BM25 in memory takes too: it needs 20 times the memory
_QUERIES, _TOP_K = 400, 100
_ROUNDS = 3
_GIB = 1 << 30
_RATE, _PEAK = 50.0, 8.0  # required: queries a second, GiB
_FORMS = ("what is the {} of {}", "who was {} in the {}", "where did {} and {} first meet", "{} {}")


def run(options: Options) -> dict[str, Any]:
    """Measures all numbers of passages, or those selected."""
    wanted = options.chosen((*PASSAGES, _MATMUL))
    if options.size == "small" and not options.only:
        wanted = (*_SMALL, _MATMUL)
    rounds = options.rounds or _ROUNDS
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        cases = _cases(Path(folder), wanted, rounds)
        return measure("wikipedia", cases, wanted, rounds, device=host_name())


def _cases(folder: Path, wanted: tuple[str, ...], rounds: int) -> Iterator[Case | dict[str, Any]]:
    """The rows; the passages of a number are the first of the largest number's file."""

    def step(name: str, passages: int) -> tuple[dict[str, Any], float]:
        """Runs one step in a process of its own: what it prints, and its peak in GiB."""
        arguments = json.dumps({"passages": passages, "rounds": rounds})
        child = run_child([sys.executable, "-m", __name__, name, str(folder), arguments])
        return json.loads(child.output.splitlines()[-1]), child.peak_bytes / _GIB

    numbers = [PASSAGES[name] for name in wanted if name in PASSAGES]
    if numbers:
        step("passages", max(numbers))
    for name in (name for name in wanted if name in PASSAGES):
        built, built_peak = step("index", PASSAGES[name])
        row, searched_peak = step("search", PASSAGES[name])
        yield {
            **row,
            "name": name,
            "passages": PASSAGES[name],
            **built,
            "index_peak_gib": round(built_peak, 2),
            "search_peak_gib": round(searched_peak, 2),
            "required": _RATE,
            "required_peak_gib": _PEAK,
        }
    if _MATMUL in wanted:
        yield {**step("matmul", 0)[0], "name": _MATMUL}


# The steps; each runs in its own process and returns what it prints as JSON.


def _passages(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    from tests.bench.synthetic_passages import write_passages

    write_passages(folder / "passages.tsv", sizes["passages"])
    return {}


def _texts(folder: Path, start: int = 0) -> Iterator[str]:
    """Title and text of every passage from a row on."""
    with open(folder / "passages.tsv", encoding="utf-8") as lines:
        for line in itertools.islice(lines, start + 1, None):
            _, text, title = line.rstrip("\n").split("\t")
            yield f"{title} {text[1:-1]}"


def _index(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    from mmqa_jax.retrieval.bm25.on_disk import build_bm25

    began, worked = time.perf_counter(), time.process_time()
    build_bm25(folder / "bm25", lambda row: _texts(folder, row), sizes["passages"], "bench")
    files = [path for path in (folder / "bm25").rglob("*") if path.is_file()]
    return {
        "index_s": round(time.perf_counter() - began, 2),
        "index_cpu_s": round(time.process_time() - worked, 1),
        "disk_gib": round(sum(path.stat().st_size for path in files) / _GIB, 2),
    }


def _search(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    from mmqa_jax.retrieval.bm25.on_disk import DiskBM25

    began = time.perf_counter()
    index = DiskBM25(folder / "bm25")
    opened, asked = time.perf_counter() - began, _queries(folder)
    peer = None
    if sizes["passages"] <= _IN_MEMORY:
        from mmqa_jax.retrieval.bm25.in_memory import BM25

        in_memory = BM25(list(itertools.islice(_texts(folder), sizes["passages"])))

        def peer() -> Any:
            return in_memory.search(asked, _TOP_K)

    case = Case(
        "search",
        "queries/s",
        lambda: index.search(asked, _TOP_K),
        peer,
        count=len(asked),
        notes={"open_s": round(opened, 1)},
    )
    row = row_of(*time_case(case, sizes["rounds"]))
    worked = time.process_time()
    index.search(asked, _TOP_K)
    worked = time.process_time() - worked
    return {**row, "search_cpu_ms": round(1e3 * worked / len(asked), 2)}


def _queries(folder: Path) -> list[str]:
    """Queries of the first passages' words."""
    import numpy as np

    rng = np.random.default_rng(1)
    drawn = np.array(" ".join(itertools.islice(_texts(folder), 5_000)).split())
    asked = []
    for number in range(_QUERIES):
        if number % 2:
            form = _FORMS[number // 2 % len(_FORMS)]
            asked.append(form.format(*rng.choice(drawn, 2).tolist()))
        else:
            asked.append(" ".join(rng.choice(drawn, rng.integers(2, 9)).tolist()))
    return asked


def _matmul(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    from tests.bench.runner import Peak

    peak = Peak(2048, "float32")
    peak.measure(sizes["rounds"])
    return {
        "name": _MATMUL,
        "ours": peak.best / 1e9,
        "peer": None,
        "ratio": None,
        "unit": "GFLOP/s",
        "floor": None,
    }


_STEPS = {"passages": _passages, "index": _index, "search": _search, "matmul": _matmul}


def _main(name: str, folder: str, sizes: str) -> None:
    print(json.dumps(_STEPS[name](Path(folder), json.loads(sizes))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
