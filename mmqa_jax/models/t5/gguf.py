"""T5, Flan-T5 and mT5 in llama.cpp's GGUF files: the config, and names of tensors.

Metadata and names: llama.cpp conversion/t5.py and gguf-py/gguf/tensor_mapping.py. What a file does
not hold, llama.cpp's code has for every T5: the activation (src/models/t5.cpp), the distance from
which on all share a bucket (src/llama-graph.cpp). It never scales what the head reads; here a T5
1.0 does as in the original, which changes no greedy answer but probabilities and beams.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.weights.formats.gguf import (
    GGUFSource,
    check_metadata,
    head_size_of,
    heads_of,
    layers_of,
    vocabulary_of,
)
from mmqa_jax.weights.formats.safetensors import TensorSource

# llama.cpp's architectures of whole T5s, and of encoders alone.
ARCHITECTURES = ("t5", "t5encoder")
_OF = "t5."
_READ = (
    *("embedding_length", "feed_forward_length", "block_count", "decoder_block_count"),
    *("attention.head_count", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.relative_buckets_count"),
    "decoder_start_token_id",
)
_HARMLESS = ("context_length", "vocab_size", "tensor_data_layout")  # distances have no end
_TABLE, _HEAD = "token_embd.weight", "output.weight"
_GATE = re.compile(r"(enc|dec)\.blk\.\d+\.ffn_gate\.weight")
_LATER_POSITIONS = re.compile(r"(enc|dec)\.blk\.[1-9]\d*\.attn_rel_b\.weight")


def gguf_names(config: T5Config) -> tuple[tuple[str, str], ...]:
    """(regex, replacement) that make llama.cpp's names of tensors transformers'; see KeyMap."""
    up = "wi_1" if config.gated else "wi"
    return (
        (r"^token_embd\.", "shared."),
        (r"^output\.", "lm_head."),
        (r"^(enc|dec)\.output_norm\.", r"\1oder.final_layer_norm."),
        (r"^(enc|dec)\.blk\.(\d+)\.", r"\1oder.block.\2.layer."),
        (r"\.attn_norm\.", ".0.layer_norm."),
        (r"\.attn_rel_b\.", ".0.SelfAttention.relative_attention_bias."),
        (r"\.attn_([qkvo])\.", r".0.SelfAttention.\1."),
        (r"\.cross_attn_norm\.", ".1.layer_norm."),
        (r"\.cross_attn_rel_b\.", ".1.EncDecAttention.relative_attention_bias."),
        (r"\.cross_attn_([qkvo])\.", r".1.EncDecAttention.\1."),
        (r"^(encoder\..*)\.ffn_", r"\1.1.ffn_"),
        (r"^(decoder\..*)\.ffn_", r"\1.2.ffn_"),
        (r"\.ffn_norm\.", ".layer_norm."),
        (r"\.ffn_gate\.", ".DenseReluDense.wi_0."),
        (r"\.ffn_up\.", f".DenseReluDense.{up}."),
        (r"\.ffn_down\.", ".DenseReluDense.wo."),
    )


def t5_gguf_config(source: GGUFSource) -> tuple[T5Config, dict[str, Any]]:
    """Our config from a GGUF file's metadata and names of tensors.

    A T5 without gates is T5 1.0, whose head is its table, scaled. A gated one with a head is T5
    1.1, Flan-T5 or mT5; of a gated one without a head nothing says whether it is scaled.

    Returns:
      The config, and fields of it that nothing in the file shows, see Checkpoint.
    """
    architecture = source.metadata("general.architecture")
    if architecture != "t5":
        alone = ", an encoder alone" if architecture == "t5encoder" else ""
        raise UserError(
            f"{source.name}: general.architecture is {architecture!r}{alone}, expected 't5'; give "
            "the file of a whole T5, Flan-T5 or mT5."
        )
    heads = heads_of(source, _OF)
    eps = f"{_OF}attention.layer_norm_rms_epsilon"
    fixed = {
        "attention.head_count_kv": (heads,),
        "attention.layer_norm_epsilon": (source.metadata(eps),),  # the same, written twice
    }
    check_metadata(source, _OF, (*_READ, *_HARMLESS), fixed)
    specs = source.specs()
    for key in specs:
        if _LATER_POSITIONS.fullmatch(key):
            raise UserError(
                f"{source.name}: holds {key}; a T5's first layers alone have relative positions, "
                "a UMT5's every layer, which is not supported: use a T5, Flan-T5 or mT5."
            )
    gated = any(_GATE.fullmatch(key) for key in specs)
    tied = not gated or _HEAD not in specs
    hidden = source.integer(f"{_OF}embedding_length")
    layers = layers_of(source, f"{_OF}block_count")
    config = T5Config(
        vocab_size=vocabulary_of(source),
        hidden=hidden,
        head_size=head_size_of(source, _OF, hidden // heads),
        heads=heads,
        mlp=source.integer(f"{_OF}feed_forward_length"),
        encoder_layers=layers,
        decoder_layers=layers_of(source, f"{_OF}decoder_block_count", layers),
        buckets=source.integer(f"{_OF}attention.relative_buckets_count"),
        farthest=128,
        eps=source.number(eps),
        activation="gelu_new" if gated else "relu",
        gated=gated,
        tied=tied,
        scaled=not gated,
        pad=source.integer("tokenizer.ggml.padding_token_id", 0),
        start=source.integer(f"{_OF}decoder_start_token_id", 0),
    )
    return config, {"scaled": False} if gated and tied else {}


def check_head(source: TensorSource, config: T5Config) -> None:
    """Refuses a head beside the table of a T5 that has one for both.

    Checkpoints of T5 1.0 often hold it twice, and quantization may round the two differently.
    """
    if not config.tied or _HEAD not in source.specs():
        return
    if not np.array_equal(source.read(_HEAD), source.read(_TABLE)):
        raise UserError(
            f"{source.name}: {_HEAD} is not {_TABLE}, though a T5 without gates has one table for "
            "both; use its F16 or Q8_0 file, or, where the head is of its own, convert it with "
            "`--set tied=false --set scaled=false`."
        )
