"""LLaMA configs: transformers' both ways, Meta's, published sizes, rotary frequencies, bad values."""

import dataclasses

import jax
import numpy as np
import pytest
import transformers
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama import config as presets
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.models.llama.keys import meta_config
from mmqa_jax.models.llama.network import Llama, inverse_frequencies
from tests.refusals import refuses


@pytest.mark.parametrize("scaling", [None, "linear", "llama3"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_frequencies_are_transformers(theta, scaling):
    """Within one rounding of float32, for the published head sizes."""
    for head_dim in (64, 128):
        config = LlamaConfig(
            hidden=4 * head_dim,
            heads=4,
            kv_heads=4,
            rope_theta=theta,
            rope_scaling=scaling and RopeScaling(scaling, 8.0),
            positions=131072,
        )
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
            transformers.LlamaConfig(**config.to_hf())
        )
        np.testing.assert_allclose(
            inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=2.5e-7
        )


def test_configs_of_both_transformers_versions():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    sizes = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
    }
    four = sizes | {"rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}}
    five = sizes | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    for published in (four, five):
        assert LlamaConfig.from_hf(published) == presets.llama31_8b()
    # lmsys/vicuna-7b-v1.5-16k, which names the type as transformers 4.31 did.
    old = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    old["rope_scaling"] = {"factor": 4.0, "type": "linear"}
    assert LlamaConfig.from_hf(old).rope_scaling == RopeScaling("linear", 4.0)
    assert transformers.LlamaConfig(**presets.llama31_8b().to_hf()).rope_parameters == {
        **scaling,
        "rope_type": "llama3",
        "rope_theta": 5e5,
    }


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, {"positions": 4096, "rope_theta": 10000.0}),
        ({"norm_eps": 1e-6}, {"positions": 2048, "eps": 1e-6}),
        ({"rope_theta": 500000.0}, {"positions": 8192}),
        (
            {"rope_theta": 500000.0, "use_scaled_rope": True},
            {"positions": 131072, "rope_scaling": RopeScaling("llama3", 8.0)},
        ),
        ({"dim": 4096, "n_heads": 32, "multiple_of": 256}, {"mlp": 11008}),
        (  # LLaMA-2 70B
            {
                "dim": 8192,
                "n_heads": 64,
                "n_kv_heads": 8,
                "multiple_of": 4096,
                "ffn_dim_multiplier": 1.3,
            },
            {"mlp": 28672, "kv_heads": 8},
        ),
        (  # LLaMA-3 8B
            {
                "dim": 4096,
                "n_heads": 32,
                "n_kv_heads": 8,
                "multiple_of": 1024,
                "ffn_dim_multiplier": 1.3,
                "rope_theta": 500000.0,
            },
            {"mlp": 14336, "kv_heads": 8},
        ),
    ],
)
def test_meta_params_tell_the_config(changes, want):
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5} | changes
    config = meta_config(params, 100)
    assert {name: getattr(config, name) for name in want} == want


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        (presets.llama_7b, 6_738_415_616),
        (presets.llama2_7b, 6_738_415_616),
        (presets.llama_13b, 13_015_864_320),
        (presets.llama2_13b, 13_015_864_320),
        (presets.llama2_70b, 68_976_648_192),
        (presets.llama3_8b, 8_030_261_248),
        (presets.llama31_8b, 8_030_261_248),
        (presets.smollm2_135m, 134_515_008),
        (presets.stories260k, 260_032),
        (presets.RELATIVES["llama31_70b"], 70_553_706_496),
        (presets.RELATIVES["llama32_1b"], 1_235_814_400),
        (presets.RELATIVES["llama32_3b"], 3_212_749_824),
        (presets.RELATIVES["smollm2_360m"], 361_821_120),
        (presets.RELATIVES["smollm2_17b"], 1_711_376_384),
        (presets.RELATIVES["qwen25_05b"], 494_032_768),
        (presets.RELATIVES["qwen25_15b"], 1_543_714_304),
        (presets.RELATIVES["qwen25_3b"], 3_085_938_688),
        (presets.RELATIVES["qwen25_7b"], 7_615_616_512),
        (presets.RELATIVES["qwen25_14b"], 14_770_033_664),
        (presets.RELATIVES["qwen25_32b"], 32_763_876_352),
        (presets.RELATIVES["qwen25_72b"], 72_706_203_648),
        (presets.RELATIVES["qwen3_06b"], 596_049_920),
        (presets.RELATIVES["qwen3_17b"], 2_031_739_904 - 151_936 * 2048),  # files hold the head too
        (presets.RELATIVES["qwen3_4b"], 4_022_468_096),
        (presets.RELATIVES["qwen3_8b"], 8_190_735_360),
        (presets.RELATIVES["qwen3_14b"], 14_768_307_200),
        (presets.RELATIVES["qwen3_32b"], 32_762_123_264),
        (presets.RELATIVES["qwen3_30b_a3b"], 30_532_122_624),
        (presets.RELATIVES["qwen3_235b_a22b"], 235_093_634_560),
        (presets.RELATIVES["ministral_8b"], 8_019_808_256),
        (presets.RELATIVES["mistral_small_24b"], 23_572_403_200),
        (presets.RELATIVES["granite33_8b"], 8_170_864_640),
        (presets.RELATIVES["phi3_mini"], 3_821_079_552),
        (presets.RELATIVES["mistral_7b"], 7_248_023_552),
        (presets.RELATIVES["smollm3_3b"], 3_075_098_624),
        (presets.RELATIVES["olmo2_7b"], 7_298_617_344),
        (presets.RELATIVES["olmo2_13b"], 13_716_198_400),
        (presets.RELATIVES["phi4"], 14_659_507_200),
        (presets.RELATIVES["gemma2_2b"], 2_614_341_888),
        (presets.RELATIVES["gemma2_9b"], 9_241_705_984),
        (presets.RELATIVES["gemma2_27b"], 27_227_128_320),
        (presets.RELATIVES["gemma3_1b"], 999_885_952),
        (presets.RELATIVES["gemma3_4b"], 4_300_079_472 - 419_816_304),  # without tower, projector
        (presets.RELATIVES["gemma3_12b"], 12_187_325_040 - 421_290_864),
        (presets.RELATIVES["gemma3_27b"], 27_432_406_640 - 423_060_336),
    ],
)
def test_presets_have_the_published_parameter_counts(preset, count):
    """Counts of the published models (Hugging Face `num_parameters()`; stories260K's file)."""
    model = nnx.eval_shape(lambda: Llama(preset(), rngs=nnx.Rngs()))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == count


@pytest.mark.parametrize("name", presets.RELATIVES)
def test_presets_of_relatives_can_be_published(name):
    config = presets.RELATIVES[name]()
    again = LlamaConfig.from_hf(config.to_hf())
    if FAMILIES[config.family].model_type == again.family:  # transformers has another name for it
        again = dataclasses.replace(again, family=config.family)
    assert (again.family, again.layers) == (config.family, config.layers)
    assert dataclasses.replace(again, head_dim=config.head_dim, out_bias=config.out_bias) == config


def test_bad_input_is_named():
    refuses("'gpt2', expected one of llama, mistral", LlamaConfig.from_hf, {"model_type": "gpt2"})
    with pytest.raises(UserError, match=r"x/config\.json: rope scaling 'axial' is not supported"):
        LlamaConfig.from_hf({"rope_scaling": {"rope_type": "axial"}}, "x/config.json")
    refuses("lacks its `factor`", LlamaConfig.from_hf, {"rope_scaling": {"type": "linear"}})
    refuses(r"partial_rotary_factor 0\.5", LlamaConfig.from_hf, {"partial_rotary_factor": 0.5})
    refuses(r"config\.json: hidden_act is 'mish':", LlamaConfig.from_hf, {"hidden_act": "mish"})
    for changes, match in (
        ({"heads": 3}, "a divisor of model.hidden = 4096"),
        ({"kv_heads": 5}, "a divisor of model.heads = 32"),
        ({"head_dim": 5}, "expected an even number"),
        ({"activation": "mish"}, "'mish'"),
        ({"attention_dropout": 1.0}, "a rate from 0 to below 1"),
    ):
        refuses(match, LlamaConfig, **changes)
    refuses(r"rope_scaling type is 'ntk': .* linear, llama3", RopeScaling, "ntk", 2.0)
    refuses("a factor of at least 1", RopeScaling, "linear", 0.5)
