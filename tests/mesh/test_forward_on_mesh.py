"""Models of one forward pass, loaded straight onto a 2 x 2 x 2 mesh: outputs, and the gradients of
some, as on one device. Those that write (LLaMA, LLaVA, BART, Oscar) have files of their own.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import LAYER, load_on_mesh
from flax import nnx
from random_weights import random_state

from mmqa_jax.core.mesh import batch_sharding, state_shardings
from mmqa_jax.models.bert.keys import bert_key_map
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.mcan.keys import mcan_key_map, mcan_openvqa_key_map
from mmqa_jax.models.mcan.network import FusionConfig, MCANConfig, MCANOpenVQAConfig
from mmqa_jax.models.modified_resnet.keys import modified_resnet_key_map
from mmqa_jax.models.modified_resnet.network import ModifiedResNetConfig
from mmqa_jax.models.two_towers.config import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.models.two_towers.keys import key_map
from mmqa_jax.models.vlp.keys import vlp_key_map
from mmqa_jax.models.vlp.network import VLPConfig, VLPInputs
from mmqa_jax.weights.keymap import KeyMap, abstract_model, load_into
from mmqa_jax.weights.registry import architecture

ROWS = 4  # one on each of the devices that share the parameters' other halves
_WIDE = {"layers": 2, "heads": 4, "unroll": 1}
_BERT = BertConfig(vocab_size=50, hidden=16, mlp=24, positions=20, types=6, eps=1e-3, **_WIDE)
_FUSION = FusionConfig(hidden=32, mlp=40, flat_mlp=12, glimpses=2, flat_out=28, eps=1e-3, **_WIDE)
_VISION = VisionConfig(
    image_size=16, patch_size=4, width=16, mlp_width=24, embed_dim=12, eps=1e-3, **_WIDE
)
_TEXT = TextConfig(
    vocab_size=40, context=10, width=24, mlp_width=32, embed_dim=12, eps=1e-3, **_WIDE
)


class Case(NamedTuple):
    """One model.

    Attributes:
      name: the registry's.
      config: small, of sizes that the mesh divides.
      key_map: of the layout that the registry exports.
      inputs: a pytree of arrays [ROWS, ...].
      run: (model, inputs) -> a tuple of outputs.
      gradients: compare them too, which is dear: of CLIP, whose loss goes across the devices'
        rows, and of VLP.
    """

    name: str
    config: Any
    key_map: KeyMap
    inputs: Any
    run: Callable[[nnx.Module, Any], tuple[jax.Array, ...]]
    gradients: bool = False


def cases() -> Iterator[Case]:
    """All of them."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(ROWS, *shape)).astype(np.float32)

    def integers(high: int, length: int) -> np.ndarray:
        return rng.integers(1, high, (ROWS, length))

    def real(length: int) -> np.ndarray:
        return np.arange(length) < np.array([length, 3, 7, 5])[:, None]

    config = CLIPConfig(_VISION, _TEXT)
    ids = np.where(real(10), integers(39, 10), 0)
    ids[np.arange(ROWS), real(10).sum(axis=1) - 1] = 39  # the end of the text
    yield Case(
        "clip",
        config,
        key_map(config),
        (ids, normal(16, 16, 3), real(10)),
        lambda model, x: (model.logits(*x),),  # of every text with every picture
        gradients=True,
    )

    config = ModifiedResNetConfig(width=8, blocks=(1, 2, 1, 1), image_size=64, embed_dim=20)
    yield Case(
        "modified_resnet",
        config,
        modified_resnet_key_map(config),
        normal(64, 64, 3),
        lambda model, x: (grid := model.grid_features(x), model.pool(grid)),
    )

    config = BertConfig(**(vars(_BERT) | {"pooler": True}))
    yield Case(
        "bert",
        config,
        bert_key_map(config),
        (integers(50, 11), real(11), integers(6, 11)),
        lambda model, x: (hidden := model(*x), model.pool(hidden)),
    )

    config = VLPConfig(_BERT, region_features=18, region_positions=14, visual_hidden=(20,))
    columns = np.arange(14)
    end, last = (np.array(lengths)[:, None] for lengths in ((9, 7, 8, 12), (14, 9, 8, 13)))
    inputs = VLPInputs(
        input_ids=integers(50, 14),
        token_type_ids=np.where(columns < 6, 4, 5) * (columns < last),
        position_ids=np.where(columns < last, columns, 0),
        context_mask=columns < end,
        answer_mask=(columns >= end) & (columns < last),
        region_features=normal(3, 18),
        region_positions=normal(3, 14),
    )
    yield Case(
        "vlp",
        config,
        vlp_key_map(config),
        inputs,
        lambda model, x: (hidden := model.encode(x), model.mlm_logits(hidden)),
        gradients=True,
    )

    fusion = FusionConfig(**(vars(_FUSION) | {"value_bias": False, "norm": "layer"}))
    config = MCANConfig(
        _BERT, fusion, image_features=18, grid=3, rope_base=15.0, answers=10, new_answers=4
    )
    yield Case(
        "mcan",
        config,
        mcan_key_map(config),
        (np.where(real(9), integers(50, 9), 0), normal(9, 18)),
        lambda model, x: (model(*x),),
    )

    config = MCANOpenVQAConfig(
        vocab_size=30, fusion=_FUSION, word_features=14, region_features=18, answers=12
    )
    yield Case(
        "mcan_openvqa",
        config,
        mcan_openvqa_key_map(config),
        (np.where(real(9), integers(30, 9), 0), normal(7, 18) * real(7)[..., None]),
        lambda model, x: (model(*x),),
    )


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_eight_devices_equal_one(case):
    entry = architecture(case.name)

    def build() -> nnx.Module:
        return entry.build(case.config, rngs=nnx.Rngs())

    source = entry.publish(case.config, random_state(build)).source

    def load(mesh=None) -> nnx.Module:
        graphdef, state = abstract_model(build, mesh)
        return nnx.merge(graphdef, load_into(state, case.key_map, source))

    mesh, spread, whole = load_on_mesh(load)
    graphdef, state = nnx.split(spread)
    leaves = jax.tree.leaves(state)
    held = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
    assert held < 0.5 * sum(leaf.size for leaf in leaves)

    def forward(state, inputs):
        return case.run(nnx.merge(graphdef, state), inputs)

    def loss(state, inputs):
        outputs = forward(state, inputs)
        return sum(jnp.square(x).mean() for x in outputs), outputs

    batch = jax.device_put(case.inputs, batch_sharding(mesh))
    if case.gradients:
        step = jax.grad(loss, has_aux=True)
        shardings = state_shardings(state, mesh)
        expected, want = jax.jit(step)(nnx.state(whole), case.inputs)
        gradient, got = jax.jit(step, out_shardings=(shardings, None))(state, batch)
        equal(gradient, expected)
    else:
        want, got = jax.jit(forward)(nnx.state(whole), case.inputs), jax.jit(forward)(state, batch)
    assert all(
        np.std(np.asarray(x)) > 0.05 for x in want
    )  # numbers that the tolerance says something of
    equal(got, want)


def equal(got: Any, want: Any) -> None:
    """Compares two pytrees of arrays."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LAYER), got, want)
