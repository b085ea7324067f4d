"""`mmqa bench retrieval`: search at WebQA's size, all inputs made on the spot.

ScaNN against exact search on the same vectors and cores: share of the exact top 20 that it finds,
queries a second, and what building the index takes. BM25 over as many texts as WebQA has
snippets. Reading and decoding imgs.tsv against Pillow alone. `required` is what a row must reach
at full size, in `unit` (rows with a peer: the ratio); the floor of exact search is its matrix
product alone, that of ScaNN reading its codes at the memory's speed.

Every step runs in a process of its own, so that peaks of memory are told apart. This module loads
no numerical library at import: what a process holds counts as its children's.
"""

from __future__ import annotations

import concurrent.futures
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmqa_jax.bench import Options
from mmqa_jax.bench.timing import (
    interleave,
    processor_name,
    read_bandwidth,
    run_child,
    speed_ratio,
    threads,
)

ROWS = (
    *("scann_recall", "scann_search", "exact_search", "index_build", "index_memory"),
    *("bm25_search", "bm25_memory", "imgs_tsv"),
)
# WebQA's sources are 389,750 pictures and 544,489 snippets, 934,239 in all.
_SIZES = {
    "small": {"rows": 50_000, "dim": 512, "queries": 1000, "snippets": 30_000, "pictures": 200},
    "full": {"rows": 934_000, "dim": 512, "queries": 1000, "snippets": 544_489, "pictures": 2000},
}
_TOP_K = 20
_ROUNDS = 3
_NUMPY_BLOCK = 16_384  # vectors whose scores numpy holds at a time
_GIB = 1 << 30
_SECONDS, _BUILD_GIB, _BM25_GIB, _BM25_RATE = 900.0, 8.0, 4.0, 200.0  # required


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those asked for, at WebQA's size unless small is asked for."""
    return measure(_SIZES[options.size or "full"], options)


def measure(sizes: dict[str, int], options: Options) -> dict[str, Any]:
    """Measures with as many `rows`, `dim`, `queries`, `snippets` and `pictures` as `sizes` says;
    returns what `--json` prints."""
    from mmqa_jax.core.progress import Progress

    wanted = options.chosen(ROWS)
    rounds = options.rounds or _ROUNDS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:

        def step(name: str) -> tuple[dict[str, Any], float]:
            """Runs one step in a process of its own: what it prints, and its peak in GiB."""
            arguments = json.dumps({"folder": folder, "rounds": rounds, **sizes})
            child = run_child([sys.executable, "-m", __name__, name, arguments])
            return json.loads(child.output.splitlines()[-1]), child.peak_bytes / _GIB

        with Progress("Measuring retrieval", None, "steps") as progress:
            if any(name.startswith(("scann", "exact", "index")) for name in wanted):
                step("vectors")
                progress.advance()
                built, peak = step("build")
                progress.advance()
                rows += [
                    _limit("index_build", built["seconds"], "s", _SECONDS, built),
                    _limit("index_memory", peak, "GiB", _BUILD_GIB),
                ]
                rows += step("search")[0]["rows"]
                progress.advance()
            if any(name.startswith("bm25") for name in wanted):
                found, peak = step("bm25")
                progress.advance()
                rows += [*found["rows"], _limit("bm25_memory", peak, "GiB", _BM25_GIB)]
            if "imgs_tsv" in wanted:
                rows += step("pictures")[0]["rows"]
                progress.advance()
    if sizes["rows"] < _SIZES["full"]["rows"]:  # the smaller, the faster exact search
        for row in rows:
            row.pop("required", None)
    return {
        "bench": "retrieval",
        "device": f"{processor_name()}, {threads()} threads",
        **sizes,
        "rows": sorted(
            (row for row in rows if row["name"] in wanted), key=lambda row: ROWS.index(row["name"])
        ),
    }


def _row(name: str, ours: float, unit: str, **values: Any) -> dict[str, Any]:
    row = {"name": name, "ours": ours, "peer": None, "ratio": None, "unit": unit, "floor": None}
    return row | values


def _limit(
    name: str, ours: float, unit: str, most: float, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A row that must stay below `most`."""
    parameters = {key: value for key, value in (more or {}).items() if key != "seconds"}
    return _row(name, ours, unit, required=most, **parameters)


# The steps; each runs in its own process and returns what it prints as JSON.


def _vectors(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    import numpy as np

    from mmqa_jax.bench.retrieval_data import ClusteredVectors, write_vectors

    vectors = ClusteredVectors(sizes["rows"], sizes["dim"])
    write_vectors(folder / "vectors.npy", vectors)
    np.save(folder / "queries.npy", vectors.queries(sizes["queries"]))
    return {}


def _build(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    import dataclasses

    from mmqa_jax.retrieval.index import ScannIndex

    embeddings = _open_vectors(folder)
    began = time.perf_counter()
    index = ScannIndex.build(embeddings)
    index.save(folder / "index")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, **dataclasses.asdict(index.parameters)}


def _search(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    import numpy as np

    from mmqa_jax.retrieval.exact import ExactIndex
    from mmqa_jax.retrieval.index import load_index

    embeddings = _open_vectors(folder)
    queries = np.load(folder / "queries.npy")
    scann, exact = load_index(folder / "index", embeddings), ExactIndex(embeddings)
    vectors = np.array(embeddings.vectors)  # numpy's side has them in memory
    found, expected = scann.search(queries, _TOP_K)[0], exact.search(queries, _TOP_K)[0]
    recall = float(np.mean([np.isin(a, b).mean() for a, b in zip(expected, found, strict=True)]))
    sides = {
        "scann": lambda: scann.search(queries, _TOP_K),
        "exact": lambda: exact.search(queries, _TOP_K),
        "numpy": lambda: _numpy_search(vectors, queries),
        "product": lambda: _blocks(vectors, queries, lambda scores: None),
    }
    seconds = interleave(sides, sizes["rounds"])
    rate = {name: len(queries) / float(np.median(values)) for name, values in seconds.items()}
    fastest = max(("exact", "numpy"), key=lambda name: rate[name])
    speed = speed_ratio(seconds["scann"], seconds[fastest])
    against_numpy = speed_ratio(seconds["exact"], seconds["numpy"])
    parameters = scann.parameters
    share = parameters.leaves_to_search / parameters.leaves if parameters.leaves else 1.0
    # 4 bits for two dimensions, in two partitions, read for every query.
    code_bytes = share * vectors.size / 2 if parameters.leaves else vectors.nbytes
    codes = read_bandwidth() / code_bytes
    return {
        "rows": [
            _row(
                "scann_recall", recall, f"of the top {_TOP_K}", peer=1.0, ratio=recall,
                required=0.99,
            ),
            _row(
                "scann_search", rate["scann"], "queries/s", peer=rate[fastest], ratio=speed.median,
                floor=codes, required=20.0, low=speed.low, high=speed.high, peer_is=fastest,
            ),
            _row(
                "exact_search", rate["exact"], "queries/s", peer=rate["numpy"],
                ratio=against_numpy.median, floor=rate["product"], low=against_numpy.low,
                high=against_numpy.high, peer_is="numpy",
            ),
        ]
    }  # fmt: skip


def _bm25(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    from mmqa_jax.bench.retrieval_data import queries, snippets
    from mmqa_jax.retrieval.bm25 import BM25

    texts, asked = snippets(sizes["snippets"]), queries(sizes["queries"])
    began = time.perf_counter()
    index = BM25(texts)
    built = time.perf_counter() - began
    rates = []
    for _ in range(sizes["rounds"]):
        began = time.perf_counter()
        index.search(asked, _TOP_K)
        rates.append(len(asked) / (time.perf_counter() - began))
    rate = sorted(rates)[len(rates) // 2]
    return {
        "rows": [_row("bm25_search", rate, "queries/s", required=_BM25_RATE, build_seconds=built)]
    }


def _pictures(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    import io

    from PIL import Image

    from mmqa_jax.bench.retrieval_data import write_pictures
    from mmqa_jax.data.datasets.webqa import ImagesTsv
    from mmqa_jax.data.datasets.webqa_pictures import decoded_pictures

    encoded = write_pictures(folder, sizes["pictures"])
    pictures = ImagesTsv(folder / "imgs.tsv")

    def ours() -> None:
        for _ in decoded_pictures(pictures, workers=threads()):
            pass

    def decode(data: bytes) -> None:
        with Image.open(io.BytesIO(data)) as image:
            image.convert("RGB")

    pool = concurrent.futures.ThreadPoolExecutor(threads())

    def pillow() -> None:
        for _ in pool.map(decode, encoded):
            pass

    seconds = interleave({"ours": ours, "pillow": pillow}, sizes["rounds"])
    speed = speed_ratio(seconds["ours"], seconds["pillow"])
    rate = {
        name: len(encoded) / sorted(values)[len(values) // 2] for name, values in seconds.items()
    }
    return {
        "rows": [
            _row(
                "imgs_tsv", rate["ours"], "pictures/s", peer=rate["pillow"], ratio=speed.median,
                floor=rate["pillow"], required=0.8, low=speed.low, high=speed.high,
                peer_is="Pillow, bytes in memory",
            )
        ]
    }  # fmt: skip


def _open_vectors(folder: Path) -> Any:
    import numpy as np

    from mmqa_jax.retrieval.embeddings import Embeddings

    return Embeddings(np.load(folder / "vectors.npy", mmap_mode="r"), "bench", "bench")


def _numpy_search(vectors: Any, queries: Any) -> Any:
    """The top 20 with numpy alone: BLAS, then a partial sort of every block."""
    import numpy as np

    kept: list[tuple[Any, Any]] = []

    def keep(scores: Any) -> None:
        rows = np.argpartition(scores, -_TOP_K, axis=1)[:, -_TOP_K:]
        kept.append((rows, np.take_along_axis(scores, rows, axis=1)))

    sizes = _blocks(vectors, queries, keep)
    starts = np.cumsum([0, *sizes[:-1]])
    rows = np.concatenate([a + start for (a, _), start in zip(kept, starts, strict=True)], axis=1)
    scores = np.concatenate([b for _, b in kept], axis=1)
    best = np.argsort(-scores, axis=1)[:, :_TOP_K]
    return np.take_along_axis(rows, best, axis=1)


def _blocks(vectors: Any, queries: Any, each: Callable[[Any], None]) -> list[int]:
    """Gives the scores of all vectors to `each`, a block at a time; the blocks' sizes."""
    import numpy as np

    parts = np.array_split(vectors, max(1, len(vectors) // _NUMPY_BLOCK))  # views
    for part in parts:
        each(queries @ part.T)
    return [len(part) for part in parts]


_STEPS = {
    "vectors": _vectors,
    "build": _build,
    "search": _search,
    "bm25": _bm25,
    "pictures": _pictures,
}


def _main(name: str, arguments: str) -> None:
    sizes = json.loads(arguments)
    print(json.dumps(_STEPS[name](Path(sizes.pop("folder")), sizes)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
