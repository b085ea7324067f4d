#!/usr/bin/env bash
# The one test command: sets up .venv with the test extras, lints, and runs every test that
# needs no accelerator. Further arguments go to pytest: launch/test.sh tests/unit -k beam
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh test
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet .
# Two workers; a file stays with one, so that its fixtures are made once. In the order of the
# folders the longest files come first, so that no worker waits for the other at the end.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
