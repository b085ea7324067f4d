"""The interface of all language models: queries in, answers out.

Two backends implement it: the Flax engine (engine.py) and any server that speaks OpenAI's
HTTP API (http.py). `cache.Cached` wraps either and answers repeated queries from disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Request, Result, Scores, Unanswerable
from mmqa_jax.prompting.backends.thinking import Thinking

ROLES = ("system", "user", "assistant")
_MEDIA_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """An encoded picture (PNG, JPEG, GIF or WebP), the bytes of its file."""

    data: bytes = dataclasses.field(repr=False)
    name: str = dataclasses.field(default="picture", compare=False)  # for messages

    @property
    def media_type(self) -> str:
        """Returns its MIME type, from the first bytes; raises Unanswerable for another format."""
        for magic, media_type in _MEDIA_TYPES.items():
            if self.data.startswith(magic):
                return media_type
        raise Unanswerable(f"{self.name}: not a PNG, JPEG, GIF or WebP picture; convert it.")

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded bytes."""
        return hashlib.sha256(self.data).hexdigest()


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a conversation: texts and pictures in order."""

    role: str  # of ROLES
    content: tuple[str | Picture, ...]

    def __post_init__(self):
        if self.role not in ROLES:
            raise UserError(f"message: role is {self.role!r}, expected one of {', '.join(ROLES)}.")
        content = (self.content,) if isinstance(self.content, str) else tuple(self.content)
        object.__setattr__(self, "content", content)

    @property
    def text(self) -> str:
        """Joins its texts, without the pictures."""
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Returns its pictures."""
        return tuple(part for part in self.content if isinstance(part, Picture))


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How an answer is decoded; the fields are those of decoding.requests.Request."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    n: int = 1
    seed: int = 0
    logprobs: bool = False
    beams: int = 0
    length_penalty: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()
    top_logprobs: int = 0
    grammar: str = ""

    def request(
        self, request_id: Hashable, prompt: Sequence[int] = (0,), images: Sequence[Any] = ()
    ) -> Request:
        """The engine's request; raises UserError for values that no backend could serve."""
        return Request(request_id, prompt, images=images, **vars(self))


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text to be continued; `<image>` marks where a picture goes, otherwise they come first."""

    id: Hashable
    prompt: str
    decoding: Decoding = Decoding()
    images: tuple[Picture, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation whose next message is generated, behind what of it has `begun`; `thinking` is
    what its template is told where that differs from the backend's."""

    id: Hashable
    messages: tuple[Message, ...]
    decoding: Decoding = Decoding()
    begun: str = ""
    thinking: Thinking | None = None


@dataclasses.dataclass(frozen=True)
class Choices:
    """A text or a conversation, and continuations to be scored.

    Attributes:
      hidden: pieces of the prompt in their order, of a backend that `hides`: the continuations are
        scored with all of it, and once more with each of these hidden, from the prompt's last token
        on. What stands behind a hidden piece in the prompt has been read with it.
    """

    id: Hashable
    prompt: str | tuple[Message, ...]
    continuations: tuple[str, ...]
    images: tuple[Picture, ...] = ()  # of a text
    hidden: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.continuations:
            raise Unanswerable(f"request {self.id!r}: it has no choices; give at least one.")


Query = Completion | Chat | Choices


@dataclasses.dataclass(frozen=True)
class Failure:
    """A query without an answer, and why."""

    id: Hashable
    reason: str


@dataclasses.dataclass
class Usage:
    """Counts of a backend's work so far."""

    requests: int = 0  # answered by the model itself
    cached: int = 0  # answered from a response cache instead
    unreadable: int = 0  # entries of it that were damaged, and asked for again
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    thinking_tokens: int = 0  # of these, as far as they are counted

    def add(self, result: Result) -> None:
        """Counts the new tokens of a result that has them."""
        for candidate in result.candidates:
            self.completion_tokens += len(candidate.tokens)
            self.thinking_tokens += candidate.thinking_tokens or 0


class Backend(Protocol):
    """A language model: queries in, answers out as they are finished."""

    usage: Usage
    failures: list[Failure]

    @property
    def takes_pictures(self) -> bool | None:
        """Whether the model sees; None: a server's, which does not say."""

    @property
    def takes_messages(self) -> bool:
        """Whether it answers conversations; a model without a chat template continues texts."""

    @property
    def hides(self) -> bool:
        """Whether it scores with pieces of a prompt hidden, where that has no pictures."""

    @property
    def parameters(self) -> int | None:
        """How many a decoder of this process has; None: it is a server's or another's, unknown."""

    @property
    def fingerprint(self) -> str:
        """Differs between models whose answers may differ; part of the response cache's key."""

    def check(self, query: Query) -> None:
        """Raises UserError, before anything is computed, for a query that cannot be served;
        Unanswerable where that is because of its own text or picture."""

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """Answers queries in any order, with their ids, which must be unique within a call.

        Queries are read a few ahead. One that finally fails is missing from the results and listed
        in `failures`; too many failures end the run with a RunError.
        """

    def rates(self) -> dict[str, float]:
        """Tokens per second by kind of work, such as `prefill` and `decode`."""

    def sizes(self) -> dict[str, Any] | None:
        """Devices and sizes of what answered in this process; None: nothing did."""


class Around:
    """A backend around another one, which does all that a subclass does not do in its place."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "_backend":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._backend, name)


class WithRoom(Around):
    """A backend whose conversations have room for thoughts beside their answers."""

    def __init__(self, backend: Backend, room: int):
        super().__init__(backend)
        self._room = room
        self.fingerprint = f"{backend.fingerprint}, {room} tokens of thoughts"

    def check(self, query: Query) -> None:
        """The backend's, of a query with its thoughts."""
        self._backend.check(self._with_room(query))

    def answer(self, queries: Iterable[Query]) -> Iterator[Any]:
        """The backend's, to queries with their thoughts."""
        return self._backend.answer(map(self._with_room, queries))

    def _with_room(self, query: Query) -> Query:
        if not isinstance(query, Chat):
            return query
        most = query.decoding.max_new_tokens + self._room
        decoding = dataclasses.replace(query.decoding, max_new_tokens=most)
        return dataclasses.replace(query, decoding=decoding)
