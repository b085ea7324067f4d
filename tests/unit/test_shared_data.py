"""Real data that is missing is a skipped test here and a failed one in CI."""

from __future__ import annotations

import pytest
from shared_data import require

FAILS, SKIPS = pytest.fail.Exception, pytest.skip.Exception


@pytest.mark.parametrize(("ci", "outcome"), [("true", FAILS), ("", SKIPS)])
def test_missing_data_fails_in_ci_and_skips_elsewhere(ci, outcome, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", ci)
    require(tmp_path)
    # Both are caught: a skip that nobody catches would skip this test.
    with pytest.raises((FAILS, SKIPS), match=r"needs .*golden\.tsv \(MMQA_SHARED_DATA") as ended:
        require(tmp_path, tmp_path / "golden.tsv")
    assert ended.type is outcome
