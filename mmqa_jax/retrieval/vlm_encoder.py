"""Qwen3-VL-Embedding as an embedder: texts, pictures, and both together, in one space; and
prompts with pictures in batches of a few shapes.

Everything is a conversation of the checkpoint's chat template: the instruction is the system's
message, and the user's holds a picture, a text, or a picture and then its text. The state of the
last token is the vector (QwenLM/Qwen3-VL-Embedding src/models/qwen3_vl_embedding.py).
"""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import AUTO, BatchSize, Serving, loading_mesh
from mmqa_jax.data.chat_template import MARKS, PictureChat
from mmqa_jax.data.pictures.resize import Canvas, PictureSizes, UnitBudget
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.common.array_layout import restacked
from mmqa_jax.models.encoders.heads import QwenVLEncoder
from mmqa_jax.models.encoders.pictured_gemma import load_pictured
from mmqa_jax.models.encoders.sentence_pooling import Prompts, has_recipe, read_recipe
from mmqa_jax.models.encoders.text_encoders import load_vlm_encoder, read_vlm_config
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import expand_images
from mmqa_jax.models.llava.tiles import UnitSizes
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.retrieval.embedder import Embedder, one_picture_each, rows_of_length
from mmqa_jax.retrieval.embeddings import BROKEN, check_finite
from mmqa_jax.retrieval.text_encoder import check_truncated, encoder_cost, length_buckets

INSTRUCTION = "Represent the user's input."  # where a folder's prompts name no other
LONGEST = 8192  # tokens of a prompt, the original's MAX_LENGTH
_ANSWER_BEGINS = {"chat_template": {"add_generation_prompt": True}}  # as is done in any case
AROUND = 128  # tokens around a picture, with room


@functools.lru_cache(maxsize=8)  # encoders of one config share their programs
def make_encode_prompts(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted encoder of prompts: (state, PromptBatch) -> vectors [B, D]."""

    def encode(state: Any, batch: PromptBatch) -> jax.Array:
        arrays = (array for array in batch if array is not None)
        return nnx.merge(graphdef, restacked(state)).encode_prompts(*arrays)

    return jax.jit(encode)


class VLMEmbedder(Embedder):
    """An Embedder whose texts and pictures are read by one model.

    A picture with a text is embedded from both. Pictures keep their shapes, and are padded to the
    buckets of the batches below.
    """

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        chat: PictureChat | None,
        config: SeeingConfig,
        **options: Any,
    ):
        """As an Embedder's; `chat` or a subclass makes the prompts, `config` is the model's."""
        super().__init__(
            graphdef,
            state,
            **picture_options(config),
            **options,
        )
        self._chat, self._config = chat, config
        self._encode_prompts = make_encode_prompts(graphdef)

    def embed_questions(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """See Embedder; a question with a picture is one prompt of both."""
        pictures = one_picture_each(texts, pictures)
        return self._embed(texts, pictures, self.prompts.question, "texts")

    def embed_texts(self, texts: Sequence[str], prompt: str = "") -> Float32[np.ndarray, "n D"]:
        """See Embedder; `prompt` is the instruction, "" the original's."""
        check_several(texts, "Embedder.embed_texts")
        return self._embed(texts, [None] * len(texts), prompt, "texts")

    def embed_pictures(self, pictures: Sequence[np.ndarray]) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of pictures without a text, uint8[H, W, 3] each, sides of whole units."""
        return self._embed([""] * len(pictures), pictures, self.prompts.source, "pictures")

    def _embed(
        self,
        texts: Sequence[str],
        pictures: Sequence[np.ndarray | None],
        instruction: str,
        unit: str,
    ) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        self._collect(self._encoded(texts, pictures, instruction), vectors, unit)
        check_finite(vectors, f"embedder: the {unit}", BROKEN)
        return vectors

    def _source_batches(self, texts, pictured, read) -> Iterator[tuple[np.ndarray, jax.Array]]:
        prompt = self.prompts.source
        snippets, captions = np.flatnonzero(~pictured), np.flatnonzero(pictured)
        none = [None] * len(snippets)
        for indices, vectors in self._encoded([texts[i] for i in snippets], none, prompt):
            yield snippets[indices], vectors
        for start in range(0, len(captions), HELD):
            places = captions[start : start + HELD]
            for indices, vectors in self._encoded([texts[i] for i in places], read(places), prompt):
                yield places[indices], vectors

    def _encoded(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None], instruction: str
    ) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """Encoded batches of texts with their pictures, and their places among the texts."""
        prompts = self._prompts(texts, pictures, instruction)
        batches = prompt_batches(
            prompts, self._config, self.serving, self.buckets, self.tokenizer.pad_id
        )
        for indices, batch in batches:
            put = self.serving.placement.put(batch)
            yield indices, self._call(self._encode_prompts, put)

    def _prompts(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None], instruction: str
    ) -> list[PicturePrompt]:
        return chat_prompts(
            self._chat, self._config, texts, pictures, instruction, longest=self.buckets[-1]
        )


def chat_prompts(
    chat: PictureChat,
    config: SeeingConfig,
    texts: Sequence[str],
    pictures: Sequence[np.ndarray | None],
    instruction: str,
    *,
    longest: int,
) -> list[PicturePrompt]:
    """Prompts of at most `longest` tokens, one for each text and its picture."""
    made: list[PicturePrompt] = [PicturePrompt(())] * len(texts)
    # Of one frame each: what has a picture, and what has a text. A text may be empty alone.
    kinds = [
        (picture is not None, bool(text) or picture is None)
        for text, picture in zip(texts, pictures, strict=True)
    ]
    for kind in set(kinds):
        has_picture, has_text = kind
        members = [number for number, other in enumerate(kinds) if other == kind]
        of_prompts = [[pictures[n]] if has_picture else [] for n in members]
        tokens = chat.encode(
            instruction or INSTRUCTION,
            [None] * has_picture + [MARKS[0]] * has_text,
            [[texts[n]] for n in members],
            [longest - beyond_placeholders(p, config) for p in of_prompts],
        )
        for number, ids, in_prompt in zip(members, tokens, of_prompts, strict=True):
            made[number] = PicturePrompt(ids, tuple(in_prompt))
    return made


def picture_options(config: SeeingConfig) -> dict[str, Any]:
    """What an Embedder needs to know of pictures that a model sees."""
    if isinstance(config, QwenVLConfig):
        side = math.isqrt(config.vision.max_pixels)
        return {"image_size": side, "resize": picture_sizes(config.vision), "alpha": "white"}
    if (sizes := units_of(config)) is not None:
        shape = UnitBudget(config.budget, sizes.patch, sizes.merge)
        side = math.isqrt(config.budget) * sizes.unit
        return {"image_size": side, "resize": shape, "alpha": "dropped"}
    side = config.vision.image_size
    if config.split is None:
        return {"image_size": side, "resize": config.resize, "alpha": "dropped"}
    longest = math.ceil(config.split.longest / side) * side
    canvas = Canvas(config.split, side)
    return {"image_size": longest, "resize": canvas, "alpha": "dropped"}


def picture_sizes(config: QwenVisionConfig) -> PictureSizes:
    """What pictures are resized to for a tower."""
    return PictureSizes(config.unit, config.min_pixels, config.max_pixels)


def load_vlm_embedder(
    folder: Path, *, batch_size: BatchSize = AUTO, mesh: Mapping[str, int] | None = None
) -> VLMEmbedder:
    """The embedder of a Qwen3-VL-Embedding's folder.

    Sentence-transformers' files, where there are any, give instructions for questions (`query`) and
    sources (`document`), the length, and a Matryoshka size.

    Args:
      folder: of transformers, with a chat template.
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    if not has_recipe(folder) and "embedding" not in str(folder.resolve()).lower():
        raise UserError(
            f"{folder}: holds a Qwen3-VL without modules.json, and its path does not say "
            "Embedding: one that was trained to write has no vectors of texts; give a "
            "Qwen3-VL-Embedding."
        )
    recipe = read_recipe(folder, processing=(_ANSWER_BEGINS,))
    if has_recipe(folder) and (recipe.pooling != "lasttoken" or recipe.dense or recipe.lowercase):
        raise UserError(
            f"{folder}: its files say pooling {recipe.pooling!r}, {len(recipe.dense)} linear "
            f"layers and lower case {recipe.lowercase}; the last token's state alone was expected, "
            "as of Qwen3-VL-Embedding."
        )
    config = read_vlm_config(folder)
    check_truncated(folder, recipe.truncate_dim, config.llama.hidden)
    devices = loading_mesh(mesh)
    encoder = load_vlm_encoder(folder, recipe.truncate_dim, devices)
    tokenizer = load_encoder_tokenizer(folder, config.llama.vocab_size, pairs=False)
    chat = PictureChat(folder, tokenizer, config.image_token)
    buckets = prompt_lengths(folder, config, recipe.max_tokens or LONGEST)
    options = {"buckets": buckets, "batch_size": batch_size}
    return vlm_embedder(encoder, config, chat, tokenizer, recipe.prompts, devices, **options)


def vlm_embedder(
    model: QwenVLEncoder,
    config: QwenVLConfig,
    chat: PictureChat,
    tokenizer: Tokenizer,
    prompts: Prompts,
    devices: Mesh | None,
    *,
    buckets: Sequence[int],
    **options: Any,
) -> VLMEmbedder:
    """The embedder of a Qwen3-VL-Embedding; `options`: of Embedder, such as `batch_size`."""
    graphdef, state = split_over(model, devices)
    return VLMEmbedder(
        graphdef,
        state,
        chat,
        config,
        tokenizer=tokenizer,
        buckets=buckets,
        cost=encoder_cost(config.llama, buckets[-1], "sources"),
        prompts=prompts,
        recipe=f"{config} {model.truncate_dim} {INSTRUCTION} {chat.source}",
        **options,
    )


class GemmaEmbedder(VLMEmbedder):
    """EmbeddingGemma 2's: a text with the prompt before it, then a picture; a picture alone has no
    prompt, since those of its files are of texts."""

    def _prompts(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None], instruction: str
    ) -> list[PicturePrompt]:
        config, tokenizer = self._config, self.tokenizer
        prompted = [
            instruction + text if text or picture is None else ""
            for text, picture in zip(texts, pictures, strict=True)
        ]
        made = []
        for ids, picture in zip(tokenizer.encode_batch(prompted), pictures, strict=True):
            pixels = [] if picture is None else [picture]
            of_picture = [config.before_token, config.image_token, config.after_token]
            end = [*(of_picture if pixels else ()), *tokenizer.after]
            around = len(tokenizer.before) + len(end) + beyond_placeholders(pixels, config)
            tokens = [*tokenizer.before, *ids[: self.buckets[-1] - around], *end]
            made.append(PicturePrompt(tokens or [tokenizer.pad_id], tuple(pixels)))
        return made


def load_gemma_embedder(
    folder: Path, *, batch_size: BatchSize = AUTO, mesh: Mapping[str, int] | None = None
) -> GemmaEmbedder:
    """The embedder of an EmbeddingGemma 2's folder with its tower for pictures.

    Args:
      folder: of transformers, with sentence-transformers' files, which give prompts, the length and
        a Matryoshka size.
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    recipe = read_recipe(folder)
    if recipe.pooling != "mean" or recipe.dense or recipe.lowercase:
        raise UserError(
            f"{folder}: its files say pooling {recipe.pooling!r}, {len(recipe.dense)} linear "
            f"layers and lower case {recipe.lowercase}; the mean of all tokens alone was expected, "
            "as of EmbeddingGemma 2."
        )
    devices = loading_mesh(mesh)
    model = load_pictured(folder, recipe.truncate_dim, devices)
    config = model.config
    check_truncated(folder, recipe.truncate_dim, config.llama.projected)
    tokenizer = load_encoder_tokenizer(folder, config.llama.vocab_size, pairs=False)
    buckets = prompt_lengths(folder, config, recipe.max_tokens or LONGEST)
    graphdef, state = split_over(model, devices)
    return GemmaEmbedder(
        graphdef,
        state,
        None,
        config,
        tokenizer=tokenizer,
        buckets=buckets,
        cost=encoder_cost(config.llama, buckets[-1], "sources"),
        prompts=recipe.prompts,
        recipe=f"{config} {recipe.truncate_dim}",
        batch_size=batch_size,
    )


def prompt_lengths(folder: str | os.PathLike, config: SeeingConfig, longest: int) -> tuple:
    """Lengths to which prompts are padded; UserError where the largest picture does not fit."""
    text = config.text if isinstance(config, ModernVBertConfig) else config.llama
    buckets = length_buckets(longest, text.positions)
    if isinstance(config, QwenVLConfig):
        most = config.vision.most_units
    elif units_of(config) is not None:
        most = config.budget
    else:
        most = config.most_squares * config.features
    if buckets[-1] < most + AROUND:
        raise UserError(
            f"{folder}: reads prompts of {buckets[-1]} tokens, and a picture may have {most}; use "
            "a checkpoint that reads longer ones."
        )
    return buckets


# Prompts with pictures in batches of a few shapes, for a model that only reads them.


SeeingConfig = qwen_vl.QwenVLConfig | LlavaConfig | ModernVBertConfig

HELD = 64  # decoded pictures at a time; of a page some 5 MB


class PicturePrompt(NamedTuple):
    """Tokens with one placeholder for each picture, uint8 [H, W, 3]: of sides of whole units, or a
    square of the tower's size."""

    tokens: Sequence[int]
    pictures: tuple[np.ndarray, ...] = ()


class PromptBatch(NamedTuple):
    """This process's rows of a padded batch, as `models.encoders.heads` takes them."""

    input_ids: np.ndarray  # int32 [B, L]
    mask: np.ndarray  # bool [B, L]
    pictures: qwen_vl.PatchBatch | np.ndarray | None = None  # [B, K, ...]; squares are uint8
    rows: np.ndarray | None = None  # int32 [B, L]
    positions: np.ndarray | None = None  # int32 [B, L, 3]


def prompt_batches(
    prompts: Sequence[PicturePrompt],
    config: SeeingConfig,
    serving: Serving,
    lengths: Sequence[int],
    pad_token: int,
) -> Iterator[tuple[np.ndarray, PromptBatch]]:
    """Batches of prompts of like size, with the places of their rows in `prompts`.

    Args:
      config: of the model.
      lengths: to which prompts are padded, ascending; none is longer than the last.
      pad_token: any id but the placeholder's.
    """
    groups: dict[tuple[int, int, int], list[int]] = collections.defaultdict(list)
    sizes = units_of(config)
    for number, prompt in enumerate(prompts):
        bucket = 0
        if sizes is not None:
            grids = (qwen_vl.grid_of(pixels.shape, sizes) for pixels in prompt.pictures)
            bucket = max((qwen_vl.bucket_of(grid, sizes) for grid in grids), default=0)
        tokens = len(prompt.tokens) + beyond_placeholders(prompt.pictures, config)
        length = lengths[int(np.searchsorted(lengths, tokens))]
        groups[len(prompt.pictures), bucket, length].append(number)
    for (count, bucket, length), members in sorted(groups.items()):
        if sizes is not None:
            most = rows_of_length(serving, attended(config, bucket, length))
        else:  # squares see themselves alone
            of_squares = int(count**0.5 * config.vision.patches)
            most = rows_of_length(serving, max(length, of_squares))
        for start in range(0, len(members), most):
            chunk = members[start : start + most]
            size = min(serving.size_for(len(chunk)), most)
            padded = [chunk[min(row, len(chunk) - 1)] for row in serving.placement.rows(size)]
            rows_of_batch = [prompts[number] for number in padded]
            yield np.array(chunk), batch_of(rows_of_batch, config, count, bucket, length, pad_token)


def beyond_placeholders(pictures: Sequence[np.ndarray], config: SeeingConfig) -> int:
    """Tokens of pictures in a prompt beyond their placeholders."""
    return sum(config.picture_tokens(pixels.shape) - 1 for pixels in pictures)


def units_of(config: SeeingConfig) -> qwen_vl.QwenVisionConfig | UnitSizes | None:
    """The sizes of patches and units of pictures of any size; None: pictures are squares."""
    if isinstance(config, qwen_vl.QwenVLConfig):
        return config.vision
    return config.units if isinstance(config, LlavaConfig) and config.is_sized else None


def attended(config: SeeingConfig, bucket: int, length: int) -> int:
    """Tokens or patches that see each other in such a batch; the tower attends to patches."""
    return max(length, bucket * units_of(config).merge ** 2)


def batch_of(
    prompts: Sequence[PicturePrompt],
    config: SeeingConfig,
    count: int,
    bucket: int,
    length: int,
    pad_token: int,
) -> PromptBatch:
    """One batch of prompts with at most `count` pictures each, behind which are black ones.

    Args:
      bucket: units of pictures of any size.
      length, pad_token: as of `prompt_batches`.
    """
    sizes = units_of(config)
    side = config.vision.image_size if sizes is None else sizes.unit
    black = np.zeros((side, side, 3), np.uint8)
    pictures = [
        prompt.pictures[slot] if slot < len(prompt.pictures) else black
        for prompt in prompts
        for slot in range(count)
    ]
    tokens = [prompt.tokens for prompt in prompts]
    if sizes is None:
        counts = [len(prompt.pictures) for prompt in prompts]
        squares = np.stack(pictures).reshape(-1, count, *black.shape) if count else None
        expanded = expand_images(tokens, counts, config, length=length, pad_token=pad_token)
        return PromptBatch(*expanded, squares)
    made = qwen_vl.expand_pictures(
        tokens,
        [[pixels.shape for pixels in prompt.pictures] for prompt in prompts],
        config,
        sizes,
        first_rows=(slot * bucket for prompt in prompts for slot in range(len(prompt.pictures))),
        length=length,
        pad_token=pad_token,
    )
    if not count:
        return PromptBatch(made.input_ids, made.mask)
    laid = qwen_vl.lay_out(pictures, sizes, bucket)
    laid = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), laid)
    positions = made.positions if config.llama.mrope else None
    return PromptBatch(made.input_ids, made.mask, laid, made.rows, positions)


class Slots(NamedTuple):
    """Room for pictures in each prompt of a batch: how many, of how many units of a Qwen-VL."""

    count: int
    bucket: int


def slots_of(config: SeeingConfig) -> Slots:
    """Room for one picture of any size."""
    if not isinstance(config, qwen_vl.QwenVLConfig):
        return Slots(config.most_squares, 0)
    vision, side = config.vision, math.isqrt(config.vision.most_units)
    return Slots(1, qwen_vl.bucket_of(qwen_vl.Grid(side, side), vision))


def prompt_arrays(
    prompts: Sequence[PicturePrompt],
    config: SeeingConfig,
    slots: Slots,
    length: int,
    pad_token: int,
) -> dict[str, np.ndarray]:
    """The arrays of one batch by name, as the records of `models.encoders.trained_pictured` read
    them: ids, mask, and of pictures squares, or the fields of a PatchBatch, features (the rows of
    tokens) and positions."""
    batch = batch_of(prompts, config, *slots, length, pad_token)
    arrays = {"ids": batch.input_ids, "mask": batch.mask}
    if batch.rows is not None:
        arrays |= {**vars(batch.pictures), "features": batch.rows, "positions": batch.positions}
    elif batch.pictures is not None:
        arrays["squares"] = batch.pictures
    return arrays
