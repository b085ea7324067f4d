"""Several callers of one language model, whose queries are answered in common calls.

A caller is a function that asks models as if it were alone, such as a row of `mmqa sweep`. Each has
a thread, but one alone runs at any time: it runs until it asks; once all ask, their queries go
to the model in one call, and each caller gets its answers as they come. So callers may share what
no two threads may use at once, and what they do does not depend on timing.
"""

from __future__ import annotations

import contextvars
import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mmqa_jax.core.progress import Progress
from mmqa_jax.decoding.requests import Result, Scores
from mmqa_jax.prompting.backends import Around, Backend, Failure, Query, Usage
from mmqa_jax.prompting.cache import Cached, request_key
from mmqa_jax.prompting.stream import text_of

T = TypeVar("T")
Join = Callable[[Cached], Cached]  # from a model to that through which one caller asks it
_END: Any = object()  # of the answers to a call


def run_joined(callers: Sequence[Callable[[Join], T]]) -> Generator[tuple[int, T]]:
    """Runs functions together; yields the place and result of each as it ends.

    What one of them, or the model, raises ends all: each is raised the same where it waits.

    Args:
      callers: each asks models only as its `Join` returns them, one call after another.
    """
    threads = [_Caller(function) for function in callers]
    going = dict(enumerate(threads))
    try:
        for thread in threads:
            thread.begin()
        while going:
            for place, thread in list(going.items()):
                if isinstance(thread.said, _Ended):
                    del going[place]
                    yield place, thread.said.result()
            calls = [thread.said for thread in going.values()]
            if calls:
                _answer([call for call in calls if call.backend is calls[0].backend])
    except BaseException as error:
        for thread in threads:
            thread.stop(error)
        raise


def _answer(calls: Sequence[_Call]) -> None:
    """Answers calls to one model as one; queries with the same answer are asked once."""
    backend = calls[0].backend
    asked: dict[str, list[tuple[_Call, Query]]] = {}
    for call in calls:
        for query in call.queries:
            asked.setdefault(request_key(backend.fingerprint, query), []).append((call, query))
    # In the order of their texts, as each caller alone sends them.
    shared = sorted(asked.values(), key=lambda same: text_of(same[0][1]))
    merged = [dataclasses.replace(same[0][1], id=n) for n, same in enumerate(shared)]
    before = len(backend.failures)
    with Progress(f"Answering {len(calls)} rows", len(merged), "requests") as progress:
        for answer in backend.answer(merged):
            for call, query in shared[answer.id]:
                call.give(dataclasses.replace(answer, id=query.id))
            rates = {kind: f"{rate:.0f} tokens/s" for kind, rate in backend.rates().items()}
            progress.advance(**rates)
    for failure in backend.failures[before:]:
        for call, query in shared[failure.id]:
            call.fail(Failure(query.id, failure.reason))
    for call in calls:
        call.give(_END)


class _Joined(Around):
    """A model as one caller asks it; see backends.Backend."""

    def __init__(self, backend: Backend, caller: _Caller):
        super().__init__(backend)
        self._caller = caller
        self._usage, self._failures = Usage(), list[Failure]()

    @property
    def usage(self) -> Usage:
        """The caller's own."""
        return self._usage

    @property
    def failures(self) -> list[Failure]:
        """The caller's own."""
        return self._failures

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """See Backend; waits until all callers ask."""
        call = _Call(self._backend, list(queries), self, self._caller)
        while (answer := self._caller.say(call)) is not _END:
            self._usage.requests += 1
            yield answer


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """What a caller asks at once."""

    backend: Backend
    queries: Sequence[Query]
    asker: _Joined
    caller: _Caller

    def give(self, answer: Any) -> None:
        """Hands the caller its next answer; not to one that has stopped reading them."""
        if self.caller.said is self:
            self.caller.resume(answer)

    def fail(self, failure: Failure) -> None:
        """One of the queries has no answer."""
        self.asker.failures.append(failure)
        self.asker.usage.failures += 1


@dataclasses.dataclass(frozen=True)
class _Ended:
    """A caller's result, or what it raised."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class _Caller:
    """A function in a thread, which runs from `resume` until it says something.

    Attributes:
      said: last: a call, whose next answer it waits for, or that it has ended.
    """

    def __init__(self, function: Callable[[Join], Any]):
        self._function = function
        self._turns: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[_Call | _Ended] = queue.SimpleQueue()
        self._stopped: BaseException | None = None
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), daemon=True)
        self.said: _Call | _Ended | None = None

    def begin(self) -> None:
        """Runs it until it says something."""
        self._thread.start()
        self.said = self._told.get()

    def resume(self, answer: Any) -> None:
        """Gives it what it waits for, and runs it until it says something."""
        self._turns.put(answer)
        self.said = self._told.get()

    def stop(self, error: BaseException) -> None:
        """Raises an error where it waits, or will wait next; returns when it has ended."""
        if self._thread.ident is not None:  # it has begun
            self._stopped = error
            self._turns.put(_END)
            self._thread.join()

    def say(self, call: _Call) -> Any:
        """In its own thread: tells a call, and waits for an answer."""
        self._told.put(call)
        answer = self._turns.get()
        if self._stopped is not None:
            self._turns.put(_END)  # for what asks in spite of it
            raise self._stopped
        return answer

    def _run(self) -> None:
        try:
            self._told.put(_Ended(self._function(self._join)))
        except BaseException as error:
            self._told.put(_Ended(error=error))

    def _join(self, model: Cached) -> Cached:
        return model.through(lambda backend: _Joined(backend, self))
