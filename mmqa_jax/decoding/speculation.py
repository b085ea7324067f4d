"""Speculation: a step takes several tokens of each sequence, all but the first of them proposed.

The model computes what follows each of them, in one pass over its weights, and keeps those that are
what it writes itself. Proposals are read from the text so far (prompt lookup, Saxena 2023), which
pays where answers quote their sources, or written by a smaller model (Leviathan et al. 2023). What
token number n of an answer is depends on the model's logits, and on the noise of its draw, which is
the same whatever was proposed (Daliri et al. 2024): so answers are those of steps of one token, the
sampled ones too, and no proposal needs a probability.
"""

import jax
import jax.numpy as jnp

from mmqa_jax.decoding.sampling import Shaping, TopLogprobs, choose
from mmqa_jax.decoding.slots import Slots
from mmqa_jax.models.llama.network import Llama

MOST = 8  # tokens of a slot in a step, as many as the TPU's kernel takes
_LONGEST = 3  # of the last tokens, how many are looked up


def look_up(text: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """What followed the last place where a text's last tokens stood before.

    Of all places the one where the most of its last three tokens are, and of these the last; what
    would lie behind the text goes on from that place again.

    Args:
      text: int32 [S, T], prompt and answer by column.
      position: int32 [S], the column of the last token.
      count: how many tokens are wanted.

    Returns:
      int32 [S, count]; any tokens where nothing is found.
    """
    column = jnp.arange(text.shape[1])
    before = column < position[:, None]
    is_same, length = before, jnp.zeros(text.shape, jnp.int32)
    for back in range(_LONGEST):
        last = jnp.take_along_axis(text, jnp.maximum(position - back, 0)[:, None], axis=1)
        earlier = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]  # `back` columns before
        is_same = is_same & (earlier == last) & (column >= back)
        length = length + is_same
    place = jnp.where(before, length * text.shape[1] + column, 0).max(1) % text.shape[1]
    period = jnp.maximum(position - place, 1)[:, None]
    following = place[:, None] + 1 + jnp.arange(count) % period
    return jnp.take_along_axis(text, following, axis=1)


def proposals(slots: Slots, speculate: int) -> jax.Array | None:
    """What a step of `speculate` tokens a slot takes beside the last ones, int32 [S, L - 1]; None:
    nothing."""
    return None if slots.text is None else look_up(slots.text, slots.position, speculate - 1)


def kept_tokens(
    model: Llama,
    slots: Slots,
    hidden: jax.Array,
    proposed: jax.Array,
    active: jax.Array,
    sampled: bool | None,
    shaping: Shaping | None = None,
) -> tuple[Slots, jax.Array, jax.Array | TopLogprobs]:
    """The slots after a step of L tokens each, and what it wrote.

    Args:
      slots: all slots, S.
      hidden: normed states [S * L, H] of each slot's last token and of those proposed.
      proposed: int32 [S, L - 1].
      active, sampled, shaping: see `sampling.choose`; a row that is shaped keeps one token, since
        the next ones' shape depends on it.

    Returns:
      Slots, tokens int32 [S, L], -1 behind the last one that is the model's own, and their
      log-probabilities float32 [S, L].
    """
    count, length = len(proposed), proposed.shape[1] + 1
    each = jnp.arange(length)

    def of_tokens(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, length, axis=0)

    parameters, of_rows = jax.tree.map(of_tokens, (slots.parameters, shaping))
    numbers = (slots.count[:, None] + each).reshape(-1)
    drawn = choose(model.logits(hidden), parameters, numbers, of_tokens(active), sampled, of_rows)
    tokens, logprobs = jax.tree.map(lambda x: x.reshape(count, length, *x.shape[1:]), drawn)
    right = jnp.cumprod(tokens[:, :-1] == proposed, axis=1).sum(1)  # [S], how many were right
    if shaping is not None:
        right = jnp.where(shaping.is_shaped, 0, right)
    text = slots.text
    if text is not None:
        column = jnp.arange(text.shape[1]) - slots.position[:, None] - 1
        for n in range(length):  # no scatter, of which XLA for TPUs makes a loop
            text = jnp.where(column == n, tokens[:, n : n + 1], text)
    slots = slots.replace(
        token=jnp.take_along_axis(tokens, right[:, None], axis=1)[:, 0],
        position=slots.position + right + 1,
        count=slots.count + right + 1,
        text=text,
    )
    return slots, jnp.where(each <= right[:, None], tokens, -1), logprobs
