"""FLOPs of the products of a compiled program, from their shapes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

import numpy as np

from tests.hlo.text import Array, Instruction


def dot_flops(one: Instruction, left: Array) -> float:
    """2 x elements of the result x length of the contraction."""
    listed = one.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    contracted = math.prod(left.shape[int(n)] for n in listed.split(",") if n)
    return 2.0 * one.arrays[0].size * contracted


def convolution_flops(one: Instruction, left: Array, right: Array) -> float:
    """Products of real inputs only, as XLA counts: the TPU compiler writes batched dots as dilated
    convolutions, most of whose window lies on padding."""
    labels = one.attribute(r"dim_labels=(\S+?)(?:,|\s|$)") or ""
    inputs, rest = labels.split("_")
    kernel, outputs = rest.split("->")
    result = one.arrays[0].shape
    window = dict(re.findall(r"(\w+)=([\w\-]+)", one.attribute(r"window=\{([^}]*)\}") or ""))
    total = 2.0 * right.shape[kernel.index("i")] * result[outputs.index("f")]
    total *= result[outputs.index("b")]
    for place, digit in enumerate(sorted(c for c in inputs if c.isdigit())):
        total *= _valid_positions(
            size=int(_of_dimension(window, "size", place, "1")),
            stride=int(_of_dimension(window, "stride", place, "1")),
            pad=int(_of_dimension(window, "pad", place, "0_0").split("_")[0]),
            input_dilation=int(_of_dimension(window, "lhs_dilate", place, "1")),
            kernel_dilation=int(_of_dimension(window, "rhs_dilate", place, "1")),
            inputs=left.shape[inputs.index(digit)],
            outputs=result[outputs.index(digit)],
        )
    return total


def _of_dimension(window: Mapping[str, str], key: str, place: int, default: str) -> str:
    if key not in window:
        return default
    return window[key].split("x")[place]


def _valid_positions(
    *,
    size: int,
    stride: int,
    pad: int,
    input_dilation: int,
    kernel_dilation: int,
    inputs: int,
    outputs: int,
) -> int:
    """Pairs (output, place in the window) that meet a real input along one dimension."""
    starts = np.arange(outputs) * stride - pad
    count = 0
    for place in range(size):
        at = starts + place * kernel_dilation
        real = (at >= 0) & (at <= (inputs - 1) * input_dilation) & (at % input_dilation == 0)
        count += int(real.sum())
    return count


def gemm_flops(one: Instruction, left: Array) -> float:
    """A cuBLAS or oneDNN product: dimension numbers stand in the backend's config."""
    found = re.search(r"\{.*\}", one.attributes[one.attributes.find("backend_config=") :])
    numbers: list[int] = []
    if found is not None:
        listed = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', found[0])
        numbers = [int(n) for n in json.loads(listed[1])] if listed else []
    contracted = math.prod(left.shape[n] for n in numbers) if numbers else left.shape[-1]
    return 2.0 * one.arrays[0].size * contracted


def attention_flops(queries: Array, keys: Array, *, backward: bool) -> float:
    """cuDNN's attention of [B, Lq, heads, D] to [B, Lk, kv_heads, D], as if no score were masked:
    scores and values; backward the scores again, and the gradients of all four factors."""
    products = 5 if backward else 2
    return 2.0 * products * queries.size * keys.shape[1]
