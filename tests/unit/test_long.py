"""What `tests.long` shows of an item's log."""

from __future__ import annotations

import pytest

from tests.long import last_line

TABLE = "store, two threads\n┌────┐\n│ row │\n├────┤\n│ 1.0 │\n└────┘\n"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("..\n== 2 passed in 1.0s ==\n\n", "2 passed in 1.0s"),
        (TABLE, "store, two threads"),
        ('done\n{"rows": 1}\n', "done"),
        ("| case |\n|---|\n| `a` |\n\n1 of 1 cases\n", "1 of 1 cases"),
        ("", ""),
    ],
)
def test_last_line(tmp_path, log, line):
    file = tmp_path / "item.log"
    file.write_text(log, encoding="utf-8")
    assert last_line(file) == line
