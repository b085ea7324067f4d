"""The store of finished work: what was added is read, by everybody, or refused, or done again."""

import hashlib
import io
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import object_store
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_disk import small_disk

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.store import (
    HEAD,
    Store,
    check_no_older,
    chunk_files,
    chunks_of,
    digest_of,
    read_head,
    write_head,
)
from mmqa_jax.runs.part import of_folders
from tests.refusals import refuses

WHAT = {"model": "m1", "questions": 3}
ADDED = {"q0": {"answer": "Zürich"}, "q1": [0.25, 1.5], "q2": None}


@pytest.fixture
def folder(tmp_path):
    """A store of two chunks, three results."""
    with Store(tmp_path / "kept", WHAT) as store:
        store.add({key: ADDED[key] for key in ("q0", "q1")})
        store.add({"q2": None})
    return tmp_path / "kept"


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("[0-9]*.jsonl")
    return file


def contents(store: Store) -> dict:
    return {key: store[key] for key in store}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_no_file_stays_open_behind_a_with(folder):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Store(folder, WHAT) as store:
        store.add({"q3": 1})
        assert store["q0"] == ADDED["q0"]
        assert len(list(Path("/proc/self/fd").iterdir())) > before
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_was_added_is_read_back(folder):
    store = Store(folder, WHAT)
    assert contents(store) == ADDED
    assert (len(store), "q3" in store, store.get("q3")) == (3, False, None)
    assert store.missing(["q3", "q1", "q4"]) == ["q3", "q4"]
    assert read_head(folder) == {"job": WHAT}
    assert [chunk.keys for chunk in chunks_of(only_file(folder))] == [("q0", "q1"), ("q2",)]
    with pytest.raises(KeyError):
        store["q3"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
arrays = st.builds(
    lambda shape, kind: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(["f4", "f2", "i8", "?", "u1"]),
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.dictionaries(keys, json_values | arrays, max_size=4))))
def test_any_values_by_any_writers(chunks):
    """Two writers and two readers at any moment; the later result of a key counts."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        one, other, expected = Store(folder, WHAT), Store(folder, WHAT), {}
        for first, values in chunks:
            (one if first else other).add(values)
            expected |= values
            one.refresh()
            other.refresh()
        for store in (one, other):
            assert set(store) == set(expected)
        for key, value in expected.items():
            if isinstance(value, np.ndarray):
                assert one[key].dtype == value.dtype
                np.testing.assert_array_equal(one[key], value)
            else:
                assert one[key] == value
        one.close(), other.close()


def test_results_are_on_disk_when_add_returns(tmp_path):
    writing, reading = Store(tmp_path / "kept", WHAT), Store(tmp_path / "kept", WHAT)
    assert not (tmp_path / "kept").exists()  # nothing was added yet
    writing.add({})
    assert not (tmp_path / "kept").exists()
    writing.add({"q0": 1})
    assert Store(tmp_path / "kept", WHAT)["q0"] == 1  # read while the writer is still open
    assert "q0" not in reading
    reading.refresh()
    assert reading["q0"] == 1
    writing.add({"q1": 2})
    reading.refresh()
    assert contents(reading) == {"q0": 1, "q1": 2}
    writing.close()


def test_a_closed_store_takes_more(folder):
    store = Store(folder, WHAT)
    store.add({"q3": 3})
    store.close()
    store.close()
    assert store["q3"] == 3
    store.add({"q4": 4})
    store.close()
    assert contents(Store(folder, WHAT)) == ADDED | {"q3": 3, "q4": 4}
    assert len([*folder.glob("[0-9]*.jsonl")]) == 2  # one file a writer


def test_a_later_result_counts(folder):
    with Store(folder, WHAT) as store:
        store.add({"q2": "new"})
    assert Store(folder, WHAT)["q2"] == "new"


def test_results_that_are_alone_are_files_of_their_own(tmp_path):
    """Two processes that computed the same one leave one; what is said about it is read alone."""
    one, other = Store(tmp_path / "kept", WHAT), Store(tmp_path / "kept", WHAT)
    one.add({"00003": [1, 2]}, alone=True, notes={"host": "a"})
    other.add({"00003": [1, 2]}, alone=True, notes={"host": "another"})
    assert [file.name for file in sorted((tmp_path / "kept").iterdir())] == ["00003.jsonl", HEAD]
    (chunk,) = chunks_of(only_file(tmp_path / "kept"))
    assert chunk == (digest_of(WHAT), {"host": "another"}, ("00003",))
    assert one["00003"] == other["00003"] == [1, 2]  # the first's file is another one by now
    os.replace(only_file(tmp_path / "kept"), tmp_path / "kept" / "00004.jsonl")
    one.refresh()
    assert one.missing(["00003", "00004"]) == ["00003"]
    with pytest.raises(KeyError):  # it is another's
        one["00004"]
    with pytest.raises(UserError, match=r"00004\.jsonl: is a part of another run, or of"):
        Store(tmp_path / "kept", WHAT, others="refuse").check()
    refuses("names no file", one.add, {"../3": 1}, alone=True, error=ValueError)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_an_end_cut_by_a_kill_is_dropped(folder, cut):
    file = only_file(folder)
    file.write_bytes(file.read_bytes()[:-cut])
    with Store(folder, WHAT) as store:
        assert ("q1" in store, "q2" in store) == (True, False)
        store.add({"q2": None})
    assert contents(Store(folder, WHAT)) == ADDED


def test_every_cut_of_a_file(folder):
    """Whole chunks before the cut are there, and nothing else."""
    file = only_file(folder)
    whole = file.read_bytes()
    second = whole.rindex(b'{"results"')
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        expected = set() if end < second else {"q0", "q1"}
        assert set(Store(folder, WHAT)) == expected, end


def test_a_file_of_its_own_that_was_cut_is_refused(tmp_path):
    Store(tmp_path, WHAT).add({"00000": 1}, alone=True)
    file = only_file(tmp_path)
    whole = file.read_bytes()
    for end in range(1, len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"00000\.jsonl: is damaged .*; remove it, and its wo"):
            Store(tmp_path, WHAT)["00000"]
        dropping = Store(tmp_path, WHAT, damage="drop")
        assert (dropping.get("00000"), dropping.damaged, len(dropping)) == (None, 1, 0)


def test_results_of_other_inputs_are_discarded(folder):
    with Store(folder, {"model": "m2"}) as store:
        assert len(store) == 0
        assert contents(Store(folder, WHAT)) == ADDED  # until something is added
        store.add({"q5": 5})
    assert contents(Store(folder, {"model": "m2"})) == {"q5": 5}
    assert read_head(folder)["job"] == {"model": "m2"}
    assert len(Store(folder, WHAT)) == 0


def test_results_of_other_inputs_are_refused(folder):
    with pytest.raises(UserError, match=r"jsonl: is a part of another run, or of another chunk; r"):
        Store(folder, {"model": "m2"}, others="refuse")


@pytest.mark.parametrize("line", ["{oops", "[1, 2]", '{"results": 1}', ""])
def test_a_damaged_line_in_the_middle(folder, line):
    file = only_file(folder)
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[1] = line
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    before = file.read_bytes()
    message = r"\.jsonl: is damaged \(.*\); remove it, and its work is done again"
    with pytest.raises(UserError, match=message):
        Store(folder, WHAT).check()
    refuses(message, list, chunks_of(file))
    assert file.read_bytes() == before


def test_no_flipped_bit_is_read(folder):
    """Every bit of the file: refused, or what is read is what was added."""
    file = only_file(folder)
    whole, refused = file.read_bytes(), 0
    for at in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        file.write_bytes(damaged)
        try:
            read = contents(Store(folder, WHAT))
        except UserError:
            refused += 1
        else:
            assert read == {key: ADDED[key] for key in read}, at
    assert refused > 0.99 * 8 * len(whole)


def test_damage_is_dropped_and_counted(tmp_path):
    """A cache keeps every result that is whole, before and behind the damage."""
    with Store(tmp_path, WHAT) as store:
        for n in range(0, 20, 2):
            store.add({f"q{n}": [n] * 5, f"q{n + 1}": np.full(9, n)})
    file = only_file(tmp_path)
    whole, rng, lost = file.read_bytes(), random.Random(0), []
    for _ in range(200):
        damaged = bytearray(whole)
        at = rng.randrange(8 * len(whole))
        damaged[at // 8] ^= 1 << at % 8
        file.write_bytes(damaged)
        store = Store(tmp_path, WHAT, damage="drop")
        found = {key: store.get(key) for key in map("q{}".format, range(20))}
        for n, value in enumerate(found.values()):
            whole_value = [n] * 5 if n % 2 == 0 else np.full(9, n - 1)
            assert value is None or np.array_equal(value, whole_value)
        lost.append(sum(value is None for value in found.values()))
        # Of the last chunk it may seem that a kill cut it.
        assert store.damaged == 1 or found["q18"] is None
        assert len(store) == 20 - lost[-1]
        store.close()
    assert max(lost) <= 2
    assert min(lost) >= 1  # none was read


def test_damage_after_opening_is_noticed(folder):
    refusing, dropping = Store(folder, WHAT), Store(folder, WHAT, damage="drop")
    file = only_file(folder)
    with open(file, "r+b") as opened:  # of the same length
        content = opened.read()
        opened.seek(content.index("Zürich".encode()))
        opened.write(b"B")
    with pytest.raises(UserError, match=r"is damaged \(its SHA-256 is another\); remove it"):
        refusing["q0"]
    assert (dropping.get("q0"), dropping.damaged, dropping["q1"]) == (None, 1, [0.25, 1.5])


@pytest.mark.parametrize("remove", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_result_that_is_gone_since_opening_is_missing(remove, tmp_path):
    Store(tmp_path, WHAT).add({"00000": 1}, alone=True)
    store = Store(tmp_path, WHAT)
    assert "00000" in store
    remove(only_file(tmp_path))
    with pytest.raises(KeyError, match=r"^'00000'$"):
        store["00000"]
    assert "00000" not in store
    store.add({"00000": 2}, alone=True)
    assert store["00000"] == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, "link"])
def test_what_is_no_file_is_refused(make, folder):
    path = folder / "00001.jsonl"
    path.symlink_to(only_file(folder)) if make == "link" else make(path)
    match = "is a symbolic link" if make == "link" else "is no file; delete it"
    for read in (lambda: Store(folder, WHAT), lambda: chunk_files(folder)):
        refuses(f"00001.jsonl: {match}", read)


def test_a_head_that_is_damaged_or_missing(folder):
    write_head(folder, WHAT, shards=3)
    assert read_head(folder) == {"job": WHAT, "shards": 3}
    text = (folder / HEAD).read_text()
    (folder / HEAD).write_text(text.replace('"shards": 3', '"shards": 4'))
    refuses(r"job\.json: is damaged .*; delete it, and the next start", read_head, folder)
    (folder / HEAD).write_text("[]")
    refuses(r"job\.json: is damaged; delete it, and the next start", read_head, folder)
    (folder / HEAD).unlink()
    with Store(folder, WHAT) as store:
        assert contents(store) == ADDED
        store.add({"q3": 3})
    assert read_head(folder)["job"] == WHAT


@pytest.mark.parametrize("value", [{"q": "half \ud83d"}, {"q": {1, 2}}, {"q": np.array([None])}])
def test_what_cannot_be_written_harms_nothing(value, folder):
    with Store(folder, WHAT) as store:
        with pytest.raises((ValueError, TypeError)):
            store.add({"q9": 1, **value})
        store.add({"q3": 3})
    assert contents(Store(folder, WHAT)) == ADDED | {"q3": 3}


def test_work_of_older_versions_is_refused(tmp_path):
    path = tmp_path / "reader-0.jsonl"
    check_no_older(path)
    path.write_text('{"fingerprint": "m"}\n')
    refuses(r"reader-0\.jsonl: .* work of an older version", check_no_older, path)


def test_a_full_disk(tmp_path):
    """Nothing half written is read; with room again, the store goes on."""
    with small_disk(tmp_path / "disk", 2**20) as disk:
        store = Store(disk.folder / "kept", WHAT)
        store.add({"q0": "a" * 5000})
        disk.leave(4096)
        for key in ("q1", "00001"):
            with pytest.raises(OSError, match="No space left") as raised:
                store.add({key: "b" * 50_000}, alone=key != "q1")
            assert str(disk.folder / "kept") in str(raised.value.filename)
        assert "q1" not in store
        disk.free()
        store.refresh()
        assert [*store] == ["q0"]
        store.add({"q1": "b" * 50_000})
        store.close()
        assert contents(Store(disk.folder / "kept", WHAT)) == {"q0": "a" * 5000, "q1": "b" * 50_000}


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_in_an_object_store(scheme, tmp_path, monkeypatch):
    """Every chunk is an object."""
    with object_store.started(tmp_path / "store", monkeypatch):
        place = f"{scheme}://{object_store.BUCKET}/runs/kept"
        one, other = Store(place, WHAT), Store(place, WHAT)
        one.add({"q0": 1, "q1": np.arange(5)})
        one.add({"q2": "b"})
        other.add({"00003": [3]}, alone=True)
        for store in (one, other, Store(place, WHAT)):
            store.refresh()
            assert store["q1"].tolist() == [0, 1, 2, 3, 4]
            assert (store["q0"], store["q2"], store["00003"]) == (1, "b", [3])
        names = object_store.Objects(tmp_path / "store" / object_store.BUCKET).names("runs/kept/")
        assert len(names) == 4  # and job.json
        kept = {chunk.keys for file in chunk_files(one.folder) for chunk in chunks_of(file)}
        assert kept == {("q0", "q1"), ("q2",), ("00003",)}
        last = chunk_files(one.folder)[-1]
        whole = last.read_bytes()
        last.write_bytes(whole[:-1])
        refuses(r"\.jsonl: is damaged \(its end .*; remove it", Store, place, WHAT)
        last.write_bytes(whole)
        other_run = Store(place, {"model": "m2"})
        assert [other_run.get(key) for key in ("q0", "00003")] == [None, None]
        one.remove()
        assert object_store.Objects(tmp_path / "store" / object_store.BUCKET).names() == []


@pytest.mark.parametrize("writing", [False, True])
def test_a_folder_that_was_removed(writing, folder):
    store = Store(folder, WHAT)
    if writing:
        store.add({"q3": 3})
    shutil.rmtree(folder)
    store.refresh()
    assert len(store) == 0
    store.add({"q0": 1})
    assert contents(Store(folder, WHAT)) == {"q0": 1}


def sealed(data=b"", **changes) -> bytes:
    """A chunk whose checksums are right: a file may come from somebody else."""

    def sha256(of: bytes) -> str:
        return hashlib.sha256(of).hexdigest()

    results = [["00009", len(data), sha256(data)[:16]]]
    head = {"results": results, "size": len(data), "job": digest_of(WHAT), "notes": {}, **changes}
    line = json.dumps(head).encode()
    return line[:-1] + f', "sha256": "{sha256(line)}"}}\n'.encode() + data


def pickled() -> bytes:
    """An array of objects, which NumPy writes as a pickle."""
    content = io.BytesIO()
    np.save(content, np.array([{}]), allow_pickle=True)
    return content.getvalue()


HUGE = [["00009", 1 << 60, "0" * 16]]  # takes no memory


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (sealed(results=HUGE, size=1 << 60), "its SHA-256 is another"),
        (sealed(size=7), "a line is not what was written"),
        (sealed(results=[["00009", -1, ""]], size=-1), "a line is not what was written"),
        (sealed(results=[]), "a line is not what was written"),
        (sealed(job=1), "a line is not what was written"),
        (sealed(notes=[]), "a line is not what was written"),
        (sealed(), "its result is missing"),
        (sealed(b"{"), "a result cannot be read"),
        (sealed(pickled()), "a result cannot be read"),
    ],
)
def test_what_never_was_a_store_is_refused(content, reason, folder):
    (folder / "00009.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"00009\.jsonl: is damaged \({reason}\); remove it, and"):
        Store(folder, WHAT)["00009"]


def test_weights_written_again_have_another_fingerprint(tmp_path):
    """Their JSON may be the same to the letter: another checkpoint, converted to the same folder."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.json").write_text("{}")
    manifest = tmp_path / "weights" / "manifest.ocdbt"
    manifest.write_bytes(b"one")
    first = of_folders(tmp_path, text="reader")
    assert of_folders(tmp_path, "", text="reader") == first
    manifest.write_bytes(b"two")
    assert of_folders(tmp_path, text="reader") != first
