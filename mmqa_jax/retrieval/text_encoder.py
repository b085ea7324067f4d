"""Published encoders as embedders: of texts (BGE, E5, GTE, Qwen3-Embedding, ...), CLIP, SigLIP.

What sentence-transformers' files say is done (sentence_pooling.py): pooling, prompts before
questions and sources, the length at which texts are cut, a Matryoshka size.

CLIP, SigLIP and SigLIP 2 are opened converted or as transformers has them. Pictures are embedded
from their pixels alone and snippets from their text alone, truncated to the model's tokens (CLIP's
77); questions are embedded as written. SigLIP's texts are padded to the length that it was trained
on; cosines rank as its logits do. UniIR's CLIP_SF embeds a text and a picture, of a question or a
source, as the sum of both.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import split_over, state_shardings
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh, tower_bytes
from mmqa_jax.data.documents.chunks import TokenLimit
from mmqa_jax.data.pictures.resize import NaFlex, Resize
from mmqa_jax.data.published_tokenizers import (
    load_clip_tokenizer,
    load_encoder_tokenizer,
    load_siglip_tokenizer,
)
from mmqa_jax.data.tokenizers import Tokenizer, minilm_tokenizer
from mmqa_jax.models.bert.keys import fill_bert
from mmqa_jax.models.bert.network import Bert, minilm_l6
from mmqa_jax.models.encoders import sentence_pooling, text_encoders
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig, of_towers
from mmqa_jax.models.encoders.heads import SentenceEncoder
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.families import FAMILIES as DECODERS
from mmqa_jax.models.two_towers.config import (
    CLIPConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
)
from mmqa_jax.models.two_towers.keys import UNIIR, squashes
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.models.two_towers.processor import read_preparation
from mmqa_jax.retrieval import embedder
from mmqa_jax.retrieval.embedder import Embedder, dual_encoder_cost, one_picture_each
from mmqa_jax.retrieval.embeddings import BROKEN, check_finite
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.keymap import abstract_model
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_converted

_TOWER_BUCKETS = (16, 32, 48, 77)  # CLIP's
_RESIZE: Mapping[str, Resize] = {"bicubic": "squash", "bilinear": "squash_bilinear"}


class ScoreFusionEmbedder(Embedder):
    """An Embedder of a dual encoder with the fusion `sum`, for questions as well as sources."""

    def embed_questions(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """See Embedder; text and picture are added as the towers give them, a "" not at all."""
        pictures = one_picture_each(texts, pictures)
        vectors = np.zeros((len(texts), self.dim), np.float32)
        pictured = np.array([picture is not None for picture in pictures], bool)
        batches = self._source_batches(texts, pictured, lambda rows: [pictures[n] for n in rows])
        self._collect(batches, vectors, "texts")
        check_finite(vectors, "embedder: the questions", BROKEN)
        return vectors


def load_two_towers(
    folder: str | os.PathLike,
    kind: Literal["clip", "siglip"],
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> Embedder:
    """The embedder of a CLIP or SigLIP, converted by `mmqa convert` or as transformers has it.

    Pictures must be prepared as the model's are: `PictureStore(..., embedder.resize,
    alpha=embedder.alpha)`. CLIP's texts and pictures are prepared as by the code that the
    checkpoint was published with, or by the one that `mmqa convert --preprocessing` named; SigLIP's
    pictures as its image processor does. Those of a NaFlex keep their shapes and fill one number of
    patches, so that nothing compiles twice.

    Args:
      kind: of the model.
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    folder = Path(folder)
    record = read_record(folder) if is_converted(folder) else None
    if record is not None and record.architecture.name != kind:
        raise UserError(
            f"{folder}: holds a model of kind {record.architecture.name!r}, {kind} was expected; "
            f"convert one with `mmqa convert --model={kind}`."
        )
    tokenizer = load_clip_tokenizer(folder) if kind == "clip" else None
    devices = loading_mesh(mesh)
    model: TwoTowers = (
        load_published(kind, folder, mesh=devices)
        if record is None
        else load_converted(folder, mesh=devices)
    )
    if tokenizer is None:
        tokenizer = load_siglip_tokenizer(folder, model.config.text.vocab_size)
    else:
        _check_ids(tokenizer, model.config.text.vocab_size, folder)
    sums = record is not None and record.record.get("layout") == UNIIR
    dual_config = of_towers(model.config, fusion="sum" if sums else "image")
    graphdef, state = as_dual_encoder(model, dual_config, devices)
    return towers_embedder(
        graphdef, state, model.config, tokenizer, folder, sums=sums, batch_size=batch_size
    )


def towers_embedder(
    graphdef: nnx.GraphDef,
    state: Any,
    config: CLIPConfig | SiglipConfig,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    sums: bool = False,
    batch_size: BatchSize,
) -> Embedder:
    """The embedder of a CLIP or SigLIP as a dual encoder.

    Args:
      folder: whose files say how pictures are prepared.
      sums: see ScoreFusionEmbedder.
    """
    resize, options = towers_resize(config, tokenizer, folder), {}
    dual_config = of_towers(config, fusion="sum" if sums else "image")
    if isinstance(config.text, SiglipTextConfig):
        options = {"alpha": "white", "recipe": f"{config} {resize}"}
        buckets: tuple[int, ...] = (config.text.length,)
    else:
        buckets = tuple(sorted({min(size, config.text.length) for size in _TOWER_BUCKETS}))
    return (ScoreFusionEmbedder if sums else Embedder)(
        graphdef,
        state,
        tokenizer,
        image_size=config.vision.image_size,
        buckets=buckets,
        batch_size=batch_size,
        cost=_cost(dual_config, resize),
        text_of=lambda source: source.text,
        resize=resize,
        **({"recipe": dual_config.fusion} if sums else options),
    )


def towers_resize(
    config: CLIPConfig | SiglipConfig, tokenizer: Tokenizer, folder: Path
) -> Resize | NaFlex:
    """How pictures are made ready for a CLIP or SigLIP."""
    if isinstance(config.vision, SiglipVisionConfig):
        return _siglip_resize(folder, config.vision)
    if tokenizer.preprocessing == "openai":
        return "squash" if squashes(folder) else "crop_openai"
    return "crop"


def _check_ids(tokenizer: Tokenizer, vocab_size: int, folder: Path) -> None:
    ids = {tokenizer.cls_id, tokenizer.sep_id}
    if len(ids) < 2 or max(*ids, tokenizer.vocab_size - 1) >= vocab_size:
        raise UserError(
            f"{folder}: the tokenizer's ids do not fit the model's {vocab_size} tokens; put the "
            "checkpoint's own tokenizer there."
        )


def _siglip_resize(folder: Path, config: SiglipVisionConfig) -> Resize | NaFlex:
    """How pictures are made ready for the tower of a folder."""
    preparation = read_preparation(folder, config)
    if config.flexible:
        return NaFlex(config.patch_size, preparation.most_patches, preparation.resample)
    return _RESIZE[preparation.resample]


def _cost(config: DualEncoderConfig, resize: Resize | NaFlex) -> RowCost:
    cost = dual_encoder_cost(config, config.text.length)
    if isinstance(resize, NaFlex):
        seen = tower_bytes(config.vision, resize.most) + resize.most * resize.patch**2 * 3 * 5.0
        cost = dataclasses.replace(cost, bytes=max(cost.bytes, seen))
    return cost


def as_dual_encoder(
    towers: nnx.Module, config: DualEncoderConfig, mesh: Mesh | None
) -> tuple[nnx.GraphDef, Any]:
    """`nnx.split` of the dual encoder with these towers, on the mesh that they are on."""
    model = nnx.eval_shape(lambda: DualEncoder(config, rngs=nnx.Rngs()))
    nnx.update(model, nnx.state(towers))
    model.picture_gate.set_value(jnp.ones(()))  # of the fusion `mean` alone
    graphdef, state = nnx.split(model)
    if mesh is not None:  # the gate, too
        state = jax.device_put(state, state_shardings(state, mesh))
    return graphdef, state


_BUCKETS = (
    *range(16, 128, 16),
    *(size for power in range(7, 15) for size in range(2**power, 2 ** (power + 1), 2**power // 4)),
)


def load_text_embedder(
    folder: Path, *, batch_size: BatchSize = AUTO, mesh: Mapping[str, int] | None = None
) -> embedder.Embedder:
    """The embedder of a published encoder's folder; it takes texts alone.

    Args:
      folder: of transformers, with sentence-transformers' files if it has them; without them a
        text's vector is the mean of its tokens. A decoder needs them: one that was trained to
        write has no vectors of texts.
      batch_size: texts per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    decoder = text_encoders.model_type_of(folder) in DECODERS
    if decoder and not sentence_pooling.has_recipe(folder):
        raise UserError(
            f"{folder}: holds a language model without modules.json, which says how it makes one "
            "vector of a text; give an embedding model, such as Qwen3-Embedding."
        )
    for_questions, for_sources = text_encoders.retrieval_tasks(folder)
    recipe = sentence_pooling.read_recipe(
        folder, own_kinds=("custom_st.Transformer",) if for_sources else ()
    )
    devices = loading_mesh(mesh)
    encoder = text_encoders.load_text_encoder(folder, devices, task=for_sources)
    config = encoder.config
    width = sentence_pooling.check_widths(recipe.dense, getattr(encoder, "width", config.hidden))
    check_truncated(folder, recipe.truncate_dim, width)
    tokenizer = load_encoder_tokenizer(
        folder,
        config.vocab_size,
        lowercase=recipe.lowercase,
        pairs=not isinstance(config, LlamaConfig),
    )
    text_encoders.check_padding(folder, tokenizer.pad_id)
    dense = [text_encoders.load_dense(layer) for layer in recipe.dense]

    def embedder_of(encoder: Any, **options: Any) -> embedder.Embedder:
        whole = SentenceEncoder(encoder, recipe.pooling, recipe.truncate_dim, dense)
        return text_embedder(whole, recipe, tokenizer, devices, batch_size=batch_size, **options)

    if for_questions is None:
        return embedder_of(encoder)
    asking = text_encoders.load_text_encoder(folder, devices, task=for_questions)
    return embedder_of(encoder, questions=embedder_of(asking))


def text_embedder(
    model: SentenceEncoder,
    recipe: sentence_pooling.SentenceRecipe,
    tokenizer: Tokenizer,
    devices: Mesh | None,
    **options: Any,
) -> embedder.Embedder:
    """The embedder of an encoder of texts; `options`: of Embedder, such as `batch_size`."""
    config = model.bert.config
    buckets = length_buckets(recipe.max_tokens or tokenizer.max_tokens, config.positions)
    graphdef, state = split_over(model, devices)
    return embedder.Embedder(
        graphdef,
        state,
        tokenizer,
        image_size=0,
        buckets=buckets,
        cost=encoder_cost(config, buckets[-1], "texts"),
        prompts=recipe.prompts,
        recipe=" ".join(
            map(
                str,
                [type(model.bert).__name__, config, recipe.pooling, recipe.truncate_dim]
                + [layer.activation for layer in recipe.dense],
            )
        ),
        **options,
    )


def encoder_cost(config: embedder.TextEncoderConfig, longest: int, unit: str) -> RowCost:
    """What a text costs a published encoder; a call has fewer long ones (`rows_of_length`)."""
    cost = embedder.text_cost(config, min(longest, embedder.FULL_LENGTH))
    return dataclasses.replace(cost, unit=unit)


def length_buckets(longest: int | None, positions: int) -> tuple[int, ...]:
    """Lengths in tokens to which texts are padded, up to the longest that a model takes."""
    most = min(longest or positions, positions)
    return tuple(sorted({*(size for size in _BUCKETS if size < most), most}))


def check_truncated(folder: Path, kept: int | None, width: int) -> None:
    """UserError for a Matryoshka size beyond the `width` of vectors."""
    if (kept or 0) > width:
        raise UserError(
            f"{folder}: truncate_dim keeps {kept} values of vectors of {width}; correct it in "
            "config_sentence_transformers.json."
        )


# MiniLM as a text embedder without any training: all-MiniLM-L6-v2 as its authors publish it.


_TOKENS = 256  # the authors' max_seq_length


@functools.cache
def load_minilm_embedder(batch_size: BatchSize = AUTO, dtype: str = "float32") -> embedder.Embedder:
    """The embedder of the installed package, which computes in `dtype`; it takes texts alone.

    `fill_bert` checks that its sentences are means of their tokens (1_Pooling).
    """
    config = minilm_l6(dtype=dtype)
    bert = nnx.merge(*abstract_model(lambda: Bert(config, rngs=nnx.Rngs())))
    fill_bert(bert, minilm_path())
    graphdef, state = split_over(SentenceEncoder(bert), loading_mesh())
    return embedder.Embedder(
        graphdef,
        state,
        minilm_tokenizer(),
        image_size=0,
        buckets=length_buckets(_TOKENS, bert.config.positions),
        batch_size=batch_size,
        cost=embedder.text_cost(bert.config, _TOKENS),
        recipe="" if dtype == "float32" else dtype,
    )


@functools.cache
def minilm_token_limit() -> TokenLimit | None:
    """`Embedder.token_limit` of MiniLM without its weights; None where it is not installed."""
    try:
        return embedder.token_limit(minilm_tokenizer(), _TOKENS - 2)  # [CLS] and [SEP]
    except UserError:
        return None
