"""Rotary positions: the frequencies of a head's pairs, and their scaling for longer contexts.

Originals: transformers modeling_rope_utils.py; YaRN (Peng et al. 2023); dynamic NTK scaling
(u/emozilla 2023); LongRoPE (Ding et al. 2024), with which Phi-3 reads 128k tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.weights.config_json import check_keys, kinds

SCALINGS = ("linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
_READ = kinds(
    size_or_null="original_max_position_embeddings",
    number="factor low_freq_factor high_freq_factor",
    number_or_null="rope_theta partial_rotary_factor attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim",
    flag="truncate",
    list="short_factor long_factor",
    name="rope_type type",
)
# What a kind reads of these; of its keys transformers has no defaults for those that it needs.
_OF_KIND = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        "truncate",
    ),
    "dynamic": ("factor",),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}
_NEEDED = {
    **_OF_KIND,
    **{"yarn": ("factor",), "longrope": ("short_factor", "long_factor"), "proportional": ()},
}
_OF_ALL = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    "original_max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than in pretraining.

    `linear` divides all by `factor` (LongChat, Vicuna 16k); `llama3` (LLaMA-3.1) only the low
    ones, as the numbers below it say; `yarn` those that turn less than `beta_slow` times in the
    old context, with a ramp up to `beta_fast` times, whose ends are whole numbers of pairs if
    `truncate`, and queries and keys are multiplied by `attention_factor`. `dynamic` changes
    nothing up to the model's positions, and longer texts are refused: its frequencies depend on a
    text's length, which grows while cached keys stay as they are. `longrope` divides each pair's
    by a factor of its own, of `short_factor` in texts of up to `original_positions` tokens and of
    `long_factor` in longer ones (`within`), and multiplies queries and keys as YaRN does.
    `original_positions` is the context length of pretraining. `proportional` turns the first
    `partial` of all pairs, with the frequencies that these have among all, and divides by the
    factor (Gemma 4). `query_beta` is kept for export alone: by it Ministral 3's queries grow beyond
    `original_positions`, where texts are refused. By
    `score_scale`, YaRN's mscale_all_dim, attention over latents scales its scores (`score_factor`).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial: float = 1.0
    query_beta: float = 0.0
    score_scale: float = 0.0

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_known("rope_scaling type", self.kind, SCALINGS)
        if self.factor < 1.0 or self.low_freq_factor > self.high_freq_factor:
            raise UserError(
                f"rope_scaling {self}: expected a factor of at least 1 and low_freq_factor at most "
                "high_freq_factor; correct the config."
            )
        if not 0 < self.partial <= 1:
            raise UserError(
                f"rope_scaling {self}: expected partial above 0 and at most 1; correct the config."
            )
        if self.kind == "yarn" and not (
            0 < self.beta_slow <= self.beta_fast and self.attention_factor > 0
        ):
            raise UserError(
                f"rope_scaling {self}: expected beta_slow above 0 and at most beta_fast, and an "
                "attention_factor above 0; correct the config."
            )

    @property
    def score_factor(self) -> float:
        """What scores of attention over latents are multiplied by."""
        return (0.1 * self.score_scale * math.log(self.factor) + 1) ** 2

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on how long a text is."""
        return self.short_factor != self.long_factor

    def within(self, length: int) -> RopeScaling:
        """Returns the scaling of texts of up to `length` tokens: one of two sets of factors."""
        longer = length > self.original_positions
        factors = self.long_factor if longer else self.short_factor
        return dataclasses.replace(self, short_factor=factors, long_factor=factors)

    def check_pairs(self, pairs: int) -> None:
        """Raises UserError unless there are factors for so many rotary pairs."""
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if self.kind == "longrope" and (len(factors) != pairs or not min(factors) > 0):
                raise UserError(
                    f"rope_scaling {name} is {factors}: expected a number above 0 for each of the "
                    f"{pairs} pairs that are rotated; repair the config or fetch it again."
                )


def frequencies(size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angle per position of each rotary pair, float32 [size / 2].

    `llama3` (transformers `_compute_llama3_parameters`): wavelengths beyond the original context
    are divided by the factor, short ones stay, those between are interpolated.

    Args:
      size: how many numbers of a head are rotated.
      theta: its base.
    """
    # The exponent in float32, the power in float64: the same bits as torch's float32 power.
    exponents = (np.arange(0, size, 2) / size).astype(np.float32)
    powers = theta ** exponents.astype(np.float64)
    plain = np.float32(1) / powers.astype(np.float32)
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "longrope":
        assert not scaling.by_length, "see RopeScaling.within"
        return np.float32(1) / (
            np.array(scaling.short_factor, np.float32) * powers.astype(np.float32)
        )
    scaled = plain / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return scaled
    if scaling.kind == "proportional":
        return np.where(np.arange(size // 2) < int(scaling.partial * size // 2), scaled, 0)
    if scaling.kind == "yarn":
        first, last = _yarn_range(size, theta, scaling)
        ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(first)) / np.float32(
            last - first
        )
        smooth = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    else:
        turns = scaling.original_positions * plain / np.float32(2 * np.pi)  # in old context
        between = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = turns > scaling.high_freq_factor  # Llama 4 has none between
        if between:
            smooth = np.clip((turns - scaling.low_freq_factor) / between, 0, 1)
        smooth = smooth.astype(np.float32)
    return (1 - smooth) * scaled + smooth * plain


def axes_of_pairs(sections: Sequence[int], interleaved: bool) -> np.ndarray:
    """Which of a token's three positions turns each rotary pair: 0 time, 1 row, 2 column.

    M-RoPE (Wang et al. 2024, Qwen2-VL): the pairs of an axis are in a row, of Qwen3-VL in turn as
    long as those of rows and columns last.

    Args:
      sections: pairs of each axis.
      interleaved: whether they are in turn.
    """
    if not interleaved:
        return np.repeat(np.arange(3), sections)
    axes = np.zeros(sum(sections), np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _yarn_range(size: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The pairs between which frequencies go over from plain to scaled."""

    def pair_of(turns: float) -> float:  # that turns so often in the old context
        per_turn = scaling.original_positions / (turns * 2 * math.pi)
        return size * math.log(per_turn) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last + 0.001 if first == last else last


def scaling_from_hf(
    rope: Mapping[str, Any], original: int | None, positions: int, where: str
) -> RopeScaling | None:
    """The scaling in a config.json of transformers.

    Args:
      rope: its `rope_scaling` or `rope_parameters`.
      original: positions of pretraining beside it; they take precedence over those in it.
      positions: of the model.
      where: what messages call the file.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in Phi-3's first files
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise UserError(
            f"{where}: rope scaling {kind!r} is not supported; use a checkpoint without scaling, "
            f"or with {', '.join(SCALINGS[:-1])} or {SCALINGS[-1]}."
        )
    read = {key: _READ[key] for key in (*_OF_ALL, *_OF_KIND["llama3"], *_OF_KIND[kind])}
    check_keys(rope, f"{where}, rope scaling", read=read)
    if missing := [f"`{key}`" for key in _NEEDED[kind] if rope.get(key) is None]:
        raise UserError(f"{where}: rope scaling {kind!r} lacks its {', '.join(missing)}; add it.")
    values = {key: rope[key] for key in _OF_KIND[kind] if rope.get(key) is not None}
    values = {key: float(x) if _READ[key].startswith("number") else x for key, x in values.items()}
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, **values)
    if kind == "proportional":
        partial = values.get("partial_rotary_factor", 1.0)
        return RopeScaling(kind, values.get("factor", 1.0), partial=partial)
    if kind == "yarn":
        two = [values.pop(name, None) for name in ("mscale", "mscale_all_dim")]
        values.setdefault("attention_factor", yarn_factor(values["factor"], *two))
    stated = rope.get("original_max_position_embeddings")
    original = original or stated or positions
    if kind == "longrope":
        values.setdefault("factor", max(positions / original, 1.0))
        values.setdefault("attention_factor", _longrope_factor(values["factor"], original))
    return RopeScaling(kind, **values, original_positions=original)


def _longrope_factor(factor: float, original: int) -> float:
    """Returns the factor of queries and keys where the config does not say it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_factor(
    factor: float, mscale: float | None = None, mscale_all: float | None = None
) -> float:
    """Returns the factor of queries and keys where the config does not say it."""

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all) if mscale and mscale_all else of(1.0)


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """What `scaling_from_hf` reads."""
    if scaling is None:
        return None
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "proportional":
        rope["partial_rotary_factor"] = scaling.partial
        if scaling.factor == 1:  # as published: transformers warns of it
            del rope["factor"]
    if scaling.kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = scaling.original_positions
        fields = {key for key in _OF_KIND[scaling.kind] if not key.startswith("mscale")}
        values = {key: getattr(scaling, key) for key in sorted(fields)}
        rope |= {key: [*x] if isinstance(x, tuple) else x for key, x in values.items()}
    if scaling.score_scale:
        rope["mscale_all_dim"] = scaling.score_scale
    if scaling.query_beta:
        rope["llama_4_scaling_beta"] = scaling.query_beta
    return rope


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding: x [B, L, heads, D]; cos, sin float32 [B or 1, L, 1, D / 2]."""
    # As one sum over whole heads: XLA on CPU is slow at concatenations of computed halves.
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    x32 = x.astype(jnp.float32)
    turned = jnp.roll(x32, x.shape[-1] // 2, axis=-1) * sin
    if platform() == "cpu":
        # Which of two products LLVM rounds once with their sum depends on what is compiled beside
        # it; of a limited one it cannot.
        turned = jnp.minimum(turned, np.finfo(np.float32).max)
    return (x32 * cos + turned).astype(x.dtype)
