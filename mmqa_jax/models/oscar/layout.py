"""Captions, labels and regions in columns, as Oscar was trained on them.

Original: microsoft/Oscar oscar/run_captioning.py (CaptionTensorizer) for captioning and
oscar/datasets/oscar_tsv.py (convert_example_to_features) for tagging.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.oscar.network import CAPTION_TYPE, LABEL_TYPE, OscarInputs

Tokens = Sequence[int]


@dataclasses.dataclass(frozen=True)
class OscarLayout:
    """Sizes and special tokens; the defaults are the published captioner's.

    Attributes:
      caption: columns of [CLS], caption, [SEP] and padding; the labels' positions start there.
      text: columns of caption and labels.
      regions: region slots; further regions are cut.
      region_features: values of a region.
      cls_id, sep_id, pad_id, mask_id: of the tokenizer (bert-base-uncased).
    """

    caption: int = 40
    text: int = 70
    regions: int = 50
    region_features: int = 2054
    cls_id: int = 101
    sep_id: int = 102
    pad_id: int = 0
    mask_id: int = 103

    def __post_init__(self):
        if not 3 <= self.caption <= self.text - 2:
            raise UserError(
                f"layout.caption is {self.caption}: expected 3 to {self.text - 2}, which leaves "
                "room for a token in the caption and in the labels; change it or layout.text."
            )

    def captioning(
        self,
        captions: Sequence[Tokens],
        labels: Sequence[Tokens],
        regions: Sequence[np.ndarray],
    ) -> OscarInputs:
        """Training's batch of captions with their pictures; captions may hold [MASK]s.

        Args:
          captions: token ids without special ones; the tail is cut.
          labels: token ids of each picture's tags, one after the other; [] for none.
          regions: float32[n, F] of each picture, the most certain first.

        Returns:
          numpy arrays; caption columns 0..caption-1, label columns from `caption` on.
        """
        rows = self._rows(captions, labels, regions)
        arrays = self._empty(rows, self.text)
        positions = np.arange(self.text)
        for row, (caption, tags) in enumerate(zip(captions, labels, strict=True)):
            tokens = [self.cls_id, *caption[: self.caption - 2], self.sep_id]
            arrays["input_ids"][row, : len(tokens)] = tokens
            arrays["caption_mask"][row, : len(tokens)] = True
            self._put_labels(arrays, row, self.caption, tags)
        return self._inputs(arrays, positions, regions)

    def prompt(self, labels: Sequence[Tokens], regions: Sequence[np.ndarray]) -> OscarInputs:
        """What a caption is written for: [CLS] in column 0, then the labels, and the regions.

        Labels have the positions that `captioning` gives them.
        """
        rows = self._rows(labels, labels, regions)
        arrays = self._empty(rows, 1 + self.text - self.caption)
        arrays["input_ids"][:, 0] = self.cls_id
        arrays["caption_mask"][:, 0] = True
        for row, tags in enumerate(labels):
            self._put_labels(arrays, row, 1, tags)
        positions = np.concatenate([[0], np.arange(self.caption, self.text)])
        return self._inputs(arrays, positions, regions)

    def tagging(
        self,
        captions: Sequence[Tokens],
        labels: Sequence[Tokens],
        regions: Sequence[np.ndarray],
    ) -> OscarInputs:
        """Pre-training's layout, everything seen by everything: [CLS] caption [SEP] labels [SEP].

        Labels that are to be predicted are [MASK]s; where their token type is 1 they are read. An
        empty caption leaves [CLS] [SEP] in front. A pair that is too long loses tokens of its
        longer part (of the labels where both are equally long).
        """
        rows = self._rows(captions, labels, regions)
        arrays = self._empty(rows, self.text)
        for row, (caption, tags) in enumerate(zip(captions, labels, strict=True)):
            room = self.text - (3 if len(tags) else 2)
            first = min(len(caption), max(room - len(tags), (room + 1) // 2))
            if len(tags) == 0:
                first = min(len(caption), room)
            second = min(len(tags), room - first)
            tokens = [self.cls_id, *caption[:first], self.sep_id]
            arrays["input_ids"][row, : len(tokens)] = tokens
            arrays["context_mask"][row, : len(tokens)] = True
            self._put_labels(arrays, row, len(tokens), tags[:second])
        return self._inputs(arrays, np.arange(self.text), regions)

    def _rows(self, captions, labels, regions) -> int:
        if not len(captions) == len(labels) == len(regions):
            raise UserError(
                f"{len(captions)} captions, {len(labels)} label lists and {len(regions)} pictures' "
                "regions were given: expected as many of each."
            )
        for row, features in enumerate(regions):
            if features.ndim != 2 or features.shape[1] != self.region_features:
                raise UserError(
                    f"regions of picture {row} of the batch have shape {features.shape}: expected "
                    f"(number, {self.region_features}); give the features the model was made for."
                )
        return len(captions)

    def _empty(self, rows: int, columns: int) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.full((rows, columns), self.pad_id, np.int32),
            "token_type_ids": np.full((rows, columns), CAPTION_TYPE, np.int32),
            "context_mask": np.zeros((rows, columns), bool),
            "caption_mask": np.zeros((rows, columns), bool),
        }

    def _put_labels(
        self, arrays: dict[str, np.ndarray], row: int, column: int, tags: Tokens
    ) -> None:
        """Labels and their [SEP] from `column` on, as many as there is room for."""
        if len(tags) == 0:
            return
        tokens = [*tags[: arrays["input_ids"].shape[1] - column - 1], self.sep_id]
        columns = slice(column, column + len(tokens))
        arrays["input_ids"][row, columns] = tokens
        arrays["token_type_ids"][row, columns] = LABEL_TYPE
        arrays["context_mask"][row, columns] = True

    def _inputs(
        self,
        arrays: dict[str, np.ndarray],
        positions: np.ndarray,
        regions: Sequence[np.ndarray],
    ) -> OscarInputs:
        rows = len(regions)
        features = np.zeros((rows, self.regions, self.region_features), np.float32)
        counts = np.array([min(len(region), self.regions) for region in regions], int)
        for row, region in enumerate(regions):
            features[row, : counts[row]] = region[: counts[row]]
        return OscarInputs(
            **arrays,
            position_ids=np.broadcast_to(positions, (rows, len(positions))).astype(np.int32),
            region_features=features,
            region_mask=np.arange(self.regions) < counts[:, None],
        )
