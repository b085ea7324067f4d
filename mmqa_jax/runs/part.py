"""What a part of a row is: a typed section of its config that knows its inputs and opens itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmqa_jax.core.serving import OnModel
from mmqa_jax.core.store import Store
from mmqa_jax.data.corpus import Corpus


class OpenParts(Protocol):
    """Where parts are opened (runs.opened_parts.OpenedParts).

    Attributes:
      corpus: the row's own.
      seconds: question id -> seconds that the parts of a row spent on it.
      journals: folder of what is finished.
    """

    corpus: Corpus
    seconds: defaultdict[str, float]
    journals: Path

    def once(
        self, kind: str, made_of: str, make: Callable[[Store, OnModel], Any], name: str
    ) -> Any:
        """A part of a kind, opened once; `name` is where the row's config has it."""

    def on_model(self, name: str) -> OnModel:
        """Notes where a model of the part `name` runs."""

    def closing(self, llm: Any) -> Any:
        """A language model, which is closed with the parts."""


class Part(Protocol):
    """A dataclass whose fields are the keys of a row's section `parts.NAME`."""

    def paths(self) -> Sequence[str]:
        """The files and folders that it reads, and names of models that are installed packages."""

    def open(self, row: OpenParts) -> Any:
        """The part in use.

        Raises:
          UserError: files that are missing, damaged or another kind's.
        """
