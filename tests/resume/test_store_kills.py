"""The store of finished work, hard: hundreds of kills, flipped bits, several writers at once.

What rows, chunks, caches and vectors promise after a kill is promised here, once. The verbs as a
whole are killed in tests/unit/test_inference_killed.py.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import killed_store
import numpy as np
import object_store
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.store import Store


def kill(folder: Path | str, how: str, kills: int) -> dict[str, int]:
    """Runs killed_store.py."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    ended = subprocess.run(
        [sys.executable, killed_store.__file__, str(folder), how, str(kills)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def times(request):
    """How many times as many kills and flips as by default."""
    return 4 if request.config.getoption("--kills") >= 50 else 1


@pytest.fixture(scope="module")
def appended(times, tmp_path_factory):
    """A store that writers appended to while they were killed, and its counts."""
    folder = tmp_path_factory.mktemp("store") / "kept"
    return folder, kill(folder, "appended", times * 50)


def test_what_add_has_returned_survives_every_kill(appended, times, tmp_path):
    """And nothing is read that was not written, by whichever of the writers."""
    _, counts = appended
    assert counts["killed"] >= times * 50
    assert counts["within"] >= times * 5
    assert kill(tmp_path / "kept", "alone", times * 25)["killed"] >= times * 25


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_kills_in_an_object_store(scheme, times, tmp_path, monkeypatch):
    with object_store.started(tmp_path / "store", monkeypatch):
        counts = kill(f"{scheme}://{object_store.BUCKET}/runs/kept", "appended", 5 * times)
    assert counts["killed"] >= 5 * times


def said_of_damage(folder: Path) -> str:
    """What a store that refuses damage says when everything is read; "": nothing."""
    try:
        with Store(folder, killed_store.WHAT) as store:
            store.check()
    except UserError as error:
        return str(error)
    return ""


def test_flipped_bits_of_many_writers(times, appended):
    """Refused by name, or nothing that is read was hit; a cache loses one chunk at most."""
    (folder, _), rng, refused = appended, random.Random(0), 0
    files = sorted(folder.glob("[0-9]*.jsonl"))
    expected = {key: killed_store.value(key) for key in Store(folder, killed_store.WHAT)}
    for _ in range(50 * times):
        file = rng.choices(files, [path.stat().st_size for path in files])[0]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        said = said_of_damage(folder)
        assert not said or str(file) in said
        refused += bool(said)
        with Store(folder, killed_store.WHAT, damage="drop") as dropping:
            kept = {key: dropping.get(key) for key in expected}
        lost = [key for key, value in kept.items() if value is None]
        assert len(lost) <= 3
        for key in expected.keys() - set(lost):
            np.testing.assert_equal(kept[key], expected[key])
        file.write_bytes(content)
    assert (
        refused > 37 * times
    )  # the other bits are of chunks that were cut, or of results written twice
