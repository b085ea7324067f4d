"""Sizes of models that do not fit together, and inputs that do not fit a model."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mmqa_jax.decoding.t5_engine import T5EngineConfig, beam_search
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.rope import RopeScaling
from mmqa_jax.models.detection.faster_rcnn import bottom_up_r101, vinvl_x152c4, vlp_x101
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderModel, of_towers
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.modernbert.network import ModernBertConfig
from mmqa_jax.models.onevision.network import OnevisionConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig, expand_pictures
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5, Texts
from mmqa_jax.models.two_towers.config import (
    CLIPConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
    TextConfig,
    VisionConfig,
)
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.models.vlp.network import vlp_clip
from tests.refusals import refuses

VISION = SiglipVisionConfig(8, 4, width=24, layers=2, heads=2, mlp_width=20)
LLAMA = LlamaConfig(hidden=32, heads=2, kv_heads=2, layers=2, mlp=40)  # heads of 16
QWEN = QwenVisionConfig(width=32, heads=2, layers=2, out=32, full_layers=(1,))  # units of 28
MROPE = replace(LLAMA, mrope=(2, 3, 3))
QWEN_VL = QwenVLConfig(QWEN, MROPE, image_token=7)
SIGLIP = SiglipConfig(
    VISION, SiglipTextConfig(9, 5, width=24, layers=2, heads=2, mlp_width=20, embed_dim=24)
)
NAFLEX = replace(SIGLIP, vision=replace(VISION, flexible=True))
T5_SIZES = T5Config(vocab_size=9, hidden=8, head_size=4, heads=2, mlp=8, buckets=4, farthest=3)
onevision = partial(OnevisionConfig, VISION, LLAMA, resolutions=((8, 16),))
two_towers = partial(DualEncoderModel, "mean", 0.5)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (CLIPConfig, {"text": TextConfig(embed_dim=8)}, r"vision\.embed_dim 512 .* must project"),
        (vlp_x101, {"divisor": 16}, "divisor 16 with a pyramid, .*; give a multiple of 32"),
        (vlp_x101, {"pyramid": 0, "head": 0}, "proposals of 5 levels; a pyramid has 5, .* one"),
        (vinvl_x152c4, {"attribute_labels": 9}, "9 class embeddings for 1595 .*give at least as"),
        (bottom_up_r101, {"classes": 1602}, "1601 class embeddings for 1602"),
        (LlamaConfig, {"gate_limit": -1.0}, r"gate_limit is -1\.0: expected a number above 0"),
        (LlamaConfig, {"layers": 2, "windows": (4, -1)}, r"windows is \(4, -1\): .* from 0"),
        (LlamaConfig, {"rotary_fraction": 1.5}, r"rotary_fraction is 1\.5, of a head 192 numbers"),
        (LlamaConfig, {"rotary_fraction": 0.01}, r"rotary_fraction is 0\.01, .* an even number"),
        (LlamaConfig, {"layers": 1, "local": (True,), "rotary_fraction": 0.5}, r"local needs .* 1"),
        (
            partial(LlavaConfig, llama=LLAMA),
            {"vision": SiglipVisionConfig(flexible=True)},
            r"model\.vision\.flexible is True: expected False, since .* one size",
        ),
        (
            partial(LlavaConfig, VISION, LLAMA),
            {"feature_layer": 3},
            r"model\.feature_layer is 3: the vision tower has 2 layers; choose one from -3 to 2",
        ),
        (
            partial(vlp_clip, bert=None),
            {"vision": VisionConfig(), "layer": -14},
            r"model\.vision_layer is -14: the vision tower has 12 layers; choose one from -13 to 12",
        ),
        (ModernBertConfig, {"hidden": 36}, r"model\.heads is 12: a head of 3 values .*; change it"),
        (onevision, {"most_tiles": 0}, r"model\.most_tiles is 0: expected at least 1; raise it"),
        (QwenVLConfig, {"vision": QWEN, "llama": LLAMA}, r"llama\.mrope is \(\): expected three"),
        (
            QwenVLConfig,
            {"vision": replace(QWEN, deepstack=(0, 1)), "llama": replace(MROPE, layers=1)},
            r"deepstack is \(0, 1\): expected at most as many as model\.llama\.layers = 1; shorten",
        ),
        (QwenVisionConfig, {"heads": 128}, r"vision\.heads is 128: a head of 10 numbers, .* of 4"),
        (QwenVisionConfig, {"window": 100}, r"vision\.window is 100: expected a multiple of 28"),
        (QwenVisionConfig, {"min_pixels": 9, "max_pixels": 8}, "max_pixels are 9 and 8: .*correct"),
        (QwenVisionConfig, {"min_pixels": 0}, "max_pixels are 0 and 1003520: expected .* above 0"),
        (partial(RopeScaling, "yarn", 4.0), {"beta_slow": 64.0}, "beta_slow above 0 and at most"),
        (partial(RopeScaling, "yarn", 4.0), {"attention_factor": 0.0}, "an attention_factor above"),
        (SiglipVisionConfig, {"patch_size": 225}, r"patch_size is 225: larger .*image_size = 224"),
        (T5Config, {"activation": "gelu", "gated": True}, "activation is gelu with .* to gelu_new"),
        (T5Config, {"tied": False}, r"scaled is true with model\.tied false: .* set one of the"),
        (T5EngineConfig, {"slots": 0}, r"engine\.slots is 0: expected at least 1; raise it"),
        (T5EngineConfig, {"tokens": 0}, r"engine\.tokens is 0: expected at least 1"),
        (T5EngineConfig, {"buckets": ()}, r"engine\.buckets is \(\): expected ascending lengths"),
        (T5EngineConfig, {"buckets": (64, 64)}, r"engine\.buckets is \(64, 64\): .*; change them"),
        (
            two_towers,
            {"clip": "vit_b_32", "siglip": "base_16_224"},
            r"model\.clip=vit_b_32 and model\.siglip=base_16_224: name one of the two",
        ),
        (two_towers, {}, r"config key model\.trunk is missing; add it"),
        (
            lambda **keys: two_towers(**keys).config(9),
            {"siglip": "large", "vision": {}, "changes": {}},
            r"config key model\.siglip=large: unknown; use one of base_16_224, large_16_256",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(make, changes, message):
    refuses(message, make, **changes)


def outline(make):
    """A model of shapes; nothing is drawn."""
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs()))


def searched(**options) -> None:
    texts = Texts(jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32))
    model = nnx.split(outline(partial(T5, T5_SIZES)))
    jax.eval_shape(partial(beam_search, end_id=1, **options), *model, texts)


def embedded(config, method, *shapes) -> None:
    model = outline(partial(TwoTowers, config))
    jax.eval_shape(getattr(model, method), *(jnp.zeros(shape, jnp.int32) for shape in shapes))


def embedded_by_two_towers(length: int) -> None:
    model = outline(partial(DualEncoder, of_towers(SIGLIP)))
    model.encode_text(jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: layers.attention(
                *[jnp.zeros((1, 2, 1, 4))] * 3,
                dropout_rate=0.5,
                dropout_key=jax.random.key(0),
                implementation="blocks",
            ),
            "'blocks' cannot drop attention weights; set .* attention_dropout to 0, or .* 'xla'",
        ),
        (
            lambda: embedded(SIGLIP, "encode_image", (1, 9, 9, 3)),
            r"\(9, 9, 3\), .*\(8, 8, 3\); resize",
        ),
        (
            lambda: embedded(NAFLEX, "encode_image", (1, 8, 8, 3)),
            "the tower takes patches .*; prepare",
        ),
        (lambda: embedded(SIGLIP, "encode_text", (1, 6)), "siglip text: 6 tokens, .* 5; truncate"),
        (lambda: embedded_by_two_towers(4), "siglip text: rows of 4 tokens, .* 5; set"),
        (lambda: expand_pictures([[1], [7, 2]], [[], []], QWEN_VL), r"prompt 1: .*put exactly one"),
        (
            lambda: expand_pictures([[1, 7]], [[(28, 56, 3)]], QWEN_VL, length=2),
            "prompt 0: 3 tokens with its pictures, the batch holds 2; shorten the prompt",
        ),
        (lambda: searched(num_beams=0), "num_beams is 0: expected 1 to half .*, 4; change it"),
        (lambda: searched(num_beams=5), "num_beams is 5: expected 1 to half of the vocabulary, 4"),
        (lambda: searched(max_new_tokens=0), "max_new_tokens is 0: expected 1 or more; raise it"),
    ],
)
def test_inputs_that_do_not_fit_are_named(use, message):
    refuses(message, use)
