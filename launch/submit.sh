#!/usr/bin/env bash
# Fills in one of launch/'s YAML files and submits it.
#   launch/submit.sh FILE.yaml [NAME=VALUE ...] [--dry_run] -- COMMAND...
#   launch/submit.sh gke/jobset-tpu.yaml IMAGE=... TOPOLOGY=16x16 HOSTS=64 -- mmqa train ...
# ${NAME} in the file becomes VALUE; a line `# default NAME=VALUE` at its head makes it optional.
# ${COMMAND} becomes the command, quoted for a shell. Files of Kubernetes go to kubectl,
# skypilot.yaml to sky.
# Tried without hardware: what is submitted, against schemas of ours; not tried: a cluster.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=common.sh
. "$here/common.sh"

[ $# -gt 0 ] || die "no file; give one of $(cd "$here" && echo gke/*.yaml ./*.yaml)."
file="$here/${1#launch/}"
[ -f "$file" ] || die "$1: no such file in launch/; give one of $(cd "$here" && echo gke/*.yaml ./*.yaml)."
shift
declare -A values
while IFS='=' read -r name value; do
  values["${name#\# default }"]="$value"
done < <(grep -E '^# default [A-Z_]+=' "$file" || true)

dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --dry_run) dry_run=1 ;;
    --) break ;;
    [A-Z]*=*)
      grep -qF "\${${1%%=*}}" "$file" || die "$1: $(basename "$file") has no such name; leave it out."
      values["${1%%=*}"]="$(value_of "$1")"
      ;;
    *) die "'$1': NAME=VALUE, --dry_run or '-- COMMAND' was expected." ;;
  esac
  shift
done
[ "${1:-}" = -- ] && [ $# -gt 1 ] || die "no command; end with '-- mmqa VERB ...'."
shift
values[COMMAND]="$(quoted "$@")"
case "${values[COMMAND]}" in *$'\n'*) die "the command has a line break; take it out." ;; esac

text="$(grep -vE '^# default ' "$file")"
missing="$(grep -oE '[$][{][A-Z_]+}' <<<"$text" | sort -u | tr -d '{$}' |
  while read -r name; do [ -n "${values[$name]+given}" ] || printf '%s ' "$name"; done)"
[ -z "$missing" ] || die "$(basename "$file") also needs ${missing% }; give each as NAME=VALUE."
for name in "${!values[@]}"; do
  value="${values[$name]}"
  text="${text//"\${$name}"/"$value"}"
done

case "$file" in
  */skypilot.yaml) tool=(sky jobs launch --yes) ;;
  *) tool=(kubectl apply -f) ;;
esac
if [ "$dry_run" = 1 ]; then
  echo "$text"
  echo "# $(quoted "${tool[@]}") FILE"
  exit 0
fi
filled="$(mktemp --suffix=.yaml)"
trap 'rm -f "$filled"' EXIT
echo "$text" >"$filled"
"${tool[@]}" "$filled"
