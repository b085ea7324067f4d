#!/usr/bin/env bash
# Checks a machine or a pod before a run: one verdict a line, exit code 1 if one is FAIL.
#   launch/preflight.sh [--workdir=DIR] [--data=DIR] [--devices=N] [--slices=N] [--json] [--dry_run]
# Start it on every host, as the run itself is started: srun bash launch/preflight.sh ..., or
# launch/two_processes.sh bash launch/preflight.sh ... on one machine. It checks that versions and
# code are alike on all hosts, the devices and slices, a sum over all of them and its bandwidth, that
# the workdir is writable and shared, speed of disk and data, the clocks, and free device memory.
# Given up after MMQA_PREFLIGHT_SECONDS (900): hosts that never come are the most common failure.
# Tried without hardware: two CPU processes; not tried: bandwidth and memory of TPU and GPU.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=common.sh
. "$here/launch/common.sh"

dry_run=0 flags=()
for flag in "$@"; do
  case "$flag" in
    --dry_run) dry_run=1 ;;
    *) flags+=("$flag") ;;
  esac
done
export PATH="$here/.venv/bin:$PATH"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
run timeout "${MMQA_PREFLIGHT_SECONDS:-900}" python -m launch.preflight "${flags[@]}"
