#!/usr/bin/env bash
# Builds the container image that the files in gke/, ray_cluster.yaml and xpk.sh start.
#   launch/image.sh --tag=REGISTRY/mmqa:tpu [--accelerator=cpu|cuda12|tpu] [--extras=ray,milvus]
#                   [--push] [--dry_run]
# Tried without hardware: the commands that it prints; not tried: docker (no daemon here).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=common.sh
. "$here/launch/common.sh"

tag="" accelerator=cpu extras="" push=0 dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --tag=*) tag="$(value_of "$1")" ;;
    --accelerator=*) accelerator="$(value_of "$1")" ;;
    --extras=*) extras="$(value_of "$1")" ;;
    --push) push=1 ;;
    --dry_run) dry_run=1 ;;
    *) die "unknown argument '$1'; see the head of this file." ;;
  esac
  shift
done
[ -n "$tag" ] || die "--tag is needed; name the image, such as --tag=REGISTRY/mmqa:tpu."
case "$accelerator" in
  cpu | cuda12 | tpu) ;;
  *) die "--accelerator=$accelerator: give cpu, cuda12 or tpu." ;;
esac
if [ "$dry_run" = 1 ]; then
  here=.
fi
run docker build --file "$here/launch/Dockerfile" --build-arg ACCELERATOR="$accelerator" \
  --build-arg EXTRAS="$extras" --tag "$tag" "$here"
[ "$push" = 0 ] || run docker push "$tag"
