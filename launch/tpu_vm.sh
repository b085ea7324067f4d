#!/usr/bin/env bash
# A TPU slice as a queued resource: asks for it, sets up all its workers, runs on all of them.
#   launch/tpu_vm.sh STEP --name=NAME --zone=ZONE [--project=PROJECT] [--type=v5litepod-16]
#                    [--version=v2-alpha-tpuv5-lite] [--spot] [--dry_run] [COMMAND...]
# Steps, in order:
#   create    queues the request
#   wait      until it is active
#   setup     copies this checkout (what git tracks) to all workers and runs launch/setup.sh
#   preflight checks all workers together, with the folders that COMMAND names
#   run       starts COMMAND under babysit.sh on all workers; it goes on when this shell ends
#   logs      the last lines of worker 0
#   stop      TERM to the run on all workers: it saves and ends
#   delete    gives the slice back
# Folders that COMMAND names must be shared by the workers (a mounted bucket or Filestore). After a
# preemption: delete, create, wait, setup, run again with the same COMMAND; it continues.
# Tried without hardware: the commands that it prints; not tried: gcloud, TPU VMs.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=common.sh
. "$here/launch/common.sh"

step="${1:-}"
[ $# -eq 0 ] || shift
name="" zone="" project="" type=v5litepod-16 version=v2-alpha-tpuv5-lite spot=0 dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --name=*) name="$(value_of "$1")" ;;
    --zone=*) zone="$(value_of "$1")" ;;
    --project=*) project="$(value_of "$1")" ;;
    --type=*) type="$(value_of "$1")" ;;
    --version=*) version="$(value_of "$1")" ;;
    --spot) spot=1 ;;
    --dry_run) dry_run=1 ;;
    --*) die "unknown flag '$1'; see the head of this file." ;;
    *) break ;;
  esac
  shift
done
[ -n "$name" ] && [ -n "$zone" ] || die "--name and --zone are needed; give both."
where=(--zone="$zone")
[ -z "$project" ] || where+=(--project="$project")

on_all() {
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command="$1"
}

case "$step" in
  create)
    flags=(--node-id="$name" --accelerator-type="$type" --runtime-version="$version")
    [ "$spot" = 0 ] || flags+=(--spot)
    run gcloud compute tpus queued-resources create "$name" "${where[@]}" "${flags[@]}"
    ;;
  wait)
    ask=(gcloud compute tpus queued-resources describe "$name" "${where[@]}"
      --format='value(state.state)')
    if [ "$dry_run" = 1 ]; then
      run "${ask[@]}"
      exit 0
    fi
    while state="$("${ask[@]}")" && [ "$state" != ACTIVE ]; do
      case "$state" in
        FAILED | SUSPENDED) die "the request is $state; delete it and create it again." ;;
      esac
      echo "$(date -u +%H:%M:%S) $name is $state"
      sleep 60
    done
    [ "$state" = ACTIVE ] || die "gcloud does not know the request $name; create it first."
    ;;
  setup)
    archive="${TMPDIR:-/tmp}/mmqa_jax.tar.gz"
    run git -C "$here" archive --format=tar.gz --output="$archive" HEAD
    run gcloud compute tpus tpu-vm scp "$archive" "$name:mmqa_jax.tar.gz" "${where[@]}" --worker=all
    on_all "mkdir -p mmqa_jax && tar -xzf mmqa_jax.tar.gz -C mmqa_jax && MMQA_ACCELERATOR=tpu bash mmqa_jax/launch/setup.sh"
    ;;
  preflight)
    mapfile -t folders < <(preflight_flags "$@")
    on_all "cd mmqa_jax && $(quoted bash launch/preflight.sh "${folders[@]}")"
    ;;
  run)
    [ $# -gt 0 ] || die "no command; end with the one to run, such as 'mmqa train ...'."
    on_all "cd mmqa_jax && export PATH=\$PWD/.venv/bin:\$PATH && (setsid nohup $(quoted bash launch/babysit.sh "$@") > run.log 2>&1 < /dev/null & echo \$! > run.pid)"
    ;;
  logs)
    run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 --command="tail -n 50 mmqa_jax/run.log"
    ;;
  stop)
    on_all "kill -s TERM \$(cat mmqa_jax/run.pid)"
    ;;
  delete)
    run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
    ;;
  *) die "'$step': give create, wait, setup, preflight, run, logs, stop or delete." ;;
esac
