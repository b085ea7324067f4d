"""What a decoder's layers keep and compute in training on TPUs, as their programs are traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mmqa_jax.core.flops import inner_jaxprs, jaxpr_flops
from mmqa_jax.models.llama import network as llama
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.tasks.language_model import LanguageModelObjective
from mmqa_jax.training.state import split_model

LENGTH, TARGETS, HIDDEN, MLP, RANK, HEADS, LAYERS = 1024, 8, 256, 384, 4, 2, 3


def traced(devices):
    """The gradients of a LoRA of three layers on a TPU, which need not be there; `fsdp` splits."""
    config = LlamaConfig(
        vocab_size=64, hidden=HIDDEN, layers=LAYERS, heads=HEADS, kv_heads=HEADS, mlp=MLP,
        dtype="bfloat16",
    )  # fmt: skip
    objective = LanguageModelObjective(config, LoraConfig(rank=RANK))
    model = split_model(objective, 0)
    wide, few = (jax.ShapeDtypeStruct((devices, n), jnp.int32) for n in (LENGTH, TARGETS))
    batch = dict.fromkeys(("input_ids", "segments", "positions"), wide)
    batch |= dict.fromkeys(("target_positions", "target_ids", "target_segments"), few)

    def loss(params, frozen, batch):
        return objective.loss(model.merge(params, frozen), batch, jax.random.key(0))[0]

    device = AbstractDevice("any", None, "tpu")
    mesh = AbstractMesh((1, devices, 1), ("data", "fsdp", "tensor"), abstract_device=device)
    with use_abstract_mesh(mesh):
        return jax.make_jaxpr(jax.grad(loss))(model.params, model.frozen, batch).jaxpr


def scans(jaxpr):
    """Forward and backward."""
    return [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]


def test_a_rotation_by_a_product_is_the_rotation(monkeypatch):
    """To the bit, and its gradient too: the other half of a head comes by a permutation."""
    monkeypatch.setattr(llama, "platform", lambda: "tpu")
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 8, 3, 64), jnp.bfloat16)
    angles = jax.random.normal(keys[1], (2, 8, 1, 32))
    weights = jax.random.normal(keys[2], x.shape)

    def run(rotate):
        def total(x):
            rotated = rotate(x, jnp.cos(angles), jnp.sin(angles))
            return (rotated.astype(jnp.float32) * weights).sum(), rotated

        return jax.jit(jax.grad(total, has_aux=True))(x)

    for ours, plain in zip(run(llama.rotate_rows), run(llama.rotate), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(plain, np.float32))


def test_lora_keeps_what_a_layer_computes_once():
    """Each projection but the last as a sum; of attention its output and the sums of its softmax.

    The product of a matrix and that of its additions would else be kept apart, and attention run
    again.
    """
    jaxpr = traced(1)
    forward, _ = scans(jaxpr)
    stacked = [v.aval for v in forward.outvars[forward.params["num_carry"] :]]
    kept = sum(x.size * x.dtype.itemsize for x in stacked) // LAYERS
    # x, q, k, v, attended and out; gate and up; A x of each projection; the sums in float32.
    of_token = 2 * (6 * HIDDEN + 2 * MLP + 7 * RANK) + 4 * HEADS
    assert kept == LENGTH * of_token
    # Attention's two products forward and five backward: none of them is made again.
    assert jaxpr_flops(jaxpr, kernels_only=True) == 7 * LAYERS * 2 * LENGTH**2 * HIDDEN


@pytest.mark.parametrize(("devices", "gathered"), [(1, 0), (2, 7)])
def test_lora_gathers_frozen_matrices_where_they_are_split(devices, gathered):
    """All of a layer's, before they are multiplied by; XLA else multiplies by one part at a time."""
    for scan in scans(traced(devices)):
        assert constrained_matrices(scan.params["jaxpr"].jaxpr) == gathered


def constrained_matrices(jaxpr):
    return sum(
        (one.primitive.name == "sharding_constraint" and one.outvars[0].aval.ndim == 2)
        + sum(map(constrained_matrices, inner_jaxprs(one.params)))
        for one in jaxpr.eqns
    )
