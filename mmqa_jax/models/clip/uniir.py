"""UniIR's CLIP_SF (https://github.com/TIGER-AI-Lab/UniIR): OpenAI's CLIP as a part of its module.

The names of the tensors are OpenAI's behind `clip_model.`. It is trained so that a text with a
picture is the sum of both vectors; which checkpoints are embedded so, the layout says.
"""

from __future__ import annotations

import functools

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

UNIIR = "uniir"  # the layout of the record of a conversion
_WRAPPER = "clip_model."


def is_uniir_clip(source: TensorSource) -> bool:
    """Whether tensors are a CLIP_SF's."""
    wrapped = [key.startswith(_WRAPPER) for key in source.specs()]
    if any(wrapped) and not all(wrapped):
        raise UserError(
            f"{source.name}: has tensors beside UniIR's CLIP, as CLIP_FF has (feature fusion); "
            "only CLIP_SF can be converted."
        )
    return bool(wrapped) and all(wrapped)


def without_wrapper(source: TensorSource) -> TensorSource:
    """The tensors by OpenAI's names."""
    return DerivedSource(
        source.name,
        {
            key.removeprefix(_WRAPPER): (spec, functools.partial(source.read, key))
            for key, spec in source.specs().items()
        },
    )
