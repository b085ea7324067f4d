"""What the tests of resumed runs share."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _quiet(cli_cache):
    """No progress lines, and one compile cache for all attempts, as real runs have."""
    cache = str(cli_cache / "xla")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        for name, value in zip(names, (cache, 0), strict=True):
            patch.setenv(name.upper(), str(value))  # of the processes to be killed
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
