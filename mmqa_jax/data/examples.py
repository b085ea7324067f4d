"""Raw examples, which an augmentation may change, and their way into tokens and regions."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int, UInt8

from mmqa_jax.core.errors import first_names
from mmqa_jax.data.colors import COLOR_TERMS, color_shares
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import BrokenPictures, patch_boxes, patches
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

    `keywords` are the answer's key words. `record` is the question as the corpus holds it, for
    what an augmentation must know besides (id, category, extra).
    """

    question: str
    sources: tuple[RawSource, ...]
    answer: str = ""
    record: Question | None = None
    keywords: str = ""


# Changes names or colours in question, sources, answer and key words alike; must not keep state.
Augment = Callable[[RawExample, np.random.Generator], RawExample]

# Region features float32[N, F] and positions float32[N, P] of a source, None without picture.
Regions = Callable[[RawSource], tuple[np.ndarray, np.ndarray] | None]


class Pictures(Protocol):
    """What is needed of data.images.PictureStore."""

    size: int
    broken: BrokenPictures

    def pixels(self, row: int) -> UInt8[np.ndarray, "S S 3"] | None: ...


class Tags(NamedTuple):
    """Words for what a picture shows, as Oscar (Li et al. 2020) gives a detector's.

    Attributes:
      regions: a word for every region.
      picture: words for the whole picture, the most visible first.
      parts: words that say where in the picture; read where only one picture is shown.
    """

    regions: tuple[str, ...]
    picture: tuple[str, ...]
    parts: tuple[str, ...] = ()


# Part of a picture -> whether a region's middle (x, y in 0..1, downwards) lies in it.
PARTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "top": lambda x, y: y < 1 / 3,
    "bottom": lambda x, y: y > 2 / 3,
    "left": lambda x, y: x < 1 / 3,
    "right": lambda x, y: x > 2 / 3,
    "center": lambda x, y: (abs(x - 0.5) < 1 / 6) & (abs(y - 0.5) < 1 / 6),
    "upper left": lambda x, y: (x < 1 / 3) & (y < 1 / 3),
    "upper right": lambda x, y: (x > 2 / 3) & (y < 1 / 3),
    "lower left": lambda x, y: (x < 1 / 3) & (y > 2 / 3),
    "lower right": lambda x, y: (x > 2 / 3) & (y > 2 / 3),
}


_TYPICAL_COLORS = 4  # that a picture shows


class PatchRegions:
    """Regions = the patches of the picture, their raw pixels scaled to [-1, 1].

    Args:
      size: side of the pixels, a multiple of `patch`.
      patch: side of a patch.
      whole: one more region, last: the whole picture, shrunk to a patch.
      colors: a region's place also says how much of each basic color it shows (data.colors),
        as VLP's places say which classes the detector saw.
      where: further tags say which color most of each part shows: "top red ...".

    Attributes:
      slots: regions of a picture.
      dim: values of a region, patch * patch * 3.
      position_dim: values of a region's place: 6 of its box and, with `colors`, 11 shares.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        *,
        whole: bool = False,
        colors: bool = False,
        where: bool = False,
    ):
        self._size, self._patch, self._whole, self._colors = size, patch, whole, colors
        self._parts: dict[str, np.ndarray] = {}  # name -> bool[R], the regions that lie there
        boxes = patch_boxes(size, patch)  # [R, 6]
        if whole:
            boxes = np.concatenate([boxes, patch_boxes(size, size)])
        self._boxes = boxes
        if where:
            x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
            patched = np.arange(len(boxes)) < (size // patch) ** 2  # not the whole picture
            self._parts = {name: inside(x, y) & patched for name, inside in PARTS.items()}
        self.slots, self.dim = len(boxes), patch * patch * 3
        self.position_dim = boxes.shape[1] + len(COLOR_TERMS) * colors

    def __call__(
        self, source: RawSource
    ) -> tuple[Float[np.ndarray, "R F"], Float[np.ndarray, "R P"]] | None:
        if source.pixels is None:
            return None
        pixels = source.pixels.astype(np.float32)
        shown = patches(pixels, self._patch)  # [R, F], values 0 to 255
        seen = [shown.reshape(len(shown), -1, 3)]  # pixels of every region
        if self._whole:
            step = self._size // self._patch
            blocks = pixels.reshape(self._patch, step, self._patch, step, 3)
            shown = np.concatenate([shown, blocks.mean(axis=(1, 3)).reshape(1, -1)])
            seen.append(pixels.reshape(1, -1, 3))
        features = shown * np.float32(1 / 127.5) - 1
        places = self._boxes
        if self._colors:
            shares = [color_shares(part.astype(np.uint8)) for part in seen]
            places = np.concatenate([places, np.concatenate(shares)], axis=1)
        return features, places

    def tags(self, places: Float[np.ndarray, "R P"]) -> Tags:
        """What regions with these `places` show, in words: colors, as `colors` counted them."""
        shares = places[:, -len(COLOR_TERMS) :]  # [R, C], square roots
        regions = tuple(COLOR_TERMS[term] for term in shares.argmax(axis=1))
        shares = np.square(shares)
        all_over = shares.mean(axis=0)
        order = [term for term in np.argsort(-all_over, kind="stable") if all_over[term] >= 0.01]
        parts: list[str] = []
        for name, inside in self._parts.items():
            if inside.any():
                parts += [*name.split(), COLOR_TERMS[shares[inside].mean(axis=0).argmax()]]
        return Tags(regions, tuple(COLOR_TERMS[term] for term in order), tuple(parts))


class SourceReader:
    """The sources of a corpus, tokenised once, for all pipelines of a run.

    Args:
      corpus: the sources.
      tokenizer: of all texts.
      pictures: pixels by row; None where no pipeline looks at pixels.
      regions: a picture's regions for VLP: PatchRegions, or features read by `row`.
      source_text: what is read of a source; default its text (WebQA's baseline).
      tags: from the places of a picture's regions to its tags: the words of the picture then
        follow its caption, each region's word stands in its slot. None: no tags.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: WordPiece,
        pictures: Pictures | None = None,
        regions: Regions | None = None,
        source_text: Callable[[Source], str] | None = None,
        tags: Callable[[np.ndarray], Tags] | None = None,
    ):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.pictures, self.regions, self._tags = pictures, regions, tags
        self._tag_tokens: dict[str, list[int]] = {}
        self._where_length = 0  # tokens that say what lies where
        if regions is not None and tags is not None:
            parts = tags(np.zeros((regions.slots, regions.position_dim), np.float32)).parts
            self._where_length = sum(len(self._tag(word)) for word in parts)
        self._texts = [source_text(s) if source_text else s.text for s in corpus.sources]
        self.table = TokenTable(tokenizer, self._texts)
        self.is_image = np.array([s.modality == "image" for s in corpus.sources], bool)

    def text_length(
        self, rows: Int[np.ndarray, "*N S"], own_pictures: int = 0
    ) -> Int[np.ndarray, "*N"]:
        """Tokens of the sources `rows` together (-1: none), to choose a bucket by.

        Tags depend on the pixels; a typical number of them is assumed. `own_pictures` come
        with the question.
        """
        there = rows >= 0
        text = np.where(there, self.table.lengths[rows], 0).sum(axis=-1)
        if self._tags is None:
            return text
        pictures = (there & self.is_image[rows]).sum(axis=-1) + own_pictures
        return text + _TYPICAL_COLORS * pictures + self._where_length * (pictures == 1)

    def tell_of_missing(self) -> None:
        """Says on stderr which pictures could not be read so far; these were shown as text."""
        for kind, found in (
            ("without region features", getattr(self.regions, "missing", None)),
            ("that cannot be decoded", getattr(self.pictures, "broken", None)),
        ):
            if found is None or not found.count:
                continue
            print(
                f"pictures {kind}, read as their captions alone: {found.count} "
                f"({first_names(found.names)}).",
                file=sys.stderr,
            )

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
        keywords: Sequence[int] | None = None,
    ) -> Example:
        """Tokens and regions of `raw`; the other arguments are tokens already known."""
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
        regions = self.regions(source) if self.regions else None
        if regions is None or self._tags is None:
            return SourceTokens(self.tokens(source), regions)
        tags = self._tags(regions[1])
        # The colors last: what is listed ends where the text ends.
        said = (*(tags.parts if alone else ()), *tags.picture)
        words = [token for word in said for token in self._tag(word)]
        in_slots = [self._tag(word)[0] for word in tags.regions]
        return SourceTokens([*self.tokens(source), *words], regions, in_slots)

    def _tag(self, word: str) -> list[int]:
        if word not in self._tag_tokens:
            self._tag_tokens[word] = self.tokenizer.encode(word)
        return self._tag_tokens[word]
