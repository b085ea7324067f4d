"""LoRA's additions as an adapter keeps them: without their base, in PEFT's names or in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import llama_rules
from mmqa_jax.models.llama.lora import Additions, LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.weights.adapters import Adapter
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, abstract_of
from mmqa_jax.weights.registry import architecture_of, nouns

_PEFT_PREFIX = "base_model.model."


def _with_additions(base: nnx.Module, adapter: Adapter) -> nnx.Module:
    """A model whose language model has additions, which are zero; in place."""
    lora = LoraConfig(adapter.rank, adapter.alpha, adapter.targets, base="float32")
    add_lora(language_model(base), lora, rngs=nnx.Rngs())
    return base


def abstract_additions(
    build: Callable[..., nnx.Module], config: Any, adapter: Adapter
) -> nnx.State:
    """Shapes of what is added to the model that `build(config, rngs=...)` makes."""

    def adapted(config: Any, rngs: nnx.Rngs) -> nnx.Module:
        return _with_additions(build(config, rngs=rngs), adapter)

    _, state = abstract_of(adapted, config)
    leaves = [x for x in nnx.to_flat_state(state) if x[0][-1] in ("lora_a", "lora_b")]
    return nnx.from_flat_state(leaves)


def language_model(model: nnx.Module) -> Llama:
    """The LLaMA that a model is, or has."""
    if isinstance(model, Llama):
        return model
    if (entry := architecture_of(model)) is not None and entry.lora:
        return model.llama
    raise UserError(f"LoRA: a {type(model).__name__} takes no additions; name a {nouns('lora')}.")


def merged(
    base: nnx.Module, adapter: Adapter, read: Callable[[nnx.State], nnx.State]
) -> nnx.Module:
    """A base with an adapter's additions in its kernels; the base is used up.

    Args:
      read: abstract parameters of the model with additions -> those that the adapter has, read.
    """
    model = _with_additions(base, adapter)
    nnx.update(model, read(nnx.state(model, nnx.Param)))
    whole = merge_lora(language_model(model), consume=True)
    if isinstance(model, Llama):
        return whole
    model.llama = whole
    return model


def served(adapter: Adapter, state: nnx.State) -> Additions:
    """An adapter's parameters as an engine adds them beside others'."""
    matrices: dict[str, dict[str, Any]] = {}
    for path, matrix in nnx.to_flat_state(state):
        matrices.setdefault(path[-2], {})[path[-1]] = jax.device_get(matrix.get_value())
    both = {target: (pair["lora_a"], pair["lora_b"]) for target, pair in matrices.items()}
    return Additions(adapter.alpha / adapter.rank, both)


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


def peft_linears(config: LlamaConfig | None = None) -> Mapping[str, str]:
    """PEFT's names of a layer's projections -> ours."""
    return {rule.key.split(".")[-2]: _linear(rule) for rule in _kernels(config or LlamaConfig())}


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
