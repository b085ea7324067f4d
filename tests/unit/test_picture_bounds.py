"""Memory of hostile pictures is bounded; what thin ones give equals Pillow's whole picture."""

import functools
import io
import json
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats.official import ParquetPictures, PictureFiles
from mmqa_jax.data.pictures import bounds, decode, resize
from mmqa_jax.data.pictures.resize import (
    PAD_COLOR,
    llava_pixels,
    pad_to_square,
    resized_on_square,
    resized_part,
)
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

BICUBIC = Image.Resampling.BICUBIC
MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "RGBX": 4}


def noise(rng, mode, width, height):
    shape = height, width
    bands = [
        Image.fromarray(rng.integers(0, 256, shape).astype(np.uint8)) for _ in range(MODES[mode])
    ]
    return Image.merge(mode, bands)


def chunk(name, data):
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def png(width, height, depth=8, color=2, *chunks):
    """A PNG that claims this size and holds next to nothing."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + body


@pytest.mark.parametrize("mode", MODES)
def test_part_of_an_enlarged_picture_is_pillows(mode):
    """On noise, of which resize(box=...) gives other pixels."""
    rng = np.random.default_rng(0)
    for case in range(40):
        short, long = int(rng.integers(1, 12)), int(rng.integers(12, 400))
        width, height = (short, long) if case % 2 else (long, short)
        size = short + int(rng.integers(1, 20))
        scaled = int(size * width / short), int(size * height / short)
        left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
        box = left, top, left + size, top + size
        image = noise(rng, mode, width, height)
        whole = image.resize(scaled, BICUBIC).crop(box)
        part = resized_part(image, scaled, box)
        assert (part.mode, part.size) == (whole.mode, whole.size)
        np.testing.assert_array_equal(part, whole, err_msg=f"{width} x {height} to {size}")


def test_picture_on_a_square_is_pillows():
    rng = np.random.default_rng(1)
    for case in range(60):
        short, long = int(rng.integers(1, 60)), int(rng.integers(60, 300))
        width, height = (short, long) if case % 2 else (long, short)
        size = int(rng.integers(1, 80))
        image = noise(rng, "RGB", width, height)
        wanted = pad_to_square(image).resize((size, size), BICUBIC)
        np.testing.assert_array_equal(resized_on_square(image, size, PAD_COLOR), wanted)


@pytest.mark.parametrize(("width", "height", "alpha"), [(1, 900, "white"), (900, 1, "dropped")])
def test_thin_picture_of_a_crop_is_pillows(width, height, alpha):
    """40 million pixels when scaled: still small enough to compare."""
    image = noise(np.random.default_rng(2), "RGB", width, height)
    size = 212
    assert size * size * 900 > bounds.FREE_PIXELS
    scaled = size * width, size * height
    left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    wanted = image.resize(scaled, BICUBIC).crop((left, top, left + size, top + size))
    found = decode.decode_to_pixels(encoded(image), size, "crop", alpha=alpha)
    np.testing.assert_array_equal(found, wanted)


def tiff_of_one_tile(side):
    """10 x 10 pixels in a tile of that side, LZW."""
    tags = {256: 10, 257: 10, 258: 8, 259: 5, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: 99}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(200)


@functools.cache
def packed():
    """A text or profile that unpacks to 128 MiB."""
    return b"a\0\0" + zlib.compress(bytes(2**27), 1)


def flood(name):
    """A PNG with such a profile, or nine such texts."""
    return png(4, 4, 8, 2, *[chunk(name, packed())] * (9 if name == b"zTXt" else 1))


def animation():
    """600 frames of 900 x 900: 464 MiB for whoever keeps them."""
    three = [Image.new("P", (900, 900), 1 + n % 2) for n in range(3)]
    file = encoded(three[0], "GIF", save_all=True, append_images=three[1:], duration=10)
    start = b"!\xf9\x04"  # of each frame
    head, first, second, _ = file.split(start)
    animated = head + (start + first + start + second) * 300 + b";"
    with Image.open(io.BytesIO(animated)) as image:
        assert (image.n_frames, image.size) == (600, (900, 900))
    return animated


# What -> (its bytes, or what makes them, how a model takes it, MiB above the interpreter, sentence or None for pixels).
_WORTH = "more than the .* pixels that such a file may hold; give a smaller picture"
_LONG = "too long and thin: .* cut it into parts"
HOSTILE = {
    "thin, 1 x 65,000": (encoded(Image.new("RGB", (1, 65_000), (200, 10, 10))), "crop", 40, None),
    "thin, 65,000 x 1": (encoded(Image.new("RGB", (65_000, 1), (200, 10, 10))), "crop", 40, None),
    "thin, padded": (encoded(Image.new("RGB", (1, 30_000))), "llava", 300, None),
    "long, padded": (encoded(Image.new("RGB", (200, 20_000))), "llava", 200, None),
    "long, 1 x 200,000, padded": (encoded(Image.new("L", (1, 200_000))), "llava", 40, _LONG),
    "long, squashed": (encoded(Image.new("L", (1, 200_000))), "squash", 40, _LONG),
    "thin palette": (encoded(Image.new("P", (1, 65_000))), "palette", 40, _LONG),
    "13,000 x 13,000 in 68 bytes": (png(13_000, 13_000), "crop", 40, _WORTH),
    "60,000 x 60,000": (png(60_000, 60_000), "crop", 40, "exceeds limit of 178956970 pixels"),
    "tEXt": (lambda: flood(b"zTXt"), "crop", 60, None),
    "iCCP": (lambda: flood(b"iCCP"), "crop", 60, None),
    "icon with a PNG of 12,000 x 12,000": (
        b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 1, 1, 0, 0, 1, 32, 68, 22) + png(12_000, 12_000),
        "crop", 60, _WORTH,
    ),
    "GIF of 600 frames": (animation, "crop", 40, None),
    "TIFF of one tile": (tiff_of_one_tile(40_000), "crop", 40, "40,000 x 40,000 pixels in a file"),
    "WebP of 16,383 x 16,383": (
        b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8L" + struct.pack("<I", 18) + b"\x2f"
        + struct.pack("<I", 16_382 | 16_382 << 14) + bytes(13),
        "crop", 40, "exceeds limit",
    ),
}  # fmt: skip
# A process of its own for each picture, forked from one that has decoded a small one.
_MEASURE = """
import json, os, resource, sys
from mmqa_jax.data.pictures import decode as images
from mmqa_jax.data.pictures.resize import llava_pixels
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
small, *cases = json.loads(sys.argv[1])
images.decode_to_pixels(open(small, "rb").read(), 8, alpha="white")
for path, way in cases:
    if process := os.fork():
        os.waitpid(process, 0)
        continue
    data = open(path, "rb").read()
    before = peak()
    try:
        if way == "llava":
            shape = llava_pixels(images.decode(data, "x")).shape
        else:
            alpha, way = ("dropped", "crop") if way == "palette" else ("white", way)
            shape = images.decode_to_pixels(data, 224, way, alpha=alpha, name="x").shape
        said = None
    except images.PictureError as error:
        said = str(error)
    print(json.dumps([path, peak() - before, said]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What -> MiB that its decoding took, and what was said."""
    folder = tmp_path_factory.mktemp("hostile")
    small, cases = folder / "small.png", {}
    small.write_bytes(encoded(Image.new("RGB", (9, 9))))
    for number, (what, (data, way, *_)) in enumerate(HOSTILE.items()):
        path = folder / str(number)
        path.write_bytes(data() if callable(data) else data)
        cases[str(path)] = what, way
    given = json.dumps([str(small), *((path, way) for path, (_, way) in cases.items())])
    ended = subprocess.run(
        [sys.executable, "-c", _MEASURE, given], capture_output=True, timeout=300, check=True
    )
    rows = map(json.loads, ended.stdout.splitlines())
    return {cases[path][0]: (used, said) for path, used, said in rows}


@pytest.mark.parametrize("what", HOSTILE)
def test_memory_is_bounded(what, measured):
    _, _, most, message = HOSTILE[what]
    used, said = measured[what]
    assert used < most
    if message is None:
        assert said is None
    else:
        assert said is not None
        assert re.search(message, said)


def test_the_bound_grows_with_the_file(monkeypatch):
    """What a file is worth: a flat picture that zlib packed a thousandfold is read."""
    flat = encoded(Image.new("L", (9_000, 4_000)))
    assert bounds.FREE_PIXELS < 9_000 * 4_000
    assert decode.decode_to_pixels(flat, 8, alpha="white").shape == (8, 8, 3)
    with pytest.raises(decode.PictureError, match="more than the"):
        decode.verify(png(9_000, 4_000, 8, 0), "claims.png")
    monkeypatch.setattr(bounds, "MOST_BYTES", 100)
    for read in (decode.decode, decode.verify):
        with pytest.raises(decode.PictureError, match=r"a\.png: .* bytes, more than the 100 of"):
            read(flat, "a.png")


def test_files_beyond_the_bound_are_not_read(tmp_path):
    """A file that is all hole: 8 GiB to whoever reads it."""
    path = tmp_path / "hole.png"
    with open(path, "wb") as file:
        file.truncate(2**33)
    with pytest.raises(decode.PictureError, match=r"hole\.png: 8,589,934,592 bytes, more than"):
        decode.read_picture_file(path)


def test_llava_takes_the_short_way_only_for_large_squares():
    image = noise(np.random.default_rng(4), "RGB", 40, 90)
    np.testing.assert_array_equal(
        llava_pixels(image, 28), resize.to_pixels(pad_to_square(image), 28, "crop")
    )


def test_pictures_of_a_table_are_read_one_by_one(tmp_path, monkeypatch):
    """A dictionary of one picture for 2,000 rows: 16 GiB as a list, 8 MiB here."""
    import pyarrow
    import pyarrow.parquet

    picture = encoded(Image.new("RGB", (9, 9))) + bytes(2**23)
    rows = pyarrow.DictionaryArray.from_arrays([0] * 2_000, [picture])
    cells = pyarrow.StructArray.from_arrays([rows, pyarrow.array(["x"] * 2_000)], ["bytes", "path"])
    path = tmp_path / "train.parquet"
    table = pyarrow.table({"id": [str(n) for n in range(2_000)], "image": cells})
    pyarrow.parquet.write_table(table, path)
    before = pyarrow.total_allocated_bytes()
    pictures = ParquetPictures([path], "id")
    assert pictures("1999") == picture
    assert pyarrow.total_allocated_bytes() - before < 2**26
    monkeypatch.setattr(bounds, "MOST_BYTES", 1_000)
    refuses(r"id 7: .* bytes, more than the 1,000", pictures, "7", error=bounds.PictureError)
    with pytest.raises(UserError, match=r"train\.parquet, row group 0: .* bytes claim to hold"):
        ParquetPictures([path], "id")("7")


def test_names_of_a_benchmark_do_not_lead_out_of_its_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    for place in ("../secret.png", str(tmp_path / "secret.png"), "a/../../secret.png"):
        with pytest.raises(UserError, match=r"'q' is said to lie at .*, outside that folder"):
            PictureFiles(tmp_path / "in", {"q": (place,)})
