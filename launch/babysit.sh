#!/usr/bin/env bash
# Runs a command, and runs it again until it ends with 0 (done) or 2 (the user's input is wrong).
#   launch/babysit.sh [--max_restarts=20] [--backoff=10] [--state=FILE] [--dry_run]
#                     [--members=SHELL [--counts=8,4,2,1] [--every=30]] COMMAND...
# Between attempts it waits --backoff seconds (or MMQA_BACKOFF), twice as long after every failure,
# at most 10 minutes. An attempt of at least 10 minutes was a start that worked: waiting and counting
# begin anew after it. Two attempts in a row that fail at the same step with the same sentence end it
# with exit code 2: a third would too. --state keeps the last failure for the babysit.sh of the next
# pod, where something else restarts. TERM and Ctrl-C reach the command as TERM, and nothing is
# started again. Else the exit code is the last attempt's. --members is a shell command that prints
# the slices or hosts that are there, one a line: each attempt has as many of them as --counts allows
# (all without it), in MMQA_MEMBERS (with commas) and MMQA_MEMBER_COUNT. Every --every seconds (or
# MMQA_MEMBERS_EVERY) it is asked again; when more can take part, the attempt gets TERM, saves, and starts again with them. Every verb of mmqa continues where it
# stopped, so the command is always the same. Tried without hardware: all of it.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

max_restarts=20 backoff="${MMQA_BACKOFF:-10}" state="" dry_run=0 members="" counts="" every="${MMQA_MEMBERS_EVERY:-30}"
longest=600 # seconds: the longest wait, and how long an attempt lasts that counts as a good start
while [ $# -gt 0 ]; do
  case "$1" in
    --max_restarts=*) max_restarts="$(value_of "$1")" ;;
    --backoff=*) backoff="$(value_of "$1")" ;;
    --state=*) state="$(value_of "$1")" ;;
    --members=*) members="$(value_of "$1")" ;;
    --counts=*) counts="$(value_of "$1")" ;;
    --every=*) every="$(value_of "$1")" ;;
    --dry_run) dry_run=1 ;;
    --*) die "unknown flag '$1'; see the head of this file." ;;
    *) break ;;
  esac
  shift
done
[ $# -gt 0 ] || die "no command; give the one to run, such as 'mmqa train ...'."
for number in "$max_restarts" "$backoff" "$every" ${counts//,/ }; do
  [[ "$number" =~ ^[0-9]+$ ]] || die "'$number' is not a whole number; give one."
done
if [ "$dry_run" = 1 ]; then
  echo "until it exits with 0 or 2 or fails twice alike, at most $max_restarts restarts, first after $backoff s:"
  run "$@"
  exit 0
fi

stopped=0 job=""
stop() {
  stopped=1 signalled=1
  kill -s TERM "${job:-}" 2>/dev/null || true
}
trap stop TERM INT

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
said="$folder/said"
[ -n "$state" ] || state="$folder/failure"

# What the attempt failed with: the lines of mmqa, or else the last one, without what differs from
# one start to the next: times, addresses, and what a log's line begins with (date, time, thread).
sentence() {
  local lines
  lines="$(grep -aoE 'mmqa: .*' "$said" | grep -avE 'has waited [0-9]+ s .*: check that' | sort -u)" ||
    lines="$(grep -av '^[[:space:]]*$' "$said" | tail -n 1)" || true
  sed -E 's/^(.*: )?[IWEF][0-9]{4} [0-9:.]+ +[0-9]+ //; s/[0-9.]+ s([^[:alnum:]]|$)/N s\1/g
    s/0x[0-9a-f]+/0xN/g' <<<"$lines"
}

# How far the command's work is: the step of a training run, the items of a job that are done.
progress_of() {
  local place word mmqa=mmqa
  place="$(preflight_flags "$@" | sed -n 's/^--workdir=//p' | tail -n 1)"
  for word in "$@"; do # such as .venv/bin/mmqa
    case "$word" in */mmqa) mmqa="$word" ;; esac
  done
  [ -n "$place" ] && command -v "$mmqa" >/dev/null || return 0
  "$mmqa" status "$place" --json 2>/dev/null | tail -n 1 |
    grep -oE '"(step|saved|items_done)": ?(\[[^]]*\]|[0-9]+)' | tr '\n' ' ' || true
}

# The members that an attempt can have, with commas; nothing if they are too few.
there() {
  local names count
  mapfile -t names < <(bash -c "$members" | sort -u)
  for count in $(tr , '\n' <<<"${counts:-${#names[@]}}" | sort -rn); do
    if [ "$count" -gt 0 ] && [ ${#names[@]} -ge "$count" ]; then
      (IFS=, && echo "${names[*]:0:count}")
      return
    fi
  done
}

count_of() { tr , '\n' <<<"$1" | grep -c . || true; }

# Ends the attempt when more members can take part.
look_for_more() {
  while sleep "$every" >/dev/null 2>&1; do
    local now
    now="$(there)"
    if [ "$(count_of "$now")" -gt "$MMQA_MEMBER_COUNT" ]; then
      echo "babysit: $now can take part: the run saves and starts again with them" >&2
      touch "$folder/more"
      kill -s TERM "$job" 2>/dev/null || true
      return
    fi
  done
}

restarts=0 pause="$backoff"
while :; do
  if [ -n "$members" ]; then
    MMQA_MEMBERS="$(there)"
    MMQA_MEMBER_COUNT="$(count_of "$MMQA_MEMBERS")"
    export MMQA_MEMBERS MMQA_MEMBER_COUNT
    if [ "$MMQA_MEMBER_COUNT" = 0 ]; then
      echo "babysit: too few members are there; they are awaited" >&2
      sleep "$every" &
      job=$!
      wait_for "$job"
      [ "$stopped" = 0 ] || exit 143
      continue
    fi
    echo "babysit: starting with $MMQA_MEMBERS" >&2
  fi
  began=$SECONDS
  : >"$said"
  # A copy of what it says; the copying goes on while the command ends by a signal.
  "$@" 2> >(trap '' INT TERM && exec tee "$said" >&2) &
  job=$!
  # A signal may have come before the command's number was known.
  [ "$stopped" = 0 ] || kill -s TERM "$job" 2>/dev/null || true
  if [ -n "$members" ]; then
    look_for_more &
    looking=$!
  fi
  wait_for "$job"
  [ -z "$members" ] || kill "$looking" 2>/dev/null || true
  lasted=$((SECONDS - began))
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$stopped" = 1 ]; then
    rm -f "$state"
    exit "$code"
  fi
  if [ -e "$folder/more" ]; then
    rm "$folder/more"
    continue
  fi
  sleep 0.2 # for the last line that it said
  why="$(sentence)" at="$(progress_of "$@")"
  if [ -n "$why" ] && [ "$code $at $why" = "$(cat "$state" 2>/dev/null)" ]; then
    rm -f "$state"
    echo "babysit: two starts in a row ended with $code${at:+ at ${at% }} and the same sentence:" \
      "mend its cause, then start the same command again." >&2
    tail -n 1 <<<"$why" >&2
    exit 2
  fi
  mkdir -p "$(dirname "$state")" && printf '%s\n' "$code $at $why" >"$state"
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
