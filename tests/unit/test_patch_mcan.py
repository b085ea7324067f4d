"""MCAN on raw pictures: which pictures count, and what is trained."""

import jax
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.mcan.network import FusionConfig
from mmqa_jax.models.mcan.patches import PatchMCANConfig
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.tasks.vqa import VQAObjective
from tests.drawn_weights import drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TEXT = BertConfig(
    vocab_size=20, hidden=16, layers=1, heads=2, mlp=16, positions=8, dropout=0.0,
    attention_dropout=0.0, unroll=1,
)  # fmt: skip
VISION = VisionConfig(
    image_size=4, patch_size=2, width=16, layers=1, heads=2, mlp_width=16, embed_dim=8, unroll=1
)
FUSION = FusionConfig(
    hidden=16, heads=2, mlp=16, layers=1, flat_mlp=8, flat_out=12, norm="layer", dropout=0.0,
    unroll=1,
)  # fmt: skip
CONFIG = PatchMCANConfig(TEXT, VISION, FUSION, answers=3)
IDS = np.array([[1, 5, 6, 2, 0], [1, 7, 2, 0, 0]])


@pytest.fixture(scope="module")
def task():
    return VQAObjective(CONFIG)


@pytest.fixture(scope="module")
def latent(task):
    model = drawn(task.outline)
    graphdef, state = nnx.split(model)
    return jax.jit(lambda image: nnx.merge(graphdef, state).latent(IDS, image))


def image(seed: int, *shown: bool) -> dict:
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 2, 4, 4, 3), np.uint8)
    return {"pixels": pixels, "shown": np.array([shown, shown])}


def test_a_picture_that_is_not_shown_does_not_count(latent):
    first, second = image(0, True, False), image(0, True, False)
    second["pixels"][:, 1] = 7
    np.testing.assert_allclose(latent(first), latent(second), atol=1e-6)
    both = [latent({**one, "shown": np.ones((2, 2), bool)}) for one in (first, second)]
    assert np.abs(np.subtract(*both)).max() > 1e-3


def test_the_order_of_two_pictures_counts(latent):
    one = image(0, True, True)
    turned = {**one, "pixels": one["pixels"][:, ::-1]}
    assert np.abs(np.subtract(latent(one), latent(turned))).max() > 1e-4


def test_a_question_without_a_picture_has_an_answer(latent):
    found = np.asarray(latent(image(0, False, False)))
    assert np.isfinite(found).all()
    assert np.abs(found[0] - found[1]).max() > 1e-3  # by its words


def test_tower_and_text_are_trained(task):
    model = drawn(task.outline, 1)
    graphdef, state = nnx.split(model)
    batch = {
        "question_ids": IDS,
        "image": image(2, True, True),
        "targets": np.eye(2, 3, dtype=np.float32),
    }

    @jax.jit
    def gradient(state):
        return jax.grad(lambda s: task.loss(nnx.merge(graphdef, s), batch, None)[0])(state)

    found = nnx.to_pure_dict(gradient(state))
    for part in (found["vision"]["patch"], found["vision"]["layers"]["mlp_in"], found["bert"]):
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(part)) > 0


def test_heads_that_cannot_be_turned_are_refused():
    with pytest.raises(UserError, match=r"heads of 2; .* multiple of 4"):
        PatchMCANConfig(TEXT, VISION, FusionConfig(hidden=4, heads=2), answers=3)
