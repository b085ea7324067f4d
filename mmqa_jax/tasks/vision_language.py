"""A Qwen-VL, LLaVA or LLaVA-OneVision learns to answer questions on their pictures (ours).

It is asked as the rows of RMR with `options.chat` and `options.pictures` ask it: the picture and
the prompt of a template are a user's message, and what completes the prompt is the model's. Of
conversations (data/formats/chats.py) it learns the assistant's messages.

A layout for each kind of models says how batches hold pictures. A row of a batch has so many slots
for pictures, each of so many units, by which batches have few shapes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.core.mesh import split_rows
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.typed import at_least, changes_of, mapping, spec_of
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.batches.texts import RowSize, TokenExample, example_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.chats import is_chat, shown_pictures
from mmqa_jax.data.pictures.decode import BrokenPictures, PictureError, verify
from mmqa_jax.data.schema import Question
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llava.config import LlavaConfig, PictureConfig
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.onevision import network as onevision
from mmqa_jax.models.onevision.network import Onevision, OnevisionConfig, TileBatch
from mmqa_jax.models.qwen_vl import network
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.examples.training import chat_example, encode_conversation
from mmqa_jax.prompting.picture_format import PictureFormat, Shown, picture_format
from mmqa_jax.tasks import base_llm, solved_questions
from mmqa_jax.tasks.language_model import LanguageModelObjective, of_targets
from mmqa_jax.tasks.task import ANY_VOCABULARY, Recipe

Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]


class Expanded(NamedTuple):
    """Rows of tokens with one placeholder for each token of their pictures."""

    input_ids: np.ndarray  # int32 [B, L]
    rows: np.ndarray  # int32 [B, L], which of its row's features a token takes, -1: none
    positions: np.ndarray | None = None  # int32 [B, L, 3], of a Qwen-VL


class Layout(abc.ABC):
    """A kind of models that see."""

    def __init__(self, config: Any):
        self.config = config  # of the model

    @abc.abstractmethod
    def shape(self, picture_format: Any, picture: Picture) -> Shape:
        """What a picture's tokens follow from, by its header; raises PictureError."""

    def among(self, shape: Shape) -> Shape:
        """That of a picture which is not alone in its prompt."""
        return shape

    @abc.abstractmethod
    def units(self, shape: Shape) -> int:
        """Units of the smallest slot that holds a picture."""

    @property
    @abc.abstractmethod
    def largest(self) -> int:
        """Units of the largest slot."""

    def room(self, units: int) -> int:
        """Tokens that a slot's picture has at most."""
        return units

    @abc.abstractmethod
    def blank(self) -> Any:
        """What fills a slot without a picture."""

    @abc.abstractmethod
    def lay_out(self, pictures: Sequence[Any], units: int) -> Arrays:
        """Arrays [N, ...] of slots, by the names that VisionLanguageObjective reads."""

    def expand(
        self,
        rows: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[Shape]],
        units: int,
        length: int,
    ) -> Expanded:
        """Rows of tokens, with one placeholder for each picture of a shape, to `length` columns."""
        made = Expanded(*(np.full((len(rows), length), fill, np.int32) for fill in (0, -1)))
        for number, (row, of_row) in enumerate(zip(rows, shapes, strict=True)):
            ids, column = np.asarray(row, np.int32), 0
            firsts = iter(range(0, len(of_row) * self.room(units), self.room(units)))
            pictured = iter(of_row)
            for token in ids:
                count = 1
                if token == self.config.image_token:
                    count, first = self.config.picture_tokens(next(pictured)), next(firsts)
                    taken = np.arange(first, first + count)
                    made.rows[number, column : column + count] = taken
                made.input_ids[number, column : column + count] = token
                column += count
        return made


class QwenLayout(Layout):
    """A Qwen-VL's pictures of any size: a unit is a token, those of windows' padding among them."""

    config: qwen_vl.QwenVLConfig

    def shape(self, picture_format, picture):
        return picture_format.shape(picture)

    def units(self, shape):
        vision = self.config.vision
        return qwen_vl.bucket_of(qwen_vl.grid_of(shape, vision), vision)

    @property
    def largest(self) -> int:
        vision, side = self.config.vision, math.isqrt(self.config.vision.most_units)
        return qwen_vl.bucket_of(qwen_vl.Grid(side, side), vision)

    def blank(self):
        return np.zeros((self.config.vision.unit, self.config.vision.unit, 3), np.uint8)

    def lay_out(self, pictures, units):
        return vars(qwen_vl.lay_out(pictures, self.config.vision, units))

    def expand(self, rows, shapes, units, length):
        # A row has its own features, each picture `units` of them.
        firsts: Iterator[int] = (
            number * units for of_row in shapes for number in range(len(of_row))
        )
        made = qwen_vl.expand_pictures(rows, shapes, self.config, first_rows=firsts, length=length)
        return Expanded(made.input_ids, made.rows, made.positions)


class SquareLayout(Layout):
    """A LLaVA's squares, which have one size; a picture is one unit."""

    config: LlavaConfig

    def shape(self, picture_format, picture):
        side = self.config.vision.image_size
        return side, side, 3

    def units(self, shape):
        return 1

    @property
    def largest(self) -> int:
        return 1

    def room(self, units):
        return self.config.features * units

    def blank(self):
        side = self.config.vision.image_size
        return np.zeros((side, side, 3), np.uint8)

    def lay_out(self, pictures, units):
        return {"pixels": np.stack(pictures)}


class TilesLayout(Layout):
    """A LLaVA-OneVision's pictures, in tiles where one is alone; a tile is a unit."""

    config: onevision.OnevisionConfig

    def shape(self, picture_format, picture):
        return picture_format.shape(Shown(picture, alone=True))

    def among(self, shape):
        return 1, *shape[1:]

    def units(self, shape):
        return onevision.bucket_of(shape[0], self.config.tiles)

    @property
    def largest(self) -> int:
        return onevision.buckets(self.config.tiles)[-1]

    def room(self, units):
        return onevision.most_tokens(units, self.config.tiles) if units else 0

    def blank(self):
        side = self.config.vision.image_size
        return onevision.TiledPicture(np.zeros((1, side, side, 3), np.uint8), (side, side))

    def lay_out(self, pictures, units):
        made = onevision.lay_out(pictures, self.config.tiles, units)
        return {"pixels": made.pixels, "tile_rows": made.rows, "tile_weights": made.weights}


def layout_of(config: Any) -> Layout:
    """The layout of a model's pictures; UserError for models that are not trained here."""
    if isinstance(config, qwen_vl.QwenVLConfig):
        return QwenLayout(config)
    kinds: Mapping[str, type[Layout]] = {"square": SquareLayout, "anyres": TilesLayout}
    causal = config.llama.picture_sight == "causal"
    if config.picture_kind not in kinds or not causal:
        raise UserError(
            f"config key init: a {config.family} shows pictures by {config.picture_kind!r}, which "
            "is not trained here; use a Qwen-VL, a LLaVA-1.5 or a LLaVA-OneVision."
        )
    return kinds[config.picture_kind](config)


def shapes_of_slots(layout: Layout, count: int, units: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of `lay_out` of so many slots."""
    made = layout.lay_out([layout.blank()], units)
    return {
        name: jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype)
        for name, array in made.items()
    }


@dataclasses.dataclass(frozen=True)
class VisionLanguageObjective(LanguageModelObjective):
    """The LanguageModelObjective of a model that sees: one example a row, with its pictures.

    A batch is that of `tasks.vision_language`; one without pictures lacks their arrays.

    `lora`: additions to the language model, whose rest is frozen; None: all of it is trained.
    """

    config: network.QwenVLConfig | LlavaConfig
    tower: bool = False  # the tower with its mergers, or projector, is trained, too

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model."""
        rngs = nnx.Rngs(key)
        kinds: dict[type, type[nnx.Module]] = {
            network.QwenVLConfig: network.QwenVL,
            OnevisionConfig: Onevision,
        }
        model: Any = kinds.get(type(self.config), Llava)(self.config, rngs=rngs)
        if self.lora is not None:
            add_lora(model.llama, self.lora, rngs=rngs)
        return model

    @property
    def trained(self) -> str | None:
        """See LanguageModelObjective."""
        names = "^llama/" if self.lora is None else ADDED
        if not self.tower:
            return names
        return None if self.lora is None else f"{names}|^vision/"

    def log_probs(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """See LanguageModelObjective. What follows a row's example is seen by nothing in it."""
        ids = batch["input_ids"]
        picture = ids == self.config.image_token  # [B, L]
        words = jnp.where(picture, 0, ids)
        embedded, deepstack = model.llama.words_of(words), None
        if "rows" in batch:
            features = self._features(model, batch)  # [B * M, room of a picture, features]
            features = features.reshape(len(ids), -1, features.shape[-1])
            rows = jnp.maximum(batch["rows"], 0)[..., None]  # of a row's own pictures
            of_tokens = split_rows(jnp.take_along_axis(features, rows, axis=1))  # [B, L, features]
            embedded, deepstack = network.spread(embedded, of_tokens, picture)
        hidden = model.llama.encode(
            model.llama.with_side(embedded, words),
            None,
            batch.get("positions"),
            deepstack=deepstack,
            dropout_key=dropout_key,
        )
        return of_targets(model.llama, hidden, batch)

    def _features(self, model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        if "patches" in batch:
            arrays = (batch[field.name] for field in dataclasses.fields(network.PatchBatch))
            return model.encode_images(network.PatchBatch(*arrays))
        if "tile_rows" in batch:
            arrays = (batch[name] for name in ("pixels", "tile_rows", "tile_weights"))
            return model.encode_images(TileBatch(*arrays))
        return model.encode_images(model.vision.normalize(batch["pixels"]))

    def finish(self, model: Any) -> Any:
        """Keeps the trained model without additions."""
        if self.lora is not None:
            model.llama = merge_lora(model.llama)
        return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageSection:
    """The section `model`."""

    # Fields of LlamaConfig that differ from the base's; from scratch, its sizes.
    changes: Mapping[str, Any] = changes_of(LlamaConfig)
    # The same of the tower, QwenVisionConfig; `max_pixels` is what larger pictures of a Qwen-VL are
    # resized to, in training and in the trained model's use.
    vision: Mapping[str, Any] = mapping(spec_of(network.QwenVisionConfig, minimum=0, partial=True))
    # Only these additions to the language model are trained; None: all of it. Of a Qwen-VL.
    lora: LoraConfig | None
    # Whether the tower with its mergers (a LLaVA's projector) is trained, too.
    tower: Literal["frozen", "trained"] = "frozen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownPictures:
    """The section `pictures`."""

    # How many pictures of a split may be broken, whose questions are left out; None: see
    # BrokenPictures.
    max_broken: int | None = None
    most: int = at_least(1, 1)  # pictures of a conversation; those with more are left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturedBatches(BatchesSection):
    """The section `batches`: an example's tokens beside its pictures' are at most `length`,
    `targets` of them learned. A batch has pictures of one bucket of sizes, or none."""

    length: int
    targets: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguage(solved_questions.SolvedQuestions):
    """A Qwen-VL, LLaVA or LLaVA-OneVision on solved questions with pictures, or without.

    It begins at any of them that `mmqa prompt --model` takes, or (a Qwen-VL) at scratch.
    """

    name: ClassVar[str] = "vision_language"
    product: ClassVar[str] = "vision-language model"
    length_key: ClassVar[str] = "batches.length"
    unsolved: ClassVar[str] = "a known answer"

    model: VisionLanguageSection
    batches: PicturedBatches
    pictures: ShownPictures = ShownPictures()

    @functools.cached_property
    def architecture(self) -> str:
        """The kind of `init`; a Qwen-VL from scratch, or where `init` is none of them."""
        kind = "" if self.init == base_llm.SCRATCH else base_llm.kind_of_base(self.init)
        return kind if kind in ("llava", "onevision") else "qwen_vl"

    @property
    def size(self) -> RowSize:
        return RowSize(self.batches.length, self.batches.targets)

    @property
    def row_length(self) -> int:
        """The tokens of a row without its pictures, whose tokens come in multiples of 32."""
        return self.batches.length

    @staticmethod
    def is_solved(question: Question) -> bool:
        return question.answer_index is not None or bool(question.answers) or is_chat(question)

    def remat_keys(self) -> tuple[str, ...]:
        return "model.changes.remat", "model.vision.remat"

    def _check(self, files: bool) -> None:
        super()._check(files)
        self.check_learned()
        if self.architecture != "qwen_vl" and self.model.lora is not None:
            raise UserError("config key model.lora: a LLaVA is trained whole here; set it to None.")

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> VisionLanguageObjective:
        config = base_llm.model_config(self, vocab_size)
        return VisionLanguageObjective(config, self.model.lora, self.model.tower == "trained")

    def batch(self) -> dict[str, Any]:
        config = self.objective(ANY_VOCABULARY).config
        bucket = Bucket(self._slots, layout_of(config).largest)
        return dict(pictured_shapes(self.batches.batch_size, self.size, bucket, config))

    @property
    def _slots(self) -> int:
        """Pictures of the largest batch's rows."""
        return 1 << (self.pictures.most - 1).bit_length()

    def _readable(
        self, pictures: TrainingPictures, questions: Sequence[Question], *, decode: bool = False
    ) -> list[Question]:
        """Returns examples whose pictures can be read and are few enough."""
        few = [q for q in questions if len(shown_pictures(q)) <= self.pictures.most]
        if len(few) < len(questions) and jax.process_index() == 0:
            print(
                f"{len(questions) - len(few)} conversations are left out, which show more than "
                f"{self.pictures.most} pictures (config key pictures.most).",
                file=sys.stderr,
            )
        return pictures.readable(few, decode=decode)

    def _encode_chat(self, tokenizer: Any, config: PictureConfig) -> solved_questions.EncodeChat:
        turns, token = self.examples.turns, config.image_token
        return lambda question: chat_example(tokenizer, question, turns, token)

    def _pictures(
        self, corpus: Corpus, tokenizer: Any, config: PictureConfig
    ) -> tuple[PictureFormat, TrainingPictures]:
        form = picture_format(config, tokenizer)
        return form, TrainingPictures(corpus, form, config, self.pictures.max_broken)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        config = objective.config
        layout = layout_of(config)
        base_llm.check_rows(
            self, config.llama, tokenizer, self._slots * layout.room(layout.largest)
        )
        form, pictures = self._pictures(corpus, tokenizer, config)
        examples = self.make_examples(
            corpus,
            self.data.chosen(questions, corpus),
            encode_conversation(tokenizer, form),
            functools.partial(self._readable, pictures),
            self._encode_chat(tokenizer, config),
        )
        flat = [example for versions in examples.versions for example in versions]
        shapes = pictures.buckets(flat)
        batches = example_batches(
            examples.versions,
            examples.shares,
            self.feed(),
            shapes=shapes,
            bucket_of=lambda picture_example: shapes.index(pictures.bucket(picture_example)),
            make=PicturedRows(self.size, config, pictures).batch,
            broken=[pictures.broken],
            members=self.data.members(examples.questions),
        )
        return Recipe(
            objective,
            batches,
            base_llm.base_loader(self),
            reader=pictures,
            finish=self.finisher(objective),
            metadata=self.metadata(tokenizer),
        )

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        objective = self.objective(tokenizer.vocab_size)
        form, pictures = self._pictures(corpus, tokenizer, objective.config)
        made = PicturedRows(self.size, objective.config, pictures)

        def make_score(examples: Sequence[TokenExample]) -> solved_questions.Score:
            buckets = list(map(pictures.bucket, examples))
            of_buckets = []
            for bucket in pictures.buckets(examples):
                members = np.flatnonzero([other == bucket for other in buckets])

                def pack(
                    rows: solved_questions.Rows,
                    members: np.ndarray = members,
                    bucket: Bucket = bucket,
                ) -> tuple[Packed, np.ndarray]:
                    of_rows = [examples[members[row[0]]] if row else None for row in rows]
                    batch = made.batch(of_rows, bucket)
                    return batch, batch["target_segments"]

                rows = [[number] for number in range(len(members))]
                size = self.inference.batch_size
                of_buckets.append(
                    (
                        members,
                        solved_questions.row_scores(model, rows, size, pack, objective.log_probs),
                    )
                )

            def score(state: Any) -> np.ndarray:
                totals = np.zeros(len(examples))
                for members, of_bucket in of_buckets:
                    totals[members] = of_bucket(state)
                return totals

            return score

        encode = encode_conversation(tokenizer, form)
        readable = functools.partial(self._readable, pictures, decode=True)
        encode_chat = self._encode_chat(tokenizer, objective.config)
        return solved_questions.OptionLikelihood(
            self, corpus, encode, make_score, readable, encode_chat
        )


# The pictures of training: which can be read, and batches of examples with them.


class TrainingPictures:
    """The pictures of a run's questions, as the model takes them.

    Args:
      corpus: that has them.
      pictures: how the model's prompts hold them.
      config: of the model.
      max_broken: how many may be broken; None: see BrokenPictures.
    """

    def __init__(
        self,
        corpus: Corpus,
        pictures: PictureFormat,
        config: PictureConfig,
        max_broken: int | None = None,
    ):
        self._corpus, self._format, self.layout = corpus, pictures, layout_of(config)
        self._max_broken = max_broken
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.broken = self._counter(0)  # pictures that could not be read, with their reasons

    def _counter(self, total: int) -> BrokenPictures:
        return BrokenPictures(
            total,
            self._max_broken,
            "run `mmqa prepare` again or raise pictures.max_broken",
            "cannot be read",
        )

    def readable(self, questions: Sequence[Question], *, decode: bool = False) -> list[Question]:
        """Returns examples without a picture, or whose picture's header can be read.

        Says how many others there are, and which.

        `decode`: the whole picture is read, so that none proves to be broken later.

        Raises:
          RunError: more broken pictures than are allowed.
        """
        names_of = [shown_pictures(question) for question in questions]
        names = dict.fromkeys(itertools.chain.from_iterable(names_of))
        self.broken = self._counter(len(names))
        with Progress("Reading pictures", len(names), "pictures") as progress:
            for name in names:
                self._look_at(name, decode)
                progress.advance(1)
        readable = self._shapes.keys()
        usable = [
            q
            for q, of_question in zip(questions, names_of, strict=True)
            if readable >= set(of_question)
        ]
        if len(usable) < len(questions) and jax.process_index() == 0:
            print(
                f"{len(questions) - len(usable)} questions are left out, whose pictures cannot be "
                f"read ({first_names(self.broken.names)}), the first because "
                f"{next(iter(self.broken.reasons.values()))}",
                file=sys.stderr,
            )
        return usable

    def _look_at(self, name: str, decode: bool) -> None:
        try:
            picture = Picture(self._read(name), name)
            verify(picture.data, name)
            if decode:
                self._format.read(Shown(picture, alone=True))
            self._shapes[name] = self.layout.shape(self._format, picture)
        except PictureError as error:
            self.broken.add(name, str(error))

    def _read(self, name: str) -> bytes:
        data = self._corpus.read_picture(name)
        if data is None:
            raise PictureError(f"{name}: the corpus has no such picture; prepare it again.")
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

    def shapes(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """What the tokens of readable pictures follow from, which one prompt shows."""
        shapes = [self._shapes[name] for name in names]
        return shapes if len(shapes) == 1 else list(map(self.layout.among, shapes))

    def look_ahead(self, names: Sequence[Sequence[str]]) -> None:
        """Called with the pictures of examples before their pixels are asked for."""
        self._corpus.look_ahead(list(itertools.chain.from_iterable(names)))

    def pixels(self, name: str, alone: bool = True) -> Any:
        """Pixels of a readable picture; None, counted, where it is broken behind its header."""
        try:
            return self._format.read(Shown(Picture(self._read(name), name), alone=alone))
        except PictureError as error:
            self.broken.add(name, str(error))
            return None

    def bucket(self, example: TokenExample) -> Bucket:
        """The smallest shape that holds an example: `pictures`, as many as its own or the next
        power of two, and `text`, the units of each."""
        units = max(map(self.layout.units, self.shapes(example.pictures)), default=0)
        count = len(example.pictures)
        return Bucket(1 << (count - 1).bit_length() if count else 0, units)

    def buckets(self, examples: Sequence[TokenExample]) -> list[Bucket]:
        """The shapes of the examples' pictures, ascending."""
        return sorted(set(map(self.bucket, examples)))


class PicturedRows(NamedTuple):
    """Makes batches of one example a row, of `size` tokens beside its pictures'."""

    size: RowSize
    config: PictureConfig
    pictures: TrainingPictures

    def batch(self, examples: Sequence[TokenExample | None], bucket: Bucket) -> Packed:
        """Rows of M = bucket.pictures pictures of U units each, with room for R tokens of each, and
        L = size.length + M * R tokens.

        `examples`: of pictures that fit the bucket; None: an empty row. One whose picture proves to
        be broken becomes one.

        Returns:
          The arrays of `pictured_shapes`.
        """
        units, layout = bucket.text, layout_of(self.config)
        self.pictures.look_ahead([row.pictures for row in examples if row is not None])
        pictures_of_rows = [
            [] if example is None else self._read(example.pictures) for example in examples
        ]
        rows = [
            None if any(pixels is None for pixels in of_row) else example
            for example, of_row in zip(examples, pictures_of_rows, strict=True)
        ]
        pixels = [
            [] if row is None else of_row
            for row, of_row in zip(rows, pictures_of_rows, strict=True)
        ]
        shapes = [[picture.shape for picture in of_row] for of_row in pixels]
        expanded = layout.expand(
            [[] if row is None else row.tokens for row in rows],
            shapes,
            units,
            self.size.length + bucket.pictures * layout.room(units),
        )
        targets = {
            name: np.zeros((len(rows), self.size.targets), np.int32)
            for name in ("target_positions", "target_ids", "target_segments")
        }
        for number, row in enumerate(rows):
            if row is not None:
                counts = np.ones(len(row.tokens), np.int64)
                is_picture = row.tokens == self.config.image_token
                counts[is_picture] = [
                    self.config.picture_tokens(picture) for picture in shapes[number]
                ]
                learned = row.targets
                targets["target_positions"][number, :learned] = counts.cumsum()[row.places] - 2
                targets["target_ids"][number, :learned] = row.tokens[row.places]
                targets["target_segments"][number, :learned] = 1
        made = {"input_ids": expanded.input_ids, **targets}
        if expanded.positions is not None:
            made["positions"] = expanded.positions
        if units:
            blank = layout.blank()
            slots = [of_row[n] if n < len(of_row) else blank
                     for of_row in pixels for n in range(bucket.pictures)]  # fmt: skip
            made |= {"rows": expanded.rows, **layout.lay_out(slots, units)}
        return made

    def _read(self, names: Sequence[str]) -> list[Any]:
        if len(names) == 1:
            return [self.pictures.pixels(names[0])]
        return [self.pictures.pixels(name, alone=False) for name in names]


def pictured_shapes(
    rows: int, size: RowSize, bucket: Bucket, config: PictureConfig
) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of pictures, M = bucket.pictures in a row.

    Returns:
      input_ids int32[B, L], each picture's token repeated once for each of its own; of a Qwen-VL
      positions int32[B, L, 3]; rows int32[B, L], which of its row's features a token takes, -1:
      none; the targets as of `data.batches.texts.packed_batch`; the arrays of
      `Layout.lay_out` of B * M pictures, those of a row one behind the other.
    """
    layout = layout_of(config)
    length = size.length + bucket.pictures * layout.room(bucket.text)

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), np.int32)

    positions = {"positions": of(length, 3)} if isinstance(layout, QwenLayout) else {}
    return {
        "input_ids": of(length),
        **positions,
        "rows": of(length),
        **{f"target_{name}": of(size.targets) for name in ("positions", "ids", "segments")},
        **shapes_of_slots(layout, rows * bucket.pictures, bucket.text),
    }
