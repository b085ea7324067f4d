"""SHA256SUMS of a folder: every damage of a file and of SHA256SUMS itself is named."""

import shutil
import subprocess

import object_store
import pytest

from mmqa_jax.core.checkpoints.checksums import SUMS, check_sums, find_damage, read_sums, write_sums
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    (made / "deep").mkdir(parents=True)
    (made / "a.bin").write_bytes(bytes(range(256)) * 9)
    (made / "deep" / "b.json").write_text('{"x": 1}')
    (made / "empty").touch()
    write_sums(made)
    return made


def test_sha256sum_reads_it(folder):
    command = ["sha256sum", "--check", "--strict", SUMS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["a.bin: OK", "deep/b.json: OK", "empty: OK"]
    assert find_damage(folder) is None


def test_every_flipped_bit_of_every_file_is_found(folder):
    names = ["a.bin", "deep/b.json", SUMS]
    for name in names:
        good = (folder / name).read_bytes()
        for bit in range(0, 8 * len(good), 1 if name == SUMS else 101):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(bad)
            assert find_damage(folder) is not None, (name, bit)
        (folder / name).write_bytes(good)
    assert find_damage(folder) is None


def test_cut_missing_and_unreadable_files_are_named(folder):
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    for cut in ("", lines[0], "".join(lines[:-1])):
        (folder / SUMS).write_text(cut)
        assert find_damage(folder) == f"{SUMS} is damaged (it is not what was written)"
    (folder / SUMS).write_text("".join(lines))
    (folder / "empty").write_bytes(b"\0")
    assert find_damage(folder).startswith("empty is damaged")
    (folder / "deep" / "b.json").unlink()
    assert find_damage(folder) == "deep/b.json is missing"
    assert find_damage(folder, ["a.bin", "unlisted"]) is None
    with pytest.raises(UserError, match=r"made: deep/b.json is missing; copy it again\.$"):
        check_sums(folder, remedy="copy it again")


def test_processes_share_the_files(folder):
    (folder / "deep" / "b.json").write_text("{}")
    assert [find_damage(folder, part=(i, 3)) is None for i in range(3)] == [True, False, True]


def test_a_folder_without_sums_is_older_than_they_are(folder):
    (folder / SUMS).unlink()
    assert read_sums(folder) is None
    assert find_damage(folder) is None


def test_a_file_that_comes_later_counts(folder):
    write_sums(folder, ["a.bin"], coming={"model.json": b"{}\n"})
    assert find_damage(folder) == "model.json is missing"
    (folder / "model.json").write_text("{}\n")
    assert find_damage(folder) is None


def test_objects_in_a_store(folder, tmp_path, monkeypatch):
    with object_store.started(tmp_path / "store", monkeypatch):
        place = as_path(f"gs://{object_store.BUCKET}/runs/one")
        for name in ("a.bin", "deep/b.json"):
            (place / name).write_bytes((folder / name).read_bytes())
        write_sums(place)
        assert read_sums(place).keys() == {"a.bin", "deep/b.json"}
        assert find_damage(place) is None
        (place / "deep/b.json").write_text("{}")
        assert find_damage(place).startswith("deep/b.json is damaged")
        (place / "deep/b.json").unlink()
        assert find_damage(place) == "deep/b.json is missing"
    shutil.rmtree(tmp_path / "store")
