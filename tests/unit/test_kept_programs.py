"""Programs that tests compiled are kept whole or not at all."""

import kept_programs
import pytest
from jax._src import compilation_cache


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Those of a checkout and of the machine."""
    monkeypatch.setattr(kept_programs, "FOLDER", tmp_path / "one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    kept_programs.take()
    return tmp_path / "one", kept_programs._kept()


def test_half_an_entry_ends_with_its_run(folders, monkeypatch, tmp_path):
    run, kept = folders
    entry = compilation_cache.compress_executable(b"program" * 1000)
    (run / "jit_a-cache").write_bytes(entry)
    (run / "jit_b-cache").write_bytes(entry[: len(entry) // 2])
    (run / ".jit_c-cache.1").write_bytes(entry)  # of a run that was killed
    kept_programs.keep()
    assert [file.name for file in kept.iterdir()] == ["jit_a-cache"]
    assert not (run / "jit_b-cache").exists()
    monkeypatch.setattr(kept_programs, "FOLDER", tmp_path / "another")
    kept_programs.take()
    assert (tmp_path / "another/jit_a-cache").read_bytes() == entry


def test_what_is_kept_has_an_end(folders, monkeypatch):
    run, kept = folders
    (kept / "jit_a-cache").write_bytes(b"x" * 100)
    monkeypatch.setattr(kept_programs, "_MOST", 99)
    kept_programs.take()
    assert not list(kept.iterdir())
    assert not list(run.iterdir())
