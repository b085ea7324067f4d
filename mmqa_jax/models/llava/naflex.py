"""SigLIP 2's NaFlex tower in front of a decoder: pictures in whole units of patches (LFM2-VL)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmqa_jax.models.qwen_vl.network import PatchBatch
from mmqa_jax.models.two_towers.network import VisionTower, normalize_pixels, positions_at


class UnitSiglip(VisionTower):
    """SigLIP's blocks on the patches of pictures of any size, unit by unit (`PatchBatch`)."""

    def normalize(self, pictures: PatchBatch) -> PatchBatch:
        """Patches as uint8 0..255 -> what the tower takes."""
        pixels = pictures.patches.reshape(*pictures.patches.shape[:2], -1, 3)
        pixels = normalize_pixels(pixels, self.config.pixel_mean, self.config.pixel_std)
        return pictures.replace(patches=pixels.reshape(pictures.patches.shape))

    def embed(self, pictures: PatchBatch) -> tuple[jax.Array, jax.Array]:
        """Normalized patches -> [B, N, width], and which are there, bool [B, N]."""
        c, places = self.config, jnp.asarray(pictures.places)
        grid = self.positions[...].reshape(c.side, c.side, c.width)
        positions = positions_at(grid, jnp.maximum(places, 0), jnp.asarray(pictures.grid))
        x = self.patch(jnp.asarray(pictures.patches).astype(c.dtype))
        return x + positions.astype(x.dtype), places[..., 0] >= 0
