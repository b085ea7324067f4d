"""Which cached tokens each beam of a search continues, so that none of them is ever moved."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Ancestry:
    """Where the tokens of K beams a prefix lie among the columns of a cache.

    Column t * K + s holds token t of the beam that was in slot s when it was written. Beams change
    slots in every step; the columns stay, and each beam knows which are its own.
    """

    slots: jax.Array  # [B, K, T] int: where each beam's token t was written

    @classmethod
    def empty(cls, prefixes: int, beams: int, most: int) -> Ancestry:
        """Makes the ancestry of beams without tokens, for at most `most` tokens."""
        return cls(jnp.zeros((prefixes, beams, most), jnp.int32))

    def select(self, rows: jax.Array) -> Ancestry:
        """Returns the ancestry of beams `rows` [B * K], after the beams were reordered."""
        size = self.slots.shape
        return Ancestry(self.slots.reshape(-1, size[-1])[rows].reshape(size))

    def visible(self, count: jax.Array) -> jax.Array:
        """bool [B, K, T * K]: the columns of each beam's first `count` tokens."""
        prefixes, beams, most = self.slots.shape
        own = self.slots[..., None] == jnp.arange(beams)  # [B, K, T, K]
        written = jnp.arange(most)[:, None] < count
        return (own & written).reshape(prefixes, beams, -1)

    def written(self, number: jax.Array) -> Ancestry:
        """After every beam's token `number` was written: into the slot that the beam is in."""
        prefixes, beams, _ = self.slots.shape
        slot = jnp.broadcast_to(jnp.arange(beams)[:, None], (prefixes, beams, 1))
        return Ancestry(jax.lax.dynamic_update_slice(self.slots, slot, (0, 0, number)))
