"""Records of regions: what is kept, what a damaged one does, and readers beside the files."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from mmqa_jax.core.checkpoints.checksums import read_sealed, write_sealed
from mmqa_jax.core.chunks import Shard
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.decode import BrokenPictures, PictureError
from mmqa_jax.data.records.record_shards import read_unfinished, write_records
from mmqa_jax.data.region_records import (
    REGIONS,
    DetectedRegions,
    RegionFacts,
    RegionRecords,
    pack_regions,
    unpack_regions,
)
from mmqa_jax.data.regions import RegionError
from tests.refusals import refuses

pytestmark = pytest.mark.slow

FACTS = RegionFacts("vinvl_x152c4", "m", features=6, classes=5, attributes=4)


def regions(count: int, seed: int = 0, facts: RegionFacts = FACTS) -> DetectedRegions:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 1000, (count, 2))
    attributes = rng.uniform(size=(count, facts.attributes)).astype("f4")
    return DetectedRegions(
        size=(700, 1300),
        boxes=np.concatenate([corner, corner + rng.uniform(1, 300, (count, 2))], 1).astype("f4"),
        features=rng.exponential(3, (count, facts.features)).astype("f4"),
        scores=rng.uniform(size=count).astype("f4"),
        labels=rng.integers(0, facts.classes, count).astype("i4"),
        logits=rng.normal(0, 9, (count, facts.classes)).astype("f4"),
        attributes=attributes if facts.attributes else None,
    )


def write(folder, found, facts=FACTS, shard=2, part=Shard(0, 1), encode=None, **more):  # noqa: B008
    """Records of `found`, id -> regions or a PictureError."""

    def packed(names):
        made = [found[name] for name in names]
        return [
            one if isinstance(one, PictureError) else pack_regions(one, facts.precision)
            for one in made
        ]

    return write_records(
        folder,
        REGIONS,
        {name: name for name in found},
        encode or packed,
        about={"facts": dataclasses.asdict(facts)},
        broken=more.pop("broken", BrokenPictures(len(found))),
        facts=[facts.model],
        shard=shard,
        part=part,
        **more,
    )


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_all_of_a_picture_is_kept(precision, count):
    facts = dataclasses.replace(FACTS, precision=precision)
    want = regions(count)
    got = unpack_regions(pack_regions(want, precision), facts)
    assert got.size == (700, 1300)
    for name in ("boxes", "scores", "labels"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    exact = precision == "float32"
    relative, near = (1e-6, 1e-5) if exact else (1e-3, 5e-3)
    np.testing.assert_allclose(got.features, want.features, rtol=relative)
    np.testing.assert_allclose(got.attributes, want.attributes, rtol=relative, atol=1e-6)
    np.testing.assert_allclose(
        got.probabilities, want.probabilities, rtol=30 * near, atol=near / 10
    )
    if count:  # the likeliest class is as exact as float32
        np.testing.assert_allclose(got.logits.max(1), want.logits.max(1), rtol=1e-6)


def test_a_record_is_a_file_of_safetensors():
    arrays = safetensors.numpy.load(pack_regions(regions(3), "float16"))
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "size": "int32", "boxes": "float32", "scores": "float32", "labels": "int32",
        "features": "float16", "peaks": "float32", "logits": "float16", "attributes": "float16",
    }  # fmt: skip


def test_what_a_record_cannot_hold_is_refused():
    large = dataclasses.replace(regions(2), features=np.full((2, 6), 1e5, "f4"))
    with pytest.raises(UserError, match=r"features of regions: up to 1e\+05.*--precision=float32"):
        pack_regions(large, "float16")
    pack_regions(large, "float32")
    broken = dataclasses.replace(regions(2), scores=np.array([0.5, np.nan], "f4"))
    refuses("scores of regions: up to nan", pack_regions, broken, "float32")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record[:-5], "no record of regions"),
        (lambda record: b"", "no record of regions"),
        (lambda record: safetensors.numpy.save({"boxes": np.zeros((1, 4), "f4")}), "size"),
        (
            lambda record: pack_regions(
                regions(2, facts=dataclasses.replace(FACTS, classes=4)), "float16"
            ),
            r"logits of shape \(2, 4\), expected \(2, 5\)",
        ),
    ],
)
def test_damaged_records_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        unpack_regions(change(pack_regions(regions(2), "float16")), FACTS)


def test_pictures_are_found_by_name_and_by_the_number_it_ends_in(tmp_path):
    found = {name: regions(n, n) for n, name in enumerate(
        ["COCO_val2014_000000000042", "41", "a/41", "b_7", "c_7"])}  # fmt: skip
    write(tmp_path / "r", found)
    records = RegionRecords(tmp_path / "r")
    assert records.facts == FACTS
    assert len(records) == 5
    for name, want in found.items():
        np.testing.assert_array_equal(records.read(name).boxes, want.boxes)
    assert len(records.read(42)) == 0  # the first has no region
    np.testing.assert_array_equal(records.read(41).boxes, found["41"].boxes)
    refuses("2 pictures end in 7, such as b_7 and c_7", records.read, 7, error=RegionError)
    refuses("no regions of picture 8; run `mmqa features`", records.read, 8, error=RegionError)


AGAIN = "delete the folder and run `mmqa features` again"


@pytest.mark.parametrize(
    ("names", "facts", "message"),
    [
        ("43", FACTS, f"r: holds picture 4 in place of 1: its files are damaged; {AGAIN}"),
        ("12", dataclasses.replace(FACTS, classes=4), rf"r: .*\(logits of shape .*; {AGAIN}"),
        ("", FACTS, rf"r: its regions cannot be read \(.*; {AGAIN}"),
    ],
)
def test_files_of_another_job_among_the_records(tmp_path, names, facts, message):
    write(tmp_path / "r", {name: regions(2) for name in "12"})
    shutil.rmtree(tmp_path / "r/regions")
    if names:
        write(tmp_path / "other", {name: regions(2, facts=facts) for name in names}, facts)
        shutil.move(tmp_path / "other/regions", tmp_path / "r/regions")
    with pytest.raises(UserError, match=message):
        RegionRecords(tmp_path / "r").read("1")


def test_records_of_another_version_are_refused(tmp_path):
    write(tmp_path / "r", {"1": regions(2)})
    manifest = read_sealed(tmp_path / "r/manifest.json", "")
    del manifest["facts"]["rectified"]
    write_sealed(tmp_path / "r/manifest.json", manifest)
    refuses(f"r: its manifest lacks 'rectified', as of .*; {AGAIN}", RegionRecords, tmp_path / "r")


@pytest.mark.parametrize(
    "size", [[], {}, {"pictures": 7, "shard": 0, "processes": 1}, {"pictures": 7, "shard": "2"}]
)
def test_a_damaged_note_of_a_jobs_size_is_refused(tmp_path, size):
    (tmp_path / "progress.json").write_text(json.dumps(size))
    refuses(r"progress\.json: is damaged; start the job again, which", read_unfinished, tmp_path)


class Killed(BaseException):
    pass


def shards(folder):
    return {p.name: p.read_bytes() for p in sorted((folder / "regions").glob("*array_record*"))}


def test_a_killed_job_goes_on_where_it_was(tmp_path):
    found = {str(n): regions(n % 3, n) for n in range(7)} | {"3": PictureError("3: broken.")}
    asked, kept = [], []

    def encode(names, limit=99):
        if len(asked) >= limit:
            raise Killed
        asked.extend(names)
        return [
            found[n] if isinstance(found[n], PictureError) else pack_regions(found[n], "float16")
            for n in names
        ]

    with pytest.raises(Killed):
        write(tmp_path / "a", found, encode=lambda names: encode(names, 4))
    assert not (tmp_path / "a/manifest.json").exists()
    refuses("holds no finished regions", RegionRecords, tmp_path / "a")
    broken = BrokenPictures(7)
    assert write(tmp_path / "a", found, encode=encode, broken=broken, advance=kept.append)
    assert asked == list(found)
    assert broken.names == ["3"]
    assert sum(kept) == 4
    write(tmp_path / "b", found)
    assert shards(tmp_path / "a") == shards(tmp_path / "b")
    assert len(shards(tmp_path / "a")) == 4
    asked.clear()
    assert write(tmp_path / "a", found, encode=encode)  # finished
    assert not asked


def test_a_process_alone_is_not_joined(tmp_path):
    """Locks are a process's own: the other one is another process."""
    folder = tmp_path / "r"
    folder.mkdir()
    code = (
        "import sys, pathlib, time; from mmqa_jax.core.locks import hold; "
        "lock = hold(pathlib.Path(sys.argv[1]) / '.lock'); print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=r"r: process .* is at work there; wait"):
            write(folder, {"1": regions(1)})
        with pytest.raises(UserError, match="is at work there"):
            write(folder, {"1": regions(1)}, part=Shard(0, 2))
    finally:
        other.kill()
        other.wait()
    assert write(folder, {"1": regions(1)})


def test_two_processes_share_a_job(tmp_path):
    """Whoever is last puts the shards together; the files are those of one process."""
    found = {str(n): regions(n % 3, n) for n in range(7)}
    write(tmp_path / "one", found)
    folder = tmp_path / "shared"
    assert not write(folder, found, part=Shard(1, 2))
    assert not (folder / "manifest.json").exists()
    assert not write(folder, found, part=Shard(1, 2))  # started again
    with pytest.raises(UserError, match="holds other files than those of this job"):
        write(folder, found, dataclasses.replace(FACTS, model="other"), part=Shard(0, 2))
    assert write(folder, found, part=Shard(0, 2))
    assert shards(folder) == shards(tmp_path / "one")
    first, second = ((tmp_path / name / "manifest.json").read_bytes() for name in ("one", "shared"))
    assert first == second
    assert write(folder, found, part=Shard(1, 2))  # whoever starts later has nothing to do
    assert shards(folder) == shards(tmp_path / "one")
