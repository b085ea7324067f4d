"""The systems that a page asks: each answers one question from sources, and tells what it does.

What a system tells, in this order: `queries` (what is searched for), `sources` (what was found, as
rows), `text` (pieces of the answer, where it is decoded token by token). Its answer is a row:

    {question, answer, marked, found, sources: [row], notes: [text], seconds}

where the model is not sure of its words also `quote`, the passages' best sentence with its place;
and of a row of `mmqa run` also `steps`, how it was answered, and `picture`, the question's own as a
data: URL; where a language model of this process reads, `usage`, the tokens that it took.

`marked` is the answer with its [n], the numbers of the rows. A row has the keys of `mmqa ask
--json` and `number` and `title`; its `cited` is its number where the answer cites it, else null.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Ranking
from mmqa_jax.decoding.requests import Result, Scores
from mmqa_jax.inference.cross_encoder import CrossEncoderReranker
from mmqa_jax.prompting.backends import Around, Chat, Choices, Message, Query
from mmqa_jax.prompting.backends.openai_requests import data_url
from mmqa_jax.prompting.backends.served import ServedBackend, ServedModel
from mmqa_jax.prompting.backends.thinking import Thinking, split_thoughts
from mmqa_jax.prompting.causes import SENTENCES, marked
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.retrieval.rankings import ranking_of
from mmqa_jax.runs.ask import Answerer
from mmqa_jax.runs.ask_corpus import AskedCorpus, ShownSource, answer_notes
from mmqa_jax.runs.ask_folder import FolderAnswerer
from mmqa_jax.runs.ask_row import RowAnswerer, steps_of
from mmqa_jax.serve import follow_up
from mmqa_jax.serve.follow_up import recent

Tell = Callable[[str, Any], None]  # called in another thread
AnswerRow = dict[str, Any]
_LONGEST = 20_000  # characters of a question
_EXAMPLES = 3
_TOGETHER = 64  # questions whose passages are found in one call, at most


@dataclasses.dataclass(frozen=True)
class Asking:
    """A question that is being answered; the future is the answer: a row, or vectors."""

    future: concurrent.futures.Future[Any]
    _cancel: Callable[[], None]

    def cancel(self) -> None:
        """Ends the work on it as soon as that is possible, if it is not finished."""
        if not self.future.cancel() and not self.future.done():
            self._cancel()


@dataclasses.dataclass(frozen=True)
class Directions:
    """What a client asks of an answer beside its question.

    Attributes:
      instructions: its system prompt; "": it has none.
      decoding: values of Decoding's fields that it names.
      history: messages of user and assistant before the question, the oldest first.
      thinking: what the reader's template is told; None: what it was opened with.
    """

    instructions: str = ""
    decoding: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history: tuple[Message, ...] = ()
    thinking: Thinking | None = None


_NO_DIRECTIONS = Directions()


class System(Protocol):
    """A system that answers questions.

    Attributes:
      name: in the API.
      label: on the page.
      about: one sentence for the page.
      takes_pictures: whether a question may come with one.
      takes_directions: whether a client's directions change the answer.
      takes_history: whether its history does.
      examples: questions to begin with.
    """

    name: str
    label: str
    about: str
    takes_pictures: bool
    takes_directions: bool
    takes_history: bool
    examples: Sequence[str]

    def ask(
        self,
        question: str,
        picture: bytes | None,
        tell: Tell,
        directions: Directions = _NO_DIRECTIONS,
    ) -> Asking:
        """Begins to answer; UserError for a question that cannot be asked."""


class Directed(Around):
    """A language model whose queries are decoded as a client directs, behind its instructions."""

    def __init__(self, backend: Any, directions: Directions):
        super().__init__(backend)
        self._directions = directions

    def check(self, query: Query) -> None:
        """See Backend."""
        self._backend.check(self._directed(query))

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """See Backend."""
        return self._backend.answer([self._directed(query) for query in queries])

    def _directed(self, query: Query) -> Query:
        if isinstance(query, Choices):
            return query
        # The reader's own stop strings end an answer, too.
        changes = dict(self._directions.decoding)
        if "stop" in changes:
            changes["stop"] = (*query.decoding.stop, *changes["stop"])
        query = dataclasses.replace(query, decoding=dataclasses.replace(query.decoding, **changes))
        instructions, earlier = self._directions.instructions, recent(self._directions.history)
        if isinstance(query, Chat):
            first = (Message("system", (instructions,)),) if instructions else ()
            messages = (*first, *earlier, *query.messages)
            thinking = self._directions.thinking
            return dataclasses.replace(query, messages=messages, thinking=thinking)
        if not instructions:
            return query
        return dataclasses.replace(query, prompt=f"{instructions}\n\n{query.prompt}")


# `with turn():` computes when those before it have; CancelledError if nobody asks any more.
Turn = Callable[[], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(eq=False)
class _Wish:
    """An item whose result a thread waits for; None until somebody has computed it."""

    item: Any
    result: concurrent.futures.Future[Any] | None = None


class Threads:
    """Threads in which at most so many questions are answered at once; what is no language model
    computes one at a time."""

    def __init__(self, most: int):
        self._pool = concurrent.futures.ThreadPoolExecutor(most, "asked")
        self._line: collections.deque[object] = collections.deque()
        self._moved = threading.Condition()  # of _line and of what is left
        self._wishes: collections.defaultdict[Any, list[_Wish]] = collections.defaultdict(list)

    def start(
        self, answer: Callable[[Turn], Any], cancel: Callable[[], None] | None = None
    ) -> Asking:
        """Answers in a thread; `cancel` ends what `answer` waits for."""
        left = threading.Event()

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            mine = object()
            with self._moved:
                self._line.append(mine)
                self._moved.wait_for(lambda: left.is_set() or self._line[0] is mine)
            try:
                if left.is_set():
                    raise concurrent.futures.CancelledError
                yield
            finally:
                with self._moved:
                    self._line.remove(mine)
                    self._moved.notify_all()

        def leave() -> None:
            with self._moved:
                left.set()
                self._moved.notify_all()
            if cancel is not None:
                cancel()

        return Asking(self._pool.submit(answer, turn), leave)

    def together(self, compute: Callable[[list[Any]], Sequence[Any]], item: Any, turn: Turn) -> Any:
        """Returns the result of an item: whose turn it is has it computed for all that wait for
        their turn, by results of several items in their order. It raises what `compute` raises for
        this item alone."""
        wish, wishes = _Wish(item), self._wishes[compute]
        wishes.append(wish)
        try:
            with turn():
                if wish.result is None:
                    others = [
                        other for other in list(wishes) if other is not wish and not other.result
                    ]
                    _fulfil(compute, [wish, *others[: _TOGETHER - 1]])
        finally:
            wishes.remove(wish)
        assert wish.result is not None
        return wish.result.result()

    def close(self) -> None:
        """Ends when all questions are answered."""
        self._pool.shutdown()


def _fulfil(compute: Callable[[list[Any]], Sequence[Any]], wishes: Sequence[_Wish]) -> None:
    """Computes wishes at once; where that fails, each by itself, so that one spoils no other."""
    try:
        results = compute([wish.item for wish in wishes])
    except Exception as error:
        if len(wishes) == 1:
            wishes[0].result = concurrent.futures.Future()
            wishes[0].result.set_exception(error)
        for wish in wishes if len(wishes) > 1 else ():
            _fulfil(compute, [wish])
        return
    for wish, result in zip(wishes, results, strict=True):
        wish.result = concurrent.futures.Future()
        wish.result.set_result(result)


@dataclasses.dataclass(frozen=True)
class ReadPassages:
    """Passages of a corpus, found by encoder and BM25 and read by a language model: `backend_of`
    gives it to one user, who is told of the pieces of its text."""

    takes_history = True
    about = (
        "Passages are found by meaning and by words; a language model reads them and cites them."
    )
    takes_pictures = takes_directions = True

    answerer: FolderAnswerer
    backend_of: Callable[[Callable[[str], None]], Any]
    options: LLMReaderOptions
    threads: Threads
    follow_up: str = "both"  # of follow_up.WAYS
    examples: Sequence[str] = ()
    folder: str = ""  # of several that are served
    name: str = "passages"
    label: str = "Answer from the passages"

    def ask(
        self,
        question: str,
        picture: bytes | None,
        tell: Tell,
        directions: Directions = _NO_DIRECTIONS,
    ) -> Asking:
        """See System."""
        check_question(question)
        backend = self.backend_of(lambda piece: tell("text", piece))
        rewriter = self.backend_of(lambda piece: None)
        if self.follow_up == "rewritten":  # into a question that needs no history
            reading = Directed(backend, dataclasses.replace(directions, history=()))
        else:
            reading = Directed(backend, directions)

        def answer(turn: Turn) -> AnswerRow:
            began, corpus = time.perf_counter(), self.answerer.corpus
            history = directions.history
            texts = follow_up.searches(question, history, self.follow_up, rewriter)
            with contextlib.ExitStack() as stack:
                asked = [stack.enter_context(corpus.asked(text, picture)) for text in texts]
                tell("queries", list(dict.fromkeys([question, *texts])))
                to_read = follow_up.merged(
                    [self.threads.together(self.answerer.find, one, turn) for one in asked]
                )
                if self.follow_up != "rewritten":
                    meant = dataclasses.replace(to_read.question, question=question)
                    to_read = to_read._replace(question=meant)
                tell("sources", source_rows(corpus, to_read.passages, folder=self.folder))
                reader = LLMReader(corpus, reading, self.options)
                answered = self.answerer.read(to_read, reader, turn)
            prediction = answered.prediction
            cited = set(prediction.sources)
            quoting = answered.text if answered.found else ""
            rows = source_rows(corpus, to_read.passages, quoting, folder=self.folder)
            rows = [{**row, "cited": row["number"] if row["id"] in cited else None} for row in rows]
            seconds = time.perf_counter() - began
            whole = answer_row(question, answered.text, answered.found, rows, seconds)
            more = _told_of(prediction, backend)
            if quoted := answered.quoted(corpus):
                whole["quote"] = quoted
            if sentences := prediction.trace.get(SENTENCES):
                whole |= {"marked": marked(sentences), SENTENCES: sentences}
            elif more["written"] is not None and answered.found:
                whole["marked"] = more["written"]
            return {**whole, **more}

        return self.threads.start(answer, cancel_of(backend, rewriter))


@dataclasses.dataclass(frozen=True)
class FindPassages:
    """The passages alone, without a language model."""

    takes_history = True
    about = "Passages are found by meaning and by words; nothing is written."
    takes_pictures = takes_directions = False

    answerer: FolderAnswerer
    threads: Threads
    examples: Sequence[str] = ()
    folder: str = ""
    name: str = "search"
    label: str = "Find passages"

    def ask(
        self,
        question: str,
        picture: bytes | None,
        tell: Tell,
        directions: Directions = _NO_DIRECTIONS,
    ) -> Asking:
        """See System."""
        check_question(question)

        def answer(turn: Turn) -> AnswerRow:
            began = time.perf_counter()
            texts = follow_up.searches(question, directions.history, "both", None)
            tell("queries", list(dict.fromkeys([question, *texts])))
            with contextlib.ExitStack() as stack:
                asked = [stack.enter_context(self.answerer.corpus.asked(text)) for text in texts]
                to_read = follow_up.merged(
                    [self.threads.together(self.answerer.find, one, turn) for one in asked]
                )
            rows = source_rows(self.answerer.corpus, to_read.passages, folder=self.folder)
            tell("sources", rows)
            sentence = NOT_FOUND if to_read.is_refused else "The nearest passages:"
            seconds = time.perf_counter() - began
            whole = answer_row(question, sentence, not to_read.is_refused, rows, seconds)
            if to_read.is_refused:
                whole["notes"] = answer_notes(self.answerer.refusal(to_read))
            return whole

        return self.threads.start(answer)


@dataclasses.dataclass(frozen=True)
class FromMemory:
    """The language model alone: what it knows without sources."""

    name, label, takes_history = "memory", "Without sources", True
    about = "The language model answers from what it learned: nothing is looked up or cited."
    takes_directions = True
    examples = ()

    corpus: AskedCorpus
    backend_of: Callable[[Callable[[str], None]], Any]
    options: LLMReaderOptions
    threads: Threads

    @property
    def takes_pictures(self) -> bool:
        """Whether the model sees."""
        return self.backend_of(lambda piece: None).takes_pictures is True

    def ask(
        self,
        question: str,
        picture: bytes | None,
        tell: Tell,
        directions: Directions = _NO_DIRECTIONS,
    ) -> Asking:
        """See System."""
        check_question(question)
        backend = self.backend_of(lambda piece: tell("text", piece))
        reading = Directed(backend, directions)

        def answer(turn: Turn) -> AnswerRow:
            began = time.perf_counter()
            with self.corpus.asked(question, picture) as asked:
                reader = LLMReader(self.corpus, reading, self.options)
                (prediction,) = reader.answer([asked], [Ranking(asked.id, (), ())])
            seconds = time.perf_counter() - began
            row = answer_row(question, prediction.answer, bool(prediction.answer), [], seconds)
            return {**row, **_told_of(prediction, backend)}

        return self.threads.start(answer, cancel_of(backend))


@dataclasses.dataclass(frozen=True)
class DemoChain:
    """A demo's own models: two hops of retrieval, VLP's selection, VLP's answer."""

    name, label = "demo", "Retriever, reranker and reader of the demo"
    about = "A trained encoder finds sources in up to two hops, VLP selects among them and answers."
    takes_pictures, takes_directions, takes_history = True, False, False

    answerer: Answerer
    threads: Threads

    @property
    def examples(self) -> list[str]:
        """Questions of its data."""
        tested = self.answerer.corpus.questions("test")
        return [question.question for question in tested[:_EXAMPLES]]

    def ask(
        self,
        question: str,
        picture: bytes | None,
        tell: Tell,
        directions: Directions = _NO_DIRECTIONS,
    ) -> Asking:
        """See System."""
        check_question(question)

        def answer(turn: Turn) -> AnswerRow:
            began, corpus = time.perf_counter(), self.answerer.corpus
            with turn():  # its programs hold one question
                answered = self.answerer.answer(question, picture)
            tell("queries", list(answered.queries))
            prediction = answered.prediction
            candidates = answered.candidates or Ranking(
                "", prediction.sources, prediction.source_scores
            )
            cited = prediction if answered.found else Prediction("", "")
            rows = cited_first(corpus, candidates, cited)
            tell("sources", rows)
            marks = "".join(f" [{row['number']}]" for row in rows if row["cited"] is not None)
            seconds = time.perf_counter() - began
            whole = answer_row(question, answered.text, answered.found, rows, seconds)
            return {**whole, "marked": answered.text + marks}

        return self.threads.start(answer)


def examples_of(corpus: Corpus) -> list[str]:
    """Questions to begin with, on headings of a folder's documents, each of another file."""
    headings = {}
    for source in corpus.sources:
        file, heading = source.extra.get("file"), source.extra.get("heading")
        if file and heading and " > " in heading:
            headings.setdefault(file, heading.rpartition(" > ")[2])
    texts = list(dict.fromkeys(headings.values()))
    return [f"What do the documents say about “{text}”?" for text in texts[:_EXAMPLES]]


def check_question(question: str) -> None:
    """UserError for an empty or endless question."""
    if not question.strip():
        raise UserError("the question is empty; write one.")
    if len(question) > _LONGEST:
        raise UserError(f"the question has more than {_LONGEST:,} characters; shorten it.")


def source_rows(
    corpus: AskedCorpus, ranking: Ranking, answer: str = "", *, folder: str = ""
) -> list[AnswerRow]:
    """Sources as rows, numbered from 1 in their order; none is cited yet.

    Args:
      answer: whose quotes have places of their own.
      folder: of the corpus, among several.
    """
    rows = []
    for number, (name, score) in enumerate(
        zip(ranking.sources, ranking.scores, strict=True), start=1
    ):
        source = corpus.sources[corpus.row[name]]
        row = ShownSource(source, None if score is None else float(score), None).row(answer)
        rows.append({"number": number, "title": source.title, **row, "folder": folder})
    return rows


def cited_first(corpus: AskedCorpus, ranking: Ranking, prediction: Prediction) -> list[AnswerRow]:
    """Returns the rows of sources: cited ones first, numbered in the answer's order."""
    cited = dict(zip(prediction.sources, prediction.source_scores, strict=False))
    scores = {**dict.fromkeys((*prediction.sources, *ranking.sources)), **cited}
    scores |= dict(zip(ranking.sources, ranking.scores, strict=False))
    rows = source_rows(
        corpus, Ranking("", tuple(scores), tuple(scores.values())), prediction.answer
    )
    for row in rows[: len(prediction.sources)]:
        row["cited"] = row["number"]
    return rows


def cancel_of(*backends: Any) -> Callable[[], None]:
    """Returns what ends a served model's work for one user; a server's own work is not ended."""

    def cancel() -> None:
        for backend in backends:
            if isinstance(backend, ServedBackend):
                backend.cancel()

    return cancel


def _told_of(prediction: Prediction, backend: Any) -> AnswerRow:
    """Notes on an answer, what the model wrote (None: nothing), whether its tokens ran out, and how
    many a user's session took (a server's model counts those of all its users together)."""
    outputs = prediction.trace.get("outputs")
    written = split_thoughts(outputs[0]["text"])[1] if outputs else None
    row: AnswerRow = {"notes": answer_notes(prediction), "written": written}
    row["cut"] = bool(prediction.trace.get("cut"))
    if not isinstance(backend, ServedBackend):
        return row
    counts = backend.usage.prompt_tokens, backend.usage.completion_tokens
    return {**row, "usage": dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))}


def answer_row(
    question: str, answer: str, is_found: bool, rows: Sequence[AnswerRow], seconds: float
) -> AnswerRow:
    """An answer as a row, its markers aside."""
    return {
        "question": question,
        "answer": answer,
        "marked": answer,
        "found": is_found,
        "sources": list(rows),
        "notes": [],
        "seconds": round(seconds, 2),
    }


# A finished row of `mmqa run` as a system: its setting, parts and options answer one question.


class RowSystem:
    """Answers with what a row names (runs/ask_row.py)."""

    takes_pictures, takes_directions, takes_history = True, False, False

    def __init__(self, answerer: RowAnswerer, threads: Threads):
        row = answerer.row
        self.name, self.label = row.row, f"{row.row} ({row.system})"
        self._row, self._corpus, self._answerer = row, answerer.corpus, answerer
        self._threads = threads
        takes = "any question" if answerer.takes_any else "the questions of its data"
        self.about = f"The row {row.row}, setting {row.setting}: it answers {takes}."
        self.examples = [question.question for question in answerer.questions[:_EXAMPLES]]

    def ask(
        self,
        question: str,
        picture: bytes | None,
        tell: Tell,
        directions: Directions = _NO_DIRECTIONS,
    ) -> Asking:
        """See System."""
        check_question(question)
        known = self._answerer.known(question)

        def answer(turn: Turn) -> dict[str, Any]:
            began = time.perf_counter()
            with self._corpus.asked(question, picture) as asked, turn():
                meant = known if picture is None and known else asked
                prediction, rankings = self._answerer.predict(meant)
            row = self._told(question, prediction, rankings, tell, began)
            own_picture = self._corpus.question_picture(meant) if meant is known else None
            return row if own_picture is None else {**row, "picture": data_url(own_picture)}

        return self._threads.start(answer)

    def _told(
        self,
        question: str,
        prediction: Prediction,
        rankings: Mapping[str, Any],
        tell: Tell,
        began: float,
    ) -> dict[str, Any]:
        ranked = rankings.get("relevance") or rankings.get("candidates")
        candidates = ranking_of(ranked) if ranked else Ranking("", prediction.read, ())
        rows = cited_first(self._corpus, candidates, prediction)
        tell("sources", rows)
        sentence = prediction.answer or (NOT_FOUND if self._row.answers else "The sources:")
        marks = "".join(f" [{row['number']}]" for row in rows if row["cited"] is not None)
        whole = answer_row(
            question, sentence, sentence != NOT_FOUND, rows, time.perf_counter() - began
        )
        notes = answer_notes(prediction)
        return {**whole, "marked": sentence + marks, "notes": notes, "steps": steps_of(prediction)}


class Growing(NamedTuple):
    """A folder of documents that others may be added to, and what opens it anew."""

    folder: Path
    reopen: Callable[[], FolderAnswerer]


_AT_ONCE = 8  # texts that are embedded before others have their turn


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that one server answers with: a model, an encoder, a corpus, and systems of them.

    Attributes:
      title: of the page: the folder's name, or the model's.
      llm: the language model of this process; None: there is none, or a server's is asked.
      llm_name: its name in the API.
      embedder: of texts, and its name.
      systems: by their names.
      corpus: whose sources the page shows; None: there are none.
      threads: in which the systems answer.
      adapters: of the language model, which answer under their names.
      reranker: scores pairs of a query and a text, and its name; None: the encoder's cosines do.
      also: corpora of further folders, by name.
      growing: the first folder, where documents may be added to it.
      corpora: all by folder; "" is the first one.
    """

    title: str
    llm: ServedModel | None
    llm_name: str
    embedder: Any
    embedder_name: str
    systems: dict[str, System]
    corpus: AskedCorpus | None
    threads: Threads
    adapters: Sequence[str] = ()
    reranker: CrossEncoderReranker | None = None
    reranker_path: str = ""
    also: Mapping[str, AskedCorpus] = dataclasses.field(default_factory=dict)
    growing: Growing | None = None
    corpora: dict[str, AskedCorpus] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.corpora.update({} if self.corpus is None else {"": self.corpus}, **self.also)

    def renew(self, answerer: FolderAnswerer) -> None:
        """Answers from the first folder as it was opened anew; what has begun ends as it began."""
        self.corpora[""] = answerer.corpus
        for name, system in [*self.systems.items()]:
            if isinstance(system, ReadPassages | FindPassages) and not system.folder:
                changes = {"answerer": answerer, "examples": examples_of(answerer.corpus)}
                self.systems[name] = dataclasses.replace(system, **changes)

    @property
    def reranker_name(self) -> str:
        """The model that `/v1/rerank` answers with."""
        return self.embedder_name if self.reranker is None else self.reranker_path

    @property
    def llm_names(self) -> list[str]:
        """The names under which the language model answers."""
        return [] if self.llm is None else [self.llm_name, *self.adapters]

    @property
    def model_names(self) -> list[str]:
        """Returns the models that requests of OpenAI's API may name."""
        names = [*self.llm_names, *self.systems, self.embedder_name, self.reranker_name]
        return list(dict.fromkeys(names))

    def embed(self, texts: Sequence[str]) -> Asking:
        """Unit vectors float32 [n, D] of texts, without the encoder's prompts, and their tokens."""

        def answer(turn: Turn) -> tuple[np.ndarray, int]:
            vectors, tokens = [], 0
            for begin in range(0, len(texts), _AT_ONCE):
                some = list(texts[begin : begin + _AT_ONCE])
                with turn():  # others come in between, and who has left computes no further
                    vectors.append(self.embedder.embed_texts(some))
                    tokens += sum(map(len, self.embedder.tokenizer.encode_batch(some)))
            return np.concatenate(vectors), tokens

        return self.threads.start(answer)

    def relevance(self, query: str, documents: Sequence[str]) -> Asking:
        """Scores float32 [n] of documents for a query: P(relevant) by the reranker, or cosines."""

        def answer(turn: Turn) -> np.ndarray:
            scores = []
            if self.reranker is None:
                with turn():
                    (vector,) = self.embedder.embed_questions([query])
            for begin in range(0, len(documents), _AT_ONCE):
                some = list(documents[begin : begin + _AT_ONCE])
                with turn():
                    if self.reranker is None:
                        scores.append(self.embedder.embed_passages(some) @ vector)
                    else:
                        scores.append(self.reranker.relevance([(query, text) for text in some]))
            return np.concatenate(scores)

        return self.threads.start(answer)

    @property
    def unfinished(self) -> int:
        """Requests that the language model has to answer."""
        return 0 if self.llm is None else self.llm.online.unfinished

    @property
    def is_serving(self) -> bool:
        """Whether the language model takes requests."""
        return self.llm is None or self.llm.online.is_serving

    def close(self) -> None:
        """Ends when all that was taken is answered."""
        self.threads.close()
        if self.llm is not None:
            self.llm.close()
