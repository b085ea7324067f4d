"""How much memory a picture may take: the rule, in one place.

A picture is worth what its file holds. Codecs pack flat areas without limit (100 bytes of lossless
WebP are a white square of 16,383 x 16,383 pixels), so that neither a file's size nor what it claims
alone bounds the memory of whoever reads it:

    a file         MOST_BYTES at most, also as a member of a tar, a line of base64 or a table's cell
    a table's      MOST_BYTES, and 8 times as much as the file holds of it (encoded pictures hardly
    row group      pack any further)
    decoded        FREE_PIXELS, and PIXELS_PER_BYTE more for each byte of the file; never more than
                   MOST_PIXELS
    made of it     FREE_PIXELS at most in a picture that only resizing makes

A pixel takes 4 bytes in Pillow, and up to three copies of a picture exist while it is laid on
white: a small file costs at most half a gigabyte, the largest one about 3. What is beyond is a
broken picture: it is counted and named, and never decoded. For more, make the picture smaller.
"""

from PIL import Image

from mmqa_jax.core.errors import UserError

MOST_BYTES = 2**28  # a picture of 89 million pixels in 24 bits, not compressed
MOST_PIXELS = 178_956_970  # Pillow's own limit
FREE_PIXELS = 2**25  # 8,192 x 4,096, 128 MiB
PIXELS_PER_BYTE = 1_024  # deflate's, of PNG: at most 1,032 bytes come out of one
_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # TIFF's tags


class PictureError(UserError):
    """These bytes are not a picture that can be decoded."""


def check_bytes(size: int, name: str) -> None:
    """PictureError for a picture's file (or member of one) of so many bytes, before it is read."""
    if size > MOST_BYTES:
        raise PictureError(
            f"{name}: {size:,} bytes, more than the {MOST_BYTES:,} of a picture file; give a "
            "smaller picture."
        )


def check_unpacked(held: int, size: int, where: str) -> None:
    """UserError where `held` compressed bytes of a file claim to be so many encoded pictures."""
    most = MOST_BYTES + 8 * held
    if size > most:
        raise UserError(
            f"{where}: {held:,} bytes claim to hold {size:,} of pictures, more than {most:,}; "
            "the file is damaged, fetch it again."
        )


def check_decoded(image: Image.Image, size: int, name: str) -> None:
    """PictureError for a file of `size` bytes that claims too many pixels, before it is decoded;
    `image` is opened, and not loaded.
    """
    width, height = image.size
    if image.format == "TIFF":  # a tile is decoded whole, however little of it is shown
        tile = image.tag_v2.get(_TILE_WIDTH, 0), image.tag_v2.get(_TILE_HEIGHT, 0)
        width, height = max((width, height), tile, key=lambda sides: sides[0] * sides[1])
    check_pixels(width, height, size, name)


def check_pixels(width: int, height: int, size: int, name: str) -> None:
    """PictureError for so many pixels in `size` encoded bytes, before they are decoded."""
    most = min(FREE_PIXELS + PIXELS_PER_BYTE * size, MOST_PIXELS)
    if width * height > most:
        raise PictureError(
            f"{name}: {width:,} x {height:,} pixels in a file of {size:,} bytes, more than the "
            f"{most:,} pixels that such a file may hold; give a smaller picture."
        )


def check_made(width: int, height: int, name: str) -> None:
    """PictureError where resizing would make a picture of so many pixels on the way."""
    if width * height > FREE_PIXELS:
        raise PictureError(
            f"{name}: too long and thin: resizing makes {width:,} x {height:,} pixels of it, more "
            f"than {FREE_PIXELS:,}; cut it into parts."
        )
