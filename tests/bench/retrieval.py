"""`python -m tests.bench retrieval`: search at WebQA's size, on generated inputs.

ScaNN against exact search on the same vectors and cores: share of the exact top 20 that it finds,
queries a second, and what building the index takes. BM25 over as many texts as WebQA has
snippets; what making its index takes beside bm25s. One question by exact search over as many
vectors as one block holds, and over one more, beside numpy. MiniLM's texts, one question and twenty, beside
sentence-transformers. Of these the processor's time counts. `required` is what a row must reach
at full size, in `unit` (rows with a peer: the ratio); the floor of exact search is its matrix
product alone, that of ScaNN reading its codes at the memory's speed.

Every step runs in a process of its own, so that its peak memory can be measured. This module loads
no numerical library at import: what a process holds counts as its children's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.host import host_name, read_bandwidth
from tests.bench import Options
from tests.bench.runner import Case, measure, row_of, time_case
from tests.bench.timing import run_child

_BLOCK_ROWS = 65_536  # of ExactIndex
_BLOCKS = tuple(f"exact_{rows}" for rows in (_BLOCK_ROWS, _BLOCK_ROWS + 1))
ROWS = (
    *("scann_recall", "scann_search", "exact_search", "index_build", "index_memory"),
    *("bm25_search", "bm25_memory", "bm25_index"),
    *("embed_texts", "embed_question", "embed_questions"),
    *_BLOCKS,
)
# WebQA's sources are 389,750 pictures and 544,489 snippets, 934,239 in all.
_SIZES = {
    "small": {"rows": 50_000, "dim": 512, "queries": 1000, "snippets": 30_000},
    "full": {"rows": 934_000, "dim": 512, "queries": 1000, "snippets": 544_489},
}
_TOP_K = 20
_ROUNDS = 3
_INDEXED, _EMBEDDED, _ASKED = 30_000, 256, 20  # texts, texts and questions beside other libraries
_NUMPY_BLOCK = 16_384  # vectors whose scores numpy holds at a time
_GIB = 1 << 30
_SECONDS, _BUILD_GIB, _BM25_GIB, _BM25_RATE = 900.0, 8.0, 4.0, 200.0  # required


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected, at WebQA's size unless small is given."""
    return run_sizes(_SIZES[options.size or "full"], options)


def run_sizes(sizes: dict[str, int], options: Options) -> dict[str, Any]:
    """Measures with as many `rows`, `dim`, `queries` and `snippets` as `sizes` says;
    returns what `--json` prints."""
    wanted = options.chosen(ROWS)
    rounds = options.rounds or _ROUNDS
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        cases = _cases(folder, sizes, wanted, rounds)
        return measure("retrieval", cases, wanted, rounds, device=host_name(), **sizes)


def _cases(
    folder: str, sizes: dict[str, int], wanted: tuple[str, ...], rounds: int
) -> Iterator[Case | dict[str, Any]]:
    """The rows of the steps that are needed for those `wanted`."""

    def step(name: str) -> tuple[Any, float]:
        """Runs one step in a process of its own: what it prints, and its peak in GiB."""
        arguments = json.dumps({"folder": folder, "rounds": rounds, **sizes})
        child = run_child([sys.executable, "-m", __name__, name, arguments])
        return json.loads(child.output.splitlines()[-1]), child.peak_bytes / _GIB

    if any(name.startswith(("scann", "exact", "index")) for name in wanted if name not in _BLOCKS):
        step("vectors")
        built, peak = step("build")
        seconds = built.pop("seconds")
        yield Case("index_build", "s", seconds, notes=_required(sizes, _SECONDS) | built)
        yield Case("index_memory", "GiB", peak, notes=_required(sizes, _BUILD_GIB))
        yield from step("search")[0]
    if "bm25_index" in wanted:
        yield from step("bm25_index")[0]
    if any(name.startswith("embed") for name in wanted):
        yield from step("embed")[0]
    if any(name in _BLOCKS for name in wanted):
        yield from step("blocks")[0]
    if any(name in wanted for name in ("bm25_search", "bm25_memory")):
        rows, peak = step("bm25")
        yield from rows
        yield Case("bm25_memory", "GiB", peak, notes=_required(sizes, _BM25_GIB))


def _required(sizes: dict[str, int], value: float) -> dict[str, float]:
    """Asked of the full size only: the smaller the collection, the faster exact search."""
    return {"required": value} if sizes["rows"] >= _SIZES["full"]["rows"] else {}


# The steps; each runs in its own process and returns what it prints as JSON.


def _timed(case: Case, sizes: dict[str, int]) -> dict[str, Any]:
    return row_of(*time_case(case, sizes["rounds"]))


def _vectors(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    import numpy as np

    from tests.bench.retrieval_data import ClusteredVectors, write_vectors

    vectors = ClusteredVectors(sizes["rows"], sizes["dim"])
    write_vectors(folder / "vectors.npy", vectors)
    np.save(folder / "queries.npy", vectors.queries(sizes["queries"]))
    return {}


def _build(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    import dataclasses

    from mmqa_jax.retrieval.indexes.index import ScannIndex

    embeddings = _open_vectors(folder)
    began = time.perf_counter()
    index = ScannIndex.build(embeddings)
    index.save(folder / "index")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, **dataclasses.asdict(index.parameters)}


def _search(folder: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    import numpy as np

    from mmqa_jax.retrieval.indexes.exact import ExactIndex
    from mmqa_jax.retrieval.indexes.index import load_index

    embeddings = _open_vectors(folder)
    queries = np.load(folder / "queries.npy")
    scann, exact = load_index(folder / "index", embeddings), ExactIndex(embeddings)
    vectors = np.array(embeddings.vectors)  # numpy's side has them in memory
    rows, expected = scann.search(queries, _TOP_K)[0], exact.search(queries, _TOP_K)[0]
    recall = float(np.mean([np.isin(a, b).mean() for a, b in zip(expected, rows, strict=True)]))
    parameters = scann.parameters
    share = parameters.leaves_to_search / parameters.leaves if parameters.leaves else 1.0
    # 4 bits for two dimensions, in two partitions, read for every query.
    code_bytes = share * vectors.size / 2 if parameters.leaves else vectors.nbytes
    peers = {
        "exact": lambda: exact.search(queries, _TOP_K),
        "numpy": lambda: _numpy_search(vectors, queries),
    }
    against_numpy = _timed(
        Case(
            "exact_search",
            "queries/s",
            peers["exact"],
            peers["numpy"],
            count=len(queries),
            floor=lambda: _blocks(vectors, queries, lambda scores: None),
            notes={"peer_is": "numpy"},
        ),
        sizes,
    )
    faster = "exact" if against_numpy["ours"] > against_numpy["peer"] else "numpy"
    against_exact = _timed(
        Case(
            "scann_search",
            "queries/s",
            lambda: scann.search(queries, _TOP_K),
            peers[faster],
            count=len(queries),
            floor=read_bandwidth() / code_bytes,
            notes={"peer_is": faster, **_required(sizes, 20.0)},
        ),
        sizes,
    )
    unit = f"of the top {_TOP_K}"
    case = Case("scann_recall", unit, recall, 1.0, notes=_required(sizes, 0.99))
    return [row_of(case, {}), against_exact, against_numpy]


def _bm25(folder: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    from mmqa_jax.retrieval.bm25.in_memory import BM25
    from tests.bench.retrieval_data import queries, snippets

    texts, questions = snippets(sizes["snippets"]), queries(sizes["queries"])
    began = time.perf_counter()
    index = BM25(texts)
    built = time.perf_counter() - began
    case = Case(
        "bm25_search",
        "queries/s",
        lambda: index.search(questions, _TOP_K),
        count=len(questions),
        notes={**_required(sizes, _BM25_RATE), "build_seconds": built},
    )
    return [_timed(case, sizes)]


def _bm25_index(folder: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    import bm25s

    from mmqa_jax.retrieval.bm25.in_memory import BM25
    from tests.bench.retrieval_data import snippets

    texts = snippets(_INDEXED)

    def by_bm25s() -> None:
        words = bm25s.tokenize(texts, stopwords="en", show_progress=False)
        bm25s.BM25().index(words, show_progress=False)

    work = {"ours": lambda: BM25(texts), "peer": by_bm25s}
    row = Case("bm25_index", "texts/s", count=len(texts), clock=time.process_time, **work)
    return [_timed(row, sizes)]


def _embed(folder: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    import os

    import torch
    from sentence_transformers import SentenceTransformer

    from mmqa_jax.retrieval.text_encoder import load_minilm_embedder
    from mmqa_jax.weights.bundled import minilm_path
    from tests.bench.retrieval_data import queries, snippets

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ours, peer = load_minilm_embedder(), SentenceTransformer(str(minilm_path()), device="cpu")
    asked = queries(_ASKED)
    rows = []
    for name, texts in (
        ("embed_texts", snippets(_EMBEDDED)),
        ("embed_question", asked[:1]),
        ("embed_questions", asked),
    ):
        case = Case(
            name,
            "texts/s",
            lambda texts=texts: ours.embed_texts(texts),
            lambda texts=texts: peer.encode(
                texts, normalize_embeddings=True, convert_to_tensor=True, show_progress_bar=False
            ),
            count=len(texts),
            clock=time.process_time,
            agreement=1e-5,
            notes={"tokens_of_real": _padding(ours, texts)},
        )
        rows.append(_timed(case, sizes))
    return rows


def _of_blocks(folder: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    import numpy as np

    from mmqa_jax.retrieval.embeddings import Embeddings
    from mmqa_jax.retrieval.indexes.exact import ExactIndex

    vectors = np.random.default_rng(0).standard_normal((_BLOCK_ROWS + 1, 384), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    question, rows = vectors[:1], []
    for count in (_BLOCK_ROWS, _BLOCK_ROWS + 1):
        index = ExactIndex(Embeddings(vectors[:count], "bench", "bench"))
        case = Case(
            f"exact_{count}",
            "queries/s",
            lambda index=index: index.search(question, _TOP_K),
            lambda count=count: _numpy_search(vectors[:count], question),
            clock=time.process_time,
            notes={"peer_is": "numpy"},
        )
        rows.append(_timed(case, sizes))
    return rows


def _padding(embedder: Any, texts: list[str]) -> float:
    """Tokens that are computed for each token of a text."""
    batches = list(embedder._text_batches(texts, ""))
    real = sum(mask[: len(rows)].sum() for rows, _, mask in batches)
    return round(float(sum(ids.size for _, ids, _ in batches) / real), 3)


def _open_vectors(folder: Path) -> Any:
    import numpy as np

    from mmqa_jax.retrieval.embeddings import Embeddings

    return Embeddings(np.load(folder / "vectors.npy", mmap_mode="r"), "bench", "bench")


def _numpy_search(vectors: Any, queries: Any) -> Any:
    """The top 20 with numpy alone: BLAS, then a partial sort of every block."""
    import numpy as np

    results: list[tuple[Any, Any]] = []

    def keep(scores: Any) -> None:
        rows = np.argpartition(scores, -_TOP_K, axis=1)[:, -_TOP_K:]
        results.append((rows, np.take_along_axis(scores, rows, axis=1)))

    sizes = _blocks(vectors, queries, keep)
    starts = np.cumsum([0, *sizes[:-1]])
    rows = np.concatenate(
        [a + start for (a, _), start in zip(results, starts, strict=True)], axis=1
    )
    scores = np.concatenate([b for _, b in results], axis=1)
    best = np.argsort(-scores, axis=1)[:, :_TOP_K]
    return np.take_along_axis(rows, best, axis=1)


def _blocks(vectors: Any, queries: Any, each: Callable[[Any], None]) -> list[int]:
    """Calls `each` with the scores of a block of vectors at a time; returns the blocks' sizes."""
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
    "bm25_index": _bm25_index,
    "embed": _embed,
    "blocks": _of_blocks,
}


def _main(name: str, arguments: str) -> None:
    sizes = json.loads(arguments)
    print(json.dumps(_STEPS[name](Path(sizes.pop("folder")), sizes)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
