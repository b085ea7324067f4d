"""Opens the parts that rows name, each once, with what they finished kept on disk."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.journal import Journal
from mmqa_jax.core.sections import Key, spec_of
from mmqa_jax.core.serving import Serving
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.systems import identity
from mmqa_jax.systems.captions import open_captions
from mmqa_jax.systems.file_parts import (
    FinishedSpec,
    HeuristicsSpec,
    open_finished,
    open_heuristics,
)
from mmqa_jax.systems.parts import (
    OnModel,
    ReaderSpec,
    RerankerSpec,
    RetrieverSpec,
    open_retriever,
    with_similarity,
)
from mmqa_jax.systems.prompted_parts import (
    CaptionsSpec,
    KnowledgeSpec,
    LLMSpec,
    open_knowledge,
    open_llm,
)
from mmqa_jax.systems.resumable import ResumableReader, ResumableReranker, ResumableRetriever
from mmqa_jax.tasks.library import LibrarySpec, open_library

# Part -> specification of its config section.
PART_SPECS: dict[str, Any] = {
    "retriever": spec_of(RetrieverSpec),
    "reranker": spec_of(RerankerSpec) | {"similarity": Key(spec_of(RetrieverSpec), False)},
    "reader": spec_of(ReaderSpec),
    "llm": spec_of(LLMSpec),
    "library": spec_of(LibrarySpec, minimum=1),
    "heuristics": spec_of(HeuristicsSpec),
    "finished": spec_of(FinishedSpec),
    "knowledge": {
        **spec_of(KnowledgeSpec, minimum=0),
        "top_k": Key(int, required=False, minimum=1),
    },
    "captions": spec_of(CaptionsSpec),
}


class OpenedParts:
    """Opens the parts that rows name, each once, with journals in one folder.

    Attributes:
      seconds: question id -> seconds that the parts of the last row spent on it.
      serving: of its models but the LLM: key in its config's section `parts` (retriever.model) ->
        where and how it runs.
    """

    def __init__(self, corpus: Corpus, journals: Path):
        self.corpus, self._journals = corpus, journals
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.serving: dict[str, Serving] = {}
        self._open: dict[str, tuple[Any, dict[str, Serving]]] = {}
        self._llms: list[Any] = []

    def close(self) -> None:
        """Closes journals and response caches; all but a language model can still be used."""
        for part, _ in self._open.values():
            part.journal.close()
        for llm in self._llms:
            llm.close()
        self._llms.clear()

    def of_row(self, section: Mapping[str, Any]) -> dict[str, _Recorded]:
        """The parts of a row's config section `parts`."""
        self.seconds.clear()
        self.serving.clear()
        openers = {
            "retriever": lambda spec: self._retriever(RetrieverSpec(**spec), "retriever"),
            "reranker": self._reranker,
            "reader": lambda spec: self._reader(ReaderSpec(**spec)),
            "llm": lambda spec: self._llm(LLMSpec(**spec)),
            "library": lambda spec: open_library(
                self.corpus, LibrarySpec(**spec), on_model=self._on_model("library")
            ),
            "heuristics": lambda spec: open_heuristics(HeuristicsSpec(**spec)),
            "finished": lambda spec: open_finished(FinishedSpec(**spec)),
            "knowledge": lambda spec: open_knowledge(
                self.corpus, KnowledgeSpec(**spec), self._on_model("knowledge")
            ),
            "captions": lambda spec: open_captions(**spec, questions=self.corpus.questions()),
        }
        opened = {name: openers[name](dict(spec)) for name, spec in section.items()}
        ranking = ("retriever", "reranker", "reader")
        return {n: _Recorded(part) if n in ranking else part for n, part in opened.items()}

    def _retriever(self, spec: RetrieverSpec, name: str) -> Any:
        def make(journal: Journal, on_model: OnModel) -> Any:
            retriever = open_retriever(self.corpus, spec, on_model)
            return ResumableRetriever(retriever, journal, self.seconds)

        return self._once("retriever", identity.of_retriever(spec), make, name)

    def _reranker(self, section: Mapping[str, Any]) -> Any:
        def make(journal: Journal, on_model: OnModel) -> Any:
            from mmqa_jax.tasks.rerank import load_reranker

            opened = load_reranker(model, self.corpus)
            on_model("model", opened)
            return ResumableReranker(opened, journal, self.seconds)

        model, similarity = section["model"], section.get("similarity")
        reranker = self._once("reranker", identity.of_folders(model), make, "reranker")
        if not similarity:
            return reranker
        retriever = self._retriever(RetrieverSpec(**similarity), "reranker.similarity")
        weight = section.get("similarity_weight", 0.0)
        return with_similarity(reranker, retriever, self.corpus, weight)

    def _reader(self, spec: ReaderSpec) -> Any:
        def make(journal: Journal, on_model: OnModel) -> Any:
            from mmqa_jax.tasks.answer import load_reader

            opened = load_reader(spec.model, self.corpus)
            on_model("model", opened)
            return ResumableReader(opened, journal, self.seconds)

        return self._once("reader", identity.of_folders(spec.model), make, "reader")

    def _llm(self, spec: LLMSpec) -> Any:
        self._llms.append(open_llm(spec, self._journals / "responses.sqlite"))
        return self._llms[-1]

    def _once(
        self, kind: str, made_of: str, make: Callable[[Journal, OnModel], Any], name: str
    ) -> Any:
        """A part of a kind, opened once; `name` is where the row's config has it."""
        fingerprint = identity.of_folders(text=f"{kind} {made_of} {self.corpus.fingerprint}")
        if fingerprint not in self._open:
            journal = Journal(self._journals / f"{kind}-{fingerprint}.jsonl", fingerprint)
            served: dict[str, Serving] = {}
            self._open[fingerprint] = make(journal, self._on_model(name, served)), served
        part, served = self._open[fingerprint]
        self.serving |= {f"{name}.{key}": serving for key, serving in served.items()}
        return part

    def _on_model(self, name: str, served: dict[str, Serving] | None = None) -> OnModel:
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
