"""The bench of stores: every library returns what it was given, and ours notices every flipped bit."""

import pytest

from tests.bench import Options, store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in store.ROWS if name != "lmdb"])
def test_what_is_written_is_read(name):
    flips = 2 if name == "store" else 1  # a fork each
    row = store.measure(name, store.make_answers(130), flips)
    assert row["files"] >= 1
    assert row["refused"] + row["harmless"] + row["wrong"] == flips
    if name == "store":
        assert row["refused"] == flips


def test_ours_is_beside_every_row(monkeypatch):
    monkeypatch.setitem(store._COUNTS, "small", (130, 1))
    rows = store.run(Options(size="small", only=("sqlite",)))["rows"]
    assert [row["name"] for row in rows] == ["store", "sqlite"]
    assert rows[0]["ours"] == rows[1]["ours"] > 0
    assert rows[0]["ratio"] is None
    assert rows[1]["ratio"] == pytest.approx(rows[1]["peer"] / rows[1]["ours"])
