"""T5, Flan-T5 and mT5 checkpoints: transformers' folders both ways, llama.cpp's GGUF files in.

Fusion-in-Decoder's and KAT's (`FiDT5`) are read too: a T5's tensors, with the names that their
wrappers of the encoder and of its layers give them, and the relative positions between the stacks
of transformers 3.0.2, where training has changed them.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import comparison
from mmqa_jax.models.common.layers import scan_layers
from mmqa_jax.models.t5.config import FAMILIES, MultimodalT5Config, T5Config
from mmqa_jax.models.t5.network import T5, T5Stack
from mmqa_jax.weights import layouts
from mmqa_jax.weights.formats.gguf import (
    GGUFSource,
    check_metadata,
    head_size_of,
    heads_of,
    layers_of,
    vocabulary_of,
)
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, untied_source

# T5, Flan-T5 and mT5 in llama.cpp's GGUF files: the config, and names of tensors.
#
# Metadata and names: llama.cpp conversion/t5.py and gguf-py/gguf/tensor_mapping.py. What a file
# does not hold, llama.cpp's code has for every T5: the activation (src/models/t5.cpp), the
# distance from which on all share a bucket (src/llama-graph.cpp). It never scales what the head
# reads; here a T5 1.0 does as in the original, which changes no greedy answer but probabilities
# and beams.


# llama.cpp's architectures of whole T5s, and of encoders alone.
GGUF = ("t5", "t5encoder")
_OF = "t5."
_READ = (
    *("embedding_length", "feed_forward_length", "block_count", "decoder_block_count"),
    *("attention.head_count", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.relative_buckets_count"),
    "decoder_start_token_id",
)
_HARMLESS = ("context_length", "vocab_size", "tensor_data_layout")  # distances have no end
_GGUF_TABLE, _GGUF_HEAD = "token_embd.weight", "output.weight"
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
    tied = not gated or _GGUF_HEAD not in specs
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
    if not config.tied or _GGUF_HEAD not in source.specs():
        return
    if not np.array_equal(source.read(_GGUF_HEAD), source.read(_GGUF_TABLE)):
        raise UserError(
            f"{source.name}: {_GGUF_HEAD} is not {_GGUF_TABLE}, though a T5 without gates has one "
            "table for both; use its F16 or Q8_0 file, or, where the head is of its own, convert "
            "it with `--set tied=false --set scaled=false`."
        )


_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
_TABLE, _HEAD = "shared.weight", "lm_head.weight"
_BETWEEN = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_WRAPPED = "encoder.encoder."  # of FiD's EncoderWrapper; its CheckpointWrapper adds `module`
_UNWRAPPED = (
    (r"^encoder\.encoder\.", "encoder."),
    (r"^(encoder\.block\.\d+\.)module\.", r"\1"),
)


def t5_rules(config: T5Config) -> list[Rule]:
    """Rules of transformers' T5ForConditionalGeneration."""
    rules = [Rule(_TABLE, "tokens/table")]
    if not config.tied:
        rules.append(Rule(_HEAD, "head/kernel", TRANSPOSE))
    if config.between:
        rules.append(Rule(_BETWEEN, "decoder/between/table"))
    mlp = {"wi_0": "gate", "wi_1": "up"} if config.gated else {"wi": "up"}
    mlp["wo"] = "down"
    self_attention, cross = ("SelfAttention", "attention"), ("EncDecAttention", "cross")
    for stack, attentions in (("encoder", (self_attention,)), ("decoder", (self_attention, cross))):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        rules += [
            Rule(f"{first}.relative_attention_bias.weight", f"{stack}/relative/table"),
            Rule(f"{stack}.final_layer_norm.weight", f"{stack}/norm/scale"),
        ]
        block, path = f"{stack}.block.{{layer}}.layer", f"{stack}/layers"
        for number, (theirs, ours) in enumerate(attentions):
            rules.append(Rule(f"{block}.{number}.layer_norm.weight", f"{path}/{ours}_norm/scale"))
            for their_linear, our_linear in _ATTENTION.items():
                key = f"{block}.{number}.{theirs}.{their_linear}.weight"
                rules.append(Rule(key, f"{path}/{ours}/{our_linear}/kernel", TRANSPOSE))
        last = f"{block}.{len(attentions)}"
        rules.append(Rule(f"{last}.layer_norm.weight", f"{path}/mlp_norm/scale"))
        for their_linear, our_linear in mlp.items():
            key = f"{last}.DenseReluDense.{their_linear}.weight"
            rules.append(Rule(key, f"{path}/{our_linear}/kernel", TRANSPOSE))
    return rules


def t5_key_map(config: T5Config, rename: Sequence[tuple[str, str]] = ()) -> KeyMap:
    """Key map of transformers' T5ForConditionalGeneration.

    The embedding table has up to four names, of which a file may hold any.

    `rename`: see KeyMap.
    """
    aliases = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tied:
        aliases.append(_HEAD)
    return KeyMap(
        t5_rules(config),
        rename=rename,
        # A table that the first T5s had between the stacks; transformers from 4 on ignores it.
        ignore=() if config.between else (f"^{re.escape(_BETWEEN)}$",),
        tied=tuple((alias, _TABLE) for alias in aliases),
    )


def _gguf_key_map(config: T5Config) -> KeyMap:
    return t5_key_map(config, gguf_names(config))


def open_t5(path: Path) -> layouts.Checkpoint:
    """A T5, Flan-T5 or mT5 of transformers or llama.cpp (GGUF), or Fusion-in-Decoder's."""
    gguf = layouts.gguf_file(path) if path.exists() else None
    if gguf is not None:
        source = GGUFSource(gguf)
        config, unknown = t5_gguf_config(source)
        return layouts.Checkpoint(config, _gguf_key_map, source, "gguf", check_head, unknown)
    published = layouts.read_hf_config(path, *FAMILIES)
    source = layouts.open_source(path)
    has_head = _HEAD in source.specs()
    config = T5Config.from_hf(published, str(layouts.config_file(path)), has_head=has_head)
    if not any(key.startswith(_WRAPPED) for key in source.specs()):
        return layouts.Checkpoint(config, t5_key_map, source, "transformers")
    if _BETWEEN in source.specs() and np.any(source.read(_BETWEEN)):
        config = dataclasses.replace(config, between=True)
    return layouts.Checkpoint(
        config, functools.partial(t5_key_map, rename=_UNWRAPPED), source, "FiD"
    )


def publish_t5(config: T5Config, state: nnx.State) -> layouts.Published:
    """T5ForConditionalGeneration, or MT5ForConditionalGeneration; FiDT5 of one with `between`."""
    source, published = untied_source(state, t5_key_map(config)), config.to_hf()
    if not config.between:
        return layouts.Published(source, published)
    tensors = {
        _wrapped(key): (spec, functools.partial(source.read, key))
        for key, spec in source.specs().items()
    }
    return layouts.Published(
        DerivedSource(source.name, tensors), {**published, "architectures": ["FiDT5"]}
    )


def _wrapped(key: str) -> str:
    """FiD's name of a T5's tensor."""
    if not key.startswith("encoder."):
        return key
    return "encoder." + re.sub(r"^(encoder\.block\.\d+\.)", r"\1module.", key)


# Beside transformers: the same tokens as source and as what the decoder has so far.


def _run(model: T5, inputs: Mapping[str, Any]) -> comparison.Outputs:
    ids, mask = inputs["ids"], inputs["mask"]

    def run(stack: T5Stack, *source: Any) -> jax.Array:
        bias, seen = stack.bias(ids.shape[1]), stack.seen(mask, ids.shape[1])

        def body(layer: Any, x: jax.Array, _: Any, key: Any):
            x = layer(x, bias, seen, *source)
            return x, x

        embedded = model.embed(ids)
        return comparison.states_of(embedded, scan_layers(stack.layers, embedded, body)[1])

    encoder = run(model.encoder)
    source = model.encoder.norm(encoder[-1])
    decoder = run(model.decoder, source, mask[:, None, None, :])
    logits = model.logits(model.decoder.norm(decoder[-1]))
    stacks = {"encoder": encoder, "decoder": decoder}
    return comparison.Outputs(stacks, {"encoder output": source, "logits": logits})


CHECK = comparison.Check(
    "AutoModelForSeq2SeqLM",
    _run,
    {"encoder output": "encoder_last_hidden_state", "logits": "logits"},
    {"encoder": "encoder", "decoder": "decoder"},
    peer_inputs=lambda x: {**comparison.texts_for_transformers(x), "decoder_input_ids": x["ids"]},
)


# Multimodal-CoT's checkpoints both ways: amazon-science/mm-cot's T5ForMultimodalGeneration.
#
# A plain T5 is read too: its fusion with pictures is then new, as where training begins.


_PICTURE = "encoder.image_dense.weight"
_FUSION = {
    "encoder.image_dense.{kind}": "picture",
    "encoder.mha_layer.in_proj_{kind}": "attention",
    "encoder.mha_layer.out_proj.{kind}": "out",
    "encoder.gate_dense.{kind}": "gate",
}
# Until March 2023 these layers were the model's own, not its encoder's.
_OLDER = ((r"^(image_dense|mha_layer|gate_dense)\.", r"encoder.\1."),)


def multimodal_t5_key_map(config: MultimodalT5Config, fused: bool = True) -> KeyMap:
    """Key map of T5ForMultimodalGeneration; without `fused` of a T5 that has no fusion."""
    plain = t5_key_map(config)
    if not fused:
        return dataclasses.replace(plain, fresh=(r"^fusion/",))
    rules = [
        rule
        for theirs, ours in _FUSION.items()
        for rule in (
            Rule(theirs.format(kind="weight"), f"fusion/{ours}/kernel", TRANSPOSE),
            Rule(theirs.format(kind="bias"), f"fusion/{ours}/bias"),
        )
    ]
    return dataclasses.replace(plain, rules=[*plain.rules, *rules], rename=_OLDER)


def open_multimodal_t5(path: Path) -> layouts.Checkpoint:
    """A checkpoint of Multimodal-CoT, or a T5 without pictures."""
    plain = open_t5(path)
    if plain.layout == "gguf":
        raise UserError(
            f"{path}: a GGUF file; give the T5's folder, or convert the file by `mmqa convert "
            "--model=t5 --export=hf` and give what it makes."
        )
    shapes = layouts.shapes_of(plain.source, _OLDER)
    fields = {
        field.name: getattr(plain.config, field.name) for field in dataclasses.fields(T5Config)
    }
    if _PICTURE not in shapes:
        key_map = functools.partial(multimodal_t5_key_map, fused=False)
        config = MultimodalT5Config(**fields)
        unknown = {"features": MultimodalT5Config.features}
        return layouts.Checkpoint(
            config, key_map, plain.source, "transformers' T5", unknown=unknown
        )
    config = MultimodalT5Config(**fields, features=shapes[_PICTURE][1])
    return layouts.Checkpoint(config, multimodal_t5_key_map, plain.source, "mm-cot")


def publish_multimodal_t5(config: MultimodalT5Config, state: nnx.State) -> layouts.Published:
    """T5ForMultimodalGeneration."""
    published = {**config.to_hf(), "architectures": ["T5ForMultimodalGeneration"]}
    return layouts.Published(untied_source(state, multimodal_t5_key_map(config)), published)
