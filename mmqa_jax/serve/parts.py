"""What one server answers with: a language model, an encoder, a corpus, and systems of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve.systems import Asking, System, Threads, Turn

_AT_ONCE = 8  # texts that are embedded before others have their turn


@dataclasses.dataclass(frozen=True)
class Parts:
    """See above.

    Attributes:
      title: of the page: the folder's name, or the model's.
      llm: the language model of this process; None: there is none, or a server's is asked.
      llm_name: its name in the API.
      embedder: of texts, and its name.
      systems: by their names.
      corpus: whose sources the page shows; None: there are none.
      threads: in which the systems answer.
      adapters: of the language model, which answer under their names.
    """

    title: str
    llm: ServedModel | None
    llm_name: str
    embedder: Any
    embedder_name: str
    systems: Mapping[str, System]
    corpus: AskedCorpus | None
    threads: Threads
    adapters: Sequence[str] = ()

    @property
    def llm_names(self) -> list[str]:
        """The names under which the language model answers."""
        return [] if self.llm is None else [self.llm_name, *self.adapters]

    @property
    def model_names(self) -> list[str]:
        """What requests of OpenAI's API may name."""
        return [*self.llm_names, *self.systems, self.embedder_name]

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
