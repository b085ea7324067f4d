"""Gemma 4 with pictures against transformers: token ids, pixels, logits, answers, checkpoints."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, abstract, compiled, randomize
from flax import nnx
from PIL import Image
from test_llava_families import EOS, IMAGE, PARTS, TEXT, letters
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from vlm_checks import (
    PROMPTS,
    Pair,
    answers_as_generate,
    changed,
    check_passes,
    export_is_read_by_both,
    long_prompt,
    lower_tower,
    tokens_and_pixels,
)

from mmqa_jax.data.pictures.resize import budget_size
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llava.config import PRESETS
from mmqa_jax.models.llava.keys import llava_config, llava_key_map, publish_llava
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.llava.processor import with_budget
from mmqa_jax.models.qwen_vl.network import PatchBatch, bucket_of, grid_of, lay_out
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.keymap import untied_source
from mmqa_jax.weights.published import load_published
from tests.pictures import smooth
from tests.refusals import refuses

pytestmark = pytest.mark.slow

PATCH, BEFORE, AFTER = 4, 93, 94
UNIFIED = "gemma4_unified"
NAMES = ("<start_of_image>", "<end_of_image>")
TEXT = {key: value for key, value in TEXT.items() if key != "rope_theta"} | {
    "head_dim": 8,
    "max_position_embeddings": 700,
    "final_logit_softcapping": 4.0,
    "sliding_window": 33,
    "vocab_size_per_layer_input": TEXT["vocab_size"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 4321.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 321.0},
    },
}
TOWER = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 12,
    "patch_size": PATCH,
    "rms_norm_eps": 3e-4,
    "position_embedding_size": 300,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
# Of the language model and the tower.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "26B-A4B, windows smaller than a picture": (
        {
            "num_hidden_layers": 3,
            "global_head_dim": 12,
            "num_global_key_value_heads": 3,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 0,
        },
        {"standardize": True, "pooling_kernel_size": 2},
    ),
    "E2B, a picture is causal": (
        {
            "num_hidden_layers": 4,
            "global_head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 10,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        {"use_clipped_linears": True, "pooling_kernel_size": 3},
    ),
    "12B, without a tower": (
        {
            "num_hidden_layers": 3,
            "global_head_dim": 12,
            "num_global_key_value_heads": 3,
            "attention_k_eq_v": True,
            "sliding_window": 71,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {
            **{"patch_size": PATCH, "pooling_kernel_size": 2, "mm_embed_dim": 56},
            **{"mm_posemb_size": 90, "rms_norm_eps": 3e-4, "output_proj_dims": 56},
        },
    ),
}
SIZES = [(50, 33), (20, 71), (9, 9), (200, 1)]  # width and height


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("gemma4")
    text, vision = CASES[request.param]
    torch.manual_seed(0)
    unified = "mm_embed_dim" in vision
    kind = transformers.Gemma4UnifiedConfig if unified else transformers.Gemma4Config
    values = TEXT | {"pad_token_id": 0} | text
    if unified:
        del values["vocab_size_per_layer_input"]
    config = kind(
        text_config=values,
        vision_config=vision if unified else TOWER | vision,
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=BEFORE,
        eoi_token_id=AFTER,
        attn_implementation="eager",
    )
    name = f"Gemma4{'Unified' * unified}ForConditionalGeneration"
    theirs = randomize(getattr(transformers, name)(config), 0, 0.05)
    for name, buffer in theirs.named_buffers():  # those of a checkpoint
        if name.endswith(("_min", "_max")):
            buffer.fill_(-0.9 if name.endswith("_min") else 1.1)
        elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
            buffer.add_(0.3 * torch.rand(buffer.shape))
    theirs.save_pretrained(folder)
    merge = vision["pooling_kernel_size"]
    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=70, patch_size=PATCH, pooling_kernel_size=merge
    )
    processor.save_pretrained(folder)
    tokenizer = letters(bos=True)
    tokenizer.add_special_tokens(list(NAMES))
    assert [tokenizer.token_to_id(name) for name in NAMES] == [BEFORE, AFTER]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(PARTS)
    return Pair(theirs, load_published("llava", folder, unroll=1), processor, folder)


def pictures() -> list[Image.Image]:
    return [smooth(size, number) for number, size in enumerate(SIZES)]


def torch_inputs(pair: Pair, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """transformers' inputs of a prompt. Its Gemma4Processor needs processors of videos and sound,
    so that its rule for texts (`replace_image_token`) is written here again."""
    made = dict(pair.processor(images, return_tensors="pt")) if images else {}
    if images and "mm_embed_dim" in vars(pair.theirs.config.vision_config):
        made |= as_large_patches(made, pair.processor.pooling_kernel_size)
    first, *pieces = text.split("<image>")
    counts = made.pop("num_soft_tokens_per_image", [])
    for count, piece in zip(counts, pieces, strict=True):
        first += f"{NAMES[0]}{'<image>' * int(count)}{NAMES[1]}" + piece
    ids = torch.tensor([open_text_tokenizer(pair.folder).encode(first)])
    types = {"mm_token_type_ids": (ids == IMAGE).long()} if images else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types, **made}


def as_large_patches(made: dict[str, torch.Tensor], merge: int) -> dict[str, torch.Tensor]:
    """The patches of a unit as one, by transformers' own function, whose file needs torchvision."""
    file = Path(transformers.__file__).parent / f"models/{UNIFIED}/image_processing_{UNIFIED}.py"
    (merged,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "patches_merge"
    )
    scope = {"torch": torch, "math": math}
    exec(compile(ast.Module([merged], []), str(file), "exec"), scope)
    of_pictures = []
    for patches, places in zip(made["pixel_values"], made["image_position_ids"], strict=True):
        real = (places >= 0).all(-1)
        count = int(real.sum()) // merge**2
        of_picture = scope["patches_merge"](patches[real][None], places[real][None], count)
        rest = made["pixel_values"].shape[1] // merge**2 - count
        pads = zip(of_picture, (0, -1), strict=True)
        of_pictures.append(
            [torch.nn.functional.pad(x[0], (0, 0, 0, rest), value=pad) for x, pad in pads]
        )
    names = ("pixel_values", "image_position_ids")
    return {n: torch.stack(x) for n, x in zip(names, zip(*of_pictures, strict=True), strict=True)}


@pytest.mark.parametrize(("text", "used"), PROMPTS)
def test_tokens_and_pixels_are_the_processors(pair, text, used):
    images = [pictures()[n] for n in used]
    ids, pixels = tokens_and_pixels(pair, text, images, IMAGE)
    want = torch_inputs(pair, text, images)
    np.testing.assert_array_equal(want["input_ids"].numpy(), ids)
    units = pair.ours.config.units
    side = PATCH if pair.ours.config.vision.layers else units.unit
    for got, patches in zip(pixels, want["pixel_values"].numpy(), strict=True):
        rows, columns = (pixels // side for pixels in got.shape[:2])
        ours = got.reshape(rows, side, columns, side, 3).swapaxes(1, 2) / 255.0
        np.testing.assert_allclose(ours.reshape(rows * columns, -1), patches[: rows * columns])
        assert not patches[rows * columns :].any()


def logits(model: Llava, ids: jax.Array, features: jax.Array) -> jax.Array:
    hidden = model.llama.encode(
        model.embed(ids, features), pictures=ids == model.config.image_token
    )
    return model.llama.logits(hidden)


def features_of(model: Llava, batch: PatchBatch) -> jax.Array:
    return model.encode_images(model.vision.normalize(batch))


def test_logits_equal(pair):
    """Two pictures amid more than 500 tokens."""
    text, images = long_prompt(pictures=2), pictures()[:2]
    ids, pixels = tokens_and_pixels(pair, text, images, IMAGE)
    assert ids.size > 500
    inputs = torch_inputs(pair, text, images)
    with torch.no_grad():
        want = pair.theirs(**inputs).logits.numpy()
        causal = pair.theirs(**inputs | {"mm_token_type_ids": None}).logits.numpy()
    units = pair.ours.config.units
    bucket = max(bucket_of(grid_of(picture.shape, units), units) for picture in pixels)
    features = compiled(pair.ours, features_of)(lay_out(pixels, units, bucket))
    counts = [pair.ours.config.picture_tokens(picture.shape) for picture in pixels]
    real = [rows[:count] for rows, count in zip(features, counts, strict=True)]
    got = compiled(pair.ours, logits)(ids, np.concatenate(real)[None])
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1
    whole = pair.ours.config.llama.picture_sight != "causal"
    assert (np.abs(want - causal).max() > 1e-2) == whole


def test_answers_equal_generate(pair):
    """Pictures of several sizes in conversations; one program for each bucket."""
    messages = {}
    for name, numbers in {"two": [1, 2], "one": [0], "thin": [3], "none": []}.items():
        images = [pictures()[n] for n in numbers]
        text = "[user] " + "<image>\n" * len(images) + "Why?[a] "
        messages[name] = [*images, "Why?"], torch_inputs(pair, text, images)
    answers_as_generate(pair, messages, EOS)


def test_checkpoints_go_both_ways(pair, tmp_path):
    published = publish_llava(pair.ours.config, nnx.state(pair.ours))
    export_is_read_by_both(pair, "llava", published, tmp_path / "out")


def test_the_check_compares_all_layers(pair):
    check_passes(pair.folder, "layer 2", "logits")


def test_what_a_plan_compiles(pair):
    lower_tower(pair.ours.config, EngineConfig(slots=3, length=256, buckets=(32,)))


@pytest.mark.parametrize("height", [1, 13, 100, 1540, 1999, 30000])
def test_sizes_of_any_picture_are_the_processors(height):
    for budget in (70, 280, 1120):
        for width in (1, 47, 48, 49, 500, 1540, 3001, 20000):
            want = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
            assert budget_size(width, height, budget, 16, 3) == want[::-1]


GEMMA4_31B = {
    "model_type": "gemma4",
    "audio_config": None,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "video_token_id": 258884,
    "tie_word_embeddings": True,
    "text_config": {
        **{"attention_k_eq_v": True, "final_logit_softcapping": 30.0, "global_head_dim": 512},
        **{"head_dim": 256, "hidden_size": 5376, "hidden_size_per_layer_input": 0},
        **{"intermediate_size": 21504, "max_position_embeddings": 262144},
        **{"model_type": "gemma4_text", "num_attention_heads": 32, "num_hidden_layers": 60},
        **{"num_global_key_value_heads": 4, "num_key_value_heads": 16, "sliding_window": 1024},
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        **{"head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304, "standardize": True},
        **{"model_type": "gemma4_vision", "num_attention_heads": 16, "num_hidden_layers": 27},
        **{"num_key_value_heads": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240},
    },
}


def test_a_preset_has_the_published_sizes():
    """Every parameter's shape is that of transformers' model of the published config.json."""
    config = PRESETS["gemma4_31b_vl"]()
    assert llava_config(GEMMA4_31B) == config
    values = {key: value for key, value in GEMMA4_31B.items() if key != "model_type"}
    with torch.device("meta"):
        theirs = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(**values))
    specs = untied_source(nnx.state(abstract(Llava, config)), llava_key_map(config)).specs()
    tensors = theirs.state_dict()
    del tensors["lm_head.weight"]  # the embedding table
    sizes = sorted(spec.shape for spec in specs.values())
    assert sizes == sorted(tuple(tensor.shape) for tensor in tensors.values())


# Of google/gemma-4-12B-it, as it was published.
GEMMA4_12B = {
    **{key: x for key, x in GEMMA4_31B.items() if not key.endswith("_config")},
    "model_type": UNIFIED,
    "audio_config": {"model_type": "gemma4_unified_audio"},
    "text_config": GEMMA4_31B["text_config"]
    | {
        **{"hidden_size": 3840, "intermediate_size": 15360, "model_type": f"{UNIFIED}_text"},
        **{"num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8},
        **{"num_global_key_value_heads": 1, "enable_moe_block": False, "num_experts": None},
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {
        **{"mm_embed_dim": 3840, "mm_posemb_size": 1120, "model_patch_size": 48},
        **{"model_type": f"{UNIFIED}_vision", "num_soft_tokens": 280, "output_proj_dims": 3840},
        **{"patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6},
    },
}


def test_the_12b_is_read_as_it_was_published():
    assert llava_config(GEMMA4_12B) == PRESETS["gemma4_12b_vl"]()


REFUSED = [
    ({"vision_config": {"pooling_kernel_size": 0}}, "pooling_kernel_size is 0"),
    ({"vision_config": {"head_dim": 70}}, r"vision\.head_dim is 70: expected a multiple of 4"),
    ({"vision_config": {"num_key_value_heads": 4}}, "num_key_value_heads is 4"),
    ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
    ({"vision_config": {"model_type": "gemma4_unified_vision"}}, "gemma4_unified_vision"),
    ({"text_config": {"use_bidirectional_attention": "all"}}, "attention is 'all'"),
    (
        {
            "text_config": {
                "global_head_dim": 256,
                "num_global_key_value_heads": 16,
                "attention_k_eq_v": False,
            }
        },
        'picture_sight "near" needs',
    ),
    ({"sound": 1}, "key 'sound'"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_a_bad_config_is_refused_by_name(changes, match):
    refuses(match, llava_config, changed(GEMMA4_31B, changes))


FILES = [
    ({"max_soft_tokens": 99999}, "budget is 99999"),
    ({"max_soft_tokens": "70"}, "max_soft_tokens is '70'"),
    ({"patch_size": 14}, "patch_size is 14"),
    ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean is"),
    ({"resample": 2}, "resample is 2"),
]


def test_a_picture_of_the_12b_is_within_its_window(tmp_path):
    published = GEMMA4_31B | {"model_type": UNIFIED, "vision_config": {}}
    text = {"model_type": f"{UNIFIED}_text", "hidden_size_per_layer_input": None}
    published["text_config"] = GEMMA4_31B["text_config"] | text
    config = llava_config(published)
    (tmp_path / "preprocessor_config.json").write_text('{"max_soft_tokens": 560}')
    assert with_budget(tmp_path, config).budget == 560
    (tmp_path / "preprocessor_config.json").write_text('{"max_soft_tokens": 1120}')
    refuses(
        "has up to 1120 tokens, expected at most the window of 1024", with_budget, tmp_path, config
    )
    refuses(
        "num_experts is 8", llava_config, changed(published, {"text_config": {"num_experts": 8}})
    )
    wrong = changed(published, {"vision_config": {"output_proj_dims": 7}})
    refuses("output_proj_dims is 7", llava_config, wrong)


@pytest.mark.parametrize(("content", "match"), FILES)
def test_a_bad_processor_is_refused_by_name(tmp_path, content, match):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    refuses(match, with_budget, tmp_path, llava_config(GEMMA4_31B))
