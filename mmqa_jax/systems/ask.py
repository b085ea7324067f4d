"""`mmqa ask`: one question, answered with its sources from a finished demo's workdir."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from mmqa_jax.core import startup
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.images import decode, load_picture_file, to_pixels
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.systems import retrieval_stages, webqa
from mmqa_jax.training.run import read_config


class Answerer:
    """Retriever, selector and reader of a demo, loaded once, for single questions."""

    def __init__(self, folder: Path):
        from mmqa_jax.systems.loading import load_reader, load_reranker
        from mmqa_jax.systems.parts import TwoPassReranker

        needed = folder / "retrieval" / "selection.json"
        if not needed.exists() or not (folder / "answer" / "model.json").exists():
            raise UserError(
                f"--workdir={folder}: holds no finished demo; run `mmqa demo --workdir={folder}`."
            )
        self.corpus: Corpus = open_corpus(folder / "data")
        tuned = read_json(needed)
        self.threshold = tuned["threshold"]
        config = read_config(folder)
        self.top_k = config["select"]["top_k"]
        # Retriever and reader may look at pictures of different sizes.
        self.seen, self.read = (config[task]["pictures"] for task in ("contrastive", "answer"))
        self.dense = retrieval_stages.open_retriever(
            self.corpus, folder / "contrastive", folder / "index", two_pass=True
        )
        reranker = load_reranker(folder / "rerank", self.corpus, batch_size=16)
        self.reranker = TwoPassReranker(self.dense, reranker, tuned["weight"])
        self.reader = load_reader(folder / "answer", self.corpus, batch_size=1)

    def answer(self, text: str, picture: bytes | None = None) -> tuple[Prediction, Ranking]:
        """Answer with the cited sources, and all candidates by relevance.

        Args:
          text: the question.
          picture: encoded picture that belongs to it; the reader sees it before the sources.

        Raises:
          UserError: the question is longer than the reader takes.
        """
        self.reader.check_length(text)
        question = Question("asked", "", text)
        seen: np.ndarray | None = None
        read: np.ndarray | None = None
        if picture is not None:
            image = decode(picture, "--image")
            seen = to_pixels(image, self.seen["size"], self.seen["resize"])
            read = to_pixels(image, self.read["size"], self.read["resize"])
        candidates = self.dense.search([question], self.top_k, [seen])
        (relevance,) = self.reranker.score([question], candidates, [seen])
        # A question about the user's own picture need not find anything in the collection.
        least = 1 if picture is None else 0
        cited = webqa.select_sources([relevance], self.threshold, min_sources=least)
        (prediction,) = self.reader.answer([question], cited, [read])
        return prediction, relevance


def ask(folder: Path, texts: Sequence[str], image: str | None) -> dict[str, Any]:
    """Answers the questions in turn and prints each answer with its sources.

    Args:
      folder: a finished demo's workdir.
      texts: the questions.
      image: path of a picture that belongs to them.

    Raises:
      UserError: no finished demo there, no such picture, a question too long or empty.
    """
    if not all(text.strip() for text in texts):
        raise UserError("the question is empty; write one in quotes.")
    picture = None
    if image is not None:
        load_picture_file(image)  # a file that is no picture is refused before models load
        picture = Path(image).read_bytes()
    startup.start()
    answerer = Answerer(folder)
    console = Console(stderr=True)
    answers = []
    for text in texts:
        began = time.perf_counter()
        prediction, _ = answerer.answer(text, picture)
        seconds = time.perf_counter() - began
        console.print(f"\n[bold]{escape(text)}[/bold]")
        console.print(f"{escape(prediction.answer)}  [dim]({seconds:.1f} s)[/dim]")
        cited = []
        for name, score in zip(prediction.sources, prediction.source_scores, strict=True):
            source = answerer.corpus.sources[answerer.corpus.row[name]]
            kind = "picture" if source.modality == "image" else "snippet"
            console.print(
                f"  [cyan]{kind} {escape(name)}[/cyan] ({score:.2f}) "
                f"[bold]{escape(source.title)}[/bold]: {escape(source.text)}",
                highlight=False,
            )
            cited.append({"id": name, "score": score, "title": source.title, "text": source.text})
        answers.append(
            {
                "question": text,
                "answer": prediction.answer,
                "sources": cited,
                "seconds": round(seconds, 2),
            }
        )
    return {"answers": answers}
