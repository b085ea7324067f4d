"""Detectors' regions: official file layouts written here, read back; what is wrong is named."""

import _codecs
import base64
import collections
import io
import json
import os
import pickle
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from mmqa_jax.core.array_pickle import ForeignObject, load_arrays
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.batches.packing import RawSource
from mmqa_jax.data.formats.tables import CutLine, IndexedTsv
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.regions import (
    FeatureRegions,
    RegionError,
    VinVLFeatures,
    X101Features,
    feature_ids,
    oscar_regions,
    read_class_names,
    read_id_map,
    tag_words,
    vlp_positions,
)
from mmqa_jax.data.schema import Source
from tests.refusals import refuses

ID = 40_001_234


def detections(count=3, classes=1601, seed=0):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 300, (count, 2))
    return {
        "pred_boxes": np.concatenate([corner, corner + rng.uniform(1, 300, (count, 2))], 1).astype(
            "f4"
        ),
        "scores": rng.uniform(size=count).astype("f4"),
        "pred_classes": rng.integers(0, 1600, count),
        "fc1_features": rng.normal(size=(count, 2048)).astype("f4"),
        "cls_features": rng.normal(size=(count, classes)).astype("f4"),
    }


def write_x101(root, image_id=ID, split="train", **changes):
    """As featureExtraction.py's save_RF: torch tensors in a pickle of protocol 3."""
    arrays = {k: torch.tensor(v) for k, v in detections().items()}
    content = {"image_size": (480, 640), "num_instances": 3} | arrays | changes
    path = root / split / str(image_id % 10_000_000 // 1000) / f"{image_id}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=3))
    return path


def write_vinvl(path, pictures, named=True):
    """As tsv_writer: `id TAB {"objects": [...]}`, offsets in the lineidx."""
    encode = lambda x: base64.b64encode(x.astype("<f4").tobytes()).decode()  # noqa: E731
    offset, offsets = 0, []
    with open(path, "w") as file:
        for image_id, found in pictures.items():
            objects = [
                {
                    "rect": found["pred_boxes"][n].tolist(),
                    "conf": float(found["scores"][n]),
                    "feature": encode(found["fc1_features"][n]),
                    "scores_all": encode(found["cls_features"][n]),
                }
                | ({"class": f"thing {n}"} if named else {})
                for n in range(len(found["scores"]))
            ]
            line = f"{image_id}\t{json.dumps({'objects': objects, 'relations': None})}\n"
            file.write(line)
            offsets.append(offset)
            offset += len(line)
    path.with_suffix(".lineidx").write_text("".join(f"{o}\n" for o in offsets))
    return path


def baseline_positions(found):
    """webqa_loader.py l.611-623 in torch."""
    box, classes = torch.tensor(found["pred_boxes"]), torch.tensor(found["cls_features"])
    box[:, [0, 2]] /= box[:, [0, 2]].max() + 1e-5
    box[:, [1, 3]] /= box[:, [1, 3]].max() + 1e-5
    area = ((box[:, 3] - box[:, 1]) * (box[:, 2] - box[:, 0])).clamp(0)
    place = torch.cat([box, area.view(-1, 1), torch.tensor(found["scores"]).view(-1, 1)], -1)
    norm = torch.nn.functional.layer_norm
    return torch.cat([norm(place, [6]), norm(classes, [classes.shape[1]])], dim=-1).numpy()


def test_x101_features_and_the_baselines_positions(tmp_path):
    write_x101(tmp_path)
    found = X101Features(tmp_path).read(ID)
    wanted = detections()
    np.testing.assert_array_equal(found.features, wanted["fc1_features"])
    np.testing.assert_array_equal(found.boxes, wanted["pred_boxes"])
    np.testing.assert_array_equal(found.scores, wanted["scores"])
    np.testing.assert_array_equal(found.classes, wanted["cls_features"])
    np.testing.assert_array_equal(found.labels, wanted["pred_classes"])
    assert found.image_size == (480, 640)
    positions = vlp_positions(found)
    assert positions.shape == (3, 1607)
    np.testing.assert_allclose(positions, baseline_positions(wanted), atol=1e-5)


def test_x101_splits_are_searched_in_the_baselines_order(tmp_path):
    write_x101(tmp_path, split="train")
    write_x101(tmp_path, split="dev", scores=torch.zeros(3))
    assert X101Features(tmp_path).read(ID).scores.max() == 0


def test_vinvl_features(tmp_path):
    gold = {n: detections(2 + n, 1595, seed=n) for n in range(3)}
    negative = {10_000_000 + n: detections(4, 1595, seed=9 + n) for n in range(2)}
    files = {
        0: write_vinvl(tmp_path / "gold.tsv", gold),
        1: write_vinvl(tmp_path / "neg.tsv", negative, named=False),
    }
    reader = VinVLFeatures(files)
    for image_id, wanted in (gold | negative).items():
        found = reader.read(image_id)
        np.testing.assert_array_equal(found.features, wanted["fc1_features"])
        np.testing.assert_array_equal(found.classes, wanted["cls_features"])
        np.testing.assert_array_equal(found.boxes, wanted["pred_boxes"])
        np.testing.assert_allclose(found.scores, wanted["scores"], rtol=1e-6)
        # Column 0 is the background.
        np.testing.assert_array_equal(found.labels, wanted["cls_features"][:, 1:].argmax(1))
        assert vlp_positions(found).shape == (len(wanted["scores"]), 1601)
        np.testing.assert_allclose(vlp_positions(found), baseline_positions(wanted), atol=1e-5)
    assert reader.read(1).words == ("thing 0", "thing 1", "thing 2")
    assert reader.read(10_000_001).words is None


def test_oscars_regions_end_in_six_parts_of_the_picture(tmp_path):
    write_x101(tmp_path, pred_boxes=torch.tensor([[64.0, 48.0, 128.0, 240.0]] * 3))
    found = X101Features(tmp_path).read(ID)
    regions = oscar_regions(found)
    assert regions.shape == (3, 2054)
    np.testing.assert_array_equal(regions[:, :2048], found.features)
    np.testing.assert_allclose(regions[0, 2048:], [0.1, 0.1, 0.2, 0.5, 0.1, 0.4], rtol=1e-6)
    np.testing.assert_allclose(oscar_regions(found, (240, 640))[0, 2051], 1.0)
    refuses("give image_size", oscar_regions, found._replace(image_size=None))


class Shapes:
    """Arrays of every kind the unpickler admits."""

    tensors = (
        torch.arange(12.0).reshape(3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:, :, ::2],
        torch.arange(5, dtype=torch.float64)[2:],
        torch.tensor([True, False]),
        torch.tensor(7, dtype=torch.int16),
        torch.zeros(0, 4),
        torch.ones(2).half(),
        torch.ones(3).expand(2, 3),
    )
    arrays = (np.eye(3, dtype="f4"), np.arange(6).reshape(2, 3).T, np.float32(1.5), np.array(["a"]))


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_of_all_protocols_without_torch(tmp_path, protocol, monkeypatch):
    content = {
        "tensors": list(Shapes.tensors),
        "arrays": list(Shapes.arrays),
        "more": collections.OrderedDict(a=(1, 2.5, "x", None, True), size=torch.Size([2, 3])),
        "bytes": b"\x00\xff",
    }
    path = tmp_path / "all.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    monkeypatch.setattr(torch.storage, "_load_from_bytes", None)  # nothing of torch's is called
    monkeypatch.setattr(torch._utils, "_rebuild_tensor_v2", None)
    found = load_arrays(path)
    for got, wanted in zip(found["tensors"], Shapes.tensors, strict=True):
        assert got.dtype == wanted.numpy().dtype
        np.testing.assert_array_equal(got, wanted.numpy())
    for got, wanted in zip(found["arrays"], Shapes.arrays, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    assert found["more"] == {"a": (1, 2.5, "x", None, True), "size": (2, 3)}
    assert found["bytes"] == b"\x00\xff"


def test_tensors_written_on_a_gpu(tmp_path):
    """featureExtraction.py pickled them where they lay: torch.cuda.FloatStorage on cuda:0."""
    plain = pickle.dumps({"x": torch.arange(3.0)}, protocol=3)
    stored = b"ctorch\nFloatStorage\n"
    assert stored in plain and b"X\x03\x00\x00\x00cpu" in plain  # noqa: PT018
    size = int.from_bytes(plain[plain.index(b"B") + 1 :][:4], "little")
    on_gpu = plain.replace(stored, b"ctorch.cuda\nFloatStorage\n").replace(
        b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    )
    grown = size + len(on_gpu) - len(plain)
    on_gpu = on_gpu.replace(b"B" + size.to_bytes(4, "little"), b"B" + grown.to_bytes(4, "little"))
    (tmp_path / "gpu.pkl").write_bytes(on_gpu)
    np.testing.assert_array_equal(load_arrays(tmp_path / "gpu.pkl")["x"], [0, 1, 2])


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


class StorageAttack:
    """Hides in the stream of a storage, which torch.load would unpickle without looking."""

    def __reduce__(self):
        return torch.storage._load_from_bytes, (pickle.dumps(Attack(), protocol=2),)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Attack(), r"(posix|nt)\.mkdir"),
        (StorageAttack(), r"(posix|nt)\.mkdir"),
        (Fraction(1, 2), r"fractions\.Fraction"),
        (np.random.default_rng, r"numpy\.random\S*\.default_rng"),
        (eval, r"builtins\.eval"),
    ],
    ids=["call", "storage", "class", "numpy", "builtin"],
)
def test_foreign_objects_are_named_and_refused(tmp_path, monkeypatch, value, name):
    monkeypatch.chdir(tmp_path)
    path = write_x101(tmp_path, scores=value)
    with pytest.raises(ForeignObject, match=rf"{ID}\.pkl: contains {name}, which is not an array"):
        X101Features(tmp_path).read(ID)
    assert not (tmp_path / "attacked").exists()
    with pytest.raises(ForeignObject):  # not counted as merely missing
        regions(X101Features(tmp_path), missing=BrokenPictures(1))(picture())
    assert path.exists()


def test_every_truncation_of_a_pickle_is_refused(tmp_path):
    path = tmp_path / "cut.pkl"
    small = pickle.dumps({"a": torch.arange(3.0), "b": np.arange(4)}, protocol=3)
    for length in range(len(small)):
        path.write_bytes(small[:length])
        refuses(r"cut\.pkl: not a complete pickle of arrays", load_arrays, path)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((4,), (1,), 0), ((2,), (1,), 2), ((3,), (-1,), 2), ((2, 2), (1,), 0)],
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, size, stride, offset):
    class Beyond:
        def __reduce__(self):
            storage = torch.arange(3.0)._typed_storage()
            return torch._utils._rebuild_tensor_v2, (storage, offset, size, stride, False, {})

    path = tmp_path / "beyond.pkl"
    path.write_bytes(pickle.dumps(Beyond(), protocol=3))
    refuses("overlaps its storage", load_arrays, path)


NEW = np.zeros(0).__reduce__()[0]  # what a pickle calls for an empty array


class Call:
    """Pickled as the call of a function, and the state of what it returns."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.call


def stored(magic=0x1950A86A20F9469CFC6C, kind="storage", length=3) -> Call:
    """A storage of three numbers, in the stream that a pickle of a tensor has in it."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return (kind, torch.FloatStorage, "0", "cpu", 3, None) if value is Ellipsis else None

    stream = io.BytesIO(b"".join(pickle.dumps(head, 2) for head in (magic, 1001, {})))
    stream.seek(0, io.SEEK_END)
    Pickler(stream, 2).dump(...)
    stream.write(pickle.dumps(["0"], 2) + struct.pack("<q3f", length, 1, 2, 3))
    return Call(torch.storage._load_from_bytes, stream.getvalue())


def test_a_stored_storage_is_read(tmp_path):
    path = tmp_path / "stored.pkl"
    path.write_bytes(pickle.dumps(stored(), 2))
    np.testing.assert_array_equal(load_arrays(path), [1, 2, 3])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (stored(magic=1), "a tensor's storage is not in torch's format"),
        (stored(kind="module"), "a tensor's storage is not in torch's format"),
        (stored(length=4), "a tensor's storage is not as long as it says"),
        (Call(NEW, np.ndarray, (4,), b"b"), "an array is not in numpy's format"),
        (
            Call(NEW, np.ndarray, (0,), b"b", state=(1, (1,), "f4", False, b"0000")),
            "an array is not in numpy's format",
        ),
        (
            Call(np.dtype, "f4", state=(3, "<", None, ("a",), None, 4, 4, 0)),
            "a dtype is not in numpy's format",
        ),
        (Call(_codecs.encode, "abc", "utf-7"), "bytes are written as utf-7"),
    ],
    ids=["magic", "kind", "length", "call", "state", "dtype", "encoding"],
)
def test_arrays_in_another_form_are_refused(tmp_path, value, reason):
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps(value, 2))
    message = rf"other\.pkl: not a complete pickle of arrays \({reason}\); fetch it again"
    refuses(message, load_arrays, path)


def test_a_pickle_that_cannot_be_opened_is_named(tmp_path):
    refuses(r"none\.pkl: no such file; check the path", load_arrays, tmp_path / "none.pkl")
    (tmp_path / "folder.pkl").mkdir()
    refuses(r"folder\.pkl: cannot be read .*; check the path", load_arrays, tmp_path / "folder.pkl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc1_features": torch.zeros(3, 1024)}, r"fc1_features: shape \(3, 1024\), .*\(3, 2048\)"),
        ({"cls_features": torch.zeros(2, 1601)}, r"cls_features: shape \(2, 1601\), .*\(3, 1601\)"),
        ({"pred_boxes": torch.zeros(3, 5)}, r"pred_boxes: shape \(3, 5\), expected \(number, 4\)"),
        ({"scores": None}, r"scores: an array of shape \(3\) was expected"),
        ({"scores": torch.tensor([0.5, float("nan"), 0.1])}, r"scores hold NaN or infinity"),
        ({"pred_classes": torch.tensor([0, 1600, 3])}, r"classes beyond 0 to 1599"),
        ({k: torch.tensor(v[:0]) for k, v in detections().items()}, r"holds no regions; run"),
    ],
)
def test_wrong_x101_contents_are_named(tmp_path, change, message):
    write_x101(tmp_path, **change)
    refuses(rf"{ID}\.pkl.*{message}", X101Features(tmp_path).read, ID, error=RegionError)


def test_missing_and_broken_x101_files_are_named(tmp_path):
    refuses("has none of the folders dev, test, train", X101Features, tmp_path)
    path = write_x101(tmp_path)
    with pytest.raises(RegionError, match=r"none of dev, test, train has 1/40001235\.pkl"):
        X101Features(tmp_path).read(ID + 1)
    path.write_bytes(path.read_bytes()[:-100])
    refuses("not a complete pickle of arrays", X101Features(tmp_path).read, ID, error=RegionError)
    path.write_bytes(pickle.dumps([1, 2]))
    refuses("holds no dictionary", X101Features(tmp_path).read, ID, error=RegionError)


def vinvl(tmp_path, edit=lambda text: text, row=0, count=2):
    path = write_vinvl(tmp_path / "v.tsv", {n: detections(2, 1595, n) for n in range(count)})
    path.write_text(edit(path.read_text()))
    return VinVLFeatures({0: path})


def with_objects(edit):
    """An edit of the first line's objects that keeps the line's length."""

    def change(text):
        line, rest = text.split("\n", 1)
        name, _, content = line.partition("\t")
        content = json.loads(content)
        edit(content)
        return f"{name}\t{json.dumps(content)}".ljust(len(line)) + "\n" + rest

    return change


def first(change):
    """An edit of the first picture's regions."""
    return with_objects(lambda content: change(content["objects"]))


@pytest.mark.parametrize(
    ("edit", "row", "kind", "message"),
    [
        (
            first(lambda found: found[1].update(feature=found[1]["feature"][:400])),
            *(0, RegionError, r"v\.tsv, row 0, region 1, feature: 75 values, expected 2048"),
        ),
        (
            first(lambda found: found[0].update(scores_all="?" * 40)),
            *(0, RegionError, r"v\.tsv, row 0, region 0, scores_all: broken base64"),
        ),
        (
            first(lambda found: found[1].pop("conf")),
            *(0, RegionError, r"v\.tsv, row 0: .* not a JSON object .* \(no 'conf'\)"),
        ),
        (
            first(lambda found: [region.update(rect=[1, 2, 3]) for region in found]),
            *(0, RegionError, r"v\.tsv, row 0: boxes of 3 values, expected 4"),
        ),
        (first(list.clear), 0, RegionError, r"v\.tsv, row 0: holds no regions"),
        (
            lambda text: text.replace('{"objects"', '["objects"', 1),
            *(0, RegionError, r"v\.tsv, row 0: the last column is not a JSON object"),
        ),
        (str, 20_000_001, RegionError, r"20000000 and up were not given \(given: 0\)"),
        (str, 2, UserError, r"row 2: .*v\.lineidx has 2 rows"),
        (lambda text: text.replace("\n1\t", "\n7\t"), 1, UserError, "row 1: holds '7' and not pic"),
        (lambda text: " " + text, 1, UserError, "row 1: bytes .* not that row's line"),
        (lambda text: text[: len(text) // 4], 0, RegionError, "row 0: the file ends within it"),
        (lambda text: text[: len(text) // 4], 1, UserError, "row 1: the file ends at byte"),
    ],
)
def test_wrong_vinvl_files_are_named(tmp_path, edit, row, kind, message):
    with pytest.raises(kind, match=message):
        vinvl(tmp_path, edit).read(row)


def test_a_vinvl_picture_without_a_number(tmp_path):
    none = write_vinvl(tmp_path / "none.tsv", {"None": detections(1, 1595)})
    refuses("row 0: holds no regions; run the", VinVLFeatures({0: none}).read, 0, error=RegionError)


def test_an_indexed_tsv_gives_each_row_its_columns(tmp_path):
    rows = [["a", "", "1"], ["b"], ["ccc", "2"]]
    text = "".join("\t".join(row) + "\n" for row in rows)
    (tmp_path / "t.tsv").write_text(text.rstrip("\n"))  # a last line without its end
    (tmp_path / "t.lineidx").write_text("0\n5\n7\n")
    tsv = IndexedTsv(tmp_path / "t.tsv")
    assert len(tsv) == 3
    for row in (2, 0, 1, 2):
        assert tsv.columns(row) == [column.encode() for column in rows[row]]
    assert issubclass(CutLine, UserError)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ("0\n5\n5\n", r"t\.lineidx, line 3: offset not above"),
        ("0\nx\n", r"t\.lineidx, line 2: not a byte offset"),
        (None, r"t\.lineidx: no such file"),
    ],
)
def test_offsets_of_an_indexed_tsv_that_are_wrong(tmp_path, offsets, message):
    (tmp_path / "t.tsv").write_text("a\nb\n")
    if offsets:
        (tmp_path / "t.lineidx").write_text(offsets)
    refuses(message, IndexedTsv, tmp_path / "t.tsv")


SOURCES = [
    Source(id="30000005", modality="image", text="a caption"),
    Source(id="abc_1", modality="text", text="a snippet"),
    Source(id="30000006", modality="image", text="another"),
]


def picture(row=0):
    return RawSource(SOURCES[row].text, row=row)


def regions(reader, **options):
    ids = feature_ids(SOURCES, {30_000_005: ID, 30_000_006: ID + 1})
    return FeatureRegions(reader, ids, **options)


def test_a_sources_regions_for_vlp(tmp_path):
    write_x101(tmp_path)
    reader = X101Features(tmp_path)
    found = regions(reader, slots=2)
    assert (found.slots, found.dim, found.position_dim) == (2, 2048, 1607)
    features, places = found(picture(0))
    np.testing.assert_array_equal(features, detections()["fc1_features"][:2])
    # The box is normalized over all the picture's regions, also those that find no slot.
    np.testing.assert_allclose(places, baseline_positions(detections())[:2], atol=1e-5)
    assert found(picture(1)) is None
    assert found(RawSource("a picture of the question's")) is None
    refuses("picture 40001235", found, picture(2), error=RegionError)


def test_pictures_without_features_are_counted_up_to_a_limit(tmp_path):
    write_x101(tmp_path)
    counted = BrokenPictures(2, limit=1)
    found = regions(X101Features(tmp_path), missing=counted)
    assert found(picture(0)) is not None
    assert found(picture(2)) is None
    assert found(picture(2)) is None
    assert counted.names == ["40001235"]
    refuses("2 pictures", counted.add, "other", "no reason", error=RunError)


def test_tags_are_class_names(tmp_path):
    names = [f"class {n}" for n in range(1600)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    write_x101(tmp_path, pred_classes=torch.tensor([5, 9, 5]))
    reader = X101Features(tmp_path)
    found = reader.read(ID)
    read = read_class_names(tmp_path / "names.txt", reader)
    assert tag_words(found, read) == ("class 5", "class 9", "class 5")
    assert tag_words(found._replace(words=("a", "b", "c"))) == ("a", "b", "c")
    refuses("do not name their classes", tag_words, found)

    classes = np.zeros((3, 1601), "f4")
    classes[:, 1600] = 9.0  # the background is no tag
    classes[[0, 1, 2], [7, 3, 7]] = 1.0
    write_x101(tmp_path, cls_features=torch.tensor(classes))
    tagged = regions(reader, names=read)
    tags = tagged.tags(tagged(picture(0))[1])
    assert tags.regions == ("class 7", "class 3", "class 7")
    assert tags.picture == ("class 7", "class 3")
    refuses("need the detector's class names", regions(reader).tags, tagged(picture(0))[1])
    (tmp_path / "names.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"names\.txt: 1 lines, .* detector's 1600 classes"):
        read_class_names(tmp_path / "names.txt", reader)


def test_ids_of_the_released_features(tmp_path):
    path = tmp_path / "map.pkl"
    path.write_bytes(pickle.dumps({30_000_005: ID, 30_000_006: ID + 1}, protocol=3))
    read = read_id_map(path)
    assert feature_ids(SOURCES, read) == [ID, None, ID + 1]
    assert feature_ids(SOURCES) == [30_000_005, None, 30_000_006]
    refuses("source 30000006: the map of image ids lacks", feature_ids, SOURCES, {30_000_005: ID})
    for name in ("abc", "\N{SUPERSCRIPT TWO}", "9" * 5000):
        with pytest.raises(UserError, match=f"source {name}: a picture whose id is a number"):
            feature_ids([Source(id=name, modality="image", text="")])
    path.write_bytes(pickle.dumps({"a": 1}))
    refuses(r"map\.pkl: a dictionary of image id", read_id_map, path)
