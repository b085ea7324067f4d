#!/usr/bin/env bash
# Runs a command, and runs it again until it ends with 0 (done) or 2 (the user's input is wrong).
#   launch/babysit.sh [--max_restarts=20] [--backoff=10] [--dry_run] COMMAND...
# Between attempts it waits --backoff seconds (or MMQA_BACKOFF), twice as long after every failure,
# at most 10 minutes. An attempt of at least 10 minutes was a start that worked: waiting and counting
# begin anew after it. TERM and Ctrl-C reach the command as TERM, and nothing is started again. The
# exit code is the last attempt's. Every verb of mmqa continues where it stopped, so the command is
# always the same. Tried without hardware: all of it.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

max_restarts=20 backoff="${MMQA_BACKOFF:-10}" dry_run=0
longest=600 # seconds: the longest wait, and how long an attempt lasts that counts as a good start
while [ $# -gt 0 ]; do
  case "$1" in
    --max_restarts=*) max_restarts="$(value_of "$1")" ;;
    --backoff=*) backoff="$(value_of "$1")" ;;
    --dry_run) dry_run=1 ;;
    --*) die "unknown flag '$1'; see the head of this file." ;;
    *) break ;;
  esac
  shift
done
[ $# -gt 0 ] || die "no command; give the one to run, such as 'mmqa train ...'."
for number in "$max_restarts" "$backoff"; do
  [[ "$number" =~ ^[0-9]+$ ]] || die "'$number' is not a whole number; give one."
done
if [ "$dry_run" = 1 ]; then
  echo "until it exits with 0 or 2, at most $max_restarts restarts, first after $backoff s:"
  run "$@"
  exit 0
fi

stopped=0 job=""
stop() {
  stopped=1 signalled=1
  kill -s TERM "$job" 2>/dev/null || true
}
trap stop TERM INT

restarts=0 pause="$backoff"
while :; do
  began=$SECONDS
  "$@" &
  job=$!
  wait_for "$job"
  lasted=$((SECONDS - began))
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$stopped" = 1 ]; then
    exit "$code"
  fi
  if [ "$lasted" -ge "$longest" ]; then
    restarts=0 pause="$backoff"
  fi
  if [ "$restarts" -ge "$max_restarts" ]; then
    echo "babysit: ended with $code after $lasted s; $restarts restarts did not help" >&2
    exit "$code"
  fi
  restarts=$((restarts + 1))
  echo "babysit: ended with $code after $lasted s;" \
    "restart $restarts of $max_restarts in $pause s" >&2
  sleep "$pause" &
  job=$!
  wait_for "$job"
  [ "$stopped" = 0 ] || exit 143
  pause=$((pause * 2 > longest ? longest : pause * 2))
done
