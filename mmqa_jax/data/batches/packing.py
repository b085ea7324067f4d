"""VLP's input sequences: sources, question and answer in the arrays that models.vlp.network reads.

What the small reader of Atlas adds is in data/atlas/reader.py.

One sequence (WebQA baseline, vlp/webqa_loader.py, class Preprocess4webqa):

    [CLS] region slots * R, source text [SEP] question, answer [SEP] padding
    \\______________ context_mask ________________/ \\_ answer_mask _/

Every row attends to the columns of context_mask; the answer attends to itself causally:
`mask[i, j] = context_mask[j] | (answer_mask[i] & answer_mask[j] & j <= i)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer, Tokens, cut, cut_pair

Packed = dict[str, np.ndarray]

# The arrays that VLP reads, under the names of models.vlp.network.VLPInputs.
INPUT_FIELDS = (
    "input_ids",
    "token_type_ids",
    "position_ids",
    "context_mask",
    "answer_mask",
    "region_features",
    "region_positions",
)


class Bucket(NamedTuple):
    """A static shape: region slots for `pictures` pictures and `text` other columns.

    `text` counts [CLS], source text, both [SEP], question and answer, so that the
    sequence has pictures * slots_per_picture + text columns.
    """

    pictures: int
    text: int


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    """Shapes and token budgets of the sequences."""

    # Static shapes, (pictures, text columns) each. An example takes the first that fits it, ordered
    # by pictures, then text; in the longest its source text is cut.
    buckets: tuple[tuple[int, int], ...]
    slots_per_picture: int  # region slots of one picture; further regions are dropped
    # region_dim, position_dim: columns of the region features and region positions.
    region_dim: int
    position_dim: int
    max_source_tokens: int = 400  # limit on the source text, all sources together
    # The same for examples with pictures; None = max_source_tokens.
    max_caption_tokens: int | None = None
    # max_question_tokens, max_answer_tokens: limits on question and answer.
    max_question_tokens: int = 70
    max_answer_tokens: int = 39
    # Limit on question and answer together (the baseline's max_len_b): surplus tokens are cut from
    # the question's head or the answer's tail. None: no such limit.
    max_pair_tokens: int | None = None
    # All slots of a picture are attended to, with or without a region, as in the baseline; off,
    # only those with a region.
    attend_empty_slots: bool = False
    # Token types of the context and of question and answer (VLP: 4 and 5).
    segments: tuple[int, int] = (4, 5)
    # Positions that region slots take in every sequence of a picture question (the baseline's
    # max_len_img_cxt), also where it shows fewer pictures or none; None: as many as the slots of
    # the largest bucket.
    picture_positions: int | None = None
    # Off (--no_img_content), no row sees the region slots of a picture or of a picture question,
    # nor [CLS] before them (webqa_loader.py l.1192).
    picture_content: bool = True

    def __post_init__(self):
        if not self.buckets:
            raise UserError("packing.buckets is empty: give at least one (pictures, text length).")
        object.__setattr__(self, "buckets", tuple(sorted(Bucket(*b) for b in self.buckets)))
        if self.buckets[0].pictures < 0:
            raise UserError(
                f"packing.buckets: {self.buckets[0].pictures} pictures; give 0 or more of each."
            )
        for limit in ("source", "caption", "question", "answer", "pair"):
            tokens = getattr(self, f"max_{limit}_tokens")
            if tokens is not None and tokens < 0:
                raise UserError(f"packing.max_{limit}_tokens={tokens}: give 0 or more.")
        pair = self.max_question_tokens + self.max_answer_tokens
        needed = 4 + min(pair, self.max_pair_tokens or pair)
        for pictures in {bucket.pictures for bucket in self.buckets}:
            longest = max(b.text for b in self.buckets if b.pictures == pictures)
            if longest < needed:
                raise UserError(
                    f"packing.buckets: {longest} text columns with {pictures} picture(s) leave "
                    f"no room for sources after max_question_tokens and max_answer_tokens; "
                    f"give at least {needed}."
                )
        slots = self.max_pictures * self.slots_per_picture
        if self.picture_positions is not None and self.picture_positions < slots:
            raise UserError(
                f"packing.picture_positions={self.picture_positions}: the largest of "
                f"packing.buckets has {slots} region slots; give at least as many."
            )

    @property
    def max_pictures(self) -> int:
        return self.buckets[-1].pictures

    @property
    def text_start(self) -> int:
        """Offset of the positions of text that follows region slots.

        For any number of pictures those of the largest bucket, as in the baseline.
        """
        slots = self.max_pictures * self.slots_per_picture
        return slots if self.picture_positions is None else self.picture_positions

    @property
    def positions(self) -> int:
        """Position embeddings that the longest sequence needs."""
        return max(b.text + (self.text_start if b.pictures else 0) for b in self.buckets)

    def bucket_index(self, pictures: int, tokens: int, specials: int) -> int:
        """Index of the bucket for `tokens` text tokens and `specials` special ones.

        An example with more pictures than any bucket takes goes to the one with the most (its
        last pictures are dropped), a longer text to the longest of its pictures (it is cut).
        """
        pictures = min(pictures, self.max_pictures)
        slots = min(b.pictures for b in self.buckets if b.pictures >= pictures)
        sizes = [i for i, b in enumerate(self.buckets) if b.pictures == slots]
        return next((i for i in sizes if self.buckets[i].text >= tokens + specials), sizes[-1])

    def bucket_indices(
        self, pictures: Int[np.ndarray, " N"], tokens: Int[np.ndarray, " N"], specials: int
    ) -> Int[np.ndarray, " N"]:
        """`bucket_index` of many examples."""
        return np.array(
            [
                self.bucket_index(int(p), int(t), specials)
                for p, t in zip(pictures, tokens, strict=True)
            ],
            int,
        )


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """Masked-LM training of answers (reference: --mask_prob 0.5 --max_pred 50)."""

    mask_prob: float = 0.5  # share of the answer's tokens that are predicted
    max_pred: int = at_least(1, 50)  # most tokens predicted in one example

    def __post_init__(self):
        if not 0 <= self.mask_prob <= 1:
            raise UserError(
                f"config key masking.mask_prob={self.mask_prob}: a share in 0..1 was expected; "
                "change it."
            )

    def columns(self, answer: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        """Columns that answers of so many tokens take, besides [CLS] and both [SEP]."""
        return answer

    def weights(self, targets: Int[np.ndarray, " n"], keywords: Tokens) -> np.ndarray:
        """Weights of the predicted tokens `targets` of an answer with these keywords."""
        return np.ones(len(targets))

    def pack(
        self, packer: Packer, example: Example, bucket: int, rng: np.random.Generator
    ) -> Packed:
        """Sources, question and answer, with part of the answer masked for training.

        Candidates are the answer's tokens and the final [SEP]. Of these L, n = round(L * p)
        are predicted, at least one (three for picture questions) and at most max_pred; 80 % of
        them become [MASK], 10 % a random token, 10 % stay (Preprocess4webqa).

        Returns:
          The input arrays and masked_ids int32[P], masked_positions int32[P] and
          masked_weights float32[P] (see `weights`), P = max_pred, padded with 0.
        """
        arrays, start, end = packer.lay_out(example, bucket, rng, close=True)
        length = end - start
        least = min(3, length) if _on_pictures(example) else 1
        count = min(self.max_pred, max(least, round(length * self.mask_prob)))
        positions = start + np.sort(rng.choice(length, count, replace=False))  # [count]
        ids = arrays["input_ids"]
        targets = ids[positions]
        weights = self.weights(targets, example.keywords)
        add_targets(arrays, positions, targets, weights, self.max_pred)
        draw = rng.random(count)
        random_ids = rng.integers(packer.tokenizer.vocab_size, size=count)
        drawn = np.where(draw < 0.9, random_ids, targets)
        ids[positions] = np.where(draw < 0.8, packer.tokenizer.mask_id, drawn)
        return arrays


class SourceTokens(NamedTuple):
    """One source: its text as token ids and, for a picture, (features, positions).

    `tags` are token ids for the slots of the regions; without them the slots hold [UNK] (VLP).
    """

    tokens: Tokens
    regions: tuple[np.ndarray, np.ndarray] | None = None  # float32[N, F], float32[N, P]
    tags: Tokens | None = None  # [N]


class Example(NamedTuple):
    """The tokens that make up one sequence."""

    sources: tuple[SourceTokens, ...]
    question: Tokens
    answer: Tokens = ()
    keywords: Tokens = ()  # the answer's keywords
    # Whether it is laid out as a picture question even if there is no picture to show.
    about_pictures: bool = False

    @property
    def pictures(self) -> int:
        return sum(source.regions is not None for source in self.sources)

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sources) + len(self.question) + len(self.answer)


class Packer:
    """Packs tokenized examples into sequences of static length.

    Segments over their budget lose each surplus token at the head or the tail with
    probability 0.5 when an `rng` is given, else at the tail. The array `truncated` counts the
    tokens and regions an example lost.
    """

    def __init__(self, tokenizer: Tokenizer, config: PackingConfig):
        self.tokenizer, self.config = tokenizer, config

    def excess(self, question: str) -> int:
        """How many tokens of a question are beyond `max_question_tokens` and will be cut."""
        tokens = self.tokenizer.encode(clean(question))
        return max(0, len(tokens) - self.config.max_question_tokens)

    def pack_for_selection(
        self, example: Example, bucket: int, rng: np.random.Generator | None = None
    ) -> Packed:
        """Sources and question for the source head.

        The baseline leaves the answer in the sequence but lets no row see it; here it is
        simply absent, so [CLS] is independent of it by construction.
        """
        return self.lay_out(example._replace(answer=()), bucket, rng, close=False)[0]

    def pack_for_decoding(
        self, example: Example, bucket: int, rng: np.random.Generator | None = None
    ) -> Packed:
        """Sources and question for the decoder, and `length`, the columns that are filled.

        Padding has position 0; the first generated token has position
        `position_ids[length - 1] + 1` (decode_webqa.py).
        """
        arrays, _, end = self.lay_out(example._replace(answer=()), bucket, rng, close=False)
        arrays["position_ids"][end:] = 0
        arrays["length"] = np.int32(end)
        return arrays

    def lay_out(
        self,
        example: Example,
        bucket: int,
        rng: np.random.Generator | None,
        *,
        close: bool,
        reserve: int = 0,
    ) -> tuple[Packed, int, int]:
        """Fills one sequence: returns its arrays, the answer's column, and the filled length.

        `close` appends the final [SEP] to the answer; `reserve` columns stay free at the end.
        """
        config = self.config
        shape = config.buckets[bucket]
        slots = shape.pictures * config.slots_per_picture  # R
        columns = slots + shape.text  # L
        on_pictures = _on_pictures(example)
        start = config.text_start if slots or on_pictures else 0  # of the text's positions
        most = min(shape.text, config.positions - start)  # text columns
        question, answer = example.question, example.answer
        if config.max_pair_tokens is not None:
            question, answer = cut_pair(question, answer, config.max_pair_tokens, rng)
        answer = cut(answer, min(config.max_answer_tokens, most - 3), rng)
        room = most - 2 - close - len(answer) - reserve
        question = cut(question, min(config.max_question_tokens, room), rng)
        limit = config.max_source_tokens
        if on_pictures and config.max_caption_tokens is not None:
            limit = config.max_caption_tokens
        texts = self._source_texts(example.sources, min(limit, room - len(question)), rng)
        length = sum(map(len, texts))

        context_end = slots + length + 2  # columns up to and with the first [SEP]
        answer_start = context_end + len(question)
        end = answer_start + len(answer) + close
        first, second = config.segments
        tokenizer = self.tokenizer
        ids = np.full(columns, tokenizer.pad_id, np.int32)
        ids[0] = tokenizer.cls_id
        ids[1 : 1 + slots] = tokenizer.unk_id
        types = np.zeros(columns, np.int32)
        types[:context_end] = first
        types[context_end:end] = second
        column = 1 + slots
        for index, text in enumerate(texts):
            ids[column : column + len(text)] = text
            self._type_source(types[column : column + len(text)], text, question, index)
            column += len(text)
        ids[column] = tokenizer.sep_id
        ids[context_end:answer_start] = question
        ids[answer_start : answer_start + len(answer)] = answer
        if close:
            ids[end - 1] = tokenizer.sep_id
        positions = np.arange(columns, dtype=np.int32)
        if slots or on_pictures:
            positions[1 + slots :] += start - slots
            np.minimum(positions, max(config.positions - 1, slots), out=positions)  # of padding
        context = np.zeros(columns, bool)
        context[0] = config.picture_content or not on_pictures
        context[1 + slots : answer_start] = True
        answer_mask = np.zeros(columns, bool)
        answer_mask[answer_start:end] = True
        features = np.zeros((slots, config.region_dim), np.float32)
        region_positions = np.zeros((slots, config.position_dim), np.float32)
        lost = self._fill_regions(
            example.sources, question, shape, features, region_positions, context, types, ids
        )
        used = length + len(question) + len(answer)
        arrays = {
            "input_ids": ids,
            "token_type_ids": types,
            "position_ids": positions,
            "context_mask": context,
            "answer_mask": answer_mask,
            "region_features": features,
            "region_positions": region_positions,
            "truncated": np.int32(lost + example.tokens - used),
        }
        return arrays, answer_start, end

    def _source_texts(
        self, sources: Sequence[SourceTokens], budget: int, rng: np.random.Generator | None
    ) -> list[Tokens]:
        """The texts of the sources, cut to `budget` tokens together: as one text (VLP)."""
        texts = [source.tokens for source in sources]
        if sum(map(len, texts)) <= budget:
            return texts
        return [cut(np.concatenate([np.asarray(t, np.int32) for t in texts]), budget, rng)]

    def _type_source(
        self, types: Int[np.ndarray, " N"], tokens: Tokens, question: Tokens, index: int
    ) -> None:
        """Sets the token types of the text, or of the region slots, of source `index`.

        Args:
          types: those of the context, changed in place; VLP's sources keep them.
          tokens: what stands in the first columns of `types`; of slots their tags, if any.
        """

    def _fill_regions(
        self,
        sources: Sequence[SourceTokens],
        question: Tokens,
        shape: Bucket,
        features: Float[np.ndarray, "R F"],
        positions: Float[np.ndarray, "R P"],
        context: Bool[np.ndarray, " L"],
        types: Int[np.ndarray, " L"],
        ids: Int[np.ndarray, " L"],
    ) -> int:
        """Fills the region slots and unmasks them; returns how many regions found no slot."""
        config = self.config
        slots, used, lost = config.slots_per_picture, 0, 0
        for index, source in enumerate(sources):
            if source.regions is None:
                continue
            values, boxes = source.regions
            assert values.shape[1:] == features.shape[1:], (values.shape, features.shape)
            assert boxes.shape[1:] == positions.shape[1:], (boxes.shape, positions.shape)
            count = min(len(values), slots) if used < shape.pictures else 0
            lost += len(values) - count
            start = used * slots
            features[start : start + count] = values[:count]
            positions[start : start + count] = boxes[:count]
            attended = slots if config.attend_empty_slots and used < shape.pictures else count
            context[1 + start : 1 + start + attended] = config.picture_content
            tags = () if source.tags is None else source.tags[:count]
            ids[1 + start : 1 + start + len(tags)] = tags
            if count:
                self._type_source(types[1 + start : 1 + start + slots], tags, question, index)
            used += 1
        return lost


def _on_pictures(example: Example) -> bool:
    """Whether the baseline lays an example out with region slots."""
    return example.about_pictures or example.pictures > 0


def add_targets(
    arrays: Packed,
    positions: Int[np.ndarray, " n"],
    targets: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    most: int,
) -> None:
    """Adds the masked_* arrays [most]: the tokens `targets` are to be predicted at `positions`."""
    for name, values, dtype in (
        ("masked_ids", targets, np.int32),
        ("masked_positions", positions, np.int32),
        ("masked_weights", weights, np.float32),
    ):
        arrays[name] = np.zeros(most, dtype)
        arrays[name][: len(targets)] = values


def batch(examples: Sequence[Mapping[str, np.ndarray]]) -> Packed:
    """Stacks packed examples of one bucket: every array gets a leading batch axis."""
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def clean(text: str) -> str:
    """A text as the baseline tokenizes it: no `"`, no blanks at the ends."""
    return text.replace('"', "").strip()


# Raw examples: what an augmentation may change, before tokens and regions are made of it.


@dataclasses.dataclass(frozen=True, slots=True)
class RawSource:
    """A source as an augmentation sees it."""

    text: str  # the snippet, or the picture's caption
    title: str = ""  # title of the page it comes from
    # uint8[S, S, 3], None for a snippet (and where pictures are not decoded).
    pixels: UInt8[np.ndarray, "S S 3"] | None = None
    row: int | None = None  # its row in the corpus, None for a picture that comes with a question


@dataclasses.dataclass(frozen=True, slots=True)
class RawExample:
    """Question, sources and answer of one training example, before tokenization.

    `keywords` are the answer's keywords. `record` is the question as the corpus holds it, for
    what else an augmentation needs to know (id, category, extra).
    """

    question: str
    sources: tuple[RawSource, ...]
    answer: str = ""
    record: Question | None = None
    keywords: str = ""


# Changes names or colors in question, sources, answer and keywords alike; must not keep state.
Augment = Callable[[RawExample, np.random.Generator], RawExample]
