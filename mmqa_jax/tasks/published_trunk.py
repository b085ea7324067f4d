"""What the tasks `retriever` and `reranker` share: a published model, trained further.

The kinds of encoders that `retriever` trains are those of texts, of prompts that show pictures, and
two towers. Each makes rows of questions and sources, and opens what was trained.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import RowCost
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches import retriever as rows
from mmqa_jax.data.batches.retriever import FILE as JUDGED
from mmqa_jax.data.batches.retriever import ExampleScores, read_example_scores
from mmqa_jax.data.chat_template import PictureChat
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.resize import NaFlex
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import (
    load_clip_tokenizer,
    load_encoder_tokenizer,
    load_siglip_tokenizer,
)
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import Tokenizer, TokenTable, special_tokens, text_inputs
from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.models.encoders.trained import EncoderRecord, is_decoder
from mmqa_jax.models.encoders.trained_pictured import PageRecord, TowersRecord
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.retrieval.embedder import Embedder, dual_encoder_cost
from mmqa_jax.retrieval.late_interaction import (
    Side,
    late_interaction_embedder,
    rows_of,
    side_of,
)
from mmqa_jax.retrieval.page_embedder import PageWriter, page_embedder
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.retrieval.text_encoder import (
    encoder_cost,
    text_embedder,
    towers_embedder,
    towers_resize,
)
from mmqa_jax.retrieval.vlm_encoder import (
    AROUND,
    LONGEST,
    PicturePrompt,
    Slots,
    chat_prompts,
    picture_options,
    prompt_arrays,
    prompt_lengths,
    slots_of,
    vlm_embedder,
)
from mmqa_jax.tasks import task as tasks
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.record import RECORD, RUN_FILES, is_converted, read_metadata

Arrays = Mapping[str, np.ndarray]
_UNCUT = 1 << 30


class Trunk(abc.ABC):
    """An encoder in the task: its rows, and the trained model in use."""

    tokenizer_kind: ClassVar[str] = "published"  # see Tokenizer
    sees: ClassVar[bool] = True  # whether sources are seen, too

    def __init__(self, record: Any):
        self.record = record

    @property
    @abc.abstractmethod
    def positions(self) -> int:
        """The most tokens of a text or prompt."""

    @property
    def takes_lora(self) -> bool:
        """Whether it has a decoder, which takes LoRA's additions."""
        return False

    def check(self, query_length: int, source_length: int) -> None:
        """Refuses lengths of rows that do not fit."""
        lengths = {"query_length": query_length, "source_lengths": source_length}
        for key, length in lengths.items():
            if not 3 <= length <= self.positions:
                raise UserError(
                    f"config key batches.{key}: {length} tokens, but the encoder reads 3 to "
                    f"{self.positions}; change it."
                )

    @abc.abstractmethod
    def open_tokenizer(self, folder: Path) -> Tokenizer:
        """The tokenizer in the folder of a run."""

    @abc.abstractmethod
    def side(
        self,
        tokenizer: Tokenizer,
        name: str,
        texts: Sequence[str],
        length: int,
        pictures: PictureStore | None = None,
    ) -> Any:
        """Rows of questions or sources (data.batches.retriever.EncodedSide) of at most `length`
        tokens; `name` is "query" or "document"."""

    @abc.abstractmethod
    def shapes(self, name: str, rows: int, length: int) -> dict[str, tasks.Struct]:
        """Shapes of the arrays of `side`."""

    @abc.abstractmethod
    def embedder(
        self, tokenizer: Tokenizer, model: Any, devices: Mesh | None, batch_size: Any
    ) -> Embedder:
        """The embedder of a model, which may be abstract (see Embedder.use)."""

    @abc.abstractmethod
    def cost(self, length: int) -> RowCost:
        """The cost of a source."""

    def open_pictures(self, corpus: Corpus, tokenizer: Tokenizer) -> PictureStore:
        """The corpus's pictures as the model takes them."""
        raise NotImplementedError

    def text_of(self, titled: Callable[[Source], str]) -> Callable[[Source], str]:
        """The text of a source; `titled`: as the section `data` has it."""
        return titled


class TextTrunk(Trunk):
    """An encoder of texts; pictures are read by their captions."""

    sees = False
    record: EncoderRecord

    @property
    def positions(self) -> int:
        return self.record.config.positions

    @property
    def takes_lora(self) -> bool:
        return is_decoder(self.record.config)

    def open_tokenizer(self, folder: Path) -> Tokenizer:
        record = self.record
        return load_encoder_tokenizer(
            folder,
            record.config.vocab_size,
            lowercase=record.recipe.lowercase,
            pairs=not is_decoder(record.config),
        )

    def side(self, tokenizer, name, texts, length, pictures=None):
        recipe, positions = self.record.recipe, self.positions
        if self.record.vectors == "token":
            return _TextRows(tokenizer, side_of(recipe, tokenizer, positions, name), texts)
        prompt = recipe.prompts.question if name == "query" else recipe.prompts.source
        longest = min(recipe.max_tokens or tokenizer.max_tokens or positions, positions)
        side = Side((), prompt, longest, None, False, np.zeros(0, np.int64))
        return _TextRows(tokenizer, side, texts)

    def shapes(self, name, rows, length):
        mask = tasks.bools(rows, length)
        return {"ids": tasks.ints(rows, length), "mask": mask, "scored": mask}

    def embedder(self, tokenizer, model, devices, batch_size):
        make: Any = late_interaction_embedder if self.record.vectors == "token" else text_embedder
        return make(model, self.record.recipe, tokenizer, devices, batch_size=batch_size)

    def cost(self, length):
        return encoder_cost(self.record.config, length, "texts")

    def open_pictures(self, corpus, tokenizer):
        return PictureStore(corpus, size=1)


class _TextRows:
    """Rows of tokens of texts."""

    def __init__(self, tokenizer: Tokenizer, side: Side, texts: Sequence[str]):
        self._tokenizer, self._side = tokenizer, side
        self._table = TokenTable(tokenizer, [side.prompt + text for text in texts])
        least = side.filled[1] if side.filled else 0
        around = special_tokens(tokenizer) + len(side.marker)
        self.lengths = np.maximum(self._table.lengths + around, least)

    def rows(self, texts: Sequence[int], length: int) -> Arrays:
        tokens = [[*self._side.marker, *self._table[text]] for text in texts]
        ids, mask, scored = rows_of(tokens, length, self._tokenizer, self._side)
        return {"ids": ids.astype(np.int32), "mask": mask, "scored": scored}


class PromptTrunk(Trunk):
    """A reader of prompts: sources are pictures, alone or (Qwen3-VL-Embedding) with their texts."""

    record: PageRecord

    @property
    def positions(self) -> int:
        return self.record.text.positions

    @property
    def takes_lora(self) -> bool:
        return not isinstance(self.record.config, ModernVBertConfig)

    def check(self, query_length: int, source_length: int) -> None:
        super().check(query_length, source_length)
        config, slots = self.record.config, slots_of(self.record.config)
        most = slots.bucket or slots.count * config.features
        if source_length < most + AROUND:
            raise UserError(
                f"config key batches.source_lengths: {source_length} tokens, but a picture may "
                f"have {most}, and {AROUND} are for the prompt around it; use "
                f"{most + AROUND} or more, or (a Qwen-VL) a smaller pictures.max_pixels."
            )

    def open_tokenizer(self, folder: Path) -> Tokenizer:
        return load_encoder_tokenizer(folder, self.record.text.vocab_size, pairs=False)

    def side(self, tokenizer, name, texts, length, pictures=None):
        write, uncut = (self._writer(tokenizer, name, most) for most in (length, _UNCUT))
        return _PromptRows(self.record, tokenizer, write, uncut, texts, pictures)

    def _writer(self, tokenizer: Tokenizer, name: str, longest: int) -> _Write:
        record, is_question = self.record, name == "query"
        if not record.is_chat:
            writer = PageWriter(record.entry, record.config, tokenizer, longest)
            if is_question:
                return lambda texts, pictures: writer.questions(texts)
            return writer.sources
        chat = PictureChat(record.folder, tokenizer, record.config.image_token)
        prompts = record.prompts
        instruction = prompts.question if is_question else prompts.source

        def write(texts: Sequence[str], pictures: Any) -> list[PicturePrompt]:
            by_text = pictures or [None] * len(texts)
            return chat_prompts(chat, record.config, texts, by_text, instruction, longest=longest)

        return write

    def shapes(self, name, rows, length):
        mask = tasks.bools(rows, length)
        arrays = {"ids": tasks.ints(rows, length), "mask": mask, "scored": mask}
        if name == "query":
            return arrays
        config = self.record.config
        made = prompt_arrays([PicturePrompt(())], config, slots_of(config), length, 0)
        for key, array in made.items():
            arrays[key] = tasks.Struct((rows, *array.shape[1:]), array.dtype)
        return arrays

    def embedder(self, tokenizer, model, devices, batch_size):
        record = self.record
        buckets = prompt_lengths(record.folder, record.config, min(LONGEST, self.positions))
        options = {"buckets": buckets, "batch_size": batch_size}
        if record.is_chat:
            chat = PictureChat(record.folder, tokenizer, record.config.image_token)
            args = model, record.config, chat, tokenizer, record.prompts, devices
            return vlm_embedder(*args, **options)
        return page_embedder(model, record.entry, tokenizer, devices, **options)

    def cost(self, length):
        return encoder_cost(self.record.text, length, "sources")

    def open_pictures(self, corpus, tokenizer):
        options = picture_options(self.record.config)
        return PictureStore(
            corpus, options["image_size"], options["resize"], alpha=options["alpha"]
        )


_Write = Callable[[Sequence[str], Sequence[np.ndarray | None] | None], list[PicturePrompt]]


@dataclasses.dataclass
class _PromptRows:
    """Rows of prompts."""

    record: PageRecord
    tokenizer: Tokenizer
    write: _Write  # writes prompts; `uncut`: whole ones
    uncut: _Write
    texts: Sequence[str]
    pictures: PictureStore | None  # by row of the texts; None: they show none

    def __post_init__(self):
        whole = self.uncut(self.texts, None)
        lengths = np.array([len(prompt.tokens) for prompt in whole], np.int64)
        if self.pictures is not None and not self.record.is_chat:  # captions are not read
            lengths[self.pictures.corpus.image_mask()] = 0
        self.lengths = lengths

    def rows(self, texts: Sequence[int], length: int) -> Arrays:
        pictures = None
        if self.pictures is not None:
            self.pictures.look_ahead(texts)
            pictures = [self.pictures.pixels(row) for row in texts]
        prompts = self.write([self.texts[row] for row in texts], pictures)
        config = self.record.config
        slots = Slots(0, 0) if pictures is None else slots_of(config)
        arrays = prompt_arrays(prompts, config, slots, length, self.tokenizer.pad_id)
        return arrays | {"scored": arrays["mask"]}


class TowersTrunk(Trunk):
    """A CLIP or SigLIP: a source is a picture, or a text."""

    record: TowersRecord

    @property
    def tokenizer_kind(self) -> str:
        return "CLIP" if self.record.is_clip else "SigLIP"

    @property
    def positions(self) -> int:
        return self.record.towers.text.length

    def check(self, query_length: int, source_length: int) -> None:
        super().check(query_length, source_length)
        length = self.positions
        if not self.record.is_clip and {query_length, source_length} != {length}:
            raise UserError(
                f"config keys batches.query_length={query_length}, source_lengths="
                f"({source_length},): this text tower reads texts padded to {length}; set both to "
                "that."
            )

    def open_tokenizer(self, folder: Path) -> Tokenizer:
        if self.record.is_clip:
            return load_clip_tokenizer(folder)
        return load_siglip_tokenizer(folder, self.record.towers.text.vocab_size)

    def side(self, tokenizer, name, texts, length, pictures=None):
        return _TowerRows(tokenizer, texts, pictures)

    def shapes(self, name, rows, length):
        mask = tasks.bools(rows, length)
        arrays = {"ids": tasks.ints(rows, length), "mask": mask, "scored": mask}
        if name == "document":
            side = self.record.towers.vision.image_size
            arrays["pixels"] = tasks.Struct((rows, side, side, 3), jnp.uint8)
            arrays["has_picture"] = tasks.bools(rows)
        return arrays

    def embedder(self, tokenizer, model, devices, batch_size):
        graphdef, state = split_over(model, devices)
        record = self.record
        args = graphdef, state, record.towers, tokenizer, record.folder
        return towers_embedder(*args, batch_size=batch_size)

    def cost(self, length):
        return dual_encoder_cost(self.record.config, length)

    def open_pictures(self, corpus, tokenizer):
        towers = self.record.towers
        resize = towers_resize(towers, tokenizer, self.record.folder)
        assert not isinstance(resize, NaFlex), "a tower of pictures of any shape is not trained"
        alpha = "dropped" if self.record.is_clip else "white"
        return PictureStore(corpus, towers.vision.image_size, resize, alpha=alpha)

    def text_of(self, titled: Callable[[Source], str]) -> Callable[[Source], str]:
        """A source's own text, as the published embedder reads it."""
        return lambda source: source.text


class _TowerRows:
    """Rows of tokens of texts, beside the pixels of pictures."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], pictures: PictureStore | None):
        self._tokenizer, self._pictures = tokenizer, pictures
        self._table = TokenTable(tokenizer, texts)
        self.lengths = self._table.lengths + special_tokens(tokenizer)
        if pictures is not None:  # captions are not read
            self.lengths[pictures.corpus.image_mask()] = 0

    def rows(self, texts: Sequence[int], length: int) -> Arrays:
        tokens = [self._table[text] for text in texts]
        ids, mask, _ = text_inputs(tokens, length, self._tokenizer)
        arrays = {"ids": ids, "mask": mask, "scored": mask}
        if self._pictures is None:
            return arrays
        self._pictures.look_ahead(texts)
        pixels = [self._pictures.pixels(row) for row in texts]
        blank = np.zeros((self._pictures.size, self._pictures.size, 3), np.uint8)
        arrays["pixels"] = np.stack([blank if picture is None else picture for picture in pixels])
        return arrays | {"has_picture": np.array([picture is not None for picture in pixels])}


def trunk_of(record: Any) -> Trunk:
    """The trunk of a record."""
    kinds: Mapping[type, type[Trunk]] = {
        EncoderRecord: TextTrunk,
        PageRecord: PromptTrunk,
        TowersRecord: TowersTrunk,
    }
    return kinds[type(record)](record)


def record_from_json(value: Mapping[str, Any], folder: Path) -> Any:
    """The record of the model.json of a run in a folder."""
    kinds = {kind.kind: kind for kind in (PageRecord, TowersRecord)}
    if "kind" in value:
        return kinds[value["kind"]].from_json(value, folder)
    return EncoderRecord.from_json(value)


_COMPUTE = ("dtype", "remat", "attention", "unroll")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtData(tasks.MixedData):
    """The section `data`."""

    # File of questions with their sources, see data.batches.retriever.read_examples; "": the
    # corpus's questions of `split`.
    examples: str = ""
    # File of `mmqa rerank` or `mmqa search` that ranks them, whose scores are learned; or folder of
    # `mmqa judge`: then the sources are the solved questions that it judged.
    teacher: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenPictures:
    """The section `pictures`, of encoders that see them."""

    # What larger pictures of a Qwen-VL are resized to, in training and in the trained model's use;
    # 0: as `init` says.
    max_pixels: int = at_least(0, 0)


AS_PUBLISHED = SeenPictures(max_pixels=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedTrunk(tasks.Task):
    """A task on a published model.

    Attributes:
      init: folder of a published model, ORG/NAME in the Hugging Face cache, or `minilm`.
      tokenizer: "": that of `init`.
    """

    data: TaughtData
    folder: str = ""  # of the run; "": its workdir

    @functools.cached_property
    def start(self) -> Path:
        """The folder that the model is made of."""
        path = minilm_path() if self.init == "minilm" else self.init
        folder = (
            None if is_converted(path) else text_encoders.published_folder(path, "config key init")
        )
        if folder is None:
            raise UserError(
                f"config key init={self.init}: a published encoder or reranker was "
                "expected, its folder, ORG/NAME in the Hugging Face cache, or minilm; name one."
            )
        return folder

    @property
    @abc.abstractmethod
    def record(self) -> Any:
        """The model: as the run's model.json describes it, or of `init` before that is written."""

    def described(self, key: str) -> Any:
        """What the run's model.json says under a key; None before the file is written."""
        there = self.folder and (Path(self.folder) / RECORD).is_file()
        return read_metadata(self.folder).get(key) if there else None

    def in_folder(self, folder: Any) -> Self:
        return self if self.folder else dataclasses.replace(self, folder=str(folder))

    @property
    def is_taught(self) -> bool:
        """Whether a teacher's scores are learned, where the loss asks for any."""
        return bool(self.data.teacher or self.data.examples)

    def check_changes(self) -> None:
        """Refuses changes of what the weights decide."""
        unknown = [name for name in self.model.changes if name not in _COMPUTE]
        if unknown:
            raise UserError(
                f"config key model.changes.{unknown[0]}: the weights of init={self.init} decide "
                f"it; change only {', '.join(_COMPUTE)}."
            )

    # --- Texts -------------------------------------------------------------------------------

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> Tokenizer:
        """The model's tokenizer, whose files are copied to the run's folder."""
        if self.tokenizer:
            raise UserError(
                f"config key tokenizer={self.tokenizer}: the model reads the tokens of "
                f"init={self.init}; set it to ''."
            )
        if jax.process_index() == 0 and not any((folder / name).exists() for name in RUN_FILES):
            folder.mkdir(parents=True, exist_ok=True)
            _copy_small(self.start, folder)
        distributed.barrier("tokenizer")
        tokenizer = self.open_tokenizer(folder)
        if text_encoders.published_kind(self.start) in text_encoders.FAMILIES:
            text_encoders.check_padding(self.start, tokenizer.pad_id)
        return tokenizer

    def tokenizer_kind(self) -> tuple[str, str]:
        return "published", "the model's own"

    @functools.cached_property
    def judged(self) -> list[ExampleScores] | None:
        """What a language model's scores are, where `data.teacher` is of `mmqa judge`."""
        file = Path(self.data.teacher)
        if not self.data.teacher or not (file.name == JUDGED or (file / JUDGED).is_file()):
            return None
        return read_example_scores(file)

    def recipe(self, corpus: Corpus, tokenizer: Any) -> tasks.Recipe:
        return super().recipe(self._with_examples(corpus), tokenizer)

    def _with_examples(self, corpus: Corpus) -> Corpus:
        """The corpus, whose sources are the solved questions that a teacher judged, if one did."""
        if self.judged is None:
            return corpus
        questions = {question.id: question for question in corpus.questions()}
        names = dict.fromkeys(name for row in self.judged for name in row.candidates)
        for name in (*names, *(row.question_id for row in self.judged)):
            if name not in questions:
                raise UserError(
                    f"config key data.teacher={self.data.teacher}: names the question {name!r}, "
                    f"which {self.place} does not hold; judge the examples of this data."
                )
        sources = [Source(name, "text", _solved(questions[name])) for name in names]
        return Corpus(sources, list(questions.values()), fingerprint=corpus.fingerprint)

    def training_questions(self, corpus: Corpus) -> list[Question]:
        if self.data.examples:
            return rows.read_examples(self.data.examples, corpus)
        questions = super().training_questions(corpus)
        if not self.data.teacher:
            return questions
        if self.judged is not None:
            scored = {row.question_id: dict(zip(row.candidates, row.scores, strict=True))
                      for row in self.judged}  # fmt: skip
            return [
                _taught(question, max(scores, key=scores.__getitem__), scores)
                for question in questions
                if (scores := scored.get(question.id))
            ]
        names = [question.id for question in questions]
        rankings = read_rankings(self.data.teacher, names, corpus.row)
        return [
            dataclasses.replace(
                question,
                negatives=tuple(x for x in ranking.sources if x not in question.positives),
                extra={rows.SCORES: dict(zip(ranking.sources, ranking.scores, strict=True))},
            )
            for question, ranking in zip(questions, rankings, strict=True)
        ]

    def examples(
        self, questions: Sequence[Question], corpus: Corpus, *, scored: bool
    ) -> dict[int, rows.RetrievalExample]:
        """The questions that can be learned from; `scored`: by a teacher's scores."""
        examples = rows.retrieval_examples(questions, corpus, scored=scored)
        if not examples:
            wanted = "a gold source and another one with scores" if scored else "a gold source"
            raise UserError(
                f"config key data: no question of {self.place} has {wanted}; check data.split, "
                "data.examples and data.teacher."
            )
        return examples

    # --- What was trained --------------------------------------------------------------------

    def trained_model(self, folder: Path, mesh: Mesh | None = None) -> Any:
        """The trained model of the run in a folder."""
        return self.load(folder, _build, self.in_folder(folder).record, mesh)

    def export(self, folder: Path, out: Path) -> None:
        """Writes the trained model of the run in a folder as it is published."""
        _copy_small(folder, out)
        self.in_folder(folder).record.write(out, self.trained_model(folder))


def _solved(question: Question) -> str:
    """What a solved question says: itself and its answer."""
    answer = question.answers[0] if question.answers else ""
    if question.answer_index is not None:
        answer = question.choices[question.answer_index]
    return f"{question.question} {answer}".strip()


def _taught(question: Question, best: str, scores: Mapping[str, float]) -> Question:
    """A question with a teacher's scores, by which its best source is the gold one."""
    negatives = tuple(name for name in scores if name != best)
    return dataclasses.replace(
        question, positives=(best,), negatives=negatives, extra={rows.SCORES: dict(scores)}
    )


def _build(record: Any, *, rngs: nnx.Rngs) -> Any:
    return record.build(rngs=rngs)


def _copy_small(source: Path, folder: Path) -> None:
    """Copies the files of a tokenizer, of prompts and of how pictures are prepared."""
    for name in RUN_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
