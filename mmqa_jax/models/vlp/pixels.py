"""VLP on pictures without a detector (ours): regions are patches of pixels, or CLIP's of them."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from mmqa_jax.models.bert.network import BertConfig, minilm_l6
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.models.two_towers.network import VisionTower, blocks_before, normalize_pixels
from mmqa_jax.models.vlp.network import RegionEncoder, VLPConfig

# First weights of patches: small ones of the content and larger ones of the position, which has
# few values, so that neither drowns the other, nor a tag.
_PATCH_STDDEVS = {"content_stddev": 0.01, "place_stddev": 0.03}


def vlp_patches(
    patch: int,
    *,
    bert: BertConfig | None = None,
    visual_hidden: tuple[int, ...] = (),
    region_positions: int = 6,
    **trunk,
) -> VLPConfig:
    """Regions are square patches of raw pixels: patch * patch * 3 values, 6 or more of position.

    The trunk is MiniLM-L6's shape with VLP's six token types unless `bert` is given; used on the
    Atlas corpus, where no detector runs.
    """
    return VLPConfig(
        dataclasses.replace(bert or minilm_l6(types=6), **trunk),
        region_features=patch * patch * 3,
        region_positions=region_positions,
        visual_hidden=tuple(visual_hidden),
        **_PATCH_STDDEVS,
    )


def vlp_clip(
    vision: VisionConfig, *, bert: BertConfig, layer: int = -2, visual_hidden: tuple[int, ...] = ()
) -> ClipVLPConfig:
    """Regions are CLIP's patch features, made on the fly; positions are the patches' box values."""
    return ClipVLPConfig(
        bert,
        region_features=vision.patch_size**2 * 3,
        region_positions=6,
        visual_hidden=tuple(visual_hidden),
        vision=vision,
        vision_layer=layer,
        **_PATCH_STDDEVS,
    )


@dataclasses.dataclass(frozen=True)
class ClipVLPConfig(VLPConfig):
    """A VLP whose regions are patches of raw pixels, of which a frozen CLIP makes the content.

    Attributes:
      vision: CLIP's tower; see ClipRegionEncoder.
      vision_layer: whose features are taken.
    """

    vision: VisionConfig = dataclasses.field(kw_only=True)
    vision_layer: int = -2

    def __post_init__(self):
        blocks_before(self.vision_layer, self.vision.layers, "model.vision_layer")

    def make_region_content(self, rngs: nnx.Rngs) -> RegionEncoder:
        sizes = (*self.visual_hidden, self.bert.hidden)
        vision, bert = (self.vision, self.vision_layer), self.bert
        options = {"rngs": rngs, "stddev": self.content_stddev}
        return ClipRegionEncoder(*vision, sizes, bert.dropout, bert.dtype, **options)


class ClipRegionEncoder(RegionEncoder):
    """Patches of raw pixels -> CLIP's patch features -> linears, as RegionEncoder.

    The tower is in front of the model within the same jitted step, not in the input pipeline:
    it then sees whole batches on the accelerator, and a picture travels as its pixels, which the
    host keeps decoded; float features of WebQA's 390,000 pictures would be 200 GB and more, and
    made one by one on the host they would hold up every step. It is frozen, and saved with the
    run, so that a trained model needs no second folder.
    """

    def __init__(
        self, vision: VisionConfig, layer: int, sizes: tuple[int, ...], rate: float, dtype: str,
        *, rngs: nnx.Rngs, stddev: float | None,
    ):  # fmt: skip
        super().__init__(vision.width, sizes, rate, dtype, rngs=rngs, stddev=stddev)
        self.tower, self.layer = VisionTower(vision, rngs=rngs), layer

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        return super().__call__(self.features(x), dropout_key=dropout_key)

    def features(self, x: jax.Array) -> jax.Array:
        """Patches [B, R, patch * patch * 3], pixels in -1..1 -> features [B, R, width]."""
        vision = self.tower.config
        side, patch = vision.image_size // vision.patch_size, vision.patch_size
        pixels = (x + 1) / 2  # 0..1
        pixels = pixels.reshape(-1, side, side, patch, patch, 3)  # [B * pictures, row, column, ...]
        pixels = pixels.transpose(0, 1, 3, 2, 4, 5)
        pixels = pixels.reshape(-1, vision.image_size, vision.image_size, 3)
        features = self.tower.patch_features(normalize_pixels(pixels), self.layer)
        return jax.lax.stop_gradient(features).reshape(*x.shape[:2], vision.width)
