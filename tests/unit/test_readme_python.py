"""The README's Python runs as it stands, with MiniLM and SmolLM2."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)


def test_there_is_some():
    (block,) = BLOCKS
    assert len(block.splitlines()) <= 12


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_answers_with_its_source(block, fresh_cache, tmp_path, monkeypatch):
    """Its names are all its own; test_notebook.py runs such code in a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, README.name, "exec"), {"__name__": "__main__"})
    first, second, answer = printed.getvalue().splitlines()
    assert re.fullmatch(r"1\.00 Nairobi is the capital of Kenya\.", first)
    assert re.fullmatch(r"0\.\d\d Lima is the capital of Peru\.", second)
    assert re.search(r"Lima.* \['\[1\] Lima is the capital of Peru\.'\]$", answer)
