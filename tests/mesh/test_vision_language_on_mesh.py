"""A Qwen-VL trained by LoRA, with its tower, on eight devices against one; and its answers."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from steps import MESHES, same_step, take_step

from mmqa_jax.core.mesh import make_mesh, state_shardings
from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.data.batches.texts import RowSize, TokenExample
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.tasks.vision_language import PicturedRows, VisionLanguageObjective

CONFIG = QwenVLConfig(
    QwenVisionConfig(
        family="qwen3_vl", width=16, layers=2, heads=2, mlp=24, out=32, patch=2, window=0,
        full_layers=(), positions=4, deepstack=(0, 1), activation="gelu_new", init_stddev=0.3, unroll=1,
    ),
    LlamaConfig(
        vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, mlp=64, positions=128, unroll=1,
        init_stddev=0.3, family="qwen3", qk_norm="head", mrope=(2, 1, 1), mrope_interleaved=True,
    ),
    image_token=60,
)  # fmt: skip
RNG = np.random.default_rng(0)
SHAPES = {"a": (8, 12, 3), "b": (24, 16, 3)}
PIXELS = {name: RNG.integers(0, 256, shape).astype(np.uint8) for name, shape in SHAPES.items()}


class Shown:
    """Pictures that are there."""

    def look_ahead(self, shown: Sequence[Sequence[str]]) -> None:
        pass

    def pixels(self, name: str, alone: bool = True) -> np.ndarray:
        return PIXELS[name]


def make_batch() -> dict[str, np.ndarray]:
    """16 rows of different lengths and targets, two of them empty."""
    examples: list[TokenExample | None] = [None, None]
    for n in range(14):
        tokens = RNG.integers(0, 60, 6 + n % 5).astype(np.int32)
        tokens[n % 3] = CONFIG.image_token
        examples.append(TokenExample(tokens, 4 + n % 2, ("ab"[n % 2],)))
    return PicturedRows(RowSize(12, 6), CONFIG, Shown()).batch(examples, Bucket(1, 64))


def test_a_step_is_that_of_one_device_and_so_are_the_answers():
    task, batch = VisionLanguageObjective(CONFIG, LoraConfig(rank=4), tower=True), make_batch()
    options = {"learning_rate": 0.02}
    alone = take_step(task, batch, {}, jax.devices()[:1], stddev=0.3, **options)
    on_mesh = take_step(task, batch, MESHES["all"], None, start=alone.start, **options)
    same_step(on_mesh, alone)
    assert any("vision/" in name for name in alone.moments)
    assert any(name.endswith("lora_b") and x.any() for name, x in alone.moments.items())

    sizes = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=64)
    requests = [
        Request(n, [n, 60, 5, *range(n)], 5, logprobs=True, images=[PIXELS["ab"[n % 2]]])
        for n in range(5)
    ]
    answers = []
    for module, shape, devices in (
        (alone.module, {"data": 1}, jax.devices()[:1]),
        (on_mesh.module, {"data": 2, "tensor": 2}, jax.devices()[:4]),
    ):
        mesh = make_mesh(shape, devices=devices)
        # On one device, where programs of both are the same.
        whole = nnx.merge(nnx.graphdef(module), jax.device_get(nnx.state(module)))
        graphdef, state = nnx.split(task.finish(whole))
        model = nnx.merge(graphdef, jax.device_put(state, state_shardings(state, mesh)))
        engine = Engine(model, config=sizes, mesh=mesh)
        answers.append({one.id: one.candidates[0] for one in engine.generate(requests)})
    assert len({one.tokens for one in answers[0].values()}) > 1
    for n, want in answers[0].items():
        assert answers[1][n].tokens == want.tokens
        np.testing.assert_allclose(answers[1][n].logprobs, want.logprobs, rtol=0, atol=1e-4)
