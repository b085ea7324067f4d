#!/usr/bin/env bash
# The one test command: sets up .venv with the test extras, lints, and runs every test that
# needs no accelerator. `launch/test.sh quick` runs the unit tests that compile no model, for the
# edit loop; `launch/test.sh long` what takes an hour: tests/long.py.
# Further arguments go to pytest: launch/test.sh tests/unit -k beam
# `launch/test.sh --durations` writes where the seconds went to durations*.json, and prints tables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Hundreds of processes import the same modules: their bytecode is kept, whatever the image says.
unset PYTHONDONTWRITEBYTECODE
bash launch/setup.sh test
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet .
mesh=()
case "${1:-}" in
  quick)
    shift
    set -- --quick "$@"
    ;;
  long)
    shift
    exec .venv/bin/python -m tests.long "$@"
    ;;
  --durations)
    shift
    mesh=(--seconds=durations_mesh.json)
    set -- --seconds=durations.json "$@"
    ;;
esac
# Twice as many workers as two cores have work for, since many tests wait; a file stays with one worker, so
# that its fixtures are made once. In the order of the folders the longest files come first, so that
# no worker waits for the others at the end.
if [ $# -gt ${#mesh[@]} ]; then
  exec .venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@"
fi
# Tests of meshes have a process of their own (tests/mesh/conftest.py), beside the others; what it
# prints comes after theirs.
told="$(mktemp)"
.venv/bin/python -m pytest "${mesh[@]}" tests/mesh >"$told" 2>&1 &
meshes=$!
trap 'kill "$meshes" 2>/dev/null || true; rm -f "$told"' EXIT
status=0
.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@" || status=1
wait "$meshes" || status=1
cat "$told"
exit "$status"
