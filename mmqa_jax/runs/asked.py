"""What `mmqa ask` asks of, and the sources that it shows beside an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source

_PICTURE = "asked"  # name of the picture that belongs to the question; no file has it


class AskedCorpus(Corpus):
    """A prepared corpus, and the picture of the question that was asked last."""

    def __init__(self, prepared: Corpus):
        super().__init__(
            prepared.sources, fingerprint=prepared.fingerprint, manifest=prepared.manifest
        )
        self._prepared = prepared
        self._asked: bytes | None = None

    def ask(self, text: str, picture: bytes | None = None) -> Question:
        """The question, whose encoded picture the corpus has from now on."""
        self._asked = picture
        return Question("asked", "", text, image=None if picture is None else _PICTURE)

    def read_picture(self, name: str | None) -> bytes | None:
        """Encoded picture by its name."""
        return self._asked if name == _PICTURE else self._prepared.read_picture(name)


class ShownSource(NamedTuple):
    """A source beside an answer.

    Attributes:
      source: it.
      score: its relevance (a demo's reranker) or similarity.
      cited: the number by which the answer cites it, from 1; None: it does not.
    """

    source: Source
    score: float
    cited: int | None

    def row(self) -> dict[str, Any]:
        """What `--json` prints of it; `file` and `page` are those of a folder's documents."""
        source = self.source
        return {
            "id": source.id,
            "file": source.extra.get("file"),
            "page": source.extra.get("page"),
            "text": source.text,
            "image": source.image,
            "score": self.score,
            "cited": self.cited,
        }


def shown_sources(
    corpus: Corpus, names: Sequence[str], scores: Sequence[float], *, cited: bool
) -> list[ShownSource]:
    """Sources by their ids, numbered in this order if the answer cites them."""
    return [
        ShownSource(corpus.sources[corpus.row[name]], float(score), number if cited else None)
        for number, (name, score) in enumerate(zip(names, scores, strict=True), start=1)
    ]
