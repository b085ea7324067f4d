"""`python -m tests.bench wikipedia`: its rows have what they say, and its queries find something."""

import sys

import pytest

from mmqa_jax.core.errors import UserError
from tests.bench import Options, synthetic_passages
from tests.bench import wikipedia as bench
from tests.bench.timing import Child

pytestmark = pytest.mark.slow

PEAKS = {"passages": 1, "index": 2, "search": 3}  # GiB


@pytest.fixture(autouse=True)
def _few_words(monkeypatch):
    monkeypatch.setattr(synthetic_passages, "_VOCABULARY", 20_000)
    monkeypatch.setattr(synthetic_passages, "_BLOCK", 1_000)
    monkeypatch.setattr(bench, "_QUERIES", 40)


def test_a_row_has_time_memory_and_rate(monkeypatch, tmp_path, capsys, short_readings):
    """What its processes do is done in this one, and measured as if by `run_child`."""
    monkeypatch.setattr(bench, "PASSAGES", {"tiny": 2_000, "less": 500})
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def child(command):
        *python, name, folder, sizes = command
        assert python == [sys.executable, "-m", "tests.bench.wikipedia"]
        capsys.readouterr()
        bench._main(name, folder, sizes)
        return Child(0.0, PEAKS[name] << 30, capsys.readouterr().out)

    monkeypatch.setattr(bench, "run_child", child)
    result = bench.run(Options(rounds=1, only=("tiny", "less")))
    tiny, less = result["rows"]
    assert (tiny["passages"], less["passages"]) == (2_000, 500)
    for row in (tiny, less):
        assert row["ours"] > row["required"] > 0
        assert (row["index_peak_gib"], row["search_peak_gib"]) == (2, 3)
        assert row["index_s"] > 0
        assert row["peer"] > 0  # BM25 in memory
    with pytest.raises(UserError, match="--only=2M: no such row; use one of tiny"):
        bench.run(Options(only=("2M",)))
