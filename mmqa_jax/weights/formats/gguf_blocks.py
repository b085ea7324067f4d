"""Dequantizes the blocks of GGUF tensors.

A block is a fixed number of values: small integers, a scale for each group of them, and in some
kinds a minimum for each group. Layouts: llama.cpp ggml/src/ggml-common.h and ggml-quants.c; the
values are those of the package `gguf` to the last bit, since each product is exact in float32.
Kinds that are rare in published files (IQ2, IQ3, TQ, NVFP4) are left to that package, which is
imported for them alone.

The others are written once for NumPy and JAX: XLA makes one loop of what NumPy does in ten.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError

Bytes = Any  # [blocks, bytes], uint8, of NumPy or JAX
_PIECE = 1 << 18  # values that are dequantized at a time


class Groups(NamedTuple):
    """Blocks taken apart; a value is its integer times its group's scale, less the group's minimum.

    Attributes:
      integers: [blocks, ..., values of the last axis], of 8 bits. The axes are those in which XLA
        makes loops without divisions.
      scales: [blocks, groups], float32.
      minima: [blocks, groups], float32; None: all 0.
    """

    integers: Any
    scales: Any
    minima: Any = None


class Kind(NamedTuple):
    """A kind of tensors.

    Attributes:
      name: as gguf.GGMLQuantizationType spells it.
      values: of a block.
      bytes: of a block.
      split: takes blocks apart; None: plain numbers, or a kind that the package dequantizes.
    """

    name: str
    values: int
    bytes: int
    split: Callable[[Bytes], Groups] | None = None

    @property
    def piece(self) -> int:
        """Blocks that are dequantized at a time."""
        return _PIECE // self.values


def dequantize(kind: Kind, raw: np.ndarray, out: np.ndarray) -> None:
    """Dequantizes up to `kind.piece` blocks, [bytes] of uint8, into [values] of float32."""
    if kind.name in _PLAIN:
        out[:] = raw.view(_PLAIN[kind.name])
    elif kind.name == "BF16":  # the upper halves of float32
        words = out.view(np.uint32)
        words[:] = raw.view("<u2")
        words <<= np.uint32(16)
    elif kind.split is None:
        from gguf import GGMLQuantizationType, quants

        rows = raw.reshape(-1, kind.bytes)
        out[:] = quants.dequantize(rows, GGMLQuantizationType[kind.name]).ravel()
    elif (device := _processor()) is None:
        with np.errstate(over="ignore", invalid="ignore"):  # as the file has them
            out[:] = _values(kind.split, raw.reshape(-1, kind.bytes)).ravel()
    else:  # one shape, which is compiled once
        piece = np.zeros(kind.piece * kind.bytes, np.uint8)
        piece[: len(raw)] = raw
        blocks = jax.device_put(piece.reshape(-1, kind.bytes), device)
        out[:] = np.asarray(_compiled(kind.split, blocks)).ravel()[: len(out)]


@functools.cache
def _processor() -> jax.Device | None:
    """The device of the processor; None where JAX may use accelerators only."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _values(split: Callable[[Bytes], Groups], blocks: Bytes) -> Any:
    """[blocks, ...], float32."""
    integers, scales, minima = split(blocks)
    of_group = next(
        axis
        for axis in range(1, integers.ndim)
        if math.prod(integers.shape[1:axis]) == scales.shape[1]
    )
    shape = (*integers.shape[:of_group], *[1] * (integers.ndim - of_group))
    values = integers.astype(np.float32) * scales.reshape(shape)
    return values if minima is None else values - minima.reshape(shape)


_compiled = jax.jit(_values, static_argnums=0)


def _unpacked(packed: Bytes, bits: int, width: int) -> Any:
    """Integers of some bits, [blocks, runs, 8 / bits, width]: the lowest bits of `width` bytes come
    first, then their next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, width)
    return (runs >> shifts) & np.uint8((1 << bits) - 1)


def _half(blocks: Bytes, start: int) -> Any:
    """The float16 at a byte of each block as [blocks, 1] of float32."""
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


def _less(integers: Any, offset: int) -> Any:
    """Integers below 128, less an offset."""
    return integers.astype(np.int8) - np.int8(offset)


def _split_q4_0(blocks: Bytes) -> Groups:
    return Groups(_less(_unpacked(blocks[:, 2:], 4, 16), 8), _half(blocks, 0))


def _split_q4_1(blocks: Bytes) -> Groups:
    return Groups(_unpacked(blocks[:, 4:], 4, 16), _half(blocks, 0), -_half(blocks, 2))


def _five_bits(high: Bytes, low: Bytes) -> Any:
    single = (high[:, :, None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return _unpacked(low, 4, 16) | (single.reshape(-1, 1, 2, 16) << np.uint8(4))


def _split_q5_0(blocks: Bytes) -> Groups:
    return Groups(_less(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16), _half(blocks, 0))


def _split_q5_1(blocks: Bytes) -> Groups:
    integers = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return Groups(integers, _half(blocks, 0), -_half(blocks, 2))


def _split_q8_0(blocks: Bytes) -> Groups:
    return Groups(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _split_q2_k(blocks: Bytes) -> Groups:
    packed = blocks[:, :16]
    integers = _unpacked(blocks[:, 16:80], 2, 32).reshape(-1, 2, 4, 2, 16)
    scales, minima = (packed & 15).astype(np.float32), (packed >> 4).astype(np.float32)
    return Groups(integers, _half(blocks, 80) * scales, _half(blocks, 82) * minima)


def _split_q3_k(blocks: Bytes) -> Groups:
    packed = blocks[:, 96:108]
    low = _unpacked(packed[:, :8], 4, 8).reshape(-1, 16)
    scales = low | (_unpacked(packed[:, 8:], 2, 4).reshape(-1, 16) << np.uint8(4))
    high = _unpacked(blocks[:, :32], 1, 32).reshape(-1, 2, 4, 32) << np.uint8(2)
    integers = _less(_unpacked(blocks[:, 32:96], 2, 32) | high, 4).reshape(-1, 2, 4, 2, 16)
    return Groups(integers, _half(blocks, 108) * _less(scales, 32).astype(np.float32))


def _six_bits(blocks: Bytes) -> tuple[Any, Any]:
    """A block's eight scales and eight minima, whose 12 bytes of six bits each are the fifth on."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    join = blocks.__array_namespace__().concatenate
    scales = join([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = join([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    d, m = _half(blocks, 0), _half(blocks, 2)
    return d * scales.astype(np.float32), m * minima.astype(np.float32)


def _split_q4_k(blocks: Bytes) -> Groups:
    return Groups(_unpacked(blocks[:, 16:], 4, 32), *_six_bits(blocks))


def _split_q5_k(blocks: Bytes) -> Groups:
    high = _unpacked(blocks[:, 16:48], 1, 32).reshape(-1, 4, 2, 32) << np.uint8(4)
    return Groups(_unpacked(blocks[:, 48:], 4, 32) | high, *_six_bits(blocks))


def _split_q6_k(blocks: Bytes) -> Groups:
    axes = (-1, 2, 2, 2, 2, 16)
    high = _unpacked(blocks[:, 128:192], 2, 32).reshape(axes) << np.uint8(4)
    integers = _less(_unpacked(blocks[:, :128], 4, 64).reshape(axes) | high, 32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Groups(integers, _half(blocks, 208) * scales)


# Values of four bits that are not evenly spaced (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
_UNEVEN = np.int8([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_E2M1 = np.int8([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # doubled
_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)  # half of it


def _looked_up(table: np.ndarray, numbers: Any) -> Any:
    return numbers.__array_namespace__().asarray(table)[numbers]


def _split_iq4_nl(blocks: Bytes) -> Groups:
    return Groups(_looked_up(_UNEVEN, _unpacked(blocks[:, 2:], 4, 16)), _half(blocks, 0))


def _split_iq4_xs(blocks: Bytes) -> Groups:
    high = blocks[:, 2:4].view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (blocks[:, 4:8, None] >> np.uint8([0, 4])) & np.uint8(15)
    scales = low.reshape(len(low), -1) | ((high.astype(np.uint8) & 3) << np.uint8(4))
    integers = _looked_up(_UNEVEN, _unpacked(blocks[:, 8:], 4, 16))
    return Groups(integers, _half(blocks, 0) * _less(scales, 32).astype(np.float32))


def _split_mxfp4(blocks: Bytes) -> Groups:
    integers = _looked_up(_E2M1, _unpacked(blocks[:, 1:], 4, 16))
    return Groups(integers, _looked_up(_E8M0, blocks[:, :1]))


_PLAIN = {"F32": "<f4", "F16": "<f2"}
# Kinds by their numbers in a file.
_KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18, _split_q4_0),
    3: Kind("Q4_1", 32, 20, _split_q4_1),
    6: Kind("Q5_0", 32, 22, _split_q5_0),
    7: Kind("Q5_1", 32, 24, _split_q5_1),
    8: Kind("Q8_0", 32, 34, _split_q8_0),
    10: Kind("Q2_K", 256, 84, _split_q2_k),
    11: Kind("Q3_K", 256, 110, _split_q3_k),
    12: Kind("Q4_K", 256, 144, _split_q4_k),
    13: Kind("Q5_K", 256, 176, _split_q5_k),
    14: Kind("Q6_K", 256, 210, _split_q6_k),
    20: Kind("IQ4_NL", 32, 18, _split_iq4_nl),
    23: Kind("IQ4_XS", 256, 136, _split_iq4_xs),
    30: Kind("BF16", 1, 2),
    39: Kind("MXFP4", 32, 17, _split_mxfp4),
}


def kind_of(number: int, place: str) -> Kind:
    """The kind of a number; UserError, which begins with `place`, for one that cannot be read."""
    if number in _KINDS:
        return _KINDS[number]
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    except ImportError as error:
        raise UserError(
            f"{place}: quantization {number} needs the package gguf; run `pip install gguf`, "
            "or convert the file to F16, Q8_0 or Q4_K_M."
        ) from error
    try:
        known = GGMLQuantizationType(number)
        values, size = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{place}: quantization {number} is not known; convert the file to F16."
        ) from error
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), known)
    except NotImplementedError as error:
        raise UserError(
            f"{place}: quantization {known.name} is not known; convert the file to F16, Q8_0 or "
            "Q4_K_M."
        ) from error
    return Kind(known.name, values, size)
