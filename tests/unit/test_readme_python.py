"""The README's Python runs as it stands, with MiniLM and SmolLM2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)


def test_there_is_some():
    (block,) = BLOCKS
    assert len(block.splitlines()) <= 12


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_answers_with_its_source(block, fresh_cache, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**os.environ, "MMQA_CACHE": str(fresh_cache), "MMQA_PROGRESS": "off"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    first, second, answer = ended.stdout.splitlines()
    assert re.fullmatch(r"1\.00 Nairobi is the capital of Kenya\.", first)
    assert re.fullmatch(r"0\.\d\d Lima is the capital of Peru\.", second)
    assert re.search(r"Lima.* \['\[1\] Lima is the capital of Peru\.'\]$", answer)
