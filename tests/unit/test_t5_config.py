"""A T5's config: what is read, and what is refused by name."""

import pytest

from mmqa_jax.models.t5.config import PRESETS, T5Config
from tests.refusals import refuses

FLAN = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64,
    "d_model": 768, "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06, "n_positions": 512, "num_decoder_layers": 12, "num_heads": 12,
    "num_layers": 12, "output_past": True, "pad_token_id": 0,
    "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False, "transformers_version": "4.23.1", "use_cache": True,
    "vocab_size": 32128, "task_specific_params": {"summarization": {"num_beams": 4}},
}  # fmt: skip


def test_published_configs_are_their_presets():
    """google/flan-t5-base as published, and t5-small without what it leaves to the defaults."""
    assert T5Config.from_hf(FLAN) == PRESETS["flan_t5_base"]()
    small = {"model_type": "t5", "d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 2048}
    assert T5Config.from_hf(small, has_head=False) == PRESETS["t5_small"]()


@pytest.mark.parametrize(
    ("family", "entries", "has_head", "tied", "scaled"),
    [
        ("t5", {}, False, True, True),
        ("t5", {}, True, True, True),
        ("t5", {"tie_word_embeddings": False}, True, False, False),
        # As transformers 5 writes a Flan-T5.
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False, False),
        ("t5", {"tie_word_embeddings": False}, False, True, False),
        ("mt5", {"tie_word_embeddings": False}, True, False, False),
        ("mt5", {"tie_word_embeddings": True}, True, False, False),
        ("mt5", {"tie_word_embeddings": True}, False, True, False),
    ],
)
def test_the_head_and_its_scale(family, entries, has_head, tied, scaled):
    config = T5Config.from_hf({"model_type": family, **entries}, has_head=has_head)
    assert (config.tied, config.scaled) == (tied, scaled)
    assert T5Config.from_hf(config.to_hf(), has_head=not tied) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "umt5"}, "model_type is 'umt5', expected 't5' or 'mt5'"),
        ({"model_type": "longt5"}, "model_type is 'longt5'"),
        ({"local_radius": 127}, "the key 'local_radius' .127. is not known"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is False"),
        ({"dense_act_fn": "relu"}, "dense_act_fn is 'relu'.*only 'gelu_new'"),
        ({"feed_forward_proj": "gated-swish"}, "feed_forward_proj.*'swish'"),
        ({"d_model": 0}, "d_model is 0, expected a whole number"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"relative_attention_num_buckets": 10}, "buckets is 10: expected a multiple of 4"),
        ({"relative_attention_max_distance": 16}, "farthest is 16: expected more than half"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, message):
    refuses(message, T5Config.from_hf, {**FLAN, **changes})
