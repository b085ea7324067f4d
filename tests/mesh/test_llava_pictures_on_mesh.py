"""A LLaVA's pictures on four devices against one."""

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.two_towers.config import VisionConfig
from tests.drawn_weights import drawn


def test_pictures_are_split_and_answers_those_of_one_device():
    vision = VisionConfig(
        image_size=12, patch_size=4, width=24, layers=2, heads=2, mlp_width=20, embed_dim=16
    )
    llama = LlamaConfig(
        vocab_size=60, hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, positions=96, unroll=1
    )
    config = LlavaConfig(vision, llama, image_token=-200)
    sizes = EngineConfig(slots=4, length=48, buckets=(16,), prefill_tokens=64)
    rng = np.random.default_rng(0)
    shown = rng.integers(0, 256, (7, 12, 12, 3)).astype(np.uint8)
    requests = [
        Request(
            n,
            [n, -200, *rng.integers(0, 60, n), *[-200] * (n % 2)],
            4,
            logprobs=True,
            images=[shown[n % 7], shown[3]][: 1 + n % 2],
        )
        for n in range(10)
    ]
    found = []
    for shape, devices in (
        ({"data": 1}, jax.devices()[:1]),
        ({"data": 2, "tensor": 2}, jax.devices()[:4]),
    ):
        mesh = make_mesh(shape, devices=devices)
        model = drawn(lambda: Llava(config, rngs=nnx.Rngs()), 3, mesh=mesh)
        engine = Engine(model, config=sizes, mesh=mesh)
        running = engine.generate(requests)
        results = [next(running)]
        assert len(engine._pictures) > 0  # one is shown again by requests that wait
        for features in engine._pictures._resident.values():
            assert features.addressable_shards[0].data.shape == (9, 32 // mesh.size)
        for leaf in jax.tree.leaves(engine._pictures._state):
            assert leaf.sharding.is_fully_replicated
        results += running
        assert engine.throughput.pictures == 7
        found.append({one.id: one.candidates[0] for one in results})
    for n, want in found[0].items():
        assert found[1][n].tokens == want.tokens
        np.testing.assert_allclose(found[1][n].logprobs, want.logprobs, rtol=0, atol=1e-4)
