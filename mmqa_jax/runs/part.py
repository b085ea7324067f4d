"""Defines a part of a row and what its results depend on, and opens each part of the rows of one
run once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import OnModel, Serving
from mmqa_jax.core.store import Store, check_no_older
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Material, Prediction, Question, Ranking
from mmqa_jax.retrieval.rankings import check_scores, ranking_row, rescored
from mmqa_jax.weights.hub import find_model, is_hub_name


class Part(Protocol):
    """A dataclass whose fields are the keys of a row's section `parts.NAME`."""

    # When a row opens it: files first, so that wrong ones are refused soon, then trained models,
    # the language model, and last what asks it.
    turn: ClassVar[Literal["file", "model", "last"]] = "model"
    # The file of retrieval/ that its rankings go to; "": it ranks no sources.
    ranks: ClassVar[str] = ""
    answers: ClassVar[bool] = False  # whether it answers in words
    # What it shows that is of no corpus, for credits.
    materials: ClassVar[tuple[Material, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()  # the keys that hold files, folders or names of models

    def paths(self) -> Sequence[str]:
        """The files and folders that it reads, and names of models that are installed packages."""
        return [getattr(self, name) for name in self.reads]

    def open(self, row: OpenedParts) -> Any:
        """The part in use."""


class OpenedParts:
    """Opens the parts that rows name, each once, over one corpus.

    Args:
      journals: folder of the stores in which parts keep what they finished; None: they keep
        nothing, but for the answers of language models, which go to the cache folder.
      inference: in place of the sections `inference` of the rerankers' and readers' runs.
      say: told where each model but the LLM runs, by its key in the section `parts`
        (retriever.model).
      keep_open: whether parts stay open after a row, for the next one with the same, until `end`:
        rows of a sweep load each model once. Of language models the last one stays.
    """

    def __init__(
        self,
        corpus: Corpus,
        journals: Path | None = None,
        *,
        inference: Mapping[str, Any] | None = None,
        say: Callable[[str, Serving], None] | None = None,
        keep_open: bool = False,
    ):
        self.corpus, self.journals, self.inference = corpus, journals, inference
        self.llm: Any = None  # the last row's language model, once it is open
        # Question id -> seconds that the parts of the last row spent on it.
        self.seconds: defaultdict[str, float] = defaultdict(float)
        # Question id -> sources that the last row's language model, as reranker, gave no score.
        self.unscored: Counter[str] = Counter()
        self.serving: dict[str, Serving] = {}  # what `say` was told of the last row's parts
        self._say = say or _print_serving
        self._open: dict[str, tuple[Any, Store | None, dict[str, Serving]]] = {}
        self._keep_open = keep_open
        self._join: Callable[[Any], Any] = lambda llm: llm
        self._llms: dict[str, tuple[str, Any]] = {}  # by part, with what they are made of
        self._parts: dict[str, tuple[Any, dict[str, Serving]]] = {}

    def close(self) -> None:
        """Ends a row: closes stores and response caches, unless parts are kept.

        All but a language model can still be used.
        """
        if not self._keep_open:
            self.end()

    def end(self) -> None:
        """Closes stores and response caches, and forgets language models and kept parts."""
        for _, store, _ in self._open.values():
            if store is not None:
                store.close()
        for _, llm in self._llms.values():
            llm.close()
        self._llms.clear()
        self._parts.clear()

    def new_row(self) -> None:
        """Forgets the last row's seconds and models; open parts stay open."""
        self.llm = None
        self.seconds.clear()
        self.unscored = Counter()
        self.serving.clear()

    def language_model(self, made_of: str, load: Callable[[], Any], name: str = "llm") -> Any:
        """A language model of the row, which is closed with the parts.

        Where `made_of` is the same, the open one is used again. `name` is the part's; `llm` is the
        row's own.
        """
        before, llm = self._llms.get(name, ("", None))
        if before != made_of:
            if llm is not None:
                del self._llms[name]  # not closed twice, should the next one fail to open
                llm.close()
            llm = load()
            self._llms[name] = made_of, llm
        if name == "llm":
            self.llm = llm
        return llm

    def part(self, name: str, part: Part) -> Any:
        """A part in use; a model of an earlier row that is the same, where parts are kept."""
        if not self._keep_open or part.turn != "model":
            return part.open(self)
        key = f"{name} {part}"
        if key not in self._parts:
            before = dict(self.serving)
            opened = part.open(self)
            served_by = {k: v for k, v in self.serving.items() if k not in before}
            self._parts[key] = opened, served_by
        opened, served_by = self._parts[key]
        self.serving |= served_by
        return opened

    def model(self, name: str, made_of: str, load: Callable[[], Any]) -> Any:
        """A reranker or reader that is a model itself, opened once."""

        def load_told(on_model: OnModel) -> Any:
            part = load()
            on_model("model", part)
            return part

        return self.once(name, made_of, load_told, name)

    def once(self, kind: str, made_of: str, load: Callable[[OnModel], Any], name: str) -> Any:
        """A retriever, reranker or reader, opened once for a fingerprint of what its answers depend
        on.

        `name` is where the row's config has it.
        """
        fingerprint = of_folders(text=f"{kind} {made_of} {self.corpus.fingerprint}")
        if fingerprint not in self._open:
            served: dict[str, Serving] = {}
            store = self._store(kind, fingerprint)
            part = load(self.on_model(name, served))
            if store is not None:
                part = Resumable(part, store, self.seconds)
            self._open[fingerprint] = part, store, served
        part, _, served = self._open[fingerprint]
        self.serving |= {f"{name}.{key}": serving for key, serving in served.items()}
        return part

    def once_opened(self) -> list[Any]:
        """The parts of `once` that are open, without what keeps their results."""
        return [getattr(part, "part", part) for part, _, _ in self._open.values()]

    def _store(self, kind: str, fingerprint: str) -> Store | None:
        """Opens the store of a part's finished results."""
        if self.journals is None:
            return None
        check_no_older(self.journals / f"{kind}-{fingerprint}.jsonl")
        store = Store(
            self.journals / f"{kind}-{fingerprint}", {"part": kind, "fingerprint": fingerprint}
        )
        store.check()  # before models are loaded
        return store

    def on_model(self, name: str, served: dict[str, Serving] | None = None) -> OnModel:
        """Says where a model of the part `name` runs, and keeps it, in `served` by its own key."""

        def keep(key: str, model: Any) -> None:
            self._say(f"{name}.{key}", model.serving)
            self.serving[f"{name}.{key}"] = model.serving
            if served is not None:
                served[key] = model.serving

        return keep


def _print_serving(name: str, serving: Serving) -> None:
    print(f"{name}: {serving}", file=sys.stderr)


# Parts of a row whose finished batches are kept: a run that was interrupted repeats none.


_QUESTIONS_PER_BATCH = 256  # per search
Seconds = defaultdict[str, float]


class Resumable:
    """A retriever, reranker or reader that keeps its results in a store, by question and request.

    It has the interface of the part that it wraps, so that papers run with either; `seconds` (by
    question id) gets the time spent on each question, over all attempts.
    """

    def __init__(self, part: Any, store: Store, seconds: Seconds):
        self.part, self.store, self.seconds = part, store, seconds

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """Searches as the retriever; finished batches are kept."""
        keys = [_key(question, "search", str(top_k)) for question in questions]

        def search(rows: list[int]) -> list[Ranking]:
            return self.part.search([questions[row] for row in rows], top_k)

        return self._searched(questions, keys, search)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Searches as the retriever; finished batches are kept."""
        keys = [
            _key(question, "within", *ranking.sources)
            for question, ranking in zip(questions, candidates, strict=True)
        ]

        def search(rows: list[int]) -> list[Ranking]:
            asked = [questions[row] for row in rows]
            return self.part.search_within(asked, [candidates[row] for row in rows])

        return self._searched(questions, keys, search)

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Scores as the reranker; each (question, source) pair is kept by itself."""
        pairs = [
            (question, source)
            for question, ranking in zip(questions, candidates, strict=True)
            for source in ranking.sources
        ]
        keys = [_key(question, source) for question, source in pairs]

        def score(rows: list[int]) -> Iterator[dict[int, float]]:
            left = [
                dataclasses.replace(
                    ranking,
                    sources=tuple(
                        source
                        for source in ranking.sources
                        if _key(question, source) not in self.store
                    ),
                )
                for question, ranking in zip(questions, candidates, strict=True)
            ]
            for batch in self.part.score_batches(questions, left):
                scores = dict(zip(batch.indices.tolist(), batch.scores.tolist(), strict=True))
                for number, value in scores.items():  # what is kept is refused by every restart
                    question, source = pairs[rows[number]]
                    check_scores(question.id, {source: value})
                yield scores

        scores = self._results([question.id for question, _ in pairs], keys, score)
        return rescored(candidates, np.array(scores, np.float32))

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """Answers as the reader; finished batches are kept."""
        keys = [
            _key(question, *ranking.sources)
            for question, ranking in zip(questions, cited, strict=True)
        ]

        def answer(rows: list[int]) -> Iterator[dict[int, Any]]:
            asked = [questions[row] for row in rows]
            for batch in self.part.answer_batches(asked, [cited[row] for row in rows]):
                yield {
                    number: [prediction.answer, prediction.beams] for number, prediction in batch
                }

        results = self._results([ranking.question_id for ranking in cited], keys, answer)
        return [
            Prediction(
                ranking.question_id,
                text,
                ranking.sources,
                ranking.scores,
                tuple((beam, score) for beam, score in beams),
                read=ranking.sources,
            )
            for ranking, (text, beams) in zip(cited, results, strict=True)
        ]

    def read(
        self, questions: Sequence[Question], passages: Sequence[Sequence[str]]
    ) -> list[Prediction]:
        """Reads as Fusion-in-Decoder; finished batches are kept."""
        from mmqa_jax.inference.t5_readers import read_prediction

        keys = [
            _key(question, *sources) for question, sources in zip(questions, passages, strict=True)
        ]

        def read(rows: list[int]) -> Iterator[dict[int, Any]]:
            asked = [questions[row] for row in rows]
            yield from map(dict, self.part.read_batches(asked, [passages[row] for row in rows]))

        results = self._results([question.id for question in questions], keys, read)
        return [
            read_prediction(question, sources, tuple((beam, score) for beam, score in beams))
            for question, sources, beams in zip(questions, passages, results, strict=True)
        ]

    def _searched(
        self,
        questions: Sequence[Question],
        keys: Sequence[str],
        search: Callable[[list[int]], list[Ranking]],
    ) -> list[Ranking]:
        def batches(rows: list[int]) -> Iterator[dict[int, Any]]:
            with Progress("Searching", len(rows), "questions") as progress:
                for start in range(0, len(rows), _QUESTIONS_PER_BATCH):
                    rankings = search(rows[start : start + _QUESTIONS_PER_BATCH])
                    results = [[ranking.sources, ranking.scores] for ranking in rankings]
                    yield dict(enumerate(results, start))
                    progress.advance(len(rankings))

        results = self._results([question.id for question in questions], keys, batches)
        return [
            Ranking(question.id, tuple(sources), tuple(scores))
            for question, (sources, scores) in zip(questions, results, strict=True)
        ]

    def _results(
        self,
        question_ids: Sequence[str],
        keys: Sequence[str],
        compute: Callable[[list[int]], Iterable[Mapping[int, Any]]],
    ) -> list[Any]:
        """Returns the results by key, in order; it computes and keeps missing ones.

        `compute` turns places of missing keys into batches of results by their place in that list.
        """
        missing = [place for place, key in enumerate(keys) if key not in self.store]
        if missing:
            began = time.perf_counter()
            for batch in compute(missing):
                seconds = (time.perf_counter() - began) / max(len(batch), 1)
                self.store.add(
                    {keys[missing[number]]: [result, seconds] for number, result in batch.items()}
                )
                began = time.perf_counter()
        results = []
        for question_id, key in zip(question_ids, keys, strict=True):
            result, seconds = self.store[key]
            self.seconds[question_id] += seconds
            results.append(result)
        return results


def _key(question: Question, *more: str) -> str:
    """Key of a question's text and picture (a second hop changes them) and of `more`."""
    content = "\0".join((question.question, question.image or "", *more))
    return f"{question.id} {hashlib.sha256(content.encode()).hexdigest()[:16]}"


# Hashes whatever a result depends on: folders of models and indexes, files, questions.


_SAMPLED = 1 << 30  # bytes: of larger files (weights) only the size and both ends are read
_END = 1 << 20
_PUBLISHED = ("*.safetensors", "pytorch_model*.bin")  # weights of published models


def of_folders(*folders: str | Path, text: str = "") -> str:
    """16 hex digits of the JSON files and the weights of folders, and of a text.

    Of our own weights the manifest is read, which differs for every writing, even of the same size
    to the same folder. A published model may be named ORG/NAME, as in the Hugging Face cache.
    """
    digest = hashlib.sha256(text.encode())
    for folder in filter(None, folders):
        folder = Path(folder)
        if not folder.exists() and is_hub_name(folder):
            folder = find_model(str(folder), fetch=f"add --download, or run `hf download {folder}`")
        for pattern in _PUBLISHED:
            for file in sorted(folder.glob(pattern)):
                digest.update(f"{file.name} {of_file(file)}".encode())
        for file in (*sorted(folder.glob("*.json")), *folder.glob("weights/manifest.ocdbt")):
            with _naming(file):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def of_file(path: str | Path) -> str:
    """16 hex digits of a file's content; UserError if it cannot be read."""
    with _naming(path), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= _SAMPLED:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(str(size).encode() + file.read(_END))
        file.seek(-_END, os.SEEK_END)
        digest.update(file.read())
        return digest.hexdigest()[:16]


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path.") from error


def of_path(path: str | Path) -> str:
    """16 hex digits of a file or of a folder; the path itself where it is neither."""
    if Path(path).is_dir():
        return of_folders(path)
    return of_file(path) if Path(path).is_file() else str(path)


def of_rankings(rankings: Sequence[Ranking]) -> str:
    """16 hex digits of rankings in their order."""
    rows = map(ranking_row, rankings)
    return hashlib.sha256("".join(map(json.dumps, rows)).encode()).hexdigest()[:16]


def of_questions(questions: Sequence[Question]) -> str:
    """16 hex digits of all that is known of questions, and of their order."""
    digest = hashlib.sha256()
    for question in questions:
        row = dataclasses.asdict(question)
        if not question.more_images:  # a question of one picture is what it was without this key
            del row["more_images"]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]
