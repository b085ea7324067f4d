"""Importing the package computes nothing: hosts can still be joined afterwards."""

from __future__ import annotations

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


def test_light_modules_do_not_import_jax():
    code = (
        "import sys, mmqa_jax.core.config, mmqa_jax.core.progress, mmqa_jax.core.workdir, "
        "mmqa_jax.core.hosts.distributed, mmqa_jax.core.metrics, mmqa_jax.runs.jobs, "
        "mmqa_jax.runs.status; "
        "print([m for m in ('jax', 'orbax', 'flax', 'torch', 'tensorboardX') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
