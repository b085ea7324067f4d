"""CLIP's ModifiedResNet (Radford et al. 2021; openai/CLIP clip/model.py): RN50 to RN50x64.

Against a plain ResNet: three stem convolutions and an average pool, average pools instead of
strided convolutions in the bottlenecks, attention instead of the last pool. Prophet's MCAN reads
RN50x64's grid before that attention pool (`ModifiedResNet.grid_features`).

Pictures are NHWC here. Batch norms run in inference form, on their running statistics, which are
`nnx.BatchStat` variables: `nnx.state(model, nnx.Param)` is what may be trained.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.config_checks import check_stages
from mmqa_jax.models.common.layers import (
    Linear,
    attention,
    merge_heads,
    normal_init,
    param,
    scan_layers,
    split_heads,
    stack_layers,
    zeros_init,
)
from mmqa_jax.models.detection.resnext import BatchNorm, Conv, conv_init

STRIDE = 32  # pixels per cell of the grid
_EXPANSION = 4  # a bottleneck's output over its inner width


@dataclasses.dataclass(frozen=True)
class ModifiedResNetConfig:
    """Sizes of the tower; the defaults are RN50x64's."""

    width: int = 128  # channels after the stem; the grid has 32 times as many
    blocks: tuple[int, int, int, int] = (3, 15, 36, 10)  # bottlenecks of the four stages
    # Side of the pictures that the attention pool takes, a multiple of 32. The grid can be had of
    # other sizes.
    image_size: int = 448
    embed_dim: int = 1024  # size of the pooled output
    # Whether there is one; the grid needs none (55 of RN50x64's 420 M parameters).
    attention_pool: bool = True
    eps: float = 1e-5  # of the batch norms
    dtype: str = "float32"  # compute type; batch norms and softmax stay float32
    attention: str = "xla"  # see layers.attention
    # remat, unroll: see layers.scan_layers; they act on the bottlenecks of a stage but the first.
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        if self.width % 2:
            raise UserError(
                f"clip resnet: width {self.width} is odd; the stem starts with half of it, choose "
                "an even width."
            )
        check_stages("clip resnet", self.blocks)
        if self.image_size % STRIDE:
            raise UserError(
                f"clip resnet: image_size {self.image_size} is not a multiple of {STRIDE}; choose "
                "one that is (RN50x64: 448)."
            )

    @property
    def features(self) -> int:
        """Channels of a grid cell."""
        return STRIDE * self.width

    @property
    def heads(self) -> int:
        """Heads of the attention pool, each of size 64."""
        return self.features // 64


def rn50(**changes) -> ModifiedResNetConfig:
    """OpenAI's RN50."""
    return _preset(64, (3, 4, 6, 3), 224, 1024, changes)


def rn101(**changes) -> ModifiedResNetConfig:
    """OpenAI's RN101."""
    return _preset(64, (3, 4, 23, 3), 224, 512, changes)


def rn50x4(**changes) -> ModifiedResNetConfig:
    """OpenAI's RN50x4."""
    return _preset(80, (4, 6, 10, 6), 288, 640, changes)


def rn50x16(**changes) -> ModifiedResNetConfig:
    """OpenAI's RN50x16."""
    return _preset(96, (6, 8, 18, 8), 384, 768, changes)


def rn50x64(**changes) -> ModifiedResNetConfig:
    """OpenAI's RN50x64, whose grid of 512-pixel pictures Prophet reads."""
    return dataclasses.replace(ModifiedResNetConfig(), **changes)


def _preset(width, blocks, image_size, embed_dim, changes) -> ModifiedResNetConfig:
    config = ModifiedResNetConfig(width, blocks, image_size, embed_dim)
    return dataclasses.replace(config, **changes)


def average_pool(x: jax.Array, size: int) -> jax.Array:
    """Means of size x size cells: [B, H, W, C] -> [B, H / size, W / size, C]."""
    if size == 1:
        return x
    batch, height, width, channels = x.shape
    cells = x.reshape(batch, height // size, size, width // size, size, channels)
    return cells.mean(axis=(2, 4))


class Bottleneck(nnx.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolution, added to the input.

    Where the size changes, the input goes through an average pool, a 1 x 1 convolution and a
    batch norm (`shortcut`).
    """

    def __init__(
        self,
        in_channels: int,
        inner: int,
        config: ModifiedResNetConfig,
        *,
        rngs: nnx.Rngs,
        stride: int = 1,
    ):
        out_channels = _EXPANSION * inner
        linear = functools.partial(Linear, use_bias=False, rngs=rngs, kernel_init=conv_init)
        norm = functools.partial(BatchNorm, eps=config.eps, rngs=rngs)
        self.conv1 = linear(in_channels, inner, ("embed", "mlp"))
        self.bn1 = norm(inner, name="mlp")
        self.conv2 = Conv(inner, inner, 3, ("embed", "mlp"), rngs=rngs)
        self.bn2 = norm(inner, name="mlp")
        self.conv3 = linear(inner, out_channels, ("mlp", "embed"))
        self.bn3 = norm(out_channels, name="embed", scale_init=zeros_init)
        resized = stride > 1 or in_channels != out_channels
        self.shortcut = linear(in_channels, out_channels, ("proj", "embed")) if resized else None
        self.shortcut_bn = norm(out_channels, name="embed") if resized else None
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, in] -> [B, H/s, W/s, 4 * inner]
        y = jax.nn.relu(self.bn1(self.conv1(x)))
        y = jax.nn.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(average_pool(y, self.stride)))
        if self.shortcut is not None:
            x = self.shortcut_bn(self.shortcut(average_pool(x, self.stride)))
        return jax.nn.relu(x + y)


class Stage(nnx.Module):
    """The first bottleneck, which changes the size, and the others, which are alike."""

    def __init__(
        self,
        in_channels: int,
        inner: int,
        blocks: int,
        stride: int,
        config: ModifiedResNetConfig,
        *,
        rngs: nnx.Rngs,
    ):
        self.first = Bottleneck(in_channels, inner, config, rngs=rngs, stride=stride)
        self.rest = (
            stack_layers(
                lambda r: Bottleneck(_EXPANSION * inner, inner, config, rngs=r), blocks - 1, rngs
            )
            if blocks > 1
            else None
        )
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, in] -> [B, H/s, W/s, 4 * inner]
        x = self.first(x)
        if self.rest is None:
            return x

        def body(block: Bottleneck, x, _, __):
            return block(x), None

        return scan_layers(self.rest, x, body, remat=self.config.remat, unroll=self.config.unroll)[
            0
        ]


class AttentionPool(nnx.Module):
    """The grid's mean attends to itself and to every cell, with positions added."""

    def __init__(self, config: ModifiedResNetConfig, *, rngs: nnx.Rngs):
        features = config.features
        init = normal_init(features**-0.5)
        cells = (config.image_size // STRIDE) ** 2
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init)
        self.positions = param(rngs, init, (cells + 1, features), ("positions", "embed"))
        self.q = linear(features, features, ("embed", "heads"))
        self.k = linear(features, features, ("embed", "heads"))
        self.v = linear(features, features, ("embed", "heads"))
        self.out = linear(features, config.embed_dim, ("heads", "proj"))
        self.config = config

    def __call__(self, grid: jax.Array) -> jax.Array:
        """[B, S/32, S/32, features] -> [B, embed_dim] float32."""
        cells = grid.reshape(grid.shape[0], -1, grid.shape[-1])
        x = jnp.concatenate([cells.mean(axis=1, keepdims=True), cells], axis=1)
        x = x + self.positions[...].astype(x.dtype)  # [B, 1 + cells, features]
        q, k, v = (
            split_heads(f(y), self.config.heads)
            for f, y in ((self.q, x[:, :1]), (self.k, x), (self.v, x))
        )
        y = merge_heads(attention(q, k, v, implementation=self.config.attention))
        return self.out(y[:, 0].astype(jnp.float32))


class ModifiedResNet(nnx.Module):
    """The image tower; pictures must be normalized (clip.normalize_pixels)."""

    def __init__(self, config: ModifiedResNetConfig, *, rngs: nnx.Rngs):
        width, half = config.width, config.width // 2
        norm = functools.partial(BatchNorm, eps=config.eps, name="embed", rngs=rngs)
        self.conv1 = Conv(3, half, 3, ("patch", "embed"), rngs=rngs, stride=2)
        self.bn1 = norm(half)
        self.conv2 = Conv(half, half, 3, ("proj", "embed"), rngs=rngs)
        self.bn2 = norm(half)
        self.conv3 = Conv(half, width, 3, ("proj", "embed"), rngs=rngs)
        self.bn3 = norm(width)
        stages, channels = [], width
        for number, blocks in enumerate(config.blocks):
            inner = width * 2**number
            stride = 1 if number == 0 else 2
            stages.append(Stage(channels, inner, blocks, stride, config, rngs=rngs))
            channels = _EXPANSION * inner
        self.stages = nnx.List(stages)
        self.pool = AttentionPool(config, rngs=rngs) if config.attention_pool else None
        self.config = config

    def stem(self, pixels: jax.Array) -> jax.Array:
        """[B, H, W, 3] normalized pixels -> [B, H / 4, W / 4, width]."""
        x = pixels.astype(self.config.dtype)
        x = jax.nn.relu(self.bn1(self.conv1(x)))
        x = jax.nn.relu(self.bn2(self.conv2(x)))
        x = jax.nn.relu(self.bn3(self.conv3(x)))
        return average_pool(x, 2)

    def grid_features(self, pixels: jax.Array) -> jax.Array:
        """The grid before the attention pool, as Prophet's MCAN reads it.

        pixels [B, H, W, 3] normalized, H and W multiples of 32 (Prophet: 512), of any size: the
        convolutions know no positions. Returns [B, H / 32, W / 32, 32 * width].
        """
        if pixels.shape[1] % STRIDE or pixels.shape[2] % STRIDE or pixels.shape[3] != 3:
            raise UserError(
                f"clip resnet: pictures of shape {pixels.shape[1:]}, expected height and width "
                f"that are multiples of {STRIDE} and 3 colors; resize them."
            )
        x = self.stem(pixels)
        for stage in self.stages:
            x = stage(x)
        return x

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, S, S, 3] normalized pixels -> [B, embed_dim] float32, not L2-normalized."""
        size = self.config.image_size
        if self.pool is None:
            raise UserError(
                "this CLIP ResNet was built without its attention pool: set attention_pool to True "
                "or read grid_features."
            )
        if pixels.shape[1:] != (size, size, 3):
            raise UserError(
                f"clip resnet: pictures of shape {pixels.shape[1:]}, the attention pool takes "
                f"{(size, size, 3)}; resize them."
            )
        return self.pool(self.grid_features(pixels))
