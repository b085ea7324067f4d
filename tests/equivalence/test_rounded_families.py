"""FP8 checkpoints beside transformers, which on a CPU makes their matrices whole as it loads them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, forward, randomize
from decoder_cases import CASES, COMMON
from decoder_pair import run_torch
from flax import nnx
from safetensors.torch import load_file, save_file
from test_decoder_families import layers_and_logits, tokens, whole_texts
from test_mistral3 import IMAGE, TEXT, TOWER
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from mmqa_jax.models.llama.quantize import load_in_codes
from mmqa_jax.weights.published import load_published

SIZE = 8


def test_ministral3_is_read_as_published(tmp_path):
    """One scale of bfloat16 for each matrix of the decoder, and one of its activations; the tower
    and the head are whole."""
    config = transformers.Mistral3Config(
        text_config=TEXT, vision_config={"model_type": "pixtral", **TOWER}, image_token_index=IMAGE
    )
    kind = transformers.Mistral3ForConditionalGeneration
    randomize(kind(config), 0, 0.05).save_pretrained(tmp_path)
    PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=4).save_pretrained(tmp_path)
    saved = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        saved[key] = tensor
        if "language_model" in key and key.endswith("_proj.weight"):
            scale = (tensor.abs().max() / 448).bfloat16()
            saved[key] = (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            saved[f"{key}_scale_inv"] = scale
            saved[f"{key.removesuffix('weight')}activation_scale"] = torch.tensor(0.5).bfloat16()
    assert len(saved) > 20
    rewrite(tmp_path, saved, {"activation_scheme": "static", "weight_block_size": None})
    theirs = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(0, 60, (1, 40))
    for load in (load_published, load_in_codes):
        ours = load("mistral3", tmp_path, unroll=1)
        np.testing.assert_allclose(compiled(ours, forward)(ids), run_torch(theirs, ids), **WHOLE)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Writes other tensors in a checkpoint's folder, and how they are rounded."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    published = json.loads((folder / "config.json").read_text())
    left = ["lm_head", "mlp.gate", "model.vision_tower", "model.multi_modal_projector"]
    published["quantization_config"] = {
        "quant_method": "fp8",
        "modules_to_not_convert": left,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(published))


def rounded(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in FP8 by blocks of SIZE."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // SIZE, SIZE, columns // SIZE, SIZE)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scale}


# Of latents, in whole blocks; the matrix of keys and values of latents is whole here.
_EVEN = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "phi3", "youtu"])
def test_fp8_is_read_as_transformers_reads_it(name, tmp_path):
    case = CASES[name]
    kind = getattr(transformers, f"{case.family}ForCausalLM")
    sizes = _EVEN if name == "youtu" else {}
    config = kind.config_class(**COMMON | dict(case.values) | sizes)
    randomize(kind(config), 0, 0.05).save_pretrained(tmp_path)
    saved = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        is_rounded = key.endswith(("_proj.weight", "_proj_with_mqa.weight"))
        parts = rounded(tensor) if is_rounded else {"": tensor}
        saved |= {key + end: part for end, part in parts.items()}
    rewrite(tmp_path, saved, {"activation_scheme": "dynamic", "weight_block_size": [SIZE, SIZE]})
    theirs = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = tokens(1, 60)
    want = run_torch(theirs, ids)
    for load in (load_published, load_in_codes):
        ours = load("llama", tmp_path, unroll=1)
        _, got = compiled(ours, layers_and_logits)(*whole_texts(ids))
        np.testing.assert_allclose(got, want, **WHOLE)
    in_codes = [x for x in jax.tree.leaves(nnx.state(ours)) if x.dtype == jax.numpy.float8_e4m3fn]
    assert len(in_codes) == 7
