"""Every mode that Pillow opens, with its transparency: the pixels that come out, or a refusal."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, TiffImagePlugin

from mmqa_jax.data.pictures import decode
from tests.pictures import encoded
from tests.refusals import refuses

WHITE = 255


def of(values, kind=np.uint8):
    return Image.fromarray(np.array(values, kind))


def merged(mode, *bands):
    return Image.merge(mode, [of([band]) for band in bands])


def palette(transparency=None, colors=((255, 0, 0), (0, 0, 200), (9, 9, 9)), bits=None):
    image = Image.new("P", (3, 1))
    image.putpalette([value for color in colors for value in color])
    for x in range(3):
        image.putpixel((x, 0), x)
    options = {} if transparency is None else {"transparency": transparency}
    return encoded(image, **options, **({} if bits is None else {"bits": bits}))


def png(rows, depth, kind, *chunks):
    """A PNG of raw rows of bytes: bit depth, color type (0 gray, 2 RGB, 3 palette, 4, 6 alpha)."""

    def chunk(name, data):
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    width = len(rows[0]) * 8 // (depth * channels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), depth, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + bytes(row) for row in rows)))
    middle = b"".join(chunk(name, data) for name, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + head + middle + body + chunk(b"IEND", b"")


def tiff(row, bits, *, order="<", form=1, photometric=1, samples=1, extra=None):
    """A TIFF of one row of raw bytes, not compressed."""
    width = len(row) * 8 // (bits * samples)
    tags = {256: width, 257: 1, 258: [bits] * samples, 259: 1, 262: photometric, 273: None}
    tags |= {277: samples, 278: 1, 279: len(row), 339: [form] * samples}
    if extra is not None:
        tags[338] = extra
    end = 8 + 2 + 12 * len(tags) + 4  # of the directory; long values follow it
    entries, after = b"", b""
    for tag, value in sorted(tags.items()):
        if value is None:  # where the row is: behind the long values, of at most 8 bytes each
            entries += struct.pack(f"{order}HHII", tag, 4, 1, end + 16)
            continue
        values = value if isinstance(value, list) else [value]
        packed = struct.pack(f"{order}{len(values)}H", *values)
        if len(packed) > 4:
            packed, after = struct.pack(f"{order}I", end + len(after)), after + packed
        entries += struct.pack(f"{order}HHI", tag, 3, len(values)) + packed.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    return head + entries + struct.pack(f"{order}I", 0) + after.ljust(16, b"\0") + row


def fits(bits, row):
    """A FITS of one row of raw bytes; bits below 0 are floats."""
    cards = {
        "SIMPLE": "T",
        "BITPIX": bits,
        "NAXIS": 2,
        "NAXIS1": len(row) * 8 // abs(bits),
        "NAXIS2": 1,
    }
    head = "".join(f"{key:8}= {value:>20}".ljust(80) for key, value in cards.items()) + "END"
    return head.ljust(2880).encode() + row.ljust(2880, b"\0")


def raw(values, kind):
    return np.array(values, kind).tobytes()


def gray(*values):
    return [(value,) * 3 for value in values]


def animation(form, **options):
    first, second = (Image.new("RGB", (3, 1), color) for color in ((200, 0, 0), (0, 0, 200)))
    return encoded(first, form, save_all=True, append_images=[second, second], **options)


# What -> (encoded picture, its first pixels on white).
READ = {
    "1": (encoded(of([[0, 1]], bool)), gray(0, 255)),
    "L": (encoded(of([[0, 7, 255]])), gray(0, 7, 255)),
    "L, transparent color": (encoded(of([[0, 7, 255]]), transparency=7), gray(0, 255, 255)),
    "LA": (encoded(merged("LA", [0, 0, 10], [255, 0, 128])), gray(0, 255, 132)),
    "P": (palette(), [(255, 0, 0), (0, 0, 200), (9, 9, 9)]),
    "P, tRNS as bytes": (palette(b"\xff\x00\x80"), [(255, 0, 0), (255,) * 3, (132,) * 3]),
    "P, tRNS as index": (palette(1), [(255, 0, 0), (255,) * 3, (9, 9, 9)]),
    "P of 2 bits": (palette(b"\x00", bits=2), [(255,) * 3, (0, 0, 200), (9, 9, 9)]),
    "RGB": (encoded(of([[[1, 2, 3], [250, 0, 9]]])), [(1, 2, 3), (250, 0, 9)]),
    "RGB, transparent color": (
        encoded(of([[[1, 2, 3], [250, 0, 9]]]), transparency=(1, 2, 3)), [(255,) * 3, (250, 0, 9)],
    ),
    "RGBA": (
        encoded(merged("RGBA", [9, 9, 0], [8, 8, 0], [7, 7, 0], [255, 0, 128])),
        [(9, 8, 7), (255,) * 3, (127,) * 3],
    ),
    "PNG 1 bit, white transparent": (png([[0b10000000]], 1, 0, (b"tRNS", b"\0\1")), gray(*[255, 0] + [0] * 6)),
    "PNG 1 bit, black transparent": (png([[0b10000000]], 1, 0, (b"tRNS", b"\0\0")), gray(*[255] * 8)),
    "PNG 2 bits": (png([[0b00011011]], 2, 0), gray(0, 85, 170, 255)),
    "PNG 2 bits, transparent color": (png([[0b00011011]], 2, 0, (b"tRNS", b"\0\1")), gray(0, 255, 170, 255)),
    "PNG 4 bits": (png([[0x07, 0xF1]], 4, 0), gray(0, 119, 255, 17)),
    "PNG 4 bits, transparent color": (png([[0x07, 0xF1]], 4, 0, (b"tRNS", b"\0\7")), gray(0, 255, 255, 17)),
    "PNG 8 bits, tRNS of 16": (png([[1, 2]], 8, 0, (b"tRNS", b"\1\1")), gray(255, 2)),
    "PNG 16 bits": (png([raw([0, 0x8000, 0xFFFF], ">u2")], 16, 0), gray(0, 128, 255)),
    # Neither 0x12FF nor 0x1300 is that color.
    "PNG 16 bits, transparent color": (
        png([raw([0x1234, 0x12FF, 0x1300, 0], ">u2")], 16, 0, (b"tRNS", b"\x12\x34")),
        gray(255, 0x12, 0x13, 0),
    ),
    "PNG 16 bits, black transparent": (
        png([raw([0, 1, 0x4000], ">u2")], 16, 0, (b"tRNS", b"\0\0")), gray(255, 0, 64),
    ),
    "PNG 16 bits LA": (png([raw([0x4000, 0xFFFF, 0x4000, 0], ">u2")], 16, 4), gray(64, 255)),
    "PNG 16 bits RGB": (png([raw([0x0100, 0x80FF, 0xFFFF], ">u2")], 16, 2), [(1, 128, 255)]),
    "PNG 16 bits RGB, transparent color": (
        png([raw([0x1122, 0x3344, 0x5566, 0x1122, 0x3344, 0x5567], ">u2")], 16, 2,
            (b"tRNS", b"\x11\x22\x33\x44\x55\x66")),
        [(255,) * 3, (0x11, 0x33, 0x55)],
    ),
    "PNG 16 bits RGB, a transparent color that is not there": (
        png([raw([0x1122, 0x3344, 0x5566], ">u2")], 16, 2, (b"tRNS", b"\0\0\0\0\0\0")),
        [(0x11, 0x33, 0x55)],
    ),
    "PNG 16 bits RGBA": (
        png([raw([0x1000, 0x2000, 0x3000, 0xFFFF, 1, 2, 3, 0], ">u2")], 16, 6),
        [(16, 32, 48), (255,) * 3],
    ),
    "CMYK TIFF": (encoded(merged("CMYK", [0, 255], [255, 0], [255, 0], [0, 0]), "TIFF"), [(255, 0, 0), (0, 255, 255)]),
    "LAB TIFF": (
        encoded(Image.merge("LAB", [of([[138, 255]]), of([[209, 128]]), of([[198, 128]])]), "TIFF"),
        [(255, 0, 0), (255,) * 3],
    ),
    "YCbCr TIFF": (encoded(of([[[250, 0, 9]] * 8]).convert("YCbCr"), "TIFF"), [(250, 0, 9)]),
    "La TIFF": (tiff(bytes([64, 128, 0, 0]), 8, samples=2, extra=1), gray(191, 255)),
    "LA TIFF": (tiff(bytes([64, 128, 0, 0]), 8, samples=2, extra=2), gray(159, 255)),
    "RGBa TIFF": (tiff(bytes([64, 0, 0, 128]), 8, photometric=2, samples=4, extra=1), [(191, 127, 127)]),
    "RGBA TIFF": (tiff(bytes([64, 0, 0, 128]), 8, photometric=2, samples=4, extra=2), [(159, 127, 127)]),
    "RGBX TIFF": (tiff(bytes([64, 1, 2, 0]), 8, photometric=2, samples=4, extra=0), [(64, 1, 2)]),
    "TIFF white is zero": (tiff(bytes([0, 255]), 8, photometric=0), gray(255, 0)),
    "TIFF 12 bits": (tiff(bytes([0x08, 0x0F, 0xFF]), 12), gray(8, 255)),
    "TIFF 16 bits, little endian": (tiff(raw([0, 0x8000, 0xFFFF], "<u2"), 16), gray(0, 128, 255)),
    "TIFF 16 bits, big endian": (tiff(raw([0, 0x8000, 0xFFFF], ">u2"), 16, order=">"), gray(0, 128, 255)),
    "TIFF 16 bits, white is zero": (tiff(raw([0, 0x8000, 0xFFFF], "<u2"), 16, photometric=0), gray(255, 127, 0)),
    "TIFF 16 bits RGB": (
        tiff(raw([0x0100, 0x80FF, 0xFFFF], "<u2"), 16, photometric=2, samples=3), [(1, 128, 255)],
    ),
    "TIFF 32 bits, 0 to 65,535": (tiff(raw([0, 0x8000, 0xFFFF], "<i4"), 32, form=2), gray(0, 128, 255)),
    "TIFF 32 bits, unsigned": (tiff(raw([0, 0x8000, 0xFFFF], "<u4"), 32), gray(0, 128, 255)),
    "TIFF 32 bits, big endian": (tiff(raw([0, 0x8000], ">i4"), 32, order=">", form=2), gray(0, 128)),
    "TIFF 32 bits, all black": (tiff(raw([0, 0], "<i4"), 32, form=2), gray(0, 0)),
    "TIFF float": (tiff(raw([0, 0.5, 1], "<f4"), 32, form=3), gray(0, 128, 255)),
    "TIFF float, big endian": (tiff(raw([0, 0.5, 1], ">f4"), 32, form=3, order=">"), gray(0, 128, 255)),
    "TIFF float, white is zero": (tiff(raw([0, 0.25, 1], "<f4"), 32, form=3, photometric=0), gray(255, 191, 0)),
    "PGM of 16 bits": (b"P5 3 1 65535\n" + raw([0, 100, 0xFFFF], ">u2"), gray(0, 0, 255)),
    "PGM of 10 bits": (b"P5 2 1 1023\n" + raw([0, 1023], ">u2"), gray(0, 255)),
    "PGM of 16 bits, dark": (b"P5 2 1 65535\n" + raw([0, 255], ">u2"), gray(0, 0)),
    "PFM": (b"Pf 2 1 -1.0\n" + raw([0, 1], "<f4"), gray(0, 255)),
    "JPEG 2000 of 16 bits": (
        encoded(of([[0, 0x8000, 0xFFFF]] * 8, np.uint16), "JPEG2000", irreversible=False),
        gray(0, 128, 255),
    ),
    "FITS of 8 bits": (fits(8, bytes([0, 7, 255])), gray(0, 7, 255)),
    "GIF, first frame": (animation("GIF"), [(200, 0, 0)]),
    "WebP, first frame": (animation("WEBP", lossless=True), [(200, 0, 0)]),
    "APNG, first frame": (animation("PNG"), [(200, 0, 0)]),
    "TIFF, first page": (animation("TIFF"), [(200, 0, 0)]),
    "WebP with alpha": (
        encoded(merged("RGBA", [9, 9], [8, 8], [7, 7], [255, 0]), "WEBP", lossless=True, exact=True),
        [(9, 8, 7), (255,) * 3],
    ),
}  # fmt: skip

REFUSED = {
    "TIFF 8 bits, signed": (tiff(raw([-1, 5], "i1"), 8, form=2), "signed numbers of 8 bits"),
    "TIFF 16 bits, signed": (tiff(raw([-9, 5], "<i2"), 16, form=2), "signed numbers of 16 bits"),
    "TIFF 16 bits, signed, big endian": (tiff(raw([1, 5], ">i2"), 16, form=2, order=">"), "signed"),
    "TIFF 32 bits, negative": (tiff(raw([-1, 999], "<i4"), 32, form=2), "from -1 to 999"),
    "TIFF 32 bits, beyond 16": (tiff(raw([0, 65_536], "<i4"), 32, form=2), "from 0 to 65536"),
    "TIFF 32 bits, unsigned and large": (tiff(raw([0, 2**32 - 1], "<u4"), 32), "32 bits"),
    "TIFF 32 bits, perhaps of 8": (tiff(raw([0, 255], "<i4"), 32, form=2), "white is not known"),
    "TIFF float beyond 1": (tiff(raw([0, 255], "<f4"), 32, form=3), "from 0 to 255"),
    "TIFF float below 0": (tiff(raw([-0.1, 1], "<f4"), 32, form=3), "from -0.1 to 1"),
    "TIFF float with NaN": (tiff(raw([0, np.nan, 1], "<f4"), 32, form=3), "nan"),
    "TIFF float with infinity": (tiff(raw([0, np.inf], "<f4"), 32, form=3), "inf"),
    "PFM beyond 1": (b"Pf 2 1 -1.0\n" + raw([0, 12.5], "<f4"), "from 0 to 12.5"),
    "FITS 16 bits": (
        fits(16, raw([0, 999], ">i2")),
        "FITS with more than 8 bits .*; save it as PNG",
    ),
    "FITS float": (fits(-32, raw([0, 1], ">f4")), "FITS with more than 8 bits .*; save it as PNG"),
    "EPS, a program": (encoded(of([[[1, 2, 3]]]), "EPS"), "unknown format"),
}


@pytest.mark.parametrize("what", READ)
def test_pixels_of_each_mode(what):
    data, expected = READ[what]
    decoded = decode.decode(data, what)
    assert decoded.mode == "RGB"
    found = [decoded.getpixel((x, 0)) for x in range(len(expected))]
    near = 6 if what.startswith(("LAB", "YCbCr")) else 0  # through other color spaces
    np.testing.assert_allclose(found, expected, atol=near)
    decode.verify(data, what)


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_known_black_and_white_is_a_broken_picture(what):
    data, message = REFUSED[what]
    for read in (decode.decode, decode.verify):
        refuses(f"^{what}: .*{message}", read, data, what, error=decode.PictureError)
    with pytest.raises(decode.PictureError, match=message):
        decode.decode_to_pixels(data, 4, alpha="dropped", name=what)


def test_every_mode_of_pillow_has_a_meaning():
    """Also those that no file has: HSV, RGBX, I;16L, I;16N, La, RGBa, as pictures in memory."""
    color = Image.new("RGB", (2, 1), (200, 100, 50))
    pictures = {mode: color.convert(mode) for mode in ("L", "P", "RGB", "RGBX", "CMYK")}
    pictures |= {"1": of([[1]], bool)}
    pictures |= {mode: color.convert(mode) for mode in ("RGBA", "YCbCr", "HSV", "LAB", "LA")}
    pictures |= {"PA": color.convert("P").convert("PA"), "La": pictures["LA"].convert("La")}
    pictures |= {"RGBa": pictures["RGBA"].convert("RGBa")}
    for mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        pictures[mode] = Image.frombytes(
            mode, (1, 1), raw([0x8000], ">u2" if "B" in mode else "<u2")
        )
    pictures |= {"I": of([[0x8000]], np.int32), "F": of([[0.5]], np.float32)}
    assert pictures.keys() == set(Image.MODES)
    levels = {"1": 255, "L": 124, "LA": 124, "La": 124}
    for mode, image in pictures.items():
        assert image.mode == mode
        made = decode.rgb_on_white(decode.eight_bits(image))
        deep = mode in ("I", "F") or mode.startswith("I;16")
        expected = (128,) * 3 if deep else (levels[mode],) * 3 if mode in levels else (200, 100, 50)
        near = {"P": 26, "PA": 26, "YCbCr": 2, "LAB": 3, "HSV": 2}.get(mode, 0)  # web palette
        np.testing.assert_allclose(made.getpixel((0, 0)), expected, atol=near, err_msg=mode)


def test_what_pillow_can_write_is_read_or_refused():
    """All of Pillow's writers x modes: the pixels that were written, as near as the format keeps
    them, or PictureError."""
    Image.init()
    y, x = np.mgrid[0:32, 0:32] * 8
    color = Image.fromarray(np.stack([x, y, 255 - x], axis=-1).astype(np.uint8))
    pictures = {mode: color.convert(mode) for mode in ("1", "L", "RGB", "CMYK", "YCbCr", "LAB")}
    pictures |= {mode: color.convert(mode) for mode in ("RGBA", "LA", "RGBX", "HSV")}
    pictures |= {"P": color.quantize(255), "PA": color.quantize(255).convert("PA")}
    pictures |= {
        "I;16": of(x * 257, np.uint16),
        "I": of(x * 257, np.int32),
        "F": of(x / 255, np.float32),
    }
    # No pictures, or with a palette of their own.
    forms = set(Image.SAVE) - {"EPS", "PDF", "PALM", "BUFR", "GRIB", "HDF5", "WMF", "FITS", "XBM"}
    read = set()
    for form in sorted(forms):
        for mode, image in pictures.items():
            try:
                data = encoded(image, form)
            except (OSError, KeyError, ValueError, AttributeError):
                continue  # not this mode
            if form in ("AVIF", "GIF", "WEBP") and mode in ("I;16", "I", "F"):
                continue  # their writers clip it
            wanted = decode.rgb_on_white(decode.eight_bits(image.copy()))
            try:
                decoded = decode.decode(data, f"{form} {mode}")
            except decode.PictureError as error:
                # SPIDER holds floats alone.
                assert mode in ("I", "F") or form == "SPIDER", error  # noqa: PT017
                continue
            if decoded.size == wanted.size:  # icons have sizes of their own
                away = np.abs(np.asarray(decoded).astype(int) - np.asarray(wanted)).mean()
                # A palette of 3 x 3 x 2 levels and colors at half the size are the coarsest.
                assert away < 12, f"{form} {mode}: {away}"
            read.add((form, mode))
    assert {("PNG", "I;16"), ("TIFF", "I"), ("TIFF", "F"), ("TIFF", "LAB"), ("JPEG", "CMYK"),
            ("WEBP", "RGBA"), ("GIF", "P"), ("TIFF", "PA")} <= read  # fmt: skip


def jpegs_of_adobe():
    """CMYK as Adobe writes it, inverted with the marker that says so: Pillow's own writer does."""
    image = merged("CMYK", [0] * 8, [255] * 8, [255] * 8, [0] * 8).resize((8, 8))
    data = encoded(image, "JPEG", quality=100)
    assert b"Adobe" in data
    return data


def test_inverted_cmyk_jpeg_is_turned():
    red, green, blue = decode.decode(jpegs_of_adobe()).getpixel((4, 4))
    assert red > 250
    assert max(green, blue) < 5


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "CMYK", "1"])
@pytest.mark.parametrize("resize", ["crop", "squash", "sample"])
def test_ordinary_pictures_are_pillows_own_bit_by_bit(mode, resize):
    """Pillow's conversion, compositing and resizing, restated."""
    rng = np.random.default_rng(3)
    image = of(rng.integers(0, 256, (50, 70, 4))).convert("RGBA")
    image = (
        image.convert("RGB").convert(mode)
        if mode in ("L", "P", "CMYK", "1")
        else image.convert(mode)
    )
    data = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    opened = Image.open(io.BytesIO(data))
    opened.load()
    plain = opened
    if "A" in mode:
        white = Image.new("RGBA", opened.size, "white")
        plain = Image.alpha_composite(white, opened.convert("RGBA"))
    np.testing.assert_array_equal(decode.decode(data), plain.convert("RGB"))
    way = Image.Resampling.NEAREST if resize == "sample" else Image.Resampling.BICUBIC
    size = (22, 16) if resize == "crop" else (16, 16)
    for alpha, source in (("white", plain.convert("RGB")), ("dropped", opened)):
        wanted = source.resize(size, way)
        if resize == "crop":
            wanted = wanted.crop((3, 0, 19, 16))
        found = decode.decode_to_pixels(data, 16, resize, alpha=alpha)
        np.testing.assert_array_equal(found, wanted.convert("RGB"), err_msg=alpha)


def test_orientation_in_exif_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(of([[[255, 0, 0]] * 8] * 16), "JPEG", exif=exif)
    assert decode.decode(data).size == (8, 16)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_detectors_read_pictures_upright(orientation, form):
    """As Pillow's own transposition of the whole picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = of(np.random.default_rng(orientation).integers(0, 256, (16, 8, 3)))
    data = encoded(image, form, exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        wanted = ImageOps.exif_transpose(opened)
    found = decode.decode_upright(data)
    np.testing.assert_array_equal(found, wanted)
    assert decode.upright_size_of(data) == found.size == wanted.size


def test_damaged_exif_turns_nothing():
    data = encoded(of([[[255, 0, 0]] * 8] * 16), "JPEG", exif=b"Exif\0\0II*\0" + b"\xff" * 40)
    assert decode.decode_upright(data).size == decode.upright_size_of(data) == (8, 16)


def test_lab_is_d50_to_srgb():
    """Against LittleCMS directly."""
    image = Image.merge("LAB", [of([[150]]), of([[100]]), of([[180]])])
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    wanted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB").getpixel((0, 0))
    found = decode.decode(encoded(image, "TIFF")).getpixel((0, 0))
    np.testing.assert_allclose(found, wanted, atol=1)


def test_tiff_modes_are_all_in_the_table():
    """A mode that a new Pillow opens is looked at before it is read."""
    modes = {mode for mode, _ in TiffImagePlugin.OPEN_INFO.values()}
    known = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB"}
    assert modes <= known | {"I", "F", "I;16", "I;16B"}
