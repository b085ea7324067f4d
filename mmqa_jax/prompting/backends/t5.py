"""A T5 in this process as a backend: texts in, answers of the encoder-decoder out."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from mmqa_jax import __version__
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES, make_mesh, platform
from mmqa_jax.core.serving import AUTO
from mmqa_jax.decoding.requests import Request, Result, Scores, Scoring, Unanswerable, check_one_end
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.decoding.t5_engine import T5Arrivals, T5Engine, T5EngineConfig, check_servable
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5
from mmqa_jax.prompting.backends import Chat, Choices, Failure, Query, Usage
from mmqa_jax.prompting.text_tokenizer import TextTokenizer


class T5Backend:
    """Serves from a T5, Flan-T5 or mT5; see backends.Backend.

    A prompt is the encoder's text, and the answer all that the decoder says; continuations are
    scored as its answer. A conversation of one message, the user's, is that text.

    Args:
      make_engine: called for the first queries, so that a run whose answers are all cached loads no
        weights. The engine must have the same tokenizer.
      tokenizer: of the model.
      length: the most tokens of a prompt, and of an answer.
      fingerprint: of weights and numerics (see `open_t5_backend`).

    Attributes:
      cannot: what of a request it cannot do, and why.
    """

    takes_pictures = False
    takes_messages = False
    hides = False
    parameters = None
    cannot: Mapping[str, str] = MappingProxyType(
        {
            "stream": "a T5 answers in batches, each a program that runs to its end, so that there "
            "are no pieces to send; leave stream out",
            "echo": "a T5's encoder reads the prompt, and gives its tokens no log-probabilities; "
            "leave echo out",
        }
    )

    def __init__(
        self,
        make_engine: Callable[[], T5Engine],
        tokenizer: TextTokenizer,
        *,
        length: int,
        fingerprint: str,
    ):
        self._make_engine, self.tokenizer = make_engine, tokenizer
        self.length, self.fingerprint = length, fingerprint
        self._engine: T5Engine | None = None
        self.usage = Usage()
        self.failures: list[Failure] = []  # none: what cannot be served is refused by `check`

    def new_tokens(self, query: Query) -> int:
        """The most that an answer can have, whatever the prompt is."""
        return self.length

    def fixed(self) -> T5Arrivals:
        """The engine for requests that arrive one by one (decoding.online)."""
        return T5Arrivals(self.engine)

    @property
    def engine(self) -> T5Engine:
        """The engine, made on first use."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def check(self, query: Query) -> None:
        """Rejects what cannot be served, and loads no weights: TooLong where the prompt exceeds
        `length` tokens, Unanswerable for an empty prompt or a continuation without tokens."""
        text = self._text(query)
        if not self.tokenizer.encode_plain(text):
            raise Unanswerable(f"request {query.id!r}: its prompt is empty; give some text.")
        request = self.engine_request(query)
        check_servable(request, self.length)
        check_one_end(request, self.tokenizer.end_ids)

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """See Backend."""
        requests = [self.engine_request(query) for query in queries]
        if not requests:
            return
        for result in self.engine.serve(requests):
            self.usage.requests += 1
            self.usage.prompt_tokens += result.prompt_tokens
            if isinstance(result, Result):
                self.usage.add(result)
            yield result

    def rates(self) -> dict[str, float]:
        """New tokens per second of whole batches, the encoder's and compilation's time included."""
        return {} if self._engine is None else {"decode": self._engine.throughput.decode_rate}

    def sizes(self) -> dict[str, Any] | None:
        """Devices, mesh and sizes of the engine; None: it was not needed."""
        if self._engine is None:
            return None
        mesh, config = self._engine.mesh, self._engine.config
        shape = dict.fromkeys(MESH_AXES, 1) if mesh is None else dict(mesh.shape)
        return {
            "devices": 1 if mesh is None else mesh.size,
            "mesh": shape,
            **{name: getattr(config, name) for name in ("slots", "length", "tokens")},
            "buckets": list(config.buckets),
        }

    def _text(self, query: Query) -> str:
        """The prompt, shielded; UserError for what a T5 does not read."""
        pictures: Sequence[Any] = () if isinstance(query, Chat) else query.images
        text = query.messages if isinstance(query, Chat) else query.prompt
        if not isinstance(text, str):
            roles = [message.role for message in text]
            if roles != ["user"]:
                raise UserError(
                    f"request {query.id!r}: it has messages of {', '.join(roles)}, but a T5 has no "
                    "chat template and answers one message of the user's; put all into that, or "
                    "use a chat model."
                )
            text, pictures = text[0].text, text[0].pictures
        if pictures:
            raise UserError(
                f"request {query.id!r}: it has pictures, but a T5 reads text alone; use a LLaVA "
                "or --backend=openai."
            )
        return self.tokenizer.shield(text)

    def engine_request(self, query: Query) -> Request | Scoring:
        """Makes the engine's request of a query; it raises what `check` does."""
        tokens = self.tokenizer.encode(self._text(query))
        if not isinstance(query, Choices):
            return query.decoding.request(query.id, tokens)
        shielded = map(self.tokenizer.shield, query.continuations)
        continuations = list(map(self.tokenizer.encode_plain, shielded))
        for text, ids in zip(query.continuations, continuations, strict=True):
            if not ids:
                raise Unanswerable(
                    f"request {query.id!r}: continuation {text!r} has no token; give some text."
                )
        return Scoring(query.id, tokens, continuations)


# Opens a T5's weights on this machine as a backend.


_TAKEN = ("slots", "length", "buckets")  # of the section `engine`
_SLOTS, _TOKENS = (16, 128), (4096, 16384)  # of a batch: on a CPU, on another device
_SHORTEST = 64


def open_t5_backend(
    path: Path,
    shape: T5Config,
    text: TextTokenizer,
    *,
    dtype: str,
    mesh: Mapping[str, Any],
    devices: Sequence[jax.Device],
    engine: Mapping[str, Any],
    weights_hash: str,
    load: Callable[[Mesh | None], T5],
    flag: str,
) -> T5Backend:
    """A T5 as a backend; its weights are loaded on first use.

    Args:
      path: of the weights.
      shape: the model's config.
      text: its tokenizer.
      dtype: of parameters and arithmetic.
      mesh: size of each mesh axis, or "auto": a copy of the weights on each device.
      devices: that the mesh is made of.
      engine: values of the section `engine`, some of them "auto".
      weights_hash: see local_model.
      load: mesh -> the model.
      flag: that named the model, for messages.
    """
    sizes = engine_sizes(engine, on_cpu=platform() == "cpu")
    placed = mesh_of(mesh, devices)
    if text.vocab_size > shape.vocab_size:
        raise UserError(
            f"{flag}={path}: its tokenizer has {text.vocab_size:,} tokens, the model "
            f"{shape.vocab_size:,}; name the model's own by --tokenizer."
        )
    parts = ["t5", weights_hash, text.fingerprint, [dtype, platform(), __version__]]

    def make_engine() -> T5Engine:
        count = 1 if placed is None else placed.size
        print(
            f"{path.name}: {count} device{'s' * (count > 1)}, batches of up to {sizes.slots:,} "
            f"sequences and {sizes.tokens:,} tokens of prompts, of up to {sizes.length:,} tokens",
            file=sys.stderr,
        )
        return T5Engine(load(placed), text, end_ids=text.end_ids, config=sizes)

    return T5Backend(
        make_engine,
        text,
        length=sizes.length,
        fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
    )


def engine_sizes(engine: Mapping[str, Any], *, on_cpu: bool) -> T5EngineConfig:
    """The sizes that the section `engine` gives, and for "auto" those of the platform."""
    for name, value in engine.items():
        if name not in _TAKEN and value not in (AUTO, getattr(EngineConfig, name, "")):
            raise UserError(
                f"config key engine.{name}={value}: a T5 is served in batches without a shared "
                f"cache, which has {', '.join(_TAKEN)} alone; leave it out."
            )
    sizes = {name: engine[name] for name in _TAKEN if engine.get(name, AUTO) != AUTO}
    length = sizes.get("length", T5EngineConfig.length)
    lengths = [_SHORTEST]
    while lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    chosen = {"slots": _SLOTS[not on_cpu], "length": length, "buckets": tuple(lengths)}
    return T5EngineConfig(**{**chosen, **sizes}, tokens=_TOKENS[not on_cpu])


def mesh_of(mesh: Mapping[str, Any], devices: Sequence[jax.Device]) -> Mesh | None:
    """The mesh of a T5, "auto" for `data` being what remains; None: the default device."""
    sizes = {axis: mesh.get(axis, AUTO) for axis in MESH_AXES}
    shape = {axis: 1 if size == AUTO else size for axis, size in sizes.items()}
    if sizes["data"] == AUTO:
        shape["data"] = -1
    elif math.prod(shape.values()) == 1:
        devices = devices[:1]
    placed = make_mesh(shape, devices)
    return placed if placed.size > 1 else None
