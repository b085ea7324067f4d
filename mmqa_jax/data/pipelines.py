"""Training batches of the three tasks: contrastive, rerank, answer.

Each pipeline samples per epoch what is shown (negatives, wordings, distractors) as a pure
function of (seed, epoch), packs batch i as a pure function of (seed, i), and is a Grain
iterator whose whole state is its position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import grain
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.examples import RawExample, SourceReader
from mmqa_jax.data.feed import (
    Epochs,
    FeedConfig,
    Table,
    augmented,
    example_rng,
    feed_batches,
    nest_inputs,
)
from mmqa_jax.data.sampling import PlannedBatch
from mmqa_jax.data.schema import Question
from mmqa_jax.data.sequences import (
    Bucket,
    MaskingConfig,
    Packed,
    Packer,
    Tokens,
    batch,
    clean,
    cut,
)
from mmqa_jax.data.tokenizers import TokenTable, WordPiece


def contrastive_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    feed: FeedConfig,
    *,
    query_length: int,
    source_lengths: Sequence[int],
    num_negatives: int = 1,
    two_pass: bool = False,
) -> grain.DatasetIterator[Packed]:
    """Questions against one gold source each and `num_negatives` hard negatives.

    With `two_pass`, a question of several gold sources is at even odds either asked as it is
    (target: the first) or asked with the title of the first (target: another), as retrieval's
    second pass asks; pictures come in random order, snippets in the question's.

    A batch of B questions has S = B * (1 + num_negatives) sources, each question's target
    followed by its negatives:
      query_ids int32[B, query_length], query_mask bool; positive int32[B]: column of the
      target among the sources of all processes
      source_ids int32[S, Ls], source_mask bool, pixels uint8[S, size, size, 3], has_image bool[S]
      source_rows int32[S]: corpus rows, the same twice = a false negative
      gold_rows int32[B, G]: all gold sources of each question, padded with -1
      index int32[B]: places in `questions`; truncated int32[B]: tokens lost

    Args:
      source_lengths: columns of the sources, one static shape each ([CLS] and [SEP] counted).
        One only mixes short captions with long snippets, which is the better contrast.
    """
    corpus, tokenizer = reader.corpus, reader.tokenizer
    kept = [i for i, q in enumerate(questions) if q.positives]
    if not kept:
        raise UserError("contrastive training: no question lists a gold source; check the split.")
    golds = {i: np.array(corpus.positive_rows(questions[i])) for i in kept}
    negatives = {i: _negative_rows(reader, questions[i]) for i in kept}
    widest = max(map(len, golds.values()))
    asked = TokenTable(tokenizer, [q.question for q in questions])
    shapes = [Bucket(0, length) for length in sorted(source_lengths)]
    group = 1 + num_negatives

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((11, feed.seed, epoch))
        rows, hints = np.zeros((len(kept), group), np.int64), np.full(len(kept), -1)
        for n, i in enumerate(kept):
            gold = golds[i]
            if reader.is_image[gold].any() or not two_pass:
                gold = rng.permutation(gold)
            rows[n, 0] = gold[0]
            if two_pass and len(gold) > 1 and rng.random() < 0.5:
                hints[n], rows[n, 0] = gold[0], gold[1 + rng.integers(len(gold) - 1)]
            rows[n, 1:] = _draw(rng, negatives[i], num_negatives, len(corpus), golds[i])
        longest = reader.table.lengths[rows].max(axis=1) + 2 + feed.slack
        buckets = np.searchsorted([s.text for s in shapes], longest).clip(max=len(shapes) - 1)
        return {"question": np.array(kept), "rows": rows, "hint": hints, "bucket": buckets}

    epochs = Epochs(sample, shapes, feed.batch_size)

    def make(planned: PlannedBatch) -> Packed:
        table = epochs(planned.epoch)
        size = reader.pictures.size if reader.pictures else 0
        count = len(planned.examples)
        pixels = np.zeros((count * group, size, size, 3), np.uint8)
        has_image = np.zeros(count * group, bool)
        queries, texts = [], []
        for place, n in enumerate(planned.examples):
            i, hint = table["question"][n], table["hint"][n]
            shown = [*table["rows"][n], *([hint] if hint >= 0 else [])]
            sources = tuple(reader.raw(int(row)) for row in shown)
            raw = RawExample(questions[i].question, sources, record=questions[i])
            raw = augmented(raw, feed, planned, place)
            query = asked[i]
            if raw.question != questions[i].question:
                query = tokenizer.encode(raw.question)
            if hint >= 0:
                query = with_hint(query, tokenizer.encode(raw.sources[-1].title), query_length)
            queries.append(query)
            for k, source in enumerate(raw.sources[:group]):
                texts.append(reader.tokens(source))
                if source.pixels is not None:
                    pixels[place * group + k] = source.pixels
                    has_image[place * group + k] = True
        query_ids, query_mask, lost = text_inputs(queries, query_length, tokenizer)
        source_ids, source_mask, cut_off = text_inputs(
            texts, shapes[planned.bucket].text, tokenizer
        )
        gold_rows = np.full((count, widest), -1, np.int32)
        for place, n in enumerate(planned.examples):
            gold = golds[table["question"][n]]
            gold_rows[place, : len(gold)] = gold
        return {
            "query_ids": query_ids,
            "query_mask": query_mask,
            "source_ids": source_ids,
            "source_mask": source_mask,
            "pixels": pixels,
            "has_image": has_image,
            "source_rows": table["rows"][planned.examples].reshape(-1).astype(np.int32),
            "positive": (group * (planned.start + np.arange(count))).astype(np.int32),
            "gold_rows": gold_rows,
            "index": table["question"][planned.examples].astype(np.int32),
            "truncated": lost + cut_off.reshape(count, group).sum(axis=1, dtype=np.int32),
        }

    return feed_batches(epochs, make, feed)


def rerank_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    packer: Packer,
    feed: FeedConfig,
    *,
    choices_per_question: int = 8,
    alike_share: float = 0.5,
    hint_prob: float = 0.0,
) -> grain.DatasetIterator[Packed]:
    """(question, candidate) pairs for the source head, pictures and snippets apart.

    Every epoch shows all gold sources of a question and a new draw of its hard negatives:
    `alike_share` of the choices in the gold sources' modality, the others in the other one (the
    baseline: 16 and 16). Batches mix the pairs of all questions. With `hint_prob` a question is
    followed by the title of one of its gold sources, as in the reranker's second pass (two-hop
    questions).

    A batch has the arrays of sequences.INPUT_FIELDS (see FeedConfig.inputs) and, each [B]:
    labels int32 (1 = relevant), weights float32 (1 / choices of the question: a sum over
    pairs is the baseline's mean per question), index (places in `questions`) and truncated
    (tokens and regions lost) int32.
    """
    kept = [i for i, q in enumerate(questions) if q.positives]
    if not kept:
        raise UserError("rerank training: no question lists a gold source; check the split.")
    golds = {i: np.array(reader.corpus.positive_rows(questions[i])) for i in kept}
    negatives = {i: _negative_rows(reader, questions[i]) for i in kept}
    asked = TokenTable(reader.tokenizer, [clean(q.question) for q in questions])
    titles = TokenTable(reader.tokenizer, [source.title for source in reader.corpus.sources])
    config = packer.config
    same = math.ceil(choices_per_question * alike_share)

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((12, feed.seed, epoch))
        chosen, sizes, hints = [], [], []
        for i in kept:
            gold, pool = golds[i], rng.permutation(negatives[i])
            alike = reader.is_image[pool] == reader.is_image[gold[0]]
            near = pool[alike][: max(0, same - len(gold))]
            far = pool[~alike][: choices_per_question - same]
            chosen += [gold, near, far]
            sizes.append(len(gold) + len(near) + len(far))
            hints.append(rng.choice(gold) if hint_prob and rng.random() < hint_prob else -1)
        sizes, rows = np.array(sizes), np.concatenate(chosen)  # [questions], [pairs]
        question, hint = np.repeat(kept, sizes), np.repeat(hints, sizes)  # [pairs]
        relevant = np.concatenate([np.full(len(c), k % 3 == 0) for k, c in enumerate(chosen)])
        text = reader.text_length(rows[:, None]) + asked.lengths[question] + feed.slack
        text = text + np.where(hint >= 0, titles.lengths[hint], 0)
        buckets = _lookup(config.bucket_index, reader.is_image[rows].astype(int), text, 2)
        weights = np.repeat(1.0 / sizes, sizes)
        return {
            "question": question,
            "row": rows,
            "hint": hint,
            "label": relevant,
            "weight": weights,
            "bucket": buckets,
        }

    epochs = Epochs(sample, config.buckets, feed.batch_size)

    def make(planned: PlannedBatch) -> Packed:
        table, packed = epochs(planned.epoch), []
        for place, n in enumerate(planned.examples):
            record = questions[table["question"][n]]
            asked_text = record.question
            if table["hint"][n] >= 0:
                asked_text += " " + reader.corpus.sources[table["hint"][n]].title
            raw = RawExample(asked_text, (reader.raw(table["row"][n]),), record=record)
            raw = augmented(raw, feed, planned, place)
            known = asked[table["question"][n]] if raw.question == record.question else None
            example = reader.example(raw, known, ())
            rng = example_rng(feed, planned, place, 1)
            packed.append(packer.pack_for_selection(example, planned.bucket, rng))
        arrays = batch(packed)
        arrays["labels"] = table["label"][planned.examples].astype(np.int32)
        arrays["weights"] = table["weight"][planned.examples].astype(np.float32)
        arrays["index"] = table["question"][planned.examples].astype(np.int32)
        return nest_inputs(arrays, feed)

    return feed_batches(epochs, make, feed)


def answer_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    packer: Packer,
    masking: MaskingConfig,
    feed: FeedConfig,
    *,
    max_sources: int = 2,
    distractor_prob: float = 0.0,
    shuffle_sources: bool = True,
    no_source_prob: float = 0.0,
    shares: dict[str, float] | None = None,
) -> grain.DatasetIterator[Packed]:
    """Questions with their gold sources and partly masked answers, for masked-LM training.

    Args:
      max_sources: gold sources shown at most, the first ones (the baseline: two pictures).
      distractor_prob: a question with fewer gold sources than `max_sources` gets one of its
        hard negatives beside them with this probability (robustness to wrong sources).
      shuffle_sources: random order of the sources; off, the question's order.
      no_source_prob: a question gets no source at all with this probability; 1 trains the
        question-only model.
      shares: category -> the share of its questions that an epoch shows, drawn anew for each;
        categories that are not named are shown whole.

    A batch has the arrays of sequences.INPUT_FIELDS (see FeedConfig.inputs), masked_ids,
    masked_positions int32 and masked_weights float32 [B, max_pred], index (places in
    `questions`) and truncated int32[B]. The wording is a random one of the reference answers.
    """
    kept = [i for i, q in enumerate(questions) if q.answers]
    if not kept:
        raise UserError("answer training: no question has a reference answer; check the split.")
    for name, value in (("distractor_prob", distractor_prob), ("no_source_prob", no_source_prob)):
        if not 0 <= value <= 1:
            raise UserError(f"{name}={value}: a probability in 0..1 was expected.")
    shares = shares or {}
    categories = {questions[i].category for i in kept}
    for name, value in shares.items():
        if name not in categories:
            raise UserError(
                f"config key batches.shares.{name}: no question is of this category; use one of "
                f"{', '.join(sorted(categories))}."
            )
        if not 0 < value <= 1:
            raise UserError(
                f"config key batches.shares.{name}={value}: a share above 0, 1 at most, was "
                "expected; change it."
            )
    shown = [] if no_source_prob == 1 else kept
    golds = {i: np.array(reader.corpus.positive_rows(questions[i])[:max_sources]) for i in shown}
    negatives = {i: _negative_rows(reader, questions[i]) for i in shown if distractor_prob}
    asked = TokenTable(reader.tokenizer, [clean(q.question) for q in questions])
    keywords = TokenTable(reader.tokenizer, [clean(q.keywords) for q in questions])
    chances = np.array([shares.get(questions[i].category, 1.0) for i in kept])
    wordings = [len(questions[i].answers) for i in kept]
    first_wording = np.cumsum([0, *wordings])
    answers = TokenTable(
        reader.tokenizer, [clean(answer) for i in kept for answer in questions[i].answers]
    )

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((13, feed.seed, epoch))
        taken = np.flatnonzero(rng.random(len(kept)) < chances)
        rows = np.full((len(kept), max_sources), -1)
        for n, i in enumerate(kept):
            if no_source_prob and rng.random() < no_source_prob:
                continue
            chosen = golds[i]
            room = len(chosen) < max_sources and distractor_prob and len(negatives[i])
            if room and rng.random() < distractor_prob:
                chosen = np.append(chosen, rng.choice(negatives[i]))
            if shuffle_sources:
                chosen = rng.permutation(chosen)
            rows[n, : len(chosen)] = chosen
        wording = rng.integers(wordings)
        row = first_wording[:-1] + wording
        there = rows >= 0
        text = reader.text_length(rows)
        answer_lengths = answers.lengths[row]
        if masking.probes:  # every answer token and the last [SEP] stand there twice
            answer_lengths = 2 * answer_lengths + 1
        text += asked.lengths[kept] + answer_lengths + feed.slack
        pictures = (there & reader.is_image[rows]).sum(axis=1)
        buckets = _lookup(packer.config.bucket_index, pictures, text, 3)
        table = {
            "question": np.array(kept),
            "rows": rows,
            "wording": wording,
            "answer": row,
            "bucket": buckets,
        }
        return {name: column[taken] for name, column in table.items()}

    epochs = Epochs(sample, packer.config.buckets, feed.batch_size)

    def make(planned: PlannedBatch) -> Packed:
        table, packed = epochs(planned.epoch), []
        for place, n in enumerate(planned.examples):
            record = questions[table["question"][n]]
            text = record.answers[table["wording"][n]]
            sources = tuple(reader.raw(int(row)) for row in table["rows"][n] if row >= 0)
            raw = RawExample(record.question, sources, text, record, record.keywords)
            raw = augmented(raw, feed, planned, place)
            example = reader.example(
                raw,
                asked[table["question"][n]] if raw.question == record.question else None,
                answers[table["answer"][n]] if raw.answer == text else None,
                keywords[table["question"][n]] if raw.keywords == record.keywords else None,
            )
            rng = example_rng(feed, planned, place, 1)
            packed.append(packer.pack_for_answer(example, planned.bucket, masking, rng))
        arrays = batch(packed)
        arrays["index"] = table["question"][planned.examples].astype(np.int32)
        return nest_inputs(arrays, feed)

    return feed_batches(epochs, make, feed)


def text_inputs(
    texts: Sequence[Tokens], length: int, tokenizer: WordPiece
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[CLS] text [SEP]` for the dual encoder: ids int32[B, L], mask bool[B, L], lost int32[B].

    Longer texts lose their tail; `lost` says how many tokens.
    """
    ids = np.full((len(texts), length), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(texts), length), bool)
    lost = np.zeros(len(texts), np.int32)
    ids[:, 0] = tokenizer.cls_id
    for row, text in enumerate(texts):
        kept = cut(text, length - 2, None)
        ids[row, 1 : 1 + len(kept)] = kept
        ids[row, 1 + len(kept)] = tokenizer.sep_id
        mask[row, : len(kept) + 2] = True
        lost[row] = len(text) - len(kept)
    return ids, mask, lost


def with_hint(query: Tokens, hint: Tokens, length: int) -> np.ndarray:
    """Tokens of retrieval's second pass: question, then the first hit's title.

    Where both do not fit in `length` (with [CLS] and [SEP]), the question loses its tail.
    """
    hint = cut(hint, (length - 2) // 2, None)
    query = cut(query, length - 2 - len(hint), None)
    return np.concatenate([np.asarray(query, np.int32), np.asarray(hint, np.int32)])


def _negative_rows(reader: SourceReader, question: Question) -> np.ndarray:
    rows = reader.corpus.candidates(question)[len(question.positives) :]
    return np.array(rows, np.int64)


def _draw(
    rng: np.random.Generator, pool: np.ndarray, count: int, rows: int, golds: np.ndarray
) -> np.ndarray:
    """`count` of `pool` without replacement; what is missing comes from the whole corpus."""
    drawn = rng.permutation(pool)[:count]
    others = rows > len(np.unique(golds))
    while len(drawn) < count:
        more = rng.integers(rows, size=count)
        more = more[~np.isin(more, golds)] if others else more
        drawn = np.append(drawn, more)[:count]
    return drawn


def _lookup(
    bucket_index: Callable[[int, int, int], int],
    pictures: np.ndarray,
    text: np.ndarray,
    specials: int,
) -> np.ndarray:
    """Buckets of many examples, [N]."""
    return np.array(
        [bucket_index(int(p), int(t), specials) for p, t in zip(pictures, text, strict=True)]
    )
