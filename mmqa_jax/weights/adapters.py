"""Adapters: the additions of LoRA without their base, as training and PEFT keep them.

The weights folder of a LoRA run holds the trained parameters alone; model.json names their base
and its fingerprint. PEFT's folder (huggingface/peft, src/peft/tuners/lora/config.py and
utils/save_and_load.py) is turned into such a folder, and written from one, by `mmqa convert`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import llama_rules
from mmqa_jax.models.llama.lora import LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.qwen_vl.network import QwenVL
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.formats.safetensors import SafetensorsSource, TensorSource, write_safetensors
from mmqa_jax.weights.hub import find_model, is_hub_name
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, abstract_of, model_source

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
# Fields of adapter_config.json that change what an adapter computes, with the values that are read.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "lora_bias": (False, None),
}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What model.json says of an adapter, under the key `adapter`.

    Attributes:
      base: what the additions were trained on: a name of LANGUAGE_MODELS, ORG/NAME or a path.
      fingerprint: of the base's files (`folder.weights_hash`); "" where it was not at hand.
      rank, alpha, targets: see LoraConfig.
    """

    base: str
    fingerprint: str
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any], where: Path) -> Adapter | None:
        """The adapter of a model.json; None: the folder holds a whole model."""
        entry = record.get("adapter")
        if entry is None:
            return None
        try:
            read = cls(**{**entry, "targets": tuple(entry["targets"])})
            LoraConfig(read.rank, read.alpha, read.targets)
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{where}, key adapter: base, fingerprint, rank, alpha and targets were expected; "
                "copy the folder again."
            ) from error
        return read

    @property
    def lora(self) -> LoraConfig:
        """The additions; the base is held as it is loaded."""
        return LoraConfig(self.rank, self.alpha, self.targets, base="float32")

    def base_path(self, where: Path) -> Path:
        """Where the base lies.

        Args:
          where: the adapter's folder, for messages.
        """
        if self.base in LANGUAGE_MODELS:
            path = LANGUAGE_MODELS[self.base]()
        elif is_hub_name(self.base):
            path = find_model(self.base, f"{where}: base")
        else:
            path = Path(self.base)
            if not path.exists():
                raise UserError(
                    f"{where}: is an adapter of {self.base}, which is not there; put the base "
                    "there, or change `base` in model.json and delete SHA256SUMS beside it."
                )
        return path


def with_additions(base: nnx.Module, lora: LoraConfig) -> nnx.Module:
    """A model whose language model has additions, which are zero; in place."""
    add_lora(language_model(base), lora, rngs=nnx.Rngs())
    return base


def abstract_additions(
    build: Callable[..., nnx.Module], config: Any, lora: LoraConfig
) -> nnx.State:
    """Shapes of what is added to the model that `build(config, rngs=...)` makes."""

    def adapted(config: Any, rngs: nnx.Rngs) -> nnx.Module:
        return with_additions(build(config, rngs=rngs), lora)

    _, state = abstract_of(adapted, config)
    leaves = [(path, leaf) for path, leaf in nnx.to_flat_state(state) if is_added(path)]
    return nnx.from_flat_state(leaves)


def language_model(model: nnx.Module) -> Llama:
    """The LLaMA that a model is, or has."""
    if isinstance(model, Llama):
        return model
    if isinstance(model, QwenVL):
        return model.llama
    raise UserError(f"LoRA: a {type(model).__name__} takes no additions; name a LLaMA or Qwen-VL.")


def merged(
    base: nnx.Module, adapter: Adapter, read: Callable[[nnx.State], nnx.State]
) -> nnx.Module:
    """A base with an adapter's additions in its kernels; the base is used up.

    Args:
      read: abstract parameters of the model with additions -> those that the adapter has, read.
    """
    model = with_additions(base, adapter.lora)
    nnx.update(model, read(nnx.state(model, nnx.Param)))
    if isinstance(model, QwenVL):
        model.llama = merge_lora(model.llama, consume=True)
        return model
    return merge_lora(model, consume=True)


# PEFT's folders.


def is_peft(path: str | os.PathLike) -> bool:
    """Whether a path is a folder that PEFT's `save_pretrained` wrote."""
    return (Path(path) / PEFT_CONFIG).is_file()


def open_peft(folder: Path) -> tuple[Adapter, TensorSource]:
    """A PEFT folder of LoRA over a LLaMA or a relative; headers are read."""
    file = folder / PEFT_CONFIG
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: is not an object; fetch the file again.")
    for key, values in _PLAIN.items():
        if config.get(key) not in values:
            raise UserError(
                f"{file}: {key} is {config.get(key)!r}, and plain LoRA with {values[0]!r} is read; "
                "merge the adapter with PEFT's merge_and_unload, and convert the model."
            )
    rank, alpha, base = (config.get(key) for key in ("r", "lora_alpha", "base_model_name_or_path"))
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not isinstance(rank, int) or rank < 1 or not is_number or not isinstance(base, str):
        raise UserError(
            f"{file}: r, lora_alpha and base_model_name_or_path were expected, a number above 0, a "
            "number and a name; fetch the file again."
        )
    if config.get("use_rslora"):  # its factor is alpha / sqrt(r)
        alpha = alpha * math.sqrt(rank)
    source = SafetensorsSource(folder / PEFT_WEIGHTS)
    linears = {rule.key.split(".")[-2]: _linear(rule) for rule in _kernels(LlamaConfig())}
    names = {key.split(".")[-3] for key in source.specs()}
    if unknown := sorted(names - linears.keys()):
        raise UserError(
            f"{folder / PEFT_WEIGHTS}: changes {', '.join(unknown)}, and LoRA of "
            f"{', '.join(linears)} is read; merge the adapter with PEFT's merge_and_unload, and "
            "convert the model."
        )
    targets = tuple(linear for name, linear in linears.items() if name in names)
    return Adapter(base, "", rank, float(alpha), targets), source


def write_peft(
    folder: Path, config: LlamaConfig, adapter: Adapter, additions: nnx.State
) -> list[str]:
    """Writes an adapter as PEFT reads it; returns the names of the files.

    Args:
      additions: lora_a and lora_b of all targets.
    """
    source = model_source(additions, peft_map(config, adapter.targets))
    specs = source.specs()
    write_safetensors(folder / PEFT_WEIGHTS, specs, ((key, source.read(key)) for key in specs))
    kernels = {_linear(rule): rule.key.split(".")[-2] for rule in _kernels(config)}
    write_json(
        folder / PEFT_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": adapter.base,
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": sorted(kernels[target] for target in adapter.targets),
            "inference_mode": True,
        },
    )
    return [PEFT_CONFIG, PEFT_WEIGHTS]


def peft_map(config: LlamaConfig, targets: tuple[str, ...]) -> KeyMap:
    """PEFT's keys: `base_model.model.` before the layer's name, `.lora_A.weight` [r, in] and
    `.lora_B.weight` [out, r] behind it."""
    rules = []
    for rule in _kernels(config):
        if _linear(rule) in targets:
            key, path = rule.key.removesuffix(".weight"), rule.path.removesuffix("/kernel")
            # B's rows are the projection's, and are in the order of its.
            for part, transform in (("A", TRANSPOSE), ("B", rule.transform)):
                name = f"{_PEFT_PREFIX}{key}.lora_{part}.weight"
                rules.append(Rule(name, f"{path}/lora_{part.lower()}", transform))
    return KeyMap(rules)


def _kernels(config: LlamaConfig) -> list[Rule]:
    """The rules of a layer's projections, of transformers' layout."""
    return [
        rule
        for rule in llama_rules(config)
        if rule.path.startswith("layers/") and rule.path.endswith("/kernel")
        and _linear(rule) in config.linears
    ]  # fmt: skip


def _linear(rule: Rule) -> str:
    return rule.path.split("/")[1]


def is_added(path: tuple[Any, ...]) -> bool:
    """Whether a parameter's path is that of an addition."""
    return path[-1] in ("lora_a", "lora_b")
