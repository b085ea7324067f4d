"""The pictures of a Qwen-VL's training: which can be read, and batches of examples with them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import first_names
from mmqa_jax.core.progress import Progress
from mmqa_jax.data import images
from mmqa_jax.data.batches.language_model import RowSize, TokenExample
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.packing import Bucket, Packed
from mmqa_jax.data.schema import Question
from mmqa_jax.models.qwen_vl import QwenVLConfig, expand_pictures
from mmqa_jax.models.qwen_vl_layout import Grid, PatchBatch, bucket_of, grid_of, lay_out
from mmqa_jax.models.qwen_vl_vision import QwenVisionConfig
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.picture_format import QwenFormat, Shown


class TrainingPictures:
    """The pictures of a run's questions, as the model takes them.

    Args:
      corpus: that has them.
      pictures: how the model's prompts hold them.
      config: of the model.
      max_broken: how many may be broken; None: see BrokenPictures.

    Attributes:
      broken: pictures that could not be read, with their reasons.
    """

    def __init__(
        self,
        corpus: Corpus,
        pictures: QwenFormat,
        config: QwenVLConfig,
        max_broken: int | None = None,
    ):
        self._corpus, self._format, self._vision = corpus, pictures, config.vision
        self._max_broken = max_broken
        self._shapes: dict[str, tuple[int, int, int]] = {}
        self.broken = self._counter(0)

    def _counter(self, total: int) -> images.BrokenPictures:
        return images.BrokenPictures(
            total,
            self._max_broken,
            "run `mmqa prepare` again or raise pictures.max_broken",
            "cannot be read",
        )

    def readable(self, questions: Sequence[Question], *, decode: bool = False) -> list[Question]:
        """Those without a picture, or with one whose header (and PNG's checksums) can be read.

        Says how many others there are, and which.

        Args:
          decode: the whole picture is read, so that none proves to be broken later.

        Raises:
          RunError: more broken pictures than are allowed.
        """
        names = dict.fromkeys(question.image for question in questions if question.image)
        self.broken = self._counter(len(names))
        with Progress("Reading pictures", len(names), "pictures") as progress:
            for name in names:
                self._look_at(name, decode)
                progress.advance(1)
        kept = [q for q in questions if q.image is None or q.image in self._shapes]
        if len(kept) < len(questions) and jax.process_index() == 0:
            print(
                f"{len(questions) - len(kept)} questions are left out, whose pictures cannot be "
                f"read ({first_names(self.broken.names)}), the first because "
                f"{next(iter(self.broken.reasons.values()))}",
                file=sys.stderr,
            )
        return kept

    def _look_at(self, name: str, decode: bool) -> None:
        try:
            picture = Picture(self._read(name), name)
            images.verify(picture.data, name)
            if decode:
                self._format.read(Shown(picture, alone=True))
            self._shapes[name] = self._format.shape(picture)
        except images.PictureError as error:
            self.broken.add(name, str(error))

    def _read(self, name: str) -> bytes:
        data = self._corpus.read_picture(name)
        if data is None:
            raise images.PictureError(f"{name}: the corpus has no such picture; prepare it again.")
        return data

    def warn_missing(self) -> None:
        """Says which pictures proved to be broken behind their headers."""
        late = [name for name in self.broken.names if name in self._shapes]
        if late and jax.process_index() == 0:
            print(
                f"pictures that cannot be decoded, whose questions were not learned: {len(late)} "
                f"({first_names(late)}).",
                file=sys.stderr,
            )

    def shape(self, name: str) -> tuple[int, int, int]:
        """[H, W, 3] of the pixels of a readable picture."""
        return self._shapes[name]

    def pixels(self, name: str) -> np.ndarray | None:
        """Pixels of a readable picture; None, counted, where it is broken behind its header."""
        try:
            return self._format.read(Shown(Picture(self._read(name), name), alone=True))
        except images.PictureError as error:
            self.broken.add(name, str(error))
            return None

    def units(self, example: TokenExample) -> int:
        """Units of an example's picture with its windows' padding; 0: it has none."""
        if example.picture is None:
            return 0
        return bucket_of(grid_of(self.shape(example.picture), self._vision), self._vision)

    def buckets(self, examples: Sequence[TokenExample]) -> list[Bucket]:
        """The shapes of the examples' pictures: `pictures` of a row, 0 or 1, and `text`, its units
        in the tower."""
        found = sorted(set(map(self.units, examples)))
        return [Bucket(int(units > 0), units) for units in found]


class PicturedRows(NamedTuple):
    """Makes batches, one example in a row.

    Attributes:
      size: tokens of a row beside its picture's, and learned ones.
    """

    size: RowSize
    config: QwenVLConfig
    pictures: TrainingPictures

    def batch(self, examples: Sequence[TokenExample | None], bucket: Bucket) -> Packed:
        """Rows of U = bucket.text units and L = size.length + U tokens.

        Args:
          examples: of pictures that fit the bucket; None: an empty row. One whose picture proves to
            be broken becomes one.

        Returns:
          The arrays of `pictured_shapes`.
        """
        shown: list[np.ndarray | None] = [
            None if example is None or example.picture is None
            else self.pictures.pixels(example.picture)
            for example in examples
        ]  # fmt: skip
        rows = [
            None if example is None or (example.picture is not None and pixels is None) else example
            for example, pixels in zip(examples, shown, strict=True)
        ]
        own = [[] if pixels is None else [pixels.shape] for pixels in shown]
        expanded = expand_pictures(
            [[] if row is None else row.tokens for row in rows],
            own,
            self.config,
            first_rows=itertools.repeat(0),  # a row has its own features
            length=self.size.length + bucket.text,
        )
        targets = {
            name: np.zeros((len(rows), self.size.targets), np.int32)
            for name in ("target_positions", "target_ids", "target_segments")
        }
        for number, row in enumerate(rows):
            if row is not None:
                end, learned = int(expanded.mask[number].sum()), row.targets
                targets["target_positions"][number, :learned] = np.arange(end - learned, end) - 1
                targets["target_ids"][number, :learned] = row.tokens[row.start :]
                targets["target_segments"][number, :learned] = 1
        made = {"input_ids": expanded.input_ids, "positions": expanded.positions, **targets}
        if bucket.text:
            vision = self.config.vision
            blank = np.zeros((vision.unit, vision.unit, 3), np.uint8)
            laid = lay_out(
                [blank if pixels is None else pixels for pixels in shown], vision, bucket.text
            )
            made |= {"rows": expanded.rows, **vars(laid)}
        return made


def largest_bucket(vision: QwenVisionConfig) -> Bucket:
    """That of the largest square picture."""
    side = math.isqrt(vision.most_units)
    return Bucket(1, bucket_of(Grid(side, side), vision))


def pictured_shapes(
    rows: int, size: RowSize, bucket: Bucket, vision: QwenVisionConfig
) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of pictures.

    Returns:
      input_ids int32[B, L], each picture's token repeated once for each unit; positions
      int32[B, L, 3]; rows int32[B, L], which of its row's features a token takes, -1: none; the
      targets as of `data.batches.language_model.packed_batch`; the fields of PatchBatch.
    """
    length, units = size.length + bucket.text, bucket.text
    patches = units * vision.merge**2

    def of(*shape: int, dtype: type = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    laid = PatchBatch(
        of(patches, vision.patch**2 * 3, dtype=np.uint8), of(patches, 2), of(2), of(units)
    )
    return {
        "input_ids": of(length),
        "positions": of(length, 3),
        "rows": of(length),
        **{f"target_{name}": of(size.targets) for name in ("positions", "ids", "segments")},
        **{field.name: getattr(laid, field.name) for field in dataclasses.fields(laid)},
    }
