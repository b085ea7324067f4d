"""The sequences of the WebQA baseline, restated, which the configs for WebQA must reproduce.

From WebQnA/WebQA_Baseline vlp/webqa_loader.py, classes Preprocess4webqa
and Preprocess4webqaDecoder; line numbers are of that file. For what fits without truncation.
"""

from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.batches.packing import PackingConfig

CLS, SEP, UNK, PAD = 101, 102, 100, 0  # BERT's ids
IMAGE_CONTEXT, REGIONS = 200, 100  # max_len_img_cxt, len_vis_input
LENGTH_OF_A, LENGTH_OF_QUESTION, LENGTH_OF_ANSWER = 400, 70, 30

# The baseline's shapes in training: max_len_a 400 (200 region slots + caption), max_len_b 109,
# 512 columns. configs/webqa has those of inference too.
VLP_WEBQA = PackingConfig(
    buckets=((0, 512), (2, 312)),
    slots_per_picture=100,
    region_dim=2048,
    position_dim=1607,
    max_caption_tokens=200,
    max_question_tokens=109,
    max_answer_tokens=109,
    max_pair_tokens=109,
    attend_empty_slots=True,
    picture_positions=200,
)

Sequence4 = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Tokens = Sequence[int]


def training(
    sources: Sequence[Tokens],
    pictures: int | None,
    question: Tokens,
    answer: Tokens,
    *,
    select: bool = False,
    content: bool = True,
) -> Sequence4:
    """ids, segments, positions [512] and mask [512, 512] of one sequence in training.

    Args:
      sources: texts of the sources.
      pictures: how many pictures are shown; None: a text question's sequence.
      select: of source selection: nobody sees the answer.
      content: off, --no_img_content.
    """
    a = ([] if pictures is None else [UNK] * IMAGE_CONTEXT) + _joined(sources)
    b = [*question, *answer]
    tokens = [CLS, *a, SEP, *b, SEP]
    segments = [4] * (len(a) + 2) + [5] * (len(b) + 1)
    mask = np.zeros((512, 512), int)
    _open_context(mask, len(a) + 2 + len(question), pictures, content)
    if not select:
        start, end = len(a) + 2 + len(question), len(tokens)
        mask[start:end, start:end] = np.tril(np.ones((end - start, end - start), int))
    padding = [PAD] * (512 - len(tokens))
    return np.array(tokens + padding), np.array(segments + padding), np.arange(512), mask


def decoding(
    sources: Sequence[Tokens], pictures: int | None, question: Tokens, *, content: bool = True
) -> Sequence4:
    """ids [472], segments, positions [502] and mask [502, 502] of one sequence in decoding.

    The last 30 columns are generated; arguments as `training`'s.
    """
    a = ([] if pictures is None else [UNK] * IMAGE_CONTEXT) + _joined(sources)
    filled = LENGTH_OF_A + 2 + LENGTH_OF_QUESTION
    seen = len(a) + 2 + len(question)
    tokens = [CLS, *a, SEP, *question] + [PAD] * (filled - seen)
    segments = [4] * (len(a) + 2) + [5] * (filled + LENGTH_OF_ANSWER - len(a) - 2)
    positions = [*range(seen), *[0] * (filled - seen), *range(seen, seen + LENGTH_OF_ANSWER)]
    mask = np.zeros((filled + LENGTH_OF_ANSWER,) * 2, int)
    _open_context(mask, seen, pictures, content)
    mask[filled:, filled:] = np.tril(np.ones((LENGTH_OF_ANSWER, LENGTH_OF_ANSWER), int))
    return np.array(tokens), np.array(segments), np.array(positions), mask


def read_in_decoding(context: str, pictures: Sequence, snippets: Sequence) -> list:
    """What is read of a question's sources: by its context, `img` or `txt` (l.1151 and l.1262).

    A picture question's snippets are in no list that the decoder gets (l.316-345).
    """
    return list(pictures)[:2] if context == "img" else list(snippets)


def truncated_by_coins(tokens: Tokens, most: int, rng: np.random.Generator) -> list[int]:
    """`truncate_tokens_pair` on one segment (l.18-53): a coin for every surplus token."""
    kept = list(tokens)
    while len(kept) > most:
        kept.pop(0 if rng.random() < 0.5 else -1)
    return kept


def _open_context(mask: np.ndarray, end: int, pictures: int | None, content: bool) -> None:
    """Opens the columns of context and question, `end` of them, for every row."""
    if pictures is None:
        mask[:, :end] = 1
        return
    if content:  # [CLS] and the regions of the pictures that are there (l.959, l.1191)
        mask[:, : 1 + REGIONS * pictures] = 1
    mask[:, 1 + IMAGE_CONTEXT : end] = 1


def _joined(sources: Sequence[Tokens]) -> list[int]:
    return [int(token) for source in sources for token in source]
