"""Mistral 3 with pictures against transformers: token ids, pixels, logits, answers, checkpoints."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, abstract, compiled, forward, randomize
from flax import nnx
from PIL import Image
from safetensors.torch import load_file, save_file
from test_llava_families import EOS, IMAGE, PARTS, TEXT, letters
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
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

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.resize import within_size
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llava.keys import llava_key_map
from mmqa_jax.models.mistral3.keys import mistral3_config, open_mistral3, publish_mistral3
from mmqa_jax.models.mistral3.network import PRESETS, Mistral3, bucket_of, lay_out
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.keymap import untied_source
from mmqa_jax.weights.published import load_published
from tests.pictures import smooth
from tests.refusals import refuses

pytestmark = pytest.mark.slow

BREAK, END, LONGEST = 93, 94, 61
TEXT = TEXT | {"max_position_embeddings": 700, "head_dim": 12}
TOWER = {
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 5,
    "patch_size": 4, "image_size": LONGEST,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 3000.0, "factor": 2.0, "beta_fast": 16.0, "beta_slow": 1.5,
    "original_max_position_embeddings": 700, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
# Of the language model, the tower, and both.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral": (
        {"model_type": "mistral", "sliding_window": None},
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
        {"tie_word_embeddings": False, "multimodal_projector_bias": True},
    ),
    "ministral3": (
        {"model_type": "ministral3", "rope_parameters": YARN, "max_position_embeddings": 1400},
        {"hidden_act": "silu"},
        {"vision_feature_layer": -2, "projector_hidden_act": "gelu_new"},
    ),
}
SIZES = [(50, 33), (20, 71), (9, 9), (200, 7)]  # width and height


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("mistral3")
    text, vision, both = CASES[request.param]
    torch.manual_seed(0)
    config = transformers.Mistral3Config(
        text_config=TEXT | text,
        vision_config={"model_type": "pixtral", **TOWER, **vision},
        image_token_index=IMAGE,
        attn_implementation="eager",
        **both,
    )
    theirs = randomize(transformers.Mistral3ForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(folder)
    processor = PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size=4)
    processor.save_pretrained(folder)
    tokenizer = letters(bos=True)
    tokenizer.add_special_tokens(["[IMG_BREAK]", "[IMG_END]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(PARTS)
    return Pair(theirs, load_published("mistral3", folder, unroll=1), processor, folder)


def pictures() -> list[Image.Image]:
    return [smooth(size, number) for number, size in enumerate(SIZES)]


def torch_inputs(pair: Pair, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """transformers' inputs of a prompt. Its PixtralProcessor needs torchvision, so that its rule
    for texts (`replace_image_token`) is written here again."""
    made = dict(pair.processor(images, patch_size=8, return_tensors="pt")) if images else {}
    first, *pieces = text.split("<image>")
    for (height, width), piece in zip(made.get("image_sizes", []), pieces, strict=True):
        row = "<image>" * (int(width) // 8)
        first += "[IMG_BREAK]".join([row] * (int(height) // 8)) + "[IMG_END]" + piece
    ids = open_text_tokenizer(pair.folder).encode(first)
    mask = torch.ones(1, len(ids), dtype=torch.long)  # else `generate` masks the letter of id 0
    return {"input_ids": torch.tensor([ids]), "attention_mask": mask, **made}


@pytest.mark.parametrize(("text", "used"), PROMPTS)
def test_tokens_and_pixels_are_the_processors(pair, text, used):
    """One picture, and two of odd sizes; breaks are placeholders here."""
    images = [pictures()[n] for n in used]
    ids, pixels = tokens_and_pixels(pair, text, images, IMAGE)
    want = torch_inputs(pair, text, images)
    theirs = want["input_ids"].numpy()
    assert BREAK in theirs or len(used) == 1
    np.testing.assert_array_equal(np.where(np.isin(theirs, (BREAK, END)), IMAGE, theirs), ids)
    vision = pair.ours.config.vision
    sizes = want["image_sizes"].tolist()
    for got, size, tensor in zip(pixels, sizes, want["pixel_values"].numpy(), strict=True):
        assert got.shape[:2] == tuple(size)
        normal = (got / 255.0 - vision.pixel_mean) / vision.pixel_std
        whole = tensor.transpose(1, 2, 0)[: size[0], : size[1]]
        np.testing.assert_allclose(normal, whole, rtol=0, atol=1e-5)


def test_logits_equal(pair):
    """Two pictures amid more than 500 tokens."""
    text, images = long_prompt(pictures=2), pictures()[:2]
    ids, pixels = tokens_and_pixels(pair, text, images, IMAGE)
    assert ids.size > 500
    with torch.no_grad():
        want = pair.theirs(**torch_inputs(pair, text, images)).logits.numpy()
    config = pair.ours.config
    bucket = max(bucket_of(picture.shape, config) for picture in pixels)
    encode = compiled(pair.ours, lambda model, batch: model.encode_images(batch))
    features = encode(lay_out(pixels, config, bucket))
    real = [
        rows[: config.picture_tokens(x.shape)] for rows, x in zip(features, pixels, strict=True)
    ]
    got = compiled(pair.ours, forward)(ids, np.concatenate(real)[None])
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1


def test_answers_equal_generate(pair):
    """Pictures of several sizes in conversations; one program for each bucket."""
    messages = {}
    for name, numbers in {"two": [1, 2], "one": [0], "thin": [3], "none": []}.items():
        images = [pictures()[n] for n in numbers]
        text = "[user] " + "<image>\n" * len(images) + "Why?[a] "
        messages[name] = [*images, "Why?"], torch_inputs(pair, text, images)
    backend = answers_as_generate(pair, messages, EOS)
    plain = Request("a", [IMAGE], images=[np.zeros((9, 9, 3), np.uint8)])
    with pytest.raises(UserError, match=r"expected uint8 \[H, W, 3\], multiples of 8"):
        list(backend.engine.generate([plain]))


def test_checkpoints_go_both_ways(pair, tmp_path):
    published = publish_mistral3(pair.ours.config, nnx.state(pair.ours))
    export_is_read_by_both(pair, "mistral3", published, tmp_path / "out")


def test_the_check_compares_all_layers(pair):
    check_passes(pair.folder, "layer 2", "logits")


def test_what_a_plan_compiles(pair):
    lower_tower(pair.ours.config, EngineConfig(slots=3, length=256, buckets=(32,)))


def test_a_tower_beside_a_decoder_in_fp8(pair, tmp_path):
    """As Ministral 3 is published: the decoder's matrices have one scale each, the tower's none."""
    saved = {}
    for key, tensor in load_file(pair.folder / "model.safetensors").items():
        if "language_model" in key and key.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            saved[key] = (tensor / scale).to(torch.float8_e4m3fn)
            saved[f"{key}_scale_inv"] = scale
            saved[key.replace("weight", "activation_scale")] = torch.tensor(0.5)
        else:
            saved[key] = tensor
    for file in pair.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    published = json.loads((tmp_path / "config.json").read_text())
    published["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    read = load_published("mistral3", tmp_path, unroll=1)
    want = nnx.to_flat_state(nnx.state(pair.ours))
    for (path, got), (_, whole) in zip(nnx.to_flat_state(nnx.state(read)), want, strict=True):
        far = np.abs(np.asarray(got[...]) - np.asarray(whole[...])).max()
        is_rounded = path[0] == "llama" and path[-1] == "kernel" and "head" not in path
        assert (far > 0) == is_rounded, path
        assert far <= np.abs(np.asarray(whole[...])).max() / 14, path  # 3 bits and a half step


@pytest.mark.parametrize("height", [1, 13, 100, 1540, 1541, 1999, 30000])
def test_sizes_of_any_picture_are_the_processors(height):
    """Of the published 1,540 pixels and units of 28."""
    for width in (1, 27, 28, 29, 500, 1540, 3001, 20000):
        picture = np.broadcast_to(np.uint8(0), (height, width, 3))
        want = get_resize_output_image_size(picture, 1540, 28, "channels_last")
        if min(want):  # else transformers fails
            assert within_size(width, height, 1540, 28) == want[::-1]


SMALL31 = {
    "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "gelu", "hidden_size": 1024,
        "image_size": 1540, "intermediate_size": 4096, "model_type": "pixtral",
        "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
        "rope_theta": 10000.0,
    },
}  # fmt: skip


def test_a_preset_has_the_published_sizes():
    """Every parameter's shape is that of transformers' model of the published config.json."""
    config = PRESETS["mistral_small31_24b"]()
    assert mistral3_config(SMALL31, has_head=True) == config
    values = {key: value for key, value in SMALL31.items() if key != "model_type"}
    with torch.device("meta"):
        theirs = transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(**values, tie_word_embeddings=False)
        )
    specs = untied_source(nnx.state(abstract(Mistral3, config)), llava_key_map(config)).specs()
    sizes = sorted(spec.shape for spec in specs.values())
    assert sizes == sorted(tuple(parameter.shape) for parameter in theirs.parameters())


REFUSED = [
    ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer is \[-1, -2\]"),
    ({"vision_config": {"head_dim": 32}}, "head_dim is 32"),
    ({"vision_config": {"image_size": "a"}}, "image_size is 'a'"),
    ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
    ({"vision_config": {"new": 1}}, "key 'new'"),
    ({"text_config": {"model_type": "mamba"}}, "model_type is 'mamba'"),
    ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
    (
        {"text_config": {"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn"}}},
        "llama_4_scaling_beta None",
    ),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_a_bad_config_is_refused_by_name(changes, match):
    refuses(match, mistral3_config, changed(SMALL31, changes))


FILES = [
    ("preprocessor_config.json", {"size": {"longest_edge": 99999}}, "a longest_edge of 4 to 8192"),
    ("preprocessor_config.json", {"patch_size": 16}, "patch_size is 16"),
    ("preprocessor_config.json", {"resample": 2}, "resample is 2"),
    ("processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size is 1"),
    ("tokenizer.json", {"added_tokens": [{"id": 1, "content": "<s>"}]}, "lacks the tokens"),
]


@pytest.mark.parametrize(("name", "content", "match"), FILES)
def test_a_bad_file_beside_it_is_refused_by_name(pair, tmp_path, name, content, match):
    for file in pair.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(json.dumps(content))
    refuses(match, open_mistral3, tmp_path)
