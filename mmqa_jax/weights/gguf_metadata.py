"""What the readers of GGUF files of several architectures have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.published_keys import check_keys


def check_metadata(
    source: GGUFSource, of: str, read: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Checks that no metadata of an architecture changes what is computed without being read.

    Args:
      source: the file.
      of: in front of the architecture's keys; ends in a dot.
      read: keys, without `of`, that are read or harmless.
      fixed: keys, without `of`, that have only these values here.
    """
    known = {f"{of}{key}": values for key, values in fixed.items()}
    for key in source.metadata_keys():
        if key.startswith(of) and key.removeprefix(of) not in read:
            check_keys({key: source.metadata(key)}, source.name, read=(), fixed=known)


def vocabulary_of(source: GGUFSource) -> int:
    """Rows of the embedding table."""
    specs = source.specs()
    if "token_embd.weight" not in specs:
        raise UserError(f"{source.name}: holds no token_embd.weight; fetch the file again.")
    return specs["token_embd.weight"].shape[0]


def layers_of(source: GGUFSource, key: str, default: int | None = None) -> int:
    """A number of layers."""
    layers, most = source.integer(key, default), len(source.specs())
    if not 1 <= layers <= most:
        raise UserError(
            f"{source.name}: {key} is {layers:,}, expected 1 to {most:,}, the number of the file's "
            "tensors; fetch the file again."
        )
    return layers


def heads_of(source: GGUFSource, of: str) -> int:
    """Heads of a layer."""
    heads = source.integer(f"{of}attention.head_count")
    if heads < 1:
        raise UserError(
            f"{source.name}: {of}attention.head_count is {heads}, expected at least 1; convert the "
            "model again."
        )
    return heads


def head_size_of(source: GGUFSource, of: str, usual: int) -> int:
    """Dimensions of a head, `usual` where nothing says it."""
    size = source.integer(f"{of}attention.key_length", usual)
    values = source.integer(f"{of}attention.value_length", size)
    if values != size:
        raise UserError(
            f"{source.name}: {of}attention.value_length is {values}, a head has {size}; use "
            "a model whose keys and values are of one size."
        )
    return size
