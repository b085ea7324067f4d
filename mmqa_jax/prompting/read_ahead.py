"""Pictures of a stream of queries, decoded in threads before they are needed."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mmqa_jax.data.images import PictureError

T, P = TypeVar("T"), TypeVar("P")


def read_ahead(
    items: Iterable[T],
    pictures_of: Callable[[T], Sequence[P]],
    read: Callable[[P], Any],
    ahead: int,
) -> Iterator[tuple[T, list[Any] | PictureError]]:
    """Items in their order, each with its pictures as `read` gives them, or with its error.

    A picture that recurs among the last `ahead` is read once.

    Args:
      items: read as far as they have `ahead` pictures, or are `ahead` themselves.
      pictures_of: of an item.
      read: called in threads; may raise PictureError.
      ahead: how many pictures may be in memory before they are needed, one item's at least.
    """
    source, started = iter(items), collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    submit = functools.lru_cache(maxsize=ahead)(functools.partial(pool.submit, read))
    pictures, exhausted = 0, False
    try:
        while started or not exhausted:
            while not exhausted and max(pictures, len(started)) < ahead:
                try:
                    item = next(source)
                except StopIteration:
                    exhausted = True
                    break
                futures = [submit(picture) for picture in pictures_of(item)]
                started.append((item, futures))
                pictures += len(futures)
            if not started:
                return
            item, futures = started.popleft()
            pictures -= len(futures)
            try:
                found: list[Any] | PictureError = [one.result() for one in futures]
            except PictureError as error:
                found = error
            yield item, found
    finally:
        pool.shutdown(cancel_futures=True)
