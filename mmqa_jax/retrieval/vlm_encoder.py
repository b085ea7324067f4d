"""Qwen3-VL-Embedding as an embedder: texts, pictures, and both together, in one space.

Everything is a conversation of the checkpoint's chat template: the instruction is the system's
message, and the user's holds a picture, a text, or a picture and then its text. The state of the
last token is the vector (QwenLM/Qwen3-VL-Embedding src/models/qwen3_vl_embedding.py).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.chat_template import MARKS, PictureChat
from mmqa_jax.data.pictures.resize import Canvas, PictureSizes
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.common.array_layout import restacked
from mmqa_jax.models.encoders.heads import QwenVLEncoder
from mmqa_jax.models.encoders.sentence_pooling import Prompts, has_recipe, read_recipe
from mmqa_jax.models.encoders.vlm_keys import load_vlm_encoder, read_vlm_config
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.retrieval.embedder import Embedder, one_picture_each
from mmqa_jax.retrieval.embeddings import BROKEN, check_finite
from mmqa_jax.retrieval.picture_batches import (
    HELD,
    PicturePrompt,
    PromptBatch,
    SeeingConfig,
    beyond_placeholders,
    prompt_batches,
)
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets

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
    buckets of `retrieval.picture_batches`.
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
    if (recipe.truncate_dim or 0) > config.llama.hidden:
        raise UserError(
            f"{folder}: truncate_dim keeps {recipe.truncate_dim} values of vectors of "
            f"{config.llama.hidden}; correct it in config_sentence_transformers.json."
        )
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


def prompt_lengths(folder: str | os.PathLike, config: SeeingConfig, longest: int) -> tuple:
    """Lengths to which prompts are padded; UserError where the largest picture does not fit."""
    text = config.text if isinstance(config, ModernVBertConfig) else config.llama
    buckets = length_buckets(longest, text.positions)
    if isinstance(config, QwenVLConfig):
        most = config.vision.most_units
    else:
        most = config.most_squares * config.features
    if buckets[-1] < most + AROUND:
        raise UserError(
            f"{folder}: reads prompts of {buckets[-1]} tokens, and a picture may have {most}; use "
            "a checkpoint that reads longer ones."
        )
    return buckets
