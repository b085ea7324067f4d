"""Answers single questions from a finished demo: the full-scale setting, with parts kept loaded."""

from __future__ import annotations

from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.systems import webqa
from mmqa_jax.systems.extensions.second_hop import SecondHopRetriever
from mmqa_jax.systems.parts import open_dense, open_reader, open_reranker, with_similarity

_PICTURE = "question"  # name of the picture that belongs to the question


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
        prepared = open_corpus(folder / "data")
        self._picture: bytes | None = None
        self.corpus = Corpus(
            prepared.sources,
            read_picture=lambda name: (
                self._picture if name == _PICTURE else prepared.read_picture(name)
            ),
            fingerprint=prepared.fingerprint,
        )
        tuned = read_json(needed)
        self._options = {
            "top_k": read_config(folder)["select"]["top_k"],
            "threshold": tuned["threshold"],
        }
        dense = open_dense(self.corpus, str(folder / "contrastive"), str(folder / "index"))
        reranker = open_reranker(self.corpus, folder / "rerank", batch_size=16)
        self._retriever = SecondHopRetriever(dense, self.corpus)
        self._reranker = with_similarity(reranker, dense, self.corpus, tuned["weight"])
        self._reader = open_reader(self.corpus, folder / "answer", batch_size=1)

    def answer(self, text: str, picture: bytes | None = None) -> Prediction:
        """Answers a question, citing sources of the demo's corpus.

        Args:
          picture: encoded picture that belongs to the question; the answer may then cite no
            source.

        Raises:
          UserError: the question is longer than the reader accepts.
        """
        self._reader.check_length(text)
        self._picture = picture
        question = Question("asked", "", text, image=None if picture is None else _PICTURE)
        (prediction,) = webqa.answer_full_scale(
            [question],
            self._retriever,
            self._reranker,
            self._reader,
            select="best" if picture is None else "two_above",
            **self._options,
        )
        return prediction
