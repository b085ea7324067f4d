"""Matrices that a checkpoint keeps in 4 or 8 bits, read as whole ones.

FP8 (DeepSeek, Qwen, Mistral, Meta), compressed-tensors (vLLM), ModelOpt (NVIDIA), AWQ, GPTQ and
bitsandbytes keep a code for each number, and for blocks of numbers a scale and perhaps a zero; a
number is (value of its code - zero) * scale. This module computes that in float32, one matrix at a
time and a block of rows at a time, and rounds it to the type that is asked for. Or it gives codes,
scales and zeros as tensors of their own (`Held`), for a model that multiplies by them.

Layouts: compressed_tensors/compressors and quantization/lifecycle/forward.py, AutoAWQ
awq/utils/packing_utils.py, AutoGPTQ qlinear (zeros are one less in its version 1), bitsandbytes
functional.py (QuantState), transformers integrations/finegrained_fp8.py, fbgemm_fp8.py, mxfp4.py
(gpt-oss).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

_BLOCK = 2**18  # numbers that are made whole together, so that they stay in a core's cache
# Scales of activations and of caches, which are not rounded here.
_UNUSED = (
    *("input_scale", "activation_scale", "output_scale", "input_global_scale"),
    *("input_zero_point", "output_zero_point", ".k_scale", ".v_scale", ".q_scale"),
)


class Matrix(NamedTuple):
    """One matrix in memory, as its checkpoint keeps it."""

    # Rows of it -> the values of their codes, float32 [rows, columns].
    codes: Callable[[slice], np.ndarray]
    size: tuple[int, int]  # its rows and columns
    scale: np.ndarray  # float32 [R, C]
    row: np.ndarray  # the row of `scale` that each row has, int [rows]
    # The column of `scale` that each column has, int [columns], or how many share one.
    column: np.ndarray | int
    zero: np.ndarray | float = 0.0  # as `scale`, or a number
    is_turned: bool = False  # whether its rows are the published matrix's columns

    def whole(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The numbers, in the shape and type that are asked for."""
        rows, columns = self.size
        numbers = np.empty(self.size, dtype)
        step = max(1, _BLOCK // columns)
        for first in range(0, rows, step):
            block = slice(first, min(rows, first + step))
            values = self.codes(block)
            if isinstance(self.zero, np.ndarray):
                values -= self._spread(self.zero, block)
            elif self.zero:
                values -= self.zero
            with np.errstate(over="ignore"):  # infinite numbers are refused where they are read
                values *= self._spread(self.scale, block)
            numbers[block] = values
        return (numbers.T if self.is_turned else numbers).reshape(shape)

    def part(self, name: str, held: Held) -> np.ndarray:
        """Codes [out, in], or scales or zeros [out, groups], in the types that `held` says."""
        rows, columns = self.size
        if name == "codes":
            whole = np.empty(self.size, held.dtype)
            step = max(1, _BLOCK // columns)
            for first in range(0, rows, step):
                block = slice(first, min(rows, first + step))
                whole[block] = self.codes(block) - np.float32(held.offset)
            return whole.T if self.is_turned else whole
        grid = self.scale if name == "scale" else self.zero - np.float32(held.offset)
        if self.is_turned:
            return grid[self.row[:: held.group]].T.astype(held.type_of(name))
        grid = grid[self.row]
        if grid.shape[1] > 1:
            column = self.column
            column = np.arange(columns) // column if isinstance(column, int) else column
            if (column != np.repeat(column[:: held.group], held.group)).any():
                raise UserError(
                    "quantization_config: desc_act is false, and a g_idx has inputs of a group "
                    "apart; leave engine.weights=published out, with which matrices stay in codes."
                )
            grid = grid[:, column[:: held.group]]
        return np.broadcast_to(grid, (rows, columns // held.group)).astype(held.type_of(name))

    def _spread(self, grid: np.ndarray, block: slice) -> np.ndarray:
        """A grid's values at each number of a block of rows, or what broadcasts to them."""
        grid = grid[self.row[block]]
        if grid.shape[1] == 1:
            return grid
        if not isinstance(self.column, int):
            return np.take(grid, self.column, axis=1)
        spread = grid if self.column == 1 else np.repeat(grid, self.column, axis=1)
        return spread[:, : self.size[1]]


class Unfit(UserError):
    """The tensors of a matrix are not those that a `Layout` says."""


class Parts:
    """The tensors that make one matrix: its codes, and by name what stands beside them."""

    def __init__(self, source: TensorSource, keys: Mapping[str, str], specs: Mapping[str, Any]):
        self.keys, self._source, self._specs = keys, source, specs

    def shape(self, part: str) -> tuple[int, ...]:
        """The shape of a part; Unfit if it is not there."""
        if part not in self.keys:
            self.unfit(part, f"has no {part} beside it")
        return tuple(self._specs[self.keys[part]].shape)

    def dtype(self, part: str) -> str:
        """The name of the type of a part that is there."""
        return self._specs[self.keys[part]].dtype.name

    def read(self, part: str) -> np.ndarray:
        """Reads a part that is there."""
        return self._source.read(self.keys[part])

    def numbers(self, part: str) -> np.ndarray:
        """Reads a part that is there as float32; bytes are exponents, float8_e8m0."""
        values = self.read(part)
        return _values(values.view("float8_e8m0fnu") if values.dtype == np.uint8 else values)

    def matrix(self) -> tuple[int, int]:
        """The shape of codes that are a matrix."""
        shape = self.shape("codes")
        if len(shape) != 2:
            self.unfit("codes", f"has the shape {shape}, expected a matrix")
        return shape

    def check(self, part: str, *shapes: tuple[int, ...]) -> None:
        """Raises Unfit unless a part has one of these shapes, axes of one number aside."""
        plain = [tuple(size for size in shape if size != 1) for shape in shapes]
        if tuple(size for size in self.shape(part) if size != 1) not in plain:
            self.unfit(part, f"has the shape {self.shape(part)}, expected {shapes[0]}")

    def unfit(self, part: str, what: str) -> None:
        """Refuses a part."""
        raise Unfit(
            f"{self._source.name}: {self.keys.get(part, self.keys['codes'])} {what}, as "
            f"quantization_config and {self.keys['codes']} say; fetch the checkpoint again."
        )


@dataclasses.dataclass(frozen=True)
class Held:
    """A matrix that stays in its codes."""

    dtype: np.dtype  # of the codes, which lie in the matrix's own shape
    group: int  # inputs that share a scale; it divides them
    offset: int = 0  # what is taken from codes and zeros, so that integers are signed
    zero: bool = False  # whether zeros differ from the offset
    scale: str = "float32"  # the type of scales

    @classmethod
    def of(cls, dtype: Any, columns: int, group: int, **more: Any) -> Held:
        """For a matrix of so many inputs, of which `group` (0: all) share a scale, the last may be
        fewer."""
        return cls(np.dtype(dtype), math.gcd(columns, group or columns), **more)

    def type_of(self, part: str) -> np.dtype:
        """The type of `codes`, `scale` or `zero`."""
        return self.dtype if part == "codes" else np.dtype(self.scale if part == "scale" else "i1")

    def spec(self, part: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Shape and type of a part of a matrix of this shape [..., out, in]."""
        width = shape[-1] if part == "codes" else shape[-1] // self.group
        return jax.ShapeDtypeStruct((*shape[:-1], width), self.type_of(part))


class Opened(NamedTuple):
    """A matrix whose headers were read: its shape, what reads it, and how it may stay in codes
    (None: it may not)."""

    shape: tuple[int, ...]
    read: Callable[[], Matrix]
    held: Held | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a method keeps a matrix."""

    # How the name of the codes ends, where the whole matrix's name has `weight`; "": it is that
    # name.
    codes: str
    dtypes: tuple[str, ...]  # the types that the codes have
    # What stands beside them -> how its name ends in the place of `codes`, or otherwise.
    parts: Mapping[str, tuple[str, ...]]
    needed: tuple[str, ...]  # the parts without which there is no matrix
    open: Callable[[Parts], Opened]  # reads shapes, and refuses what does not fit
    whole: str = "weight"  # how the name of the whole matrix ends in the place of `codes`
    turned: bool = False  # whether the whole matrix of that name is the other way, [..., in, out]

    def parts_of(self, key: str, source: TensorSource, specs: Mapping[str, Any]) -> Parts | None:
        """The parts of the matrix whose codes `key` names; None: `key` names no codes."""
        if not key.endswith(self.codes) or specs[key].dtype.name not in self.dtypes:
            return None
        if any(key.endswith(ends) for ends in self.parts.values()):
            return None  # what stands beside codes may have their type
        stem = key.removesuffix(self.codes)
        keys = {"codes": key}
        for part, ends in self.parts.items():
            keys |= [(part, stem + end) for end in ends if stem + end in specs]
        return Parts(source, keys, specs)


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def _numbers(codes: np.ndarray, values: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """The numbers that codes stand for, float32 [.., as many as are in its bytes].

    Args:
      codes: of any type, [.., n].
      values: of each code, float32 [4, 16 or 256], of which a byte holds 4, 2 or 1.
      high_first: whether the first of a byte's codes has the highest bits.
    """
    bits = len(values).bit_length() - 1
    of_byte = values[(np.arange(256)[:, None] >> np.arange(0, 8, bits)) & (2**bits - 1)]
    of_byte = np.ascontiguousarray(of_byte[:, ::-1] if high_first else of_byte)
    together = of_byte.view({8: "f4", 4: "f8", 2: "c16"}[bits])[:, 0]  # one look-up a byte
    in_bytes = np.ascontiguousarray(codes).reshape(*codes.shape, 1).view(np.uint8)
    return np.take(together, in_bytes).view(np.float32).reshape(*codes.shape[:-1], -1)


def _unsigned(bits: int) -> np.ndarray:
    return np.arange(2**bits, dtype=np.float32)


def _values(codes: np.ndarray) -> np.ndarray:
    """Codes of eight bits as float32; other numbers alike."""
    if codes.dtype.itemsize > 1:
        return codes.astype(np.float32)
    of_bytes = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)
    return _numbers(codes, of_bytes).reshape(codes.shape)


def _shared(count: int, size: int, stacks: int = 1) -> np.ndarray:
    """Of each of `stacks` times `count` rows, which row of a grid it has if `size` share one."""
    numbers = np.arange(count) // size
    return (numbers + np.arange(stacks)[:, None] * -(-count // size)).reshape(-1)


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """How many blocks a matrix, or a stack of them, has; a block of 0 is a whole axis."""
    sizes = (size or whole for size, whole in zip(block, shape[-2:], strict=True))
    return *shape[:-2], *(-(-whole // size) for whole, size in zip(shape[-2:], sizes, strict=True))


def plain(block: tuple[int, int], ends: tuple[str, ...] = ("_scale",), dtypes=FLOAT8) -> Layout:
    """Codes of eight bits in the matrix's own shape, and a scale for each block of it.

    Args:
      block: rows and columns that share a scale; 0 is all.
      ends: how the scale's name ends, behind the matrix's.
      dtypes: see Layout.
    """

    def opened(parts: Parts) -> Opened:
        shape = parts.shape("codes")
        if len(shape) < 2:
            parts.unfit("codes", f"has the shape {shape}, expected a matrix")
        grid = _grid(shape, block)
        stacks, rows, columns = math.prod(shape[:-2]), *shape[-2:]
        for part in ("scale", "zero"):
            if part in parts.keys:
                parts.check(part, grid)

        def read() -> Matrix:
            codes = parts.read("codes").reshape(-1, columns)
            grids = {
                part: parts.numbers(part).reshape(-1, grid[-1])
                for part in ("scale", "zero")
                if part in parts.keys
            }
            row = _shared(rows, block[0] or rows, stacks)
            column = block[1] or columns
            return Matrix(lambda part: _values(codes[part]), codes.shape, grids.pop("scale"), row,
                          column, **grids)  # fmt: skip

        held = Held.of(
            parts.dtype("codes"),
            columns,
            block[1],
            zero="zero" in parts.keys,
            scale="bfloat16" if parts.dtype("scale") == "bfloat16" else "float32",
        )
        return Opened(shape, read, held)

    return Layout("", dtypes, {"scale": ends, "zero": ("_zero_point",)}, ("scale",), opened)


def packed(bits: int, group: int, *, symmetric: bool) -> Layout:
    """compressed-tensors' integers of `bits` in words along a row; `group` columns share a scale.

    Codes are the integers plus half of their range, zeros too, which are packed along a column.
    """
    half = 2 ** (bits - 1)
    ends = {name: (f"weight_{name}",) for name in ("scale", "shape", "g_idx")}
    ends["zero"] = ("weight_zero_point",)

    def opened(parts: Parts) -> Opened:
        rows, words = parts.matrix()
        shape = rows, words * 32 // bits
        grid = _grid(shape, (1, group))
        parts.check("scale", grid)
        of_zeros = -(-shape[0] * bits // 32), grid[1]
        if "zero" in parts.keys:
            parts.check("zero", of_zeros, grid)
        if "g_idx" in parts.keys:
            parts.check("g_idx", shape[1:])

        def read() -> Matrix:
            if "shape" in parts.keys and tuple(parts.read("shape")) != shape:
                parts.unfit("shape", f"is {tuple(map(int, parts.read('shape')))}, not {shape}")
            codes, scale = parts.read("codes"), parts.numbers("scale").reshape(grid)
            zero: np.ndarray | float = half
            if "zero" in parts.keys:
                zero = parts.read("zero")
                if zero.dtype == np.int32:
                    zero = _numbers(zero.reshape(of_zeros).T, _unsigned(bits)).T[: shape[0]]
                else:
                    zero = zero.reshape(grid).astype(np.float32) + half
            column: np.ndarray | int = group or shape[1]
            if "g_idx" in parts.keys and (parts.read("g_idx") >= 0).all():  # -1: not in use
                column = _indexes(parts, grid[1])
            return Matrix(
                lambda rows: _numbers(codes[rows], _unsigned(bits)),
                shape, scale, np.arange(shape[0]), column, zero,
            )  # fmt: skip

        held = Held.of(_INTEGERS[bits], shape[1], group, offset=half, zero="zero" in parts.keys)
        return Opened(shape, read, None if "g_idx" in parts.keys else held)

    needed = ("scale",) if symmetric else ("scale", "zero")
    return Layout("weight_packed", ("int32",), ends, needed, opened)


_INTEGERS = {2: ml_dtypes.int4, 4: ml_dtypes.int4, 8: np.int8}  # that hold so many bits


def _indexes(parts: Parts, groups: int) -> np.ndarray:
    """The group of each input."""
    indexes = parts.read("g_idx").reshape(-1)
    if indexes.min(initial=0) < 0 or indexes.max(initial=0) >= groups:
        parts.unfit("g_idx", f"names groups beyond the {groups} that there are")
    return indexes


# Of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3): a sign, two bits of exponent, one of
# mantissa.
_FLOAT4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def float4(
    group: int, codes: str, further: str = "", *, scale: str = "weight_scale", divides: bool = False
) -> Layout:
    """Two floats of four bits a byte, the lower bits first; `group` columns share a scale.

    Args:
      group: see above.
      codes: see Layout; of `_blocks` the bytes of a group have an axis of their own, and the whole
        matrices lie the other way (gpt-oss).
      further: how the name of a scale of all ends; "": there is none, and scales are exponents.
      scale: how the name of scales ends.
      divides: whether scales are divided by it, or multiplied.
    """
    in_blocks = codes == "_blocks"

    def opened(parts: Parts) -> Opened:
        of_codes = parts.shape("codes")
        if in_blocks:
            if len(of_codes) != 4 or 2 * of_codes[-1] != group:
                parts.unfit("codes", f"has the shape {of_codes}, expected [E, out, groups, 16]")
            of_codes = (*of_codes[:2], of_codes[2] * of_codes[3])
        shape = (*of_codes[:-1], 2 * of_codes[-1])
        grid = _grid(shape, (1, group))
        parts.check("scale", grid)
        if further:
            parts.check("further", ())

        def read() -> Matrix:
            of_bytes = parts.read("codes").reshape(-1, shape[-1] // 2).view(np.uint8)
            scale = parts.numbers("scale").reshape(-1, grid[-1])
            if further:
                of_all = parts.numbers("further").reshape(())
                scale = scale / of_all if divides else scale * of_all
            return Matrix(
                lambda rows: _numbers(of_bytes[rows], _FLOAT4),
                (len(of_bytes), shape[-1]), scale, np.arange(len(of_bytes)),
                group,
            )  # fmt: skip

        held = Held.of(
            ml_dtypes.float4_e2m1fn, shape[-1], group, scale="float32" if further else "bfloat16"
        )
        return Opened(shape, read, held)

    parts = {"scale": (scale,), **({"further": (further,)} if further else {})}
    whole = "" if in_blocks else "weight"
    return Layout(codes, ("uint8", "int8"), parts, tuple(parts), opened, whole, in_blocks)


def awq(group: int) -> Layout:
    """AWQ's integers of four bits, a row for each input; `group` inputs share a scale, -1: all.

    A word holds eight outputs of an input: the even ones, then the odd ones.
    """

    def opened(parts: Parts) -> Opened:
        rows, words = parts.matrix()
        grid = _grid((rows, 8 * words), (max(group, 0), 1))
        parts.check("scale", grid)
        parts.check("zero", (grid[0], words))

        def in_order(words: np.ndarray) -> np.ndarray:
            numbers = _numbers(words, _unsigned(4)).reshape(len(words), -1, 2, 4)
            return numbers.swapaxes(2, 3).reshape(len(words), -1)

        def read() -> Matrix:
            words, scale = parts.read("codes"), parts.numbers("scale").reshape(grid)
            row = _shared(rows, group if group > 0 else rows)
            zero = in_order(parts.read("zero").reshape(grid[0], -1))
            size = rows, grid[1]
            return Matrix(lambda part: in_order(words[part]), size, scale, row, 1, zero, True)

        held = Held.of(ml_dtypes.int4, rows, max(group, 0), offset=8, zero=True)
        return Opened((grid[1], rows), read, held)

    ends = {"zero": ("qzeros",), "scale": ("scales",)}
    return Layout("qweight", ("int32",), ends, ("zero", "scale"), opened)


def gptq(bits: int, group: int, zero_shift: int, *, needs_g_idx: bool) -> Layout:
    """GPTQ's integers, of which a word holds several inputs of an output.

    Args:
      bits: of each.
      group: inputs that share a scale, -1: all.
      zero_shift: what is added to zeros, of which a word holds several outputs'.
      needs_g_idx: whether groups are not of inputs that follow each other.
    """

    def opened(parts: Parts) -> Opened:
        words, rows = parts.matrix()
        shape = rows, words * 32 // bits
        grid = _grid(shape, (1, max(group, 0)))
        parts.check("scale", grid[::-1])
        parts.check("zero", (grid[1], -(-rows * bits // 32)))
        if "g_idx" in parts.keys:
            parts.check("g_idx", shape[1:])

        def read() -> Matrix:
            codes = np.ascontiguousarray(parts.read("codes").T)
            column: np.ndarray | int = group if group > 0 else shape[1]
            if "g_idx" in parts.keys:
                column = _indexes(parts, grid[1])
            zero = parts.read("zero").reshape(grid[1], -1)
            zero = _numbers(zero, _unsigned(bits)).T[:rows] + np.float32(zero_shift)
            scale = parts.numbers("scale").reshape(grid[::-1]).T
            return Matrix(
                lambda rows: _numbers(codes[rows], _unsigned(bits)),
                shape, scale, np.arange(rows), column, zero,
            )  # fmt: skip

        held = Held.of(_INTEGERS[bits], shape[1], max(group, 0), offset=2 ** (bits - 1), zero=True)
        return Opened(shape, read, None if needs_g_idx else held)

    ends = {"zero": ("qzeros",), "scale": ("scales",), "g_idx": ("g_idx",)}
    needed = ("zero", "scale", *(("g_idx",) if needs_g_idx else ()))
    return Layout("qweight", ("int32",), ends, needed, opened)


def _of_blocks(parts: Parts) -> Opened:
    """bitsandbytes' four bits: the numbers of a matrix in a row, in blocks that share a scale.

    The codes stand for 16 values, the higher bits first. Scales may be rounded in their turn.
    """
    try:
        state = json.loads(parts.read("state").tobytes())
        shape, size = tuple(state["shape"]), state["blocksize"]
        blocks = math.prod(shape) // size
        nested = int(state.get("nested_blocksize", 0))
        offset = float(state["nested_offset"]) if nested else 0.0
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        parts.unfit("state", f"is not what bitsandbytes writes ({error})")
    parts.check("codes", (blocks * size // 2,))
    parts.check("absmax", (blocks,))
    parts.check("quant_map", (16,))
    if nested:
        parts.check("nested_absmax", (-(-blocks // nested),))
        parts.check("nested_quant_map", (256,))

    def read() -> Matrix:
        of_bytes = parts.read("codes").reshape(blocks, size // 2)
        values, scale = parts.numbers("quant_map"), parts.read("absmax").reshape(-1)
        if nested:
            of_blocks = parts.numbers("nested_absmax")[np.arange(blocks) // nested]
            scale = parts.numbers("nested_quant_map")[scale] * of_blocks + np.float32(offset)

        return Matrix(
            lambda rows: _numbers(of_bytes[rows], values, high_first=True),
            (blocks, size), np.float32(scale)[:, None], np.arange(blocks), size,
        )  # fmt: skip

    return Opened(shape, read)


def _by_absmax(parts: Parts) -> Opened:
    """bitsandbytes' eight bits (LLM.int8): `SCB` is the largest number of each row."""
    shape = parts.matrix()
    parts.check("scale", shape[:1])

    def read() -> Matrix:
        if "format" in parts.keys and parts.read("format").any():
            parts.unfit("format", "is not that of rows")
        codes, scale = parts.read("codes"), parts.numbers("scale")[:, None] / np.float32(127)
        rows = np.arange(shape[0])
        return Matrix(lambda part: _values(codes[part]), shape, scale, rows, shape[1])

    return Opened(shape, read, Held.of(np.int8, shape[1], 0))


_STATE = "weight.quant_state.bitsandbytes__"
BITSANDBYTES = (
    Layout(
        "weight",
        ("uint8",),
        {
            "state": (f"{_STATE}nf4", f"{_STATE}fp4"),
            **{
                part: (f"weight.{part}",)
                for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
            },
        },
        ("state", "absmax", "quant_map"),
        _of_blocks,
    ),
    Layout(
        "weight",
        ("int8",),
        {"scale": ("SCB",), "format": ("weight_format",)},
        ("scale",),
        _by_absmax,
    ),
)


def whole_matrices(
    source: TensorSource, layouts: list[Layout], dtype: np.dtype, where: str, part: str = "whole"
) -> TensorSource:
    """The tensors of a checkpoint under the names of an unrounded one; headers only are read.

    Args:
      source: the checkpoint.
      layouts: how its matrices may be kept; the one that a matrix's tensors fit is its own.
      dtype: of the matrices that are made whole. Other tensors keep theirs.
      where: what messages call the place that says so.
      part: "whole", or what is read in place of matrices that may stay in codes: their `codes`,
        `scale` or `zero` (which those without zeros lack), see `Held`.
    """
    specs, taken = source.specs(), set()
    tensors: dict[str, tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]] = {}
    for key in specs:
        of_layouts = [(layout, layout.parts_of(key, source, specs)) for layout in layouts]
        of_layouts = [(layout, parts) for layout, parts in of_layouts if parts is not None]
        if not of_layouts:
            continue
        layout, parts, matrix = _opened(of_layouts)
        name = key.removesuffix(layout.codes) + layout.whole if layout.codes else key
        taken |= {*parts.keys.values()}
        tensors[name] = _as(part, matrix, dtype, layout.turned)
    if not tensors:
        raise UserError(
            f"{where} says that matrices are rounded, and none of {source.name} is; take it out of "
            "the file if they are whole, or fetch the checkpoint again."
        )
    for key, spec in specs.items():
        if key in taken or key.endswith(_UNUSED):
            continue
        if spec.dtype.name.startswith("float8"):
            raise UserError(
                f"{source.name}: {key} is {spec.dtype.name}, which {where} does not name; use "
                "another checkpoint."
            )
        if key in tensors:
            raise UserError(f"{source.name}: {key} is there twice, rounded and whole; keep one.")
        tensors[key] = spec, functools.partial(source.read, key)
    return DerivedSource(source.name, tensors)


def _as(
    part: str, matrix: Opened, dtype: np.dtype, turned: bool
) -> tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]:
    """Spec and reader of a whole matrix, or of a part of one that stays in its codes."""
    held = matrix.held
    if part == "whole" or held is None or (part == "zero" and not held.zero):
        spec = jax.ShapeDtypeStruct(matrix.shape, dtype)

        def read() -> np.ndarray:
            return matrix.read().whole(matrix.shape, dtype)
    else:
        spec = held.spec(part, matrix.shape)

        def read() -> np.ndarray:
            return matrix.read().part(part, held).reshape(spec.shape)

    if not turned:
        return spec, read
    shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])
    return jax.ShapeDtypeStruct(shape, spec.dtype), lambda: read().swapaxes(-1, -2)


def _opened(candidates: list[tuple[Layout, Parts]]) -> tuple[Layout, Parts, Opened]:
    """The only one of several layouts that a matrix's tensors fit."""
    fitting, first = [], None
    for layout, parts in candidates:
        try:
            lacking = [part for part in layout.needed if part not in parts.keys]
            if lacking:
                ends = " or ".join(layout.parts[lacking[0]])
                parts.unfit("codes", f"has no tensor {ends} beside it")
            fitting.append((layout, parts, layout.open(parts)))
        except Unfit as error:
            first = first or error
    if not fitting:
        raise first
    if len({matrix.shape for _, _, matrix in fitting}) > 1:
        parts.unfit("codes", "has tensors of several config_groups, by their shapes")
    return fitting[0]
