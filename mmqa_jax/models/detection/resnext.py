"""ResNet and ResNeXt (He et al. 2016, Xie et al. 2017) as detectors have them: frozen norms.

What differs between the detectors: whether a stage's stride lies in the first 1 x 1 convolution of
its bottleneck (the Caffe models of 2015) or in the 3 x 3 one, Caffe's first pool, which has no
border and rounds sizes up, and whether norms are stored with their statistics or as one scale and
shift (Detectron's AffineChannel).

Pictures are NHWC, of different sizes in one batch (see `within`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from mmqa_jax.core.flops import one_in
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.config_checks import check_divides, check_known, check_stages

_NORMS = ("statistics", "affine")
_POOLS = ("bordered", "caffe")


@dataclasses.dataclass(frozen=True)
class ResNeXtConfig:
    """Sizes of the network; the defaults are ResNet-101's."""

    # Bottlenecks of the stages res2, res3, res4 and res5.
    blocks: tuple[int, int, int, int] = (3, 4, 23, 3)
    stem: int = 64  # channels after the first convolution
    width: int = 256  # channels after res2; each further stage has twice as many
    # groups, width_per_group: of res2's 3 x 3 convolution; its width doubles with each stage.
    groups: int = 1
    width_per_group: int = 64
    stride_in_1x1: bool = True  # see the module
    dilation: int = 1  # of res5's 3 x 3 convolutions; above 1 res5 has no stride
    stem_pool: str = "bordered"  # `bordered`, or `caffe` (see the module)
    # `statistics` (mean, variance, scale and shift) or `affine` (scale and shift).
    norm: str = "statistics"
    eps: float = 1e-5  # added to a variance: 0 in maskrcnn-benchmark, 1e-5 in Caffe and detectron2
    dtype: str = "float32"  # of the convolutions; norms are computed in float32
    # remat, unroll: see layers.scan_layers; they act on the bottlenecks of a stage but the first.
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_known("resnext.norm", self.norm, _NORMS)
        check_known("resnext.stem_pool", self.stem_pool, _POOLS)
        check_stages("resnext", self.blocks)

    def channels(self, stage: int) -> int:
        """Channels after a stage, 0 being res2."""
        return self.width * 2**stage

    def inner(self, stage: int) -> int:
        """Channels of a stage's 3 x 3 convolutions."""
        return self.groups * self.width_per_group * 2**stage


class Affine(nnx.Module):
    """A scale and a shift of each channel, computed in float32, returned in x's dtype."""

    def __init__(self, channels: int, name: str, *, rngs: nnx.Rngs):
        self.scale = layers.param(rngs, layers.ones_init, (channels,), (name,))
        self.bias = layers.param(rngs, layers.zeros_init, (channels,), (name,))

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., channels]
        return (x.astype(jnp.float32) * self.scale[...] + self.bias[...]).astype(x.dtype)


class BatchNorm(nnx.Module):
    """Batch norm on running statistics, computed in float32, returned in x's dtype."""

    def __init__(
        self,
        channels: int,
        eps: float,
        name: str,
        *,
        rngs: nnx.Rngs,
        scale_init: Initializer = layers.ones_init,
    ):
        self.scale = layers.param(rngs, scale_init, (channels,), (name,))
        self.bias = layers.param(rngs, layers.zeros_init, (channels,), (name,))
        statistic = functools.partial(nnx.BatchStat, out_sharding=(name,), eager_sharding=False)
        self.mean = statistic(jnp.zeros(channels, jnp.float32))
        self.variance = statistic(jnp.ones(channels, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., channels]
        factor = jax.lax.rsqrt(self.variance[...] + self.eps) * self.scale[...]
        y = (x.astype(jnp.float32) - self.mean[...]) * factor + self.bias[...]
        return y.astype(x.dtype)


def _norm(config: ResNeXtConfig, channels: int, name: str, rngs: nnx.Rngs) -> Affine | BatchNorm:
    if config.norm == "affine":
        return Affine(channels, name, rngs=rngs)
    return BatchNorm(channels, config.eps, name, rngs=rngs)


class Bottleneck(nnx.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolution, added to the input, or to its 1 x 1 convolution."""

    def __init__(
        self,
        config: ResNeXtConfig,
        stage: int,
        in_channels: int,
        *,
        rngs: nnx.Rngs,
        stride: int = 1,
    ):
        inner, out_channels = config.inner(stage), config.channels(stage)
        dilation = config.dilation if stage == 3 else 1
        first, second = (stride, 1) if config.stride_in_1x1 else (1, stride)
        conv = functools.partial(Conv, rngs=rngs)
        self.conv1 = conv(in_channels, inner, 1, ("embed", "mlp"), stride=first)
        self.bn1 = _norm(config, inner, "mlp", rngs)
        self.conv2 = conv(
            inner,
            inner,
            3,
            ("embed", "mlp"),
            stride=second,
            dilation=dilation,
            groups=config.groups,
        )
        self.bn2 = _norm(config, inner, "mlp", rngs)
        self.conv3 = conv(inner, out_channels, 1, ("mlp", "embed"))
        self.bn3 = _norm(config, out_channels, "embed", rngs)
        resized = in_channels != out_channels
        self.shortcut = (
            conv(in_channels, out_channels, 1, ("proj", "embed"), stride=stride)
            if resized
            else None
        )
        self.shortcut_bn = _norm(config, out_channels, "embed", rngs) if resized else None

    def __call__(self, x: jax.Array, extent: jax.Array | None) -> jax.Array:
        """[B, H, W, in] -> [B, H/s, W/s, out]; extent [B, 2] of x."""
        y = jax.nn.relu(self.bn1(self.conv1(x)))
        y = within(y, strided(extent, self.conv1.stride))
        y = jax.nn.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        if self.shortcut is not None:
            x = self.shortcut_bn(self.shortcut(x))
        return jax.nn.relu(x + y)


class Stage(nnx.Module):
    """The first bottleneck, which changes the size, and the others, which are alike.

    Stage 0 is res2, 3 is res5.
    """

    def __init__(self, config: ResNeXtConfig, stage: int, *, rngs: nnx.Rngs):
        in_channels = config.channels(stage - 1) if stage else config.stem
        whole = stage == 0 or (stage == 3 and config.dilation > 1)
        self.stride = 1 if whole else 2
        self.first = Bottleneck(config, stage, in_channels, rngs=rngs, stride=self.stride)
        blocks, channels = config.blocks[stage], config.channels(stage)
        self.rest = (
            layers.stack_layers(
                lambda r: Bottleneck(config, stage, channels, rngs=r), blocks - 1, rngs
            )
            if blocks > 1
            else None
        )
        self.config = config

    def __call__(
        self, x: jax.Array, extent: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """[B, H, W, in] and its extent -> [B, H/s, W/s, out] and its extent."""
        x, extent = self.first(x, extent), strided(extent, self.stride)
        if self.rest is None:
            return x, extent

        def body(block: Bottleneck, x, _, __):
            return block(x, extent), None

        config = self.config
        return layers.scan_layers(self.rest, x, body, remat=config.remat, unroll=config.unroll)[
            0
        ], extent


class ResNeXt(nnx.Module):
    """The stem and the first stages: 3 where res5 is the head of regions (C4), 4 for a pyramid."""

    def __init__(self, config: ResNeXtConfig, stages: int, *, rngs: nnx.Rngs):
        if config.groups > 1:
            check_divides("resnext.groups", config.groups, "the inner width", config.inner(0))
        self.conv1 = Conv(3, config.stem, 7, ("patch", "embed"), rngs=rngs, stride=2)
        self.bn1 = _norm(config, config.stem, "embed", rngs)
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(stages)])
        self.config = config

    def stem(self, pixels: jax.Array, extent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pixels [B, H, W, 3] -> [B, H / 4, W / 4, stem], with extents; see `__call__`."""
        x = pixels.astype(self.config.dtype)
        extent = strided(extent, 2)
        # Nothing is below 0 after the ReLU: zeros beyond a picture are no maxima.
        x = within(jax.nn.relu(self.bn1(self.conv1(x))), extent)
        caffe = self.config.stem_pool == "caffe"
        border = (0, 1) if caffe else (1, 1)
        x = jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), border, border, (0, 0))
        )
        return x, jnp.maximum(extent // 2, 1) if caffe else strided(extent, 2)

    def __call__(
        self, pixels: jax.Array, extent: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The maps after each stage, with their extents.

        Args:
          pixels: [B, H, W, 3], in the channels' order and less the mean that the weights expect,
            0 outside the pictures.
          extent: [B, 2], rows and columns of each picture.
        """
        x, extent = self.stem(pixels, extent)
        maps, extents = [], []
        for stage in self.stages:
            x, extent = stage(x, extent)
            maps.append(x)
            extents.append(extent)
        return maps, extents


# Feature pyramid (Lin et al. 2017, section 3; Detectron lib/modeling/FPN.py, add_fpn).


class FPN(nnx.Module):
    """Coarse maps, enlarged, are added to finer ones; each sum is smoothed.

    `in_channels` are those of the maps of res2 to res5, each level has `dim`.
    """

    def __init__(self, in_channels: list[int], dim: int, *, rngs: nnx.Rngs):
        def convolutions(sizes: list[int], size: int, names) -> nnx.List:
            return nnx.List([Conv(n, dim, size, names, rngs=rngs, use_bias=True) for n in sizes])

        self.lateral = convolutions(in_channels, 1, ("embed", "mlp"))
        self.output = convolutions([dim] * len(in_channels), 3, ("embed", "mlp"))

    def __call__(
        self, maps: list[jax.Array], extents: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Maps of res2 to res5 -> P2 to P6, finest first, with extents.

        Sides must halve without rest from level to level: pictures padded to multiples of 32. P6
        is every other cell of P5.
        """
        summed = [conv(x) for conv, x in zip(self.lateral, maps, strict=True)]
        for level in reversed(range(len(summed) - 1)):
            coarse = jnp.repeat(jnp.repeat(summed[level + 1], 2, axis=1), 2, axis=2)
            summed[level] = summed[level] + coarse
        levels = [
            conv(within(x, extent))
            for conv, x, extent in zip(self.output, summed, extents, strict=True)
        ]
        return [*levels, levels[-1][:, ::2, ::2]], [*extents, strided(extents[-1], 2)]


# Convolutions of padded pictures.
#
# Pictures of different sizes share a batch, each in the upper left corner. `extent` [B, 2] says
# how many rows and columns of a map are a picture's; what lies beyond is set to 0 before a
# convolution looks at it, so that every picture sees the border of zeros that it would see alone.


# torch's Conv2d: uniform within 1 / sqrt(fan in).
conv_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

# Channels that are multiplied at once where groups have few: a matrix unit's side on TPUs, what
# XLA's CPU convolution is quickest with. cuDNN has kernels for groups (RESULTS.md says more).
_TOGETHER = {"tpu": 128, "cpu": 32}


def within(x: jax.Array, extent: jax.Array | None) -> jax.Array:
    """x [B, H, W, ...] with 0 outside its pictures; all of it is inside where `extent` is None."""
    if extent is None:
        return x
    inside = cells_within(extent, x.shape[1], x.shape[2])
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 3)), x, 0)


def cells_within(extent: jax.Array, height: int, width: int) -> jax.Array:
    """Which cells are a picture's: extent [..., 2] -> [..., height, width] bool."""
    rows = jnp.arange(height) < extent[..., :1]
    columns = jnp.arange(width) < extent[..., 1:]
    return rows[..., :, None] & columns[..., None, :]


def strided(extent: jax.Array | None, stride: int) -> jax.Array | None:
    """The extent after a padded convolution of that stride: divided, rounded up."""
    return None if extent is None else -(-extent // stride)


class Conv(nnx.Module):
    """A square convolution with a border of zeros; kernel [K, K, in / groups, out].

    The border keeps the size at a stride of 1, whatever the dilation.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        names: layers.Names,
        *,
        rngs: nnx.Rngs,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        use_bias: bool = False,
    ):
        shape = (size, size, in_channels // groups, out_channels)
        self.kernel = layers.param(rngs, conv_init, shape, (None, None, *names))
        self.bias = (
            layers.param(rngs, layers.zeros_init, (out_channels,), names[1:]) if use_bias else None
        )
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.border = dilation * (size - 1) // 2

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, in] -> [B, H/s, W/s, out]
        kernel = self.kernel[...].astype(x.dtype)
        if kernel.shape[0] == 1 and self.groups == 1 and platform() == "cpu":
            y = layers.product(x[:, :: self.stride, :: self.stride], kernel[0, 0], 0)
        else:
            y = self._convolved(x, kernel)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def _convolved(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        if self.groups == 1:
            return self._convolution(x, kernel, 1)
        joined = joined_groups(self.groups, kernel.shape[2], platform())
        groups = self.groups // joined
        with one_in(joined):
            kernel = block_diagonal(kernel, self.groups, joined)
            if platform() != "cpu":
                return self._convolution(x, kernel, groups)
            # XLA's CPU convolution of several groups is five times as slow as one for each.
            parts = zip(
                jnp.split(x, groups, axis=-1), jnp.split(kernel, groups, axis=-1), strict=True
            )
            return jnp.concatenate([self._convolution(*part, 1) for part in parts], axis=-1)

    def _convolution(self, x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=((self.border, self.border),) * 2,
            rhs_dilation=(self.dilation, self.dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )


def joined_groups(groups: int, channels: int, kind: str) -> int:
    """How many groups of so many channels are multiplied as one on a platform."""
    return math.gcd(groups, max(1, _TOGETHER.get(kind, channels) // channels))


def block_diagonal(kernel: jax.Array, groups: int, joined: int) -> jax.Array:
    """The kernel of fewer groups that does the same, with zeros between those it joins.

    Args:
      kernel: [K, K, in / groups, out].
      groups: of the convolution.
      joined: how many become one.

    Returns:
      [K, K, in / groups * joined, out].
    """
    inputs, outputs = kernel.shape[2], kernel.shape[3] // groups
    of_input = jnp.arange(inputs * joined)[:, None] // inputs
    of_output = jnp.arange(kernel.shape[3])[None] // outputs % joined
    return jnp.where(of_input == of_output, jnp.tile(kernel, (1, 1, joined, 1)), 0)
