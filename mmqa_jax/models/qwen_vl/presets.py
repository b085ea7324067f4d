"""Published sizes of Qwen-VLs, GLM-4.xV and PaddleOCR-VL, and what one trained from scratch has."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.models.llama.config import FREE, RELATIVES, LlamaConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.models.two_towers.config import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.weights.registry import Base


def qwen25_vl_7b(**changes) -> QwenVLConfig:
    """Qwen/Qwen2.5-VL-7B-Instruct."""
    llama = RELATIVES["qwen25_7b"](positions=128000, mrope=(16, 24, 24))
    vision = QwenVisionConfig(max_pixels=28 * 28 * 16384)
    return dataclasses.replace(QwenVLConfig(vision, llama), **changes)


def qwen2_vl_7b(**changes) -> QwenVLConfig:
    """Qwen/Qwen2-VL-7B-Instruct."""
    llama = RELATIVES["qwen25_7b"](mrope=(16, 24, 24))
    vision = QwenVisionConfig(
        family="qwen2_vl",
        mlp=5120,
        window=0,
        full_layers=(),
        activation="quick_gelu",
        max_pixels=28 * 28 * 16384,
    )
    return dataclasses.replace(QwenVLConfig(vision, llama), **changes)


def qwen3_vl_vision(**changes) -> QwenVisionConfig:
    """The tower of Qwen/Qwen3-VL-8B-Instruct."""
    sizes = QwenVisionConfig(
        family="qwen3_vl",
        width=1152,
        layers=27,
        mlp=4304,
        out=4096,
        patch=16,
        window=0,
        full_layers=(),
        positions=48,
        deepstack=(8, 16, 24),
        activation="gelu_new",
        pixel_mean=(0.5, 0.5, 0.5),
        pixel_std=(0.5, 0.5, 0.5),
        min_pixels=65536,
        max_pixels=16777216,
    )
    return dataclasses.replace(sizes, **changes)


def qwen3_vl_2b(**changes) -> QwenVLConfig:
    """Qwen/Qwen3-VL-2B-Instruct; Qwen3-VL-Embedding-2B and -Reranker-2B have its sizes."""
    llama = RELATIVES["qwen3_17b"](
        positions=262144, rope_theta=5e6, mrope=(24, 20, 20), mrope_interleaved=True
    )
    vision = qwen3_vl_vision(width=1024, layers=24, mlp=4096, out=2048, deepstack=(5, 11, 17))
    return dataclasses.replace(QwenVLConfig(vision, llama), **changes)


def qwen3_vl_8b(**changes) -> QwenVLConfig:
    """Qwen/Qwen3-VL-8B-Instruct."""
    llama = RELATIVES["qwen3_8b"](
        positions=262144, rope_theta=5e6, mrope=(24, 20, 20), mrope_interleaved=True
    )
    return dataclasses.replace(QwenVLConfig(qwen3_vl_vision(), llama), **changes)


def qwen3_vl_30b_a3b(**changes) -> QwenVLConfig:
    """Qwen/Qwen3-VL-30B-A3B-Instruct."""
    llama = RELATIVES["qwen3_30b_a3b"](
        positions=262144, rope_theta=5e6, mrope=(24, 20, 20), mrope_interleaved=True
    )
    return dataclasses.replace(QwenVLConfig(qwen3_vl_vision(out=2048), llama), **changes)


def glm41v_9b(**changes) -> QwenVLConfig:
    """zai-org/GLM-4.1V-9B-Thinking; GLM-4.6V-Flash has 131,072 positions."""
    llama = RELATIVES["glm4_9b"](positions=65536, mrope=(8, 12, 12))
    return dataclasses.replace(QwenVLConfig(_glm_vision(13696), llama, **_GLM_TOKENS), **changes)


def glm45v(**changes) -> QwenVLConfig:
    """zai-org/GLM-4.5V, 106B-A12B; GLM-4.6V has 131,072 positions."""
    llama = RELATIVES["glm45_air"](positions=65536, mrope=(8, 12, 12))
    tokens = _GLM_TOKENS | {"image_token": 151363, "video_token": 151364}
    return dataclasses.replace(QwenVLConfig(_glm_vision(10944), llama, **tokens), **changes)


def _glm_vision(merger_mlp: int) -> QwenVisionConfig:
    return QwenVisionConfig(
        family="glm4v",
        width=1536,
        layers=24,
        heads=12,
        mlp=4096,
        out=4096,
        window=0,
        full_layers=(),
        positions=24,
        eps=1e-5,
        qkv_bias=False,
        merger_mlp=merger_mlp,
        min_pixels=6272,
        max_pixels=4816896,
    )


_GLM_TOKENS = {"image_token": 151343, "video_token": 151344, "vision_start_token": 151339}
_GLM_TOKENS |= {"vision_end_token": 151340}


def paddleocr_vl_09b(**changes) -> QwenVLConfig:
    """PaddlePaddle/PaddleOCR-VL."""
    llama = RELATIVES["ernie45_03b"](family="paddleocr_vl_text", mrope=(16, 24, 24), tied=False)
    vision = qwen3_vl_vision(
        family="paddleocr_vl",
        out=1024,
        patch=14,
        temporal=1,
        positions=27,
        deepstack=(),
        min_pixels=384**2,
        max_pixels=1536**2,
        pixel_mean=PIXEL_MEAN,
        pixel_std=PIXEL_STD,
    )
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    tokens = dict(zip(names, (100295, 100296, 101305, 101306), strict=True))
    return dataclasses.replace(QwenVLConfig(vision, llama, **tokens), **changes)


# The special tokens and the chat template of a tokenizer that is trained with a model from scratch;
# without videos and system messages.
_SPECIAL = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|video_pad|>",
             "<|vision_start|>", "<|vision_end|>")  # fmt: skip
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _from_scratch(vision: Mapping[str, Any], **llama: Any) -> QwenVLConfig:
    """Makes a model from scratch, with the token ids of a tokenizer that is trained with it."""
    names = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{name}_token": number for number, name in enumerate(names, start=2)}
    return QwenVLConfig(QwenVisionConfig(**vision), LlamaConfig(**llama), **tokens)


PRESETS = {
    "qwen2_vl_7b": qwen2_vl_7b,
    "qwen25_vl_7b": qwen25_vl_7b,
    "qwen3_vl_2b": qwen3_vl_2b,
    "qwen3_vl_8b": qwen3_vl_8b,
    "qwen3_vl_30b_a3b": qwen3_vl_30b_a3b,
    "glm41v_9b": glm41v_9b,
    "glm45v": glm45v,
    "paddleocr_vl_09b": paddleocr_vl_09b,
}
BASE = Base(
    "Qwen-VL",
    "a folder or ORG/NAME, such as Qwen/Qwen2.5-VL-7B-Instruct",
    _from_scratch,
    {
        "changes": FREE,
        "vision": ("dtype", "attention", "remat", "unroll", "min_pixels", "max_pixels"),
    },
    {"changes": "llama", "vision": "vision"},
    _SPECIAL,
    _CHAT,
)
