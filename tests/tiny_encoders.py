"""Tiny random checkpoints of text encoders, as transformers and sentence-transformers save them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

WORDS = "the a capital of kenya is nairobi which flag has green cedar where how often filter clean"
LETTERS = "abcdefghijklmnopqrstuvwxyz.,?:"
# Nothing at its default: a port that ignores a size, eps or the activation must fail.
SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 52,
    "layer_norm_eps": 1e-3,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 560,
    "initializer_range": 0.2,
}
MODERN_SIZES = {
    **{"hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 3},
    **{"intermediate_size": 28, "norm_eps": 1e-3, "hidden_activation": "gelu_new"},
    **{"max_position_embeddings": 560, "initializer_range": 0.2, "local_attention": 34},
    **{"global_attn_every_n_layers": 2, "global_rope_theta": 900.0, "local_rope_theta": 70.0},
    **{"classifier_activation": "relu", "pad_token_id": 0},
}
QUESTIONS = ["which flag has a green cedar?", "how often is the filter cleaned", "kenya"]


def _wordpiece(*special: str) -> dict[str, int]:
    pieces = [*special, *WORDS.split(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def _sentencepiece() -> list[tuple[str, float]]:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [f"▁{word}" for word in WORDS.split()]
    rest = [(piece, -3.0 - 0.1 * n) for n, piece in enumerate([*words, "▁", *LETTERS])]
    return [*((token, 0.0) for token in special), *rest, ("<mask>", 0.0)]


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`: its classes in transformers, and what its config has beyond `sizes`."""

    config: type
    model: type
    tokenizer: Callable[[], transformers.PreTrainedTokenizerBase]
    more: dict = dataclasses.field(default_factory=dict)
    classifier: type | None = None
    sizes: dict = dataclasses.field(default_factory=lambda: SIZES)


def _bert_tokenizer() -> transformers.BertTokenizer:
    return transformers.BertTokenizer(
        vocab=_wordpiece("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    )


FAMILIES = {
    "bert": Family(
        transformers.BertConfig,
        transformers.BertModel,
        _bert_tokenizer,
        {"type_vocab_size": 3},
        transformers.BertForSequenceClassification,
    ),
    "xlm-roberta": Family(
        transformers.XLMRobertaConfig,
        transformers.XLMRobertaModel,
        lambda: transformers.XLMRobertaTokenizer(vocab=_sentencepiece()),
        {"type_vocab_size": 1, "pad_token_id": 1},
        transformers.XLMRobertaForSequenceClassification,
    ),
    "mpnet": Family(
        transformers.MPNetConfig,
        transformers.MPNetModel,
        lambda: transformers.MPNetTokenizer(
            vocab=_wordpiece("<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>")
        ),
    ),
    "modernbert": Family(
        transformers.ModernBertConfig,
        transformers.ModernBertModel,
        _bert_tokenizer,
        classifier=transformers.ModernBertForSequenceClassification,
        sizes=MODERN_SIZES,
    ),
    "nomic_bert": Family(
        transformers.NomicBertConfig,
        transformers.NomicBertModel,
        _bert_tokenizer,
        {"type_vocab_size": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}},
        transformers.NomicBertForSequenceClassification,
    ),
    "gte": Family(
        transformers.GteConfig,
        transformers.GteModel,
        _bert_tokenizer,
        {
            "type_vocab_size": 0,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 900.0, "factor": 1.6},
        },
        transformers.GteForSequenceClassification,
    ),
    "jina_embeddings_v3": Family(
        transformers.JinaEmbeddingsV3Config,
        transformers.JinaEmbeddingsV3Model,
        _bert_tokenizer,
        {"type_vocab_size": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
    ),
}


def texts(longest: int = 500) -> list[str]:
    """Texts of one to about `longest` words, known and unknown ones among them."""
    rng = np.random.default_rng(0)
    words = [*WORDS.split(), "Ouagadougou", "xyz.", "Filter,"]
    lengths = (1, 7, 40, longest // 2, longest)
    return [" ".join(rng.choice(words, size)) for size in lengths]


def save_plain(name: str, folder: Path, *, classifier: bool = False, **more) -> torch.nn.Module:
    """A checkpoint of transformers with its tokenizer; returns the model."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    sizes = (
        family.sizes | family.more | {"vocab_size": len(tokenizer), "attn_implementation": "eager"}
    )
    config = family.config(**sizes | more)
    torch.manual_seed(0)
    kind = family.classifier if classifier else family.model
    model = kind(config).eval()
    with torch.no_grad():  # fresh biases are 0 and norms 1, which would hide a swapped one
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.model_max_length = 540
    tokenizer.save_pretrained(folder)
    return model


def save_sentences(name: str, folder: Path, pooling: str, **options) -> SentenceTransformer:
    """A checkpoint of sentence-transformers; returns its model.

    Args:
      options: of SentenceTransformer.
    """
    # Here, since most users of this file do not need it, and it is slow to import.
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    plain = folder.with_name(f"{folder.name}-plain")
    save_plain(name, plain)
    encoder = Transformer(str(plain), max_seq_length=530)
    width = FAMILIES[name].sizes["hidden_size"]
    layers = [encoder, Pooling(width, pooling), Normalize()]
    model = SentenceTransformer(modules=layers, device="cpu", **options).eval()
    model.save(str(folder))
    return model
