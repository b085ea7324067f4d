"""Batches for inference: every example once, by bucket, the last batch padded.

Each batch carries `index` int64[B], the example of each row, and `weights` float32[B], 0 on the
rows that only pad the last batch of a bucket. Scatter results with

    real = batch["weights"] > 0
    results[batch["index"][real]] = outputs[real]

Where several processes compute a batch, each makes some rows of it (core.mesh.RowPlacement): the
arrays hold these, `index` and `weights` are of the whole batch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.errors import first_names
from mmqa_jax.core.mesh import DEFAULT_DEVICE, RowPlacement
from mmqa_jax.core.serving import Serving
from mmqa_jax.data.batches.packing import (
    INPUT_FIELDS,
    Packed,
    Packer,
    RawExample,
    RawSource,
    batch,
    clean,
)
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import TokenTable, coins
from mmqa_jax.models.vlp.network import VLPInputs


def rerank_pairs(
    reader: SourceReader,
    packer: Packer,
    questions: Sequence[str],
    candidates: Sequence[Sequence[int]],
    *,
    batch_size: int,
    coin_ids: Sequence[str] | None = None,
    serving: Serving | None = None,
) -> Iterator[Packed]:
    """(question, candidate) pairs for the source head.

    Args:
      candidates: corpus rows of each question's candidates; possibly none.
      coin_ids: the questions' ids; surplus tokens are then cut from head or tail as in training,
        by coins that depend on the ids of question and source. None: from the tail.
      serving: the sizes of batches that are not full, and which rows of a batch this process
        makes; None: one size, and all rows.

    Yields:
      The arrays of packing.INPUT_FIELDS with `index` into the candidates of all questions,
      concatenated, `weights`, `truncated`.
    """
    assert len(questions) == len(candidates)
    question_tokens = TokenTable(reader.tokenizer, [clean(question) for question in questions])
    sizes = [len(rows_of_question) for rows_of_question in candidates]
    question = np.repeat(np.arange(len(questions)), sizes)  # [pairs]
    source = np.array(
        [row for rows_of_question in candidates for row in rows_of_question], np.int64
    )  # [pairs]
    text = reader.text_length(source[:, None]) + question_tokens.lengths[question]
    buckets = packer.config.bucket_indices(reader.is_image[source], text, 2)

    def make(pair: int, bucket: int) -> Packed:
        raw = RawExample(questions[question[pair]], (reader.raw(int(source[pair])),))
        example = reader.example(raw, question_tokens[question[pair]], ())
        rng = None
        if coin_ids is not None:
            rng = coins(coin_ids[question[pair]], reader.corpus.sources[source[pair]].id)
        return packer.pack_for_selection(example, bucket, rng)

    def look_ahead(pairs: Sequence[int]) -> None:
        reader.look_ahead(source[pairs])

    yield from _by_bucket(buckets, look_ahead, make, batch_size, serving)


def answer_inputs(
    reader: SourceReader,
    packer: Packer,
    questions: Sequence[str],
    sources: Sequence[Sequence[int]],
    *,
    batch_size: int,
    question_pixels: Sequence[np.ndarray | None] | None = None,
    about_pictures: Sequence[bool] | None = None,
    coin_ids: Sequence[str] | None = None,
    serving: Serving | None = None,
) -> Iterator[Packed]:
    """Questions with the sources to answer from, for the decoder.

    Args:
      sources: corpus rows of each question's sources, best first; none = question only.
      question_pixels: uint8[S, S, 3] of the picture that belongs to a question, or None;
        it is encoded as the first source, without text.
      about_pictures: which questions are laid out as picture questions whatever their sources;
        None: none of them.
      coin_ids: as in `rerank_pairs`, of the questions alone.
      serving: as in `rerank_pairs`.

    Yields:
      The arrays of packing.INPUT_FIELDS and `length` int32[B] (see Packer.pack_for_decoding)
      with `index` into `questions`, `weights`, `truncated`.
    """
    assert len(questions) == len(sources)
    question_tokens = TokenTable(reader.tokenizer, [clean(question) for question in questions])
    question_pictures = [
        () if p is None else (RawSource("", pixels=p),) for p in question_pixels or ()
    ]
    question_pictures = question_pictures or [()] * len(questions)
    listed = [np.array(rows, int) for rows in sources]
    pictures = [
        len(question_pictures[i]) + reader.is_image[rows].sum() for i, rows in enumerate(listed)
    ]
    text = [reader.text_length(rows, len(question_pictures[i])) for i, rows in enumerate(listed)]
    buckets = packer.config.bucket_indices(pictures, text + question_tokens.lengths, 2)

    def make(i: int, bucket: int) -> Packed:
        sources_of_example = (*question_pictures[i], *(reader.raw(int(row)) for row in listed[i]))
        example = reader.example(
            RawExample(questions[i], sources_of_example), question_tokens[i], ()
        )
        example = example._replace(about_pictures=bool(about_pictures and about_pictures[i]))
        rng = None if coin_ids is None else coins(coin_ids[i])
        return packer.pack_for_decoding(example, bucket, rng)

    def look_ahead(numbers: Sequence[int]) -> None:
        reader.look_ahead(row for i in numbers for row in listed[i])

    yield from _by_bucket(buckets, look_ahead, make, batch_size, serving)


def _by_bucket(
    buckets: np.ndarray,
    look_ahead: Callable[[Sequence[int]], None],
    make: Callable[[int, int], Packed],
    batch_size: int,
    serving: Serving | None,
) -> Iterator[Packed]:
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        for start in range(0, len(members), batch_size):
            chunk = members[start : start + batch_size]
            size = batch_size if serving is None else serving.size_for(len(chunk))
            rows = np.arange(size) if serving is None else serving.placement.rows(size)
            index = np.concatenate([chunk, np.repeat(chunk[-1], size - len(chunk))])
            used = np.unique(index[rows])
            look_ahead(used)
            packed = {int(i): make(int(i), int(bucket)) for i in used}
            arrays = batch([packed[int(i)] for i in index[rows]])
            arrays["index"] = index
            arrays["weights"] = (np.arange(size) < len(chunk)).astype(np.float32)
            yield arrays


# What reranker and reader share: inputs on the device, and a warning about long questions.


def vlp_inputs(batch: dict[str, np.ndarray], placement: RowPlacement = DEFAULT_DEVICE) -> VLPInputs:
    """The packed arrays of a batch on the devices; `batch` has this process's rows of them."""
    return VLPInputs(**placement.put({name: batch[name] for name in INPUT_FIELDS}))


def coin_ids(questions: Sequence[Question], options: Any) -> list[str] | None:
    """The ids that seed truncation if the section `inference` asks for it, else None.

    Without --always_truncate_tail the baseline draws its coins at inference too (webqa_loader.py
    l.49).
    """
    if options.always_truncate_tail:
        return None
    return [question.id for question in questions]


def warn_truncated(questions: Sequence[Question], packer: Packer) -> None:
    """Warns on stderr about questions that are truncated to the model's maximum length."""
    too_long = [question.id for question in questions if packer.excess(question.question)]
    if too_long:
        print(
            f"{len(too_long)} of {len(questions)} questions are longer than the "
            f"{packer.config.max_question_tokens} tokens that the model takes and are truncated: "
            f"{first_names(too_long)}.",
            file=sys.stderr,
        )
