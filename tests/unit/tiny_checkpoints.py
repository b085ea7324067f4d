"""Tiny random checkpoints of every architecture, in the layouts in which they are published."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from flax import nnx
from safetensors.numpy import save_file

from mmqa_jax.models.bart.network import BartConfig
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.detection.faster_rcnn import vlp_x101
from mmqa_jax.models.detection.resnext import ResNeXtConfig
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.pixtral import PixtralVisionConfig
from mmqa_jax.models.mcan.network import FusionConfig, MCANConfig, MCANOpenVQAConfig
from mmqa_jax.models.mistral3.network import Mistral3Config
from mmqa_jax.models.modified_resnet.network import ModifiedResNetConfig
from mmqa_jax.models.onevision.network import OnevisionConfig
from mmqa_jax.models.oscar.network import OscarConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.models.t5.config import MultimodalT5Config, T5Config
from mmqa_jax.models.two_towers.config import (
    CLIPConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
    TextConfig,
    VisionConfig,
)
from mmqa_jax.models.vlp.network import VLPConfig
from mmqa_jax.weights.layouts import Published
from mmqa_jax.weights.registry import architecture

_BERT = BertConfig(vocab_size=30, hidden=12, layers=2, heads=3, mlp=16, positions=9, eps=1e-3)
_FUSION = FusionConfig(hidden=24, heads=3, mlp=20, layers=2, flat_mlp=10, glimpses=2, flat_out=14)
_VISION = VisionConfig(16, 8, width=8, layers=3, heads=2, mlp_width=12, embed_dim=6, eps=1e-4)
_LLAMA = LlamaConfig(
    vocab_size=40, hidden=16, layers=3, heads=4, kv_heads=2, mlp=24, head_dim=6, positions=64,
    eps=1e-4, rope_theta=777.0, rope_scaling=RopeScaling("llama3", 4.0, original_positions=32),
    attention_bias=True,
)  # fmt: skip


def _replace(config: Any, **changes: Any) -> Any:
    return type(config)(**{**vars(config), **changes})


CONFIGS: dict[str, Any] = {
    "clip": CLIPConfig(
        _VISION,
        TextConfig(20, 6, width=10, layers=2, heads=2, mlp_width=12, embed_dim=6, eos_token_id=5),
    ),
    "siglip": SiglipConfig(
        SiglipVisionConfig(16, 8, width=8, layers=2, heads=2, mlp_width=12, flexible=True),
        SiglipTextConfig(20, 6, width=10, layers=3, heads=2, mlp_width=12, embed_dim=8, eps=1e-4),
    ),
    "modified_resnet": ModifiedResNetConfig(8, (1, 1, 2, 1), image_size=64, embed_dim=6),
    "bert": _replace(_BERT, pooler=True),
    "vlp": VLPConfig(_replace(_BERT, types=6, eps=1e-5), 7, 5, (9,)),
    "oscar": OscarConfig(_replace(_BERT, pooler=True), region_features=7, region_norm=True),
    "bart": BartConfig(
        vocab_size=31, hidden=12, encoder_layers=2, decoder_layers=3, encoder_heads=3,
        decoder_heads=2, encoder_mlp=14, decoder_mlp=18, positions=20, scale_embedding=True,
    ),
    "llama": _LLAMA,
    "t5": T5Config(
        vocab_size=37, hidden=12, head_size=6, heads=3, mlp=14, encoder_layers=2, decoder_layers=3,
        buckets=8, farthest=11, activation="gelu_new", gated=True, tied=False, scaled=False,
    ),
    "multimodal_t5": MultimodalT5Config(
        vocab_size=37, hidden=12, head_size=6, heads=3, mlp=14, encoder_layers=2, decoder_layers=3,
        buckets=8, farthest=11, activation="relu", features=5,
    ),
    "llava": LlavaConfig(_VISION, _LLAMA, image_token=33),
    "onevision": OnevisionConfig(
        SiglipVisionConfig(16, 8, width=8, layers=2, heads=2, mlp_width=12, head=False),
        LlamaConfig(
            vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, mlp=24, positions=64,
            eps=1e-4, rope_theta=777.0, family="qwen2", attention_bias=True, out_bias=False,
        ),
        image_token=33, video_token=34, resolutions=((16, 16), (16, 32), (32, 16)), most_tiles=4,
    ),
    "mistral3": Mistral3Config(
        PixtralVisionConfig(16, 4, width=16, layers=2, heads=2, mlp_width=12, rope_theta=99.0),
        LlamaConfig(
            vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, mlp=24, head_dim=6,
            positions=64, eps=1e-4, rope_theta=777.0, family="mistral",
        ),
    ),
    "qwen_vl": QwenVLConfig(
        QwenVisionConfig(
            "qwen3_vl", width=16, layers=2, heads=2, mlp=12, out=16, patch=2, window=0,
            full_layers=(), positions=3, deepstack=(0,), activation="gelu_new",
        ),
        LlamaConfig(
            vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, mlp=24, head_dim=12,
            positions=64, eps=1e-4, rope_theta=777.0, family="qwen3", qk_norm="head",
            mrope=(2, 2, 2), mrope_interleaved=True,
        ),
    ),
    "mcan": MCANConfig(
        _replace(_BERT, eps=1e-12, pooler=False),
        _replace(_FUSION, hidden=32, heads=2, value_bias=False, norm="layer", eps=1e-5),
        image_features=11, grid=3, rope_base=15.0, answers=13, new_answers=4,
    ),
    "mcan_openvqa": MCANOpenVQAConfig(50, _FUSION, word_features=6, region_features=9, answers=7),
    "detector": _replace(
        vlp_x101(), classes=4, pyramid=6, head=5, bins=2,
        backbone=ResNeXtConfig(
            (1, 2, 1, 1), stem=4, width=8, groups=2, width_per_group=2, stride_in_1x1=False,
            norm="affine",
        ),
    ),
}  # fmt: skip

# What a file of tensors alone does not tell, of sizes that nobody published.
SETTINGS = {
    "vlp": ["bert.heads=3"],
    "mcan": ["text.heads=3", "fusion.heads=2", "rope_base=15"],
    "mcan_openvqa": ["fusion.heads=3"],
}


class Source(NamedTuple):
    """A checkpoint on disk and what is in it."""

    path: Path
    config: Any
    arrays: dict[str, np.ndarray]

    def flags(self, model: str) -> list[str]:
        """Flags of `mmqa convert` that read it."""
        settings = [f"--set={setting}" for setting in SETTINGS.get(model, [])]
        return ["convert", f"--model={model}", f"--source={self.path}", *settings]


@functools.cache
def _published(model: str, config: Any) -> Published:
    """A model as its exporter has it; nothing is initialized."""
    entry = architecture(model)
    made = nnx.eval_shape(lambda: entry.build(config, rngs=nnx.Rngs()))
    return entry.publish(config, nnx.state(made))


def published_specs(model: str, config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of a model's tensors under their published keys."""
    return _published(model, config).source.specs()


def published_arrays(model: str, config: Any, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random tensors under the published keys of a model."""
    source = _published(model, config).source
    rng = np.random.default_rng(7)
    return {
        key: source.read(key) if ".rope." in key else rng.normal(size=spec.shape).astype(dtype)
        for key, spec in source.specs().items()
    }


def make_source(model: str, folder: Path, dtype: str = "float32") -> Source:
    """Writes a checkpoint as its authors do."""
    config = CONFIGS[model]
    arrays = published_arrays(model, config, dtype)
    folder.mkdir(parents=True)
    path = folder
    if model in ("vlp", "mcan", "mcan_openvqa", "modified_resnet"):
        path = folder / {"vlp": "model.11.bin", "modified_resnet": "visual.pt"}.get(
            model, "e13.pkl"
        )
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        state = {"state_dict": tensors, "epoch": 13} if path.suffix == ".pkl" else tensors
        torch.save(state, path)
    else:
        entries = _published(model, config).config
        (folder / "config.json").write_text(json.dumps({**entries, "bos_token_id": 11}))
        save_file(arrays, folder / "model.safetensors")
    return Source(path, config, arrays)
