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
TESTS = ("training_programs", "engine_programs", "beam_program", "tower_program")


def main() -> int:
    """Exit code of the tests."""
    files = [f"tests/sharding/test_{name}.py" for name in TESTS]
    environment = {**os.environ, REFRESH: "1"}
    return subprocess.call([sys.executable, "-m", "pytest", *files], cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
