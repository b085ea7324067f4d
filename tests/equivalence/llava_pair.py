"""A tiny random LLaVA of transformers, ours loaded from its folder, and inputs for both."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from compare import randomize

from mmqa_jax.models.llava.keys import llava_key_map
from mmqa_jax.models.llava.network import Llava, Prompts, expand_images
from mmqa_jax.weights.published import load_published

WORDS, IMAGE_TOKEN = 97, 90
SIDE, PATCHES = 40, 100
LENGTH = 520  # short prompts hide mistakes in rotary positions

VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "image_size": SIDE,
    "patch_size": 4,
    "projection_dim": 28,
    "layer_norm_eps": 3e-5,
}
TEXT = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 2e-5,
    "rope_theta": 1234.5,
    "initializer_range": 0.08,
}
# The first case has LLaVA-1.5's options, the second others.
CASES = {
    "as published": ({}, {}, {}),
    "other options": (
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 6, "tie_word_embeddings": True},
        {
            "vision_feature_layer": 1,
            "projector_hidden_act": "gelu_new",
            "multimodal_projector_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}


class Pair(NamedTuple):
    """A torch model, ours loaded from its checkpoint, and that folder."""

    theirs: transformers.LlavaForConditionalGeneration
    ours: Llava
    folder: Path


@functools.cache
def make_pair(case: str, folder: Path) -> Pair:
    """Builds a case, saves it as transformers does, and loads it."""
    vision, text, both = CASES[case]
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=VISION | vision,
        text_config=TEXT | text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=PATCHES,
        attn_implementation="eager",
        **both,
    )
    theirs = randomize(transformers.LlavaForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(folder)
    return Pair(theirs, load_published("llava", folder, unroll=1), folder)


def published_name(ours: Llava, key: str) -> str:
    """The key of llava-hf/llava-1.5-7b-hf for a parameter's name in a transformers model."""
    for pattern, replacement in llava_key_map(ours.config).rename:
        key = re.sub(pattern, replacement, key)
    return key


def published_tensors(ours: Llava, named: Iterable[tuple[str, torch.Tensor]]) -> dict:
    """A transformers model's tensors under those keys."""
    return {published_name(ours, name): tensor for name, tensor in named}


def rows() -> list[list[int]]:
    """One picture amid many words; two pictures side by side, in front; words alone."""
    words = np.random.default_rng(1).integers(1, IMAGE_TOKEN, LENGTH).tolist()
    picture = [IMAGE_TOKEN]
    return [
        words[:17] + picture + words[17 : LENGTH - PATCHES],
        picture * 2 + words[40:71],
        words[100:133],
    ]


PICTURES = [1, 2, 0]  # of each row


def prompts(ours: Llava, **options) -> Prompts:
    """`rows` as the models take them."""
    return expand_images(rows(), PICTURES, ours.config, **options)


def pixels() -> np.ndarray:
    """Normalised pixels of the rows' pictures, [3, SIDE, SIDE, 3]."""
    return np.random.default_rng(2).normal(size=(3, SIDE, SIDE, 3)).astype(np.float32)


def torch_inputs(given: Prompts) -> dict[str, torch.Tensor]:
    """The same for transformers, with positions as its `generate` counts them."""
    positions = np.maximum(given.mask.cumsum(1) - 1, 0)
    return {
        "input_ids": torch.from_numpy(given.input_ids).long(),
        "attention_mask": torch.from_numpy(given.mask).long(),
        "position_ids": torch.from_numpy(positions),
        "pixel_values": torch.from_numpy(pixels().transpose(0, 3, 1, 2).copy()),
    }


def torch_logits(theirs: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """[B, L, V] float32."""
    with torch.no_grad():
        return theirs(**inputs).logits.numpy()
