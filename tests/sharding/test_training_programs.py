"""What the training steps' programs do on TPUs, as their own compiler says; none is needed.

training_programs.py compiles them in a process of its own, where JAX's platform is the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import program_facts

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the TPU's compiler is made for Linux alone"
    ),
]

NAMES = (
    *("vlp_select", "vlp_answer", "contrastive", "language_model", "replicated_model"),
    "long_rows",
)


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """Program -> its facts (see training_programs.facts)."""
    (found,) = program_facts("training_programs.py", *NAMES)
    return found


def bytes_of(found: dict[str, Any], kind: str) -> float:
    return sum(one["bytes"] for one in found["collectives"] if one["kind"] == kind)


@pytest.mark.parametrize("name", NAMES)
def test_no_product_is_computed_twice(programs, name):
    """But for attention scores, a few percent (see layers.scan_layers)."""
    found = programs[name]
    assert 0.95 <= found["flops"] / found["model_flops"] <= 1.05


@pytest.mark.parametrize("name", NAMES)
def test_products_are_in_bfloat16_and_parameters_in_float32(programs, name):
    found = programs[name]
    assert found["parameter_types"] == ["float32"]
    # In float32: the gradient of attention scores; of the contrastive loss, its logits.
    most = {"contrastive": 1.0}.get(name, 0.08)
    assert found["f32_flops"] <= most * found["flops"]


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_comes_as_the_host_splits_it(programs, name):
    assert programs[name]["batch_shardings"] == ["P(('data', 'fsdp'),)"]


@pytest.mark.parametrize("name", ["vlp_answer", "contrastive", "language_model", "long_rows"])
def test_parameters_and_optimizer_state_are_split(programs, name):
    """Over the axes fsdp and sequence, but for small ones that they do not divide, and regions'
    first linear."""
    found = programs[name]
    parts = found["mesh"]["fsdp"] * found["mesh"].get("sequence", 1)
    assert found["shard"] <= 1.06 * found["parameters"] / parts
    assert found["optimizer_shard"] <= 2 * 1.06 * found["parameters"] / parts  # two moments


@pytest.mark.parametrize("name", ["vlp_select", "vlp_answer"])
def test_attention_scores_are_not_in_memory(programs, name):
    """Neither forward nor backward, with VLP's mask and with dropout (vlp_select)."""
    assert programs[name]["kernels"] == ["fused_attention", "fused_attention_gradient"]
    assert programs[name]["scores"] == []


def test_data_parallel_gradients_are_reduced_once(programs):
    """One combined reduce a layer, in the loop, and a norm's bias; few of all else.

    Nothing else is sent.
    """
    found = programs["vlp_select"]
    assert {(one["kind"], one["axis"]) for one in found["collectives"]} == {("all-reduce", "data")}
    assert bytes_of(found, "all-reduce") <= 4 * found["parameters"] + 1024
    in_loop = 2 * (found["layers"] - 1)
    assert sum(one["count"] for one in found["collectives"]) <= in_loop + 2


def test_gradients_are_reduced_beside_products(programs):
    """On SparseCores (training.state): those of a layer while the layer before it is done."""
    found = programs["replicated_model"]
    assert max(found["products_beside_reductions"]) >= 1
    assert bytes_of(found, "all-reduce") <= 4 * found["parameters"] + 1024


def test_no_device_holds_the_whole_block_of_logits(programs):
    """B = 32,768 questions on n = 256 chips: rows [B / n, S] of the question's own chip alone."""
    found = programs["contrastive"]
    batch, sources, golds = 32_768, 3 * 32_768, 2
    assert found["largest"] <= batch // 256 * sources * golds
    assert found["largest"] < batch * batch


def test_split_parameters_are_gathered_for_each_pass_and_gradients_reduced_once(programs):
    """Fully sharded LLaMA: weights travel in bfloat16, activations not at all but for the ends."""
    found = programs["language_model"]
    weights = 2 * found["parameters"]  # bytes in bfloat16
    assert bytes_of(found, "all-gather") <= 2 * 1.02 * weights
    # XLA reduces the gradient of kernels that are split along their last axis in full.
    assert bytes_of(found, "reduce-scatter") + bytes_of(found, "all-reduce") <= 1.1 * weights
    assert bytes_of(found, "all-to-all") <= 0.05 * weights  # embedded tokens
    assert {one["axis"] for one in found["collectives"]} == {"fsdp"}


def test_of_long_rows_keys_and_values_are_gathered_and_no_other_activation(programs):
    """Forward, and again backward; their gradients are scattered. Windows add nothing."""
    found = programs["long_rows"]
    sent = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for one in found["collectives"]:
        if one["axis"] == "sequence" and one["kind"] in sent:
            sent[one["kind"]] += one["bytes"]
    keys = 2 * found["keys"] / found["mesh"]["fsdp"]  # bytes in bfloat16, of a group's rows
    of_targets = 2 * 2 * 512 * 1024  # their last states, of two rows
    assert sent["all-gather"] == 2 * found["layers"] * keys + of_targets
    assert sent["reduce-scatter"] == found["layers"] * keys + of_targets
    # Weights in bfloat16: gathered twice, their gradients added up once, most of it step by step
    # beside the products.
    weights = 2 * found["parameters"]
    both = [one for one in found["collectives"] if one["axis"] == "fsdp+sequence"]
    assert sum(one["bytes"] for one in both) <= 3.3 * weights
    assert found["kernels"] == [
        "splash_mha_dkv_segmented_no_residuals",
        "splash_mha_dq_segmented_no_residuals",
        "splash_mha_fwd_segmented_residuals",
    ]
    # What all layers keep of a device's own 2 x 1,024 tokens, the MLP's [.., 2,816].
    assert found["largest"] <= found["layers"] * 2 * 1024 * 2816


def test_gathering_runs_beside_products(programs):
    gathered = programs["language_model"]["gathered"]
    assert gathered["beside"] >= 0.7 * (gathered["beside"] + gathered["alone"])


def test_no_activation_is_of_the_whole_batch(programs):
    """[rows, length, mlp] of all devices would be larger than what any of them holds."""
    assert programs["language_model"]["largest"] < 16 * 256 * 2816


@pytest.mark.parametrize("name", NAMES)
def test_layers_stay_a_loop(programs, name):
    """The TPU's form, though a CPU traces and compiles it: forward and backward."""
    turns = {"vlp_select": {3}, "contrastive": {2}, "replicated_model": {1, 2}}.get(name, {4})
    assert set(programs[name]["loops"]) <= turns


def test_gpus_compile_a_layer_with_one_query():
    """The last layer of VLP's selection reads [CLS] alone; see training.state."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("the GPU's compiler comes with the extra `cuda12`")
    config = Path(__file__).parents[2] / "configs/webqa/vlp_select.py:pod"
    flags = ("--config.train.accumulate=2", "--topology=h100:8", "--only=train", "--json")
    planned = subprocess.run(
        [sys.executable, "-m", "mmqa_jax.cli", "plan", f"--config={config}", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert planned.returncode == 0, planned.stderr[-3000:]
    (program,) = json.loads(planned.stdout.splitlines()[-1])["programs"]
    assert program["fits"]
