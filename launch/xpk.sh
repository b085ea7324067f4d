#!/usr/bin/env bash
# One run on TPU slices of a GKE cluster that xpk manages.
#   launch/xpk.sh --cluster=NAME --zone=ZONE --project=PROJECT --image=IMAGE --name=RUN
#                 [--type=v5litepod-256] [--slices=1] [--max_restarts=20] [--dry_run] COMMAND...
# The image is that of launch/image.sh --accelerator=tpu. Folders that COMMAND names lie on storage
# that the cluster mounts. A slice that is lost restarts all of them; the run continues.
# Tried without hardware: the command that it prints; not tried: xpk, a cluster.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cluster="" zone="" project="" image="" name="" type=v5litepod-256 slices=1 max_restarts=20 dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --cluster=*) cluster="$(value_of "$1")" ;;
    --zone=*) zone="$(value_of "$1")" ;;
    --project=*) project="$(value_of "$1")" ;;
    --image=*) image="$(value_of "$1")" ;;
    --name=*) name="$(value_of "$1")" ;;
    --type=*) type="$(value_of "$1")" ;;
    --slices=*) slices="$(value_of "$1")" ;;
    --max_restarts=*) max_restarts="$(value_of "$1")" ;;
    --dry_run) dry_run=1 ;;
    --*) die "unknown flag '$1'; see the head of this file." ;;
    *) break ;;
  esac
  shift
done
for given in "$cluster" "$zone" "$project" "$image" "$name"; do
  [ -n "$given" ] || die "--cluster, --zone, --project, --image and --name are needed; give all."
done
[ $# -gt 0 ] || die "no command; end with the one to run, such as 'mmqa train ...'."

mapfile -t folders < <(preflight_flags "$@")
checked="$(quoted bash launch/preflight.sh --slices="$slices" "${folders[@]}") && exec $(quoted "$@")"
run xpk workload create --cluster="$cluster" --zone="$zone" --project="$project" \
  --workload="$name" --tpu-type="$type" --num-slices="$slices" --docker-image="$image" \
  --max-restarts="$max_restarts" --command="$checked"
