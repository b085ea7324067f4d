"""The generation engine on four fake CPU devices against one.

The device count is fixed when JAX starts, so the check runs in a subprocess: this file, called as
a script.
"""

from __future__ import annotations

CACHES = ("float32", "int8")


def test_on_four_devices(run_on_devices):
    done = run_on_devices(4, "test_engine_mesh.py")
    assert done.split() == [*CACHES, "done"]


def main():
    import dataclasses

    import jax
    import numpy as np
    from flax import nnx

    from mmqa_jax.core.mesh import init_sharded, make_mesh
    from mmqa_jax.decoding.engine import Engine
    from mmqa_jax.decoding.requests import Request, Scoring
    from mmqa_jax.decoding.slot_runner import EngineConfig
    from mmqa_jax.models.llama import Llama
    from mmqa_jax.models.llama_config import LlamaConfig

    model = LlamaConfig(
        vocab_size=60,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp=48,
        positions=128,
        init_stddev=0.4,
        unroll=1,
    )
    rng = np.random.default_rng(0)
    head = rng.integers(0, 60, 40)
    requests = [
        Request(n, (*head[: n % 3 * 20], *rng.integers(0, 60, 5 + 4 * n)), 8, logprobs=True)
        for n in range(9)
    ]
    scorings = [Scoring(n, head, [rng.integers(0, 60, 4) for _ in range(3)]) for n in range(2)]
    mesh = make_mesh({"data": 2, "tensor": 2})
    repeated = make_mesh({"tensor": 4})  # more than key heads: each is there twice
    alone = make_mesh({"data": 1}, devices=jax.devices()[:1])
    for kind in CACHES:
        sizes = EngineConfig(
            slots=4,
            length=96,
            buckets=(8, 32),
            prefill_tokens=64,
            block=32,
            decode_block=96,
            cache_dtype=kind,
        )
        found = []
        for where, scan in ((alone, False), (mesh, False), (mesh, True), (repeated, True)):
            if scan and kind == "int8":
                continue  # it reads a chunk's own keys unrounded, see test_scanned_cache.py
            sharded = init_sharded(lambda: Llama(model, rngs=nnx.Rngs(3)), where)
            sizes = dataclasses.replace(sizes, scan_layers=scan)
            engine = Engine(sharded, config=sizes, mesh=where)
            results = {result.id: result.candidates[0] for result in engine.generate(requests)}
            scores = {result.id: result.scores for result in engine.score(scorings)}
            found.append((results, scores))
            if where is not alone:  # rows over `data`, heads over `tensor`
                for array in jax.tree.leaves(engine.cache):
                    shard = array.addressable_shards[0].data.shape
                    shard, whole = (shard[1:], array.shape[1:]) if scan else (shard, array.shape)
                    assert shard == (4 // where.shape["data"], 1, *whole[2:]), shard
        # A rounding that falls to the other side moves an int8 cache by a step.
        most = 1e-4 if kind == "float32" else 0.02
        want, want_scores = found[0]
        for got, got_scores in found[1:]:
            for n in want:
                assert got[n].tokens == want[n].tokens
                np.testing.assert_allclose(got[n].logprobs, want[n].logprobs, rtol=0, atol=most)
            for n in want_scores:
                for one, other in zip(got_scores[n], want_scores[n], strict=True):
                    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=most)
        print(kind)
    check_beams(model, alone, mesh)
    check_ragged_attention(mesh)
    check_ragged_triton(model, (alone, mesh, make_mesh({"data": 4}), repeated))
    print("done")


def check_beams(model, alone, mesh):
    """Prompts of a batch are split over `data`, of the last batch one is padding."""
    import numpy as np
    from flax import nnx

    from mmqa_jax.core.mesh import RowPlacement, init_sharded
    from mmqa_jax.decoding.engine import Engine
    from mmqa_jax.decoding.requests import Request
    from mmqa_jax.decoding.slot_runner import EngineConfig
    from mmqa_jax.models.llama import Llama

    sizes = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=64, block=32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, 5 + 9 * n) for n in range(3)]
    requests = [Request(n, prompt, 6, beams=2, n=2) for n, prompt in enumerate(prompts)]
    found, held, copied = [], [], RowPlacement.copied

    def recorded(placement, result):
        held.append(result.tokens.addressable_shards[0].data.shape[0])
        return copied(placement, result)

    RowPlacement.copied = recorded
    for where in (alone, mesh):
        sharded = init_sharded(lambda: Llama(model, rngs=nnx.Rngs(3)), where)
        engine = Engine(sharded, end_ids=[1], config=sizes, mesh=where)
        found.append({result.id: result.candidates for result in engine.generate(requests)})
    assert held == [2, 2, 1, 1], held
    for n, want in found[0].items():
        for got, one in zip(found[1][n], want, strict=True):
            assert got.tokens == one.tokens
            np.testing.assert_allclose(got.total, one.total, rtol=0, atol=1e-4)


def check_ragged_attention(mesh):
    """The TPU's kernel, interpreted, on rows over `data` and heads over `tensor`."""
    import functools

    import jax
    import numpy as np

    from mmqa_jax.decoding.ragged_attention import attend_on
    from mmqa_jax.decoding.scanned_cache import ScannedCache, _specs

    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, 3, 4, 2, 256, 64)).astype(np.float32)
    q, k, v = (rng.normal(size=(4, 1, n, 64)).astype(np.float32) for n in (4, 2, 2))
    cache = ScannedCache(key, value, None, None)
    row = (np.int32([0, 255, 128, 7]), np.array([True, True, False, True]), np.ones((4, 32)))
    attend = functools.partial(attend_on, cache, *row, read=256, interpret=True)

    def on(mesh, specs):
        def attended(*arguments):
            return attend(mesh=mesh, specs=specs)(*arguments)

        return jax.tree.leaves(jax.jit(attended)(q, k, v, cache, np.int32(1)))

    for got, want in zip(on(mesh, _specs(cache, mesh)), on(None, None), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def check_ragged_triton(config, meshes):
    """The GPU's kernels, interpreted: a chunk of prompts and a step on meshes that split rows,
    heads, or both."""
    import functools

    import jax
    import numpy as np
    from flax import nnx

    from mmqa_jax.core.mesh import init_sharded
    from mmqa_jax.decoding import kv_cache, ragged_triton
    from mmqa_jax.decoding.key_heads import repeat_key_heads
    from mmqa_jax.models.llama import Llama, unstack_layers

    for name in ("attend_to_own", "attend_in_place"):
        interpreted = functools.partial(getattr(ragged_triton, name), interpret=True)
        setattr(ragged_triton, name, interpreted)
    found = {}
    for mesh, ways in zip(meshes, (("blocks", "ragged"), *[("ragged",)] * 3), strict=True):
        model = init_sharded(lambda: Llama(config, rngs=nnx.Rngs(3)), mesh)
        repeat_key_heads(model, mesh)
        unstack_layers(model)
        cache = kv_cache.empty(model.config, 4, 64, "float32", mesh)
        tokens = np.random.default_rng(0).normal(size=(4, 17, config.hidden)).astype(np.float32)
        for way in ways:
            options = {"rows": np.arange(4), "block": 64, "mesh": mesh, "implementation": way}
            with jax.set_mesh(mesh):
                starts = np.int32([0, 47, 32, 7])
                own = {"starts": starts, "ends": starts + 16, **options}
                first, cache = kv_cache.forward(model, tokens[:, :16], cache, **own)
                own |= {"starts": starts + 16, "ends": starts + 17, "all_rows": True}
                second, cache = kv_cache.forward(model, tokens[:, 16:], cache, **own)
            found[mesh, way] = np.concatenate([first, second], axis=1)
    first, *others = found.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-5)


if __name__ == "__main__":
    main()
