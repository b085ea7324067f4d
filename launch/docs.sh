#!/usr/bin/env bash
# The API pages, made of the docstrings, with a search over all: launch/docs.sh [FOLDER]  (api)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh docs
export JAX_PLATFORMS=cpu
# pdoc warns where an annotation stays text: of named tuples, and of fields that a task inherits.
.venv/bin/python -W "ignore:Error parsing type annotation" -m pdoc --docformat=google --output-directory="${1:-api}" mmqa_jax
echo "${1:-api}/index.html"
