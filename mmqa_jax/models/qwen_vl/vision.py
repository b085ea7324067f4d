"""The config of Qwen2.5-VL's and Qwen3-VL's vision towers: sizes, switches, and their pictures."""

from __future__ import annotations

import dataclasses

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip.network import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_divides, check_known

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes and switches of a tower; the defaults are Qwen2.5-VL 7B's.

    Attributes:
      family: `qwen2_5_vl` (RMS norms, gated MLP) or `qwen3_vl` (layer norms, plain MLP).
      width, layers, heads, mlp: of the transformer.
      out: width of the vectors that the language model gets.
      patch: side of a patch in pixels.
      temporal: frames that a patch spans.
      merge: patches along each side of a unit, which becomes one vector.
      window: side of an attention window in pixels; 0: every layer attends to the whole picture.
      full_layers: the layers that do so where there are windows.
      positions: side of the grid of learned positions; 0: none.
      deepstack: the layers after which states are given beside the last one's.
      activation: of the MLP.
      rope_theta: base of the rotary frequencies.
      pixel_mean, pixel_std: of each channel, of pixels 0..1.
      min_pixels, max_pixels: area that pictures are resized to where theirs is beyond.
      init_stddev, dtype, attention, remat, unroll: as LlamaConfig's.
    """

    family: str = "qwen2_5_vl"
    width: int = 1280
    layers: int = 32
    heads: int = 16
    mlp: int = 3420
    out: int = 3584
    patch: int = 14
    temporal: int = 2
    merge: int = 2
    window: int = 112
    full_layers: tuple[int, ...] = (7, 15, 23, 31)
    positions: int = 0
    deepstack: tuple[int, ...] = ()
    activation: str = "silu"
    rope_theta: float = 10000.0
    pixel_mean: tuple[float, float, float] = PIXEL_MEAN
    pixel_std: tuple[float, float, float] = PIXEL_STD
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    init_stddev: float = 0.02
    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_known("vision.family", self.family, FAMILIES)
        check_known("vision.activation", self.activation, ACTIVATIONS)
        check_divides("vision.heads", self.heads, "vision.width", self.width)
        if self.width // self.heads % 4:
            raise UserError(
                f"vision.heads is {self.heads}: a head of {self.width // self.heads} numbers, "
                "expected a multiple of 4 for rotary positions of rows and columns; change it."
            )
        for name in ("full_layers", "deepstack"):
            numbers = tuple(getattr(self, name))
            object.__setattr__(self, name, numbers)
            if list(numbers) != sorted({n for n in numbers if 0 <= n < self.layers}):
                raise UserError(
                    f"vision.{name} is {numbers}: expected ascending numbers of layers, 0 to "
                    f"{self.layers - 1}; correct it."
                )
        if self.window % self.unit:
            raise UserError(
                f"vision.window is {self.window}: expected a multiple of {self.unit}, patch times "
                "merge; change it."
            )
        if not 0 < self.min_pixels <= self.max_pixels:
            raise UserError(
                f"vision.min_pixels and max_pixels are {self.min_pixels} and {self.max_pixels}: "
                "expected numbers above 0, the first at most the second; correct them."
            )

    @property
    def unit(self) -> int:
        """Side in pixels of what becomes one vector."""
        return self.patch * self.merge

    @property
    def window_units(self) -> int:
        """Side of a window in units; 1 without windows."""
        return max(self.window // self.unit, 1)

    @property
    def most_units(self) -> int:
        """Units of the largest picture."""
        return self.max_pixels // self.unit**2

    @property
    def features(self) -> int:
        """Width of all that a unit gives: the vector, and one of each layer of `deepstack`."""
        return self.out * (1 + len(self.deepstack))
