"""BERTs with rotary positions: NomicBERT, GTE (Arctic Embed M v2.0's trunk) and jina-embeddings-v3.

They are `network.Bert` with switches. Checkpoints are read as transformers 5 writes them and as
their authors do, whose names differ and who keep several linears as rows of one tensor.
Originals: transformers models/nomic_bert, models/gte and models/jina_embeddings_v3.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import keys as bert_keys
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.common.rope import scaling_from_hf
from mmqa_jax.models.llama.keys import Fused, Parts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.keymap import KeyMap, Rule, linear_rules, norm_rules

ADAPTED = "lora_adaptations"  # a key of the authors' jina-embeddings-v3: its tasks
_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
_NORMS = {"post_attention_layernorm": "attention_norm", "post_mlp_layernorm": "mlp_norm"}
_READ = kinds(
    object_or_null="rope_parameters rope_scaling", number="rope_theta", integer="type_vocab_size"
)


@dataclasses.dataclass(frozen=True)
class RotaryBert:
    """One published family."""

    defaults: Mapping[str, Any]  # of transformers, where they are not BERT's
    theta: float  # base of the rotary frequencies where config.json has none
    computes: Mapping[str, Any]  # fields of BertConfig that its code fixes
    linears: Mapping[str, str]  # of its MLP, published name -> ours
    rename: tuple[tuple[str, str], ...]  # the authors' names of tensors -> transformers'
    # The authors' keys of config.json -> transformers'.
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # harmless, fixed: of the authors' keys, see `config_json.check_keys`.
    harmless: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


_GATED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
NOMIC = RotaryBert(
    defaults={
        **{"vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    theta=1000.0,
    computes={"gated": True, "attention_bias": False, "up_bias": False, "down_bias": False},
    linears=_GATED,
    rename=(
        (r"^nomic_bert\.", ""),
        (r"^encoder\.layers\.", "layers."),
        (r"^emb_ln\.", "embeddings.LayerNorm."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
    renamed={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "max_trained_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    harmless=(
        *("n_positions", "activation_function", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple"),
        *("reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"),
        *("use_xentropy", "rotary_emb_scale_base", "last_layer_subset", "head_dim"),
    ),
    fixed={
        **dict.fromkeys(("causal", "prenorm", "parallel_block", "use_rms_norm"), (False,)),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False,)),
        **{"parallel_block_tied_norm": (False,), "rotary_emb_interleaved": (False,)},
        **{"rotary_emb_fraction": (1.0,), "rotary_scaling_factor": ()},
    },
)
GTE = RotaryBert(
    defaults={
        **{"vocab_size": 250048, "max_position_embeddings": 8192, "type_vocab_size": 1},
        "attention_probs_dropout_prob": 0.0,
    },
    theta=160000.0,
    computes={"gated": True, "up_bias": False},
    linears=_GATED,
    rename=(
        (r"^(new|gte)\.", ""),
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.o_proj\.", ".self_attn.o_proj."),
        (r"\.attn_ln\.", ".post_attention_layernorm."),
        (r"\.mlp_ln\.", ".post_mlp_layernorm."),
    ),
    harmless=("pack_qkv", "unpad_inputs", "use_memory_efficient_attention"),
    fixed={
        **{"layer_norm_type": ("layer_norm",), "logn_attention_clip1": (False,)},
        "logn_attention_scale": (False,),
    },
)
JINA_V3 = RotaryBert(
    defaults={
        **{"vocab_size": 250002, "hidden_size": 1024, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "intermediate_size": 4096, "type_vocab_size": 1},
        **{"max_position_embeddings": 8194, "layer_norm_eps": 1e-5},
    },
    theta=20000.0,
    computes={},
    linears={"fc1": "up", "fc2": "down"},
    rename=(
        (r"^roberta\.", ""),
        (r"^emb_ln\.", "embeddings.LayerNorm."),
        (r"^encoder\.layers\.", "layers."),
        (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
    renamed={"rotary_emb_base": "rope_theta"},
    harmless=(
        *(ADAPTED, "load_trained_adapters", "lora_alpha", "lora_dropout_p", "lora_rank"),
        *("lora_main_params_trainable", "task_instructions", "matryoshka_dimensions"),
        *("truncate_dim", "use_flash_attn", "use_reentrant"),
    ),
    fixed={"emb_pooler": ("mean",)},
)


def with_task(
    source: TensorSource, published: Mapping[str, Any], task: str | None, where: str
) -> TensorSource:
    """The tensors of jina-embeddings-v3 as its authors publish them, with the additions of a task.

    Every linear and every table has additions A and B of rank r of each task; what is used is
    W + alpha / r B A, of a table W + alpha / r A B (their modeling_lora.py, `lora_forward`).

    Args:
      published: its config.json, which names the tasks.
      task: one of them; None: none is added.
    """
    rank, alpha = published.get("lora_rank", 4), published.get("lora_alpha", 1)
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UserError(
            f"{where}: lora_rank is {rank!r} and lora_alpha {alpha!r}, numbers above 0 were "
            "expected; fetch the file again."
        )
    number = None if task is None else published[ADAPTED].index(task)
    specs, sizes = source.specs(), (len(published[ADAPTED]), rank)
    tensors: dict[str, Any] = {}
    for key, spec in specs.items():
        stem, parametrized, part = key.rpartition(".parametrizations.weight.")
        if not parametrized:
            tensors[key] = spec, functools.partial(source.read, key)
        elif part == "original":
            added = (specs.get(f"{stem}{parametrized}0.lora_{letter}") for letter in "AB")
            if not all(x and len(x.shape) == 3 and {*sizes} <= {*x.shape} for x in added):
                raise UserError(
                    f"{source.name}: the additions to {stem} are not there, or not of {sizes[0]} "
                    f"tasks and rank {rank}; fetch the file again."
                )
            read = functools.partial(_adapted, source, stem, number, alpha / rank)
            tensors[f"{stem}.weight"] = spec, read
    return DerivedSource(source.name, tensors)


def _adapted(source: TensorSource, stem: str, number: int | None, factor: float) -> np.ndarray:
    """The matrix of a linear or a table with the additions of a task."""
    stem = f"{stem}.parametrizations.weight."
    whole = source.read(f"{stem}original")
    if number is None:
        return whole
    a, b = (source.read(f"{stem}0.lora_{part}")[number].astype(np.float32) for part in "AB")
    added = b @ a if (b.shape[0], a.shape[1]) == whole.shape else a @ b
    return (whole.astype(np.float32) + factor * added).astype(whole.dtype)


def rotary_config(
    family: RotaryBert, published: Mapping[str, Any], where: str, *, harmless: tuple[str, ...] = ()
) -> BertConfig:
    """Our config from the config.json of a family; absent values are transformers' defaults.

    Args:
      published: the file's content, with transformers' keys or the authors'.
      where: its name, for messages.
      harmless: keys of a model around the encoder.
    """
    published = {**published}
    for theirs, ours in family.renamed.items():
        if theirs in published:
            published.setdefault(ours, published.pop(theirs))
            published.pop(theirs, None)
    if published.get("position_embedding_type") in ("rope", "rotary"):
        del published["position_embedding_type"]
    config = bert_keys.bert_config(
        {**family.defaults, **published},
        where,
        read=_READ,
        harmless=(*family.harmless, *harmless),
        fixed=family.fixed,
    )
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    theta = rope.get("rope_theta", published.get("rope_theta", family.theta))
    if rope.get("type") == "ntk":
        rope, theta = _ntk(rope, theta, config, where)
    scaling = scaling_from_hf(rope, None, config.positions, where)
    if scaling is not None and scaling.kind not in ("linear", "dynamic"):
        raise UserError(
            f"{where}: rope scaling {scaling.kind!r} is not supported in this encoder; use a "
            "checkpoint without scaling, or with linear or dynamic."
        )
    return dataclasses.replace(
        config, rope_theta=float(theta), rope_scaling=scaling, **family.computes
    )


def _ntk(
    rope: Mapping[str, Any], theta: float, config: BertConfig, where: str
) -> tuple[dict[str, Any], float]:
    """GTE's own scaling (Su 2023, formula 6): a larger base, and all frequencies divided by a
    constant."""
    check_keys(rope, f"{where}, rope_scaling", read=kinds(name="type", number="factor"))
    factor = rope["factor"]
    divisor = factor ** (2 * config.heads / config.hidden)
    return {"rope_type": "linear", "factor": divisor}, theta * factor


def rotary_key_map(family: RotaryBert, config: BertConfig) -> KeyMap:
    """Key map of the encoder, of a source with `rotary_fused` apart; heads and the pooler are
    ignored."""
    return KeyMap(
        rules=_rules(family, config),
        rename=family.rename,
        ignore=[bert_keys.BUFFERS, r"inv_freq$", r"^(pooler|lm_head|cls|classifier)\."],
    )


def rotary_classifier_key_map(family: RotaryBert, config: BertConfig) -> KeyMap:
    """Key map of transformers' classifier of sequences and our CrossEncoder."""
    return KeyMap(
        rules=[
            *_rules(family, config, "bert/"),
            *linear_rules("pooler.dense", "bert/pooler"),
            *linear_rules("classifier", "classifier"),
        ],
        rename=family.rename,
        ignore=[bert_keys.BUFFERS, r"inv_freq$"],
    )


def rotary_fused(config: BertConfig) -> Fused:
    """Lists the linears that the authors' checkpoints keep as rows of one tensor."""
    parts = Parts({f"self_attn.{name}": config.hidden for name in ("q_proj", "k_proj", "v_proj")})
    return {
        **dict.fromkeys(("attn.Wqkv", "attention.qkv_proj", "mixer.Wqkv"), parts),
        "mlp.up_gate_proj": Parts(dict.fromkeys(("mlp.up_proj", "mlp.gate_proj"), config.mlp)),
    }


def _rules(family: RotaryBert, config: BertConfig, path: str = "") -> list[Rule]:
    embeddings, layer, ours = "embeddings.", "layers.{layer}.", f"{path}layers"
    rules = [Rule(f"{embeddings}word_embeddings.weight", f"{path}embeddings/word/table")]
    if config.types:
        types = f"{embeddings}token_type_embeddings.weight"
        rules.append(Rule(types, f"{path}embeddings/token_type/table"))
    rules += norm_rules(f"{embeddings}LayerNorm", f"{path}embeddings/norm")
    for theirs, name in _ATTENTION.items():
        key = f"{layer}self_attn.{theirs}"
        rules += linear_rules(key, f"{ours}/{name}", config.attention_bias)
    for theirs, name in family.linears.items():
        bias = config.down_bias if name == "down" else config.up_bias
        rules += linear_rules(f"{layer}mlp.{theirs}", f"{ours}/{name}", bias)
    for theirs, name in _NORMS.items():
        rules += norm_rules(f"{layer}{theirs}", f"{ours}/{name}")
    return rules
