"""Records of files in a store, read by ranges: ArrayRecord's own reader of whole files judges them."""

import itertools
import os
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import amazon_store
import numpy as np
import object_store
import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.local_copies import IN_STORE, local_copy
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import open_corpus, open_mixture
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.records.corpus_records import RemoteRecords, RemoteShard
from mmqa_jax.data.records.grid_records import GridRecords, write_grids
from mmqa_jax.data.tokenizers import minilm_tokenizer
from tests import streamed_batches
from tests.refusals import refuses

GS = f"gs://{object_store.BUCKET}"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty bucket, and `fetched`: object, start and end of every range that was asked for."""
    monkeypatch.setenv("MMQA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    fetched = []

    def cat_file(self, path, start=None, end=None, **_):
        fetched.append((path.rpartition("/")[2], start, end))
        objects, _, name = self._split(path)
        try:
            return objects.path(name).read_bytes()[start:end]
        except FileNotFoundError as error:
            raise FileNotFoundError(path) from error

    monkeypatch.setattr(object_store.StandIn, "cat_file", cat_file)
    with object_store.started(tmp_path / "store", monkeypatch):
        objects = object_store.Objects(tmp_path / "store" / object_store.BUCKET)
        objects.fetched = fetched
        yield objects


def put_shard(store, tmp_path, name, records, options="group_size:1"):
    """Writes a file into the store; what RemoteRecords is told of it."""
    file = tmp_path / name
    writer = ArrayRecordWriter(str(file), options)
    for record in records:
        writer.write(record)
    writer.close()
    store.put(name, file.read_bytes())
    return RemoteShard(f"{GS}/{name}", file.stat().st_size, len(records))


def drawn(rng, count, most):
    """Records: of no bytes and of several blocks, some that compress well."""
    sizes = [int(most * rng.random() ** 4) for _ in range(count)]
    return [rng.randbytes(n) if n % 3 else bytes(n) for n in sizes]


@pytest.mark.parametrize(
    ("counts", "most"),
    [((1,), 10), ((200, 1, 70), 300_000), ((30_000, 2), 40)],  # the last index begins early
)
def test_records_in_any_order_are_those_of_the_whole_files(store, tmp_path, counts, most):
    rng = random.Random(len(counts))
    parts = [drawn(rng, count, most) for count in counts]
    shards = [put_shard(store, tmp_path, f"f{n}", part) for n, part in enumerate(parts)]
    expected = [
        record
        for n in range(len(parts))
        for record in ArrayRecordReader(str(tmp_path / f"f{n}")).read_all()
    ]
    found = RemoteRecords(shards)
    assert len(found) == len(expected) == sum(counts)
    numbers = rng.sample(range(len(expected)), min(len(expected), 300))
    for number in numbers[:100]:
        assert found[number] == expected[number]
    found.look_ahead(numbers)
    asked = len(store.fetched)
    for number in numbers:
        assert found[number] == expected[number]
    assert len(store.fetched) == asked


def test_only_what_is_read_is_fetched_and_once(store, tmp_path):
    rng = random.Random(0)
    records = [rng.randbytes(20_000) for _ in range(300)]
    found = RemoteRecords([put_shard(store, tmp_path, "file", records)])
    for number in (7, 250, 7, 90, 250):
        assert found[number] == records[number]
    (_, start, end), *ranges = store.fetched
    assert end - start == 2 << 16
    assert len(ranges) == 3
    assert all(20_000 < end - start < 20_200 for _, start, end in ranges)
    found.look_ahead([20, 22, 21, 7, 23])  # neighbours in one range
    ((_, start, end),) = store.fetched[4:]
    assert 80_000 < end - start < 80_400


def test_in_order_ever_more_is_fetched_ahead(store, tmp_path):
    rng = random.Random(0)
    records = [rng.randbytes(100_000) for _ in range(300)]
    shard = put_shard(store, tmp_path, "file", records)
    assert list(RemoteRecords([shard])) == records
    lengths = [end - start for _, start, end in store.fetched]
    assert len(lengths) < 15
    assert 7 << 20 < max(lengths) <= 8 << 20
    assert sum(lengths) < shard.size + (2 << 16)


def test_the_disk_that_it_takes_is_bounded(store, tmp_path, monkeypatch):
    rng = random.Random(0)
    parts = [[rng.randbytes(50_000) for _ in range(40)] for _ in range(6)]
    shards = [put_shard(store, tmp_path, f"f{n}", part) for n, part in enumerate(parts)]
    records = [record for part in parts for record in part]
    monkeypatch.setenv("MMQA_STREAM_GIB", str(3e6 / 2**30))
    found, most = RemoteRecords(shards), 0
    for number in [rng.randrange(240) for _ in range(300)]:
        assert found[number] == records[number]
        most = max(most, sum(_disk_bytes(tmp_path / "cache/store")))
    # A file may go over the bound with what was fetched last; blocks of the disk are whole.
    assert 2e6 < most < 3e6 + 500_000
    with ThreadPoolExecutor(8) as pool:  # each evicts what others read
        numbers = [rng.randrange(240) for _ in range(400)]
        assert list(pool.map(found.__getitem__, numbers)) == [records[n] for n in numbers]
    assert os.listdir(tmp_path / "cache/store") == []  # nothing that a kill could leave


def _disk_bytes(folder):
    """The bytes on disk of the files without names that this process holds open there."""
    opened = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    states = [file.stat() for file in opened if os.readlink(file).startswith(str(folder))]
    return {state.st_ino: state.st_blocks * 512 for state in states}.values()


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE = {
    "cut": (
        lambda content: content[:-1],
        r"bytes 2\d\d,\d.* were expected, but it is gone or shorter",
    ),
    "gone": (None, r"bytes 2\d\d,\d.* were expected, but it is gone or shorter"),
    "a record's byte": (lambda content: flipped(content, 1000), r"cannot be read \(.*"),
    "no records": (lambda content: bytes(len(content)), r"cannot be read \("),
    "noise": (lambda content: random.Random(1).randbytes(len(content)), r"cannot be read \("),
    "the last block": (lambda content: flipped(content, len(content) - 65536 + 76), "no ArrayRe"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_named(store, tmp_path, damage):
    rng = random.Random(0)
    shard = put_shard(store, tmp_path, "file", [rng.randbytes(5000) for _ in range(60)])
    damaged, said = DAMAGE[damage]
    if damaged is None:
        store.path("file").unlink()
    else:
        store.put("file", damaged(store.path("file").read_bytes()))
    found = RemoteRecords([shard])
    refuses(rf"^{GS}/file: .*{said}.*; copy the folder into the st", list, found)


def test_any_flipped_byte_of_the_index_is_noticed(store, tmp_path):
    """Or harmless: then all records are as they were written."""
    rng = random.Random(0)
    records = [rng.randbytes(300) for _ in range(20)]
    shard = put_shard(store, tmp_path, "file", records)
    content, noticed = store.path("file").read_bytes(), 0
    used = [place for place in range(20 * 300, len(content)) if content[place]]
    for place in rng.sample(used, 100):
        store.put("file", flipped(content, place))
        try:
            assert list(RemoteRecords([shard])) == records
        except UserError:
            noticed += 1
    assert noticed > 80


def test_an_object_that_was_replaced_is_noticed(store, tmp_path):
    rng = random.Random(0)
    shard = put_shard(store, tmp_path, "file", [rng.randbytes(5000) for _ in range(60)])
    found = RemoteRecords([shard])
    found[0]
    put_shard(store, tmp_path, "file", [rng.randbytes(4990 + n) for n in range(60)])
    with pytest.raises(UserError, match=rf"^{GS}/file: .*copy the folder into the store again"):
        found[50]


def test_files_of_other_layouts_are_refused(store, tmp_path):
    records = [bytes(10)] * 8
    for options, said in (("group_size:4", "8 were expected|a record a chunk"),
                          ("group_size:1,brotli", "unknown compression")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            RemoteRecords([put_shard(store, tmp_path, "file", records, options)])[0]


@pytest.mark.parametrize("given", ["lots", "-1", "inf", "nan"])
def test_a_bound_that_is_no_number_is_refused(monkeypatch, given):
    monkeypatch.setenv("MMQA_STREAM_GIB", given)
    refuses(f"MMQA_STREAM_GIB={given}: a number of GiB was expected", RemoteRecords, [])


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ConnectionResetError("reset"), RunError, "the store refuses or cannot be reached"),
        # As s3fs says of a range behind the end.
        (OSError(22, "The requested range is not satisfiable"), UserError, "it is gone or shorter"),
    ],
)
def test_a_store_that_fails_is_no_damage(store, tmp_path, monkeypatch, error, kind, said):
    found = RemoteRecords([put_shard(store, tmp_path, "file", [bytes(9)])])

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(object_store.StandIn, "cat_file", fail)
    with pytest.raises(kind, match=f"{GS}/file: .*{said}"):
        found[0]


def put_folder(store, folder, prefix):
    for file in filter(Path.is_file, folder.rglob("*")):
        store.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())


def pictures_of(corpus):
    names = [source.image for source in corpus.sources if source.image]
    corpus.look_ahead(names[:2])
    return {name: corpus.read_picture(name) for name in names}


def test_a_corpus_is_opened_without_its_pictures(store, data):
    put_folder(store, data, "data")
    whole = open_corpus(data)
    there = local_copy(f"{GS}/data", stream=True)
    (marker,) = there.rglob(IN_STORE)
    assert marker.parent.name == "pictures"
    assert not list(marker.parent.glob("*array_record*"))
    found = open_corpus(there)
    assert found.sources == whole.sources
    assert found.questions() == whole.questions()
    assert pictures_of(found) == pictures_of(whole)
    assert pictures_of(open_corpus(local_copy(f"{GS}/data", stream=True))) == pictures_of(whole)

    asked = len(store.fetched)  # another verb copies them, which training then reads
    assert local_copy(f"{GS}/data") == local_copy(f"{GS}/data", stream=True) == there
    assert not list(there.rglob(IN_STORE))
    assert pictures_of(open_corpus(there)) == pictures_of(whole)
    assert len(store.fetched) == asked

    (shard,) = store.names(f"data/{marker.parent.relative_to(there)}/pictures-corpus")
    content = store.path(shard).read_bytes()
    store.put(shard, flipped(content, 100))
    with pytest.raises(UserError, match=f"{shard}: its records cannot be read"):
        pictures_of(open_corpus(local_copy(f"{GS}/data", stream=True)))
    store.path(shard).unlink()
    with pytest.raises(UserError, match="its corpus records cannot be read"):
        pictures_of(open_corpus(local_copy(f"{GS}/data", stream=True)))


@pytest.mark.parametrize(
    "opened",
    [
        open_corpus,
        lambda place: open_mixture([place, place]),
        lambda place: open_corpus(place, place),  # its questions, on its own sources
    ],
)
def test_pictures_of_a_batch_are_fetched_before_they_are_read(store, data, opened):
    put_folder(store, data, "data")
    corpus = opened(local_copy(f"{GS}/data", stream=True))
    reader = SourceReader(corpus, minilm_tokenizer(), PictureStore(corpus, 8))
    assert not store.fetched
    reader.look_ahead(np.arange(-1, len(corpus)))
    asked = len(store.fetched)
    assert asked
    for row in range(len(corpus)):
        reader.raw(row)
    assert len(store.fetched) == asked


def test_features_in_a_store(store, tmp_path):
    rng = np.random.default_rng(0)
    grids = {f"p{n}": rng.normal(size=(2, 2, 5)).astype("f2") for n in range(10)}
    write_grids(
        tmp_path / "grids", {n: f"p{n}" for n in range(10)},
        lambda names: [grids[name] for name in names],
        shape=(2, 2, 5), model="m", broken=BrokenPictures(10, None), shard=4,
    )  # fmt: skip
    put_folder(store, tmp_path / "grids", "grids")
    found = GridRecords(local_copy(f"{GS}/grids", stream=True))
    for number in (9, 0, 4):
        np.testing.assert_array_equal(found.read(number)[0], grids[f"p{number}"])
    assert {re.sub("[0-9]+$", "", name) for name, *_ in store.fetched} == {
        "grids-pictures.array_record-"
    }


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """A prepared corpus of 240 pictures of 12 to 40 KB in 3 files, each with a question about it."""
    from PIL import Image

    from mmqa_jax.data.records import corpus_records as records
    from mmqa_jax.data.schema import Question, Source

    folder, rng = tmp_path_factory.mktemp("web"), np.random.default_rng(0)

    def read(name):
        side = 70 + int(name) % 50
        file = folder / name
        Image.fromarray(rng.integers(256, size=(side, side, 3), dtype=np.uint8)).save(file, "PNG")
        return file.read_bytes()

    sources = [Source(f"s{n}", "image", f"flag {n}", image=f"{n}") for n in range(240)]
    questions = [
        Question(f"q{n}", "train", f"what is {n} ?", positives=(f"s{n}",)) for n in range(240)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "PICTURE_SHARD", 80)
        records.write_records(folder / "data", sources, questions, read, name="web", workers=1)
    yield folder / "data"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_hosts_read_their_shares_and_the_same_batches_also_after_a_kill(web, tmp_path, monkeypatch):
    """S3's own client and moto's server; hosts are processes, which make their rows of a batch."""
    pictures = sum(file.stat().st_size for file in web.rglob("pictures-*"))
    numbers = itertools.count()  # of hosts, each with a disk of its own

    def run(*hosts):
        started = [
            streamed_batches.start_host(tmp_path / str(next(numbers)), threads=0, **asked)
            for asked in hosts
        ]
        return list(map(streamed_batches.told, started))

    with amazon_store.started(monkeypatch):
        streamed_batches.put_folder(web)
        (copied,) = run({"stream": False, "batches": 30})
        even, odd = run(
            {"rows": [0, 2, 4, 6], "batches": 30}, {"rows": [1, 3, 5, 7], "batches": 12}
        )
        # The second was ended after 12 batches; from there its rows are made by two others.
        rest = run(*({"rows": rows, "start": 12, "batches": 18} for rows in ([1, 5], [3, 7])))
    assert copied["bytes"] > pictures
    whole = copied["rows"]
    assert even["rows"] == [rows[0::2] for rows in whole]
    assert odd["rows"] == [rows[1::2] for rows in whole[:12]]
    assert rest[0]["rows"] == [[rows[1], rows[5]] for rows in whole[12:]]
    assert rest[1]["rows"] == [[rows[3], rows[7]] for rows in whole[12:]]
    texts, ends = copied["bytes"] - pictures, 3 * (2 << 16)
    shares = [(host["bytes"] - texts - ends) / (pictures - ends) for host in (even, *rest)]
    assert shares == pytest.approx([0.5, 0.15, 0.15], rel=0.15)
