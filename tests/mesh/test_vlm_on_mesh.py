"""Texts and pictures by models that only read them, on eight devices as on one."""

import jax
import numpy as np
import pytest
from flax import nnx
from random_weights import random_state

from mmqa_jax.core.mesh import fetch, make_mesh, state_shardings
from mmqa_jax.core.serving import RowCost, serve
from mmqa_jax.models.encoders.heads import QwenVLEncoder
from mmqa_jax.models.encoders.pictured_gemma import GemmaEncoder, pictured_config
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.retrieval.vlm_encoder import PicturePrompt, make_encode_prompts, prompt_batches

IMAGE = 30
CONFIG = QwenVLConfig(
    QwenVisionConfig(
        family="qwen3_vl", width=16, layers=2, heads=2, mlp=12, out=16, patch=2, window=0,
        full_layers=(), positions=3, deepstack=(0,),
    ),
    LlamaConfig(
        family="qwen3", vocab_size=32, hidden=16, layers=2, heads=4, kv_heads=2, mlp=24,
        positions=128, qk_norm="head", mrope=(1, 1, 0), mrope_interleaved=True,
    ),
    image_token=IMAGE,
)  # fmt: skip

GEMMA = pictured_config(
    {
        "image_token_id": IMAGE,
        "text_config": {
            **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "global_head_dim": 12},
            **{"max_position_embeddings": 128, "sliding_window": 7, "embedding_dim": 16},
            **{"hidden_size_per_layer_input": 6, "num_global_key_value_heads": 2},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 8},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 2},
            **{"pooling_kernel_size": 2, "position_embedding_size": 40},
        },
    }
)


@pytest.mark.parametrize(("kind", "config"), [(QwenVLEncoder, CONFIG), (GemmaEncoder, GEMMA)])
def test_prompts_on_a_mesh(kind, config):
    """With no picture, one and two; the last batch of each is not full."""
    rng = np.random.default_rng(0)

    def picture(height, width):
        return rng.integers(0, 256, (height, width, 3), np.uint8)

    prompts = [
        *(PicturePrompt(rng.integers(1, 20, 5 + n).tolist()) for n in range(5)),
        *(PicturePrompt([3, IMAGE, 4 + n], (picture(8, 12),)) for n in range(5)),
        *(PicturePrompt([IMAGE, n, IMAGE], (picture(8, 4), picture(4, 20))) for n in range(3)),
    ]
    build = lambda: kind(config, rngs=nnx.Rngs())  # noqa: E731
    graphdef, state = nnx.graphdef(nnx.eval_shape(build)), random_state(build)
    run, found = make_encode_prompts(graphdef), []
    for shape in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = make_mesh(shape, devices=jax.devices()[: 1 if len(shape) == 1 else 8])
        placed = jax.device_put(state, state_shardings(state, mesh))
        serving = serve(4, RowCost("prompts", 4, 4, 1.0), placed)
        vectors = np.zeros((len(prompts), 16), np.float32)
        for indices, batch in prompt_batches(prompts, config, serving, (32, 64), pad_token=0):
            placement = serving.placement
            got = placement.call(run, placed, placement.put(batch))
            vectors[indices] = fetch(got)[: len(indices)]
        found.append(vectors)
    assert np.abs(found[0]).max(1).min() > 0.1
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)
