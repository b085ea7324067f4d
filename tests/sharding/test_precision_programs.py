"""In which types training steps multiply, and what they hold on the device, as the compilers say."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from processes import finish, program_facts, start

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(sys.platform != "linux", reason="the compilers are made for Linux alone"),
]
# training_programs.language_model: rows x tokens, and matrices of four layers
TOKENS, MATRICES = 16 * 256, 4 * 1024 * (4 * 1024 + 3 * 2816)
FORWARD = 2 * TOKENS * MATRICES


def of_8_bits(found):
    return {name: n for name, n in found["products"].items() if "s8" in name or "f8" in name}


def test_tpus_multiply_int8_by_int8():
    """All linears, forward and for both gradients, and no product has one factor rounded."""
    (found,) = program_facts("precision_programs.py", "int8")
    assert set(of_8_bits(found)) == {"convolution s8 s8"}
    assert found["flops"]["s8"] == 3 * FORWARD / 8  # devices


def test_gpus_multiply_fp8_by_fp8():
    """By cuBLAS, which takes E4M3 by E4M3 and E5M2 by E4M3; q, k and v are one product, as are
    gate and up."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("the GPU's compiler comes with the extra `cuda12`")
    script = str(Path(__file__).with_name("precision_programs.py"))
    # No fork, which would look for JAX's plugins where their server does.
    paths = os.pathsep.join(filter(None, sys.path))
    (printed,) = finish([start(sys.executable, script, "fp8", fresh=True, PYTHONPATH=paths)])
    found = json.loads(printed.splitlines()[-1])
    assert {name.split(" ", 1)[0] for name in of_8_bits(found)} == {"__cublas$lt$matmul$f8"}
    assert {tuple(name.split()[1:]) for name in of_8_bits(found)} == {
        ("f8e4m3fn", "f8e4m3fn"),
        ("f8e5m2", "f8e4m3fn"),
    }
    assert found["flops"]["f8e4m3fn"] == FORWARD
    assert found["flops"]["f8e5m2"] == 2 * FORWARD


def test_parameters_of_the_host_are_on_the_device_a_layer_at_a_time():
    """While activations are there, their place is free."""
    optimizer, parameters = program_facts("precision_programs.py", "optimizer", "parameters")
    stacks = parameters["stacks"]
    assert stacks == optimizer["stacks"] == 4 * (4 * MATRICES + 16 * 2 * 1024) / 8
    assert optimizer["arguments"] - parameters["arguments"] == stacks
    assert optimizer["results"] - parameters["results"] == stacks
    total = [
        sum(one[name] for name in ("arguments", "results", "temporaries"))
        for one in (optimizer, parameters)
    ]
    assert total[0] - total[1] > 2 * stacks
    assert parameters["flops"] == optimizer["flops"]
