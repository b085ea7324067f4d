"""The engine in a thread of its own: requests join the running batch as they arrive.

Any thread submits; each request is answered through a future, and may hear of its tokens as they
are decoded. What an answer is does not depend on what else is served (see engine.py).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mmqa_jax.decoding import requests
from mmqa_jax.decoding.engine import Engine, Tokenized
from mmqa_jax.decoding.scheduler import GeneratedSequence, TokenizedRequest
from mmqa_jax.decoding.t5_engine import ArrivedRequest, T5Arrivals

OnToken = Callable[[GeneratedSequence], None]  # in the engine's thread, after each token
_CLOSE = object()


class QueueFull(Exception):
    """The queue holds as many waiting requests as it may."""


class Closed(Exception):
    """The engine takes no further request: it is being closed, or has failed."""


@dataclasses.dataclass(frozen=True)
class Pending:
    """A request that waits or is being served; its future gets a Result, Scores or the engine's
    failure.
    """

    future: concurrent.futures.Future[Any]
    _cancel: Callable[[], None]

    def cancel(self) -> None:
        """Ends the work on it, if it is not finished; its future is then cancelled."""
        if self.future.cancel():
            self._cancel()


@dataclasses.dataclass(frozen=True)
class _Arrival:
    number: int
    tokenized: Tokenized | ArrivedRequest


@dataclasses.dataclass(frozen=True)
class _Cancellation(_Arrival):
    """Cancels a request that arrived before."""


@dataclasses.dataclass(frozen=True)
class _Job:
    future: concurrent.futures.Future[Any]
    on_token: OnToken | None


class OnlineEngine:
    """Serves requests from many threads; a `with` block ends when all are answered.

    Args:
      engine: nobody else may use it until this is closed.
      most: requests that may be unfinished, those in slots included.
    """

    def __init__(self, engine: Engine | T5Arrivals, most: int = 256):
        self._engine, self._most = engine, most
        self._numbers = itertools.count()
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()  # of _jobs and _closed
        self._closed, self._failure = False, None
        self._being_served: set[int] = set()  # in the engine's thread alone
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests that wait or are being served."""
        return len(self._jobs)

    @property
    def is_serving(self) -> bool:
        """False once it is being closed or has failed."""
        return not self._closed

    def submit(
        self, request: requests.Request | requests.Scoring, on_token: OnToken | None = None
    ) -> Pending:
        """Hands a request to the engine; its own id only stands in messages.

        Raises:
          QueueFull, Closed: none can be, now or any more.
        """
        number = next(self._numbers)
        tokenized = self._engine.tokenized(request)
        tokenized.original = dataclasses.replace(tokenized.original, id=number)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise Closed(str(self._failure or "the engine is being closed"))
            if len(self._jobs) >= self._most:
                raise QueueFull(f"{self._most} requests are being served or wait")
            self._jobs[number] = _Job(future, on_token)
            # Under the lock, so that it is in front of what closes the queue.
            self._arrived.put(_Arrival(number, tokenized))
        return Pending(future, lambda: self._cancel(_Cancellation(number, tokenized)))

    def _cancel(self, cancellation: _Cancellation) -> None:
        self._arrived.put(cancellation)
        if isinstance(cancellation.tokenized, TokenizedRequest):
            self._engine.take_all()  # not only once fewer wait than there are slots

    def close(self) -> None:
        """Takes nothing new, and returns when what was taken is answered."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._arrived.put(_CLOSE)
        self._thread.join()

    def __enter__(self) -> OnlineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            for result in self._engine.serve(self._arrivals(), on_token=self._tell):
                self._being_served.discard(result.id)
                self._finish(result)
        except BaseException as error:
            with self._lock:
                self._closed, self._failure = True, error
                jobs, self._jobs = self._jobs, {}
            traceback.print_exception(error)
            for job in jobs.values():
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(Closed(f"the engine failed: {error!r}"))

    def _arrivals(self) -> Iterator[Tokenized | ArrivedRequest | None]:
        """What the engine is to serve next; it waits only where the engine has nothing to do."""
        while True:
            try:
                arrived = self._arrived.get(block=not self._being_served)
            except queue.Empty:
                yield None
                continue
            if arrived is _CLOSE:
                return
            if isinstance(arrived, _Cancellation):
                if isinstance(arrived.tokenized, TokenizedRequest):  # others soon have an end
                    self._engine.cancel(arrived.tokenized)
                    self._being_served.discard(arrived.number)
                self._pop(arrived.number)
            else:
                self._being_served.add(arrived.number)
                yield arrived.tokenized

    def _tell(self, sequence: GeneratedSequence) -> None:
        job = self._jobs.get(sequence.request.original.id)
        if job is not None and job.on_token is not None:
            job.on_token(sequence)

    def _finish(self, result: requests.Result | requests.Scores) -> None:
        job = self._pop(result.id)
        # A future that is being cancelled is not set.
        if job is not None and job.future.set_running_or_notify_cancel():
            job.future.set_result(result)

    def _pop(self, number: Any) -> _Job | None:
        with self._lock:
            return self._jobs.pop(number, None)


# The text of a sequence while its tokens are decoded.


class TextStream:
    """Turns tokens into pieces of text that are final: joined, they are the candidate's text.

    Held back is what the next token may change or take away: the first bytes of a character, and
    what may be the beginning of a stop string.

    `stops`: strings that end the text and are cut off.
    """

    def __init__(self, tokenizer: requests.Tokenizer, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._context = self._read = 0  # tokens[:read] are decoded; decoding begins at context
        self._held = ""

    def push(self, token: int, finish: str = "") -> str:
        """The text that is final once a token is added, with which the sequence ended if `finish`
        says how.
        """
        if finish != "end":  # an end token has no text
            self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._context : self._read])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if finish or not (text.endswith(requests.INCOMPLETE) or len(text) <= len(known)):
            self._held += text[len(known) :]
            self._context, self._read = self._read, len(self._tokens)
        if finish:
            final, self._held = requests.truncate(self._held, self._stops), ""
            return final
        final = self._held[: len(self._held) - self._begun()]
        self._held = self._held[len(final) :]
        return final

    def _begun(self) -> int:
        """How many characters at the end of the held text may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
