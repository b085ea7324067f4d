"""`python -m tests.bench neighbors`: approximate search over a trained encoder's vectors.

MiniLM's vectors of 200,000 pieces of real sentences: OpenStax's books, captions of COCO, lectures
of ScienceQA (../shared/data) and the World Factbook. The queries are questions of OK-VQA and
OpenStax. A row is an index and how much of it is searched: `ours` are queries a second of a
processor, `recall` the share of the exact top 10 that it finds of every second question (`val_recall`
of the others, by which defaults are chosen), `build_s` the processor's seconds that building took,
`mib` the index as it is written, vectors included. ScaNN's parameters are those of `mmqa index` but for the partitions searched;
FAISS's inverted lists hold whole vectors in as many partitions, its graph (HNSW) has 32 neighbors a
node. There are no peers beside a row: the rows are each other's.

Vectors are kept in the cache: a second run embeds nothing.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.host import cache_dir, host_name
from tests.bench import Options
from tests.bench.runner import Case, measure
from tests.shared_data import SHARED

_SIZES = {"small": 30_000, "full": 200_000}  # texts
_QUERIES = 1_000
_TOP_K = 10
_WORDS = range(4, 10)  # of a text, most of which have at most 16 tokens
_ROUNDS = 3
_SCANN = (5, 10, 19, 40, 61, 90, 150)  # partitions searched
_LISTS = (5, 10, 20, 40, 80, 160)
_GRAPH = (16, 32, 64, 128, 256)  # efSearch
_EXACT = "exact"
ROWS = (
    _EXACT,
    *(f"scann_{leaves}" for leaves in _SCANN),
    *(f"ivf_{leaves}" for leaves in _LISTS),
    *(f"hnsw_{width}" for width in _GRAPH),
)


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected, over 200,000 texts unless small is given."""
    wanted = options.chosen(ROWS)
    vectors, queries = _vectors(_SIZES[options.size or "full"])
    rounds = options.rounds or _ROUNDS
    cases = _cases(vectors, queries, wanted)
    facts = {"texts": len(vectors), "queries": len(queries)}
    return measure("neighbors", cases, wanted, rounds, device=host_name(), **facts)


def _vectors(count: int) -> tuple[np.ndarray, np.ndarray]:
    """MiniLM's vectors of texts, float32[count, 384], and of questions.

    It computes in bfloat16, in a third of the time where the processor multiplies it; a text's
    vector has a cosine of .9999 with the one in float32.
    """
    from mmqa_jax.retrieval.embeddings import cached_vectors
    from mmqa_jax.retrieval.text_encoder import load_minilm_embedder

    embedder = load_minilm_embedder(batch_size=128, dtype="bfloat16")

    def embedded(of_side: list[str]) -> np.ndarray:
        def embed(rows: np.ndarray) -> np.ndarray:
            return embedder.embed_passages([of_side[row] for row in rows])

        return cached_vectors(
            cache_dir() / "vectors", f"text {embedder.fingerprint}", of_side, embed
        )

    return embedded(drawn(texts(), count)), embedded(drawn(questions(), _QUERIES))


def drawn(candidates: Iterable[str], count: int) -> list[str]:
    """At most `count` different texts, in an order that is drawn."""
    different = list(dict.fromkeys(candidates))
    order = np.random.default_rng(0).permutation(len(different))
    return [different[row] for row in order[:count]]


def texts() -> Iterator[str]:
    """Pieces of sentences, of at most 9 words."""
    from mmqa_jax.data.atlas.factbook import factbook_dir

    for line in (SHARED / "openstax/sources.jsonl").open(encoding="utf-8"):
        yield from _pieces(json.loads(line)["text"])
    with (SHARED / "okvqa/vinvl_captions_val2014.tsv").open(encoding="utf-8") as file:
        for _, captions in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield from (caption["caption"] for caption in json.loads(captions))
    problems = json.loads((SHARED / "scienceqa/problems_subset.json").read_text("utf-8"))
    for problem in problems.values():
        yield from _pieces(f"{problem['lecture']} {problem['solution']}")
    for path in sorted(factbook_dir().rglob("*.json")):
        for text in _leaves(json.loads(path.read_text("utf-8"))):
            yield from _pieces(re.sub("<[^>]+>", " ", text))


def questions() -> Iterator[str]:
    """Of people about pictures, and of the books."""
    asked = json.loads(
        (SHARED / "okvqa/OpenEnded_mscoco_val2014_questions.json").read_text("utf-8")
    )
    yield from (question["question"] for question in asked["questions"])
    for line in (SHARED / "openstax/questions.jsonl").open(encoding="utf-8"):
        yield json.loads(line)["question"]


def _pieces(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?;:])\s+", text):
        words = sentence.split()
        for start in range(0, len(words), _WORDS[-1]):
            piece = words[start : start + _WORDS[-1]]
            if len(piece) in _WORDS:
                yield " ".join(piece)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)


Search = Callable[[], np.ndarray]  # -> rows [queries, _TOP_K]


def _cases(vectors: np.ndarray, queries: np.ndarray, wanted: tuple[str, ...]) -> Iterator[Case]:
    from mmqa_jax.retrieval.embeddings import Embeddings
    from mmqa_jax.retrieval.indexes.exact import ExactIndex

    embeddings = Embeddings(vectors, "bench", "bench")
    exact = ExactIndex(embeddings)
    expected = exact.search(queries, _TOP_K)[0]
    yield _case(_EXACT, lambda: exact.search(queries, _TOP_K)[0], expected)
    for kind, searches in (("scann", _scann), ("ivf", _lists), ("hnsw", _graph)):
        if any(name.startswith(kind) for name in wanted):
            by_width, facts = searches(embeddings, queries)
            for width, search in by_width.items():
                if f"{kind}_{width}" in wanted:
                    yield _case(f"{kind}_{width}", search, expected, **facts)


def _case(name: str, search: Search, expected: np.ndarray, **facts: Any) -> Case:
    pairs = zip(search(), expected, strict=True)
    recalls = np.array([np.isin(rows, best).mean() for rows, best in pairs])
    halves = {"val_recall": recalls[::2], "recall": recalls[1::2]}
    notes = {half: round(float(of.mean()), 4) for half, of in halves.items()} | facts
    clock = time.process_time
    return Case(name, "queries/s", search, count=len(expected), notes=notes, clock=clock)


def _built(build: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the processor's seconds that it took."""
    began = time.process_time()
    index = build()
    return index, time.process_time() - began


def _facts(seconds: float, size: int) -> dict[str, Any]:
    return {"build_s": round(seconds, 1), "mib": round(size / 2**20)}


def _scann(embeddings: Any, queries: np.ndarray) -> tuple[dict[int, Search], dict[str, Any]]:
    from mmqa_jax.retrieval.indexes.index import ScannIndex, write_scann

    index, seconds = _built(lambda: ScannIndex.build(embeddings))
    chosen = index.parameters
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        write_scann(index._searcher, Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())

    def search(leaves: int) -> Search:
        parameters = dataclasses.replace(chosen, leaves_to_search=leaves)
        narrowed = ScannIndex(embeddings, index._searcher, parameters)
        return lambda: narrowed.search(queries, _TOP_K)[0]

    facts = {"leaves": chosen.leaves, "default": chosen.leaves_to_search}
    return {leaves: search(leaves) for leaves in _SCANN}, facts | _facts(seconds, size)


def _lists(embeddings: Any, queries: np.ndarray) -> tuple[dict[int, Search], dict[str, Any]]:
    import faiss

    from mmqa_jax.retrieval.indexes.index import ScannParameters

    rows, dim = embeddings.vectors.shape
    leaves = ScannParameters.for_rows(rows).leaves
    index = faiss.index_factory(dim, f"IVF{leaves},Flat", faiss.METRIC_INNER_PRODUCT)

    def build() -> None:
        index.train(embeddings.vectors)
        index.add(embeddings.vectors)

    _, seconds = _built(build)

    def search(width: int) -> Search:
        parameters = faiss.SearchParametersIVF(nprobe=width)
        return lambda: index.search(queries, _TOP_K, params=parameters)[1]

    facts = _facts(seconds, faiss.serialize_index(index).nbytes)
    return {width: search(width) for width in _LISTS}, {"leaves": leaves} | facts


def _graph(embeddings: Any, queries: np.ndarray) -> tuple[dict[int, Search], dict[str, Any]]:
    import faiss

    dim = embeddings.vectors.shape[1]
    index = faiss.index_factory(dim, "HNSW32,Flat", faiss.METRIC_INNER_PRODUCT)
    _, seconds = _built(lambda: index.add(embeddings.vectors))

    def search(width: int) -> Search:
        parameters = faiss.SearchParametersHNSW(efSearch=width)
        return lambda: index.search(queries, _TOP_K, params=parameters)[1]

    facts = _facts(seconds, faiss.serialize_index(index).nbytes)
    return {width: search(width) for width in _GRAPH}, facts
