"""Published encoders of texts as embedders: BGE, E5, GTE, ModernBERT, Qwen3-Embedding and others.

What sentence-transformers' files say is done (sentence_pooling.py): pooling, prompts before
questions and sources, the length at which texts are cut, a Matryoshka size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh
from mmqa_jax.data.documents.chunks import TokenLimit
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer, minilm_tokenizer
from mmqa_jax.models.bert.keys import fill_bert
from mmqa_jax.models.bert.network import Bert, minilm_l6
from mmqa_jax.models.encoders.heads import SentenceEncoder
from mmqa_jax.models.encoders.sentence_pooling import (
    SentenceRecipe,
    check_widths,
    has_recipe,
    read_recipe,
)
from mmqa_jax.models.encoders.text_encoders import (
    check_padding,
    load_dense,
    load_text_encoder,
    model_type_of,
    retrieval_tasks,
)
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.families import FAMILIES as DECODERS
from mmqa_jax.retrieval import embedder
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.keymap import abstract_model

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
    decoder = model_type_of(folder) in DECODERS
    if decoder and not has_recipe(folder):
        raise UserError(
            f"{folder}: holds a language model without modules.json, which says how it makes one "
            "vector of a text; give an embedding model, such as Qwen3-Embedding."
        )
    for_questions, for_sources = retrieval_tasks(folder)
    recipe = read_recipe(folder, own_kinds=("custom_st.Transformer",) if for_sources else ())
    devices = loading_mesh(mesh)
    encoder = load_text_encoder(folder, devices, task=for_sources)
    config = encoder.config
    width = check_widths(recipe.dense, getattr(encoder, "width", config.hidden))
    check_truncated(folder, recipe.truncate_dim, width)
    tokenizer = load_encoder_tokenizer(
        folder,
        config.vocab_size,
        lowercase=recipe.lowercase,
        pairs=not isinstance(config, LlamaConfig),
    )
    check_padding(folder, tokenizer.pad_id)
    dense = [load_dense(layer) for layer in recipe.dense]

    def embedder_of(encoder: Any, **options: Any) -> embedder.Embedder:
        whole = SentenceEncoder(encoder, recipe.pooling, recipe.truncate_dim, dense)
        return text_embedder(whole, recipe, tokenizer, devices, batch_size=batch_size, **options)

    if for_questions is None:
        return embedder_of(encoder)
    asking = load_text_encoder(folder, devices, task=for_questions)
    return embedder_of(encoder, questions=embedder_of(asking))


def text_embedder(
    model: SentenceEncoder,
    recipe: SentenceRecipe,
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
