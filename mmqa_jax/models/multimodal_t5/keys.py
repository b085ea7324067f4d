"""Multimodal-CoT's checkpoints both ways: amazon-science/mm-cot's T5ForMultimodalGeneration.

A plain T5 is read too: its fusion with pictures is then new, as where training begins.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.multimodal_t5.network import MultimodalT5Config
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.keys import open_t5, t5_key_map
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, untied_source
from mmqa_jax.weights.layouts import Checkpoint, Published, shapes_of

_PICTURE = "encoder.image_dense.weight"
_FUSION = {
    "encoder.image_dense.{kind}": "picture",
    "encoder.mha_layer.in_proj_{kind}": "attention",
    "encoder.mha_layer.out_proj.{kind}": "out",
    "encoder.gate_dense.{kind}": "gate",
}
# Until March 2023 these layers were the model's own, not its encoder's.
_OLDER = ((r"^(image_dense|mha_layer|gate_dense)\.", r"encoder.\1."),)


def multimodal_t5_key_map(config: MultimodalT5Config, fused: bool = True) -> KeyMap:
    """Key map of T5ForMultimodalGeneration; without `fused` of a T5 that has no fusion."""
    plain = t5_key_map(config)
    if not fused:
        return dataclasses.replace(plain, fresh=(r"^fusion/",))
    rules = [
        rule
        for theirs, ours in _FUSION.items()
        for rule in (
            Rule(theirs.format(kind="weight"), f"fusion/{ours}/kernel", TRANSPOSE),
            Rule(theirs.format(kind="bias"), f"fusion/{ours}/bias"),
        )
    ]
    return dataclasses.replace(plain, rules=[*plain.rules, *rules], rename=_OLDER)


def open_multimodal_t5(path: Path) -> Checkpoint:
    """A checkpoint of Multimodal-CoT, or a T5 without pictures."""
    found = open_t5(path)
    if found.layout == "gguf":
        raise UserError(
            f"{path}: a GGUF file; give the T5's folder, or convert the file by `mmqa convert "
            "--model=t5 --export=hf` and give what it makes."
        )
    shapes = shapes_of(found.source, _OLDER)
    fields = {
        field.name: getattr(found.config, field.name) for field in dataclasses.fields(T5Config)
    }
    if _PICTURE not in shapes:
        key_map = functools.partial(multimodal_t5_key_map, fused=False)
        config = MultimodalT5Config(**fields)
        unknown = {"features": MultimodalT5Config.features}
        return Checkpoint(config, key_map, found.source, "transformers' T5", unknown=unknown)
    config = MultimodalT5Config(**fields, features=shapes[_PICTURE][1])
    return Checkpoint(config, multimodal_t5_key_map, found.source, "mm-cot")


def publish_multimodal_t5(config: MultimodalT5Config, state: nnx.State) -> Published:
    """T5ForMultimodalGeneration."""
    published = {**config.to_hf(), "architectures": ["T5ForMultimodalGeneration"]}
    return Published(untied_source(state, multimodal_t5_key_map(config)), published)
