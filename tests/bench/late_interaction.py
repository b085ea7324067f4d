"""`python -m tests.bench late_interaction`: MaxSim over the vectors of tokens, beside fast-plaid.

The documents are pieces of at most nine words of real texts, the queries questions, those of the
bench `neighbors`. The vectors are MiniLM's last states, which its principal components take to 128 values, the width of
ColBERT, of length 1: a folder of a late-interaction encoder is written, and opened as any other.

A row is a way to search. `ours` are queries a second of a processor and `wall` queries a second on
all of them; `recall` is the share of the exact top 10 by MaxSim of vectors in float32 that it finds
of every second query (`val_recall` of the others, by which defaults are chosen); `build_s` are the
processor's seconds that building took, `mib` is what lies on the disk. `maxsim` scores every
document. `tokens_N` ranks by MaxSim the N whose tokens ScaNN finds near to a query's (800 is what
`mmqa search` does), `candidates_N` the N that ScaNN finds by MUVERA's fixed vectors. `fast_plaid_N` is fast-plaid with N clusters probed a token (8 is its
default), where `MMQA_FAST_PLAID` names a Python that has it.

Vectors are kept in the cache, block by block: a second run embeds nothing, an interrupted one what
is missing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.host import cache_dir, host_name
from tests.bench import Options
from tests.bench.neighbors import drawn, questions, texts
from tests.bench.runner import Case, measure

_SIZES = {"small": 20_000, "full": 100_000}  # documents
_QUERIES = 100
_TOP_K = 10
_DIM = 128
_QUERY_LENGTH = 32  # tokens of a query, as ColBERT cuts them
_SAMPLE = 2_000  # documents whose tokens give the principal components
_BATCH = 64  # texts that are encoded together
_BLOCK = 5_000  # documents of a file
_TOGETHER = 1_000  # documents that are scored together for the exact ranking
_ROUNDS = 3
_CANDIDATES = (200, 400, 800, 1600)
_PROBES = (4, 8, 16, 32)
_EXACT = "maxsim"
ROWS = (
    _EXACT,
    *(f"tokens_{count}" for count in _CANDIDATES),
    *(f"candidates_{count}" for count in _CANDIDATES),
    *(f"fast_plaid_{probes}" for probes in _PROBES),
)
PEER = "MMQA_FAST_PLAID"
_LEFT_OUT = f"fast-plaid is left out: {PEER} names no Python that has it (pip install fast-plaid)."


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected, over 100,000 documents unless small is given."""
    wanted = options.chosen(ROWS)
    python = os.environ.get(PEER)
    if not python:
        wanted = tuple(name for name in wanted if not name.startswith("fast_plaid"))
    count = _SIZES[options.size or "full"]
    vectors = _vectors(count)
    tokens = len(vectors.documents.tokens)
    facts = {"documents": count, "tokens": tokens, "queries": _QUERIES, "dim": _DIM}
    facts |= {} if python else {"left_out": [_LEFT_OUT]}
    cases = _cases(vectors, wanted, python)
    rounds = options.rounds or _ROUNDS
    return measure("late_interaction", cases, wanted, rounds, device=host_name(), **facts)


class Tokens(NamedTuple):
    """The vectors of the tokens of many texts.

    Attributes:
      tokens: float32 [T, D], those of a text together.
      counts: int64 [texts], the tokens of each.
      fixed: float32 [texts, F], their fixed vectors.
    """

    tokens: np.ndarray
    counts: np.ndarray
    fixed: np.ndarray


class Vectors(NamedTuple):
    """What is searched, and what is asked."""

    documents: Tokens
    queries: Tokens


def _vectors(count: int) -> Vectors:
    """The vectors of `count` documents and of the queries, which the cache keeps block by block."""
    from mmqa_jax.retrieval.late_interaction import load_late_interaction_embedder

    folder = cache_dir() / "bench_late_interaction"
    folder.mkdir(parents=True, exist_ok=True)
    documents, queries = drawn(texts(), max(_SIZES.values())), drawn(questions(), _QUERIES)
    blocks = [documents[start : start + _BLOCK] for start in range(0, count, _BLOCK)]
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as temporary:
        encoder = Path(temporary)
        _write_encoder(encoder, None)
        file = folder / "components.npy"
        if not file.exists():
            whole = load_late_interaction_embedder(encoder, batch_size=_BATCH)
            sample = _encoded(whole, documents[:_SAMPLE], "document").tokens
            # Products of unit vectors are to stay, so that nothing is centred.
            np.save(file, np.linalg.eigh(sample.T @ sample)[1][:, : -_DIM - 1 : -1].T)
        _write_encoder(encoder, np.load(file))
        embedder = load_late_interaction_embedder(encoder, batch_size=_BATCH)

        def kept(name: str, of_block: list[str], side: str) -> Tokens:
            if not (file := folder / f"{name}.npz").exists():
                np.savez(file, **_encoded(embedder, of_block, side)._asdict())
            with np.load(file) as arrays:
                return Tokens(**arrays)

        encoded = [kept(f"document_{n}", block, "document") for n, block in enumerate(blocks)]
        return Vectors(
            Tokens(*map(np.concatenate, zip(*encoded, strict=True))),
            kept(f"query_{_QUERY_LENGTH}", queries, "query"),
        )


def _encoded(embedder: Any, of_side: list[str], side: str) -> Tokens:
    fixed = np.zeros((len(of_side), embedder.dim), np.float32)
    tokens: list[np.ndarray] = [np.zeros(0)] * len(of_side)
    for batch in embedder.encode_tokens(of_side, side):
        fixed[batch.places] = batch.fixed
        for place, vectors in zip(batch.places, batch.tokens, strict=True):
            tokens[place] = vectors
    return Tokens(np.concatenate(tokens), np.array(list(map(len, tokens)), np.int64), fixed)


def _write_encoder(folder: Path, components: np.ndarray | None) -> None:
    """Writes MiniLM as a late-interaction encoder, whose states `components` [D, 384] project."""
    from safetensors.numpy import save_file

    from mmqa_jax.weights.bundled import minilm_path

    for file in minilm_path().iterdir():
        if file.is_file() and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    layers = [("Transformer", "")]
    if components is not None:
        layers.append(("Dense", "1_Dense"))
        (folder / "1_Dense").mkdir()
        width, states = components.shape
        dense = {"in_features": states, "out_features": width, "bias": False}
        dense["activation_function"] = "torch.nn.modules.linear.Identity"
        dense |= {"module_input_name": "token_embeddings", "module_output_name": None}
        (folder / "1_Dense/config.json").write_text(json.dumps(dense))
        weights = {"linear.weight": np.ascontiguousarray(components, np.float32)}
        save_file(weights, folder / "1_Dense/model.safetensors")
    layers.append(("Normalize", "2_Normalize"))
    library = "sentence_transformers.models"
    modules = [{"type": f"{library}.{kind}", "path": place} for kind, place in layers]
    for name, content in (
        ("modules.json", modules),
        ("config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"}),
        ("sentence_bert_config.json", {"max_seq_length": 256, "query_length": _QUERY_LENGTH}),
    ):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps(content))


def _cases(vectors: Vectors, wanted: tuple[str, ...], python: str | None) -> Iterator[Case]:
    from mmqa_jax.retrieval.embeddings import Embeddings, TokenFormat, TokenVectors
    from mmqa_jax.retrieval.indexes.exact import ExactIndex
    from mmqa_jax.retrieval.indexes.index import ScannIndex, TokenIndex, write_scann
    from mmqa_jax.retrieval.indexes.max_sim import MaxSimIndex, pack_queries

    documents, asked = vectors
    form = TokenFormat()
    began = time.process_time()
    stored = TokenVectors(form.encode(documents.tokens), np.cumsum(documents.counts), _DIM, form)
    encoded_s = time.process_time() - began
    embeddings = Embeddings(documents.fixed, "bench", "bench", stored)
    of_queries = np.split(asked.tokens, np.cumsum(asked.counts)[:-1])
    queries = pack_queries(asked.fixed, of_queries, mean=False)
    expected = _exact(documents, asked)
    exhaustive = MaxSimIndex(ExactIndex(embeddings), stored, exhaustive=True)
    token_bytes = stored.codes.nbytes + stored.ends.nbytes
    facts = _facts(encoded_s, token_bytes)
    if _EXACT in wanted:
        yield _case(_EXACT, lambda: exhaustive.search(queries, _TOP_K)[0], expected, facts)
    if counts := [count for count in _CANDIDATES if f"tokens_{count}" in wanted]:
        began = time.process_time()
        near = TokenIndex.build(embeddings)
        seconds = time.process_time() - began + encoded_s
        with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as temporary:
            near.save(Path(temporary) / "index")
            files = list((Path(temporary) / "index").iterdir())
            size = sum(file.stat().st_size for file in files)
        facts = _facts(seconds, size + token_bytes)
        for count in counts:

            def search(count: int = count) -> np.ndarray:
                rows = near._find(*near._split(queries), count, None)
                return near.search_within(queries, rows, _TOP_K)[0]

            yield _case(f"tokens_{count}", search, expected, facts)
    if counts := [count for count in _CANDIDATES if f"candidates_{count}" in wanted]:
        began = time.process_time()
        scann = ScannIndex.build(embeddings)
        seconds = time.process_time() - began + encoded_s
        ranked = MaxSimIndex(scann, stored)
        with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as temporary:
            write_scann(scann._searcher, Path(temporary))
            size = sum(file.stat().st_size for file in Path(temporary).iterdir())
        facts = _facts(seconds, size + documents.fixed.nbytes + token_bytes)
        for count in counts:

            def search(count: int = count) -> np.ndarray:
                rows, _ = scann.search(asked.fixed, count)
                return ranked.search_within(queries, rows, _TOP_K)[0]

            yield _case(f"candidates_{count}", search, expected, facts)
    if probes := [number for number in _PROBES if f"fast_plaid_{number}" in wanted]:
        with FastPlaid(python, vectors) as peer:
            for number in probes:
                yield peer.case(number, expected)


def _facts(seconds: float, size: int) -> dict[str, Any]:
    return {"build_s": round(seconds, 1), "mib": round(size / 2**20)}


def _case(
    name: str,
    search: Callable[[], np.ndarray],
    expected: np.ndarray,
    facts: dict[str, Any],
    clock: Callable[[], float] = time.process_time,
) -> Case:
    recalls = [np.isin(*pair).mean() for pair in zip(search(), expected, strict=True)]
    halves = {"val_recall": recalls[::2], "recall": recalls[1::2]}
    found = {half: round(float(np.mean(values)), 4) for half, values in halves.items()}
    walls = []

    def timed() -> None:
        began = time.perf_counter()
        search()
        walls.append(len(expected) / (time.perf_counter() - began))

    return Case(
        name,
        "queries/s",
        timed,
        count=len(expected),
        notes=found | facts,
        late_notes=lambda: {"wall": round(statistics.median(walls), 2)},
        clock=clock,
        repeat=False,
    )


def _exact(documents: Tokens, queries: Tokens) -> np.ndarray:
    """The rows of the exact top 10 by MaxSim in float32, [queries, _TOP_K]."""
    ends = np.cumsum(documents.counts)
    of_query = np.cumsum(queries.counts) - queries.counts
    scores = []
    for start in range(0, len(ends), _TOGETHER):
        first = ends[start - 1] if start else 0
        behind = ends[start : start + _TOGETHER]
        products = documents.tokens[first : behind[-1]] @ queries.tokens.T  # [T, query tokens]
        best = np.maximum.reduceat(products, np.r_[0, behind[:-1] - first])
        scores.append(np.add.reduceat(best, of_query, axis=1))
    return np.argsort(-np.concatenate(scores), axis=0, kind="stable")[:_TOP_K].T


class FastPlaid:
    """A process of fast-plaid's Python, and a folder that holds the vectors for it."""

    def __init__(self, python: str, vectors: Vectors):
        self._processor_seconds = 0.0
        self._temporary = tempfile.TemporaryDirectory(prefix="mmqa-bench-")
        self._folder = folder = Path(self._temporary.name)
        for name, side in (("document", vectors.documents), ("query", vectors.queries)):
            np.save(folder / f"{name}_tokens.npy", side.tokens)
            np.save(folder / f"{name}_counts.npy", side.counts)
        script = Path(__file__).with_name("fast_plaid_side.py")
        self._process = subprocess.Popen(
            [python, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        built = self._ask(command="create")
        self._facts = _facts(built["processor_seconds"], built["bytes"])

    def __enter__(self) -> FastPlaid:
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._temporary.cleanup()

    def case(self, probes: int, expected: np.ndarray) -> Case:
        """The row of a number of probed clusters."""

        def search() -> np.ndarray:
            self._ask(command="search", top_k=_TOP_K, probes=probes, out="plaid.npy")
            return np.load(self._folder / "plaid.npy")

        return _case(f"fast_plaid_{probes}", search, expected, self._facts, self._clock)

    def _clock(self) -> float:
        return self._processor_seconds

    def _ask(self, **command: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RunError(f"{PEER}: fast-plaid's process ended; see its message above.")
        answered = json.loads(reply)
        self._processor_seconds += answered["processor_seconds"]
        return answered
