"""Pictures: decoding, CLIP's preprocessing, patches, the store and its limit of broken ones."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from mmqa_jax.core.errors import RunError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures import decode, resize
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.models.two_towers.config import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.models.two_towers.network import normalize_pixels
from tests.pictures import encoded
from tests.refusals import refuses


def noise(width, height, seed=0):
    """Smooth shapes with noise, so that resampling is put to the test."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = 127 + 90 * np.sin(x[..., None] / (3 + np.arange(3)) + y[..., None] / 7)
    return Image.fromarray(np.clip(waves + rng.normal(0, 30, waves.shape), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("shape", [(64, 64), (100, 40), (41, 97), (333, 200), (20, 31), (225, 224)])
@pytest.mark.parametrize("size", [32, 33])
def test_crop_is_clips_preprocessing(shape, size):
    """Against transformers' CLIPImageProcessor (Pillow backend): pixels equal, floats to 1e-6."""
    import transformers

    backend = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    processor = backend(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    image = noise(*shape)
    expected = processor(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    pixels = resize.to_pixels(image, size, "crop")
    assert pixels.shape == (size, size, 3)
    raw = np.array(PIXEL_STD) * expected + np.array(PIXEL_MEAN)
    np.testing.assert_array_equal(pixels, np.round(raw * 255).astype(np.uint8))
    np.testing.assert_allclose(normalize_pixels(pixels), expected, atol=2e-6)


def test_sample_mixes_no_colors():
    """A checkerboard of two colors stays one; squashing it makes gray."""
    board = np.indices((90, 60)).sum(axis=0) % 2 * np.array([[[255]]]).T  # [1, 90, 60]
    image = Image.fromarray(np.repeat(board[0].astype(np.uint8)[..., None], 3, axis=2))
    sampled, squashed = (resize.to_pixels(image, 16, way) for way in ("sample", "squash"))
    assert sampled.shape == (16, 16, 3)
    assert set(np.unique(sampled)) <= {0, 255}
    assert squashed.min() > 0  # gray
    assert squashed.max() < 255
    halves = np.zeros((40, 90, 3), np.uint8)
    halves[:, 45:] = 255
    expected = np.zeros((16, 16, 3), np.uint8)
    expected[:, 8:] = 255
    np.testing.assert_array_equal(resize.to_pixels(Image.fromarray(halves), 16, "sample"), expected)


def test_squash_scales_both_sides():
    image = Image.new("RGB", (80, 20), (255, 0, 0))
    image.paste((0, 0, 255), (40, 0, 80, 20))  # left red, right blue
    pixels = resize.to_pixels(image, 16, "squash")
    np.testing.assert_array_equal(pixels[:, :6], np.broadcast_to([255, 0, 0], (16, 6, 3)))
    np.testing.assert_array_equal(pixels[:, 10:], np.broadcast_to([0, 0, 255], (16, 6, 3)))
    assert np.array_equal(resize.to_pixels(image, 20, "crop")[:, 0], [[255, 0, 0]] * 20)
    refuses("resize is 'stretch'", resize.to_pixels, image, 16, "stretch")


def test_alpha_lies_on_white():
    half = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    half.putpixel((1, 0), (0, 0, 0, 128))
    for form in ("PNG", "WEBP"):
        decoded = decode.decode(
            encoded(half, form, **({"lossless": True} if form == "WEBP" else {}))
        )
        assert decoded.mode == "RGB"
        assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (127, 127, 127)]
    gray = Image.new("LA", (1, 1), (10, 0))
    assert decode.decode(encoded(gray)).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 9, 9, 200, 0, 0])
    palette.putpixel((1, 0), 1)
    decoded = decode.decode(encoded(palette, "GIF", transparency=0))
    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 0, 0)]


def translucent(width, height, mode="RGBA"):
    """Noise under an alpha of all values; as a palette, its first color transparent."""
    image = noise(width, height).convert("RGBA")
    alpha = np.linspace(0, 255, width * height).reshape(height, width)
    image.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    return image.convert("RGB").quantize(16) if mode == "P" else image.convert(mode)


def clips_pixels(data, size):
    """openai/CLIP clip.py, _transform: Resize, CenterCrop, then convert("RGB")."""
    image = Image.open(io.BytesIO(data))
    short = min(image.size)
    wide, high = (int(size * side / short) for side in image.size)
    image = image.resize((wide, high), Image.Resampling.BICUBIC)
    left, top = (wide - size) // 2, (high - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_dropped_alpha_is_clips(mode):
    """WebQA's CLIP (CLIP_img_encodings.py) gives preprocess the picture as Pillow opens it."""
    data = encoded(translucent(40, 64, mode), **({"transparency": 0} if mode == "P" else {}))
    dropped, white = (
        decode.decode_to_pixels(data, 16, "crop", alpha=alpha) for alpha in ("dropped", "white")
    )
    np.testing.assert_array_equal(dropped, clips_pixels(data, 16))
    np.testing.assert_array_equal(white, resize.to_pixels(decode.decode(data), 16, "crop"))
    assert np.abs(dropped.astype(int) - white).max() > 50
    opaque = encoded(noise(40, 64))
    np.testing.assert_array_equal(
        *(
            decode.decode_to_pixels(opaque, 16, "crop", alpha=alpha)
            for alpha in ("dropped", "white")
        )
    )
    with pytest.raises(decode.PictureError, match=r"a\.png: not a picture"):
        decode.decode_to_pixels(b"rotten", 16, alpha="dropped", name="a.png")


def test_stores_take_alpha_as_their_model_does():
    data = encoded(translucent(9, 9))
    corpus = Corpus([Source("0", "image", "", image="0")], [], lambda name: data)
    white, dropped = (PictureStore(corpus, 8, alpha=alpha) for alpha in ("white", "dropped"))
    np.testing.assert_array_equal(dropped.pixels(0), clips_pixels(data, 8))
    np.testing.assert_array_equal(white.pixels(0), PictureStore(corpus, 8).pixels(0))
    assert (white.pixels(0) != dropped.pixels(0)).any()


@pytest.mark.parametrize("alpha", ["white", "dropped"])
def test_large_jpegs_may_be_decoded_at_a_fraction_of_their_size(alpha):
    """By libjpeg's scaled transform, as Pillow's `draft` asks for it; nothing else changes."""

    def pixels(data, **options):
        return decode.decode_to_pixels(data, 32, "crop", alpha=alpha, **options)

    large = encoded(noise(200, 140), "JPEG")
    whole, scaled = pixels(large), pixels(large, scaled=True)
    np.testing.assert_array_equal(whole, clips_pixels(large, 32))
    with Image.open(io.BytesIO(large)) as image:
        image.draft(None, (32, 32))
        assert image.size == (50, 35)
        np.testing.assert_array_equal(scaled, resize.to_pixels(image.convert("RGB"), 32, "crop"))
    assert 0 < np.abs(whole.astype(int) - scaled).mean() < 10
    for data in (encoded(noise(60, 200), "JPEG"), encoded(noise(200, 140))):
        np.testing.assert_array_equal(pixels(data), pixels(data, scaled=True))


def test_other_modes():
    deep = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], np.uint16))
    decoded = decode.decode(encoded(deep))
    assert [decoded.getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (128,) * 3, (255,) * 3]
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = decode.decode(encoded(cmyk, "JPEG")).getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


def test_truncated_jpeg_is_read_as_far_as_it_goes():
    whole = noise(64, 256)
    data = encoded(whole, "JPEG", quality=95)
    full, half = decode.decode(data), decode.decode(data[: len(data) // 2])
    np.testing.assert_array_equal(np.asarray(half)[:80], np.asarray(full)[:80])
    decode.verify(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"plain text", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"\xff\xd8"])
def test_bytes_that_are_no_picture(data):
    for check in (decode.decode, decode.verify):
        refuses(r"flag\.bin: not a picture", check, data, "flag.bin", error=decode.PictureError)


def test_picture_file_of_the_user(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(noise(5, 6)))
    data = decode.read_picture_file(path)
    np.testing.assert_array_equal(decode.decode(data, str(path)), noise(5, 6))
    path.write_text("I am a letter")
    refuses(r"a\.png: not a picture that", decode.decode, decode.read_picture_file(path), str(path))
    refuses(r"b\.png: no such picture file", decode.read_picture_file, tmp_path / "b.png")
    refuses("cannot be read", decode.read_picture_file, tmp_path)


def test_patches_and_their_boxes_agree():
    pixels = np.asarray(noise(24, 24))
    cut = resize.patches(pixels.astype(np.float32), 8)
    boxes = resize.patch_boxes(24, 8)
    assert cut.shape == (9, 8 * 8 * 3)
    assert cut.dtype == boxes.dtype == np.float32
    for patch, (x1, y1, x2, y2, area, one) in zip(cut, boxes, strict=True):
        left, top, right, bottom = np.round(np.array([x1, y1, x2, y2]) * 24).astype(int)
        np.testing.assert_array_equal(patch.reshape(8, 8, 3), pixels[top:bottom, left:right])
        assert area == pytest.approx((x2 - x1) * (y2 - y1))
        assert one == 1
    assert boxes[:, 4].sum() == pytest.approx(1)
    refuses("24 is not a multiple of patch side 7", resize.patches, pixels, 7)


def test_broken_counter():
    broken = decode.BrokenPictures(5000)
    assert broken.limit == 50
    assert decode.BrokenPictures(100).limit == 10
    broken = decode.BrokenPictures(100, limit=2)
    for name in ("a", "a", "b", "a"):
        broken.add(name, "rotten")
    assert (broken.count, broken.names) == (2, ["a", "b"])
    refuses(r"3 pictures .* 2 allowed \(a, b, c\)", broken.add, "c", "rotten", error=RunError)
    with pytest.raises(RunError, match=r"^1 picture cannot be decoded, more than the 0 allowed"):
        decode.BrokenPictures(100, limit=0).add("a", "rotten")
    with pytest.raises(RunError, match=r"^1 picture has no features, more than the 0 allowed"):
        decode.BrokenPictures(100, 0, problem="have no features").add("a", "none")


class Reader:
    """Counts reads; picklable."""

    def __init__(self):
        self.reads = []

    def __call__(self, name):
        self.reads.append(name)
        return b"rotten" if name == "bad" else encoded(noise(9, 9, seed=int(name)))


def store_of(count, **options):
    reader = Reader()
    sources = [Source(str(i), "image", "", image=str(i)) for i in range(count)]
    sources += [Source("bad", "image", "", image="bad"), Source("text", "text", "words")]
    return PictureStore(Corpus(sources, [], reader), 8, **options), reader


def test_store_gives_pixels_and_forgets_the_longest_unused():
    store, reader = store_of(4, cache_bytes=3 * 8 * 8 * 3, resize="squash")
    for row in (0, 1, 2, 0, 3, 0, 1):  # 3 pushes out 1, which is read again
        expected = resize.to_pixels(noise(9, 9, seed=row), 8, "squash")
        np.testing.assert_array_equal(store.pixels(row), expected)
    assert reader.reads == ["0", "1", "2", "3", "1"]
    assert store.pixels(5) is None  # a snippet
    question = Question("q", "test", "?", image="2")
    np.testing.assert_array_equal(
        store.question_pixels(question), resize.to_pixels(noise(9, 9, seed=2), 8, "squash")
    )
    assert store.question_pixels(Question("q", "test", "?")) is None
    with pytest.raises(ValueError, match="read-only"):
        store.pixels(0)[0, 0, 0] = 1


def test_store_counts_broken_pictures_and_goes_to_processes():
    store, reader = store_of(1)
    assert store.pixels(1) is None
    assert store.pixels(1) is None
    assert reader.reads == ["bad"]
    assert store.broken.names == ["bad"]
    strict, _ = store_of(1, max_broken=0)
    refuses("bad", strict.pixels, 1, error=RunError)
    copy = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copy.pixels(0), store.pixels(0))
