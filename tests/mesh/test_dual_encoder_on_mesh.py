"""A model on a mesh of eight devices: where its parameters lie, and that it computes the same."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import batch_sharding, init_sharded, make_mesh, state_shardings
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.weights.formats.safetensors import ArraySource
from mmqa_jax.weights.keymap import KeyMap, Rule, load_into

CONFIG = DualEncoderConfig(
    text=BertConfig(vocab_size=37, hidden=16, layers=2, heads=4, mlp=24, positions=12, dropout=0.0),
    vision=VisionConfig(
        image_size=8, patch_size=4, width=12, layers=1, heads=2, mlp_width=20, embed_dim=16
    ),
)


def build():
    return DualEncoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": -1, "fsdp": 2, "tensor": 2})


@pytest.fixture(scope="module")
def sharded(mesh):
    return init_sharded(build, mesh)


@pytest.fixture(scope="module")
def alone():
    """The parameters on one device."""
    return nnx.state(init_sharded(build, make_mesh({"data": 1}, devices=jax.devices()[:1])))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {
        "input_ids": rng.integers(0, 37, (8, 10)),
        "attention_mask": np.arange(10) < rng.integers(1, 11, (8, 1)),
        "pixels": rng.random((8, 8, 8, 3)).astype(np.float32),
        "has_image": rng.random(8) < 0.5,
    }


GRAPHDEF = nnx.graphdef(nnx.eval_shape(build))


def test_the_axes_of_a_mesh(mesh):
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert all(kind == AxisType.Auto for kind in mesh.axis_types)
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}


def test_parameters_are_initialized_where_the_rules_say(mesh, sharded, alone):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(sharded), alone)  # whatever the mesh
    up = sharded.text.layers.up.kernel[...]  # [layers 2, embed 16, mlp 24]
    assert up.sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    assert up.addressable_shards[0].data.shape == (2, 8, 12)
    word = sharded.text.embeddings.word.table[...]  # 37 words do not divide: replicated
    assert word.addressable_shards[0].data.shape == (37, 8)
    assert sharded.logit_scale[...].sharding.is_fully_replicated


def test_vectors_and_gradients_are_those_of_one_device(mesh, sharded, alone, batch):
    def loss(state, batch):
        vectors = nnx.merge(GRAPHDEF, state).encode_source(**batch)
        return (vectors @ vectors.T)[0].sum(), vectors

    gradients, state = jax.grad(loss, has_aux=True), nnx.state(sharded)
    want = jax.jit(gradients)(alone, batch)
    on_mesh = jax.device_put(batch, batch_sharding(mesh))
    assert on_mesh["pixels"].addressable_shards[0].data.shape == (2, 8, 8, 3)
    with jax.set_mesh(mesh):
        where = state_shardings(state, mesh), batch_sharding(mesh)
        got = jax.jit(gradients, out_shardings=where)(state, on_mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, want)


def test_weights_stream_onto_the_shards_of_a_model_that_was_never_initialized(mesh, alone):
    abstract = nnx.state(nnx.eval_shape(build))
    shardings = state_shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(alone)}
    arrays, rules = {}, []
    for path, leaf in flat.items():
        value = np.asarray(leaf.get_value())
        stacked = "/layers/" in path
        rules.append(Rule(f"{path}.{{layer}}" if stacked else path, path))
        arrays |= {f"{path}.{n}": v for n, v in enumerate(value)} if stacked else {path: value}
    loaded = load_into(abstract, KeyMap(rules), ArraySource(arrays))
    jax.tree.map(np.testing.assert_array_equal, loaded, alone)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s, loaded, shardings)))
