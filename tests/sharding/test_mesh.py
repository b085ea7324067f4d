"""Meshes, rules and sharded models on eight fake CPU devices.

The device count is fixed when JAX starts, so the checks on eight devices run in a subprocess:
this file, called as a script. Rules and bad input need no devices.
"""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh, partition_spec

MESH = AbstractMesh((2, 2, 4), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("names", "shape", "want"),
    [
        (("layers", "embed", "mlp"), (6, 8, 16), (None, "fsdp", "tensor")),
        (("vocab", "embed"), (32, 8), ("tensor", "fsdp")),
        (("vocab", "embed"), (30522, 8), (None, "fsdp")),  # 30522 is not a multiple of 4
        (("embed", None), (8, 2), ("fsdp", None)),
        (("embed",), (9,), (None,)),
        (("batch", None), (8, 3), (("data", "fsdp"), None)),
        (("batch", "embed"), (8, 8), (("data", "fsdp"), None)),  # fsdp is taken
        (("embed", "embed"), (8, 8), ("fsdp", None)),
        ((), (), ()),
        (None, (4, 4), ()),
    ],
)
def test_logical_names_become_mesh_axes(names, shape, want):
    assert partition_spec(names, shape, MESH) == PartitionSpec(*want)


def test_axes_of_size_one_are_left_out():
    mesh = AbstractMesh((4, 1, 1), ("data", "fsdp", "tensor"))
    assert partition_spec(("batch", "embed"), (8, 8), mesh) == PartitionSpec("data", None)


def test_every_parameter_name_has_a_rule():
    names = {"batch", "layers", "embed", "mlp", "heads", "head_dim", "vocab", "positions"}
    assert {name for name, _ in DEFAULT_RULES} == names | {"patch", "proj"}


def test_bad_rules_name_the_axis():
    with pytest.raises(UserError, match="no rule for logical axis 'embde'"):
        partition_spec(("embde",), (8,), MESH)
    with pytest.raises(UserError, match="mapped to 'model', which is not a mesh axis"):
        partition_spec(("embed",), (8,), MESH, rules=[("embed", "model")])


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ({"data": 3, "tensor": -1}, "data=3, fsdp=1, tensor=-1 does not fit 8 devices"),
        ({"data": 2, "fsdp": 2}, "does not fit 8 devices"),
        ({"data": 16}, "does not fit 8 devices"),
        ({"data": -1, "fsdp": -1}, "at most one -1"),
        ({"data": 0}, "sizes must be positive"),
        ({"data": -1, "model": 2}, "unknown axis 'model'"),
    ],
)
def test_meshes_that_cannot_be(shape, match):
    with pytest.raises(UserError, match=match):
        make_mesh(shape, devices=jax.devices()[:1] * 8)


def test_on_eight_devices(run_on_devices):
    done = run_on_devices(8, "test_mesh.py")
    assert done.split() == ["mesh", "init", "forward", "gradient", "restore", "done"]


def main():
    import numpy as np
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding

    from mmqa_jax.core.mesh import batch_sharding, init_sharded, state_shardings
    from mmqa_jax.models.bert import BertConfig
    from mmqa_jax.models.clip import VisionConfig
    from mmqa_jax.models.dual_encoder import DualEncoder, DualEncoderConfig
    from mmqa_jax.weights.formats.safetensors import ArraySource
    from mmqa_jax.weights.keymap import KeyMap, Rule, load_into

    mesh = make_mesh({"data": -1, "fsdp": 2, "tensor": 2})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert all(kind == AxisType.Auto for kind in mesh.axis_types)
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    print("mesh")

    config = DualEncoderConfig(
        text=BertConfig(
            vocab_size=37, hidden=16, layers=3, heads=4, mlp=24, positions=12, dropout=0.0
        ),
        vision=VisionConfig(
            image_size=8, patch_size=4, width=12, layers=2, heads=2, mlp_width=20, embed_dim=16
        ),
    )

    def build():
        return DualEncoder(config, rngs=nnx.Rngs(0))

    sharded = init_sharded(build, mesh)
    graphdef, state = nnx.split(sharded)
    alone = init_sharded(build, make_mesh({"data": 1}, devices=jax.devices()[:1]))
    plain = nnx.state(alone)
    jax.tree.map(np.testing.assert_array_equal, state, plain)  # values do not know the mesh
    up = sharded.text.layers.up.kernel[...]  # [layers 3, embed 16, mlp 24]
    assert up.sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    assert up.addressable_shards[0].data.shape == (3, 8, 12)
    word = sharded.text.embeddings.word.table[...]  # 37 words do not divide: replicated
    assert word.addressable_shards[0].data.shape == (37, 8)
    assert sharded.logit_scale[...].sharding.is_fully_replicated
    print("init")

    rng = np.random.default_rng(0)
    batch = {
        "input_ids": rng.integers(0, 37, (8, 10)),
        "attention_mask": np.arange(10) < rng.integers(1, 11, (8, 1)),
        "pixels": rng.random((8, 8, 8, 3)).astype(np.float32),
        "has_image": rng.random(8) < 0.5,
    }
    on_mesh = jax.device_put(batch, batch_sharding(mesh))
    assert on_mesh["pixels"].addressable_shards[0].data.shape == (2, 8, 8, 3)

    def encode(state, batch):
        return nnx.merge(graphdef, state).encode_source(**batch)

    want = jax.jit(encode)(plain, batch)
    with jax.set_mesh(mesh):
        run = jax.jit(encode, out_shardings=batch_sharding(mesh))
        got = run(state, on_mesh)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    print("forward")

    def loss(state, batch):
        vectors = encode(state, batch)
        return (vectors @ vectors.T)[0].sum()

    want = jax.jit(jax.grad(loss))(plain, batch)
    run = jax.jit(jax.grad(loss), out_shardings=state_shardings(state, mesh))
    got = run(state, on_mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, want)
    print("gradient")

    # Weights stream onto the shards of a model that was never initialized.
    abstract = nnx.state(nnx.eval_shape(build))
    shardings = state_shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(plain)}
    arrays, rules = {}, []
    for path, leaf in flat.items():
        value = np.asarray(leaf.get_value())
        stacked = "/layers/" in path
        rules.append(Rule(f"{path}.{{layer}}" if stacked else path, path))
        arrays |= {f"{path}.{n}": v for n, v in enumerate(value)} if stacked else {path: value}
    loaded = load_into(abstract, KeyMap(rules), ArraySource(arrays))
    jax.tree.map(np.testing.assert_array_equal, loaded, plain)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s, loaded, shardings)))
    print("restore")
    print("done")


if __name__ == "__main__":
    main()
