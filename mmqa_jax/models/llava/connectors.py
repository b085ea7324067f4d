"""What stands between a tower and a decoder: the states of a picture become tokens.

Each kind is a module here, and says which tensors of a checkpoint it has; its name is
`LlavaConfig.connector`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common import layers
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.llama.norms import RMSNorm, unit_rms
from mmqa_jax.weights.keymap import TRANSPOSE, Rule, Transform, linear_rules, norm_rules

if TYPE_CHECKING:
    from mmqa_jax.models.llava.config import LlavaConfig

PREFIX, _PATH = "multi_modal_projector.", "projector/"
_EPS = 1e-5  # of InternVL's norm; no key of a config.json says it


class Projector(nnx.Module):
    """linear, activation, linear: the tower's width to the decoder's."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs, merged: bool = True):
        linear = functools.partial(
            layers.Linear,
            rngs=rngs,
            use_bias=config.projector_bias,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )
        width = config.llama.hidden
        inside = config.vision.width * (config.merge**2 if merged else 1)
        between = config.projector_width or width
        self.linear_1 = linear(inside, between, ("embed", "mlp"))
        self.linear_2 = linear(between, width, ("mlp", "embed"))
        self.activation = config.projector_activation

    def __call__(self, states: jax.Array) -> jax.Array:  # [..., vision width] -> [..., H]
        return self.linear_2(ACTIVATIONS[self.activation](self.linear_1(states)))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return [
            rule
            for name in ("linear_1", "linear_2")
            for rule in linear_rules(f"{PREFIX}{name}", f"{_PATH}{name}", config.projector_bias)
        ]


class NormedShuffle(Projector):
    """The states of each square of `merge` x `merge` side by side, a layer norm, then linear,
    activation, linear (InternVL)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.vision.width * config.merge**2
        self.norm = layers.LayerNorm(width, _EPS, rngs=rngs)
        self.merge = config.merge

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, states, vision width] -> [N, features, H]."""
        return super().__call__(self.norm(side_by_side(states, self.merge)))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return [*Projector.rules(config), *norm_rules(f"{PREFIX}layer_norm", f"{_PATH}norm")]


class UnitProjector(NormedShuffle):
    """The states of each unit of `merge` x `merge` patches side by side, a layer norm where the
    model has one, then linear, activation, linear (LFM2-VL)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if not config.projector_normed:
            del self.norm

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, U * merge^2, vision width], unit by unit -> [N, U, H]."""
        units = states.reshape(len(states), -1, self.merge**2 * states.shape[-1])
        return Projector.__call__(self, self.norm(units) if hasattr(self, "norm") else units)

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return (NormedShuffle if config.projector_normed else Projector).rules(config)


class PatchMerger(Projector):
    """An RMS norm of each patch, a linear without bias that makes one of `merge` x `merge`, then
    linear, activation, linear (Mistral 3)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs, merged=False)
        width = config.vision.width
        self.norm = RMSNorm(width, config.llama.eps, rngs=rngs)
        self.joined = width * config.merge**2
        self.together = layers.Linear(
            self.joined,
            width,
            ("mlp", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, U * merge^2, vision width], unit by unit -> [N, U, H]."""
        units = self.norm(states).reshape(len(states), -1, self.joined)
        return super().__call__(self.together(units))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint, whose inputs are by channel, then patch."""
        count, width = config.merge**2, config.vision.width
        by_patch = Transform(
            lambda x: x.reshape(-1, width, count).transpose(2, 1, 0).reshape(count * width, -1),
            lambda x: x.reshape(count, width, -1).transpose(2, 1, 0).reshape(-1, width * count),
        )
        return [
            *Projector.rules(config),
            *norm_rules(f"{PREFIX}norm", f"{_PATH}norm", False),
            Rule(f"{PREFIX}patch_merger.merging_layer.weight", f"{_PATH}together/kernel", by_patch),
        ]


class Shuffle(nnx.Module):
    """The states of each square of `merge` x `merge` side by side, then a linear without bias
    (Idefics3's pixel shuffle)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        self.linear = layers.Linear(
            config.vision.width * config.merge**2,
            config.llama.hidden,
            ("mlp", "embed"),
            use_bias=config.projector_bias,
            rngs=rngs,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )
        self.merge = config.merge

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, states, vision width] -> [N, features, H]."""
        return self.linear(side_by_side(states, self.merge))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return [Rule(f"{PREFIX}proj.weight", f"{_PATH}linear/kernel", TRANSPOSE)]


class Adapter(Shuffle):
    """The states of each square of `merge` x `merge` side by side, twice a linear and GELU, then a
    linear, all without biases (Llama 4)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        width, inside = config.projector_width, config.vision.width * config.merge**2
        linear = functools.partial(
            layers.Linear,
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )
        self.adapter_1 = linear(inside, width, ("embed", "mlp"))
        self.adapter_2 = linear(width, width, ("mlp", "embed"))
        self.linear = linear(width, config.llama.hidden, ("embed", "mlp"))
        self.merge = config.merge

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, states, vision width] -> [N, features, H]."""
        gelu, x = ACTIVATIONS["gelu"], side_by_side(states, self.merge)
        return self.linear(gelu(self.adapter_2(gelu(self.adapter_1(x)))))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        adapter = "vision_tower.vision_model.vision_adapter.mlp.fc"
        return [
            *linear_rules(f"{adapter}1", f"{_PATH}adapter_1", False),
            *linear_rules(f"{adapter}2", f"{_PATH}adapter_2", False),
            *linear_rules(f"{PREFIX}linear_1", f"{_PATH}linear", False),
        ]


class Plain(Shuffle):
    """A linear of each state, with a bias (PaliGemma)."""

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return linear_rules(f"{PREFIX}linear", f"{_PATH}linear")


class Pooled(nnx.Module):
    """The mean of the states of each square of `merge` x `merge`, an RMS norm times 1 + its scale,
    then a linear without bias (Gemma 3)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        width = config.vision.width
        self.norm = RMSNorm(width, config.vision.eps, rngs=rngs, unit=True)
        self.linear = layers.Linear(
            width,
            config.llama.hidden,
            ("mlp", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )
        self.merge = config.merge

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, states, vision width] -> [N, features, H]."""
        squares = side_by_side(states, self.merge)
        pooled = squares.reshape(*squares.shape[:2], -1, states.shape[-1]).mean(2)
        return self.linear(self.norm(pooled))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return [
            Rule(f"{PREFIX}mm_soft_emb_norm.weight", f"{_PATH}norm/scale"),
            Rule(f"{PREFIX}mm_input_projection_weight", f"{_PATH}linear/kernel"),
        ]


class UnitPooled(nnx.Module):
    """The mean of the states of each unit of `merge` x `merge` patches times the root of their
    size, shifted and scaled if the tower says so, an RMS norm without a scale, then a linear
    without bias (Gemma 4)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        width = config.vision.width
        if config.vision.standardize:
            self.shift = layers.param(rngs, layers.zeros_init, (width,), ("embed",))
            self.scale = layers.param(rngs, layers.ones_init, (width,), ("embed",))
        self.linear = layers.Linear(
            width,
            config.llama.hidden,
            ("mlp", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )
        self.config = config

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, U * merge^2, vision width], unit by unit -> [N, U, H]."""
        count, vision = len(states), self.config.vision
        units = states.reshape(count, -1, self.config.merge**2, vision.width)
        pooled = units.astype(jnp.float32).mean(2) * vision.width**0.5
        if vision.standardize:
            pooled = (pooled - self.shift[...]) * self.scale[...]
        return self.linear(unit_rms(pooled.astype(states.dtype), vision.eps))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        rules = [Rule(f"{PREFIX}embedding_projection.weight", f"{_PATH}linear/kernel", TRANSPOSE)]
        if config.vision.standardize:
            rules.append(Rule("vision_tower.std_bias", f"{_PATH}shift"))
            rules.append(Rule("vision_tower.std_scale", f"{_PATH}scale"))
        return rules


class UnitNormed(nnx.Module):
    """An RMS norm of each unit without a scale, then a linear without bias (Gemma 4's 12B)."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        self.linear = layers.Linear(
            config.vision.width,
            config.llama.hidden,
            ("mlp", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(config.llama.init_stddev),
        )
        self.eps = config.vision.eps

    def __call__(self, states: jax.Array) -> jax.Array:
        """[N, U, vision width] -> [N, U, H]."""
        return self.linear(unit_rms(states, self.eps))

    @staticmethod
    def rules(config: LlavaConfig) -> list[Rule]:
        """Rules of its tensors in a checkpoint."""
        return linear_rules(f"{PREFIX}embedding_projection", f"{_PATH}linear", False)


Connector = Projector | Shuffle | Pooled | UnitPooled | UnitNormed
KINDS: Mapping[str, type[Connector]] = {
    "mlp": Projector,
    "shuffle": Shuffle,
    "plain": Plain,
    "normed_shuffle": NormedShuffle,
    "merger": PatchMerger,
    "pooled": Pooled,
    "unit_pooled": UnitPooled,
    "unit_normed": UnitNormed,
    "units": UnitProjector,
    "adapter": Adapter,
}


def side_by_side(states: jax.Array, merge: int) -> jax.Array:
    """The states of a square picture, row by row, as those of its squares of `merge` x `merge`.

    [N, s * s, D] -> [N, (s / merge)^2, merge^2 * D]; within a square row by row.
    """
    count, length, width = states.shape
    side = round(length**0.5) // merge
    states = states.reshape(count, side, merge, side, merge, width)
    return states.swapaxes(2, 3).reshape(count, side**2, merge**2 * width)
