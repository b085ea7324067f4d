"""Training batches of the modality classifier: questions and their labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.batches.feed import Batches, FeedConfig, PlannedBatch, Table, feed_batches
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.tokenizers import Tokenizer, TokenTable, text_inputs


def modality_batches(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    labels: Sequence[int],
    feed: FeedConfig,
    *,
    length: int,
) -> Batches:
    """Questions with the class of each.

    A batch: input_ids int32[B, length], mask bool[B, length], label int32[B]; index int32[B]:
    indices into `texts`; truncated int32[B]: tokens lost.

    Args:
      length: tokens, [CLS] and [SEP] among them; longer texts lose their tail.
    """
    tokens, classes = TokenTable(tokenizer, texts), np.asarray(labels, np.int32)
    everything = {"index": np.arange(len(texts)), "bucket": np.zeros(len(texts), np.int64)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        rows = table["index"]
        ids, mask, lost = text_inputs([tokens[row] for row in rows], length, tokenizer)
        return {
            "input_ids": ids,
            "mask": mask,
            "label": classes[rows],
            "index": rows.astype(np.int32),
            "truncated": lost,
        }

    return feed_batches(lambda _: everything, [Bucket(0, length)], make, feed)
