"""Opens what one server answers with, and serves until it is told to end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.folder import FolderOptions
from mmqa_jax.data.records.corpus_records import MANIFEST
from mmqa_jax.decoding.requests import Scoring
from mmqa_jax.inference.cross_encoder import CrossEncoderReranker
from mmqa_jax.prompting.backends import Chat, Decoding, Message
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.prompting.llm_reader import LLMReaderOptions
from mmqa_jax.runs.ask import Answerer
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.ask_folder import AskOptions, FolderAnswerer, open_folder
from mmqa_jax.runs.ask_row import RowAnswerer, open_row
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.prepare import folder_notes
from mmqa_jax.runs.row import recorded_row
from mmqa_jax.runs.status import finished_rows, kind_of
from mmqa_jax.serve import LOOPBACK, ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.systems import (
    DemoChain,
    FindPassages,
    FromMemory,
    Growing,
    Parts,
    ReadPassages,
    RowSystem,
    System,
    Threads,
    examples_of,
)
from mmqa_jax.tasks.library import open_text_embedder
from mmqa_jax.tasks.rerank import open_reranker

_ENDING = (signal.SIGINT, signal.SIGTERM)
_SYSTEMS = (ReadPassages.name, FromMemory.name)  # which a language model adds


def bind(options: ServeOptions) -> socket.socket:
    """Opens the socket to listen at, before models are loaded: a wrong port costs nothing."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(
            f"--host={options.host} --port={options.port}: cannot be listened at ({error}); name "
            "another port, or --port=0 for a free one."
        ) from error
    return listening


def open_parts(
    open_model: Callable[[], Any] | None,
    model_name: str,
    options: ServeOptions,
    *,
    data: Path | None = None,
    also: Sequence[Path] = (),
    workdir: Path | None = None,
    cache: Path | None = None,
    folder: FolderOptions | None = None,
    asking: AskOptions | None = None,
    reading: LLMReaderOptions | None = None,
    adapters: Sequence[str] = (),
) -> Parts:
    """Loads what there is to answer with, and lets its programs compile.

    Args:
      open_model: opens the language model: one of this process, which is then served, or a
        server's, which reads passages alone; None: there is none.
      data: a folder of documents or a prepared corpus.
      also: further ones, each with systems of its own.
      workdir: a finished demo, or a row of `mmqa run`.
      cache: where what was read of the documents of `data` is kept.
      folder: how documents become sources; None: the defaults.
      adapters: names of those that the model was opened with.
    """
    threads = Threads(options.queue)
    asking, reading = asking or AskOptions(), reading or LLMReaderOptions()
    growing = None
    if options.uploads:
        if data is None or not _is_of_documents(data):
            raise UserError(
                f"--uploads={options.uploads}: documents are added to a folder of documents; name "
                "one as --data."
            )
        growing = Growing(data, functools.partial(_answerer, data, cache, folder, asking))
    corpus: AskedCorpus | None = None
    embedder: Any = None
    embedder_name, title = asking.encoder, model_name
    systems: list[System] = []
    answerers: dict[str, FolderAnswerer] = {}
    answerer: FolderAnswerer | None = None
    if data is not None:
        answerer = answerers[""] = _answerer(data, cache, folder, asking)
        corpus, embedder = answerer.corpus, answerer.embedder
        title = data.resolve().name
        for path in also:
            name = path.resolve().name
            if name in (*answerers, title):
                raise UserError(
                    f"--also={path}: another folder is called {name} already; rename one of them."
                )
            answerers[name] = _answerer(path, None, folder, asking)
        for name, of_folder in answerers.items():
            examples = examples_of(of_folder.corpus)
            systems.append(_named(FindPassages(of_folder, threads, examples), name))
    elif workdir is not None:
        title = workdir.resolve().name
        corpus, demo, systems = _of_workdir(workdir, threads)
        if demo is not None:
            embedder, embedder_name = demo.embedder, "contrastive"
    if embedder is None:
        embedder, _ = open_text_embedder(asking.encoder, Corpus([]))
    reranker: Any = None
    if asking.reranker:
        reranker = answerer.reranker if answerer else open_reranker(asking.reranker, Corpus([]))
        if not isinstance(reranker, CrossEncoderReranker):
            reranker = None  # it scores sources of its corpus alone
    names = {model_name, embedder_name, *(system.name for system in systems), *_SYSTEMS}
    if same := sorted(names.intersection(adapters)):
        raise UserError(
            f"--adapter={same[0]}=...: another model has this name already; choose another one."
        )
    llm: ServedModel | None = None
    if open_model is not None:
        backend = open_model()
        llm = _served(backend, 2 * options.queue)  # those of clients that left end in a moment
        session: Callable[[Callable[[str], None]], Any] = (
            (lambda on_text: backend) if llm is None else llm.session
        )
        systems[:0] = [
            _named(
                ReadPassages(
                    of_folder, session, reading, threads, options.follow_up,
                    examples_of(of_folder.corpus),
                ),
                name,
            )
            for name, of_folder in answerers.items()
        ]  # fmt: skip
        memory = corpus if corpus is not None else AskedCorpus(Corpus([]))
        systems.append(FromMemory(memory, session, reading, threads))
    further = {name: of_folder.corpus for name, of_folder in answerers.items() if name}
    return Parts(
        title, llm, model_name, embedder, embedder_name,
        {system.name: system for system in systems}, corpus, threads, tuple(adapters),
        reranker, asking.reranker, further, growing,
    )  # fmt: skip


def _is_of_documents(folder: Path) -> bool:
    """Whether a folder holds documents, and no prepared or interchange corpus."""
    return not any((folder / name).exists() for name in (MANIFEST, "sources.jsonl"))


def _answerer(
    data: Path, cache: Path | None, folder: FolderOptions | None, asking: AskOptions
) -> FolderAnswerer:
    """A folder's answerer, whose programs are compiled."""
    corpus = open_folder(data, cache, folder, encoder=asking.encoder)
    for line in (*folder_notes(corpus.manifest["origin"]), *asking.notes):
        print(line, file=sys.stderr)
    answerer = FolderAnswerer(corpus, None, asking)
    with corpus.asked("What is this?") as question:
        for several in (1, 2):  # compiles what one user needs, and what some at once need
            answerer.find([question] * several)
    return answerer


def _named(system: ReadPassages | FindPassages, folder: str) -> ReadPassages | FindPassages:
    """A system of a folder beside the first one, which is named after it."""
    if not folder:
        return system
    label = f"{folder}: {system.label[0].lower()}{system.label[1:]}"
    name = f"{system.name}:{folder}"
    return dataclasses.replace(system, folder=folder, name=name, label=label)


def serve(parts: Parts, listening: socket.socket, options: ServeOptions) -> None:
    """Answers until SIGINT or SIGTERM; then what has begun is answered, and nothing new taken."""
    host, port = listening.getsockname()[:2]
    server = make_server(make_app(parts, options), options)
    listening.listen(BACKLOG)  # who reads the address below may connect at once
    address = f"[{host}]" if ":" in host else host
    names = ", ".join(parts.model_names)
    print(f"mmqa serve: http://{address}:{port}/ (API: /v1, models: {names})", file=sys.stderr)
    if options.host not in LOOPBACK and not options.key:
        print(
            "mmqa serve: whoever reaches this machine may ask without a key; --key_env=NAME "
            "requires one.",
            file=sys.stderr,
        )
    os.environ.setdefault("MMQA_PROGRESS", "off")  # each answer would show its own
    # uvicorn raises the signal that ended it again, once all answers are given.
    before = {number: signal.signal(number, _ignored) for number in _ENDING}
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_stdio(parts: Parts) -> None:
    """Answers an assistant's calls over stdin and stdout, until stdin ends."""
    from mmqa_jax.serve.mcp_tools import mcp_server

    os.environ.setdefault("MMQA_PROGRESS", "off")
    try:
        mcp_server(parts).run("stdio")
    finally:
        parts.close()


def key_of(variable: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The key that an environment variable holds; UserError if it is empty or missing."""
    if variable is None:
        return ""
    key = environment.get(variable, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"--key_env={variable}: this environment variable holds no key (printable ASCII "
            "without spaces); set it."
        )
    return key


def _ignored(*_: object) -> None:
    """A handler that does nothing."""


def _served(backend: Any, most: int) -> ServedModel | None:
    """An engine behind a queue, its programs compiled by a first answer; None for a server."""
    from mmqa_jax.prompting.backends.engine import EngineBackend
    from mmqa_jax.prompting.backends.t5 import T5Backend

    if not isinstance(backend, EngineBackend | T5Backend):
        return None
    model = ServedModel(backend, most)
    text = "Programs compile for the first answer. " * 30  # chunks of every size
    ids = backend.tokenizer.encode(text)[: backend.length // 2]
    first = (Decoding(max_new_tokens=4).request(0, ids), Scoring(0, ids[:1], [ids[1:3]]))
    for request in first:
        model.submit(request).future.result()
    if isinstance(backend, EngineBackend) and backend.takes_messages:
        # What renders the template takes seconds to import.
        backend.prompt_tokens(Chat(0, (Message("user", text),)))
    return model


def _of_workdir(
    workdir: Path, threads: Threads
) -> tuple[AskedCorpus, Answerer | None, list[System]]:
    """The systems of a finished demo and its rows, or of one row; the demo's own is ready."""
    if kind_of(workdir) == "row":
        answerer = open_row(workdir)
        return answerer.corpus, None, [RowSystem(answerer, threads)]
    data = workdir / "data"
    corpus_of_demo = AskedCorpus(open_corpus(data)) if data.is_dir() else None
    demo = Answerer(workdir, corpus_of_demo)
    demo.answer("What is this?")
    systems: list[System] = [DemoChain(demo, threads)]
    opened = OpenedParts(demo.corpus)
    for name in finished_rows(workdir):
        row = recorded_row(workdir / name)
        same = Path(row.data.dir).resolve() == data.resolve()
        same = same and not (row.data.context or row.data.sources)
        # The constant answer takes no part, and reads no question.
        asks = row.answers and row.parts and not row.answering.needs_all
        if same and asks and not row.missing_inputs():
            systems.append(RowSystem(RowAnswerer(row, demo.corpus, opened), threads))
            demo.corpus.materials = row.materials(demo.corpus)
    return demo.corpus, demo, systems


# Connections of one server: how many there are, and how long the header of a request may take.


_GRACE = 10  # seconds beyond an answer's own limit that the end waits for answers
_MOST_FILES = 2**16
_MOST = 4096  # connections
BACKLOG = 2048  # connections that wait to be accepted


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which has no deadline for a header and no bound on idle connections.

    A connection that has sent no whole header in time is closed. Where there are too many, the one
    that has waited longest for its header is.

    Args:
      waiting: connections without a whole header, the oldest first; one for all.
      most: connections.
    """

    def __init__(
        self,
        waiting: dict[BoundedProtocol, None],
        most: int,
        options: ServeOptions,
        **uvicorn_options: Any,
    ):
        super().__init__(**uvicorn_options)
        self._waiting, self._most, self._options = waiting, most, options
        self._served: Any = None  # the request that was being served at the last look
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._look()
        if len(self.connections) > self._most:
            next(iter(self._waiting))._abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(error)
        self._forget()

    def _look(self) -> None:
        """Starts the clock of what the connection waits for."""
        is_served = self.cycle is not None and not self.cycle.response_complete
        served = self.cycle if is_served else None
        if served is self._served and self._end is not None:
            return
        self._forget()
        self._served = served
        if is_served:  # the door ends requests, but not replies that nobody reads
            self._end = self.loop.call_later(self._options.timeout + _GRACE, self._abort)
        else:  # a reply may still be on its way: it is sent to its end
            self._waiting[self] = None
            self._end = self.loop.call_later(self._options.header, self.transport.close)

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._end is not None:
            self._end.cancel()

    def _abort(self) -> None:
        self._forget()
        self.connections.discard(self)
        self.transport.abort()


class _Server(uvicorn.Server):
    """More connections may wait than are accepted at once: else clients try again after seconds."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


def make_server(app: Any, options: ServeOptions) -> uvicorn.Server:
    """A server of an ASGI application, not yet running."""
    files = _open_files()
    most, waiting = min(files // 2, _MOST), dict[BoundedProtocol, None]()
    protocol = functools.partial(BoundedProtocol, waiting, most, options)
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # what makes one is enough
        ws="none",
        # Of other loops accept does not end before connections are closed.
        loop="asyncio",
        log_level="warning",
        access_log=False,
        use_colors=False,  # would be shown escaped (core/progress.py)
        # As many are accepted at once, a few times before the first of them can be closed.
        backlog=min(files // 16, BACKLOG),
        timeout_graceful_shutdown=int(options.timeout) + _GRACE,
        server_header=False,
        proxy_headers=False,
    )
    return _Server(config)


def _open_files() -> int:
    """How many files this process may have open, raised as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: any number
    most = min(hard, _MOST_FILES) if hard >= 0 else _MOST_FILES
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)
