"""Real data that is missing is a skipped test here and a failed one in CI."""

from __future__ import annotations

import pytest
from shared_data import require


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_missing_data_fails_in_ci_and_skips_elsewhere(ci, outcome, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", ci)
    require(tmp_path)
    with pytest.raises(outcome, match=r"needs .*golden\.tsv \(MMQA_SHARED_DATA names the folder\)"):
        require(tmp_path, tmp_path / "golden.tsv")
