"""Batches for inference: every example once, by bucket, the last batch filled up.

Each batch carries `index` int64[B], which example a row is, and `weights` float32[B], 0 on
the rows that only fill the last batch of a bucket. Scatter results with

    real = batch["weights"] > 0
    results[batch["index"][real]] = outputs[real]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.examples import RawExample, RawSource, SourceReader
from mmqa_jax.data.sequences import Packed, Packer, batch, clean
from mmqa_jax.data.tokenizers import TokenTable


def rerank_pairs(
    reader: SourceReader,
    packer: Packer,
    questions: Sequence[str],
    candidates: Sequence[Sequence[int]],
    *,
    batch_size: int,
) -> Iterator[Packed]:
    """(question, candidate) pairs for the source head.

    Args:
      candidates: corpus rows of each question; may be of different numbers, even none.

    Yields:
      The arrays of sequences.INPUT_FIELDS with `index` = place in the candidates of all
      questions put end to end, `weights`, `truncated`.
    """
    _same_length(questions, candidates)
    asked = TokenTable(reader.tokenizer, [clean(question) for question in questions])
    sizes = [len(rows) for rows in candidates]
    question = np.repeat(np.arange(len(questions)), sizes)  # [pairs]
    rows = np.array([row for some in candidates for row in some], np.int64)  # [pairs]
    buckets = [
        packer.config.bucket_index(int(reader.is_image[row]), int(text), 2)
        for row, text in zip(
            rows, reader.text_length(rows[:, None]) + asked.lengths[question], strict=True
        )
    ]

    def make(pair: int, bucket: int) -> Packed:
        raw = RawExample(questions[question[pair]], (reader.raw(int(rows[pair])),))
        example = reader.example(raw, asked[question[pair]], ())
        return packer.pack_for_selection(example, bucket)

    yield from _by_bucket(buckets, make, batch_size)


def answer_inputs(
    reader: SourceReader,
    packer: Packer,
    questions: Sequence[str],
    sources: Sequence[Sequence[int]],
    *,
    batch_size: int,
    question_pixels: Sequence[np.ndarray | None] | None = None,
) -> Iterator[Packed]:
    """Questions with the sources to answer from, for the decoder.

    Args:
      sources: corpus rows of each question, best first; none = question only.
      question_pixels: uint8[S, S, 3] of a picture that belongs to the question, or None;
        it is read as a first source without text.

    Yields:
      The arrays of sequences.INPUT_FIELDS and `length` int32[B] (see
      Packer.pack_for_decoding) with `index` = the question's place, `weights`, `truncated`.
    """
    _same_length(questions, sources)
    asked = TokenTable(reader.tokenizer, [clean(question) for question in questions])
    own = [() if p is None else (RawSource("", pixels=p),) for p in question_pixels or ()]
    own = own or [()] * len(questions)
    buckets = [
        packer.config.bucket_index(
            len(own[i]) + sum(bool(reader.is_image[row]) for row in rows),
            int(reader.text_length(np.array(rows, int), len(own[i])) + asked.lengths[i]),
            2,
        )
        for i, rows in enumerate(sources)
    ]

    def make(i: int, bucket: int) -> Packed:
        shown = (*own[i], *(reader.raw(int(row)) for row in sources[i]))
        example = reader.example(RawExample(questions[i], shown), asked[i], ())
        return packer.pack_for_decoding(example, bucket)

    yield from _by_bucket(buckets, make, batch_size)


def _by_bucket(
    buckets: Sequence[int] | np.ndarray, make: Callable[[int, int], Packed], batch_size: int
) -> Iterator[Packed]:
    buckets = np.asarray(buckets, np.int64)
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        for start in range(0, len(members), batch_size):
            chunk = members[start : start + batch_size]
            packed = [make(int(i), int(bucket)) for i in chunk]
            missing = batch_size - len(chunk)
            arrays = batch(packed + [packed[-1]] * missing)
            arrays["index"] = np.concatenate([chunk, np.repeat(chunk[-1], missing)])
            arrays["weights"] = (np.arange(batch_size) < len(chunk)).astype(np.float32)
            yield arrays


def _same_length(questions: Sequence, sources: Sequence) -> None:
    if len(questions) != len(sources):
        raise UserError(
            f"{len(questions)} questions but {len(sources)} lists of sources; give one list "
            "for every question."
        )
