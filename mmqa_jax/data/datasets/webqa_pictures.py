"""imgs.tsv read and decoded by several threads, in order, a bounded number of pictures ahead."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from PIL import Image

from mmqa_jax.data.datasets.webqa import ImagesTsv
from mmqa_jax.data.images import BrokenPictures, PictureError, decode
from mmqa_jax.data.picture_records import processors

# Rows per task of a thread: neighbors in the file, and little overhead.
_ROWS = 8


def decoded_pictures(
    pictures: ImagesTsv,
    rows: Iterable[int] | None = None,
    *,
    broken: BrokenPictures | None = None,
    workers: int | None = None,
) -> Iterator[tuple[int, Image.Image | None]]:
    """Yields (row, RGB picture) of rows of imgs.tsv in the given order.

    At most some dozens of pictures per worker are in memory. Threads suffice: Pillow's decoders and
    file reads release Python's lock.

    Args:
      pictures: imgs.tsv with its lineidx.
      rows: None: all of them.
      broken: counts pictures that cannot be decoded, which come as None, up to its limit; None:
        the first one raises PictureError.
      workers: threads; None: one per processor.

    Raises:
      RunError: too many are broken.
      UserError: as ImagesTsv.read.
    """
    count = workers or processors()
    numbers = iter(range(len(pictures)) if rows is None else rows)
    groups = iter(lambda: list(itertools.islice(numbers, _ROWS)), [])

    def read(group: list[int]) -> list[Image.Image | PictureError]:
        return [_decoded(pictures, row) for row in group]

    pool = ThreadPoolExecutor(count)
    waiting: collections.deque[tuple[list[int], Future]] = collections.deque()
    try:
        for group in itertools.chain(groups, itertools.repeat(None)):
            if group is not None:
                waiting.append((group, pool.submit(read, group)))
                if len(waiting) <= 2 * count:
                    continue
            if not waiting:
                return
            done, future = waiting.popleft()
            for row, picture in zip(done, future.result(), strict=True):
                if isinstance(picture, PictureError):
                    if broken is None:
                        raise picture
                    broken.add(f"row {row}", str(picture))
                    picture = None
                yield row, picture
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _decoded(pictures: ImagesTsv, row: int) -> Image.Image | PictureError:
    try:
        return decode(pictures.read(row), f"row {row}")
    except PictureError as error:
        return error
