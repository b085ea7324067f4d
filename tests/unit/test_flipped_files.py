"""Bits that change on a disk, in every file that inference keeps: refused by name, or harmless.

What is opened after the damage either ends in a UserError, or gives the same bits as before it. (What
lies in core.store alone: tests/resume/test_store_kills.py.)
"""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_shards import Counting, run

from mmqa_jax.core.chunks import Shard
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.records.grid_records import GridRecords, write_grids
from mmqa_jax.retrieval.embeddings import Embeddings, open_embeddings, write_embeddings
from mmqa_jax.retrieval.indexes.index import (
    ScannParameters,
    build_index,
    load_index,
    scann_available,
)

pytestmark = pytest.mark.slow

FLIPS = 12  # of each file; see `damaged`
ROWS, DIM = 600, 8


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("MMQA_PROGRESS", "off")


def damaged(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """The content with one bit flipped, at places all over it; with a zeroed block; and cut."""
    spread = [len(content) * i // FLIPS for i in range(FLIPS)]
    for at in sorted({0, len(content) - 1, *spread}):
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        yield bytes(changed)
    start = rng.randrange(len(content))
    block = len(content[start : start + 512])
    yield content[:start] + bytes(block) + content[start + block :]
    yield content[: len(content) // 2]


def check_damage(folder: Path, open_it: Callable[[Path], object], tmp_path: Path) -> dict[str, int]:
    """Damages every file of a folder in many ways; returns how often each was refused.

    Args:
      open_it: folder -> what is read of it, to be compared; it may write there.
    """
    rng, refused = random.Random(folder.name), {}
    whole = shutil.copytree(folder, tmp_path / "whole" / folder.name)
    expected = open_it(whole)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        refused[name] = 0
        for content in damaged(file.read_bytes(), rng) if file.stat().st_size else ():
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            copy = shutil.copytree(folder, tmp_path / "damaged" / folder.name)
            (copy / name).write_bytes(content)
            found, said = None, None
            try:
                found = open_it(copy)
            except UserError as error:
                said = str(error)
                refused[name] += 1
            assert found == expected or (said and str(copy) in said), (name, said)
    return refused


@pytest.mark.parametrize("shards", [1, 2])
def test_parts_that_a_start_goes_on_from(tmp_path, shards):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Shard(0, shards), Counting(fail_at=2))

    def go_on(folder: Path) -> list:
        return [run(folder, Shard(index, shards)) for index in range(shards)][-1]

    refused = check_damage(tmp_path / "parts", go_on, tmp_path)
    assert all(count > FLIPS for name, count in refused.items() if name.endswith(".jsonl"))


def vectors_of(rows: range) -> np.ndarray:
    vectors = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True))[rows.start : rows.stop]


def embedded(folder: Path, stop_at: int = ROWS) -> Embeddings:
    def embed(rows: range) -> np.ndarray:
        if rows.start >= stop_at:
            raise KeyboardInterrupt
        return vectors_of(rows)

    return write_embeddings(
        folder, embed, rows=ROWS, dim=DIM, shard_rows=200, model_fingerprint="m",
        corpus_fingerprint="c",
    )  # fmt: skip


def test_finished_embeddings(tmp_path):
    embedded(tmp_path / "embeddings")
    for open_it in (
        lambda folder: open_embeddings(folder, "m", "c").vectors.tobytes(),
        lambda folder: embedded(folder).vectors.tobytes(),
    ):
        shutil.rmtree(tmp_path / "whole", ignore_errors=True)
        refused = check_damage(tmp_path / "embeddings", open_it, tmp_path)
        assert refused["embeddings.npy"] >= FLIPS


def test_shards_that_were_exchanged_are_computed_again(tmp_path):
    """Each is whole, but holds other rows than its name says."""
    with pytest.raises(KeyboardInterrupt):
        embedded(tmp_path / "embeddings", stop_at=400)
    one, other = sorted((tmp_path / "embeddings").glob("shards-*/*.jsonl"))
    shutil.move(one, tmp_path / "one")
    shutil.move(other, one)
    shutil.move(tmp_path / "one", other)
    found = embedded(tmp_path / "embeddings").vectors
    np.testing.assert_array_equal(found, vectors_of(range(ROWS)))


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_indexes(tmp_path, kind):
    if kind == "scann" and not scann_available():
        pytest.skip("ScaNN is for Linux on x86 alone")
    embeddings = embedded(tmp_path / "embeddings")
    parameters = ScannParameters(leaves=10, leaves_to_search=3, reorder=50)
    build_index(embeddings, kind, parameters).save(tmp_path / "index")
    queries = vectors_of(range(20))

    def search(folder: Path) -> tuple[bytes, ...]:
        found = load_index(folder, embeddings).search(queries, 5)
        return tuple(array.tobytes() for array in found)

    refused = check_damage(tmp_path / "index", search, tmp_path)
    assert refused["manifest.json"] >= FLIPS
    assert len(refused) == 2 if kind == "exact" else len(refused) > 4


def grids(names) -> list[np.ndarray]:
    return [np.full((2, 2, 3), int(name[1:]), np.float16) for name in names]


@pytest.mark.parametrize("stop_at", [1, 99])
def test_grids(tmp_path, stop_at):
    pictures = {number: f"p{number}" for number in range(7)}

    def write(folder: Path, stop_at: int = 99) -> None:
        def encode(names):
            if int(names[0][1:]) >= 3 * stop_at:
                raise KeyboardInterrupt
            return grids(names)

        write_grids(
            folder, pictures, encode, shape=(2, 2, 3), model="m", broken=BrokenPictures(7), shard=3
        )

    def read(folder: Path) -> list[bytes]:
        write(folder)
        records = GridRecords(folder)
        return [records.read(number)[0].tobytes() for number in pictures]

    if stop_at < 99:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "grids", stop_at)
    else:
        write(tmp_path / "grids")
    check_damage(tmp_path / "grids", read, tmp_path)
