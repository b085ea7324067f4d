"""GGUF files of the decoder families: tensors of a torch model under llama.cpp's names, read by us.

Names are those of the package `gguf`, metadata and changes of tensors those of llama.cpp's
conversion (conversion/*.py). What transformers reads of GGUF, it reads alike.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, forward, randomize
from decoder_pair import run_torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mmqa_jax.models.llama.gguf import gguf_config
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.published import load_published

pytestmark = pytest.mark.slow

LAYERS = 7  # one that sees all among Gemma 3's, one without positions among SmolLM3's
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 2e-4,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_THETA = {"rope_type": "default", "rope_theta": 1234.5}


def _gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    size = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:
    _llama(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _olmo3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _llama(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)


def _mixture(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _mixtral(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _granitemoe(writer: gguf.GGUFWriter, config: Any) -> None:
    _granite(writer, config)
    _mixtral(writer, config)


def _sigmoids(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)


def _qwen2moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _mixture(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _minimax(writer: gguf.GGUFWriter, config: Any) -> None:
    _mixtral(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _lfm2moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _lfm2(writer, config)
    _mixture(writer, config)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _glm4moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _sigmoids(writer, config)
    writer.add_rope_dimension_count(config.head_dim // 2)


def _exaone4(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    _olmo3(writer, config)


def _part(writer: gguf.GGUFWriter, config: Any) -> None:
    rotated = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(rotated * config.hidden_size) // config.num_attention_heads)


def _stablelm(writer: gguf.GGUFWriter, config: Any) -> None:
    _part(writer, config)
    writer.add_parallel_residual(config.use_parallel_residual)


def _cohere(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _cohere2(writer: gguf.GGUFWriter, config: Any) -> None:
    _cohere(writer, config)
    _llama(writer, config)
    writer.add_sliding_window(config.sliding_window)


def _apertus(writer: gguf.GGUFWriter, config: Any) -> None:
    _llama(writer, config)
    writer.add_xielu_beta([0.5] * LAYERS)
    writer.add_xielu_eps([-1e-6] * LAYERS)


class Case(NamedTuple):
    """A family in llama.cpp.

    Attributes:
      kind: the class in transformers.
      architecture: llama.cpp's name.
      values: of the config.
      write: the metadata that others do not have.
      known: whether transformers reads it.
      turned: whether rows of queries and keys are turned (LlamaModel.permute).
      shift: what is added to the weights of norms.
    """

    kind: type[transformers.PreTrainedModel]
    architecture: str
    values: Mapping[str, Any] = {}
    write: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    known: bool = False
    turned: bool = False
    shift: float = 0.0


_LAYER_NORMS = {"rms_norm_eps": None, "layer_norm_eps": 2e-4}
_HALF = {**_THETA, "partial_rotary_factor": 0.5}
_SIGMOIDS = {
    **{"head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
    **{"moe_intermediate_size": 24, "routed_scaling_factor": 1.7, "norm_topk_prob": True},
    **{"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
}
_CONVOLUTIONS = {
    **{"rms_norm_eps": None, "norm_eps": 2e-4, "conv_L_cache": 4},
    "layer_types": ["conv", "full_attention", *["conv"] * 4, "full_attention"],
}
CASES = {
    "olmoe": Case(
        transformers.OlmoeForCausalLM,
        "olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2},
        _mixtral,
    ),
    "mixtral": Case(
        transformers.MixtralForCausalLM,
        "llama",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        _mixtral,
        turned=True,
    ),
    "granitemoe": Case(
        transformers.GraniteMoeForCausalLM,
        "granitemoe",
        {
            "embedding_multiplier": 5.5,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        _granitemoe,
        turned=True,
    ),
    "seed_oss": Case(transformers.SeedOssForCausalLM, "seed_oss", {"head_dim": 12}),
    "ernie4_5": Case(transformers.Ernie4_5ForCausalLM, "ernie4_5", {"head_dim": 12}),
    "exaone4": Case(
        transformers.Exaone4ForCausalLM,
        "exaone4",
        {
            "sliding_window": 33,
            "layer_types": [*["sliding_attention"] * (LAYERS - 1), "full_attention"],
        },
        _exaone4,
    ),
    "glm4": Case(
        transformers.Glm4ForCausalLM, "glm4", {"head_dim": 8, "rope_parameters": _HALF}, _part
    ),
    "command-r": Case(
        transformers.CohereForCausalLM, "command-r", {**_LAYER_NORMS, "logit_scale": 0.8}, _cohere
    ),
    "cohere2": Case(
        transformers.Cohere2ForCausalLM,
        "cohere2",
        {**_LAYER_NORMS, "logit_scale": 0.8, "sliding_window": 33},
        _cohere2,
    ),
    "nemotron": Case(
        transformers.NemotronForCausalLM,
        "nemotron",
        {"rms_norm_eps": None, "norm_eps": 2e-4, "rope_parameters": _HALF},
        _part,
        shift=1.0,
    ),
    "stablelm": Case(
        transformers.StableLmForCausalLM,
        "stablelm",
        {**_LAYER_NORMS, "use_qkv_bias": True, "rope_parameters": _HALF},
        _stablelm,
    ),
    "stablelm, parallel": Case(
        transformers.StableLmForCausalLM,
        "stablelm",
        {**_LAYER_NORMS, "use_parallel_residual": True, "rope_parameters": _HALF},
        _stablelm,
    ),
    "starcoder2": Case(
        transformers.Starcoder2ForCausalLM,
        "starcoder2",
        {"rms_norm_eps": None, "norm_epsilon": 2e-4},
    ),
    "apertus": Case(transformers.ApertusForCausalLM, "apertus", {}, _apertus),
    "arcee": Case(transformers.ArceeForCausalLM, "arcee", {}, _llama, turned=True),
    "dots1": Case(
        transformers.Dots1ForCausalLM, "dots1", {**_SIGMOIDS, "sliding_window": None}, _sigmoids
    ),
    "glm4moe": Case(
        transformers.Glm4MoeForCausalLM,
        "glm4moe",
        {**_SIGMOIDS, "use_qk_norm": True, "rope_parameters": _HALF},
        _glm4moe,
    ),
    "lfm2": Case(
        transformers.Lfm2ForCausalLM,
        "lfm2",
        {**_CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
        _lfm2,
    ),
    "lfm2moe": Case(
        transformers.Lfm2MoeForCausalLM,
        "lfm2moe",
        {
            **{**_CONVOLUTIONS, "num_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 24, "num_dense_layers": 2, "norm_topk_prob": True},
        },
        _lfm2moe,
    ),
    "mistral": Case(
        transformers.MistralForCausalLM, "llama", {"sliding_window": None}, _llama, turned=True
    ),
    "phi3": Case(
        transformers.Phi3ForCausalLM,
        "phi3",
        {"sliding_window": 50, "rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}},
        _phi3,
        known=True,
    ),
    "phi3, longrope": Case(
        transformers.Phi3ForCausalLM,
        "phi3",
        {
            "original_max_position_embeddings": 200,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 2345.0,
                "short_factor": [1.0, 1.2, 1.4, 1.9],
                "long_factor": [1.5, 2.0, 4.0, 9.0],
                "attention_factor": 1.25,
            },
        },
        _phi3,
    ),
    "olmo2": Case(transformers.Olmo2ForCausalLM, "olmo2"),
    "olmo3": Case(
        transformers.Olmo3ForCausalLM,
        "olmo2",
        {
            "sliding_window": 33,
            "layer_types": ["full_attention", *["sliding_attention"] * (LAYERS - 1)],
            "rope_parameters": {"full_attention": _THETA, "sliding_attention": _THETA},
        },
        _olmo3,
    ),
    "granite": Case(
        transformers.GraniteForCausalLM,
        "granite",
        {
            "embedding_multiplier": 5.5,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
        },
        _granite,
        turned=True,
    ),
    "smollm3": Case(
        transformers.SmolLM3ForCausalLM,
        "smollm3",
        {"tie_word_embeddings": True},
        _llama,
        turned=True,
    ),
    "qwen3moe": Case(
        transformers.Qwen3MoeForCausalLM,
        "qwen3moe",
        {
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        _mixture,
        known=True,
    ),
    "qwen2moe": Case(
        transformers.Qwen2MoeForCausalLM,
        "qwen2moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "shared_expert_intermediate_size": 40,
        },
        _qwen2moe,
    ),
    "minimax-m2": Case(
        transformers.MiniMaxM2ForCausalLM,
        "minimax-m2",
        {
            **{"head_dim": 12, "rotary_dim": 6, "num_local_experts": 6, "num_experts_per_tok": 2},
            "rope_parameters": {**_THETA, "partial_rotary_factor": 0.5},
        },
        _minimax,
    ),
    "gemma2": Case(
        transformers.Gemma2ForCausalLM,
        "gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "sliding_window": 33,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
        _gemma,
        known=True,
        shift=1.0,
    ),
    "gemma3": Case(
        transformers.Gemma3ForCausalLM,
        "gemma3",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "sliding_window": 33,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": _THETA,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        _gemma,
        known=True,
        shift=1.0,
    ),
}


def turned(x: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def tensors_of(model: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as published files have them, but experts of a layer in one."""
    for key, tensor in model.state_dict().items():
        key = key.replace("block_sparse_moe.experts.", "mlp.experts.")
        key = key.replace("block_sparse_moe.router.", "mlp.gate.")
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        key = key.replace(".expert_bias", ".expert_bias.bias")
        if key.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        if key.endswith("conv.conv.weight"):
            tensor = tensor[:, 0]
        if key.endswith("experts.gate_up_proj"):
            for name, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield key.replace("gate_up_proj", f"{name}_proj.weight"), half
        else:
            yield key + ".weight" * key.endswith("experts.down_proj"), tensor


def merged(key: str) -> str:
    """The name under which LFM2's conversion looks all experts of a layer up."""
    if "feed_forward.experts." not in key:
        return key
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        key = key.replace(f"{part}_proj", name)
    return key.removeprefix("model.")


def write_gguf(file: Path, model: transformers.PreTrainedModel, case: Case) -> None:
    """The model as llama.cpp's conversion writes it, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(file, case.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kinds = getattr(config, "layer_types", None) or ()
    kv_heads = [config.num_key_value_heads * (kind != "conv") for kind in kinds]
    writer.add_head_count_kv(kv_heads if "conv" in kinds else config.num_key_value_heads)
    if case.architecture.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif config.rms_norm_eps is None:
        names = ("layer_norm_eps", "norm_eps", "norm_epsilon")
        writer.add_layer_norm_eps(next(x for name in names if (x := getattr(config, name, None))))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for part in ("alpha_p", "alpha_n") if case.architecture == "apertus" else ():
        of_layers = [getattr(layer.mlp.act_fn, part).item() for layer in model.model.layers]
        getattr(writer, f"add_xielu_{part}")(of_layers)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "head_dim" in case.values:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    case.write(writer, config)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[case.architecture], config.num_hidden_layers)
    for key, tensor in tensors_of(model):
        if ".act_fn." in key or (key == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = tensor.numpy()
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if case.turned and f"{part}_proj." in key:
                array = turned(array, heads)
        if key.endswith("norm.weight"):
            array = array + np.float32(case.shift)
        name = names.get_name(merged(key), (".weight", ".bias"))
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_is_the_model_that_was_written(name, tmp_path):
    case, file = CASES[name], tmp_path / "model.gguf"
    torch.manual_seed(0)
    values = {"rope_parameters": dict(_THETA), **SIZES, **case.values}
    theirs = randomize(case.kind(case.kind.config_class(**values)), 0, 0.1)
    write_gguf(file, theirs, case)
    ours = load_published("llama", file, unroll=1)
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (1, 500))
    want = run_torch(theirs, ids)
    np.testing.assert_allclose(compiled(ours, forward)(ids), want, **WHOLE)
    assert np.abs(want).max() > 1
    if not case.known:
        return
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=theirs)
    for key, tensor in theirs.state_dict().items():
        if key in read["tensors"]:  # a tied head is not
            np.testing.assert_allclose(read["tensors"][key], tensor, rtol=0, atol=1e-6)
    assert theirs.config.tie_word_embeddings or "lm_head.weight" in read["tensors"]
    for key in ("sliding_window", "head_dim", "num_key_value_heads", "max_position_embeddings"):
        if key in read["config"]:
            assert read["config"][key] == getattr(theirs.config, key), key


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_divide_scores_by_another_size(architecture, layers, tmp_path):
    """As llama.cpp knows them, by their layers: no key of a file says it."""
    for count, scale in ((layers, (4608 // 32) ** -0.5), (26, None)):
        writer = gguf.GGUFWriter(tmp_path / f"{count}.gguf", architecture)
        writer.add_block_count(count)
        writer.add_context_length(8192)
        writer.add_embedding_length(4608)
        writer.add_feed_forward_length(64)
        writer.add_head_count(32)
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_sliding_window(1024)
        writer.add_tensor("token_embd.weight", np.zeros((3, 4608), np.float32))
        for layer in range(count):  # a file has tensors of each layer
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config = gguf_config(GGUFSource(tmp_path / f"{count}.gguf"))
        assert config.attention_scale == scale
        assert config.windows[:2] == ((1024, 0) if architecture == "gemma2" else (1024, 1024))
