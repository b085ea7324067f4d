"""Attention with linear memory against the plain one."""

import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.models.attention import flash, splash
from mmqa_jax.models.attention.masked import Window
from mmqa_jax.models.common.layers import attention

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
ATTENTION = jax.jit(attention, static_argnames=("is_causal", "implementation"))


@contextlib.contextmanager
def on_a(platform):
    """Traces for a mesh of one device, which need not be there."""
    device = AbstractDevice("any", None, platform)
    mesh = AbstractMesh((1,) * 3, ("data", "fsdp", "tensor"), abstract_device=device)
    cudnn = mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", return_value=91000)
    with use_abstract_mesh(mesh), cudnn:
        yield


def inputs(length, columns, heads=4, kv_heads=2, size=16):
    shapes = ((2, length, heads, size), *((2, columns, kv_heads, size),) * 2)
    rng = np.random.default_rng(length)  # the same whichever tests ran before
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def plain(q, k, v, mask=None, *, is_causal=True):
    """By `layers.attention` with repeated heads; a causal mask is aligned with the last key."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    seen = np.ones((1, 1, q.shape[1], k.shape[1]), bool) if mask is None else mask
    if is_causal:
        seen = seen & np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], bool)
    return ATTENTION(q, k, v, mask=seen)


@pytest.mark.parametrize(("length", "columns"), [(7, 7), (7, 30), (1, 30)])
@pytest.mark.parametrize("of_queries", [False, True])
def test_blocks(length, columns, of_queries):
    q, k, v = inputs(length, columns)
    mask = RNG.random((2, 1, length if of_queries else 1, columns)) < 0.6
    mask[..., columns - length] = True  # every query sees a key
    for is_causal in (True, False):
        blocks = functools.partial(flash.block_attention, is_causal=is_causal, block=8)
        got = jax.jit(blocks)(q, k, v, mask=mask)
        want = plain(q, k, v, mask, is_causal=is_causal)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("columns", [128, 384])
def test_splash_in_interpret_mode(columns):
    """The kernel that a TPU runs, with keys that are not there yet in front of the queries."""
    q, k, v = inputs(128, columns, size=32)
    seen = np.arange(columns) < np.array([[40], [0]])
    seen |= np.arange(columns) >= columns - 128
    options = {"is_causal": True, "mesh": None, "interpret": True}
    got = jax.jit(functools.partial(splash.splash_attention, **options))(q, k, v, key_mask=seen)
    np.testing.assert_allclose(got, plain(q, k, v, seen[:, None, None]), rtol=0, atol=1e-5)


def test_splash_of_pictures_in_interpret_mode(interpreted):
    """Keys that are seen by all; the second row is padding alone, whose values are numbers."""
    q, k, v = inputs(256, 256, size=32)
    mask = (np.arange(256) < np.array([[200], [0]]))[:, None, None]
    real = np.array([1.0, 0.0])[:, None, None, None]

    def attend(q, k, v):
        return real * attention(q, k, v, mask=mask, implementation="splash")

    def wanted(q, k, v):
        return real * attention(q, k, v, mask=mask)

    np.testing.assert_allclose(attend(q, k, v), wanted(q, k, v), rtol=0, atol=1e-5)
    same_gradients(attend, wanted, q, k, v)


def row_segments(length):
    """Two rows of three texts each; the second ends in padding, segment 0."""
    ends = np.array([[length // 3, length // 2, length], [length // 4, length // 2, length // 2]])
    numbers = 1 + (np.arange(length)[None, :, None] >= ends[:, None]).sum(-1)
    return np.where(numbers > 3, 0, numbers).astype(np.int32)


@pytest.fixture
def interpreted(monkeypatch):
    for module, name in ((splash, "splash_attention"), (flash, "triton_attention")):
        kernel = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, kernel)
    return monkeypatch


def same_gradients(one, other, *arrays):
    """Compares values and gradients of two functions whose results are of the first array's shape."""
    weights = np.random.default_rng(1).normal(size=arrays[0].shape).astype(np.float32)

    def value_and_gradients(f):
        value = jax.value_and_grad(lambda *x: (f(*x) * weights).sum(), argnums=range(len(arrays)))
        return jax.jit(value)(*arrays)

    got, want = value_and_gradients(one), value_and_gradients(other)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for ours, theirs in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def same_values_and_gradients(q, k, v, attend, mask):
    """Beside a dense mask, bool [B or 1, 1, L, L], over repeated heads."""

    def wanted(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        return attention(q, k, v, mask=mask)

    same_gradients(attend, wanted, q, k, v)


@pytest.mark.parametrize(
    ("name", "length"),
    [("xla", 128), ("blocks", 128), ("splash", 256), ("splash", 640), ("cudnn", 128)],
)
def test_texts_in_a_row_do_not_see_each_other(name, length, interpreted):
    """Values and gradients of several texts in a row; for "cudnn" of the kernel beside it, for
    "splash" by one kernel and, where keys have more than four blocks, by two."""
    q, k, v = inputs(length, length, size=32)
    segments = row_segments(length)
    same = (segments[:, :, None] == segments[:, None])[:, None]
    interpreted.setattr(flash, "cudnn_fits", lambda *_, **__: True)

    def attend(q, k, v):
        return attention(q, k, v, segments=segments, is_causal=True, implementation=name)

    same_values_and_gradients(q, k, v, attend, same & np.tri(length, dtype=bool))


@pytest.mark.parametrize("name", ["xla", "blocks", "splash"])
@pytest.mark.parametrize(
    ("size", "is_causal", "beside"),
    [(48, True, "segments"), (2**30, True, "segments"), (130, True, "mask"), (48, False, None)],
)
def test_a_token_sees_its_window(name, size, is_causal, beside, interpreted):
    """Of layers that see 48 tokens, 130 or all; alone, in rows of texts, and with masked keys."""
    length = 256
    q, k, v = inputs(length, length, size=32)
    segments = row_segments(length)
    keys = np.arange(length) < np.array([[length], [200]])
    window = Window(jnp.int32(size), (48, 130, 2**30))
    distance = np.arange(length)[:, None] - np.arange(length)
    mask = (distance < size if is_causal else abs(distance) < size)[None, None]
    mask = mask & (distance >= 0) if is_causal else mask
    options = {"window": window, "is_causal": is_causal, "implementation": name}
    if beside == "segments":
        mask = mask & (segments[:, :, None] == segments[:, None])[:, None]
        options["segments"] = segments
    elif beside == "mask":  # what is masked has no meaning
        mask = mask & keys[:, None, None] | (distance == 0)
        options["mask"] = keys[:, None, None]
    shown = keys[:, :, None, None] if beside == "mask" else True

    def attend(q, k, v):
        return jnp.where(shown, attention(q, k, v, **options), attention(q, k, v, mask=mask))

    same_values_and_gradients(q, k, v, attend, mask)


@pytest.mark.parametrize("name", ["xla", "blocks", "splash", "cudnn"])
def test_sinks_are_in_the_softmax_alone(name, interpreted):
    """Values and gradients beside a column of scores that has no value; with a window."""
    length = 256
    q, k, v = inputs(length, length, size=32)
    sinks = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)
    window = Window(jnp.int32(48), (48, 2**30))
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < 48)
    interpreted.setattr(flash, "cudnn_fits", lambda *_, **__: True)

    def attend(q, k, v, sinks):
        options = {"window": window, "is_causal": True, "implementation": name}
        return attention(q, k, v, sinks=sinks, **options)

    def wanted(q, k, v, sinks):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5
        scores = jnp.where(seen, scores, -jnp.inf)
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        shares = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", shares[..., :-1], v)

    same_gradients(attend, wanted, q, k, v, sinks)


@pytest.mark.parametrize(
    ("platform", "what", "kernel"),
    [
        ("tpu", "window", "splash_mha"),
        ("gpu", "window", "dot_product_attention_fwd"),
        ("gpu", "segments", "mha_forward"),
    ],
)
def test_no_mask_of_all_pairs_is_made(platform, what, kernel):
    """In the programs of long rows; a window has a kernel for each of its sizes."""
    q, k, v = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in inputs(2048, 2048, size=128))
    value = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    if what == "window":
        value = Window(jax.ShapeDtypeStruct((), jnp.int32), (512, 2**30))

    def attend(q, k, v, value):
        return attention(q, k, v, is_causal=True, implementation="auto", **{what: value})

    with on_a(platform):
        jaxpr = str(jax.make_jaxpr(attend)(q, k, v, value))
    assert jaxpr.count(kernel) >= (2 if what == "window" else 1)
    assert "2048,2048" not in jaxpr


def test_splash_skips_what_is_outside_of_a_window():
    """Of 8 blocks of 512 keys a query's window of 512 reaches into two, forward and backward."""
    q, k, v = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in inputs(4096, 4096, size=128))
    options = {"key_mask": None, "is_causal": True, "mesh": None}

    def flops(window):
        def loss(q, k, v):
            return splash.splash_attention(q, k, v, window, **options).astype(jnp.float32).sum()

        return jaxpr_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v).jaxpr)

    assert flops(512) == pytest.approx(flops(4096) / 4, rel=1e-3)
    assert flops(None) == pytest.approx(
        flops(4096) * 7 / 9, rel=1e-3
    )  # backward one kernel, not two


def traced_for_gpu(implementation, mask, *, kind=jnp.bfloat16, length=8, **sizes):
    """Causal attention, traced on a mesh of one GPU, which need not be there."""
    shapes = [jax.ShapeDtypeStruct(x.shape, kind) for x in inputs(length, 32, **sizes)]
    attend = functools.partial(attention, is_causal=True, implementation=implementation)
    with on_a("gpu"):
        return jax.jit(attend).trace(*shapes, mask=mask)


def lowered_for_gpu(*arguments, **options):
    return traced_for_gpu(*arguments, **options).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_cudnn_computes_attention_on_a_gpu(rows):
    """Its kernel, with the mask added for all heads at once; not run here."""
    mask = rows and jax.ShapeDtypeStruct((rows, 1, 1, 32), bool)
    text = lowered_for_gpu("cudnn", mask)
    assert "__cudnn$fmhaScaleBiasSoftmax" in text
    assert f"tensor<{rows or 1}x1x8x32xbf16>" in text  # causal as well: 8 queries after 24 keys
    assert "dot_general" not in text


@pytest.mark.parametrize("case", [{"kind": jnp.float32}, {"size": 12}, {"size": 136}])
def test_cudnn_is_not_asked_for_what_it_does_not_take(case):
    assert "__cudnn" not in lowered_for_gpu("cudnn", None, **case)


def test_a_mask_of_odd_lengths_has_no_gradient_with_cudnn():
    mask = jax.ShapeDtypeStruct((1, 1, 1, 32), bool)
    assert "__cudnn" not in lowered_for_gpu("cudnn", mask, length=7)


@pytest.mark.parametrize("segmented", [False, True])
def test_flops_of_attention_on_a_gpu_are_those_of_its_products(segmented):
    """Forward and backward; the products of blocks are counted one by one."""
    q, k, v = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in inputs(256, 256, size=16))
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32) if segmented else None
    flops = []
    for name in ("cudnn", "blocks"):

        def loss(q, k, v, segments, name=name):
            options = {"segments": segments, "is_causal": True, "implementation": name}
            return attention(q, k, v, **options).astype(jnp.float32).sum()

        with on_a("gpu"):
            gradient = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))
            jaxpr = gradient(q, k, v, segments).jaxpr
        flops.append(jaxpr_flops(jaxpr, recomputed=False))
    assert flops[0] == flops[1] == 3 * 2 * 2 * (2 * 256 * 256 * 4 * 16)


def test_without_a_gpu_cudnn_is_blocks():
    q, k, v = inputs(7, 30)
    got = ATTENTION(q, k, v, is_causal=True, implementation="cudnn")
    np.testing.assert_allclose(got, plain(q, k, v), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "capability", "wanted"),
    [
        ("tpu", None, "splash"),
        ("gpu", "9.0", "cudnn"),
        ("gpu", "8.0", "cudnn"),
        ("gpu", "7.5", "blocks"),
        ("gpu", "gfx90a", "blocks"),
        ("cpu", None, "blocks"),
    ],
)
def test_the_device_decides(platform, capability, wanted):
    device = SimpleNamespace(platform=platform)
    if capability is not None:
        device.compute_capability = capability
    assert flash.implementation_for(device) == wanted


def test_no_array_has_the_size_of_all_scores():
    """The memory of a long prompt is linear: 16 times the length takes about 16 times as much."""

    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(length, length)]
        attend = functools.partial(attention, is_causal=True, implementation="blocks")
        memory = jax.jit(attend).lower(*shapes).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(16384) < 20 * temporaries(1024)


BFLOAT = jnp.bfloat16


@pytest.mark.parametrize(
    ("platform", "length", "case", "wanted"),
    [
        ("tpu", 4096, {}, "splash"),
        ("tpu", 4096, {"segmented": True}, "splash"),
        ("tpu", 4096, {"segmented": True, "capped": True}, "splash"),
        ("tpu", 4100, {}, "blocks"),  # no multiple of 128
        ("tpu", 4096, {"drops": True}, "xla"),
        ("tpu", 4096, {"mask": (2, 1, 4096, 4096)}, "blocks"),
        ("tpu", 4096, {"windowed": True, "segmented": True, "capped": True}, "splash"),
        ("tpu", 4096, {"dtype": jnp.float32}, "blocks"),
        ("tpu", 200, {"is_causal": False}, "fused"),
        ("tpu", 4096, {"is_causal": False, "mask": (2, 1, 1, 4096)}, "splash"),  # of a picture
        ("gpu", 4096, {}, "cudnn"),
        ("gpu", 4096, {"segmented": True}, "cudnn"),
        ("gpu", 4100, {"segmented": True}, "blocks"),  # no multiple of 128
        ("gpu", 4096, {"windowed": True}, "cudnn"),
        ("gpu", 4096, {"windowed": True, "is_causal": False}, "blocks"),
        ("gpu", 4096, {"windowed": True, "segmented": True}, "blocks"),
        ("gpu", 4096, {"capped": True}, "blocks"),
        ("gpu", 4096, {"sinks": True}, "blocks"),
        ("tpu", 4096, {"sinks": True, "windowed": True}, "splash"),
        ("tpu", 200, {"sinks": True}, "xla"),  # "fused" without
        ("gpu", 77, {}, "xla"),
        ("cpu", 1024, {}, "xla"),
        ("cpu", 4096, {"segmented": True}, "blocks"),
        ("cpu", 4096, {"mask": (2, 32, 4096, 4096)}, "xla"),  # a mask of each head
    ],
)
def test_auto_goes_by_device_and_shape(platform, length, case, wanted):
    case = {"is_causal": True, "drops": False, "mask": None, "dtype": BFLOAT, **case}
    dtype, mask = case.pop("dtype"), case.pop("mask")
    mask = mask and jax.ShapeDtypeStruct(mask, bool)
    q = k = jax.ShapeDtypeStruct((2, length, 32, 128), dtype)
    with on_a(platform):
        assert flash.auto_implementation(q, k, mask, **case) == wanted


@pytest.mark.parametrize("name", ["blocks", "auto"])
def test_the_backward_pass_makes_no_array_of_all_scores(name):
    q = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(q, k, v, segments):
        return attention(q, k, v, segments=segments, is_causal=True, implementation=name).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    memory = gradient.lower(q, q, q, segments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2 * 4096 * 4096  # the scores of all heads, float32


def test_an_unknown_implementation_is_named():
    q, k, v = inputs(2, 2, kv_heads=4)
    with pytest.raises(UserError, match="attention implementation is 'flash': expected one of"):
        attention(q, k, v, implementation="flash")
