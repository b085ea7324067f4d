"""Importing the package computes nothing: hosts can still be joined afterwards."""

import os
import subprocess
import sys

import pytest

from tests.forks import server

pytestmark = pytest.mark.slow

IMPORT_ALL = """
import importlib, pkgutil
import mmqa_jax
from jax._src import xla_bridge

for module in pkgutil.walk_packages(mmqa_jax.__path__, "mmqa_jax."):
    importlib.import_module(module.name)
    assert not xla_bridge.backends_are_initialized(), f"importing {module.name} runs JAX"
"""


def test_no_import_initializes_a_jax_backend():
    """jax.distributed.initialize() must be called before any JAX computation.

    In a fork of what has imported most modules already, and must not have computed either.
    """
    fork = server().start(["-c", IMPORT_ALL], os.environ)
    said, _ = fork.communicate()
    assert fork.returncode == 0, said


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "core.config core.progress core.workdir core.hosts.distributed core.metrics runs.jobs "
            "runs.status",
            ("jax", "orbax", "flax", "torch", "tensorboardX"),
        ),
        # Kernels, and what reads torch's files, are imported where they are used.
        ("decoding.engine decoding.t5_engine", ("torch", "jax.experimental.pallas.tpu")),
    ],
)
def test_light_modules_import_nothing_heavy(modules, heavy):
    names = ", ".join(f"mmqa_jax.{module}" for module in modules.split())
    code = f"import sys, {names}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
