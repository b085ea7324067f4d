"""The config of a tower in front of a decoder, and what any model that sees says of its pictures.

A model of this shape is an entry of `models/llava/families.py`: which tower, which connector
(`connectors.py`), and how a picture is cut (`tiles.py`). What stands between the tiles of a picture
is text, which `prompting/picture_format.py` writes. Published sizes stand at the end.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.llama.config import (
    FREE,
    RELATIVES,
    LlamaConfig,
    llama2_7b,
    llama2_13b,
    smollm2_135m,
)
from mmqa_jax.models.llama.families import FAMILIES as DECODERS
from mmqa_jax.models.llava import tiles
from mmqa_jax.models.llava.gemma4_patches import Gemma4PatchesConfig
from mmqa_jax.models.llava.gemma4_vision import Gemma4VisionConfig
from mmqa_jax.models.llava.intern_vit import InternVisionConfig
from mmqa_jax.models.llava.llama4_vision import Llama4VisionConfig
from mmqa_jax.models.qwen_vl.network import Grid, grid_of
from mmqa_jax.models.two_towers.config import (
    SiglipVisionConfig,
    VisionConfig,
    siglip_base,
    siglip_so400m,
    vit_l_14_336,
)
from mmqa_jax.models.two_towers.network import blocks_before
from mmqa_jax.weights.registry import Base

# The placeholder's id in haotian-liu/LLaVA (llava/constants.py), outside the vocabulary.
ORIGINAL_IMAGE_TOKEN = -200
CONNECTORS = (
    *("mlp", "shuffle", "plain", "normed_shuffle", "merger", "pooled", "unit_pooled", "units"),
    *("adapter", "unit_normed"),
)
SELECTS = ("default", "full", "leading")
RESIZES = ("pad", "squash", "squash_bilinear")
# What `PictureConfig.picture_kind` says: a square; one in front of all words; one between two
# tokens; several squares; several pieces of any size; OneVision's tiles, of which one sequence is
# made; a picture of any size: Qwen-VL's, Gemma 4's within a number of tokens, Mistral 3's row by
# row.
PictureKind = Literal[
    "square", "first", "marked", "tiles", "pieces", "anyres", "units", "budget", "rows"
]
_LARGEST_BUDGET = 8192  # tokens of a picture


@dataclasses.dataclass(frozen=True)
class LlavaConfig:
    """Tower, connector and decoder; the defaults are LLaVA-1.5's in transformers' layout."""

    # The tower; CLIP's `embed_dim` is not used (LLaVA drops its own projection).
    vision: (
        VisionConfig
        | SiglipVisionConfig
        | InternVisionConfig
        | Gemma4VisionConfig
        | Gemma4PatchesConfig
        | Llama4VisionConfig
    )
    llama: LlamaConfig  # the language model
    # Which of the tower's layers is read, counted as in `clip.blocks_before`.
    feature_layer: int = -2
    # Of its states all are read ("full"), or all but the first ("default"): CLIP's class token; of
    # a SigLIP, which has none, transformers leaves out the first patch; or all but the last
    # ("leading"): Llama 4's class token.
    select: str = "default"
    # How a picture becomes a square: padded with the tower's mean color, or scaled to it
    # (`data.pictures.decode.to_pixels`).
    resize: str = "pad"
    projector_activation: str = "gelu"  # between the projector's two linears
    projector_bias: bool = True  # whether these have biases
    projector_width: int | None = None  # what the first of these gives; None: the decoder's width
    # Whether a layer norm stands before them, of connectors that may lack it.
    projector_normed: bool = False
    # Id of a picture's placeholder; it is never looked up in the embedding table, and may be
    # outside of it (`ORIGINAL_IMAGE_TOKEN`).
    image_token: int = 32000
    family: str = "llava"  # the entry of `families.FAMILIES`, or "onevision"
    # What makes a tower's states the decoder's tokens, a name of `CONNECTORS`.
    connector: str = "mlp"
    merge: int = 1  # side of the square of states that become one token
    normed: bool = False  # whether the states that are read go through the tower's last norm
    split: tiles.Split | None = None  # how a picture is cut into tiles; None: it is one square
    # before_token, after_token: what stand around a picture; of a square the first is its place in
    # a prompt's text. None: nothing does.
    before_token: int | None = None
    after_token: int | None = None
    # The most tokens of a picture, which has any size; None: it is of squares.
    budget: int | None = None

    def __post_init__(self):
        check_known("model.projector_activation", self.projector_activation, ACTIVATIONS)
        check_known("model.select", self.select, SELECTS)
        check_known("model.resize", self.resize, RESIZES)
        check_known("model.connector", self.connector, CONNECTORS)
        is_flexible = isinstance(self.vision, SiglipVisionConfig) and self.vision.flexible
        if is_flexible != isinstance(self.split, tiles.UnitTiles):
            raise UserError(
                f"model.vision.flexible is {is_flexible}: expected {not is_flexible}, since this "
                f"model's pictures have {'one size' if is_flexible else 'any size'}; use another "
                "SigLIP."
            )
        blocks_before(self.feature_layer, self.vision.layers, "model.feature_layer")
        if self.budget is not None and not 1 <= self.budget <= _LARGEST_BUDGET:
            raise UserError(
                f"model.budget is {self.budget}: expected 1 to {_LARGEST_BUDGET} tokens of a "
                "picture; correct it."
            )
        side = math.isqrt(self._states)
        if self.merge != 1 and (side**2 != self._states or self.merge < 1 or side % self.merge):
            raise UserError(
                f"model.merge is {self.merge}: expected a divisor of the side of a square of the "
                f"{self._states} states that the tower gives; change it or the tower's sizes."
            )

    @property
    def expected_pixels(self) -> str:
        """See PictureConfig."""
        if self.is_sized:
            unit = self.units.unit
            return f"uint8 [H, W, 3], multiples of {unit}; use data.pictures.resize"
        size = self.vision.image_size
        return f"uint8 [{size}, {size}, 3]; use data.pictures.resize.llava_pixels"

    @property
    def picture_kind(self) -> PictureKind:
        """See PictureConfig."""
        if self.budget is not None:
            return "budget"
        if self.split is not None:
            return "pieces" if isinstance(self.split, tiles.UnitTiles) else "tiles"
        if self.llama.picture_sight == "prompt":
            return "first"
        return "square" if self.before_token is None else "marked"

    @property
    def is_sized(self) -> bool:
        """Whether pictures have any size, in whole `units`."""
        return self.picture_kind in ("pieces", "budget", "rows")

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a picture in one piece that is not long and thin; None: any number."""
        return self.split.most_tokens if isinstance(self.split, tiles.UnitTiles) else self.budget

    @property
    def units(self) -> tiles.UnitSizes:
        """The sizes of patches, units and squares."""
        side = 0 if self.is_sized else self.vision.image_size
        return tiles.UnitSizes(self.vision.patch_size, self.merge, side=side)

    def cut(self, width: int, height: int) -> tiles.Cut:
        """How a picture of so many pixels is cut, of a model whose pictures are."""
        return self.split.cut(width, height, self.units)

    def tokens_of(self, grid: Grid) -> int:
        """The tokens of a picture of so many units."""
        return grid.units

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """`features` for pixels [S, S, 3], S the tower's; of pictures of any size one for each unit
        of [H, W, 3]; 0 for another shape."""
        if self.is_sized:
            fits = len(shape) == 3 and shape[2] == 3 and min(shape) > 0
            if not fits or shape[0] % self.units.unit or shape[1] % self.units.unit:
                return 0
            return self.tokens_of(grid_of(shape, self.units))
        size = self.vision.image_size
        return self.features if tuple(shape) == (size, size, 3) else 0

    @property
    def most_squares(self) -> int:
        """How many squares a picture has at most, each with features of its own."""
        return 1 if self.split is None else self.split.most_tiles(self.units.side) + 1

    @property
    def features(self) -> int:
        """The tokens of a square."""
        return self._states // self.merge**2

    @property
    def _states(self) -> int:
        """How many of the tower's states are read of a square, or of a unit, which is one."""
        if self.is_sized:
            return self.merge**2
        class_token = not isinstance(self.vision, SiglipVisionConfig)
        return self.vision.patches + class_token - (self.select != "full")

    @property
    def feature_scale(self) -> float:
        """What pictures' features are multiplied by where the decoder scales all it is given."""
        return self.llama.embedding_scale if DECODERS[self.llama.family].scales_all else 1.0

    def position_shifts(self, tokens: Sequence[int], shapes: Sequence[Sequence[int]]) -> None:
        """None: positions are columns."""


# What a vision-language model's config says to whoever feeds it.


@runtime_checkable
class PictureConfig(Protocol):
    """The config of a model whose pictures become tokens of its language model.

    Attributes:
      expected_pixels: what pictures are, for messages.
      picture_kind: how prompts hold pictures (`prompting.picture_format`) and which tower encodes
        them (`decoding.image_tower`).
    """

    llama: LlamaConfig  # of the language model
    image_token: int  # the placeholder in a prompt, one for each picture, or for each of its tiles

    @property
    def expected_pixels(self) -> str: ...

    @property
    def picture_kind(self) -> PictureKind: ...

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """Tokens of a picture whose pixels have this shape; 0: it cannot be one."""

    def position_shifts(
        self, tokens: Sequence[int], shapes: Sequence[Sequence[int]]
    ) -> np.ndarray | None:
        """Returns how much each token's three positions differ from its column, int32 [L + 1, 3].

        Args:
          tokens: a prompt, one placeholder for each picture.
          shapes: of the pictures' pixels.

        Returns:
          Of every token of the prompt in which each placeholder is repeated once for each token of
          its picture; the last row is that of all that follow. None: positions are columns.
        """


def llava_1_5_7b(**changes) -> LlavaConfig:
    """llava-hf/llava-1.5-7b-hf: Vicuna-1.5 7B with the tokens 32,000 `<image>` and 32,001 `<pad>`.

    The embedding table is padded to 32,064 rows. The original, liuhaotian/llava-v1.5-7b, has
    32,000 rows and `ORIGINAL_IMAGE_TOKEN`; see `models.llava.keys`.
    """
    sizes = LlavaConfig(vit_l_14_336().vision, llama2_7b(vocab_size=32064))
    return dataclasses.replace(sizes, **changes)


def llava_1_5_13b(**changes) -> LlavaConfig:
    """llava-hf/llava-1.5-13b-hf: as the 7B, on Vicuna-1.5 13B."""
    sizes = LlavaConfig(vit_l_14_336().vision, llama2_13b(vocab_size=32064))
    return dataclasses.replace(sizes, **changes)


def _smolvlm(vision: SiglipVisionConfig, llama: LlamaConfig, merge: int, token: int) -> LlavaConfig:
    return LlavaConfig(
        vision,
        dataclasses.replace(llama, tied=False),
        feature_layer=-1,
        select="full",
        resize="squash",
        projector_bias=False,
        image_token=token,
        family="smolvlm",
        connector="shuffle",
        merge=merge,
        normed=True,
        split=tiles.RowTiles(longest=4 * vision.image_size),
    )


_BASE_512 = dataclasses.replace(siglip_base(512).vision, head=False)
_SO400M = dataclasses.replace(siglip_so400m().vision, head=False)


def smolvlm2_256m(**changes) -> LlavaConfig:
    """HuggingFaceTB/SmolVLM2-256M-Video-Instruct."""
    llama = smollm2_135m(vocab_size=49280)
    return dataclasses.replace(_smolvlm(_BASE_512, llama, 4, 49190), **changes)


def smolvlm2_500m(**changes) -> LlavaConfig:
    """HuggingFaceTB/SmolVLM2-500M-Video-Instruct."""
    llama = RELATIVES["smollm2_360m"](vocab_size=49280)
    return dataclasses.replace(_smolvlm(_BASE_512, llama, 4, 49190), **changes)


def smolvlm2_22b(**changes) -> LlavaConfig:
    """HuggingFaceTB/SmolVLM2-2.2B-Instruct; the rotary base is SmolLM2-1.7B's."""
    llama = RELATIVES["smollm2_17b"](vocab_size=49280)
    return dataclasses.replace(_smolvlm(_SO400M, llama, 3, 49190), **changes)


def granite_docling_258m(**changes) -> LlavaConfig:
    """ibm-granite/granite-docling-258M."""
    sizes = _smolvlm(_BASE_512, smollm2_135m(vocab_size=100352), 4, 100270)
    sizes = dataclasses.replace(
        sizes, family="idefics3", llama=dataclasses.replace(sizes.llama, tied=True)
    )
    return dataclasses.replace(sizes, **changes)


def _internvl(decoder: str, token: int, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        InternVisionConfig(),
        RELATIVES[decoder](),
        feature_layer=-1,
        resize="squash",
        image_token=token,
        family="internvl",
        connector="normed_shuffle",
        merge=2,
        split=tiles.RatioTiles(),
    )
    return dataclasses.replace(sizes, **changes)


def internvl35_1b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-1B-HF."""
    return _internvl("qwen3_06b", 151671, **changes)


def internvl35_2b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-2B-HF."""
    return _internvl("qwen3_17b", 151671, **changes)


def internvl35_4b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-4B-HF."""
    return _internvl("qwen3_4b", 151671, **changes)


def internvl35_8b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-8B-HF."""
    return _internvl("qwen3_8b", 151671, **changes)


def _gemma3(decoder: str, **changes: Any) -> LlavaConfig:
    vision = dataclasses.replace(siglip_so400m().vision, image_size=896, head=False)
    sizes = LlavaConfig(
        vision,
        dataclasses.replace(RELATIVES[decoder](), picture_sight="both"),
        feature_layer=-1,
        select="full",
        resize="squash_bilinear",
        projector_bias=False,
        image_token=262144,
        family="gemma3",
        connector="pooled",
        merge=4,
        normed=True,
        before_token=255999,
        after_token=256000,
    )
    return dataclasses.replace(sizes, **changes)


def gemma3_4b_vl(**changes) -> LlavaConfig:
    """google/gemma-3-4b-it."""
    return _gemma3("gemma3_4b", **changes)


def gemma3_12b_vl(**changes) -> LlavaConfig:
    """google/gemma-3-12b-it."""
    return _gemma3("gemma3_12b", **changes)


def gemma3_27b_vl(**changes) -> LlavaConfig:
    """google/gemma-3-27b-it."""
    return _gemma3("gemma3_27b", **changes)


def _gemma4(decoder: str, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        Gemma4VisionConfig(),
        dataclasses.replace(RELATIVES[decoder](), picture_sight="near"),
        feature_layer=-1,
        select="full",
        resize="squash",
        projector_bias=False,
        image_token=258880,
        family="gemma4",
        connector="unit_pooled",
        merge=3,
        before_token=255999,
        after_token=258882,
        budget=280,
    )
    return dataclasses.replace(sizes, **changes)


def gemma4_31b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-31B-it."""
    return _gemma4("gemma4_31b", **changes)


def _gemma4_small(decoder: str, **changes: Any) -> LlavaConfig:
    vision = Gemma4VisionConfig(
        width=768, layers=16, heads=12, head_dim=64, mlp_width=3072, clipped=True, standardize=False
    )
    sizes = _gemma4(decoder, vision=vision)
    llama = dataclasses.replace(sizes.llama, picture_sight="causal")
    return dataclasses.replace(sizes, llama=llama, **changes)


def gemma4_e2b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-E2B-it, without what it hears by."""
    return _gemma4_small("gemma4_e2b", **changes)


def gemma4_e4b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-E4B-it, without what it hears by."""
    return _gemma4_small("gemma4_e4b", **changes)


def gemma4_12b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-12B-it, without what it hears by."""
    sizes = _gemma4("gemma4_12b", vision=Gemma4PatchesConfig(), family="gemma4_unified")
    llama = dataclasses.replace(sizes.llama, picture_sight="both")
    return dataclasses.replace(sizes, llama=llama, connector="unit_normed", **changes)


def gemma4_26b_a4b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-26B-A4B-it."""
    return _gemma4("gemma4_26b_a4b", **changes)


def _paligemma2(decoder: str, side: int, **changes: Any) -> LlavaConfig:
    vision = dataclasses.replace(siglip_so400m().vision, image_size=side, head=False)
    sizes = LlavaConfig(
        vision,
        RELATIVES[decoder](vocab_size=257216, picture_sight="prompt"),
        feature_layer=-1,
        select="full",
        resize="squash",
        image_token=257152,
        family="paligemma",
        connector="plain",
        normed=True,
    )
    return dataclasses.replace(sizes, **changes)


def paligemma2_3b(**changes) -> LlavaConfig:
    """google/paligemma2-3b-mix-448."""
    return _paligemma2("gemma2_2b", 448, **changes)


def paligemma2_10b(**changes) -> LlavaConfig:
    """google/paligemma2-10b-mix-448."""
    return _paligemma2("gemma2_9b", 448, **changes)


def paligemma2_28b(**changes) -> LlavaConfig:
    """google/paligemma2-28b-mix-448."""
    return _paligemma2("gemma2_27b", 448, **changes)


def _lfm2_vl(decoder: str, vision: SiglipVisionConfig, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        dataclasses.replace(vision, flexible=True, head=False),
        RELATIVES[decoder](),
        feature_layer=-1,
        select="full",
        resize="squash_bilinear",
        projector_width=2560,
        projector_normed=True,
        image_token=396,
        family="lfm2_vl",
        connector="units",
        merge=2,
        normed=True,
        split=tiles.UnitTiles(),
    )
    return dataclasses.replace(sizes, **changes)


def lfm2_vl_450m(**changes) -> LlavaConfig:
    """LiquidAI/LFM2-VL-450M."""
    return _lfm2_vl("lfm2_350m", siglip_base(256).vision, **changes)


def lfm2_vl_16b(**changes) -> LlavaConfig:
    """LiquidAI/LFM2-VL-1.6B."""
    vision = dataclasses.replace(siglip_so400m(256, patch_size=16).vision, layers=26)
    return _lfm2_vl("lfm2_12b", vision, **changes)


def _llama4(decoder: str, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        Llama4VisionConfig(),
        RELATIVES[decoder](),
        feature_layer=-1,
        select="leading",
        resize="squash_bilinear",
        projector_width=4096,
        projector_bias=False,
        image_token=200092,
        family="llama4",
        connector="adapter",
        merge=2,
        normed=True,
        split=tiles.CanvasTiles(),
        before_token=200080,
        after_token=200081,
    )
    return dataclasses.replace(sizes, **changes)


def llama4_scout_vl(**changes) -> LlavaConfig:
    """meta-llama/Llama-4-Scout-17B-16E-Instruct."""
    return _llama4("llama4_scout", **changes)


def llama4_maverick_vl(**changes) -> LlavaConfig:
    """meta-llama/Llama-4-Maverick-17B-128E-Instruct."""
    return _llama4("llama4_maverick", **changes)


PRESETS = {
    "lfm2_vl_450m": lfm2_vl_450m,
    "lfm2_vl_16b": lfm2_vl_16b,
    "llama4_scout_vl": llama4_scout_vl,
    "llama4_maverick_vl": llama4_maverick_vl,
    "paligemma2_3b": paligemma2_3b,
    "paligemma2_10b": paligemma2_10b,
    "paligemma2_28b": paligemma2_28b,
    "gemma4_e2b_vl": gemma4_e2b_vl,
    "gemma4_e4b_vl": gemma4_e4b_vl,
    "gemma4_12b_vl": gemma4_12b_vl,
    "gemma4_31b_vl": gemma4_31b_vl,
    "gemma4_26b_a4b_vl": gemma4_26b_a4b_vl,
    "gemma3_4b_vl": gemma3_4b_vl,
    "gemma3_12b_vl": gemma3_12b_vl,
    "gemma3_27b_vl": gemma3_27b_vl,
    "llava15_7b": llava_1_5_7b,
    "llava15_13b": llava_1_5_13b,
    "smolvlm2_256m": smolvlm2_256m,
    "smolvlm2_500m": smolvlm2_500m,
    "smolvlm2_22b": smolvlm2_22b,
    "granite_docling_258m": granite_docling_258m,
    "internvl35_1b": internvl35_1b,
    "internvl35_2b": internvl35_2b,
    "internvl35_4b": internvl35_4b,
    "internvl35_8b": internvl35_8b,
}

_FREE_OF_TOWER = ("dtype", "remat", "unroll")


def base(title: str, example: str, config: type[LlavaConfig]) -> Base:
    """How a run fine-tunes a model of a tower and a decoder; none is trained from scratch."""
    free = {"changes": FREE, "vision": _FREE_OF_TOWER}
    parts = {"changes": "llama", "vision": "vision"}
    return Base(title, f"a folder or ORG/NAME, such as {example}", config, free, parts)


BASE = base("LLaVA", "llava-hf/llava-1.5-7b-hf", LlavaConfig)
