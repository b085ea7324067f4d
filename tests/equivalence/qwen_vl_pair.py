"""Tiny random Qwen-VLs of transformers, ours from their folders, and inputs."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from compare import randomize
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmqa_jax.models.qwen_vl.network import QwenVL
from mmqa_jax.weights.published import load_published

WORDS, ANSWERED, IMAGE, VIDEO, START, END = 97, 89, 90, 91, 92, 93
TOKEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|vision_start|>", "<|vision_end|>"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:?\n"
# As Qwen/Qwen2.5-VL-7B-Instruct's, without videos.
TEMPLATE = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}\
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}\
{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LENGTH = 560  # short prompts hide mistakes in positions
UNIT = 8

VISION = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 321.0},
}
_SINCE_2_5 = {"intermediate_size": 44, "out_hidden_size": 48}
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 2e-5,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": ANSWERED,
}
# A family's classes in transformers, and values of its tower, its language model and both.
CASES = {
    "qwen2_vl": (
        "Qwen2VL",
        {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 3},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1234.5,
                "mrope_section": [1, 3, 2],
            }
        },
        {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        # Windows of 3 x 3 units, which divide no picture below.
        {**_SINCE_2_5, "window_size": 24, "fullatt_block_indexes": [1]},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1234.5,
                "mrope_section": [2, 1, 3],
            }
        },
        {},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            **_SINCE_2_5,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 2],
            "hidden_act": "gelu_pytorch_tanh",
        },
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 4321.0,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        {"tie_word_embeddings": True},
    ),
}
CASES["qwen3_vl_moe"] = (
    "Qwen3VLMoe",
    CASES["qwen3_vl"][1],
    {
        **CASES["qwen3_vl"][2],
        "moe_intermediate_size": 20,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    {"tie_word_embeddings": False},
)
CASES["qwen3_5"] = (
    "Qwen3_5",
    {**_SINCE_2_5, "num_position_embeddings": 49},
    {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 4321.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    {"tie_word_embeddings": False},
)
_NO_ROWS = {"rope_type": "default", "rope_theta": 1234.5}
_GLM_TOKENS = {"image_start_token_id": START, "image_end_token_id": END}
CASES["glm4v"] = (
    "Glm4v",
    {**_SINCE_2_5, "image_size": 28, "rms_norm_eps": 3e-4, "attention_bias": True},
    {"rope_parameters": {**_NO_ROWS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}},
    _GLM_TOKENS,
)
CASES["glm4v_moe"] = (
    "Glm4vMoe",
    {**_SINCE_2_5, "image_size": 20},
    {
        "head_dim": 16,
        "moe_intermediate_size": 20,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.4,
        "rope_parameters": {**_NO_ROWS, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]},
    },
    _GLM_TOKENS,
)
CASES["paddleocr_vl"] = (
    "PaddleOCRVL",
    {
        **{"depth": None, "num_heads": None, "hidden_size": 32, "intermediate_size": 44},
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "layer_norm_eps": 2e-5,
    },
    {
        "head_dim": 16,
        "use_bias": True,
        "rope_parameters": {**_NO_ROWS, "mrope_section": [2, 3, 3]},
    },
    {"tie_word_embeddings": True},
)
PROCESSOR = {
    "qwen2_vl": {"image_mean": [0.6, 0.5, 0.4], "image_std": [0.3, 0.2, 0.25]},
    "qwen2_5_vl": {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]},
    "qwen3_vl": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    "qwen3_vl_moe": {},
    "qwen3_5": {},
    "glm4v": {},
    "glm4v_moe": {"image_mean": [0.5, 0.4, 0.5]},
    "paddleocr_vl": {},
}
PROCESSORS = {  # of others than Qwens
    "Glm4v": Glm4vImageProcessorPil,
    "Glm4vMoe": Glm4vImageProcessorPil,
    "PaddleOCRVL": PaddleOCRVLImageProcessorPil,
}
SIZE = {"shortest_edge": 40 * 40, "longest_edge": 136 * 136}


class Pair(NamedTuple):
    """A torch model, ours loaded from its checkpoint, their image processor, and the folder."""

    theirs: torch.nn.Module
    ours: QwenVL
    processor: Qwen2VLImageProcessorPil
    folder: Path


def save_torch(
    case: str, folder: Path, more: Mapping[str, object] | None = None, **tokens: int
) -> tuple[torch.nn.Module, Qwen2VLImageProcessorPil]:
    """Builds a case and saves it as transformers does; `more`: values of its language model."""
    name, vision, text, both = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vision_config={key: x for key, x in (VISION | vision).items() if x is not None},
        text_config=TEXT | text | dict(more or {}),
        attn_implementation="eager",
        **both,
        **tokens,
    )
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    theirs = randomize(theirs, 0, 0.05)
    theirs.save_pretrained(folder)
    kind = PROCESSORS.get(name, Qwen2VLImageProcessorPil)
    frames = 2 if kind is Glm4vImageProcessorPil else 1  # whose pixels are counted
    size = {key: frames * pixels for key, pixels in SIZE.items()}
    processor = kind(size=size, patch_size=4, **PROCESSOR[case])
    processor.save_pretrained(folder)
    return theirs, processor


@functools.cache
def make_pair(case: str, folder: Path) -> Pair:
    """Builds a case, saves it as transformers does, and loads it."""
    theirs, processor = save_torch(case, folder, **TOKEN_IDS)
    letters().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Pair(theirs, load_published("qwen_vl", folder, unroll=1), processor, folder)


def letters() -> Tokenizer:
    """One token a letter, and the special tokens at the ids above."""
    vocabulary = {letter: n for n, letter in enumerate(LETTERS)}
    count = IMAGE - SPECIAL.index("<|image_pad|>")
    vocabulary |= {f"<{n}>": n for n in range(len(LETTERS), count)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def pictures() -> list[Image.Image]:
    """Of several sizes and shapes: too large, too small, and one that fits as it is.

    The last two are of one bucket: a program of the tower less.
    """
    noise = np.random.default_rng(2)
    sizes = [(230, 160), (20, 33), (40, 56)]  # width, height
    made = [noise.integers(0, 256, (h // 4 + 1, w // 4 + 1, 3), np.uint8) for w, h in sizes]
    pairs = zip(made, sizes, strict=True)
    return [Image.fromarray(x).resize(size, Image.Resampling.BILINEAR) for x, size in pairs]


def torch_inputs(torch_pixels: dict[str, torch.Tensor], row: list[int], used: tuple[int, ...]):
    """A prompt for transformers, in which each placeholder stands once for each unit."""
    grids = torch_pixels["image_grid_thw"]
    counts = grids.prod(-1)
    starts = (counts.cumsum(0) - counts).tolist()
    waiting = iter(used)
    ids = [
        one
        for token in row
        for one in ([IMAGE] * (int(counts[next(waiting)]) // 4) if token == IMAGE else [token])
    ]
    ids = torch.tensor([ids])
    made = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    made["attention_mask"] = torch.ones_like(ids)  # `generate` would leave out letter 0, its pad
    if used:
        values = torch_pixels["pixel_values"]
        parts = [values[starts[n] : starts[n] + int(counts[n])] for n in used]
        made |= {"pixel_values": torch.cat(parts), "image_grid_thw": grids[list(used)]}
    return made


def rewritten(folder: Path, into: Path, **changes: object) -> Path:
    """A folder with the config of another, in which some keys are changed (None: left out)."""
    published = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        inner, _, name = key.rpartition("__")
        target = published[inner] if inner else published
        if value is None:
            target.pop(name)
        else:
            target[name] = value
    into.mkdir(exist_ok=True)
    (into / "config.json").write_text(json.dumps(published))
    return into
