"""What a run from given weights draws: the parameters that they lack, and nothing else."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_llm import MODEL

from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.tasks.language_model import LanguageModelObjective
from mmqa_jax.training.state import abstract_state, initial_state, pretrained_state, split_model

pytestmark = pytest.mark.slow
ADAM = optax.adam(1e-3)


@pytest.fixture(scope="module")
def objective():
    return LanguageModelObjective(MODEL, LoraConfig(rank=2))


@pytest.fixture(scope="module")
def start(objective):
    """The model, its abstract state and the state of a run from scratch."""
    model = split_model(objective, 3)
    abstract = abstract_state(model, ADAM, make_mesh(devices=jax.devices()[:1]), DEFAULT_RULES)
    return model, abstract, initial_state(model, ADAM, 3, abstract)


def from_weights(objective, start, lacking):
    """The state of a run whose given weights are 0.5, but for parameters that they lack."""
    model, abstract, _ = start

    def load(module):
        for path, leaf in nnx.to_flat_state(nnx.state(module)):
            if path[-1] not in lacking:
                leaf.set_value(np.full(leaf.shape, 0.5, np.float32))

    return pretrained_state(model, ADAM, 3, abstract, load)


def test_weights_from_scratch_are_the_models_own(objective, start):
    """As its initializers draw them with the run's seed."""
    wanted = jax.jit(lambda: nnx.state(objective.init(jax.random.key(3)), nnx.Param))()
    for name, leaf in every(start[2]).items():
        np.testing.assert_array_equal(leaf, flatten_named(wanted)[name])


def every(state):
    """The trained and the frozen parameters by name."""
    assert all("lora_" in name for name in flatten_named(state.params))
    assert not any("lora_" in name for name in flatten_named(state.frozen))
    return flatten_named(state.params) | flatten_named(state.frozen)


def test_what_given_weights_lack_is_as_from_scratch(objective, start):
    scratch = start[2]
    state = from_weights(objective, start, {"lora_a", "lora_b", "scale"})
    for got, wanted in ((state.step, scratch.step), (state.optimizer, scratch.optimizer)):
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    drawn, found = every(scratch), every(state)
    assert list(found) == list(drawn)
    for name, leaf in found.items():
        own = name.rpartition("/")[2] in {"lora_a", "lora_b", "scale"}
        np.testing.assert_array_equal(leaf, drawn[name] if own else np.full(leaf.shape, 0.5))
        assert leaf.sharding == drawn[name].sharding
    assert sum(name.endswith("lora_a") and np.ptp(leaf) > 0 for name, leaf in found.items()) == 7


def test_nothing_is_drawn_where_all_is_given(objective, start, monkeypatch):
    def refuse(self, key):
        raise AssertionError("initial weights are made")

    monkeypatch.setattr(LanguageModelObjective, "init", refuse)
    state = from_weights(objective, start, ())
    assert all(
        (np.asarray(leaf) == 0.5).all() for leaf in jax.tree.leaves([state.params, state.frozen])
    )
    jax.tree.map(np.testing.assert_array_equal, state.optimizer, start[2].optimizer)
    # The shapes are still shapes: another run starts from them.
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(start[1]))
