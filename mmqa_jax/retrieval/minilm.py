"""MiniLM as a text embedder without any training: all-MiniLM-L6-v2 as its authors publish it."""

from __future__ import annotations

import functools

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import state_shardings
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.documents.chunks import TokenLimit
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.models.bert.keys import fill_bert
from mmqa_jax.models.bert.network import Bert, minilm_l6
from mmqa_jax.models.encoders.sentence_encoder import SentenceEncoder
from mmqa_jax.retrieval.embedder import Embedder, text_cost, token_limit
from mmqa_jax.retrieval.text_encoder import length_buckets
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.keymap import abstract_model

_TOKENS = 256  # the authors' max_seq_length


@functools.cache
def load_minilm_embedder(batch_size: BatchSize = AUTO) -> Embedder:
    """The embedder of the installed package; it takes texts alone.

    `fill_bert` checks that its sentences are means of their tokens (1_Pooling).
    """
    bert = nnx.merge(*abstract_model(lambda: Bert(minilm_l6(), rngs=nnx.Rngs())))
    fill_bert(bert, minilm_path())
    graphdef, state = nnx.split(SentenceEncoder(bert))
    mesh = loading_mesh()
    if mesh is not None:
        state = jax.device_put(state, state_shardings(state, mesh))
    return Embedder(
        graphdef,
        state,
        minilm_tokenizer(),
        image_size=0,
        buckets=length_buckets(_TOKENS, bert.config.positions),
        batch_size=batch_size,
        cost=text_cost(bert.config, _TOKENS),
    )


@functools.cache
def minilm_token_limit() -> TokenLimit | None:
    """`Embedder.token_limit` of MiniLM without its weights; None where it is not installed."""
    try:
        return token_limit(minilm_tokenizer(), _TOKENS - 2)  # [CLS] and [SEP]
    except UserError:
        return None
