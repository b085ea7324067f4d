"""The contrastive losses over a batch that is split over eight devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mmqa_jax.core.mesh import batch_sharding, make_mesh, replicated
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.encoders.dual_encoder import DualEncoderConfig
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.tasks.contrastive_losses import (
    ContrastiveObjective,
    SigmoidObjective,
    contrastive_loss,
    sigmoid_loss,
)
from tests.drawn_weights import drawn

# Tiny models: compiling is all the time.


def whole_matrix_loss(queries, sources, scale, positive, source_rows, gold_rows):
    """The loss as CLIP's figure 3 has it, every logit in one [B, S] matrix."""
    logits = scale * queries @ sources.T  # [B, S]
    gold = (source_rows[None, :, None] == gold_rows[:, None, :]).any(axis=2)
    others = gold & (jnp.arange(len(sources))[None, :] != positive[:, None])
    logits = jnp.where(others, -jnp.inf, logits)
    back = jnp.where(others[:, positive], -jnp.inf, scale * queries @ sources[positive].T)
    forward = optax.softmax_cross_entropy_with_integer_labels(logits, positive)
    backward = optax.softmax_cross_entropy_with_integer_labels(back.T, jnp.arange(len(queries)))
    return (forward.mean() + backward.mean()) / 2, (logits.argmax(axis=1) == positive).mean()


def make_links(rng, questions, group, rows=40):
    """Positives, source rows and golds in which sources and gold sources meet more than once."""
    source_rows = rng.integers(0, rows, questions * group).astype(np.int32)
    positive = (group * np.arange(questions) + rng.integers(0, group, questions)).astype(np.int32)
    gold_rows = rng.integers(-1, rows, (questions, 3)).astype(np.int32)
    gold_rows[:, 1] = source_rows[positive]
    return positive, source_rows, gold_rows


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def make_vectors(rng, questions, group, dim):
    return unit(rng.normal(size=(questions, dim))), unit(rng.normal(size=(questions * group, dim)))


def tiny_task(kind=ContrastiveObjective, logit_bias=None, **options):
    config = DualEncoderConfig(
        text=BertConfig(
            vocab_size=37, hidden=16, layers=1, heads=2, mlp=24, positions=12, dropout=0.0,
            attention_dropout=0.0,
        ),
        vision=VisionConfig(
            image_size=8, patch_size=4, width=12, layers=1, heads=2, mlp_width=20, embed_dim=16
        ),
        logit_scale=0.0,  # at CLIP's, gradients of up to 16 differ by float32's rounding alone
        logit_bias=logit_bias,
    )  # fmt: skip
    return kind(config, **options)


def make_params(task):
    return nnx.state(drawn(task.outline))


def make_batch(rng, questions, group):
    positive, source_rows, gold_rows = make_links(rng, questions, group)
    count = questions * group
    return {
        "query_ids": rng.integers(0, 37, (questions, 10)),
        "query_mask": np.arange(10) < rng.integers(1, 11, (questions, 1)),
        "source_ids": rng.integers(0, 37, (count, 12)),
        "source_mask": np.arange(12) < rng.integers(1, 13, (count, 1)),
        "pixels": rng.integers(0, 256, (count, 8, 8, 3)).astype(np.uint8),
        "has_image": rng.random(count) < 0.5,
        "positive": positive,
        "source_rows": source_rows,
        "gold_rows": gold_rows,
    }


def task_gradient(task, params, batch):
    """Loss, metrics and the parameters' gradient, compiled for where they lie."""
    graphdef, _ = nnx.split(nnx.eval_shape(task.outline))

    def loss(params, batch):
        return task.loss(nnx.merge(graphdef, params), batch, jax.random.key(1))

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return run.lower(params, batch).compile()


def test_blocks_are_the_whole_matrix():
    rng = np.random.default_rng(0)
    vectors = make_vectors(rng, 24, 3, 16)
    links = make_links(rng, 24, 3)

    def value(loss):
        def of(queries, sources, scale):
            return loss(queries, sources, scale, *links)

        return jax.jit(jax.value_and_grad(of, (0, 1, 2), has_aux=True))

    ours = value(contrastive_loss)(*vectors, jnp.float32(7.0))
    want = value(whole_matrix_loss)(*vectors, jnp.float32(7.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), ours, want)


@pytest.fixture(scope="module")
def whole():
    """Parameters, a batch, and the compiled loss and gradient of all of it on one device."""
    task, batch = tiny_task(), make_batch(np.random.default_rng(1), 64, 2)
    params = make_params(task)
    return params, batch, task_gradient(task, params, batch)


def test_towers_in_parts_have_the_same_gradient_and_less_memory(whole):
    params, batch, run = whole
    parts = task_gradient(tiny_task(tower_parts=8), params, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        parts(params, batch),
        run(params, batch),
    )
    needed = [one.memory_analysis().temp_size_in_bytes for one in (run, parts)]
    assert needed[1] < needed[0] / 2


def gradient(loss, **options):
    """The loss's gradient with respect to queries, sources and scale."""
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), **options)


def split_over(mesh):
    """contrastive_loss on a mesh."""

    def loss(queries, sources, scale, *links):
        return contrastive_loss(queries, sources, scale, *links, mesh=mesh)

    return loss


def test_a_split_batch_has_the_gradient_of_the_whole_matrix():
    rng = np.random.default_rng(0)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays = make_vectors(rng, 24, 3, 16), make_links(rng, 24, 3)
    vectors, links = jax.device_put(arrays, batch_sharding(mesh))
    scale = jax.device_put(jnp.float32(7.0), replicated(mesh))
    got = gradient(split_over(mesh))(*vectors, scale, *links)
    want = gradient(whole_matrix_loss)(*arrays[0], jnp.float32(7.0), *arrays[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, want)


def test_a_device_computes_its_block_alone():
    """B = 64 questions, S = 128 sources, n = 8 parts."""
    rng = np.random.default_rng(0)
    mesh = make_mesh({"data": 4, "fsdp": 2})
    split, whole = batch_sharding(mesh), replicated(mesh)
    vectors, links = jax.device_put((make_vectors(rng, 64, 2, 12), make_links(rng, 64, 2)), split)
    scale = jax.device_put(jnp.float32(7.0), whole)

    def module(loss):
        out = ((whole, whole), (split, split, whole))
        compiled = gradient(loss, out_shardings=out).lower(*vectors, scale, *links).compile()
        text = compiled.as_text()
        shapes = set(re.findall(r"\b(?:f32|s32|pred)\[([\d,]+)\]", text))
        return text, {tuple(map(int, shape.split(","))) for shape in shapes}

    text, shapes = module(split_over(mesh))
    assert {(8, 128), (8, 64)} <= shapes  # [B / n, S] and [B / n, B]
    assert max(map(math.prod, shapes)) <= 8 * 128 * 3  # the block and its three golds a question
    assert "all-to-all" not in text
    # The same test sees what XLA makes of the whole matrix.
    assert max(map(math.prod, module(whole_matrix_loss)[1])) >= 64 * 64


def test_towers_of_a_split_batch_have_the_gradient_of_one_device(whole):
    params, batch, run = whole
    mesh = make_mesh({"data": 4, "fsdp": 2})
    want = run(params, batch)
    params = jax.device_put(params, replicated(mesh))
    batch = jax.device_put(batch, batch_sharding(mesh))
    task = tiny_task(mesh=mesh, tower_parts=2)
    got = task_gradient(task, params, batch)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)


def whole_sigmoid_loss(queries, sources, scale, bias, positive, source_rows, gold_rows):
    """Every pair's logit in one [B, S] matrix; other gold sources count for nothing."""
    logits = scale * queries @ sources.T + bias
    at = jnp.arange(len(sources))[None, :] == positive[:, None]
    gold = (source_rows[None, :, None] == gold_rows[:, None, :]).any(axis=2)
    pairs = jnp.where(at, jax.nn.softplus(-logits), jnp.where(gold, 0, jax.nn.softplus(logits)))
    best = jnp.where(gold & ~at, -jnp.inf, logits).argmax(axis=1)
    return pairs.sum() / len(queries), (best == positive).mean()


def sigmoid_gradient(loss, mesh=None):
    """Value and gradient with respect to questions, sources, scale and bias."""
    options = {} if mesh is None else {"mesh": mesh}

    def value(vectors, links):
        return loss(*vectors, *links, **options)

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def test_questions_go_around_the_devices_and_no_logits_are_kept():
    """B = 64 questions, S = 128 sources, n = 8 parts: chunks of [8, 16], one at a time."""
    rng = np.random.default_rng(0)
    mesh = make_mesh({"data": 4, "fsdp": 2})
    arrays = make_vectors(rng, 64, 2, 12), make_links(rng, 64, 2)
    arrays[0][1][arrays[1][0][:20]] = arrays[0][0][:20]  # some are found
    shared = jnp.float32(7.0), jnp.float32(-3.0)
    vectors, links = jax.device_put(arrays, batch_sharding(mesh))
    at = (*vectors, *jax.device_put(shared, replicated(mesh))), links
    split = sigmoid_gradient(sigmoid_loss, mesh).lower(*at).compile()
    want = sigmoid_gradient(whole_sigmoid_loss)((*arrays[0], *shared), arrays[1])
    assert 0 < want[0][1] < 1
    for got in (split(*at), sigmoid_gradient(sigmoid_loss)((*arrays[0], *shared), arrays[1])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, want)
    text = split.as_text()
    shapes = {
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"\b(?:f32|s32|pred)\[([\d,]+)\]", text)
    }
    assert max(shapes) <= 8 * 16 * 3  # a chunk and its three golds a question
    assert "collective-permute" in text
    assert "all-gather" not in text


def test_towers_with_the_sigmoid_loss_have_that_of_one_device():
    """The loss alone: its gradient is held above, that of towers in parts by the other loss."""
    rng = np.random.default_rng(0)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sigmoid = {"kind": SigmoidObjective, "logit_bias": -1.0}
    task = tiny_task(**sigmoid)
    params, batch = make_params(task), make_batch(rng, 32, 2)
    graphdef = nnx.graphdef(nnx.eval_shape(task.outline))

    def loss(task, params, batch):
        return task.loss(nnx.merge(graphdef, params), batch, jax.random.key(1))

    want = jax.jit(functools.partial(loss, task))(params, batch)
    assert want[1]["bias"] == params["logit_bias"][...]
    params = jax.device_put(params, replicated(mesh))
    batch = jax.device_put(batch, batch_sharding(mesh))
    task = tiny_task(**sigmoid, mesh=mesh, tower_parts=2)
    run = jax.jit(functools.partial(loss, task)).lower(params, batch).compile()
    assert "collective-permute" in run.as_text()
    got = run(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
