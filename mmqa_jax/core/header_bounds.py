"""How much a file may say that it holds: the one bound of all readers of arrays.

A header names lengths, shapes, strides and offsets, and a reader allocates or loops as it says. One
that is damaged or made to harm names what the file cannot hold, so that a few bytes take a
machine's memory or minutes of its time. Everything that a file claims is compared with its size
first, and refused by name where it is more:

  values as they are in the file     at most the bytes of the file
  compressed values                  at most `COMPRESSION` times as many
  all tensors of a file together     at most `SHARED` times as many, since several may be one
"""

from __future__ import annotations

from mmqa_jax.core.errors import UserError

COMPRESSION = 1_100  # deflate makes at most 1,032 bytes of one
SHARED = 8


def check_claim(place: str, claimed: int, held: int, *, times: int = 1) -> None:
    """Raises UserError if a file says that it holds more than it can.

    Args:
      place: the file, and what in it, for the message.
      claimed: bytes that a part of it takes as its header says.
      held: bytes of the file.
      times: how much more than `held` may be claimed: 1, `COMPRESSION` or `SHARED`.
    """
    if claimed > held * times:
        raise UserError(
            f"{place}: claims {claimed:,} bytes, but the file has {held:,}; it is damaged or not "
            "what it seems, fetch it again."
        )
