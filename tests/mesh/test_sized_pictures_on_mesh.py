"""Pictures of several sizes on four devices against one: of LLaVA-OneVision, Mistral 3 and LFM2-VL,
and the tiles of an InternVL and a Llama 4, which are pictures of one size."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.intern_vit import InternVisionConfig
from mmqa_jax.models.llava.llama4_vision import Llama4VisionConfig
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.llava.pixtral import PixtralVisionConfig
from mmqa_jax.models.llava.tiles import CanvasTiles, RatioTiles, UnitTiles
from mmqa_jax.models.mistral3.network import Mistral3, Mistral3Config
from mmqa_jax.models.onevision.network import Onevision, OnevisionConfig, TiledPicture
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from tests.drawn_weights import drawn

IMAGE = 59


LLAMA = LlamaConfig(
    vocab_size=60, hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, positions=96, unroll=1
)


def onevision(rng: np.random.Generator) -> tuple[Any, Any, list[Any]]:
    vision = SiglipVisionConfig(8, 4, width=24, layers=2, heads=2, mlp_width=20, head=False)
    config = OnevisionConfig(
        vision, LLAMA, image_token=IMAGE, video_token=58, resolutions=((8, 8), (8, 16), (16, 8))
    )
    sizes = ((3, (9, 17)), (2, (8, 8)), (3, (40, 13)), (1, (9, 17)), (1, (5, 5)))
    shown = [
        TiledPicture(rng.integers(0, 256, (tiles, 8, 8, 3), np.uint8), size)
        for tiles, size in sizes
    ]
    return Onevision, config, shown


def mistral3(rng: np.random.Generator) -> tuple[Any, Any, list[Any]]:
    vision = PixtralVisionConfig(32, 4, width=24, layers=2, heads=2, mlp_width=20)
    config = Mistral3Config(vision, LLAMA, image_token=IMAGE)
    sizes = ((8, 16), (16, 8), (8, 8), (24, 8), (8, 24))
    return Mistral3, config, [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def internvl(rng: np.random.Generator) -> tuple[Any, Any, list[Any]]:
    vision = InternVisionConfig(16, 4, width=24, layers=2, heads=2, mlp_width=20)
    config = LlavaConfig(
        vision,
        LLAMA,
        feature_layer=-1,
        image_token=IMAGE,
        family="internvl",
        connector="normed_shuffle",
        merge=2,
        split=RatioTiles(),
    )
    return Llava, config, [rng.integers(0, 256, (16, 16, 3), np.uint8) for _ in range(5)]


def lfm2_vl(rng: np.random.Generator) -> tuple[Any, Any, list[Any]]:
    vision = SiglipVisionConfig(
        16, 4, width=24, layers=2, heads=2, mlp_width=20, flexible=True, head=False
    )
    config = LlavaConfig(
        vision,
        LLAMA,
        feature_layer=-1,
        select="full",
        projector_width=20,
        projector_normed=True,
        image_token=IMAGE,
        family="lfm2_vl",
        connector="units",
        merge=2,
        normed=True,
        split=UnitTiles(side=16, least_tokens=1, most_tokens=4),
    )
    sizes = ((8, 16), (16, 8), (8, 8), (16, 16), (8, 24))
    return Llava, config, [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def llama4(rng: np.random.Generator) -> tuple[Any, Any, list[Any]]:
    vision = Llama4VisionConfig(16, 4, width=24, layers=2, heads=2, mlp_width=96)
    config = LlavaConfig(
        vision,
        LLAMA,
        feature_layer=-1,
        select="leading",
        projector_width=20,
        projector_bias=False,
        image_token=IMAGE,
        family="llama4",
        connector="adapter",
        merge=2,
        normed=True,
        split=CanvasTiles(),
    )
    return Llava, config, [rng.integers(0, 256, (16, 16, 3), np.uint8) for _ in range(5)]


@pytest.mark.parametrize("make", [onevision, mistral3, internvl, lfm2_vl, llama4])
def test_answers_are_those_of_one_device(make):
    sizes = EngineConfig(slots=4, length=64, buckets=(16,), prefill_tokens=64)
    kind, config, shown = make(np.random.default_rng(0))
    used = [[0], [1], [2], [3, 4], [0]]
    requests = [
        Request(n, [n, *[IMAGE] * len(one), 7, n], 4, logprobs=True, images=[shown[k] for k in one])
        for n, one in enumerate(used)
    ]
    found = []
    for shape, devices in (
        ({"data": 1}, jax.devices()[:1]),
        ({"data": 2, "tensor": 2}, jax.devices()[:4]),
    ):
        mesh = make_mesh(shape, devices=devices)
        model = drawn(lambda: kind(config, rngs=nnx.Rngs()), 3, mesh=mesh)
        engine = Engine(model, config=sizes, mesh=mesh)
        found.append({one.id: one.candidates[0] for one in engine.generate(requests)})
        assert engine.throughput.pictures == len(shown)
    for n, want in found[0].items():
        assert found[1][n].tokens == want.tokens
        np.testing.assert_allclose(found[1][n].logprobs, want.logprobs, rtol=0, atol=1e-4)
