"""What tests/resume/flips.py damages; to add one, write its Target and name it in TARGETS."""

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tiny_run
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from mmqa_jax.core.checkpoints.checkpoint import Checkpoints
from mmqa_jax.core.chunks import Job, Part, Shard
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.store import Store
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.records.grid_records import GridRecords, write_grids
from mmqa_jax.decoding.requests import Candidate, Result
from mmqa_jax.prompting.backends import Completion, Usage
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.retrieval.embeddings import (
    Embeddings,
    cached_vectors,
    open_embeddings,
    write_embeddings,
)
from mmqa_jax.retrieval.indexes.index import (
    ScannParameters,
    build_index,
    load_index,
    scann_available,
)
from mmqa_jax.runs.merging import merge_parts
from mmqa_jax.tasks.modality import load_question_classifier
from mmqa_jax.training.loop import CLOCK_COLUMNS
from mmqa_jax.weights.folder import load_converted, load_weights, read_record, replace_trained
from mmqa_jax.weights.record import read_metadata

sys.path += [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parent)]
import cli_runs
import tiny_checkpoints
from flips import Target

OLD, NEW = 10, 20
PARTS, ROWS, DIM = "found.jsonl.parts", 300, 8


def digest(*values: Any) -> str:
    """Of pytrees of arrays, bit by bit, and of other values by what they print."""
    found = hashlib.sha256()
    for value in values:
        for name, leaf in flatten_named({"value": value}).items():
            array = isinstance(leaf, jax.Array | np.ndarray)
            found.update(f"{name} {leaf.dtype} {leaf.shape}".encode() if array else b"")
            found.update(np.asarray(leaf).tobytes() if array else repr(leaf).encode())
    return found.hexdigest()


def _arrays(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    params = {"kernel": rng.normal(size=(40, 30)).astype("f4"), "bias": np.full(7, step, "f4")}
    train = {"step": np.int32(step), "moment": rng.normal(size=(40, 30)).astype("f4")}
    return jax.tree.map(jax.numpy.asarray, {"params": params, "train": train})


def _save_steps(folder: Path) -> None:
    """Two checkpoints: the older is the better, the newer the one to resume from."""
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        for step in (OLD, NEW):
            batches = tiny_run.pipeline()
            for _ in range(step):
                next(batches)
            meta = {"seed": 7, "window": {"sums": {"loss": step / 3}, "count": 2}}
            checkpoints.save(step, **_arrays(step), iterator=batches, meta=meta, score=1 / step)
            checkpoints.wait()


def _restore(folder: Path) -> str:
    batches = tiny_run.pipeline()
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        found = checkpoints.restore_latest(**_arrays(0), iterator=batches)
        best = checkpoints.best()
    return digest(found.params, found.train, found.meta, found.step, best, batches.get_state())


def _stop_run(folder: Path) -> None:
    """A run that was stopped after its best step: checkpoints, and the folder best."""
    batches = tiny_run.Watched(tiny_run.pipeline(), 35, tiny_run.raise_signal(15))
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        tiny_run.run(folder, batches, validation=tiny_run.KEEP_BEST, steps=40)


def _resume(folder: Path) -> str:
    params = tiny_run.run(folder, tiny_run.pipeline(), validation=tiny_run.KEEP_BEST, steps=40)
    rows = [
        {name: value for name, value in row.items() if name not in ("time", *CLOCK_COLUMNS)}
        for row in read_metrics(folder)
    ]
    best = load_weights(folder / "best", params)
    record = json.loads((folder / "best" / "model.json").read_text())
    return digest(params, best, record, rows)


def _train(folder: Path) -> None:
    """A run of a classifier by `mmqa train`, with its weights once more as a best step's."""
    raw = folder.with_name("raw")
    first, *others = (row for row in cli_runs.QUESTIONS if row["split"] == "train")
    questions = [
        {**first, "category": "color", "positives": ["p-Arvania"], "negatives": ["s-Hav"]},
        *others,
    ]
    cli_runs.write_documents(raw, questions)
    data = folder.with_name("data")
    cli_runs.done("prepare", "corpus", f"--raw={raw}", f"--out={data}")
    changes = {
        **{key: value for key, value in cli_runs.TINY.items() if key != "batches.threads"},
        **{"batches.length": 16, "inference.batch_size": 4, "data.dir": data},
    }
    config = f"--config={cli_runs.ROOT}/configs/webqa/modality.py:runlocal"
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    cli_runs.done("train", config, *flags, f"--workdir={folder}", "--only_start")
    params = load_question_classifier(folder)._state
    companions = [folder / "config.json", folder / "tokenizer.json"]
    replace_trained(folder / "best", None, params, read_metadata(folder), companions)


def _open_trained(folder: Path) -> str:
    asked = [row["question"] for row in cli_runs.QUESTIONS]
    with contextlib.redirect_stderr(io.StringIO()):
        opened = [load_question_classifier(place) for place in (folder / "best", folder)]
    # Both first: what is refused need not be computed with.
    return digest(*(value for one in opened for value in (one.probabilities(asked), one._state)))


def _convert(folder: Path) -> None:
    """`mmqa convert` of a LLaMA with its tokenizer."""
    source = folder.with_name("published")
    flags = tiny_checkpoints.make_source("llama", source).flags("llama")
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    cli_runs.done(*flags, f"--out={folder}")


def _open_converted(folder: Path) -> str:
    record = read_record(folder)
    text = open_text_tokenizer(folder)
    state = nnx.state(load_converted(folder))
    return digest(state, record.config, text.fingerprint, text.encode("w1 w7 other"))


def _ranked(chunk: range) -> Part:
    return Part(
        [
            {"question_id": f"q{n}", "sources": [f"s{n}", "s"], "scores": [n / 7 + 1, 0.5]}
            for n in chunk
        ],
        {"first": chunk.start},
    )


def _searched(folder: Path, shards: int, chunks: int = 99) -> list[Any] | None:
    """A search of two shards or of one, which after so many chunks is stopped."""

    def compute(chunk: range) -> Part:
        if chunk.start >= 4 * chunks:
            raise KeyboardInterrupt
        return _ranked(chunk)

    rows = None
    for index in range(shards):
        job = Job(folder / PARTS, {"verb": "search"}, items=22, chunk=4, shard=Shard(index, shards))
        with contextlib.suppress(KeyboardInterrupt), job:
            job.run(lambda: compute)
            rows = job.rows()
    return rows


def _merge(folder: Path) -> str:
    merged = merge_parts(folder / PARTS)
    return digest({**merged, "out": None}, (folder / "found.jsonl").read_text())


def _keep(folder: Path, batches: int = 9) -> str:
    """Batches of results that were written as far as a kill let them."""
    with Store(folder, {"model": "m", "corpus": "c"}) as store:
        for start in range(0, 4 * batches, 4):
            if any(f"q{n}" not in store for n in range(start, start + 4)):
                store.add({f"q{n}": [n / 7, f"source {n}"] for n in range(start, start + 4)})
        return digest([store[f"q{n}"] for n in range(4 * batches)])


def _vectors(rows: Any) -> np.ndarray:
    vectors = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True))[np.asarray(rows)]


def _embed(folder: Path, rows: int = ROWS) -> str:
    """An embedding job, which is stopped after so many rows."""

    def embed(span: range) -> np.ndarray:
        if span.start >= rows:
            raise KeyboardInterrupt
        return _vectors(span)

    fingerprints = {"model_fingerprint": "m", "corpus_fingerprint": "c"}
    with contextlib.suppress(KeyboardInterrupt):
        found = write_embeddings(folder, embed, rows=ROWS, dim=DIM, shard_rows=80, **fingerprints)
        return digest(found.vectors)
    return "stopped"


def _open_embeddings(folder: Path) -> str:
    return digest(open_embeddings(folder, "m", "c").vectors)


def _index(folder: Path) -> None:
    embeddings = Embeddings(_vectors(range(ROWS)), "m", "c")
    parameters = ScannParameters(leaves=10, leaves_to_search=3, reorder=50)
    for kind in ("exact", "scann") if scann_available() else ("exact",):
        build_index(embeddings, kind, parameters).save(folder / kind)


def _search(folder: Path) -> str:
    embeddings, found = Embeddings(_vectors(range(ROWS)), "m", "c"), []
    for index in sorted(folder.iterdir()):
        found += load_index(index, embeddings).search(_vectors(range(20)), 5)
    return digest(found)


def _cache(folder: Path) -> str:
    texts = [f"text {row}" for row in range(ROWS)]
    return digest(cached_vectors(folder, "m", texts, _vectors, block=100))


def _grids(folder: Path, shards: int = 9) -> str:
    """`mmqa embed` of pictures' grids, which is stopped after so many shards."""
    pictures = {number: f"p{number}" for number in range(7)}

    def encode(names: Any) -> list[np.ndarray]:
        if int(names[0][1:]) >= 3 * shards:
            raise KeyboardInterrupt
        return [np.full((2, 2, 3), int(name[1:]), np.float16) for name in names]

    sizes = {"shape": (2, 2, 3), "shard": 3}
    with contextlib.suppress(KeyboardInterrupt):
        write_grids(folder, pictures, encode, model="m", broken=BrokenPictures(7), **sizes)
        records = GridRecords(folder)
        return digest([records.read(number)[0] for number in pictures])
    return "stopped"


class _Told(NamedTuple):
    """A backend that answers what it is asked with the question itself."""

    usage: Usage
    failures: list[Any]
    fingerprint: str = "told"

    def answer(self, queries: Iterable[Completion]) -> Iterator[Result]:
        for query in queries:
            told = Candidate(f"<{query.prompt}>", (1, 2), -0.5, None, "end")
            yield Result(query.id, (told,), 4, 0)


def _ask(folder: Path, count: int = 60) -> str:
    """Answers of a prompt that a response cache keeps."""
    served = Cached(_Told(Usage(), []), ResponseCache(folder / "cache.sqlite"))
    answers = served.answer([Completion(n, f"prompt {n}") for n in range(count)])
    texts = {result.id: result.text for result in answers}
    served.close()
    return digest([texts[n] for n in sorted(texts)])


TARGETS = [
    Target("training step", _save_steps, _restore),
    Target(
        "resumed run",
        _stop_run,
        _resume,
        spared=("metrics.jsonl", "attempts.jsonl", "events.out.*"),
    ),
    Target(
        "trained run",
        _train,
        _open_trained,
        files=("*.json", "SHA256SUMS", "weights/**/*", "best/**/*"),
        spared=("attempts.jsonl",),
    ),
    Target("converted weights", _convert, _open_converted),
    Target("parts that are merged", lambda folder: _searched(folder, 2), _merge),
    Target(
        "parts of a stopped job",
        lambda folder: _searched(folder, 1, 3),
        lambda folder: digest(_searched(folder, 1)),
    ),
    Target("finished batches", lambda folder: _keep(folder, 5), _keep),
    Target("embeddings", _embed, _open_embeddings),
    Target("unfinished embeddings", lambda folder: _embed(folder, 160), _embed),
    Target("grids", _grids, _grids),
    Target("unfinished grids", lambda folder: _grids(folder, 2), _grids),
    Target("indexes", _index, _search),
    Target("cached vectors", _cache, _cache),
    Target("response cache", lambda folder: _ask(folder, 50), _ask),
]

os.environ.setdefault("MMQA_PROGRESS", "off")
