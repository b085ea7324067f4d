"""LLaVA, loaded straight onto a 2 x 2 x 2 mesh: logits, gradients, generation as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cached import decode, prefill
from compare import LAYER, load_on_mesh
from flax import nnx
from random_weights import publish

from mmqa_jax.core.mesh import batch_sharding, state_shardings
from mmqa_jax.decoding import kv_cache
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import expand_images
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.weights.published import load_published

VISION = VisionConfig(
    image_size=40, patch_size=4, width=40, layers=3, heads=4, mlp_width=72, embed_dim=28, eps=3e-5
)
LLAMA = LlamaConfig(
    vocab_size=97, hidden=48, layers=2, heads=6, kv_heads=2, mlp=80, positions=640, eps=2e-5,
    rope_theta=1234.5,
)  # fmt: skip
CONFIG = LlavaConfig(VISION, LLAMA, image_token=90)
PICTURES = [2, 0, 1, 1]  # of each row


def test_logits_gradients_and_generation(tmp_path):
    folder = publish("llava", CONFIG, tmp_path)
    mesh, spread, whole = load_on_mesh(functools.partial(load_published, "llava", folder, unroll=1))
    graphdef, state = nnx.split(spread)
    plain, shardings = nnx.state(whole), state_shardings(state, mesh)
    for module in (spread.vision.layers.mlp_in, spread.projector.linear_1):
        kernel = module.kernel[...]
        *_, embed, mlp = kernel.shape
        assert kernel.addressable_shards[0].data.shape[-2:] == (embed // 2, mlp // 2)

    config, rng = spread.config, np.random.default_rng(0)
    rows = []
    for number, pictures in enumerate(PICTURES):
        words = rng.integers(1, config.image_token, 5 + number).tolist()
        rows.append([*words[:2], *[config.image_token] * pictures, *words[2:]])
    prompts = expand_images(rows, PICTURES, config)
    size = config.vision.image_size
    pixels = rng.normal(size=(4, size, size, 3)).astype(np.float32)
    inputs = (prompts.input_ids, pixels)
    batch = jax.device_put(inputs, batch_sharding(mesh))
    answers = prompts.mask & (prompts.input_ids != config.image_token)

    def loss(state, ids, pixels):
        logits = nnx.merge(graphdef, state)(ids, pixels)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * answers[:, 1:]) / answers[:, 1:].sum(), logits

    gradients = jax.grad(loss, has_aux=True)
    expected, want = jax.jit(gradients)(plain, *inputs)
    gradient, got = jax.jit(gradients, out_shardings=(shardings, None))(state, *batch)
    got, want = jax.device_get((got, want))
    np.testing.assert_allclose(got[prompts.mask], want[prompts.mask], **LAYER)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LAYER), gradient, expected)

    length = prompts.mask.shape[1]
    cache = kv_cache.empty(config.llama, 4, length + 4, "float32", mesh)
    where = jax.tree.map(lambda x: x.sharding, cache)
    by_row = batch_sharding(mesh)

    @functools.partial(jax.jit, donate_argnums=4, out_shardings=(by_row, where))
    def begin(state, ids, pixels, lengths, cache):
        model = nnx.merge(graphdef, state)
        return prefill(model.llama, model.embed(ids, model.encode_images(pixels)), lengths, cache)

    @functools.partial(jax.jit, donate_argnums=3, out_shardings=(by_row, where))
    def step(state, token, position, cache):
        return decode(nnx.merge(graphdef, state).llama, token, position, cache)

    # All but each row's last two tokens first, then these one by one.
    lengths = prompts.lengths - 2
    logits, cache = begin(state, *batch, jax.device_put(lengths, by_row), cache)
    for at in (lengths, lengths + 1):
        every = np.arange(4)
        np.testing.assert_allclose(logits, want[every, at - 1], **LAYER)
        token, position = jax.device_put((prompts.input_ids[every, at], at), by_row)
        logits, cache = step(state, token, position, cache)
    np.testing.assert_allclose(logits, want[every, prompts.lengths - 1], **LAYER)
