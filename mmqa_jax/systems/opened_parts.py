"""Opens the parts that rows name, each once, with what they finished kept on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.journal import Journal
from mmqa_jax.core.sections import Key, spec_of
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
    """

    def __init__(self, corpus: Corpus, journals: Path):
        self.corpus, self._journals = corpus, journals
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: dict[str, Any] = {}
        self._llms: list[Any] = []

    def close(self) -> None:
        """Closes journals and response caches; all but a language model can still be used."""
        for part in self._open.values():
            part.journal.close()
        for llm in self._llms:
            llm.close()
        self._llms.clear()

    def of_row(self, section: Mapping[str, Any]) -> dict[str, _Recorded]:
        """The parts of a row's config section `parts`."""
        self.seconds.clear()
        openers = {
            "retriever": lambda spec: self._retriever(RetrieverSpec(**spec)),
            "reranker": self._reranker,
            "reader": lambda spec: self._reader(ReaderSpec(**spec)),
            "llm": lambda spec: self._llm(LLMSpec(**spec)),
            "library": lambda spec: open_library(self.corpus, LibrarySpec(**spec)),
            "heuristics": lambda spec: open_heuristics(HeuristicsSpec(**spec)),
            "finished": lambda spec: open_finished(FinishedSpec(**spec)),
            "knowledge": lambda spec: open_knowledge(self.corpus, KnowledgeSpec(**spec)),
            "captions": lambda spec: open_captions(**spec, questions=self.corpus.questions()),
        }
        opened = {name: openers[name](dict(spec)) for name, spec in section.items()}
        ranking = ("retriever", "reranker", "reader")
        return {n: _Recorded(part) if n in ranking else part for n, part in opened.items()}

    def _retriever(self, spec: RetrieverSpec) -> Any:
        def make(journal: Journal) -> Any:
            return ResumableRetriever(open_retriever(self.corpus, spec), journal, self.seconds)

        return self._once("retriever", identity.of_retriever(spec), make)

    def _reranker(self, section: Mapping[str, Any]) -> Any:
        def make(journal: Journal) -> Any:
            from mmqa_jax.tasks.rerank import load_reranker

            return ResumableReranker(load_reranker(model, self.corpus), journal, self.seconds)

        model, similarity = section["model"], section.get("similarity")
        reranker = self._once("reranker", identity.of_folders(model), make)
        if not similarity:
            return reranker
        retriever = self._retriever(RetrieverSpec(**similarity))
        weight = section.get("similarity_weight", 0.0)
        return with_similarity(reranker, retriever, self.corpus, weight)

    def _reader(self, spec: ReaderSpec) -> Any:
        def make(journal: Journal) -> Any:
            from mmqa_jax.tasks.answer import load_reader

            return ResumableReader(load_reader(spec.model, self.corpus), journal, self.seconds)

        return self._once("reader", identity.of_folders(spec.model), make)

    def _llm(self, spec: LLMSpec) -> Any:
        self._llms.append(open_llm(spec, self._journals / "responses.sqlite"))
        return self._llms[-1]

    def _once(self, kind: str, made_of: str, make: Callable[[Journal], Any]) -> Any:
        fingerprint = identity.of_folders(text=f"{kind} {made_of} {self.corpus.fingerprint}")
        if fingerprint not in self._open:
            journal = Journal(self._journals / f"{kind}-{fingerprint}.jsonl", fingerprint)
            self._open[fingerprint] = make(journal)
        return self._open[fingerprint]


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
