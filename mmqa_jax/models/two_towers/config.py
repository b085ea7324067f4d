"""Sizes of CLIP's and SigLIP's towers, and the published models."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import config_checks
from mmqa_jax.models.common.activations import ACTIVATIONS

# Mean and standard deviation of CLIP's training pictures, RGB (clip/clip.py).
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
INITIAL_LOGIT_SCALE = math.log(1 / 0.07)
MAX_LOGIT_SCALE = math.log(100.0)
# SigLIP's, both of all channels; of 8 bits this is x / 127.5 - 1.
SIGLIP_MEAN = SIGLIP_STD = (0.5, 0.5, 0.5)
# Of SigLIP's temperature, as its inverse's logarithm, and bias (Zhai et al. 2023, section 3.2).
SIGLIP_LOGIT_SCALE = math.log(10.0)
SIGLIP_LOGIT_BIAS = -10.0

BLOCK_ACTIVATIONS = {
    "quick_gelu": ACTIVATIONS["quick_gelu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_pytorch_tanh": ACTIVATIONS["gelu_new"],  # SigLIP
}


class BlockConfig(Protocol):
    """What a tower's config says of its blocks; see VisionConfig."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    activation: str
    eps: float
    dtype: str
    remat: str
    attention: str
    unroll: int | bool | None


def check_transformer(name: str, config: BlockConfig) -> None:
    """Checks a tower's config; `name` is of the tower in messages."""
    config_checks.check_layers(config, name, "layers")
    config_checks.check_divides(f"{name}.heads", config.heads, f"{name}.width", config.width)
    config_checks.check_known(f"{name}.activation", config.activation, BLOCK_ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower; the defaults are ViT-B/16's."""

    # image_size, patch_size: side of the square picture and of a patch, in pixels.
    image_size: int = 224
    patch_size: int = 16
    # width, layers, heads, mlp_width: of the transformer.
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    embed_dim: int = 512  # size of the projected output
    # `quick_gelu` (OpenAI's weights) or `gelu` (exact erf; some LAION weights).
    activation: str = "quick_gelu"
    eps: float = 1e-5  # of the layer norms
    dtype: str = "float32"  # compute type; norms and softmax stay float32
    # remat, unroll: see layers.scan_layers.
    remat: str = "none"
    attention: str = "auto"  # see layers.attention
    unroll: int | bool | None = None
    # pixel_mean, pixel_std: of the training pictures, RGB from 0 to 1; some of open_clip's differ.
    pixel_mean: tuple[float, float, float] = PIXEL_MEAN
    pixel_std: tuple[float, float, float] = PIXEL_STD
    family: ClassVar[str] = "clip"

    def __post_init__(self):
        check_transformer("vision", self)
        config_checks.check_divides(
            "vision.patch_size", self.patch_size, "vision.image_size", self.image_size
        )

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.image_size // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Sizes of the text tower; the defaults are ViT-B/16's (other fields: as VisionConfig)."""

    # vocab_size, context: number of tokens known, and longest text.
    vocab_size: int = 49408
    context: int = 77
    width: int = 512
    layers: int = 12
    heads: int = 8
    mlp_width: int = 2048
    embed_dim: int = 512
    # The pooled state is the first token of this id; None takes the largest id of the row, as
    # OpenAI does (end-of-text is the last entry of its vocabulary). Transformers does the latter
    # too for old configs that say 2.
    eos_token_id: int | None = None
    activation: str = "quick_gelu"
    eps: float = 1e-5
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    family: ClassVar[str] = "clip"

    def __post_init__(self):
        check_transformer("text", self)

    @property
    def length(self) -> int:
        """The longest text in tokens."""
        return self.context


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """Both towers, which must project to the same size."""

    vision: VisionConfig = VisionConfig()
    text: TextConfig = TextConfig()

    def __post_init__(self):
        if self.vision.embed_dim != self.text.embed_dim:
            raise UserError(
                f"clip: vision.embed_dim {self.vision.embed_dim} is not text.embed_dim "
                f"{self.text.embed_dim}; both towers must project to one size."
            )


def vit_b_32() -> CLIPConfig:
    """openai/clip-vit-base-patch32."""
    return CLIPConfig(vision=VisionConfig(patch_size=32))


def vit_b_16() -> CLIPConfig:
    """openai/clip-vit-base-patch16: WebQA's dense retriever."""
    return CLIPConfig()


def vit_l_14(image_size: int = 224) -> CLIPConfig:
    """openai/clip-vit-large-patch14."""
    return CLIPConfig(
        vision=VisionConfig(
            image_size=image_size,
            patch_size=14,
            width=1024,
            layers=24,
            heads=16,
            mlp_width=4096,
            embed_dim=768,
        ),
        text=TextConfig(width=768, heads=12, mlp_width=3072, embed_dim=768),
    )


def vit_l_14_336() -> CLIPConfig:
    """openai/clip-vit-large-patch14-336: LLaVA-1.5's eyes."""
    return vit_l_14(image_size=336)


@dataclasses.dataclass(frozen=True)
class SiglipVisionConfig:
    """Sizes of the vision tower; the defaults are those of base-patch16-224.

    Other fields are as in VisionConfig.
    """

    # Side of the square picture in pixels; of NaFlex, of the grid of positions in pixels:
    # patch_size * sqrt(num_patches). Pixels beyond the last whole patch are not read.
    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    flexible: bool = False  # NaFlex
    # Whether the tower has its pooling head; one of which patches alone are read may lack it.
    head: bool = True
    activation: str = "gelu_pytorch_tanh"
    eps: float = 1e-6
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    family: ClassVar[str] = "siglip"
    pixel_mean: ClassVar[tuple[float, float, float]] = SIGLIP_MEAN
    pixel_std: ClassVar[tuple[float, float, float]] = SIGLIP_STD

    def __post_init__(self):
        check_transformer("vision", self)
        if self.patch_size > self.image_size:
            raise UserError(
                f"vision.patch_size is {self.patch_size}: larger than vision.image_size = "
                f"{self.image_size}; change one of the two."
            )

    @property
    def side(self) -> int:
        """Rows, and columns, of the grid of positions."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Number of positions; of a fixed size also of a picture's patches."""
        return self.side**2

    @property
    def embed_dim(self) -> int:
        """Size of a picture's embedding."""
        return self.width


@dataclasses.dataclass(frozen=True)
class SiglipTextConfig:
    """Sizes of the text tower; the defaults are those of base-patch16-224.

    Other fields are as in SiglipVisionConfig.
    """

    vocab_size: int = 32_000  # number of tokens known
    length: int = 64  # in tokens, to which every text is padded
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    embed_dim: int = 768  # size of the projected output
    activation: str = "gelu_pytorch_tanh"
    eps: float = 1e-6
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    family: ClassVar[str] = "siglip"

    def __post_init__(self):
        check_transformer("text", self)


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """Both towers, which must give vectors of one size."""

    vision: SiglipVisionConfig = SiglipVisionConfig()
    text: SiglipTextConfig = SiglipTextConfig()

    def __post_init__(self):
        if self.vision.embed_dim != self.text.embed_dim:
            raise UserError(
                f"siglip: vision.width is {self.vision.width}, text.embed_dim "
                f"{self.text.embed_dim}; pictures and texts must be embedded in one size."
            )


def siglip_base(
    image_size: int = 224, patch_size: int = 16, vocab_size: int = 32_000
) -> SiglipConfig:
    """google/siglip-base-patch16-224; with 256,000 tokens SigLIP 2's."""
    return SiglipConfig(
        SiglipVisionConfig(image_size=image_size, patch_size=patch_size),
        SiglipTextConfig(vocab_size=vocab_size),
    )


def siglip_large(image_size: int = 256, vocab_size: int = 32_000) -> SiglipConfig:
    """google/siglip-large-patch16-256; with 256,000 tokens SigLIP 2's."""
    sizes = {"width": 1024, "layers": 24, "heads": 16, "mlp_width": 4096}
    return SiglipConfig(
        SiglipVisionConfig(image_size=image_size, **sizes),
        SiglipTextConfig(vocab_size=vocab_size, embed_dim=1024, **sizes),
    )


def siglip_so400m(
    image_size: int = 384, patch_size: int = 14, vocab_size: int = 32_000
) -> SiglipConfig:
    """google/siglip-so400m-patch14-384; with 256,000 tokens SigLIP 2's."""
    sizes = {"width": 1152, "layers": 27, "heads": 16, "mlp_width": 4304}
    return SiglipConfig(
        SiglipVisionConfig(image_size=image_size, patch_size=patch_size, **sizes),
        SiglipTextConfig(vocab_size=vocab_size, embed_dim=1152, **sizes),
    )


CLIPS: dict[str, Callable[..., CLIPConfig]] = {
    "vit_b_32": vit_b_32,
    "vit_b_16": vit_b_16,
    "vit_l_14": vit_l_14,
    "vit_l_14_336": vit_l_14_336,
}


_GEMMA = 256_000  # tokens of SigLIP 2


SIGLIPS: dict[str, Callable[..., SiglipConfig]] = {
    "base_16_224": siglip_base,
    "large_16_256": siglip_large,
    "so400m_14_384": siglip_so400m,
    "siglip2_base_16_224": functools.partial(siglip_base, vocab_size=_GEMMA),
    "siglip2_large_16_256": functools.partial(siglip_large, vocab_size=_GEMMA),
    "siglip2_so400m_14_384": functools.partial(siglip_so400m, vocab_size=_GEMMA),
    "siglip2_so400m_16_384": functools.partial(siglip_so400m, patch_size=16, vocab_size=_GEMMA),
}


def clip_vision(name: str, changes: Mapping[str, Any]) -> VisionConfig:
    """The vision tower of one of CLIPS, with the fields that differ."""
    return config_checks.with_fields(
        config_checks.published_sizes("model.clip", name, CLIPS).vision, changes
    )
