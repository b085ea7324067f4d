# shellcheck shell=bash
# Sourced by the launchers: how they refuse input, quote commands, try runs and pass signals on.

# A user's mistake: one sentence, exit code 2.
die() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

# The words of a command as a shell reads them, on one line.
quoted() {
  local word line=""
  for word in "$@"; do
    case "$word" in
      "" | *[!A-Za-z0-9_@%+=:,./-]*) word="'${word//\'/\'\\\'\'}'" ;;
    esac
    line+="${line:+ }$word"
  done
  printf '%s' "$line"
}

# Runs a command; with dry_run=1 prints it instead.
run() {
  if [ "${dry_run:-0}" = 1 ]; then
    quoted "$@"
    echo
  else
    "$@"
  fi
}

# The value of --NAME=VALUE; `die` if it is empty or starts a new line.
value_of() {
  local value="${1#*=}"
  case "$value" in
    "" | *$'\n'*) die "${1%%=*}: a value was expected after '='; give one on one line." ;;
  esac
  printf '%s' "$value"
}

# Flags of preflight.sh for a command: the folders that it writes to and reads from.
preflight_flags() {
  local word flag=""
  for word in "$@"; do
    case "$flag" in # of `--workdir runs/a`
      --workdir | --out | --data) word="$flag=$word" ;;
    esac
    flag="$word"
    case "$word" in
      --workdir=* | --out=*) echo "--workdir=${word#*=}" ;;
      --data=* | --config.data.dir=*) echo "--data=${word#*=}" ;;
    esac
  done
}

# Waits for a background job and leaves its exit code in `code`; a trapped signal does not end
# the waiting. Traps set signalled=1.
wait_for() {
  while :; do
    signalled=0
    code=0
    wait "$1" || code=$?
    [ "$signalled" = 1 ] || return 0
  done
}

# In a Slurm job: runs a command until it ends. On USR1, which Slurm sends ahead of the time
# limit, the command gets TERM, saves, and the job goes back into the queue; TERM is passed on.
run_until_limit() {
  local limit=0
  "$@" &
  local job=$!
  trap 'signalled=1; limit=1; kill -s TERM "$job" 2>/dev/null || true' USR1
  trap 'signalled=1; kill -s TERM "$job" 2>/dev/null || true' TERM
  wait_for "$job"
  if [ "$limit" = 1 ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
    echo "time limit near: the job goes back into the queue and continues from what is saved" >&2
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
