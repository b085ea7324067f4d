"""imgs.tsv decoded by several threads: order, broken pictures, and how far ahead it reads."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.datasets.webqa import ImagesTsv
from mmqa_jax.data.datasets.webqa_pictures import decoded_pictures
from mmqa_jax.data.images import BrokenPictures, PictureError

COUNT = 40


def jpeg(number):
    pixels = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, ("JPEG", "PNG")[number % 2])
    return buffer.getvalue()


def write(folder, pictures):
    lines = [b"%d\t%s\n" % (30_000_000 + n, data) for n, data in enumerate(pictures)]
    (folder / "imgs.tsv").write_bytes(b"".join(lines))
    offsets = np.cumsum([0, *map(len, lines)])[:-1]
    (folder / "imgs.lineidx").write_text("".join(f"{offset}\n" for offset in offsets))
    return ImagesTsv(folder / "imgs.tsv")


@pytest.fixture
def encoded():
    return [base64.b64encode(jpeg(number)) for number in range(COUNT)]


@pytest.mark.parametrize("workers", [1, 3])
def test_all_pictures_come_in_order_as_pillow_decodes_them(encoded, tmp_path, workers):
    pictures = write(tmp_path, encoded)
    found = list(decoded_pictures(pictures, workers=workers))
    assert [row for row, _ in found] == list(range(COUNT))
    for row, picture in found:
        with Image.open(io.BytesIO(jpeg(row))) as wanted:
            np.testing.assert_array_equal(np.asarray(picture), np.asarray(wanted.convert("RGB")))
    some = [31, 2, 2, 17]
    assert [row for row, _ in decoded_pictures(pictures, some, workers=workers)] == some
    assert list(decoded_pictures(pictures, [], workers=workers)) == []


def test_broken_pictures_are_counted_named_and_limited(encoded, tmp_path):
    encoded[3], encoded[20] = b"@@@", base64.b64encode(b"no picture")
    pictures = write(tmp_path, encoded)
    broken = BrokenPictures(COUNT, 2)
    found = dict(decoded_pictures(pictures, broken=broken, workers=2))
    assert [row for row, picture in found.items() if picture is None] == [3, 20]
    assert broken.names == ["row 3", "row 20"]
    assert "broken base64" in broken.reasons["row 3"]
    with pytest.raises(RunError, match=r"2 pictures cannot be decoded, more than the 1 allowed"):
        list(decoded_pictures(pictures, broken=BrokenPictures(COUNT, 1), workers=2))
    with pytest.raises(PictureError, match=r"imgs\.tsv, row 3: broken base64"):
        list(decoded_pictures(pictures, workers=2))


def test_files_that_do_not_belong_together_stop_it(encoded, tmp_path):
    pictures = write(tmp_path, encoded)
    with pytest.raises(UserError, match=r"row 40: .*has 40 rows") as error:
        list(decoded_pictures(pictures, [0, 40], broken=BrokenPictures(COUNT), workers=2))
    assert not isinstance(error.value, PictureError)


def test_only_a_few_pictures_are_held(encoded):
    class Counting:
        path, reads = "imgs.tsv", 0

        def __len__(self):
            return 100_000

        def read(self, row):
            self.reads += 1
            return base64.b64decode(encoded[row % COUNT])

    counting = Counting()
    pictures = decoded_pictures(counting, workers=2)
    for row in range(3):
        assert next(pictures)[0] == row
    pictures.close()  # stops the threads as well
    assert counting.reads <= 8 * 6
