"""The Flax engine as a backend: tokenizes texts, conversations and pictures."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES
from mmqa_jax.data.pictures import decode
from mmqa_jax.data.pictures.decode import PictureError
from mmqa_jax.decoding import requests
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.sizes import LENGTH, UNKNOWN, Demand, sizes_json
from mmqa_jax.models.llava.config import PictureConfig
from mmqa_jax.prompting.backends import Chat, Choices, Failure, Message, Picture, Query, Usage
from mmqa_jax.prompting.backends.thinking import Thinking, with_thinking_tokens
from mmqa_jax.prompting.llava_prompt import PLACEHOLDER
from mmqa_jax.prompting.picture_format import picture_format, shown_pictures
from mmqa_jax.prompting.text_tokenizer import TextTokenizer, pictures_of
from mmqa_jax.weights.registry import nouns

_SHARED = 512  # tokens of continuations that are scored side by side, the most that are foreseen


def _sequences(query: Query) -> int:
    return 1 if isinstance(query, Choices) else query.decoding.n


class Prompt(NamedTuple):
    """A query's prompt, as the engine takes it."""

    tokens: list[int]  # one placeholder per picture
    pictures: tuple[Picture, ...]
    encode: Callable[[str], list[int]]  # for longer prompts with this prefix
    text: str  # shielded but for its marks
    before_answer: str  # see text_tokenizer.ChatFormat


class EngineBackend:
    """Serves from a language model, with a tower or not, in this process; see backends.Backend.

    Args:
      make_engine: called for the first queries with what they need, so that a run whose answers
        are all cached loads no weights. The engine must have the same tokenizer.
      tokenizer: of the model, with its chat template.
      length: the most tokens of a prompt with its answer.
      fingerprint: of weights and numerics (see local_model).
      pictures: the config of a model that takes them; None: it takes none.
      resize: gives the engine the sizes for later queries that need larger ones; None: its sizes
        are enough for all.
      hides, parameters: see backends.Backend.

    Attributes:
      cannot: what of a request it cannot do, and why: nothing.
    """

    cannot: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        make_engine: Callable[[Demand], Engine],
        tokenizer: TextTokenizer,
        *,
        length: int,
        fingerprint: str,
        pictures: PictureConfig | None = None,
        resize: Callable[[Engine, Demand], None] | None = None,
        hides: bool = False,
        parameters: int | None = None,
    ):
        self._make_engine, self.tokenizer = make_engine, tokenizer
        self._pictures = None if pictures is None else picture_format(pictures, tokenizer)
        self.length, self.fingerprint = length, fingerprint
        self._chat_format = tokenizer.template if pictures is None else self._pictures.chat_format
        self.takes_pictures = pictures is not None
        self.page_prompt: str = getattr(pictures, "page_prompt", "")
        self.takes_messages = self._chat_format is not None
        self.hides, self.parameters = hides, parameters
        self._throughput = requests.Throughput()  # the engine's, once it is made
        self._warm = requests.Throughput()  # at the first result: most of it compiling
        self._resize, self._engine, self._demand = resize, None, UNKNOWN
        self._checked = Demand(0, 0, 0, 0)
        self.usage = Usage()
        self.failures: list[Failure] = []  # pictures that prove to be broken behind their header

    @property
    def engine(self) -> Engine:
        """The engine, made on first use."""
        return self._engine_for(UNKNOWN)

    def _engine_for(self, demand: Demand) -> Engine:
        if self._engine is None:
            self._engine, self._demand = self._make_engine(demand), demand
            self._throughput = self._engine.throughput
        return self._engine

    def _prepared(self, prompts: Sequence[tuple[Query, Prompt]]) -> Engine:
        """The engine with sizes for queries.

        It is resized once for more sequences, more than twice the first ones, then for any number;
        and once for longer prompts, then up to LENGTH tokens.
        """
        needed = Demand(0, self._checked.tokens, 0, 0)
        for query, prompt in prompts:
            needed = self._with(needed, query, prompt)
        # All that is checked, so that a job that goes on elsewhere takes the same sizes.
        more = needed.sequences > self._checked.sequences
        most = needed if more else dataclasses.replace(self._checked, tokens=needed.tokens)
        engine, first = self._engine_for(most), self._demand
        if self._resize is None:
            return engine
        sequences, tokens = first.sequences, first.tokens
        if sequences is not None and needed.sequences > 2 * sequences:
            sequences = None
        if tokens is not None and needed.tokens > engine.config.length:
            tokens = None if needed.tokens <= LENGTH else needed.tokens
        if (sequences, tokens) != (first.sequences, first.tokens):
            self._demand = Demand(sequences, tokens)
            self._resize(engine, self._demand)
        return engine

    def fixed(self) -> Engine:
        """The engine in sizes that stay: from now on `check` refuses what exceeds them."""
        engine, self._resize = self.engine, None
        self.length = engine.config.length
        return engine

    def sizes(self) -> dict[str, Any] | None:
        """Devices, mesh and sizes of the engine; None: it was not needed."""
        if self._engine is None:
            return None
        mesh = self._engine.mesh
        shape = dict.fromkeys(MESH_AXES, 1) if mesh is None else dict(mesh.shape)
        return sizes_json(shape, self._engine.config)

    def rates(self) -> dict[str, float]:
        """Tokens per second of prefill and decoding, measured from the first result on (before it
        the engine compiles) if anything follows it."""
        pairs = zip(vars(self._throughput).items(), vars(self._warm).values(), strict=True)
        since = requests.Throughput(**{name: now - then for (name, now), then in pairs})
        measured = since if since.prefill_tokens and since.steps else self._throughput
        return {"prefill": measured.prefill_rate, "decode": measured.decode_rate}

    def check(self, request: Query) -> None:
        """Rejects what the engine would reject, and loads no weights: TooLong where the prompt with
        its new tokens exceeds the engine's length, Unanswerable for an empty prompt, a broken
        picture, or a continuation that adds no token."""
        prompt = self._prompt(request)
        if not prompt.tokens:
            raise requests.Unanswerable(
                f"request {request.id!r}: its prompt is empty; give some text."
            )
        for picture in shown_pictures(prompt.pictures):
            try:
                decode.verify(picture.picture.data, picture.picture.name)
                self._pictures.tokens(picture)
            except decode.PictureError as error:
                raise requests.Unanswerable(str(error)) from error
        if not isinstance(request, Choices):
            asked = request.decoding.request(request.id, images=prompt.pictures)
            requests.check_one_end(asked, self.tokenizer.end_ids)
        count, more, _ = self._count_tokens(request, prompt)
        if count + more > self.length:
            raise requests.TooLong(request.id, count, more, self.length)
        self._checked = self._with(self._checked, request, prompt)

    def _with(self, demand: Demand, request: Query, prompt: Prompt) -> Demand:
        """A demand with a query more."""
        sequences = _sequences(request)
        count, more, together = self._count_tokens(request, prompt)
        length = count + together
        if isinstance(request, Choices):  # what is scored is read, not written
            count, more = length, 1
        return Demand(
            demand.sequences + sequences,
            max(demand.tokens, min(length, self.length)),
            demand.prompt_tokens + sequences * count,
            demand.new_tokens + sequences * more,
        )

    def _count_tokens(self, request: Query, prompt: Prompt) -> tuple[int, int, int]:
        """Tokens of the prompt, the longest answer, and all answers that may share its columns."""
        count = self._prompt_tokens(prompt)
        if isinstance(request, Choices):
            lengths = [
                len(continuation) for continuation in self._continuations(request, prompt)[1]
            ] * (1 + len(request.hidden))
            together = max(max(lengths), min(sum(lengths), _SHARED))
        else:
            lengths, together = [request.decoding.max_new_tokens], request.decoding.max_new_tokens
        return count, max(lengths), together

    def answer(self, queries: Iterable[Query]) -> Iterator[requests.Result | requests.Scores]:
        """See Backend. Continuations of a conversation begin the assistant's next message.

        Pictures are decoded ahead in threads, as many as the engine reads requests at once. A query
        whose picture is broken is a failure.
        """
        prompts = [(query, self._prompt(query)) for query in queries]
        if not prompts:
            return
        for result in self._prepared(prompts).serve(self._requests(prompts)):
            self._count()
            if isinstance(result, requests.Result):
                result = with_thinking_tokens(result, self.tokenizer.decode)
                self.usage.add(result)
            yield result

    def _count(self) -> None:
        if not self.usage.requests:
            self._warm = dataclasses.replace(self._throughput)
        self.usage.requests += 1
        self.usage.prompt_tokens = self._throughput.prefill_tokens + self._throughput.reused_tokens

    def prompt_tokens(self, query: Query) -> int:
        """Tokens of a query's prompt, its pictures' patches among them."""
        return self._prompt_tokens(self._prompt(query))

    def new_tokens(self, query: Query) -> int:
        """The most that the context holds behind a query's prompt."""
        return max(self.length - self.prompt_tokens(query), 1)

    def _prompt_tokens(self, prompt: Prompt) -> int:
        of_pictures = [
            self._pictures.tokens(picture) - self._pictures.places(picture)
            for picture in shown_pictures(prompt.pictures)
        ]
        return len(prompt.tokens) + sum(of_pictures)

    def engine_request(self, query: Query) -> requests.Request | requests.Scoring:
        """Makes the engine's request of a checked query, with its pictures decoded; Unanswerable
        for one that is broken behind its header."""
        prompt = self._prompt(query)
        try:
            tiles = [
                self._pictures.read_all(picture) for picture in shown_pictures(prompt.pictures)
            ]
        except decode.PictureError as error:
            raise requests.Unanswerable(str(error)) from error
        return self._request(query, prompt, list(itertools.chain(*tiles)))

    def _requests(
        self, prompts: Sequence[tuple[Query, Prompt]]
    ) -> Iterator[requests.Request | requests.Scoring]:
        if self._pictures is None:
            yield from (self._request(query, prompt, ()) for query, prompt in prompts)
            return
        ahead = self.engine.look_ahead
        for (query, prompt), tiles in read_ahead(
            prompts, lambda pair: shown_pictures(pair[1].pictures), self._pictures.read_all, ahead
        ):
            if isinstance(tiles, decode.PictureError):
                self.failures.append(Failure(query.id, str(tiles)))
                self.usage.failures += 1
            else:
                yield self._request(query, prompt, list(itertools.chain(*tiles)))

    def _request(
        self, request: Query, prompt: Prompt, pixels: Sequence[np.ndarray]
    ) -> requests.Request | requests.Scoring:
        if not isinstance(request, Choices):
            return request.decoding.request(request.id, prompt.tokens, pixels)
        start, rows = self._continuations(request, prompt)
        if not request.hidden:
            return requests.Scoring(request.id, start, rows, images=pixels)
        hidden = self._places(request, prompt, start)
        trunk = min(hidden[-1][1], len(start) - 1)
        rows = [start[trunk:] + row for row in rows]
        places = [place for place in ((0, 0), *hidden) for _ in rows]
        return requests.Scoring(
            request.id,
            start[:trunk],
            rows * (1 + len(hidden)),
            hidden=places,
            unscored=len(start) - trunk,
        )

    def _places(
        self, request: Choices, prompt: Prompt, tokens: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Finds the first token of each hidden piece in the prompt, and the one behind its last."""

        def tokens_before(place: int) -> int:
            pairs = zip(prompt.encode(prompt.text[:place]), tokens, strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        places, end = [], 0
        for piece in map(self.tokenizer.shield, request.hidden):
            begin = prompt.text.index(piece, end)
            end = begin + len(piece)
            places.append((tokens_before(begin), tokens_before(end)))
        return places

    def _continuations(self, request: Choices, prompt: Prompt) -> tuple[list[int], list[list[int]]]:
        """The prompt's tokens, and those that each continuation adds to them.

        A text's last token may change with the continuation, and its last spaces belong to that, as
        in lm-evaluation-harness (TemplateLM._encode_pair); of a conversation both stay.
        """
        is_text = isinstance(request.prompt, str) and not prompt.pictures
        start = prompt.encode(prompt.text.rstrip()) if is_text else prompt.tokens
        rows = []
        for continuation in request.continuations:
            added = prompt.before_answer + self.tokenizer.shield(continuation)
            whole = prompt.encode(prompt.text + added)
            rows.append(whole[len(start) :])
            if not rows[-1] or not (is_text or whole[: len(start)] == start):
                raise requests.Unanswerable(
                    f"request {request.id!r}: continuation {continuation!r} adds no token to its "
                    "prompt, or merges with its last one; begin it with a new word."
                )
        return start, rows

    def _prompt(self, request: Query) -> Prompt:
        if isinstance(request, Chat):
            return self._conversation(request.id, request.messages, request.begun, request.thinking)
        if not isinstance(request.prompt, str):
            return self._conversation(request.id, request.prompt)
        if self._pictures is None:
            self._no_pictures(request.id, request.images)
            text, encode = self.tokenizer.shield(request.prompt), self.tokenizer.encode
        else:
            self._no_video(request.id, request.prompt)
            text = self._pictures.with_places(request.prompt, len(request.images))
            encode = self._encoder(request.id, text, request.images)
        return Prompt(encode(text), request.images, encode, text, "")

    def _conversation(
        self,
        request_id: Hashable,
        messages: Sequence[Message],
        begun: str = "",
        thinking: Thinking | None = None,
    ) -> Prompt:
        if self._chat_format is None:
            raise UserError(
                f"request {request_id!r}: it has messages, but the model has no chat template; "
                "give a `prompt`, or use a chat model."
            )
        pictures = pictures_of(messages)
        if self._pictures is None:
            self._no_pictures(request_id, pictures)
        text = self._chat_format.render(request_id, messages, thinking)
        if begun:
            text += self._chat_format.before_answer + self.tokenizer.shield(begun)
        if self._pictures is None:
            encode = self.tokenizer.encode_plain  # the template spells the special tokens
        else:
            encode = self._encoder(request_id, text, pictures)
        return Prompt(encode(text), pictures, encode, text, self._chat_format.before_answer)

    def _no_pictures(self, request_id: Hashable, pictures: Sequence[Picture]) -> None:
        if pictures:
            raise UserError(
                f"request {request_id!r}: it has pictures, but the model is a text-only LLaMA; "
                f"use a model that sees ({nouns('sees')}) or --backend=openai."
            )

    def _no_video(self, request_id: Hashable, text: str) -> None:
        video = self._pictures.video
        if video is not None and video in text:
            raise requests.Unanswerable(
                f"request {request_id!r}: its text has {video}, which stands for a video, and "
                "videos are not read here; give frames of it as pictures."
            )

    def _encoder(
        self, request_id: Hashable, text: str, pictures: Sequence[Picture]
    ) -> Callable[[str], list[int]]:
        """Encodes texts with these pictures, each of which has a placeholder."""
        count = text.count(self._pictures.placeholder)
        if count != len(pictures):
            raise UserError(
                f"request {request_id!r}: its text has {count} {PLACEHOLDER} "
                f"placeholders for {len(pictures)} pictures; write one for each, or none at all."
            )

        def encode(text: str) -> list[int]:
            try:
                return self._pictures.encode(text, shown_pictures(pictures))
            except decode.PictureError as error:
                raise requests.Unanswerable(str(error)) from error

        return encode


# Pictures of a stream of queries, decoded in threads before they are needed.


T, P = TypeVar("T"), TypeVar("P")


def read_ahead(
    items: Iterable[T],
    pictures_of: Callable[[T], Sequence[P]],
    read: Callable[[P], Any],
    ahead: int,
) -> Iterator[tuple[T, list[Any] | PictureError]]:
    """Items in their order, each with its pictures as `read` gives them, or with its error.

    A picture that recurs among the last `ahead` is read once.

    Args:
      items: read as far as they have `ahead` pictures, or are `ahead` themselves.
      pictures_of: of an item.
      read: called in threads; may raise PictureError.
      ahead: how many pictures may be in memory before they are needed, one item's at least.
    """
    source, started = iter(items), collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    submit = functools.lru_cache(maxsize=ahead)(functools.partial(pool.submit, read))
    pictures, exhausted = 0, False
    try:
        while started or not exhausted:
            while not exhausted and max(pictures, len(started)) < ahead:
                try:
                    item = next(source)
                except StopIteration:
                    exhausted = True
                    break
                futures = [submit(picture) for picture in pictures_of(item)]
                started.append((item, futures))
                pictures += len(futures)
            if not started:
                return
            item, futures = started.popleft()
            pictures -= len(futures)
            try:
                arrays: list[Any] | PictureError = [future.result() for future in futures]
            except PictureError as error:
                arrays = error
            yield item, arrays
    finally:
        pool.shutdown(cancel_futures=True)
