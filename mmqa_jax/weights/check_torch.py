"""transformers' side of check.py: the layers and outputs of its model of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

_STACKS = ("layer", "layers", "block", "blocks")  # names of a stack of layers


def outputs(
    folder: Path,
    kind: str,
    given: Mapping[str, np.ndarray],
    stacks: Mapping[str, str],
    ends: Callable[[Any], Mapping[str, Any]],
    *,
    dtype: str = "float32",
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loads a folder's model, runs it and forgets it.

    Args:
      kind: transformers' class.
      given: its inputs.
      stacks: name -> path of the module that holds a stack of layers; "" is the whole model.
      ends: its output -> what is compared of it.
      dtype: of parameters and arithmetic; norms and rotary angles are float32 in any case.

    Returns:
      Of each stack what goes into each layer (Qwen3-VL adds to what the one before gave), and what
      the last gives, [layers + 1, ...]; and `ends` of the output.
    """
    kind_of_model = getattr(transformers, kind)
    model = kind_of_model.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
    found: dict[str, list[np.ndarray]] = {name: [] for name in stacks}
    for name, path in stacks.items():
        layers = _layers(model.get_submodule(path))
        for layer in layers:
            layer.register_forward_pre_hook(_entering(found[name]), with_kwargs=True)
        layers[-1].register_forward_hook(_leaving(found[name]))
    inputs = {
        name: torch.from_numpy(value.astype(np.int64 if value.dtype.kind == "i" else dtype))
        for name, value in given.items()
    }
    with torch.no_grad():
        ended = {name: value.numpy() for name, value in ends(model(**inputs)).items()}
    return {name: np.stack(states) for name, states in found.items()}, ended


def _layers(module: Any) -> Any:
    """The first stack of layers in a module."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2] in _STACKS and isinstance(child, torch.nn.ModuleList):
            return child
    raise ValueError(f"{type(module).__name__} has no stack of layers")


def _entering(states: list[np.ndarray]) -> Callable[..., None]:
    def hook(module: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        entered = positional[0] if positional else named["hidden_states"]
        states.append(entered.numpy().copy())

    return hook


def _leaving(states: list[np.ndarray]) -> Callable[..., None]:
    def hook(module: Any, positional: tuple[Any, ...], left: Any) -> None:
        states.append((left[0] if isinstance(left, tuple) else left).numpy().copy())

    return hook
