"""Compiles the programs that changed and keeps their facts: python -m tests.hlo.refresh

Runs the tests that read them; then look at what changed (`git diff tests/hlo/facts`) and commit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hlo.kept import REFRESH

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Exit code of the tests."""
    files = sorted(ROOT.glob("tests/sharding/test_*_program*.py"))
    environment = {**os.environ, REFRESH: "1"}
    return subprocess.call([sys.executable, "-m", "pytest", *files], cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
