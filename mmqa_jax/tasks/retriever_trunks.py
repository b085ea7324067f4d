"""The kinds of encoders that the task `retriever` trains: of texts, of prompts that show pictures,
and two towers. Each makes rows of questions and sources, and opens what was trained."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import RowCost
from mmqa_jax.data.chat_template import PictureChat
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.resize import NaFlex
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import (
    load_clip_tokenizer,
    load_encoder_tokenizer,
    load_siglip_tokenizer,
)
from mmqa_jax.data.schema import Source
from mmqa_jax.data.tokenizers import Tokenizer, TokenTable, special_tokens, text_inputs
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
from mmqa_jax.retrieval.text_encoder import encoder_cost, text_embedder
from mmqa_jax.retrieval.two_towers import towers_embedder, towers_resize
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

Arrays = Mapping[str, np.ndarray]
_UNCUT = 1 << 30


class Trunk(abc.ABC):
    """An encoder in the task: its rows, and the trained model in use.

    Attributes:
      tokenizer_kind: see Tokenizer.
      sees: whether sources are seen, too.
    """

    tokenizer_kind: ClassVar[str] = "published"
    sees: ClassVar[bool] = True

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
    """Rows of prompts.

    Attributes:
      write: writes prompts; `uncut`: whole ones.
      pictures: by row of the texts; None: they show none.
    """

    record: PageRecord
    tokenizer: Tokenizer
    write: _Write
    uncut: _Write
    texts: Sequence[str]
    pictures: PictureStore | None

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
