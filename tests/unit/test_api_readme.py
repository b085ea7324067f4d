"""The code of mmqa_jax/api/README.md runs as it stands."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "mmqa_jax/api/README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
PRINTED = [
    r"\(3, 384\) 1\.0\n\{'em': 1\.0, 'f1': 1\.0\}",
    r"The pump is on the left\. pump",
    r"\(1, 384\)",
    r"\(1, 7, 49152\) .*Lima.*\nState \(1, 384\)",
]


@pytest.mark.parametrize(("block", "printed"), [*zip(BLOCKS, PRINTED, strict=True)])
def test_the_code_prints_what_it_should(block, printed, fresh_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, PAGE.name, "exec"), {"__name__": "__main__"})
    assert re.fullmatch(printed, out.getvalue().strip())
