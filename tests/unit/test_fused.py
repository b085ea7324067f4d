"""The TPU's kernels of encoders and of VLP's beams, in interpret mode, against the plain ones.

That they compile for TPUs is in tests/sharding/test_training_programs.py, that meshes split them in
tests/mesh/test_fused_on_mesh.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from mmqa_jax.core.mesh import MESH_AXES
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.models.attention import fused
from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.common import array_layout, layers
from mmqa_jax.models.two_towers.config import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.models.vlp import network as vlp
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from tests.drawn_weights import drawn as of_numpy

pytestmark = pytest.mark.slow

ASKING = (layers, layers.flash, array_layout, vlp)  # for the platform
KEY = jax.random.key(0)
SIXTEEN_BITS = 2**-7  # relative: a rounding of bfloat16, twice


# Of NumPy: each shape that JAX draws is a program.


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed).astype(jnp.bfloat16)


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 40, shape, np.int32)


def plain(q, k, v, *, mask, is_causal, rate):
    """As `layers.attention`, in float32, with the kernel's choice of what is dropped."""
    q, k, v = (x.astype(jnp.float32).swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5
    if is_causal:
        scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores, -1e30)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    if rate:
        kept = round((1 - rate) * 65536)
        rows, heads = fused.drop_seeds(KEY, *scores.shape[:2])
        seeds = rows[:, None, None, None], heads[:, None, None]
        bits = fused.drop_bits(*seeds, *scores.shape[2:])
        weights = jnp.where(bits < kept, weights * (65536 / kept), 0)
    return (weights @ v).swapaxes(1, 2)


def close(got, want) -> None:
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.abs(got - want).max() <= SIXTEEN_BITS * np.abs(want).max()


MASKS = {"none": None, "one": (1, 1, 1), "keys": (3, 1, 1), "rows": (3, 1, 0)}


@pytest.mark.parametrize(
    ("lengths", "heads", "size", "mask", "is_causal", "rate"),
    [
        ((13, 13), 4, 64, "rows", False, 0.1),
        ((13, 13), 4, 32, "keys", True, 0.1),
        ((1, 40), 2, 64, "keys", False, 0.0),
        ((16, 24), 2, 128, "one", False, 0.3),
        ((16, 256), 2, 64, "keys", False, 0.1),  # places share counters
    ],
)
def test_attention_and_its_gradients(lengths, heads, size, mask, is_causal, rate):
    length, columns = lengths
    q, k, v = (drawn(3, n, heads, size, seed=n) for n in (length, columns, columns + 1000))
    v = v[:, :columns]
    seen = None
    if MASKS[mask]:
        shape = (*MASKS[mask][:2], MASKS[mask][2] or length, columns)
        seen = np.random.default_rng(0).random(shape) < 0.6
        seen[..., 0] = True
    given = drawn(*q.shape, seed=7)
    same = {"mask": seen, "is_causal": is_causal}

    biases = [normal(heads * size, seed=n) / 4 for n in range(3)]

    def added(q, k, v, *biases):
        pairs = zip((q, k, v), biases, strict=True)
        return [x + bias.astype(x.dtype).reshape(x.shape[2:]) for x, bias in pairs]

    @jax.jit
    def theirs(*inputs):
        want, back = jax.vjp(functools.partial(plain, rate=rate, **same), *added(*inputs))
        gradients = [x.astype(np.float32) for x in back(given.astype(np.float32))]
        return want, *gradients, *(x.sum((0, 1)).reshape(-1) for x in gradients)

    with jax.default_matmul_precision("highest"):
        wanted = theirs(q, k, v, *biases)
    drop = {"dropout_rate": rate, "dropout_key": KEY if rate else None}
    kernel = functools.partial(fused.fused_attention, interpret=True, **drop, **same)
    assert fused.fused_fits(q, k, seen, is_causal)

    @jax.jit
    def ours(*inputs):
        def attend(q, k, v, *biases):
            return kernel(*added(q, k, v, *jax.lax.stop_gradient(biases)), biases=biases)

        got, back = jax.vjp(attend, *inputs)
        return got, *back(given)

    *found, of_query, of_key, of_value = ours(q, k, v, *biases)
    *expected, for_query, for_key, for_value = wanted
    for got, want in zip(
        (*found, of_query, of_value), (*expected, for_query, for_value), strict=True
    ):
        close(got, want)
    # Softmax does not see a bias of keys: what is left is rounding.
    assert np.abs(of_key - for_key).max() <= SIXTEEN_BITS * np.abs(found[2]).sum((0, 1)).max()


def test_a_row_that_sees_nothing_is_the_mean_of_the_values():
    q, k, v = (drawn(2, 8, 2, 64, seed=n) for n in range(3))
    kernel = functools.partial(fused.fused_attention, interpret=True)
    got = jax.jit(kernel)(q, k, v, mask=np.zeros((2, 1, 8, 8), bool))
    close(got, np.broadcast_to(v.astype(np.float32).mean(1, keepdims=True), v.shape))


def of_heads(key, columns=64):
    rows, heads = fused.drop_seeds(key, 4, 3)
    return fused.drop_bits(rows[:, None, None, None], heads[:, None, None], 64, columns)


def of_wide_heads(key):
    return of_heads(key, 256)


def of_arrays(key):
    return jnp.stack([fused.drop_bits_of(k, (4, 1024)) for k in jax.random.split(key, 3)])


@pytest.mark.parametrize("draw", [of_heads, of_wide_heads, of_arrays])
def test_what_is_dropped_is_uniform_and_independent(draw):
    bits = np.asarray(jax.jit(draw)(KEY)).reshape(12, -1)
    assert bits.min() >= 0
    assert bits.max() < 65536
    counts = np.bincount(bits.ravel() // 4096, minlength=16)
    expected = bits.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 40  # 15 degrees of freedom: p < 0.001
    dropped = bits < 0.1 * 65536
    pairs = np.corrcoef(np.concatenate([np.roll(dropped, n, axis=1) for n in (0, 1, 128)]))
    assert np.abs(pairs - np.eye(len(pairs))).max() < 5 / bits.shape[1] ** 0.5
    assert len(np.unique(bits, axis=0)) == 12


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": jnp.float32},
        {"size": 48},
        {"heads": 3},  # of 64 columns: half a register is left
        {"length": 1500},
        {"is_causal": True, "columns": 24},
        {"mask": (1, 2, 1, 16)},  # of heads
    ],
)
def test_what_does_not_fit_is_left_to_xla(case):
    sizes = {"length": 16, "columns": case.get("length", 16), "heads": 2, "size": 64} | case
    q, k = (
        jax.ShapeDtypeStruct((1, n, sizes["heads"], sizes["size"]), case.get("dtype", jnp.bfloat16))
        for n in (sizes["length"], sizes["columns"])
    )
    mask = jax.ShapeDtypeStruct(case["mask"], bool) if "mask" in case else None
    assert not fused.fused_fits(q, k, mask, sizes.get("is_causal", False))
    assert fused.fused_fits(*(drawn(1, 16, 2, 64),) * 2, None, False)


@pytest.mark.parametrize(("beams", "steps", "length", "size"), [(5, 4, 13, 64), (1, 2, 16, 32)])
def test_beams_over_cached_columns(beams, steps, length, size):
    heads, batch, rows = 4, 2, 2 * beams
    q, k, v = (drawn(batch, rows, heads, size, seed=n) for n in range(3))
    caches = [drawn(2, batch, length, heads * size, seed=n) for n in (3, 4)]
    caches += [drawn(2, batch, steps * beams, heads * size, seed=n) for n in (5, 6)]
    rng = np.random.default_rng(0)
    there = rng.random((batch, length)) < 0.7
    own = np.arange(steps * beams + rows) - steps * beams == np.arange(rows)[:, None]
    seen = (rng.random((batch, rows, steps * beams + rows)) < 0.5) | own
    kernel = jax.jit(functools.partial(fused.fused_prefix_attention, interpret=True))
    got = kernel(np.int32(1), q, tuple(caches[:2]), there, tuple(caches[2:]), (k, v), seen)

    @jax.jit
    def plainly(*arrays):
        q, k, v, *caches = (x.astype(jnp.float32) for x in arrays)
        prefix_k, prefix_v, *past = (x[1].reshape(batch, -1, heads, size) for x in caches)
        columns = [jnp.concatenate(pair, axis=1) for pair in zip(past, (k, v), strict=True)]
        return layers.prefix_attention(q, prefix_k, prefix_v, there, *columns, mask=seen[:, None])

    close(got, plainly(q, k, v, *caches))


@pytest.fixture
def as_on_tpu(monkeypatch):
    """Models take the TPU's forms; kernels are interpreted. What was called."""
    called = []

    def interpreted(kernel):
        def call(*arguments, **options):
            called.append(kernel.__name__)
            return kernel(*arguments, interpret=True, **options)

        return call

    for module, name in ((fused, "fused_attention"), (fused, "fused_prefix_attention")):
        monkeypatch.setattr(module, name, interpreted(getattr(module, name)))
    for module in ASKING:
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    return called


def both(monkeypatch, as_on_tpu, run):
    """What `run` gives in the CPU's form and in the TPU's."""
    with monkeypatch.context() as on_cpu:
        for module in ASKING:
            on_cpu.setattr(module, "platform", lambda: "cpu")
        plainly = jax.jit(lambda: run())()
        assert not as_on_tpu
    return plainly, jax.jit(lambda: run())()  # not what was traced before


def test_clips_towers(monkeypatch, as_on_tpu):
    """17 patches and 9 tokens, padded to whole registers; vectors, and gradients of the first."""
    sizes = {"width": 128, "layers": 1, "heads": 2, "mlp_width": 64, "embed_dim": 32}
    sizes |= {"dtype": "bfloat16"}
    config = CLIPConfig(
        VisionConfig(image_size=16, patch_size=4, **sizes),
        TextConfig(vocab_size=50, context=9, **sizes),
    )
    graphdef, state = nnx.split(of_numpy(lambda: TwoTowers(config, rngs=nnx.Rngs())))
    pixels = normal(3, 16, 16, 3)
    ids = tokens(3, 9)
    ids[:, 5] = 49
    mask = np.arange(9) < np.array([9, 6, 7])[:, None]

    def run():
        def image(vision):
            return nnx.merge(graphdef, nnx.State({**state, "vision": vision})).encode_image(pixels)

        vector, back = jax.vjp(image, state["vision"])
        vectors = jnp.stack([vector, nnx.merge(graphdef, state).encode_text(ids, mask)])
        of_layers = back(normal(3, 32))[0]["layers"]
        names = ("q", "kernel"), ("q", "bias"), ("v", "bias"), ("out", "bias")
        return vectors, *(of_layers[linear][what][...] for linear, what in names)

    plainly, fast = both(monkeypatch, as_on_tpu, run)
    assert as_on_tpu
    for theirs, ours in zip(plainly, fast, strict=True):
        assert np.abs(ours - theirs).max() <= 0.03 * np.abs(theirs).max()


def test_berts_states(monkeypatch, as_on_tpu):
    config = BertConfig(vocab_size=50, hidden=128, layers=2, heads=2, mlp=64, dtype="bfloat16")
    model = of_numpy(lambda: Bert(config, rngs=nnx.Rngs()))
    ids = tokens(3, 16)
    mask = np.arange(16) < np.array([16, 3, 9])[:, None]
    plainly, fast = both(monkeypatch, as_on_tpu, lambda: model(ids, mask).astype(jnp.float32))
    assert as_on_tpu == ["fused_attention"]  # once: layers are a loop
    assert np.abs(fast - plainly).max() <= 0.03 * np.abs(plainly).max()


def test_a_gradient_of_a_bias_is_summed_in_float32(as_on_tpu):
    given = drawn(2, 2048, 4)
    linear = layers.Linear(8, 4, ("embed", "mlp"), rngs=nnx.Rngs(0))

    def loss(linear):
        return (linear(drawn(2, 2048, 8)) * given).sum(dtype=jnp.float32)

    wanted = given.astype(np.float64).sum((0, 1))
    np.testing.assert_allclose(nnx.grad(loss)(linear).bias[...], wanted, rtol=1e-5)


@pytest.mark.parametrize(("remat", "kernels"), [("none", 1), ("full", 2)])
def test_berts_gradient(as_on_tpu, remat, kernels):
    """With dropout: what a loop keeps, draws and computes again is what the first pass had."""
    sizes = {"vocab_size": 50, "hidden": 128, "layers": 3, "heads": 2, "mlp": 64}
    mask = np.arange(16) < np.array([16, 3, 9])[:, None]
    given = normal(3, 16, 128)

    def gradient(**changes):
        config = BertConfig(**sizes, **changes, dtype="bfloat16")
        graphdef, state = nnx.split(of_numpy(lambda: Bert(config, rngs=nnx.Rngs())))

        def loss(state):
            hidden = nnx.merge(graphdef, state)(tokens(3, 16), mask, dropout_key=KEY)
            return (hidden * given).sum(dtype=jnp.float32)

        found = jax.jit(jax.grad(loss)).trace(state)
        gradients = found.lower().compile()(state)
        del gradients["layers"]["key"]["bias"]  # it is 0: softmax does not see such a bias
        return str(found.jaxpr), gradients

    program, ours = gradient(remat=remat, unroll=1)
    _, theirs = gradient(unroll=True)  # keeps everything
    assert len(re.findall(r"name=fused_attention\b", program)) == kernels
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max()


def test_vlps_beams(monkeypatch, as_on_tpu):
    config = VLPConfig(
        BertConfig(
            vocab_size=40, hidden=128, layers=2, heads=2, mlp=64, types=6, eps=1e-5,
            positions=64, dtype="bfloat16", init_stddev=0.1,
        ),
        region_features=5, region_positions=4, visual_hidden=(),
    )  # fmt: skip
    graphdef, state = nnx.split(of_numpy(lambda: VLP(config, rngs=nnx.Rngs()), 1, stddev=0.1))
    batch, length = 3, 16
    inputs = VLPInputs(
        tokens(batch, length),
        np.full((batch, length), 4),
        np.broadcast_to(np.arange(length), (batch, length)),
        np.arange(length) < np.array([16, 9, 12])[:, None],
        np.zeros((batch, length), bool),
        normal(batch, 2, 5),
        normal(batch, 2, 4),
    )

    def run():
        search = beam_search.__wrapped__
        return search(graphdef, state, inputs, mask_id=4, sep_id=3, num_beams=3, max_new_tokens=4)

    plainly, fast = both(monkeypatch, as_on_tpu, run)
    assert set(as_on_tpu) == {"fused_attention", "fused_prefix_attention"}
    # Sums of four log-probabilities of about -3.7.
    np.testing.assert_allclose(fast.scores[:, 0], plainly.scores[:, 0], rtol=0, atol=0.1)


def test_the_platforms_form_is_chosen_where_it_is_traced():
    """A TPU's program has the kernel in 16 bits alone; a CPU's and a GPU's have none."""
    found = {}
    for name, dtype in (("tpu", "bfloat16"), ("tpu", "float32"), ("cpu", "bfloat16")):
        device = AbstractDevice(f"some {name}", None, name)
        mesh = AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)
        x = jax.ShapeDtypeStruct((2, 16, 2, 64), dtype)
        attend = functools.partial(layers.attention, implementation="auto")
        with jax.sharding.use_abstract_mesh(mesh):
            found[name, dtype] = "pallas_call" in str(jax.make_jaxpr(attend)(x, x, x))
    assert found == {
        ("tpu", "bfloat16"): True,
        ("tpu", "float32"): False,
        ("cpu", "bfloat16"): False,
    }
