"""Workers of pytest-xdist: forks of one process that has imported what most test files do.

Imports of PyTorch, transformers and JAX are most of what collecting the tests takes a worker.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from tests.forks import ADDRESS, ForkServer, OwnForkServer, own_server

# Of other projects alone: coverage counts lines of ours that run after a worker has started.
_IMPORTED = (
    "boto3",
    "datasets",
    "flax.nnx",
    "grain",
    "jax.experimental.compilation_cache.compilation_cache",
    "optax",
    "orbax.checkpoint",
    "scipy.stats",
    "sklearn.metrics",
    "spacy",
    "tensorflow_datasets",
    "torch",
    "transformers.modeling_utils",
)


def share(specs: Sequence, forks: bool) -> None:
    """Has execnet's gateways of these specifications started as forks.

    Args:
      forks: whether their tests start forks of their own, of one server too.
    """
    python = OwnForkServer(_IMPORTED, os.environ)
    for spec in specs:
        spec.python = shlex.join([sys.executable, __file__, python.address])
    if forks:
        os.environ[ADDRESS] = own_server().address


if __name__ == "__main__":  # python workers.py ADDRESS -u -c CODE, in place of python -u -c CODE
    sys.exit(ForkServer(sys.argv[1]).take_over(sys.argv[3:]))
