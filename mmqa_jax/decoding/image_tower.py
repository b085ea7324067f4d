"""LLaVA's tower (CLIP and the projector) as the engine runs it: pictures in batches, each once.

On a mesh every device has the whole tower and encodes its own pictures, so that nothing is
exchanged within it: LLaVA-1.5's is 0.6 GB in bfloat16. Features are then split by columns over all
devices, so that a device holds its share of every picture, whichever slot needs it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mmqa_jax.core.mesh import replicated
from mmqa_jax.models.clip import normalize_pixels
from mmqa_jax.models.llava import Llava, LlavaConfig

# Pictures that a device encodes at once, one of these; a CPU gains nothing by more than one, and
# would compute the padding.
_AT_ONCE = (1, 8)
_AT_ONCE_ON_CPU = (1,)


def tower_of(model: Llava) -> nnx.Dict:
    """What is computed of a picture: CLIP up to the layer that is read, and the projector."""
    parts = nnx.Dict(vision=model.vision, projector=model.projector)
    parts = nnx.merge(*nnx.split(parts))  # the model keeps its own
    graphdef, layers = nnx.split(parts.vision.layers)
    count = _layers(model.config)
    # Cut once, not in every call.
    parts.vision.layers = nnx.merge(graphdef, jax.tree.map(lambda x: x[:count], layers))
    del parts.vision.ln_post
    return parts


def _layers(config: LlavaConfig) -> int:
    """How many of CLIP's layers come before the features."""
    layer = config.feature_layer
    return layer if layer >= 0 else config.vision.layers + 1 + layer


class TowerPrograms:
    """The jitted programs of a tower; nothing is allocated.

    `encode(state, pixels)`: uint8 [B, S, S, 3] -> B arrays [patches, H] in the LLaMA's dtype; B is
    one of `batches`. `gather(features, index)`: as many such arrays and int32 [R, L], rows of all
    their patches in order -> [R, L, H], what `SlotRunner.encode` takes.

    Args:
      tower: of `tower_of`; arrays or ShapeDtypeStructs.
      config: of its model.
      rows: where `gather` leaves its result.
      mesh: where all lies; None is the default device.
    """

    def __init__(
        self, tower: nnx.Dict, config: LlavaConfig, rows: Sharding, mesh: Mesh | None = None
    ):
        graphdef, layer, dtype = nnx.graphdef(tower), _layers(config), config.llama.dtype
        hidden = config.llama.hidden
        if mesh is None:
            device = jax.local_devices()[0]
            count, one = 1, SingleDeviceSharding(device)
            self.parameters = self.pixels = self.features = one
        else:
            device, count, axes = mesh.devices.flat[0], mesh.size, mesh.axis_names
            columns = axes if hidden % count == 0 else None
            self.parameters = replicated(mesh)
            self.pixels = NamedSharding(mesh, PartitionSpec(axes))
            self.features = NamedSharding(mesh, PartitionSpec(None, columns))
        each = _AT_ONCE_ON_CPU if device.platform == "cpu" else _AT_ONCE
        self.batches = tuple(size * count for size in each)

        def of_pictures(state, pixels):  # [B, S, S, 3] -> [B, patches, H]
            parts = nnx.merge(graphdef, state)
            states = parts.vision.patch_features(normalize_pixels(pixels), layer)
            return parts.projector(states.astype(dtype))

        def encode(state, pixels):
            if mesh is None:
                return tuple(of_pictures(state, pixels))
            of_batch = jax.shard_map(
                of_pictures,
                mesh=mesh,
                in_specs=(PartitionSpec(), self.pixels.spec),
                out_specs=self.pixels.spec,
                check_vma=False,
            )
            by_columns = NamedSharding(mesh, PartitionSpec(None, *self.features.spec))
            return tuple(jax.lax.with_sharding_constraint(of_batch(state, pixels), by_columns))

        def gather(features, index):
            rows = jnp.concatenate(features)  # [K * patches, H]
            return rows.at[index].get(mode="promise_in_bounds")

        self.encode = jax.jit(encode, out_shardings=self.features)
        self.gather = jax.jit(gather, out_shardings=rows)
