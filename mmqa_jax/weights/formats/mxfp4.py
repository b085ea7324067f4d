"""MXFP4, in which gpt-oss publishes its experts: 32 numbers of 4 bits that share a scale of 8.

OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 5.3.3: a number has a sign, two
bits of exponent and one of mantissa; a scale is a power of two. transformers
integrations/mxfp4.py says how a checkpoint keeps them: `NAME_blocks`, uint8 (E, out, in / 32, 16),
the first of a byte's two numbers in its low bits, and `NAME_scales`, uint8 (E, out, in / 32), the
exponent plus 127. Every number is exact in bfloat16 but those too small or large for it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.safetensors import TensorSource

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1
_BIAS = 127  # of a scale's exponent
_BYTES = 16  # of a block
_KEYS = {"quant_method", "modules_to_not_convert", "dequantize"}


def check_quantization(quantization: Any, where: str) -> None:
    """Raises UserError unless a config.json's `quantization_config` is MXFP4's, or none."""
    if quantization in (None, {}):
        return
    named = isinstance(quantization, Mapping)
    method = quantization.get("quant_method") if named else quantization
    if not named or method != "mxfp4":
        raise UserError(
            f"{where}: quantization_config is of {method!r}, expected mxfp4; use the checkpoint as "
            "it was published, or one in bfloat16."
        )
    if unknown := sorted(set(quantization) - _KEYS):
        raise UserError(
            f"{where}: the key {unknown[0]!r} of quantization_config is not known here and may "
            "change what the tensors mean; use the checkpoint as it was published."
        )


def check_pair(source: TensorSource, name: str) -> jax.ShapeDtypeStruct:
    """The shape (E, out, in) and type of what `read` gives; raises UserError where blocks and
    scales are not of one tensor."""
    specs = source.specs()
    blocks, scales = (specs.get(f"{name}{part}") for part in ("_blocks", "_scales"))
    if blocks is None or scales is None:
        absent = "_blocks" if blocks is None else "_scales"
        raise UserError(f"{source.name}: lacks {name}{absent}; fetch the checkpoint again.")
    bytes_ = {spec.dtype for spec in (blocks, scales)} == {np.dtype("uint8")}
    if not bytes_ or blocks.shape != (*scales.shape, _BYTES) or len(scales.shape) != 3:
        raise UserError(
            f"{source.name}: {name}_blocks are {blocks.dtype}{[*blocks.shape]}, its _scales "
            f"{scales.dtype}{[*scales.shape]}: expected bytes, [E, out, groups, {_BYTES}] and "
            "[E, out, groups]; fetch the checkpoint again."
        )
    shape = (*scales.shape[:2], 2 * _BYTES * scales.shape[2])
    return jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16)


def read(source: TensorSource, name: str, rows: slice) -> np.ndarray:
    """Some outputs of a tensor, bfloat16 (E, out, in)."""
    blocks, scales = (source.read(f"{name}{part}")[:, rows] for part in ("_blocks", "_scales"))
    whole = np.empty((*scales.shape[:2], 2 * _BYTES * scales.shape[2]), ml_dtypes.bfloat16)
    for expert, target in enumerate(whole):  # whose indices take four times a block's memory
        target[...] = decode(blocks[expert], scales[expert])
    return whole


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> bfloat16 [..., 32 * G]."""
    pairs = np.take(_pairs(), scales[..., None].astype(np.int32) * 256 + blocks)
    return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


@functools.cache
def _pairs() -> np.ndarray:
    """The two numbers of each byte with each scale, as one: uint32 [256 * 256]."""
    values = np.array([sign * x for sign in (1.0, -1.0) for x in MAGNITUDES], np.float32)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(values, np.arange(256)[:, None] - _BIAS)  # [scales, 16]
    scaled = scaled.astype(ml_dtypes.bfloat16)
    byte = np.arange(256)
    both = np.stack([scaled[:, byte & 15], scaled[:, byte >> 4]], axis=-1)
    return np.ascontiguousarray(both).view(np.uint32).reshape(-1)
