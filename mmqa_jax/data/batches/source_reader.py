"""Reads the sources of a corpus, their tokens, pixels and regions, and makes training batches of
them: for source selection and for answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least, mapping
from mmqa_jax.data.batches.feed import (
    Batches,
    FeedConfig,
    PlannedBatch,
    Table,
    augmented,
    check_shares,
    example_rng,
    feed_batches,
    mixed,
    nest_inputs,
)
from mmqa_jax.data.batches.packing import (
    Example,
    MaskingConfig,
    Packed,
    Packer,
    RawExample,
    RawSource,
    SourceTokens,
    batch,
    clean,
)
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.regions import FeatureRegions, PatchRegions
from mmqa_jax.data.schema import Modality, Question, Source, category_modality
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


# Training batches of the source selector: (question, candidate) pairs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSampling:
    """How an epoch draws its pairs."""

    choices_per_question: int = at_least(1, 8)  # sources of a question at most, gold ones first
    # Of them in the gold sources' modality, the rest in the other one (the baseline: 16 and 16).
    alike_share: float = 0.5
    # How often a question is followed by the title of one of its gold sources, as in the reranker's
    # second hop.
    second_hop_prob: float = 0.0

    def __post_init__(self):
        check_shares(self, "alike_share", "second_hop_prob")


def rerank_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    packer: Packer,
    feed: FeedConfig,
    sampling: PairSampling = PairSampling(),
    members: Sequence[int] = (),
) -> Batches:
    """(question, candidate) pairs for the source head, pictures and snippets apart.

    Every epoch shows all gold sources of a question and a new draw of its hard negatives. Batches
    mix the pairs of all questions. `members`: of a mixture (`feed.mixture`), the corpus of every
    question.

    A batch has the arrays of packing.INPUT_FIELDS (see FeedConfig.inputs) and, each [B]:
    labels int32 (1 = relevant), weights float32 (proportional to 1 / choices of the question, 1
    in the mean over an epoch: the mean over the epoch's weighted pairs is the mean over its
    questions of the mean over their choices), index (into `questions`) and truncated (tokens and
    regions lost) int32.
    """
    corpus = reader.corpus
    usable = [i for i, q in enumerate(questions) if q.positives]
    if not usable:
        raise UserError("rerank training: no question lists a gold source; check the split.")
    golds = {i: np.array(corpus.positive_rows(questions[i])) for i in usable}
    negatives = {i: np.array(corpus.negative_rows(questions[i]), np.int64) for i in usable}
    question_tokens = TokenTable(reader.tokenizer, [clean(q.question) for q in questions])
    title_tokens = TokenTable(reader.tokenizer, [source.title for source in corpus.sources])
    choices, second_hop_prob = sampling.choices_per_question, sampling.second_hop_prob
    same = math.ceil(choices * sampling.alike_share)

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((12, feed.seed, epoch))
        # first_hops: the source whose title follows the question, -1: none.
        chosen, sizes, first_hops = [], [], []
        for i in usable:
            gold, pool = golds[i], rng.permutation(negatives[i])
            alike = reader.is_image[pool] == reader.is_image[gold[0]]
            near = pool[alike][: max(0, same - len(gold))]
            far = pool[~alike][: choices - same]
            chosen += [gold, near, far]
            sizes.append(len(gold) + len(near) + len(far))
            second = second_hop_prob and rng.random() < second_hop_prob
            first_hops.append(rng.choice(gold) if second else -1)
        sizes, rows = np.array(sizes), np.concatenate(chosen)  # [questions], [pairs]
        question, first_hop = np.repeat(usable, sizes), np.repeat(first_hops, sizes)  # [pairs]
        relevant = np.concatenate([np.full(len(c), k % 3 == 0) for k, c in enumerate(chosen)])
        text = reader.text_length(rows[:, None]) + question_tokens.lengths[question] + feed.slack
        text = text + np.where(first_hop >= 0, title_tokens.lengths[first_hop], 0)
        return {
            "question": question,
            "row": rows,
            "first_hop": first_hop,
            "label": relevant,
            "weight": np.repeat(sizes.mean() / sizes, sizes),
            "bucket": packer.config.bucket_indices(reader.is_image[rows], text, 2),
        }

    def make(planned: PlannedBatch, table: Table) -> Packed:
        packed = []
        reader.look_ahead(table["row"])
        for b, i in enumerate(table["question"]):
            record = questions[i]
            query = record.question
            if table["first_hop"][b] >= 0:
                query += " " + corpus.sources[table["first_hop"][b]].title
            raw = RawExample(query, (reader.raw(table["row"][b]),), record=record)
            raw = augmented(raw, feed, planned, b)
            unchanged = raw.question == record.question
            known = question_tokens[i] if unchanged else None
            example = reader.example(raw, known, ())
            rng = example_rng(feed, planned, b, 1)
            packed.append(packer.pack_for_selection(example, planned.bucket, rng))
        arrays = batch(packed)
        arrays["labels"] = table["label"].astype(np.int32)
        arrays["weights"] = table["weight"].astype(np.float32)
        arrays["index"] = table["question"].astype(np.int32)
        return nest_inputs(arrays, feed)

    return feed_batches(
        mixed(sample, members, feed), packer.config.buckets, make, feed, reader.broken
    )


# Training batches of the reader: questions, their sources and partly masked answers.


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSampling:
    """How an epoch draws the sources shown with a question, and the answer that is learned."""

    # Gold sources shown at most, the first ones. Of the pictures among them, those beyond the
    # largest bucket's are left out with their captions (SourceReader.readable).
    max_sources: int = at_least(0, 2)
    # With this probability a question with fewer gold sources than `max_sources` also gets one of
    # its hard negatives (robustness to wrong sources).
    distractor_prob: float = 0.0
    shuffle_sources: bool = True  # random order of the sources; off, the question's order
    # With this probability a question gets no source at all; 1 trains the question-only model.
    no_source_prob: float = 0.0
    # Category -> the share of its questions that an epoch shows, drawn anew for each; categories
    # that are not named are shown whole.
    shares: Mapping[str, float] = mapping(dict[str, float])
    # Which of a question's reference answers is learned: the first, as in the baseline
    # (webqa_loader.py l.149, l.322), or in every epoch a random one.
    wording: Literal["first", "random"] = "random"

    def __post_init__(self):
        check_shares(self, "distractor_prob", "no_source_prob")


def answer_batches(
    reader: SourceReader,
    questions: Sequence[Question],
    packer: Packer,
    masking: MaskingConfig,
    feed: FeedConfig,
    sampling: AnswerSampling = AnswerSampling(),
    *,
    route_by_category: bool = False,
) -> Batches:
    """Questions with their gold sources and partly masked answers, for masked-LM training.

    `route_by_category`: WebQA's picture questions are shown pictures alone and laid out with region
    slots even if none is shown, text questions snippets alone (the baseline has a data set for
    each, webqa_loader.py l.143 and l.316).

    A batch has the arrays of packing.INPUT_FIELDS (see FeedConfig.inputs), masked_ids,
    masked_positions int32 and masked_weights float32 [B, max_pred], index (into `questions`)
    and truncated int32[B].
    """
    usable = [i for i, q in enumerate(questions) if q.answers]
    if not usable:
        raise UserError("answer training: no question has a reference answer; check the split.")
    max_sources, wording = sampling.max_sources, sampling.wording
    distractor_prob, no_source_prob = sampling.distractor_prob, sampling.no_source_prob
    shares = sampling.shares
    _check_shares(shares, {questions[i].category for i in usable})
    corpus, tokenizer = reader.corpus, reader.tokenizer
    with_source = [] if no_source_prob == 1 else usable
    wanted = [category_modality(q.category) if route_by_category else None for q in questions]
    most = packer.config.max_pictures

    def readable(i: int, rows: Sequence[int]) -> list[int]:
        return reader.readable(rows, most, wanted[i])

    golds = {
        i: np.array(readable(i, corpus.positive_rows(questions[i]))[:max_sources], int)
        for i in with_source
    }
    negatives = {i: corpus.negative_rows(questions[i]) for i in with_source if distractor_prob}
    question_tokens = TokenTable(tokenizer, [clean(q.question) for q in questions])
    keyword_tokens = TokenTable(tokenizer, [clean(q.keywords) for q in questions])
    usable_shares = np.array([shares.get(questions[i].category, 1.0) for i in usable])
    num_answers = [len(questions[i].answers) for i in usable]
    first_answer = np.cumsum([0, *num_answers])[:-1]  # in the table of all answers
    answer_tokens = TokenTable(
        tokenizer, [clean(answer) for i in usable for answer in questions[i].answers]
    )

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((13, feed.seed, epoch))
        taken = np.flatnonzero(rng.random(len(usable)) < usable_shares)
        rows = np.full((len(usable), max_sources), -1)
        for n, i in enumerate(usable):
            if no_source_prob and rng.random() < no_source_prob:
                continue
            chosen = golds[i]
            room = len(chosen) < max_sources and distractor_prob and len(negatives[i])
            if room and rng.random() < distractor_prob:
                chosen = np.array(readable(i, [*chosen, rng.choice(negatives[i])]), int)
            if sampling.shuffle_sources:
                chosen = rng.permutation(chosen)
            rows[n, : len(chosen)] = chosen
        choice = rng.integers(num_answers if wording == "random" else [1] * len(usable))
        answer_lengths = masking.columns(answer_tokens.lengths[first_answer + choice])
        text = reader.text_length(rows) + question_tokens.lengths[usable] + answer_lengths
        pictures = ((rows >= 0) & reader.is_image[rows]).sum(axis=1)
        table = {
            "question": np.array(usable),
            "rows": rows,
            "choice": choice,
            "answer": first_answer + choice,
            "bucket": packer.config.bucket_indices(pictures, text + feed.slack, 3),
        }
        return {name: column[taken] for name, column in table.items()}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        packed = []
        reader.look_ahead(table["rows"].flat)
        for b, i in enumerate(table["question"]):
            record = questions[i]
            answer = record.answers[table["choice"][b]]
            sources = tuple(reader.raw(int(row)) for row in table["rows"][b] if row >= 0)
            raw = RawExample(record.question, sources, answer, record, record.keywords)
            raw = augmented(raw, feed, planned, b)
            example = reader.example(
                raw,
                question_tokens[i] if raw.question == record.question else None,
                answer_tokens[table["answer"][b]] if raw.answer == answer else None,
                keyword_tokens[i] if raw.keywords == record.keywords else None,
            )
            example = example._replace(about_pictures=wanted[i] == "image")
            rng = example_rng(feed, planned, b, 1)
            packed.append(masking.pack(packer, example, planned.bucket, rng))
        arrays = batch(packed)
        arrays["index"] = table["question"].astype(np.int32)
        return nest_inputs(arrays, feed)

    return feed_batches(sample, packer.config.buckets, make, feed, reader.broken)


def _check_shares(shares: Mapping[str, float], categories: set[str]) -> None:
    for name, value in shares.items():
        if name not in categories:
            raise UserError(
                f"config key batches.shares.{name}: no question is of this category; use one of "
                f"{', '.join(sorted(categories))}."
            )
        if not 0 < value <= 1:
            raise UserError(
                f"config key batches.shares.{name}={value}: a share above 0 and at most 1 was "
                "expected; change it."
            )
