"""The decoding state of every slot of an engine, and the rows that a step makes of it."""

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from mmqa_jax.decoding.sampling import SamplingParameters
from mmqa_jax.models.llama.config import LlamaConfig


@flax.struct.dataclass
class Slots:
    """Decoding state of every slot; [S] each."""

    token: jax.Array  # int32: the last token, not yet in the cache
    position: jax.Array  # int32: its position
    count: jax.Array  # int32: new tokens so far
    parameters: SamplingParameters
    # int32: by how much rotary positions differ from `position` (M-RoPE); None: they are it.
    shift: jax.Array | None = None
    # int32 [S, T]: prompt and answer by column, where proposals are looked up; None: nowhere.
    text: jax.Array | None = None


def slot_shapes(count: int, sharding: Sharding, *, shifts: bool, text: int) -> Slots:
    """ShapeDtypeStructs of the state of `count` slots, with so many columns of text, if any."""

    def array(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), kind, sharding=sharding)

    number = array("float32")
    parameters = SamplingParameters(number, array("int32"), number, array("uint32", 2))
    integer = array("int32")
    of_text = array("int32", text) if text else None
    return Slots(integer, integer, integer, parameters, integer if shifts else None, of_text)


def of_active(slots: Slots, table: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pages [S, M] and positions [S] of slots in a step; of those that are not active 0."""
    return jnp.where(active[:, None], table, 0), jnp.where(active, slots.position, 0)


def step_ends(config: LlamaConfig, starts: jax.Array, active: jax.Array) -> jax.Array:
    """Columns [R] behind the tokens of a step, of which rows that are not active have none where
    a recurrent state would take it."""
    return starts + (active if config.recurrent else 1)


def with_proposed(token: jax.Array, proposed: jax.Array | None) -> jax.Array:
    """The tokens [S, L] of a step; marks of pictures, which a text may hold, are token 0."""
    if proposed is None:
        return token[:, None]
    return jnp.concatenate([token[:, None], jnp.maximum(proposed, 0)], axis=1)


def token_rows(
    slots: Slots,
    table: jax.Array,
    active: jax.Array,
    adapters: jax.Array | None,
    proposed: jax.Array | None,
) -> tuple[jax.Array | None, ...]:
    """A step's tokens as rows of one token each: [R, 1], their pages, positions, shifts, adapters.

    Keys and values of all rows are written before any row reads: a slot's later tokens see its
    earlier ones.
    """
    table, position = of_active(slots, table, active)
    tokens = with_proposed(slots.token, proposed)
    length = tokens.shape[1]
    shifts = None if slots.shift is None else slots.shift[:, None]
    if length > 1:
        position = (position[:, None] + jnp.arange(length)).reshape(-1)
        of_slots = (table, shifts, adapters)
        table, shifts, adapters = jax.tree.map(lambda x: jnp.repeat(x, length, axis=0), of_slots)
    return tokens.reshape(-1, 1), table, position, shifts, adapters
