"""The families of models/llava/families.py whose pictures are tiles, against transformers: token
ids, pixels, logits, answers, checkpoints.

LLaVA's own are in test_llava.py and test_llava_families.py.
"""

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, abstract, compiled, forward, randomize
from flax import nnx
from PIL import Image
from test_llava_families import EOS, IMAGE, PARTS, TEXT, letters
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vlm_checks import (
    NEW,
    PROMPTS,
    Pair,
    answers_as_generate,
    changed,
    check_passes,
    export_is_read_by_both,
    long_prompt,
    lower_tower,
    processor_inputs,
)

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.resize import cut_tiles
from mmqa_jax.decoding.sizes import feature_bytes
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llava.config import PRESETS
from mmqa_jax.models.llava.keys import llava_config, llava_key_map, publish_llava
from mmqa_jax.models.llava.network import Llava, expand_images
from mmqa_jax.models.llava.processor import with_split
from mmqa_jax.models.llava.tiles import RatioTiles, RowTiles, UnitSizes
from mmqa_jax.prompting.backends import Completion, Decoding, Picture
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.picture_format import picture_format, shown_pictures
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.keymap import untied_source
from mmqa_jax.weights.published import load_published
from tests.pictures import encoded, smooth
from tests.refusals import refuses

pytestmark = pytest.mark.slow

TEXT = TEXT | {"vocab_size": 120, "max_position_embeddings": 700, "rope_theta": 5000.0}
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = [
    "<img>",
    "</img>",
    "<video>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *ROWS,
]
VISION = {
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 5,
}  # fmt: skip
# Width and height: of nine tiles, wide, tall, thin.
SIZES = [(50, 47), (61, 20), (17, 90), (200, 7)]


class Case(NamedTuple):
    """A config of transformers, and its processor of a tokenizer."""

    config: Callable[[], Any]
    processor: Callable[[Any], Any]


def idefics3(kind: str, vision: dict[str, Any], **both: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")
    return config(
        text_config={"model_type": "llama", **TEXT},
        vision_config=VISION | vision,
        image_token_id=IMAGE,
        attn_implementation="eager",
        **both,
    )


def rows_processor(tokenizer: Any, side: int, longest: int, tokens: int) -> Any:
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": side}
    )
    return transformers.Idefics3Processor(
        pictures, tokenizer, image_seq_len=tokens, chat_template=PARTS
    )


def internvl(vision: dict[str, Any], text: dict[str, Any], **both: Any) -> Any:
    return transformers.InternVLConfig(
        text_config=TEXT | text,
        vision_config=VISION | vision,
        image_token_id=IMAGE,
        attn_implementation="eager",
        **both,
    )


class _OfPictures(transformers.InternVLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument is not None:
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


def ratio_processor(tokenizer: Any, side: int, tokens: int, **sizes: int) -> Any:
    names = {"start": "<img>", "end": "</img>", "context": "<image>"}
    for name, token in names.items():
        setattr(tokenizer, f"{name}_image_token", token)
        setattr(tokenizer, f"{name}_image_token_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.video_token = "<video>"
    pictures = GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, image_mean=[0.4, 0.5, 0.6], **sizes
    )
    return _OfPictures(pictures, tokenizer, None, image_seq_length=tokens, chat_template=PARTS)


def gemma3(text: dict[str, Any], vision: dict[str, Any], tokens: int) -> Any:
    sizes = {name: value for name, value in TEXT.items() if name != "rope_theta"}
    return transformers.Gemma3Config(
        text_config=sizes | {"head_dim": 12, "query_pre_attn_scalar": 9} | text,
        vision_config=VISION | {"layer_norm_eps": 3e-5, "vision_use_head": False} | vision,
        mm_tokens_per_image=tokens,
        boi_token_index=IMAGE,
        image_token_index=IMAGE + 1,
        eoi_token_index=IMAGE + 2,
        attn_implementation="eager",
    )


def marked_processor(tokenizer: Any, side: int, tokens: int) -> Any:
    for name, token in {"boi": "<image>", "image": "<img>", "eoi": "</img>"}.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    pictures = Gemma3ImageProcessorPil(
        size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return transformers.Gemma3Processor(pictures, tokenizer, PARTS, image_seq_length=tokens)


class _InFront:
    """transformers' processor of PaliGemma, whose tokenizer has 1,152 tokens beside; its rules for
    texts are written here again."""

    chat_template = PARTS

    def __init__(self, tokenizer: Any, side: int, patch: int):
        self.image_processor = SiglipImageProcessorPil(size={"height": side, "width": side})
        self.tokenizer, self.tokens = tokenizer, (side // patch) ** 2

    def __call__(self, images: Any, text: str, **unused: Any) -> dict[str, Any]:
        text = text.replace("<image>", "<image>" * self.tokens)
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        pixels = self.image_processor(images, return_tensors="pt") if images else {}
        whole = {"token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
        return {"input_ids": ids, **whole, **pixels}

    def apply_chat_template(self, messages: Any, **unused: Any) -> str:
        parts = messages[0]["content"]
        words = "".join(part.get("text", "") for part in parts)
        return "<image>" * sum(part["type"] == "image" for part in parts) + f"{words}\n"


def paligemma(text: dict[str, Any], vision: dict[str, Any]) -> Any:
    sizes = {name: value for name, value in TEXT.items() if name != "rope_theta"}
    return transformers.PaliGemmaConfig(
        text_config=sizes | {"head_dim": 12} | text,
        vision_config=VISION
        | {"model_type": "siglip_vision_model", "layer_norm_eps": 3e-5, "vision_use_head": False}
        | vision,
        image_token_index=IMAGE,
        projection_dim=TEXT["hidden_size"],
        attn_implementation="eager",
    )


PALIGEMMA = "paligemma, Gemma 2, prompts longer than windows"
CASES = {
    # Windows that are smaller than a picture; a picture that is longer than a chunk.
    "gemma3": Case(
        lambda: gemma3(
            {"sliding_window": 11, "layer_types": ["full_attention", "sliding_attention"]},
            {"image_size": 24, "patch_size": 3},
            16,
        ),
        lambda tokenizer: marked_processor(tokenizer, 24, 16),
    ),
    "gemma3, a patch a token": Case(
        lambda: gemma3({"sliding_window_pattern": 2}, {"image_size": 28, "patch_size": 4}, 49),
        lambda tokenizer: marked_processor(tokenizer, 28, 49),
    ),
    PALIGEMMA: Case(
        lambda: paligemma(
            {
                **{"model_type": "gemma2", "sliding_window": 21, "query_pre_attn_scalar": 9},
                "final_logit_softcapping": 4.0,
            },
            {"image_size": 24, "patch_size": 4},
        ),
        lambda tokenizer: _InFront(tokenizer, 24, 4),
    ),
    "paligemma, Gemma 1": Case(
        lambda: paligemma({"model_type": "gemma"}, {"image_size": 28, "patch_size": 4}),
        lambda tokenizer: _InFront(tokenizer, 28, 4),
    ),
    "internvl": Case(
        lambda: internvl(
            {"image_size": 24, "patch_size": 4, "attention_bias": True},
            {"model_type": "qwen3", "head_dim": 10},
            downsample_ratio=0.5,
            tie_word_embeddings=False,
        ),
        lambda tokenizer: ratio_processor(tokenizer, 24, 9, max_patches=7),
    ),
    "internvl, 6B's tower": Case(
        lambda: internvl(
            {"image_size": 24, "patch_size": 3, "norm_type": "rms_norm", "use_qk_norm": True},
            {"model_type": "qwen2"},
            downsample_ratio=0.25,
            projector_hidden_act="gelu_new",
            vision_feature_layer=-2,
        ),
        lambda tokenizer: ratio_processor(tokenizer, 24, 4, min_patches=2, max_patches=5),
    ),
    "smolvlm": Case(
        lambda: idefics3(
            "SmolVLM", {"image_size": 24, "patch_size": 4, "layer_norm_eps": 3e-5}, scale_factor=2
        ),
        lambda tokenizer: rows_processor(tokenizer, 24, 70, 9),
    ),
    "idefics3, a tile": Case(
        lambda: idefics3(
            "Idefics3",
            {"image_size": 28, "patch_size": 3, "hidden_act": "gelu"},
            scale_factor=3,
            tie_word_embeddings=True,
        ),
        lambda tokenizer: rows_processor(tokenizer, 28, 27, 9),
    ),
}


@functools.cache
def make_pair(name: str, folder: Path) -> Pair:
    case = CASES[name]
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText
    theirs = randomize(kind.from_config(case.config()), 0, 0.05)
    theirs.save_pretrained(folder)
    tokenizer = letters(bos=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<image>"]
    )
    processor = case.processor(tokenizer)
    for part in (processor.image_processor, processor.tokenizer):
        part.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    return Pair(theirs, load_published("llava", folder, unroll=1), processor, folder)


def folder_of(name: str, tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / f"vlm_family_{list(CASES).index(name)}"


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, folder_of(request.param, tmp_path_factory))


def pictures() -> list[Image.Image]:
    return [smooth(size, number) for number, size in enumerate(SIZES)]


class Prompt(NamedTuple):
    """A prompt with pictures as both sides have it.

    Attributes:
      ids: ours, one placeholder for each tile.
      tiles: uint8 pixels of each.
      inputs: transformers' own.
    """

    ids: list[int]
    tiles: list[np.ndarray]
    inputs: dict[str, torch.Tensor]


def prompt(pair: Pair, text: str, images: list[Image.Image]) -> Prompt:
    form = picture_format(pair.ours.config, open_text_tokenizer(pair.folder))
    files = shown_pictures([Picture(encoded(image), "picture") for image in images])
    tiles = [tile for file in files for tile in form.read_all(file)]
    inputs = pair.processor(images=images, text=text, return_tensors="pt", add_special_tokens=False)
    assert sum(map(form.tokens, files)) == len(tiles) * pair.ours.config.features
    assert sum(map(form.places, files)) == len(tiles)
    return Prompt(form.encode(text, files), tiles, dict(inputs))


@pytest.mark.parametrize(("text", "used"), PROMPTS)
def test_tokens_and_pixels_are_the_processors(pair, text, used):
    """One picture, and two of odd sizes; the pixels are Pillow's, byte by byte."""
    made = prompt(pair, text, [pictures()[n] for n in used])
    config = pair.ours.config
    (ids,) = expand_images([made.ids], [len(made.tiles)], config).input_ids
    assert ids.tolist() == made.inputs["input_ids"][0].tolist()
    vision = config.vision
    pixels = (np.stack(made.tiles) / 255.0 - vision.pixel_mean) / vision.pixel_std
    want = made.inputs["pixel_values"].numpy().reshape(-1, 3, *pixels.shape[1:3])
    np.testing.assert_allclose(pixels, want.transpose(0, 2, 3, 1), rtol=0, atol=1e-5)


def test_logits_equal(pair):
    """A picture amid more than 500 tokens."""
    made = prompt(pair, long_prompt(pictures=1), [pictures()[0]])
    with torch.no_grad():
        want = pair.theirs(**made.inputs).logits.numpy()
    prompts = expand_images([made.ids], [len(made.tiles)], pair.ours.config)
    assert prompts.mask.sum() > 500
    pixels = np.asarray(pair.ours.vision.normalize(np.stack(made.tiles)))
    got = compiled(pair.ours, forward)(prompts.input_ids, pixels)
    np.testing.assert_allclose(got, want, **WHOLE)
    assert np.abs(want).max() > 1


def test_pictures_of_gemma3_are_seen_whole(tmp_path_factory):
    """The same tokens with a causal mask give something else, so that the tests above can fail."""
    pair = make_pair("gemma3", folder_of("gemma3", tmp_path_factory))
    made = prompt(pair, "a<image>b", [pictures()[0]])
    without = {key: value for key, value in made.inputs.items() if key != "token_type_ids"}
    with torch.no_grad():
        whole, causal = (pair.theirs(**inputs).logits for inputs in (made.inputs, without))
    assert (whole - causal).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["gemma3", PALIGEMMA])
def test_scanned_layers_see_pictures_whole(tmp_path_factory, name):
    """The cache of scanned layers has masks of its own; a picture lies in two chunks' columns."""
    folder = make_pair(name, folder_of(name, tmp_path_factory)).folder
    files = [Picture(encoded(image), "picture") for image in pictures()[:2]]
    query = Completion(
        "a", "words<image>and<image>more", Decoding(NEW, logprobs=True), tuple(files)
    )
    answers = []
    for scan in (False, True):
        sizes = EngineConfig(slots=2, length=96, buckets=(16,), prefill_tokens=32, scan_layers=scan)
        (answer,) = open_backend(folder, engine=sizes).answer([query])
        answers.append(answer.candidates[0])
    unrolled, scanned = answers
    assert unrolled.tokens == scanned.tokens
    np.testing.assert_allclose(scanned.logprobs, unrolled.logprobs, rtol=0, atol=1e-4)


def test_crops_beside_a_picture_are_refused(tmp_path_factory, tmp_path):
    folder = make_pair("gemma3", folder_of("gemma3", tmp_path_factory)).folder
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    processor = tmp_path / "preprocessor_config.json"
    processor.unlink(missing_ok=True)
    processor.write_text(json.dumps({"do_pan_and_scan": True}))
    refuses(r"preprocessor_config\.json: do_pan_and_scan is", load_published, "llava", tmp_path)


def test_answers_equal_generate(pair):
    """Pictures within conversations: pixels, template and tokens are the processor's."""
    images = pictures()
    asked = {"two": [images[1], images[2], "Is one?"], "one": [images[0], "What?"], "none": ["W?"]}
    inputs = {name: processor_inputs(pair.processor, parts) for name, parts in asked.items()}
    messages = {name: (parts, inputs[name]) for name, parts in asked.items()}
    backend = answers_as_generate(pair, messages, EOS)
    broken = Completion("a", "<image>", Decoding(NEW), (Picture(b"GIF89a", "broken.gif"),))
    refuses(r"broken\.gif", backend.check, broken)


def test_checkpoints_go_both_ways(pair, tmp_path):
    published = publish_llava(pair.ours.config, nnx.state(pair.ours))
    export_is_read_by_both(pair, "llava", published, tmp_path / "out")


def test_the_check_compares_all_layers(pair):
    check_passes(pair.folder, "picture layer 3", "layer 2", "logits")


def test_what_a_plan_compiles(pair):
    """The tower's programs, and the features of pictures with as many tiles as may be."""
    config, sizes = pair.ours.config, EngineConfig(slots=3, length=256, buckets=(32,))
    mesh = lower_tower(config, sizes)
    most = max(len(prompt(pair, "<image>", [picture]).tiles) for picture in pictures())
    assert most <= config.most_squares
    squares = 3 * 2 * config.most_squares + 1
    of_square = config.features * 4 * config.llama.hidden
    assert feature_bytes(config, sizes, mesh, pictures=2) == squares * of_square


GRANITE_DOCLING = {
    "model_type": "idefics3", "image_token_id": 100270, "scale_factor": 4,
    "tie_word_embeddings": True, "vocab_size": 100352,
    "text_config": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000.0,
        "tie_word_embeddings": True, "vocab_size": 100352,
    },
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768, "image_size": 512,
        "intermediate_size": 3072, "layer_norm_eps": 1e-06, "max_image_size": {"longest_edge": 512},
        "model_type": "idefics3_vision", "num_attention_heads": 12, "num_channels": 3,
        "num_hidden_layers": 12, "patch_size": 16, "size": {"longest_edge": 512},
    },
}  # fmt: skip
SMOLVLM2_256M = {
    "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pixel_shuffle_factor": 4,
        "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_theta": 100000, "use_resampler": False, "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512},
        "model_type": "smolvlm_vision", "num_attention_heads": 12, "patch_size": 16,
        "use_base_siglip": False,
    },
}  # fmt: skip
GEMMA3_4B = {
    "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000,
    "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
INTERNVL35_1B = {
    "model_type": "internvl", "image_token_id": 151671, "image_seq_length": 256,
    "downsample_ratio": 0.5, "projector_hidden_act": "gelu",
    "text_config": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
        "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "vision_config": {
        "attention_bias": True, "dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1024,
        "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": [14, 14],
        "projection_dropout": 0.0, "use_mean_pooling": True, "use_qk_norm": False,
    },
}  # fmt: skip


PALIGEMMA2_3B = {
    "model_type": "paligemma",
    "image_token_index": 257152,
    "projection_dim": 2304,
    "text_config": {
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_image_tokens": 1024, "num_key_value_heads": 4, "vocab_size": 257216,
        "query_pre_attn_scalar": 256,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 448, "intermediate_size": 4304, "patch_size": 14,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "num_image_tokens": 1024, "projection_dim": 2304, "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("paligemma2_3b", PALIGEMMA2_3B),
        ("granite_docling_258m", GRANITE_DOCLING),
        ("smolvlm2_256m", SMOLVLM2_256M),
        ("internvl35_1b", INTERNVL35_1B),
        ("gemma3_4b_vl", GEMMA3_4B),
    ],
)
def test_presets_have_the_published_sizes(name, published):
    """Every parameter's shape is that of transformers' model of the published config.json."""
    config = PRESETS[name]()
    assert llava_config(published) == config
    values = {key: value for key, value in published.items() if key != "model_type"}
    kind = transformers.AutoConfig.for_model(published["model_type"], **values)
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(kind)
    key_map = llava_key_map(config)
    specs = untied_source(nnx.state(abstract(Llava, config)), key_map).specs()
    wanted = {}
    for key, parameter in theirs.named_parameters():
        for pattern, replacement in key_map.rename:
            key = re.sub(pattern, replacement, key)
        wanted[key] = tuple(parameter.shape)
    assert {key: spec.shape for key, spec in specs.items()} == wanted


INSIDE = {"smolvlm": SMOLVLM2_256M, "internvl": INTERNVL35_1B, "gemma3": GEMMA3_4B}
INSIDE["paligemma"] = PALIGEMMA2_3B
REFUSED = [
    ("gemma3", {"mm_tokens_per_image": 255}, "mm_tokens_per_image is 255, expected the number of"),
    ("gemma3", {"mm_tokens_per_image": 100}, "mm_tokens_per_image is 100, expected the number of"),
    ("gemma3", {"mm_tokens_per_image": 0}, "mm_tokens_per_image is 0, expected a whole number"),
    ("gemma3", {"pooling": "max"}, "key 'pooling'"),
    ("gemma3", {"vision_config": {"model_type": "dinov2"}}, "model_type is 'dinov2'"),
    ("gemma3", {"boi_token_index": None}, "boi_token_index is None"),
    ("paligemma", {"text_config": {"use_bidirectional_attention": False}}, "attention is False"),
    ("paligemma", {"vision_config": {"model_type": "dinov2"}}, "model_type is 'dinov2'"),
    ("paligemma", {"projection_dim": 0}, "projection_dim is 0, expected a whole number"),
    ("paligemma", {"sights": 3}, "key 'sights'"),
    ("smolvlm", {"scale_factor": 5}, r"model\.merge is 5: expected a divisor of the side"),
    ("smolvlm", {"scale_factor": 0}, "scale_factor is 0, expected a whole number"),
    ("smolvlm", {"perceiver": 1}, "key 'perceiver'"),
    ("smolvlm", {"text_config": {"use_resampler": True}}, "use_resampler is True"),
    ("smolvlm", {"text_config": {"model_type": "mamba"}}, "model_type is 'mamba'"),
    ("smolvlm", {"vision_config": {"model_type": "clip_vision_model"}}, "expected 'idefics3_vis"),
    ("internvl", {"downsample_ratio": 0.3}, r"downsample_ratio is 0\.3, expected 1 over"),
    ("internvl", {"downsample_ratio": 0}, "downsample_ratio is 0, expected 1 over"),
    ("internvl", {"vision_feature_layer": [1, 2]}, r"vision_feature_layer is \[1, 2\]"),
    ("internvl", {"vision_config": {"image_size": [448, 224]}}, r"image_size is \[448, 224\]"),
    ("internvl", {"vision_config": {"use_mean_pooling": False}}, "use_mean_pooling is False"),
    ("internvl", {"vision_config": {"norm_type": "group"}}, r"vision\.norm is 'group'"),
    ("internvl", {"vision_config": {"hidden_act": "tan"}}, "hidden_act is 'tan'"),
]


@pytest.mark.parametrize(("family", "changes", "match"), REFUSED)
def test_a_bad_config_is_refused_by_name(family, changes, match):
    refuses(match, llava_config, changed(INSIDE[family], changes))


PROCESSORS = [
    ("smolvlm", {"do_image_splitting": False}, "do_image_splitting is False"),
    ("smolvlm", {"max_image_size": {"longest_edge": 364}}, "expected longest_edge of 512"),
    ("smolvlm", {"size": {"longest_edge": 9999}}, r"longest is 9999: expected 1 to 4096"),
    ("smolvlm", {"resample": 3}, "resample is 3"),
    ("smolvlm", {"image_mean": [0.1, 0.5, 0.5]}, "image_mean is"),
    ("internvl", {"size": {"height": 448, "width": 224}}, "expected height and width of 448"),
    ("internvl", {"min_patches": 9, "max_patches": 4}, "least and most are 9 and 4"),
    ("internvl", {"image_std": [0.2, 0.0, 0.2]}, "image_std is"),
    ("internvl", {"new_option": 1}, "key 'new_option'"),
]


@pytest.mark.parametrize(("family", "file", "match"), PROCESSORS)
def test_a_bad_processor_is_refused_by_name(tmp_path, family, file, match):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    with pytest.raises(UserError, match=match):
        with_split(tmp_path, llava_config(INSIDE[family]))


WIDTHS = (1, 2, 37, 448, 500, 512, 769, 1024, 3001, 20000)


@pytest.mark.parametrize("height", [1, 13, 100, 384, 513, 700, 1999, 30000])
def test_canvases_of_any_size_are_the_processors(height):
    """Of the published sizes: both steps of Idefics3's, and InternVL's."""

    class Sizes(Idefics3ImageProcessorPil):
        """Its `resize` without pixels."""

        def resize(self, image, size, resample=None, **unused):
            return size.width, size.height

    for side, longest in ((512, 2048), (384, 1536), (364, 1456)):
        for width in WIDTHS:
            picture = np.broadcast_to(np.uint8(0), (3, height, width))
            first = get_resize_output_image_size(picture, longest)
            scaled = np.broadcast_to(np.uint8(0), (3, *first))
            want = [(first[1], first[0]), Sizes().resize_for_vision_encoder(scaled, side)]
            cut = RowTiles(longest).cut(width, height, UnitSizes(14, 1, side=side))
            if min(want[1]):  # else transformers fails
                assert [*cut.steps] == want
            tiles = math.prod(cut.canvas) // side**2
            assert tiles <= RowTiles(longest).most_tiles(side)
    for least, most in ((1, 12), (2, 7), (1, 1)):
        for width in WIDTHS:
            columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            cut = RatioTiles(least, most).cut(width, height, UnitSizes(14, 1, side=448))
            assert cut.steps == ((448 * columns, 448 * rows),)


def test_a_long_and_thin_picture():
    """A row of 9,000 pixels becomes four tiles and the whole."""
    units = UnitSizes(16, 1, side=512)
    cut = RowTiles(2048).cut(9000, 1, units)
    tiles = cut_tiles(Image.new("RGB", (9000, 1)), cut, "lanczos", whole_of_canvas=True)
    assert np.shape(tiles) == (5, 512, 512, 3)
    assert RowTiles(2048).cut(1, 9000, units).canvas == (512, 2048)
