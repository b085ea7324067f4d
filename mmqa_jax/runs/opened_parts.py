"""Opens the parts that rows name, each once, with what they finished kept on disk."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.serving import OnModel, Serving
from mmqa_jax.core.store import Store, check_no_older
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.runs import identity
from mmqa_jax.runs.file_parts import CaptionsSpec, FinishedSpec, HeuristicsSpec
from mmqa_jax.runs.part import Part
from mmqa_jax.runs.parts import ReaderSpec, RerankerSpec, RetrieverSpec
from mmqa_jax.runs.prompted_parts import KnowledgeSpec, LLMSpec
from mmqa_jax.tasks.library import LibrarySpec

# The parts by their names in a row's section `parts`.
PARTS: dict[str, type[Part]] = {
    "retriever": RetrieverSpec,
    "reranker": RerankerSpec,
    "reader": ReaderSpec,
    "llm": LLMSpec,
    "library": LibrarySpec,
    "heuristics": HeuristicsSpec,
    "finished": FinishedSpec,
    "knowledge": KnowledgeSpec,
    "captions": CaptionsSpec,
}


def read_parts(section: Mapping[str, Any]) -> dict[str, Part]:
    """The parts of a row's section `parts`; UserError for a wrong key or value."""
    return {name: read_typed(PARTS[name], one, f"parts.{name}") for name, one in section.items()}


class OpenedParts:
    """Opens the parts that rows name, each once, with their stores in one folder.

    Attributes:
      corpus: the rows'.
      journals: folder of the stores of what is finished.
      seconds: question id -> seconds that the parts of the last row spent on it.
      serving: of its models but the LLM: key in its config's section `parts` (retriever.model) ->
        where and how it runs.
    """

    def __init__(self, corpus: Corpus, journals: Path):
        self.corpus, self.journals = corpus, journals
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.serving: dict[str, Serving] = {}
        self._open: dict[str, tuple[Any, dict[str, Serving]]] = {}
        self._llms: list[Any] = []

    def close(self) -> None:
        """Closes stores and response caches; all but a language model can still be used."""
        for part, _ in self._open.values():
            part.store.close()
        for llm in self._llms:
            llm.close()
        self._llms.clear()

    def of_row(self, section: Mapping[str, Any]) -> dict[str, _Recorded]:
        """The parts of a row's config section `parts`."""
        self.seconds.clear()
        self.serving.clear()
        opened = {name: part.open(self) for name, part in read_parts(section).items()}
        ranking = ("retriever", "reranker", "reader")
        return {n: _Recorded(part) if n in ranking else part for n, part in opened.items()}

    def closing(self, llm: Any) -> Any:
        """A language model, which is closed with the parts."""
        self._llms.append(llm)
        return llm

    def once(
        self, kind: str, made_of: str, make: Callable[[Store, OnModel], Any], name: str
    ) -> Any:
        """A part of a kind, opened once; `name` is where the row's config has it."""
        fingerprint = identity.of_folders(text=f"{kind} {made_of} {self.corpus.fingerprint}")
        if fingerprint not in self._open:
            check_no_older(self.journals / f"{kind}-{fingerprint}.jsonl")
            what = {"part": kind, "fingerprint": fingerprint}
            store = Store(self.journals / f"{kind}-{fingerprint}", what)
            store.check()  # before models are loaded
            served: dict[str, Serving] = {}
            self._open[fingerprint] = make(store, self.on_model(name, served)), served
        part, served = self._open[fingerprint]
        self.serving |= {f"{name}.{key}": serving for key, serving in served.items()}
        return part

    def on_model(self, name: str, served: dict[str, Serving] | None = None) -> OnModel:
        """Says where a model of the part `name` runs, and keeps it, in `served` by its own key."""

        def keep(key: str, model: Any) -> None:
            print(f"{name}.{key}: {model.serving}", file=sys.stderr)
            self.serving[f"{name}.{key}"] = model.serving
            if served is not None:
                served[key] = model.serving

        return keep


class _Recorded:
    """A part that keeps the last rankings it returned, for retrieval scores."""

    def __init__(self, part: Any):
        self._part = part
        self.rankings: list[Ranking] = []

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        self.rankings = self._part.search(questions, top_k)
        return self.rankings

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        self.rankings = self._part.search_within(questions, candidates)
        return self.rankings

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        self.rankings = self._part.score(questions, candidates)
        return self.rankings

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        return self._part.answer(questions, cited)
