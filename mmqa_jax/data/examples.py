"""Raw examples, which an augmentation may change, and their way into tokens and regions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float, UInt8

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import patch_boxes, patches
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.sequences import Example, SourceTokens, clean
from mmqa_jax.data.tokenizers import TokenTable, WordPiece


@dataclasses.dataclass(frozen=True, slots=True)
class RawSource:
    """A source as an augmentation sees it.

    Attributes:
      text: the snippet, or the picture's caption.
      title: title of the page it comes from.
      pixels: uint8[S, S, 3], None for a snippet (and where pictures are not decoded).
      row: its row in the corpus, None for a picture that comes with a question.
    """

    text: str
    title: str = ""
    pixels: UInt8[np.ndarray, "S S 3"] | None = None
    row: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RawExample:
    """Question, sources and answer of one training example, before tokenising.

    `record` is the question as the corpus holds it, for what an augmentation must know
    besides (id, category, extra).
    """

    question: str
    sources: tuple[RawSource, ...]
    answer: str = ""
    record: Question | None = None


# Changes names or colours in question, sources and answer alike; must not keep state.
Augment = Callable[[RawExample, np.random.Generator], RawExample]

# Region features float32[N, F] and positions float32[N, P] of a source, None without picture.
Regions = Callable[[RawSource], tuple[np.ndarray, np.ndarray] | None]


class Pictures(Protocol):
    """What is needed of data.images.PictureStore."""

    size: int

    def pixels(self, row: int) -> UInt8[np.ndarray, "S S 3"] | None: ...


class PatchRegions:
    """Regions = the patches of the picture, their raw pixels scaled to [-1, 1].

    Attributes:
      slots: regions of a picture, (size / patch)^2.
      dim: values of a region, patch * patch * 3.
    """

    def __init__(self, size: int, patch: int):
        """`size` is the side of the pixels, a multiple of `patch`."""
        self._patch, self._boxes = patch, patch_boxes(size, patch)  # [slots, 6]
        self.slots, self.dim = len(self._boxes), patch * patch * 3

    def __call__(
        self, source: RawSource
    ) -> tuple[Float[np.ndarray, "R F"], Float[np.ndarray, "R 6"]] | None:
        if source.pixels is None:
            return None
        pixels = source.pixels.astype(np.float32)
        pixels *= 1 / 127.5
        pixels -= 1.0
        return patches(pixels, self._patch), self._boxes


class SourceReader:
    """The sources of a corpus, tokenised once, for all pipelines of a run.

    Args:
      corpus: the sources.
      tokenizer: of all texts.
      pictures: pixels by row; None where no pipeline looks at pixels.
      regions: a picture's regions for VLP: PatchRegions, or features read by `row`.
      source_text: what is read of a source; default its text (WebQA's baseline).
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: WordPiece,
        pictures: Pictures | None = None,
        regions: Regions | None = None,
        source_text: Callable[[Source], str] | None = None,
    ):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.pictures, self.regions = pictures, regions
        self._texts = [source_text(s) if source_text else s.text for s in corpus.sources]
        self.table = TokenTable(tokenizer, self._texts)
        self.is_image = np.array([s.modality == "image" for s in corpus.sources], bool)

    def raw(self, row: int) -> RawSource:
        """The source in `row` with its pixels."""
        pixels = None
        if self.pictures is not None and self.is_image[row]:
            pixels = self.pictures.pixels(row)
        return RawSource(self._texts[row], self.corpus.sources[row].title, pixels, row)

    def tokens(self, source: RawSource) -> Sequence[int] | np.ndarray:
        """Tokens of a source's text; only a text that was changed is tokenised again."""
        if source.row is not None and source.text == self._texts[source.row]:
            return self.table[source.row]
        return self.tokenizer.encode(source.text)

    def example(
        self,
        raw: RawExample,
        question: Sequence[int] | None = None,
        answer: Sequence[int] | None = None,
    ) -> Example:
        """Tokens and regions of `raw`; `question` and `answer` are tokens already known."""
        encode = self.tokenizer.encode
        sources = tuple(
            SourceTokens(self.tokens(s), self.regions(s) if self.regions else None)
            for s in raw.sources
        )
        if question is None:
            question = encode(clean(raw.question))
        if answer is None:
            answer = encode(clean(raw.answer))
        return Example(sources, question, answer)
