"""Answers single questions from a finished demo: the full-scale setting, with parts kept loaded."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, open_sources
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, Ranking
from mmqa_jax.extensions.second_hop import SecondHopRetriever
from mmqa_jax.inference.reader import as_written
from mmqa_jax.papers import webqa
from mmqa_jax.papers.webqa import Reranker
from mmqa_jax.retrieval.rankings import Retriever
from mmqa_jax.runs.ask_corpus import AskedCorpus, ShownSource, ask_in_turn, shown_sources
from mmqa_jax.runs.parts import with_similarity
from mmqa_jax.tasks.answer import load_reader
from mmqa_jax.tasks.embedder import open_dense
from mmqa_jax.tasks.rerank import load_reranker


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    # As people write it; NOT_FOUND if no source is similar enough to the question, or none of the
    # similar ones relevant.
    text: str
    # Whether a source passes both of the demo's thresholds, or the question came with a picture of
    # its own.
    found: bool
    # What the reader wrote, and the sources it read; if nothing was found, the nearest one, with
    # its similarity or relevance.
    prediction: Prediction
    queries: tuple[str, ...]  # what was searched for: the question, and that of the second hop
    # What was found, by relevance; None: no source was similar enough to be read.
    candidates: Ranking | None

    def quoted(self, corpus: Corpus) -> None:
        """Its words stand for themselves, see FolderAnswer.quoted."""

    def sources_shown(self, corpus: Corpus) -> list[ShownSource]:
        """The sources to show: the sources that were read are cited, the nearest source is not."""
        names, scores = self.prediction.sources, self.prediction.source_scores
        return shown_sources(corpus, names, scores, cited=self.found)


class _Heard:
    """The retriever and the reranker of one question, which keep the queries and the scored
    candidates.
    """

    def __init__(self, retriever: Retriever, reranker: Reranker):
        self._retriever, self._reranker = retriever, reranker
        self.queries: list[str] = []
        self.candidates: Ranking | None = None

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """Searches as the retriever."""
        self.queries += [question.question for question in questions]
        return self._retriever.search(questions, top_k)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Searches as the retriever."""
        return self._retriever.search_within(questions, candidates)

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Scores as the reranker."""
        scored = self._reranker.score(questions, candidates)
        (self.candidates,) = scored
        return scored


class Answerer:
    """Retriever, selector and reader of the demo in a folder, over its corpus, which may be open
    already.
    """

    def __init__(self, folder: Path, corpus: AskedCorpus | None = None):
        needed = folder / "retrieval" / "selection.json"
        if not needed.exists() or not (folder / "answer" / "model.json").exists():
            raise UserError(
                f"--workdir={folder}: holds no finished demo; run `mmqa demo --workdir={folder}`."
            )
        self.corpus = corpus or AskedCorpus(open_sources(folder / "data"))
        tuned = read_json(needed)
        self._top_k = read_config(folder)["select"]["top_k"]
        self._threshold = tuned["threshold"]
        self._least_similarity = _least_similarity(folder)
        dense = open_dense(
            self.corpus, str(folder / "contrastive"), str(folder / "index"), one_shape=True
        )
        pairs, single = {"batch_size": 10}, {"batch_size": 1}
        reranker = load_reranker(folder / "rerank", self.corpus, pairs, one_shape=True)
        self._dense = dense
        self._reranker = with_similarity(reranker, dense, self.corpus, tuned["weight"])
        self._reader = load_reader(folder / "answer", self.corpus, single, one_shape=True)

    @property
    def embedder(self) -> Any:
        """The encoder of questions and sources."""
        return self._dense.embedder

    def answer(self, text: str, picture: bytes | None = None) -> Answer:
        """Answers a question, citing sources of the demo's corpus.

        With an encoded picture of its own the question is answered from that, too, and the answer
        may cite no source.
        """
        self._reader.check_length(text)
        with self.corpus.asked(text, picture) as question:
            return self._answer(question, picture)

    def _answer(self, question: Question, picture: bytes | None) -> Answer:
        if picture is None:
            # As many as are read afterwards, so that the index is searched once.
            (nearest,) = self._dense.search([question], self._top_k)
            if nearest.scores[0] < self._least_similarity:
                uncited = Prediction(question.id, "", nearest.sources[:1], nearest.scores[:1])
                return Answer(NOT_FOUND, False, uncited, (question.question,), None)
        heard = _Heard(self._dense, self._reranker)
        (prediction,) = webqa.answer_full_scale(
            [question],
            SecondHopRetriever(heard, self.corpus),
            heard,
            self._reader,
            top_k=self._top_k,
            threshold=self._threshold,
            select="best" if picture is None else "two_above",
        )
        # `best` cites its first source whatever its relevance, as the papers' settings do.
        relevant = any(score > self._threshold for score in prediction.source_scores)
        if picture is None and not relevant:
            return Answer(NOT_FOUND, False, prediction, tuple(heard.queries), heard.candidates)
        sources = [self.corpus.sources[self.corpus.row[name]] for name in prediction.sources]
        texts = [*(source.text for source in sources), question.question]
        written = as_written(prediction.answer, texts, [source.title for source in sources])
        return Answer(written, True, prediction, tuple(heard.queries), heard.candidates)


def _least_similarity(folder: Path) -> float:
    """Below which cosine of its nearest source a question is refused; -1 refuses none."""
    path = folder / "retrieval" / "refusal.json"
    if path.exists():
        return read_json(path)["least_similarity"]
    print(
        f"{folder}: holds no retrieval/refusal.json, so that questions which no source answers are "
        f"hardly refused; `mmqa demo --workdir={folder}` adds it in a moment.",
        file=sys.stderr,
    )
    return -1.0


def ask_demo(
    workdir: Path, questions: Sequence[str], picture: bytes | None = None
) -> Iterator[dict[str, Any]]:
    """Answers questions in turn from a demo, by its models; yields what `--json` prints of each."""
    answerer = Answerer(workdir)
    for answer, row in ask_in_turn(answerer, questions, picture):
        pairs = zip(row["sources"], answer.sources_shown(answerer.corpus), strict=True)
        sources = [{**source, "title": shown_source.source.title} for source, shown_source in pairs]
        yield {**row, "raw_answer": answer.prediction.answer, "sources": sources}
