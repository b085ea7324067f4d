"""A policy as a backend: it draws turns of conversations, and keeps the tokens that it drew.

A later turn's prompt begins with the very tokens of the turns before it, so that what the policy
learns from is what it wrote. A text that is encoded anew may have other tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mmqa_jax.data.batches.texts import TokenExample
from mmqa_jax.decoding import requests
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llava.config import PictureConfig
from mmqa_jax.prompting.backends import Choices, Picture, Query
from mmqa_jax.prompting.backends.engine import EngineBackend, Prompt
from mmqa_jax.prompting.text_tokenizer import TextTokenizer


@dataclasses.dataclass
class Transcript:
    """The tokens of a conversation so far.

    Attributes:
      text: that they stand for, up to the end of the last turn.
      tokens: of prompts, turns and what came back in between.
      drawn: indices of those that the policy drew.
      log_probs: of the drawn ones, under the policy at temperature 1.
      pictures: of the prompts, of which each has one token.
      closing: texts that the last drawn tokens have behind `text`: a stop string, an end token.
    """

    text: str
    tokens: list[int]
    drawn: list[int]
    log_probs: list[float]
    closing: Sequence[str] = ()
    pictures: tuple[Picture, ...] = ()

    def rest(self, prompt: str) -> str | None:
        """What a later prompt has behind the tokens; None: it does not begin with their text."""
        if not prompt.startswith(self.text):
            return None
        rest = prompt[len(self.text) :]
        closing = next(filter(rest.startswith, self.closing), "")
        return rest[len(closing) :]

    @property
    def drawn_tokens(self) -> list[int]:
        """The tokens that the policy drew."""
        return [self.tokens[place] for place in self.drawn]

    def example(self) -> TokenExample:
        """The conversation as a row, in which the drawn tokens are learned."""
        first = self.drawn[0] if self.drawn else len(self.tokens)
        tokens, drawn = np.array(self.tokens, np.int32), np.array(self.drawn, np.int32)
        return TokenExample(tokens, first, tuple(map(picture_key, self.pictures)), drawn)


def picture_key(picture: Picture) -> str:
    """The name of a picture's content."""
    return hashlib.sha256(picture.data).hexdigest()


class PolicyBackend(EngineBackend):
    """Draws from a model that changes from step to step; a query's id is (conversation, turn).

    Args:
      make_engine: (the first model) -> the engine.
      tokenizer, length, pictures: see EngineBackend.
      most_pictures: that a conversation may show.

    Attributes:
      transcripts: of the conversations since `use`, by their names.
    """

    def __init__(
        self,
        make_engine: Callable[[Llama], Engine],
        tokenizer: TextTokenizer,
        *,
        length: int,
        pictures: PictureConfig | None = None,
        most_pictures: int = 0,
    ):
        super().__init__(
            self._first_engine, tokenizer, length=length, fingerprint="", pictures=pictures
        )
        self._make, self._most = make_engine, most_pictures
        self._seed_of: Callable[[Hashable], int]  # of `use`
        self.transcripts: dict[Hashable, Transcript] = {}

    def use(self, model: Llama, seed_of: Callable[[Hashable], int]) -> None:
        """Draws from this model from now on, and begins new conversations.

        Args:
          model: which the engine takes over.
          seed_of: a query's id -> the seed of its draw.
        """
        self._seed_of = seed_of
        self.transcripts = {}
        if self._engine is None:
            self._engine = self._make(model)
            self._throughput = self._engine.throughput
        else:
            self._engine.use(model)

    def _first_engine(self, demand: Any) -> Engine:
        raise AssertionError("`use` comes first")

    def answer(self, queries: Iterable[Query]) -> Iterator[requests.Result | requests.Scores]:
        """See Backend; the drawn tokens are kept."""
        asked = {query.id: query for query in queries}
        prompts = {name: self._prompt(query) for name, query in asked.items()}
        for result in super().answer(asked.values()):
            assert isinstance(result, requests.Result)
            self._keep(asked[result.id], prompts[result.id], result.candidates[0])
            yield result

    def _keep(self, query: Query, prompt: Prompt, drawn: requests.Candidate) -> None:
        assert not isinstance(query, Choices)
        assert drawn.logprobs is not None
        tokens, log_probs = list(drawn.tokens), list(drawn.logprobs)
        shield = self.tokenizer.shield
        text = prompt.text + shield(drawn.text or "")
        closing = tuple(map(shield, query.decoding.stop)) if drawn.finish == "stop" else ()
        if drawn.finish == "end":
            closing = (self.tokenizer.decode(tokens[-1:]),)
        before = self.transcripts.get(query.id[0])
        start = len(prompt.tokens)
        places = list(range(start, start + len(tokens)))
        if before is not None:
            places, log_probs = before.drawn + places, before.log_probs + log_probs
        self.transcripts[query.id[0]] = Transcript(
            text, prompt.tokens + tokens, places, log_probs, closing, prompt.pictures
        )

    def _prompt(self, request: Query) -> Prompt:
        prompt = super()._prompt(request)
        if len(prompt.pictures) > self._most:
            raise requests.Unanswerable(
                f"request {request.id!r}: it shows {len(prompt.pictures)} pictures, and a row of "
                f"training has room for {self._most}; raise pictures.most."
            )
        before = self.transcripts.get(request.id[0])
        if before is None:
            return prompt
        rest = before.rest(prompt.text)
        if rest is None:
            raise requests.Unanswerable(
                f"request {request.id!r}: its prompt does not begin with the turns before it; use "
                "a chat template that leaves earlier messages as they are."
            )
        encode = self.tokenizer.encode_plain if self._pictures is None else prompt.encode
        return prompt._replace(tokens=before.tokens + encode(rest))

    def _request(
        self, request: Query, prompt: Prompt, pixels: Sequence[np.ndarray]
    ) -> requests.Request | requests.Scoring:
        asked = super()._request(request, prompt, pixels)
        assert isinstance(asked, requests.Request)
        return dataclasses.replace(asked, seed=self._seed_of(request.id), logprobs=True)
