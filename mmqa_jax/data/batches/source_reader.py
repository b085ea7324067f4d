"""Reads the sources of a corpus: their tokens, pixels and regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from mmqa_jax.data.batches.packing import Example, RawExample, RawSource, SourceTokens, clean
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.regions import FeatureRegions, PatchRegions
from mmqa_jax.data.schema import Modality, Source
from mmqa_jax.data.tokenizers import Tokenizer, TokensOnDemand, TokenTable


class SourceReader:
    """The sources of a corpus, each tokenized once, for all batches of a run.

    Args:
      corpus: the sources.
      tokenizer: of all texts.
      pictures: pixels by row; None where the model does not read pixels.
      regions: a picture's regions for VLP; None for other models.
      source_text: the text that the model reads of a source; default: its own (WebQA's baseline).
      on_demand: sources are tokenized when they are first read, for a reader of a few of them.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        pictures: PictureStore | None = None,
        regions: PatchRegions | FeatureRegions | None = None,
        source_text: Callable[[Source], str] | None = None,
        *,
        on_demand: bool = False,
    ):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.pictures, self.regions = pictures, regions
        self._texts: Sequence[str] = _Texts(corpus.sources, source_text or _own_text)
        if not on_demand:
            self._texts = list(self._texts)
        self.table = (TokensOnDemand if on_demand else TokenTable)(tokenizer, self._texts)
        self.is_image = corpus.image_mask()

    def text_length(
        self, rows: Int[np.ndarray, "*N S"], own_pictures: int = 0
    ) -> Int[np.ndarray, "*N"]:
        """Tokens of the sources `rows` together (-1: none), to choose a bucket by.

        `own_pictures` is the number of pictures that come with the question; they have no text.
        """
        exists = rows >= 0
        lengths = self.table.lengths_of(np.where(exists, rows, 0))
        return np.where(exists, lengths, 0).sum(axis=-1)

    def readable(
        self, rows: Sequence[int], max_pictures: int, modality: Modality | None = None
    ) -> list[int]:
        """Returns the sources among `rows` that VLP reads: all snippets and the first pictures.

        Pictures beyond `max_pictures` are left out with their captions (webqa_loader.py l.913 and
        l.1153); with `modality`, so are the sources of the other one.
        """
        readable_rows, pictures = [], 0
        for row in rows:
            is_image = bool(self.is_image[row])
            pictures += is_image
            fits = not is_image or pictures <= max_pictures
            if fits and modality in (None, "image" if is_image else "text"):
                readable_rows.append(row)
        return readable_rows

    @property
    def broken(self) -> tuple[BrokenPictures, ...]:
        """Returns the counters of pictures that could not be read."""
        counters = (getattr(self.regions, "missing", None), getattr(self.pictures, "broken", None))
        return tuple(count for count in counters if count is not None)

    def warn_missing(self) -> None:
        """Warns on stderr of pictures that could not be read; their captions alone were used."""
        for kind, counter in (
            ("without region features", getattr(self.regions, "missing", None)),
            ("that cannot be decoded", getattr(self.pictures, "broken", None)),
        ):
            if counter is not None:
                counter.warn(f"pictures {kind}, read as their captions alone")

    def look_ahead(self, rows: Iterable[int]) -> None:
        """Called with the sources of a batch (-1: none) before they are read one by one."""
        rows = [int(row) for row in rows if row >= 0]
        if isinstance(self.regions, FeatureRegions):
            self.regions.look_ahead(rows)
        if self.pictures is not None:
            self.pictures.look_ahead(rows)

    def raw(self, row: int) -> RawSource:
        """The source in `row` with its pixels."""
        pixels = None
        if self.pictures is not None and self.is_image[row]:
            pixels = self.pictures.pixels(row)
        return RawSource(self._texts[row], self.corpus.sources[row].title, pixels, row)

    def tokens(self, source: RawSource) -> Sequence[int] | np.ndarray:
        """Tokens of a source's text; only a text that was changed is tokenized again."""
        if source.row is not None and source.text == self._texts[source.row]:
            return self.table[source.row]
        return self.tokenizer.encode(source.text)

    def example(
        self,
        raw: RawExample,
        question: Sequence[int] | None = None,
        answer: Sequence[int] | None = None,
        keywords: Sequence[int] | None = None,
    ) -> Example:
        """Tokens and regions of `raw`; the other arguments are tokens, where already known."""
        encode = self.tokenizer.encode
        alone = sum(source.pixels is not None for source in raw.sources) == 1
        sources = tuple(self._read(source, alone) for source in raw.sources)
        if question is None:
            question = encode(clean(raw.question))
        if answer is None:
            answer = encode(clean(raw.answer))
        if keywords is None:
            keywords = encode(clean(raw.keywords)) if raw.keywords else ()
        return Example(sources, question, answer, keywords)

    def _read(self, source: RawSource, alone: bool) -> SourceTokens:
        """Tokens and regions of a source; `alone`: it is the only picture of its example."""
        return SourceTokens(self.tokens(source), self.regions(source) if self.regions else None)


class _Texts(Sequence[str]):
    """The texts of sources, each made when it is asked for."""

    def __init__(self, sources: Sequence[Source], text_of: Callable[[Source], str]):
        self._sources, self._text_of = sources, text_of

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [self._text_of(source) for source in self._sources[row]]
        return self._text_of(self._sources[row])

    def __iter__(self) -> Iterator[str]:
        return map(self._text_of, self._sources)


def _own_text(source: Source) -> str:
    return source.text
