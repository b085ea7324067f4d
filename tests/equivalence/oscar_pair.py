"""Tiny Oscar models in torch and here, with the same weights, for test_oscar*.py."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from oscar_torch import CLS, MASK, PAD, SEP, TorchOscar

from mmqa_jax.models.oscar.network import Oscar, OscarInputs, OscarLayout
from mmqa_jax.weights.published import load_published

VOCAB, FEATURES = 41, 10
SEP_BIAS = 1.8
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2}
LAYOUT = OscarLayout(
    caption=9,
    text=16,
    regions=6,
    region_features=FEATURES,
    cls_id=CLS,
    sep_id=SEP,
    pad_id=PAD,
    mask_id=MASK,
)


class Pair(NamedTuple):
    ours: Oscar
    theirs: TorchOscar
    folder: Path  # the checkpoint as published: config.json, pytorch_model.bin


def make_pair(
    folder: Path,
    *,
    eps: float = 1e-12,
    region_norm: bool = False,
    region_eps: float = 1e-12,
    scale: float = 0.25,
) -> Pair:
    """A random checkpoint of the published layout, loaded here; `scale` is of the weights."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=48,
        type_vocab_size=2,
        layer_norm_eps=eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = TorchOscar(config, FEATURES, region_norm, region_eps).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(scale * torch.randn(p.shape) + name.endswith("LayerNorm.weight"))
        theirs.cls.predictions.bias[SEP] += SEP_BIAS  # some captions end early
    tensors = theirs.state_dict() | {
        "cls.seq_relationship.weight": torch.zeros(3, 24),  # pre-training's other head
        "cls.seq_relationship.bias": torch.zeros(3),
        "bert.embeddings.position_ids": torch.arange(48)[None],
    }
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    published = config.to_dict() | {
        "img_feature_dim": FEATURES,
        "img_feature_type": "faster_r-cnn",
        "use_img_layernorm": int(region_norm),
        "img_layer_norm_eps": region_eps,
        "tie_weights": True,
    }
    del published["model_type"]  # pytorch_transformers wrote none
    (folder / "config.json").write_text(json.dumps(published))
    return Pair(load_published("oscar", folder, unroll=1, **DROPOUT), theirs, folder)


class Pictures(NamedTuple):
    captions: list[list[int]]
    labels: list[list[int]]
    regions: list[np.ndarray]


def pictures() -> Pictures:
    """One is whole, one has no labels, one too much of everything, one next to nothing."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(5, VOCAB, n).tolist()  # noqa: E731
    return Pictures(
        [words(5), words(3), words(12), words(1)],
        [words(4), [], words(9), words(1)],
        [rng.normal(size=(n, FEATURES)).astype("f4") for n in (6, 4, 8, 1)],
    )


def torch_inputs(inputs: OscarInputs) -> list[torch.Tensor]:
    """ids, types, positions, features as TorchOscar takes them."""
    names = ("input_ids", "token_type_ids", "position_ids", "region_features")
    return [torch.tensor(np.asarray(getattr(inputs, name))) for name in names]


def real(inputs: OscarInputs) -> np.ndarray:
    """bool [B, T + R]: columns that hold something."""
    text = np.asarray(inputs.context_mask) | np.asarray(inputs.caption_mask)
    return np.concatenate([text, inputs.region_mask], axis=1)
