"""`python -m tests.bench input`: reading and decoding for training and embedding, beside bare decoding.

`records` and `pictures` run in one thread and count its processor time, and so a second is a second
of one core. `pictures` is what PictureStore does for a picture of which it has no pixels: read the
record, decode, resize as CLIP's preprocessing does; `pillow_resized` is the same of bytes in memory
with Pillow alone, and the peer decodes and does not resize. `workers_N` are whole batches of the
contrastive task, made by N worker processes (0: the run's own), as `batches.workers` has them.
`wait_TASK` is the share of its time that a training run on the demo's config waits for batches;
`batch_ms` is what one thread needs to make a batch.

The corpora are generated: pictures of web size, and one of the demo's size; or `--data` for both.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import host_name, threads
from tests.bench import Options
from tests.bench.runner import Case, measure, open_journal

if TYPE_CHECKING:
    from mmqa_jax.data.batches.source_reader import SourceReader
    from mmqa_jax.data.corpus import Corpus

WORKERS = (0, 1, 2)
TASKS = ("contrastive", "rerank", "answer")
ROWS = (
    *("records", "pictures", "pictures_scaled"),
    *(f"workers_{count}" for count in WORKERS),
    *(f"wait_{task}" for task in TASKS),
)
_SIZE = 224  # CLIP's pixels
_ROUNDS = 3
_BUFFERED = 12  # batches that may be waiting when the reading of a pipeline begins
_MOST_WAITING = 2.0  # per cent of a step; required
# pictures: in a reading; the others are of the demo's corpus and runs.
_SIZES = {
    "small": {
        **{"pictures": 64, "batch": 16, "batches": 8, "steps": 16},
        **{"demo_snippets": 9_400, "demo_pictures": 2_000, "demo_questions": 8_600},
    },
    "full": {
        **{"pictures": 512, "batch": 64, "batches": 16, "steps": 100},
        **{"demo_snippets": 9_400, "demo_pictures": 2_000, "demo_questions": 8_600},
    },
}


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; small unless full is given."""
    return run_sizes(_SIZES[options.size or "small"], options)


def run_sizes(sizes: dict[str, int], options: Options, mode: str = "") -> dict[str, Any]:
    """Measures with sizes as those above; returns what `--json` prints.

    Args:
      mode: of the demo's configs.
    """
    wanted = options.chosen(ROWS)
    rounds = options.rounds or _ROUNDS
    trains = any(name.startswith("wait") for name in wanted)
    host, facts = host_name(), (sizes, rounds, options.data, mode)
    with (
        tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder,
        open_journal("input", *facts, device=host) as journal,
    ):
        missing = tuple(name for name in wanted if name not in journal)
        cases = _cases(Path(folder), sizes, missing, rounds, options.data, mode)
        device = None if trains else host
        return measure("input", cases, wanted, rounds, device=device, journal=journal, **sizes)


def _cases(
    folder: Path,
    sizes: dict[str, int],
    wanted: tuple[str, ...],
    rounds: int,
    data: str | None,
    mode: str,
) -> Iterator[Case]:
    if any(not name.startswith("wait") for name in wanted):
        place = data or _web_corpus(folder / "web", sizes["pictures"])
        yield from _reading(place, sizes["pictures"], wanted)
        for count in WORKERS:
            if f"workers_{count}" in wanted:
                yield _pipeline(place, count, sizes, rounds)
    if any(name.startswith("wait") for name in wanted):
        place = data or _demo_corpus(folder / "demo", sizes)
        for task in TASKS:
            if f"wait_{task}" in wanted:
                yield _waiting(task, place, folder / task, sizes["steps"], mode)


def _reading(place: str, count: int, wanted: tuple[str, ...]) -> Iterator[Case]:
    """The rows of one thread."""
    import numpy as np

    from mmqa_jax.data.corpus import open_sources
    from mmqa_jax.data.pictures.store import PictureStore

    corpus = open_sources(place)
    rows = _pictured(corpus, place)
    rows = np.random.default_rng(0).permutation(rows)[:count].tolist()
    names = [corpus.sources[row].image for row in rows]
    encoded = [corpus.read_picture(name) for name in names]
    if "records" in wanted:
        bare = _bare_records(Path(place), names)
        yield Case(
            "records",
            "records/s",
            lambda: [corpus.read_picture(name) for name in names],
            bare,
            count=len(names),
            clock=time.process_time,
            notes={"peer_is": "ArrayRecord alone", "kib": len(b"".join(encoded)) / 1024 / count},
        )
    for name, scaled in (("pictures", False), ("pictures_scaled", True)):
        if name not in wanted:
            continue
        store = PictureStore(corpus, _SIZE, "crop", scaled=scaled, cache_bytes=0)
        yield Case(
            name,
            "pictures/s",
            lambda store=store: [store.pixels(row) for row in rows],
            lambda: [_decoded(picture) for picture in encoded],
            count=len(rows),
            clock=time.process_time,
            others={"pillow_resized": lambda: [_decoded(picture, _SIZE) for picture in encoded]},
            notes={"peer_is": "Pillow, decoding alone, bytes in memory"},
        )


def _pipeline(place: str, workers: int, sizes: dict[str, int], rounds: int) -> Case:
    """Pictures a second of whole batches, beside bare decoding by as many threads as cores."""
    reader = _reader(place)
    corpus = reader.corpus
    encoded = [corpus.picture(row) for row in _pictured(corpus, place)[: 4 * sizes["pictures"]]]
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    with ThreadPoolExecutor(threads()) as pool:
        for _ in range(rounds):
            ours, pictured = _pipeline_rate(reader, workers, sizes)
            rates["ours"].append(ours)
            repeated = list(itertools.islice(itertools.cycle(encoded), int(pictured)))
            began = time.perf_counter()
            list(pool.map(_decoded, repeated))
            rates["peer"].append(len(repeated) / (time.perf_counter() - began))
    median = {side: statistics.median(of_side) for side, of_side in rates.items()}
    return Case(
        f"workers_{workers}",
        "pictures/s",
        median["ours"],
        median["peer"],
        notes={
            "peer_is": f"Pillow, decoding alone, {threads()} threads",
            "per_core": median["ours"] / threads(),
        },
    )


def _pipeline_rate(
    reader: SourceReader, workers: int, sizes: dict[str, int]
) -> tuple[float, float]:
    """Pictures a second once the batches made ahead are gone, and how many were shown."""
    from mmqa_jax.data.batches.feed import FeedConfig
    from mmqa_jax.data.batches.retriever import ContrastSampling, contrastive_batches

    feed = FeedConfig(sizes["batch"], threads=-(-threads() // max(1, workers)), workers=workers)
    batches = contrastive_batches(
        reader,
        reader.corpus.questions("train"),
        feed,
        ContrastSampling(query_length=32, source_lengths=(64,)),
    )
    with contextlib.closing(batches):
        for _ in range(_BUFFERED):
            next(batches)
        began = time.perf_counter()
        pictured = sum(float(next(batches)["has_image"].sum()) for _ in range(sizes["batches"]))
        return pictured / (time.perf_counter() - began), pictured


def _waiting(task: str, place: str, workdir: Path, steps: int, mode: str) -> Case:
    """The share of a training run's time in which it waits for its next batch."""
    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.hosts.distributed import start
    from mmqa_jax.core.mesh import make_mesh
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.tasks.registry import read_task
    from mmqa_jax.training.loop import train

    start()
    config = load_config(f"configs/atlas/{task}.py:{mode}")
    config.init, config.data.dir = "scratch", place
    config.train.update({"steps": steps, "log_every": steps, "checkpoint_every": 0})
    corpus = open_corpus(place)
    if corpus.manifest["name"] != "atlas":  # its augmentation knows the names of countries
        config.augment.entities = 0.0
    workdir.mkdir()
    described = read_task(config)
    tokenizer = described.make_tokenizer(corpus, workdir)
    recipe = described.recipe(corpus, tokenizer)
    made = _Made(described.recipe(corpus, tokenizer).batches)
    with contextlib.closing(recipe.batches) as batches:
        timed = _Timed(batches)
        mesh = make_mesh(config.mesh.to_dict())
        train(
            config.train.to_dict(),
            objective=recipe.objective, batches=timed, mesh=mesh, workdir=workdir, seed=0,
        )  # fmt: skip
    waited, whole, counted = timed.totals()
    return Case(
        f"wait_{task}",
        "% of a step",
        100 * waited / whole,
        notes={
            "required": _MOST_WAITING,
            "step_ms": 1e3 * whole / counted,
            "batch_ms": made.milliseconds(4),
            "steps": counted,
            "threads": config.batches.threads,
        },
    )


class _Timed:
    """An iterator that notes when each batch was asked for and when it came, and its shapes."""

    def __init__(self, batches: Any):
        self._batches = batches
        self.get_state, self.set_state = batches.get_state, batches.set_state
        self._times: list[tuple[float, float, Any]] = []

    def __next__(self) -> Any:
        import jax
        import numpy as np

        asked = time.perf_counter()
        batch = next(self._batches)
        shapes = tuple(map(np.shape, jax.tree.leaves(batch)))
        self._times.append((asked, time.perf_counter(), shapes))
        return batch

    def totals(self) -> tuple[float, float, int]:
        """Seconds of waiting and in all, and the number of steps, without those that compiled.

        A step lasts from one batch's coming to the next one's.
        """
        seen: set[Any] = set()
        waited, whole, counted = 0.0, 0.0, 0
        for (_, came, shapes), (asked, following, _) in itertools.pairwise(self._times):
            if shapes in seen:
                waited += following - asked
                whole += following - came
                counted += 1
            seen.add(shapes)
        if not counted:
            raise UserError("--size: too few steps; every one of them compiled another shape.")
        return waited, whole, counted


class _Made:
    """A second iterator of the same batches, to see what making one costs."""

    def __init__(self, batches: Any):
        self._batches = batches

    def milliseconds(self, count: int) -> float:
        """Processor time of a batch."""
        with contextlib.closing(self._batches):
            began = time.process_time()
            for _ in range(count):
                next(self._batches)
            return 1e3 * (time.process_time() - began) / count


def _decoded(data: bytes, size: int | None = None) -> Any:
    """The picture with Pillow alone, resized as CLIP's preprocessing does if a size is given."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if size is None:
            return image.mode == "RGB" or image.convert("RGB")
        short = min(image.size)
        wide, high = (int(size * side / short) for side in image.size)
        small = image.convert("RGB").resize((wide, high), Image.Resampling.BICUBIC)
        left, top = (wide - size) // 2, (high - size) // 2
        return np.asarray(small.crop((left, top, left + size, top + size)))


def _bare_records(place: Path, names: Sequence[str]) -> Callable[[], Any]:
    """Reads the records of the same pictures, and does nothing with them."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    from mmqa_jax.core.files import read_json
    from mmqa_jax.data.records.corpus_records import read_manifest

    folder = place / read_manifest(place)["records"]
    number = {name: i for i, name in enumerate(read_json(folder / "pictures.json"))}
    rows = [number[name] for name in names]
    source = ArrayRecordDataSource(sorted(map(os.fspath, folder.glob("pictures/*array_record*"))))
    return lambda: [source[row] for row in rows]


def _pictured(corpus: Corpus, place: str) -> list[int]:
    """Rows of the sources with a picture."""
    rows = [row for row, source in enumerate(corpus.sources) if source.image is not None]
    if not rows:
        raise UserError(f"--data={place}: this corpus has no pictures; name another.")
    return rows


def _reader(place: str) -> SourceReader:
    """Of a corpus, at CLIP's size, every picture decoded whenever it is read."""
    from mmqa_jax.data.batches.source_reader import SourceReader
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.data.pictures.store import PictureStore
    from mmqa_jax.data.tokenizers import minilm_tokenizer

    corpus = open_corpus(place)
    store = PictureStore(corpus, _SIZE, "crop", cache_bytes=0)
    return SourceReader(corpus, minilm_tokenizer(), store)


def _web_corpus(folder: Path, count: int) -> str:
    """A prepared corpus of JPEGs of web size, with a question about each."""
    from mmqa_jax.data.records.corpus_records import write_records
    from mmqa_jax.data.schema import Question, Source
    from tests.bench.retrieval_data import queries, snippets, write_pictures

    folder.mkdir()
    encoded = write_pictures(folder, count)
    sources = [
        Source(f"p{i}", "image", text, "", f"{i}.jpg") for i, text in enumerate(snippets(count))
    ]
    questions = [
        Question(
            f"q{i}", "train", text,
            positives=(f"p{i}",), negatives=tuple(f"p{(i + k) % count}" for k in range(1, 4)),
        )
        for i, text in enumerate(queries(count))
    ]  # fmt: skip
    write_records(
        folder / "data", sources, questions, lambda name: encoded[int(name[:-4])], name="bench"
    )
    return str(folder / "data")


def _demo_corpus(folder: Path, sizes: dict[str, int]) -> str:
    """A prepared corpus as large as Atlas: snippets, small drawings, questions on one or two."""
    import numpy as np
    from PIL import Image

    from mmqa_jax.data.records.corpus_records import write_records
    from mmqa_jax.data.schema import Question, Source
    from tests.bench.retrieval_data import queries, snippets

    def drawing(name: str) -> bytes:
        rng = np.random.default_rng(int(name[:-4]))
        flat = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(flat).resize((250, 150), Image.Resampling.NEAREST).save(buffer, "PNG")
        return buffer.getvalue()

    count, pictures = sizes["demo_snippets"], sizes["demo_pictures"]
    texts = snippets(count + pictures, words=24)
    sources = [Source(f"s{i}", "text", texts[i], f"title {i}") for i in range(count)]
    sources += [
        Source(f"p{i}", "image", texts[count + i], f"title {i}", f"{i}.png")
        for i in range(pictures)
    ]
    rng, questions = np.random.default_rng(0), []
    for i, text in enumerate(queries(sizes["demo_questions"])):
        kinds = ("p", pictures, "color") if i % 3 == 0 else ("s", count, "text")
        near = [f"{kinds[0]}{n}" for n in rng.choice(kinds[1], 12, replace=False)]
        far = [f"s{n}" if kinds[0] == "p" else f"p{n}" for n in rng.choice(min(count, pictures), 4)]
        split = i % 2 + 1
        questions.append(
            Question(
                f"q{i}", "train", text, None, (texts[i % len(texts)][:60],), "", kinds[2],
                positives=tuple(near[:split]), negatives=(*near[split:], *dict.fromkeys(far)),
            )
        )  # fmt: skip
    write_records(folder, sources, questions, drawing, name="bench")
    return str(folder)
