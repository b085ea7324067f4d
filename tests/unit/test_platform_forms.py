"""What layers are traced to for another platform than this machine's; nothing is compiled."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import mmqa_jax
from mmqa_jax.core.mesh import MESH_AXES, platform
from mmqa_jax.models.bert.network import Bert, BertConfig

pytestmark = pytest.mark.slow

ROOMS = ("models", "decoding", "training", "inference")
ROWS, LENGTH = 4, 48
CONFIG = BertConfig(
    vocab_size=50, hidden=32, layers=3, heads=4, mlp=96, positions=LENGTH, dtype="bfloat16"
)


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_asks_for_the_machine_that_compiles(room):
    for file in (Path(mmqa_jax.__file__).parent / room).rglob("*.py"):
        assert "default_backend" not in file.read_text(encoding="utf-8"), file


def mesh_of(name: str) -> AbstractMesh:
    """Eight devices of a platform, none of which is here."""
    device = AbstractDevice(f"some {name}", None, name)
    return AbstractMesh(
        (8, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=device
    )


@functools.cache
def gradient_on(name: str) -> Any:
    """The traced gradient of an encoder with dropout."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Bert(CONFIG, rngs=nnx.Rngs())))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, CONFIG.hidden), CONFIG.dtype)
    mask = jax.ShapeDtypeStruct((ROWS, 1, 1, LENGTH), jnp.bool_)

    def loss(params, x, mask):
        hidden = nnx.merge(graphdef, params).encode(x, mask, dropout_key=jax.random.key(0))
        return hidden.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh_of(name)):
        return jax.make_jaxpr(jax.grad(loss))(params, x, mask).jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a traced program's, inner ones as well."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def scans(jaxpr: Any) -> list[Any]:
    return [equation for equation in equations(jaxpr) if equation.primitive.name == "scan"]


def test_the_platform_is_the_meshs():
    assert platform() == jax.devices()[0].platform
    for name in ("tpu", "gpu", "cpu"):
        with jax.sharding.use_abstract_mesh(mesh_of(name)):
            assert platform() == name


@pytest.mark.parametrize(("name", "unroll"), [("tpu", 1), ("gpu", 1), ("cpu", CONFIG.layers)])
def test_layers_are_a_loop_on_accelerators_and_unrolled_on_a_cpu(name, unroll):
    forward, backward = scans(gradient_on(name))
    assert forward.params["unroll"] == backward.params["unroll"] == unroll


@pytest.mark.parametrize(("name", "result"), [("tpu", "bfloat16"), ("cpu", "float32")])
def test_products_with_weights_have_the_platforms_result_type(name, result):
    dots = [e for e in equations(gradient_on(name)) if e.primitive.name == "dot_general"]
    with_weights = [e for e in dots if not e.params["dimension_numbers"][1][0]]
    assert with_weights
    assert {str(e.outvars[0].aval.dtype) for e in with_weights} == {result}


def kept_bytes(jaxpr: Any) -> int:
    """Bytes that the forward loop stacks for the backward loop, of all layers."""
    forward = scans(jaxpr)[0]
    stacked = forward.outvars[forward.params["num_carry"] :]
    return sum(x.aval.size * x.aval.dtype.itemsize for x in stacked)


def test_a_loop_keeps_products_and_sums_of_norms_alone():
    """No scores [heads, L, L], no masks: those are three quarters of what JAX would stack."""
    hidden, mlp = CONFIG.hidden, CONFIG.mlp
    # Input, query, key, value, attended, and what both norms get; up. Four sums of norms in float32.
    a_token = 2 * (7 * hidden + mlp) + 4 * 4
    most = CONFIG.layers * (ROWS * LENGTH * a_token + 64)  # and each layer's keys
    assert 0.9 * most < kept_bytes(gradient_on("tpu")) <= most


def test_every_kind_of_recomputation_has_the_same_gradient():
    """The loop's against the unrolled layers', with dropout."""
    found, params, rng = {}, None, np.random.default_rng(0)
    rows = rng.normal(size=(ROWS, LENGTH, CONFIG.hidden)).astype(np.float32)
    mask = np.arange(LENGTH) < np.array([48, 3, 17, 40])[:, None, None, None]

    def drawn(leaf):
        return rng.normal(scale=0.2, size=leaf.shape).astype(leaf.dtype)

    for remat, unroll in (("none", True), ("none", 1), ("dots", 1), ("full", 1)):
        config = BertConfig(
            vocab_size=50, hidden=32, layers=2, heads=4, mlp=96, positions=LENGTH,
            remat=remat, unroll=unroll,
        )  # fmt: skip
        graphdef, shapes = nnx.split(nnx.eval_shape(lambda c=config: Bert(c, rngs=nnx.Rngs())))
        if params is None:
            params = jax.tree.map(drawn, shapes)

        def loss(params, graphdef=graphdef):
            hidden = nnx.merge(graphdef, params).encode(rows, mask, dropout_key=jax.random.key(2))
            return (hidden * rows).sum()

        with jax.default_matmul_precision("highest"):
            found[remat, unroll] = jax.device_get(jax.jit(jax.grad(loss))(params))
    want = jax.tree.leaves_with_path(found.pop(("none", True)))
    whole = max(float(np.abs(leaf).max()) for _, leaf in want)
    for gradient in found.values():
        for got, (path, expected) in zip(jax.tree.leaves(gradient), want, strict=True):
            if "key" in (names := jax.tree_util.keystr(path)) and "bias" in names:
                # Exactly 0, since softmax is the same for scores that all grow as much: roundings.
                assert float(np.abs(got).max()) < 1e-6 * whole
                continue
            scale = float(np.abs(expected).max()) + 1e-6
            assert float(np.abs(got - expected).max()) <= 1e-5 * scale


def compiled_bytes(layers: int, remat: str) -> int:
    """Temporaries of a gradient on this machine, its layers as they lie by default."""
    config = BertConfig(
        vocab_size=50, hidden=32, layers=layers, heads=4, mlp=96, positions=256, remat=remat
    )
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs())))
    rows = jax.ShapeDtypeStruct((8, 256, 32), np.float32)

    def loss(params, rows):
        return nnx.merge(graphdef, params).encode(rows, None).sum()

    compiled = jax.jit(jax.grad(loss)).lower(shapes, rows).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_recomputation_takes_less_memory_on_a_cpu():
    """Scores of a layer are 8 MiB: without recomputation each layer keeps several."""
    assert compiled_bytes(8, "none") > 1.8 * compiled_bytes(4, "none")
    for remat in ("full", "dots"):
        few, many = compiled_bytes(4, remat), compiled_bytes(8, remat)
        assert many - few < 4 * 2**23
        assert many < 0.5 * compiled_bytes(8, "none")
