"""The engine on a tiny random LLaVA: pictures within text, against the model's own forward."""

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax
from tiny_llm import by_id, llama_config, tiny_llama

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import Llava, expand_images
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.models.two_towers.network import normalize_pixels
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

IMAGE = -200  # outside the vocabulary, as in the original
MODEL = LlavaConfig(
    vision=VisionConfig(
        image_size=12, patch_size=4, width=24, layers=2, heads=2, mlp_width=20, embed_dim=16
    ),
    llama=llama_config(61, positions=96),
    image_token=IMAGE,
)
SIZES = EngineConfig(slots=4, length=96, buckets=(16,), prefill_tokens=32)  # a program of each kind


def llava() -> Llava:
    return drawn(lambda: Llava(MODEL, rngs=nnx.Rngs()), 3, MODEL.llama.init_stddev)


@pytest.fixture(scope="module")
def pictures():
    return np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def engine():
    return Engine(llava(), config=SIZES)


@pytest.fixture(scope="module")
def logits():
    """(tokens, pictures) -> logits of what follows each position of the expanded sequence."""
    graphdef, state = nnx.split(llava())
    forward = jax.jit(lambda state, ids, pixels: nnx.merge(graphdef, state)(ids, pixels))

    def run(tokens, images):
        prompts = expand_images([tokens], [len(images)], MODEL, length=SIZES.length)
        pixels = np.zeros((2, 12, 12, 3), np.float32)
        for number, image in enumerate(images):
            pixels[number] = normalize_pixels(image)
        return np.asarray(forward(state, prompts.input_ids, pixels))[0, : prompts.lengths[0]]

    return run


def test_answers_equal_the_forward_pass(engine, logits, pictures):
    """One picture, two, the same head with another picture, and none."""
    first, second, third = pictures
    head = [5, 6, 7, IMAGE, 8]
    prompts = {
        "one": ([*head, 9, 10], [first]),
        "one, other question": ([*head, 11, 12, 13, 14, 15, 16], [first]),
        "other picture": ([*head, 9, 10], [second]),
        "two": ([*head, 20, IMAGE, 21], [third, first]),
        "none": ([5, 6, 7, 8, 9, 10], []),
        "picture first": ([IMAGE, 3], [second]),
    }
    requests = [
        Request(name, tokens, 6, images=images, logprobs=True)
        for name, (tokens, images) in prompts.items()
    ]
    results = by_id(engine.generate(requests))
    assert results["one"].prompt_tokens == 6 + 9  # nine patches
    assert results["one"].candidates[0].tokens != results["other picture"].candidates[0].tokens
    for name, (tokens, images) in prompts.items():
        got = results[name].candidates[0]
        rows = logits([*tokens, *got.tokens], images)[-7:-1]
        assert list(got.tokens) == rows.argmax(-1).tolist(), name
        want = log_softmax(rows, axis=-1)[np.arange(6), list(got.tokens)]
        np.testing.assert_allclose(got.logprobs, want, rtol=0, atol=1e-4)


def test_a_beginning_is_shared_with_the_same_picture_only(engine, pictures):
    head = [5, 6, IMAGE, *range(20)]  # the second chunk of 16 tokens begins after the picture
    engine.forget()
    (first,) = engine.generate([Request(0, [*head, 1], 2, images=[pictures[0]])])
    same, other = (
        next(engine.generate([Request(0, [*head, 2], 2, images=[picture])]))
        for picture in (pictures[0], pictures[1])
    )
    assert [result.reused_tokens for result in (first, same, other)] == [0, 16, 0]


def test_choices_about_a_picture(engine, logits, pictures):
    prompt, choices = [5, IMAGE, 6, 7, 8, 9], [[1], [2, 3], [4, 5, 6]]
    (found,) = engine.score([Scoring(0, prompt, choices, images=[pictures[1]])])
    for score, choice in zip(found.scores, choices, strict=True):
        rows = logits([*prompt, *choice], [pictures[1]])[-len(choice) - 1 : -1]
        want = log_softmax(rows, axis=-1)[np.arange(len(choice)), choice]
        np.testing.assert_allclose(score.logprobs, want, rtol=0, atol=1e-4)


def test_pictures_that_do_not_fit_are_named(engine, pictures):
    for tokens, images, match in [
        ([1, IMAGE, 2], [], r"request 'odd': its prompt has 1 image placeholders .* 0 pictures"),
        ([1, 2], pictures[:1], "has 0 image placeholders .* for 1 pictures"),
        ([IMAGE], pictures[:1, :8], r"a picture is uint8 \[8, 12, 3\].*uint8 \[12, 12, 3\]"),
        ([IMAGE], pictures[:1] / 255.0, "a picture is float64"),
        ([IMAGE, -5], pictures[:1], "has token -5"),
    ]:
        with pytest.raises(UserError, match=match):
            list(engine.generate([Request("odd", tokens, 2, images=list(images))]))
    text_only = Engine(tiny_llama(MODEL.llama), config=SIZES)
    with pytest.raises(UserError, match="a text-only LLaMA; use a model that sees"):
        list(text_only.generate([Request(0, [1], 2, images=list(pictures[:1]))]))
