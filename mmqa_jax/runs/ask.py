"""Answers single questions from a finished demo: the full-scale setting, with parts kept loaded."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, open_sources
from mmqa_jax.data.schema import NOT_FOUND, Prediction
from mmqa_jax.extensions.second_hop import SecondHopRetriever
from mmqa_jax.inference.wording import as_written
from mmqa_jax.papers import webqa
from mmqa_jax.runs.asked import AskedCorpus, ShownSource, shown_sources
from mmqa_jax.runs.parts import open_dense, with_similarity
from mmqa_jax.tasks.answer import load_reader
from mmqa_jax.tasks.rerank import load_reranker


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
      text: as people write it; NOT_FOUND if no source is similar enough to the question, or none
        of the similar ones relevant.
      found: whether a source passes both of the demo's thresholds, or the question came with a
        picture of its own.
      prediction: what the reader wrote, and the sources it read; if nothing was found, the
        nearest one, with its similarity or relevance.
    """

    text: str
    found: bool
    prediction: Prediction

    def shown(self, corpus: Corpus) -> list[ShownSource]:
        """The sources to show: those that were read are cited, the nearest one is not."""
        names, scores = self.prediction.sources, self.prediction.source_scores
        return shown_sources(corpus, names, scores, cited=self.found)


class Answerer:
    """Retriever, selector and reader of a demo.

    Raises:
      UserError: `folder` holds no finished demo.
    """

    def __init__(self, folder: Path):
        needed = folder / "retrieval" / "selection.json"
        if not needed.exists() or not (folder / "answer" / "model.json").exists():
            raise UserError(
                f"--workdir={folder}: holds no finished demo; run `mmqa demo --workdir={folder}`."
            )
        self.corpus = AskedCorpus(open_sources(folder / "data"))
        tuned = read_json(needed)
        self._top_k = read_config(folder)["select"]["top_k"]
        self._threshold = tuned["threshold"]
        self._least_similarity = _least_similarity(folder)
        dense = open_dense(
            self.corpus, str(folder / "contrastive"), str(folder / "index"), one_shape=True
        )
        pairs, one = {"batch_size": 10}, {"batch_size": 1}
        reranker = load_reranker(folder / "rerank", self.corpus, pairs, one_shape=True)
        self._dense = dense
        self._retriever = SecondHopRetriever(dense, self.corpus)
        self._reranker = with_similarity(reranker, dense, self.corpus, tuned["weight"])
        self._reader = load_reader(folder / "answer", self.corpus, one, one_shape=True)

    def answer(self, text: str, picture: bytes | None = None) -> Answer:
        """Answers a question, citing sources of the demo's corpus.

        Args:
          picture: encoded picture that belongs to the question; the answer is then read from it
            too, and may cite no source.

        Raises:
          UserError: the question is longer than the reader accepts.
        """
        self._reader.check_length(text)
        question = self.corpus.ask(text, picture)
        if picture is None:
            (nearest,) = self._dense.search([question], 1)
            if nearest.scores[0] < self._least_similarity:
                shown = Prediction(question.id, "", nearest.sources, nearest.scores)
                return Answer(NOT_FOUND, False, shown)
        (prediction,) = webqa.answer_full_scale(
            [question],
            self._retriever,
            self._reranker,
            self._reader,
            top_k=self._top_k,
            threshold=self._threshold,
            select="best" if picture is None else "two_above",
        )
        # `best` cites its first source whatever its relevance, as the papers' settings do.
        relevant = any(score > self._threshold for score in prediction.source_scores)
        if picture is None and not relevant:
            return Answer(NOT_FOUND, False, prediction)
        sources = [self.corpus.sources[self.corpus.row[name]] for name in prediction.sources]
        texts = [*(source.text for source in sources), text]
        written = as_written(prediction.answer, texts, [source.title for source in sources])
        return Answer(written, True, prediction)


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
