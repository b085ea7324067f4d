"""Caffe's .caffemodel: a NetParameter message in protobuf's wire format, read for its blobs alone.

Fields by number, of caffe.proto: NetParameter layer 100, layers 2 (before 2014); LayerParameter
name 1, blobs 7; V1LayerParameter name 4, blobs 6; BlobProto num 1, channels 2, height 3, width 4,
data 5, shape 7; BlobShape dim 1. Others are skipped. Values stay in the file until they are read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError

_LAYERS = {100: (1, 7), 2: (4, 6)}  # field of the net -> fields of a layer's name and blobs
_DATA, _SHAPE, _DOUBLES = 5, 7, 8
_SIDES = (1, 2, 3, 4)  # a blob's shape as four numbers, before BlobShape
_VARINT, _EIGHT, _MESSAGE, _FOUR = 0, 1, 2, 5  # wire types
_LONGEST = 10  # bytes of a number
_MOST_SIDES, _LONGEST_SIDE = 32, 2**31 - 1  # of a blob, as Caffe has them
_NAME = 200  # bytes of a layer's name that are read


class _Field(NamedTuple):
    """One field of a message: a number, or bytes."""

    number: int
    value: int | memoryview


def read_caffemodel(path: Path) -> dict[str, list[np.ndarray]]:
    """The blobs of each layer that has any, float32, in the order of the file."""
    try:
        with open(path, "rb") as file:
            held = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise UserError(f"{path}: cannot be read ({error}); give a .caffemodel.") from error
    found: dict[str, list[np.ndarray]] = {}
    for field in _fields(held, str(path)):
        if field.number not in _LAYERS:
            continue
        name, blobs = _layer(field, str(path))
        if blobs and name in found:
            raise UserError(f"{path}: has two layers {name!r} with values; save the net again.")
        if blobs:
            found[name] = blobs
    if not found:
        raise UserError(f"{path}: holds no layer with values; give a trained net's .caffemodel.")
    return found


def _layer(field: _Field, path: str) -> tuple[str, list[np.ndarray]]:
    """Name and blobs of a layer."""
    of_name, of_blobs = _LAYERS[field.number]
    name, blobs = "", []
    for inner in _fields(_message(field, f"{path}, a layer"), f"{path}, a layer"):
        if inner.number == of_name:
            text = _message(inner, f"{path}, a layer's name")[:_NAME]
            name = bytes(text).decode("utf-8", "replace")
        elif inner.number == of_blobs:
            blobs.append(inner)
    return name, [_blob(one, f"{path}, layer {name!r}") for one in blobs]


def _blob(field: _Field, place: str) -> np.ndarray:
    values, shape, sides = [], None, {}
    for inner in _fields(_message(field, place), place):
        if inner.number == _DATA:  # packed, or a value at a time
            values.append(_message(inner, place))
        elif inner.number == _SHAPE:
            shape = _dims(_message(inner, place), place)
        elif inner.number in _SIDES and isinstance(inner.value, int):
            sides[inner.number] = inner.value
        elif inner.number == _DOUBLES:
            raise UserError(
                f"{place}: has its values in doubles; save the net in single precision."
            )
    if shape is None:
        shape = [sides.get(number, 0) for number in _SIDES] if sides else []
    if len(shape) > _MOST_SIDES or max(shape, default=0) > _LONGEST_SIDE:
        raise _damaged(place, f"a shape of {len(shape)} sides, the longest {max(shape)}")
    data = values[0] if len(values) == 1 else b"".join(values)
    if len(data) != 4 * math.prod(shape):
        raise _damaged(place, f"{len(data):,} bytes of values for the shape {tuple(shape)}")
    try:
        return np.frombuffer(data, "<f4").reshape(shape)
    except ValueError as error:  # sides of 0 and of billions
        raise _damaged(place, f"the shape {tuple(shape)}") from error


def _dims(shape: memoryview, place: str) -> list[int]:
    """Sides of a BlobShape, packed or one by one."""
    dims = []
    for field in _fields(shape, place):
        if field.number != 1:
            continue
        if isinstance(field.value, int):
            dims.append(field.value)
            continue
        at = 0
        while at < len(field.value):
            value, at = _number(field.value, at, place)
            dims.append(value)
            if len(dims) > _MOST_SIDES:
                return dims
    return dims


def _fields(message: memoryview, place: str) -> Iterator[_Field]:
    """The fields of a message, each within it."""
    at = 0
    while at < len(message):
        key, at = _number(message, at, place)
        number, kind = key >> 3, key & 7
        if not number:
            raise _damaged(place, "a field of number 0")
        if kind == _VARINT:
            value, at = _number(message, at, place)
            yield _Field(number, value)
            continue
        if kind == _MESSAGE:
            length, at = _number(message, at, place)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            raise _damaged(place, f"a field of wire type {kind}")
        if length > len(message) - at:
            raise _damaged(place, f"field {number} of {length:,} bytes, of {len(message) - at:,}")
        yield _Field(number, message[at : at + length])
        at += length


def _number(message: memoryview, at: int, place: str) -> tuple[int, int]:
    """A varint, and where the next value begins."""
    value = 0
    for count, byte in enumerate(message[at : at + _LONGEST]):
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, at + count + 1
    raise _damaged(place, "a number without an end")


def _message(field: _Field, place: str) -> memoryview:
    """A field's bytes."""
    if isinstance(field.value, int):
        raise _damaged(place, f"a number as field {field.number}")
    return field.value


def _damaged(place: str, what: str) -> UserError:
    return UserError(f"{place}: has {what}; it is no .caffemodel or damaged, fetch it again.")
