#!/usr/bin/env bash
# What this machine's accelerator does with the code: tests, benches, and the plan's estimates
# beside what was measured, in one JSON.
#   launch/device_check.sh [--out=device_check] [--size=full|small] [--skip_tests] [--dry_run]
# full: LLaMA-2-7B's shape and the demo's training steps (one 80 GB GPU or one TPU host, about an
# hour); small: SmolLM2 (minutes). Each step is a process of its own with its log in --out; one that
# fails is recorded and the next one runs. An interrupted check continues: finished steps are kept.
# Tried: --size=small --skip_tests on a CPU; by hand the kernels' tests and the llm bench on an H200,
# the detector bench on an H100.
# Not tried: the whole check on a GPU or a TPU.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=common.sh
. "$here/launch/common.sh"

dry_run=0
for flag in "$@"; do
  [ "$flag" != --dry_run ] || dry_run=1
done
if [ "$dry_run" = 0 ]; then
  bash "$here/launch/setup.sh" test
fi
export PATH="$here/.venv/bin:$PATH"
cd "$here"
exec python launch/device_check.py "$@"
