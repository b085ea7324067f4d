"""milvus_cases.py in a process of its own: Milvus Lite leaves a server's threads behind."""

import os
from pathlib import Path

import pytest

from tests.forks import server
from tests.kept_programs import FOLDER

pytestmark = pytest.mark.slow

RUN = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def test_milvus():
    cases = Path(__file__).with_name("milvus_cases.py")
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(FOLDER),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    # Nothing of the conftests is needed, whose programs would be laid out again.
    flags = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    fork = server().start(["-c", RUN, *flags, str(cases)], os.environ | kept)
    printed, _ = fork.communicate(300)
    assert fork.returncode == 0, printed
