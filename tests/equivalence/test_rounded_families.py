"""FP8 checkpoints beside transformers, which on a CPU makes their matrices whole as it loads them."""

import json

import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, randomize
from decoder_pair import run_torch
from safetensors.torch import load_file, save_file
from test_decoder_families import CASES, COMMON, layers_and_logits, tokens, whole_texts

from mmqa_jax.weights.published import load_published

SIZE = 8


def rounded(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in FP8 by blocks of SIZE."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // SIZE, SIZE, columns // SIZE, SIZE)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scale}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "phi3"])
def test_fp8_is_read_as_transformers_reads_it(name, tmp_path):
    case = CASES[name]
    kind = getattr(transformers, f"{case.family}ForCausalLM")
    config = kind.config_class(**COMMON | dict(case.values))
    randomize(kind(config), 0, 0.05).save_pretrained(tmp_path)
    saved = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        parts = rounded(tensor) if key.endswith("_proj.weight") else {"": tensor}
        saved |= {key + end: part for end, part in parts.items()}
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    published = json.loads((tmp_path / "config.json").read_text())
    published["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [SIZE, SIZE],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    theirs = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = load_published("llama", tmp_path, unroll=1)
    ids = tokens(1, 60)
    _, got = compiled(ours, layers_and_logits)(*whole_texts(ids))
    np.testing.assert_allclose(got, run_torch(theirs, ids), **WHOLE)
