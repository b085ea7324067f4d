"""ModernBERT encoders and classifiers of sequences in transformers' layout."""

import re
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.llama.keys import Fused, Parts
from mmqa_jax.models.modernbert.network import ModernBertConfig
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import KeyMap, Rule, linear_rules, norm_rules

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_READ = kinds(
    size="vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings local_attention global_attn_every_n_layers",
    number="norm_eps global_rope_theta local_rope_theta",
    flag="norm_bias attention_bias mlp_bias classifier_bias",
    name="hidden_activation classifier_activation classifier_pooling",
    list_or_null="layer_types",
    object_or_null="rope_parameters",
)
# Of training, of the masked-LM head, and of transformers' own ways to compute the same.
_HARMLESS = (
    *("attention_dropout", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor"),
    *("decoder_bias", "tie_word_embeddings", "sparse_prediction", "sparse_pred_ignore_index"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
    "layer_norm_eps",  # a leftover of BERT's config, which no code reads
)
_FIXED = {
    "is_causal": (False,),
    "position_embedding_type": ("absolute", "sans_pos"),  # not read either
    "rope_scaling": (),
}
_PARTS = {  # our linears by those of a layer
    "attn.query": "query",
    "attn.key": "key",
    "attn.value": "value",
    "attn.Wo": "out",
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.Wo": "down",
}


def modernbert_config(
    published: Mapping[str, Any], where: str = "config.json", *, harmless: tuple[str, ...] = ()
) -> ModernBertConfig:
    """Our config from transformers' config.json of ModernBertModel; absent values are its defaults.

    Args:
      published: the file's content, of transformers 4 or 5.
      where: its name, for messages.
      harmless: keys of a model around the encoder.
    """
    check_keys(published, where, read=_READ, harmless=(*_HARMLESS, *harmless), fixed=_FIXED)
    layers = published.get("num_hidden_layers", 22)
    local = _local(published, layers, where)
    thetas = {
        _GLOBAL: published.get("global_rope_theta", 160000.0),
        _LOCAL: published.get("local_rope_theta", 10000.0),
    }
    for kind, rope in (published.get("rope_parameters") or {}).items():
        check_known(f"{where}: a kind of layer in rope_parameters", kind, thetas)
        thetas[kind] = _theta(rope, f"{where}, rope_parameters.{kind}", thetas[kind])
    activations = {
        name: published.get(name, "gelu") for name in ("hidden_activation", "classifier_activation")
    }
    return ModernBertConfig(
        vocab_size=published.get("vocab_size", 50368),
        hidden=published.get("hidden_size", 768),
        layers=layers,
        heads=published.get("num_attention_heads", 12),
        mlp=published.get("intermediate_size", 1152),
        positions=published.get("max_position_embeddings", 8192),
        eps=published.get("norm_eps", 1e-5),
        activation=activations["hidden_activation"],
        window=published.get("local_attention", 128),
        local=local,
        global_theta=float(thetas[_GLOBAL]),
        local_theta=float(thetas[_LOCAL]),
        norm_bias=published.get("norm_bias", False),
        attention_bias=published.get("attention_bias", False),
        mlp_bias=published.get("mlp_bias", False),
        classifier_bias=published.get("classifier_bias", False),
        classifier_activation=activations["classifier_activation"],
        classifier_pooling=published.get("classifier_pooling", "cls"),
    )


def modernbert_fused(config: ModernBertConfig) -> Fused:
    """What the checkpoint keeps as rows of one tensor."""
    return {
        "attn.Wqkv": Parts(dict.fromkeys(("attn.query", "attn.key", "attn.value"), config.hidden)),
        "mlp.Wi": Parts(dict.fromkeys(("mlp.gate", "mlp.up"), config.mlp)),
    }


def modernbert_key_map(config: ModernBertConfig) -> KeyMap:
    """Key map of the encoder, of a source with `modernbert_fused` apart.

    Keys may start with `model.`; heads are ignored.
    """
    return KeyMap(
        rules=modernbert_rules(config),
        rename=[(r"^model\.", ""), *renumbered(config)],
        ignore=[r"^(head|decoder|classifier)\."],
    )


def modernbert_classifier_key_map(config: ModernBertConfig) -> KeyMap:
    """Key map of ModernBertForSequenceClassification and our ModernBertCrossEncoder."""
    return KeyMap(
        rules=[
            *modernbert_rules(config, path="bert/"),
            *linear_rules("head.dense", "dense", config.classifier_bias),
            *norm_rules("head.norm", "norm", config.norm_bias),
            *linear_rules("classifier", "classifier"),
        ],
        rename=[(r"^model\.", ""), *renumbered(config)],
    )


def modernbert_rules(config: ModernBertConfig, prefix: str = "", path: str = "") -> list[Rule]:
    """Rules of the encoder; `prefix` stands before its keys, and `path` before our names."""
    rules = [
        Rule(f"{prefix}embeddings.tok_embeddings.weight", f"{path}tokens/table"),
        *norm_rules(f"{prefix}embeddings.norm", f"{path}embedding_norm", config.norm_bias),
        *norm_rules(f"{prefix}final_norm", f"{path}norm", config.norm_bias),
    ]
    for layer, ours in ((f"{prefix}first", "first"), (f"{prefix}layers.{{layer}}", "layers")):
        for part, name in _PARTS.items():
            bias = config.attention_bias if part.startswith("attn.") else config.mlp_bias
            rules += linear_rules(f"{layer}.{part}", f"{path}{ours}/{name}", bias)
        rules += norm_rules(f"{layer}.mlp_norm", f"{path}{ours}/mlp_norm", config.norm_bias)
    later = f"{prefix}layers.{{layer}}.attn_norm"
    return [*rules, *norm_rules(later, f"{path}layers/attention_norm", config.norm_bias)]


def renumbered(config: ModernBertConfig, prefix: str = "") -> list[tuple[str, str]]:
    """Renames of layers: the first is by itself, our stack begins with the second."""
    at = f"^{re.escape(prefix)}layers\\."
    later = [(rf"{at}{n}\.", f"{prefix}layers.{n - 1}.") for n in range(1, config.layers)]
    return [(rf"{at}0\.", f"{prefix}first."), *later]


def modernbert_published_name(key: str, classifier: bool) -> str:
    """The reverse of the renames: a key of our rules -> that of a checkpoint."""
    first, _, rest = key.partition(".")
    if first == "first":
        key = f"layers.0.{rest}"
    elif first == "layers":
        number, _, rest = rest.partition(".")
        key = f"layers.{int(number) + 1}.{rest}"
    return f"model.{key}" if classifier and first not in ("head", "classifier") else key


def _local(published: Mapping[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    kinds_of_layers = published.get("layer_types")
    if kinds_of_layers is None:
        every = published.get("global_attn_every_n_layers", 3)
        return tuple(n % every != 0 for n in range(layers))
    if len(kinds_of_layers) != layers or not {*kinds_of_layers} <= {_GLOBAL, _LOCAL}:
        raise UserError(
            f"{where}: layer_types is {kinds_of_layers}, expected {layers} of {_GLOBAL} and "
            f"{_LOCAL}; fetch the file again."
        )
    return tuple(kind == _LOCAL for kind in kinds_of_layers)


def _theta(rope: Any, where: str, usual: float) -> float:
    """The base in one of `rope_parameters`; UserError for a scaling."""
    rope = rope or {}
    fixed = {"rope_type": ("default",)}
    check_keys(rope, where, read=kinds(number="rope_theta"), fixed=fixed)
    return rope.get("rope_theta", usual)
