"""The small reader of Atlas: what it sees and learns beyond VLP's sequences (ours; configs/atlas).

The papers' VLP starts from millions of captioned pictures and a detector. A reader that has some
minutes on a CPU gets the same by other means, each off unless the config names it:

  words     only the tokens that the corpus needs, those of answers first
  regions   the picture as a whole, and the share of each basic color in every region
  tags      words for what a picture shows, behind its caption and in its region slots (Oscar)
  types     of the first and the second source, and of words that the question has too
  answers   every token predicted from a [MASK] of its own, key words with a larger weight

The model's part is models/vlp/atlas_reader.py (models may not import data), and the tasks' part
tasks/vlp.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches import packing
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.pictures.resize import patch_boxes
from mmqa_jax.data.regions import PatchRegions, Tags
from mmqa_jax.data.tokenizers import Tokens, cut, fair_shares

# --- Regions -------------------------------------------------------------------------------------

# The eleven basic color terms of English (Berlin and Kay 1969) -> sRGB values of that name; a pixel
# has the term of the nearest value.
ANCHORS: dict[str, tuple[str, ...]] = {
    "red": ("d22f27", "ff0000", "ea5a47"),
    "white": ("ffffff",),
    "blue": ("1e50a0", "0000ff", "61b2e4", "92d3f5", "000080"),
    "green": ("5c9e31", "186648", "00ff00", "b1cc33", "008000"),
    "yellow": ("f1b31c", "fcea2b", "ffff00"),
    "black": ("000000",),
    "orange": ("e27022", "ff8000", "f4aa41"),
    "brown": ("a57939", "6a462f", "781e32"),
    "gray": ("9b9b9a", "3f3f3f", "d0cfce"),
    "purple": ("8967aa", "b399c8", "800080"),
    "pink": ("ffa7c0", "e67a94", "ff69b4"),
}
COLOR_TERMS = tuple(ANCHORS)
_BITS = 5  # per channel of the lookup table

# Part of a picture -> whether a region's center (x, y in 0..1, downward) is in it.
_PARTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
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


def color_terms(pixels: UInt8[np.ndarray, "*N 3"]) -> Int[np.ndarray, "*N"]:
    """Index in COLOR_TERMS of every pixel's color, int8."""
    cell = pixels.astype(np.int32) >> (8 - _BITS)
    return _table()[(cell[..., 0] << 2 * _BITS) + (cell[..., 1] << _BITS) + cell[..., 2]]


def color_shares(patches: UInt8[np.ndarray, "R N 3"]) -> Float[np.ndarray, "R C"]:
    """Square root of each term's share of the pixels of every patch, float32 [R, C = 11].

    The root keeps a small star on a large field visible.
    """
    terms = color_terms(patches)  # [R, N]
    count = len(COLOR_TERMS)
    flat = terms + count * np.arange(len(terms))[:, None]
    shares = np.bincount(flat.ravel(), minlength=count * len(terms)) / terms.shape[1]
    return np.sqrt(shares.reshape(len(terms), count)).astype(np.float32)


@functools.cache
def _table() -> Int[np.ndarray, " cells"]:
    """Term of every cell of the color cube, by the anchor nearest to the cell's center."""
    anchors = np.array(
        [[int(h[i : i + 2], 16) for i in (0, 2, 4)] for hexes in ANCHORS.values() for h in hexes],
        np.float32,
    )
    term = np.array([i for i, hexes in enumerate(ANCHORS.values()) for _ in hexes], np.int8)
    side = (np.arange(1 << _BITS) << (8 - _BITS)) + (1 << (7 - _BITS))
    cells = np.stack(np.meshgrid(side, side, side, indexing="ij"), axis=-1).reshape(-1, 3)
    distance = np.square(cells[:, None].astype(np.float32) - anchors).sum(axis=-1)
    return term[distance.argmin(axis=1)]


class AtlasRegions(PatchRegions):
    """Patches of a picture, and what colors they show.

    Args:
      size, patch: as of PatchRegions.
      whole: a last region is added, the whole picture shrunk to a patch.
      colors: a region's position also holds its share of each basic color, as VLP's positions hold
        the probabilities of the detector's classes: the part of that information that needs no
        training.
      where: further tags name the dominant color of each part: "top red ...".
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
        super().__init__(size, patch)
        self._size, self._whole, self._colors = size, whole, colors
        self._parts: dict[str, np.ndarray] = {}  # name -> bool[R], the regions in it
        if whole:
            self._boxes = np.concatenate([self._boxes, patch_boxes(size, size)])
        boxes = self._boxes
        if where:
            x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
            is_patch = np.arange(len(boxes)) < (size // patch) ** 2  # not the whole picture
            self._parts = {name: inside(x, y) & is_patch for name, inside in _PARTS.items()}
        self.slots = len(boxes)
        # Values of a region's position: 6 of its box and, with `colors`, 11 shares.
        self.position_dim = boxes.shape[1] + len(COLOR_TERMS) * colors

    def _values(self, pixels: Float[np.ndarray, "S S 3"]) -> Float[np.ndarray, "R F"]:
        values = super()._values(pixels)
        if not self._whole:
            return values
        step = self._size // self._patch
        blocks = pixels.reshape(self._patch, step, self._patch, step, 3)
        return np.concatenate([values, blocks.mean(axis=(1, 3)).reshape(1, -1)])

    def _positions(self, pixels: Float[np.ndarray, "S S 3"]) -> Float[np.ndarray, "R P"]:
        if not self._colors:
            return self._boxes
        patches = super()._values(pixels)
        seen = [patches.reshape(len(patches), -1, 3)]  # pixels of every region
        if self._whole:
            seen.append(pixels.reshape(1, -1, 3))
        shares = [color_shares(part.astype(np.uint8)) for part in seen]
        return np.concatenate([self._boxes, np.concatenate(shares)], axis=1)

    def tags(self, positions: Float[np.ndarray, "R P"]) -> Tags:
        """The colors of regions with these `positions`, which hold the shares of `colors`."""
        shares = positions[:, -len(COLOR_TERMS) :]  # [R, C], square roots
        regions = tuple(COLOR_TERMS[term] for term in shares.argmax(axis=1))
        shares = np.square(shares)
        total = shares.mean(axis=0)
        order = [term for term in np.argsort(-total, kind="stable") if total[term] >= 0.01]
        parts: list[str] = []
        for name, inside in self._parts.items():
            if inside.any():
                parts += [*name.split(), COLOR_TERMS[shares[inside].mean(axis=0).argmax()]]
        return Tags(regions, tuple(COLOR_TERMS[term] for term in order), tuple(parts))


# --- Tags ----------------------------------------------------------------------------------------

_TYPICAL_TAGS = 4  # that a picture has


class TaggedSources(SourceReader):
    """The sources of a corpus, pictures with tags behind their captions and in their slots.

    Args:
      tags: from the positions of a picture's regions to its tags.
      reader: the other arguments, as of SourceReader.
    """

    def __init__(self, *reader, tags: Callable[[np.ndarray], Tags], on_demand: bool = False):
        super().__init__(*reader, on_demand=on_demand)
        self._tags = tags
        self._tag_tokens: dict[str, list[int]] = {}
        regions = self.regions
        assert regions is not None
        parts = tags(np.zeros((regions.slots, regions.position_dim), np.float32)).parts
        self._parts_length = sum(len(self._tag(tag)) for tag in parts)

    def text_length(
        self, rows: Int[np.ndarray, "*N S"], own_pictures: int = 0
    ) -> Int[np.ndarray, "*N"]:
        """Estimates a text's tokens as SourceReader does, with a typical number of tags."""
        pictures = ((rows >= 0) & self.is_image[rows]).sum(axis=-1) + own_pictures
        text = super().text_length(rows, own_pictures)
        return text + _TYPICAL_TAGS * pictures + self._parts_length * (pictures == 1)

    def _read(self, source: packing.RawSource, alone: bool) -> packing.SourceTokens:
        plain = super()._read(source, alone)
        if plain.regions is None:
            return plain
        tags = self._tags(plain.regions[1])
        # The colors come last, so that their list ends where the text ends.
        listed = (*(tags.parts if alone else ()), *tags.picture)
        tokens = [token for tag in listed for token in self._tag(tag)]
        in_slots = [self._tag(tag)[0] for tag in tags.regions]
        return packing.SourceTokens([*plain.tokens, *tokens], plain.regions, in_slots)

    def _tag(self, tag: str) -> list[int]:
        if tag not in self._tag_tokens:
            self._tag_tokens[tag] = self.tokenizer.encode(tag)
        return self._tag_tokens[tag]


# --- Sequences -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtlasPackingConfig(packing.PackingConfig):
    """Shapes of the sequences, and which token types their sources have."""

    # The first source's slots and text get type 2, the second's type 3, so that captions bind to
    # their pictures; and when the text must be cut, each source keeps its fair share. Off, the
    # concatenated text is cut as a whole (VLP).
    per_source: bool = False
    # Token type of the tokens and tags of the first, second ... source (the last for all further
    # ones) that also occur in the question, () for no such signal. With it a small cross-encoder
    # finds a name in a source at once; without, it must first learn to compare tokens. With two
    # types it also sees which of two sources the name is in.
    match_types: tuple[int, ...] = ()
    # As VLP's; off: text positions ignore the slots, whose position embeddings come from the region
    # positions anyway, so that text is at the positions that BERT weights were trained on.
    positions_after_regions: bool = True

    @property
    def text_start(self) -> int:
        return super().text_start * self.positions_after_regions


class AtlasPacker(packing.Packer):
    """Packs examples as an AtlasPackingConfig says."""

    config: AtlasPackingConfig

    def _source_texts(
        self, sources: Sequence[packing.SourceTokens], budget: int, rng: np.random.Generator | None
    ) -> list[Tokens]:
        if not self.config.per_source:
            return super()._source_texts(sources, budget, rng)
        texts = [source.tokens for source in sources]
        shares = fair_shares([len(text) for text in texts], budget)
        return [cut(text, share, rng) for text, share in zip(texts, shares, strict=True)]

    def _type_source(
        self, types: Int[np.ndarray, " N"], tokens: Tokens, question: Tokens, index: int
    ) -> None:
        if self.config.per_source and index < 2:
            types[:] = 2 + index
        marks = self.config.match_types
        if marks and len(tokens):
            matched = np.isin(np.asarray(tokens), np.asarray(question))
            types[: len(tokens)][matched] = marks[min(index, len(marks) - 1)]


# --- Answers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtlasMasking(packing.MaskingConfig):
    """Masked-LM training of answers."""

    # Keep the answer whole and predict every token of it, each from a [MASK] of its own that sees
    # the tokens before it, exactly as in decoding. It costs an answer's length in columns and gives
    # every token a loss (as UniLMv2's pseudo-masks).
    probes: bool = False
    # Extra weight of the answer's keywords, shared among them, on top of 1 per token. The keyword
    # is one token among ten that all questions of its kind share; with equal weights a short
    # training learns the shared ten.
    keyword_weight: float = at_least(0, 0.0)

    def columns(self, answer: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        # The answer's tokens and the last [SEP] each have a probe.
        return 2 * answer + 1 if self.probes else answer

    def weights(self, targets: Int[np.ndarray, " n"], keywords: Tokens) -> np.ndarray:
        is_keyword = np.isin(targets, np.asarray(keywords))
        return 1.0 + is_keyword * self.keyword_weight / max(is_keyword.sum(), 1)

    def pack(
        self,
        packer: packing.Packer,
        example: packing.Example,
        bucket: int,
        rng: np.random.Generator,
    ) -> packing.Packed:
        """Packs as MaskingConfig does; with `probes` the whole answer, then a [MASK] a token.

        The probes have the positions of their tokens and are marked by `probe_mask` bool[L].
        """
        if not self.probes:
            return super().pack(packer, example, bucket, rng)
        longest = min(packer.config.max_answer_tokens, self.max_pred - 1)
        example = example._replace(answer=cut(example.answer, longest, rng))
        reserve = len(example.answer) + 1
        arrays, start, end = packer.lay_out(example, bucket, rng, close=True, reserve=reserve)
        count = end - start
        ids, probes = arrays["input_ids"], slice(end, end + count)
        targets = ids[start:end]
        weights = self.weights(targets, example.keywords)
        packing.add_targets(arrays, np.arange(end, end + count), targets, weights, self.max_pred)
        ids[probes] = packer.tokenizer.mask_id
        arrays["token_type_ids"][probes] = packer.config.segments[1]
        arrays["position_ids"][probes] = arrays["position_ids"][start:end]
        arrays["probe_mask"] = np.zeros(len(ids), bool)
        arrays["probe_mask"][probes] = True
        return arrays
