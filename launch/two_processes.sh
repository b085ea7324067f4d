#!/usr/bin/env bash
# The pod on one machine: runs a command as several JAX processes that join each other.
#   launch/two_processes.sh [--processes=2] [--slices] [--dry_run] COMMAND...
# Each process gets the variables that hosts get on a pod, and computes on the CPU unless
# JAX_PLATFORMS says otherwise; with --slices each is a slice by name. Lines of output begin with the
# process's number. When one fails the others get TERM, and its exit code is the script's. Under
# `babysit.sh --members` there are as many processes as members.
# Tried without hardware: all of it.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes="${MMQA_MEMBER_COUNT:-2}" dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --processes=*) processes="$(value_of "$1")" ;;
    --slices) export MMQA_PROCESS_IS_SLICE=1 ;;
    --dry_run) dry_run=1 ;;
    --*) die "unknown flag '$1'; see the head of this file." ;;
    *) break ;;
  esac
  shift
done
[ $# -gt 0 ] || die "no command; give the one to run, such as 'mmqa train ...'."
[[ "$processes" =~ ^[1-9][0-9]*$ ]] || die "--processes=$processes: give a positive number."

if [ "$dry_run" = 1 ]; then
  port=PORT
else
  port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
fi
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
jobs=()
for ((process = 0; process < processes; process++)); do
  member=(env "JAX_COORDINATOR_ADDRESS=127.0.0.1:$port" MMQA_COORDINATOR_BIND=127.0.0.1
    "JAX_NUM_PROCESSES=$processes" "JAX_PROCESS_ID=$process" "$@")
  if [ "$dry_run" = 1 ]; then
    run "${member[@]}"
  else
    "${member[@]}" > >(sed -u "s/^/[$process] /") 2>&1 &
    jobs+=($!)
  fi
done
[ "$dry_run" = 0 ] || exit 0

left=("${jobs[@]}")
pass_on() { kill -s "$1" "${left[@]}" 2>/dev/null || true; }
trap 'pass_on TERM' TERM INT
code=0 deadline=""
while [ ${#left[@]} -gt 0 ]; do
  for index in "${!left[@]}"; do
    if kill -0 "${left[index]}" 2>/dev/null; then
      continue
    fi
    status=0
    wait "${left[index]}" || status=$?
    unset "left[index]"
    if [ "$status" != 0 ] && [ "$code" = 0 ]; then
      code="$status"
      pass_on TERM
      deadline=$((SECONDS + 30))
    fi
  done
  # One that waits for the failed process may not hear TERM.
  [ -z "$deadline" ] || [ "$SECONDS" -lt "$deadline" ] || pass_on KILL
  sleep 0.2
done
wait # for the last lines of output
exit "$code"
