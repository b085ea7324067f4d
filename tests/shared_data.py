"""Real data that lies beside the checkout, for the tests that read it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mmqa_jax.data.formats.official import BenchmarkFiles

SHARED = Path(os.environ.get("MMQA_SHARED_DATA", Path(__file__).parents[1] / "../shared/data"))
GOLDEN = SHARED / "webqa_golden"
# The official validation outputs of VLP X101-FPN.
IMAGE_TSV = GOLDEN / "img_queries_VLP_x101fpn_combinedTraining_val_beam5_img_step11_cleaned.tsv"


def require(*paths: Path) -> None:
    """Skips the running test where a file or folder is absent; with CI set, it fails.

    What is skipped unseen proves nothing: a machine that decides over changes must have the data.
    """
    missing = [path for path in paths if not path.exists()]
    if not missing:
        return
    reason = f"needs {missing[0]} (MMQA_SHARED_DATA names the folder)"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, which must be there where CI is set", pytrace=False)
    pytest.skip(reason)


@functools.cache
def shared_benchmark(read: Callable[[Path], BenchmarkFiles], name: str) -> BenchmarkFiles:
    """A dataset by its reader; a worker reads its files, up to a second each, once for all tests."""
    require(SHARED / name)
    return read(SHARED / name)
