"""How a test says that a call is refused, on one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mmqa_jax.core.errors import UserError


def refuses(
    message: str,
    call: Callable,
    *arguments: object,
    error: type[Exception] = UserError,
    **options: object,
) -> None:
    """Checks that `call(*arguments, **options)` ends in an error whose text `message` matches.

    message: a regular expression; the place and the key of the remedy are enough.
    """
    __tracebackhide__ = True
    with pytest.raises(error, match=message):
        call(*arguments, **options)
