"""LLaVA of other towers and decoders against transformers: logits, answers, checkpoints.

LLaVA-1.5's own (CLIP, LLaMA) is in test_llava.py.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import decoder_cases
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, forward, randomize, reloaded, same_parameters
from flax import nnx
from PIL import Image
from qwen_vl_pair import LETTERS
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vlm_checks import (
    Pair,
    answers_as_generate,
    check_passes,
    export_is_read_by_both,
    processor_inputs,
)

from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.models.llava.config import ORIGINAL_IMAGE_TOKEN
from mmqa_jax.models.llava.keys import publish_llava
from mmqa_jax.models.llava.network import expand_images
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.picture_format import Shown, picture_format
from mmqa_jax.prompting.text_tokenizer import VicunaV1, open_text_tokenizer
from mmqa_jax.weights.published import load_published, write_published
from tests.pictures import encoded, smooth

pytestmark = pytest.mark.slow

WORDS, BOS, EOS, IMAGE = 97, 90, 91, 92
LENGTH = 520  # short prompts hide mistakes in rotary positions
PARTS = """{% for message in messages %}[{{ message['role'] }}] {% for content in \
message['content'] | selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{{ content['text'] }}{% endfor %}{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"""
# As LLaMA-3's: of words alone, with the first token written out.
STRINGS = """{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}\
[{{ message['role'] }}] {{ message['content'] | trim }}{% endfor %}[a] """
VISION = {
    "clip": {
        "model_type": "clip_vision_model", "hidden_size": 40, "intermediate_size": 72,
        "num_hidden_layers": 3, "num_attention_heads": 5, "image_size": 40, "patch_size": 8,
        "projection_dim": 28, "layer_norm_eps": 3e-5,
    },
    "siglip": {  # 27 pixels: three belong to no patch
        "model_type": "siglip_vision_model", "hidden_size": 40, "intermediate_size": 72,
        "num_hidden_layers": 3, "num_attention_heads": 5, "image_size": 27, "patch_size": 6,
        "layer_norm_eps": 2e-4,
    },
}  # fmt: skip
TEXT = {
    "vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 640,
    "rms_norm_eps": 2e-5, "initializer_range": 0.08, "pad_token_id": None, "bos_token_id": BOS,
    "eos_token_id": EOS,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 6.0, "low_freq_factor": 0.5,
    "high_freq_factor": 5.0, "original_max_position_embeddings": 90,
}  # fmt: skip


class Case(NamedTuple):
    """A tower and values of it, a decoder and values of it, and of both; the chat template."""

    tower: str
    vision: dict[str, Any]
    decoder: str
    text: dict[str, Any]
    both: dict[str, Any]
    template: str = PARTS


CASES = {
    "CLIP with its class token, Mistral": Case(
        "clip", {}, "mistral", {"sliding_window": 37}, {"vision_feature_select_strategy": "full"}
    ),
    "CLIP, Qwen2": Case(
        "clip", {}, "qwen2", {"tie_word_embeddings": True}, {"vision_feature_layer": -1}
    ),
    "SigLIP, Gemma 2": Case(
        "siglip",
        {},
        "gemma2",
        {"head_dim": 12, "sliding_window": 41, "query_pre_attn_scalar": 20},
        {"vision_feature_select_strategy": "full"},
    ),
    "SigLIP without its head, LLaMA-3": Case(
        "siglip",
        {"vision_use_head": False},
        "llama",
        {"rope_parameters": LLAMA3},
        {"vision_feature_select_strategy": "full"},
    ),
    "SigLIP without its first patch, Granite": Case(  # it scales what comes of pictures too
        "siglip",
        {"vision_use_head": False},
        "granite",
        {"embedding_multiplier": 1.7, "residual_multiplier": 0.6, "logits_scaling": 0.5},
        {"vision_feature_layer": -1},
        STRINGS,
    ),
    "SigLIP, Phi-3": Case(
        "siglip", {}, "phi3", {"sliding_window": None}, {"vision_feature_select_strategy": "full"}
    ),
}
TOKENS = (26, 25, 16, 16, 15, 16)  # of a picture
# The other families: a CLIP, and the sizes that this vocabulary and width need.
MORE: dict[str, dict[str, Any]] = {
    family: {} for family in FAMILIES if family not in {case.decoder for case in CASES.values()}
}
del MORE["paddleocr_vl_text"]  # transformers has no class for it without its tower
del MORE["kimi_k2"]  # DeepSeek-V3's
MORE["ministral"] = MORE["helium"] = {"head_dim": 8}
MORE["dots1"] = {
    **{"head_dim": 8, "moe_intermediate_size": 20, "n_routed_experts": 5, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1},
}
MORE["lfm2"] = {"layer_types": ["conv", "full_attention"]}
MORE["lfm2_moe"] = {
    **{**MORE["lfm2"], "moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2},
    "num_dense_layers": 1,
}
MORE["qwen3_moe"] = {"moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2}
_RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
MORE["qwen3_5_text"] = _RECURRENT
# Inputs of layers' own follow from words, and a picture has none.
MORE["gemma4_text"] = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": WORDS}
MORE["qwen3_5_moe_text"] = MORE["qwen3_next"] = {
    **_RECURRENT,
    **MORE["qwen3_moe"],
    "shared_expert_intermediate_size": 12,
}
# Families whose usual sizes are a large model's take those of their own test.
_LARGE = (
    *("glm", "hyperclovax", "iquestcoder", "internlm3", "cwm", "granite_swa", "granitemoe_swa"),
    *("granitemoeshared", "qwen2_moe", "mellum", "flex_olmo", "minimax_m2", "solar_open", "hy_v3"),
    *(
        "gemma4_unified_text",
        "exaone_moe",
        "afmoe",
        "lfm3",
        "vaultgemma",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
    ),
    "youtu",
)
for _family in _LARGE:
    _values = decoder_cases.CASES[_family].values
    MORE[_family] = {key: x for key, x in _values.items() if key not in decoder_cases.TOKENS}


def letters(bos: bool) -> Tokenizer:
    """One token a letter; `bos`: every prompt begins with a token."""
    vocabulary = {letter: n for n, letter in enumerate(LETTERS + "[]")}
    vocabulary |= {f"<{n}>": n for n in range(len(vocabulary), BOS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    special = ("<s>", "</s>", "<image>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


@functools.cache
def make_pair(name: str, folder: Path) -> Pair:
    case = CASES.get(name) or Case("clip", {}, name, MORE[name], {})
    torch.manual_seed(0)
    usual = transformers.AutoConfig.for_model(case.decoder)
    sizes = {key: x for key, x in TEXT.items() if hasattr(usual, key)}  # layer norms have others
    text = transformers.AutoConfig.for_model(case.decoder, **sizes | case.text)
    config = transformers.LlavaConfig(
        vision_config=VISION[case.tower] | case.vision,
        text_config=text,
        image_token_index=IMAGE,
        attn_implementation="eager",
        **case.both,
    )
    theirs = randomize(transformers.LlavaForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(folder)
    side = VISION[case.tower]["image_size"]
    square = {"height": side, "width": side}
    prepare = (
        CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)
        if case.tower == "clip"
        else SiglipImageProcessorPil(size=square)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters(bos=case.template == STRINGS),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )
    processor = transformers.LlavaProcessor(
        prepare,
        tokenizer,
        patch_size=VISION[case.tower]["patch_size"],
        vision_feature_select_strategy=case.both.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=int(case.tower == "clip"),
        chat_template=case.template,
    )
    processor.save_pretrained(folder)
    return Pair(theirs, load_published("llava", folder, unroll=1), processor, folder)


def folder_of(name: str, tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / f"llava_family_{[*CASES, *MORE].index(name)}"


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, folder_of(request.param, tmp_path_factory))


def test_logits_equal(pair):
    """A picture amid more than 500 words, and two in front."""
    theirs, ours, _, _ = pair
    words = np.random.default_rng(1).integers(1, BOS, LENGTH).tolist()
    rows = [[*words[:17], IMAGE, *words[17:505]], [IMAGE, IMAGE, *words[40:71]]]
    made = expand_images(rows, [1, 2], ours.config)
    assert ours.config.features in TOKENS
    assert made.mask.sum(1).max() > 500
    side = ours.config.vision.image_size
    pixels = np.random.default_rng(2).normal(size=(3, side, side, 3)).astype(np.float32)
    with torch.no_grad():
        want = theirs(
            input_ids=torch.from_numpy(made.input_ids).long(),
            attention_mask=torch.from_numpy(made.mask).long(),
            pixel_values=torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()),
        ).logits.numpy()
    got = np.asarray(compiled(ours, forward)(made.input_ids, pixels))
    np.testing.assert_allclose(got[made.mask], want[made.mask], **WHOLE)
    assert np.abs(want).max() > 1


@pytest.mark.parametrize("pair", MORE, indirect=True, scope="module")
def test_every_other_family(pair, tmp_path):
    """One picture amid words; the checkpoint goes there and back."""
    test_logits_equal(pair)
    test_checkpoints_go_both_ways(pair, tmp_path)


# Both towers, and a decoder that scales what comes of pictures; a template of strings.
ANSWERING = ["CLIP with its class token, Mistral", "SigLIP without its first patch, Granite"]


@pytest.mark.parametrize("pair", ANSWERING, indirect=True, scope="module")
def test_answers_equal_generate(pair):
    """Pictures within a conversation: pixels, template and tokens are the processor's."""
    is_clip = (
        pair.ours.config.resize == "pad"
    )  # transformers crops what we pad; a square is neither
    images = [smooth((64, 64), 64), smooth((50, 50), 50) if is_clip else smooth((30, 71), 30)]
    asked = {"two": [*images, "Is one larger?"], "one": [images[1], "What?"], "none": ["Why?"]}
    messages = {}
    for name, parts in asked.items():
        words = None
        if pair.processor.chat_template == STRINGS:  # a user writes the placeholders himself
            words = "<image>\n" * (len(parts) - 1) + parts[-1]
        messages[name] = parts, processor_inputs(pair.processor, parts, words)
    answers_as_generate(pair, messages, EOS)


def test_checkpoints_go_both_ways(pair, tmp_path):
    published = publish_llava(pair.ours.config, nnx.state(pair.ours))
    if pair.ours.config.llama.family != "youtu":  # whose class empties the row of this token
        published.config["text_config"]["pad_token_id"] = 0  # Phi-3's is beyond the words
    export_is_read_by_both(pair, "llava", published, tmp_path / "out")


def test_the_check_compares_all_layers(tmp_path_factory):
    """`mmqa convert --check` of a SigLIP and a decoder that scales what comes of pictures."""
    name = "SigLIP without its first patch, Granite"
    folder = make_pair(name, folder_of(name, tmp_path_factory)).folder
    check_passes(folder, "picture layer 3", "layer 2", "logits")


# The original's layout, with a SigLIP and a Qwen2 as in LLaVA-NeXT's forks of it.


def write_original(folder: Path, tensors: dict[str, torch.Tensor], tower: Path, **changes) -> Path:
    folder.mkdir()
    text = json.loads((tower.parent / "config.json").read_text())["text_config"]
    options = {
        "model_type": "llava_qwen", "mm_projector_type": "mlp2x_gelu", "mm_hidden_size": 40,
        "mm_vision_select_layer": -2, "mm_vision_tower": str(tower),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(text | options | changes))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_originals_layout(tmp_path):
    """The published tower has a layer and a head more, whether it lies within or beside."""
    torch.manual_seed(0)
    cut = VISION["siglip"] | {"num_hidden_layers": 2, "vision_use_head": False}
    config = transformers.LlavaConfig(
        vision_config=cut,
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    theirs = randomize(transformers.LlavaForConditionalGeneration(config), 0, 0.05)
    theirs.save_pretrained(tmp_path)
    want = load_published("llava", tmp_path, unroll=1)
    whole = transformers.SiglipModel(
        transformers.SiglipConfig(
            vision_config=VISION["siglip"],
            text_config={"vocab_size": 50, "hidden_size": 40, "num_hidden_layers": 1,
                         "num_attention_heads": 5, "intermediate_size": 20},
        )
    )  # fmt: skip
    whole.vision_model.load_state_dict(theirs.model.vision_tower.state_dict(), strict=False)
    whole.save_pretrained(tmp_path / "tower")
    tensors = {}
    for key, tensor in theirs.state_dict().items():
        key = key.replace("model.language_model.", "model.")
        key = key.replace("model.multi_modal_projector.linear_1", "model.mm_projector.0")
        key = key.replace("model.multi_modal_projector.linear_2", "model.mm_projector.2")
        if "vision_tower" not in key:
            tensors[key] = tensor.clone()
    within = {
        f"model.vision_tower.vision_tower.vision_model.{key}": tensor.clone()
        for key, tensor in whole.vision_model.state_dict().items()
    }
    bare = write_original(tmp_path / "bare", tensors, tmp_path / "tower")
    full = write_original(tmp_path / "full", tensors | within, tmp_path / "tower")
    for folder in (bare, full):
        got = load_published("llava", folder, unroll=1)
        same_parameters(got, want)
        assert got.config.image_token == ORIGINAL_IMAGE_TOKEN
        assert got.config.resize == "pad"
        assert (got.config.feature_layer, got.config.features) == (-1, 16)
    # Its pictures lie on gray, and its conversation is Vicuna's, whatever the tokenizer says.
    letters(bos=False).save(str(bare / "tokenizer.json"))
    (bare / "chat_template.jinja").write_text(PARTS)
    form = picture_format(got.config, open_text_tokenizer(bare))
    assert isinstance(form.chat_format, VicunaV1)
    black = Picture(encoded(Image.new("RGB", (30, 10))), "black")
    pixels = form.read(Shown(black, alone=True))
    assert pixels[0, 0].tolist() == [127] * 3
    assert pixels[13, 13].tolist() == [0] * 3
    # With words of its own for `<image>` it is transformers' again.
    write_published(tmp_path / "out", publish_llava(got.config, nnx.state(got)))
    again = reloaded(transformers.LlavaForConditionalGeneration, tmp_path / "out")
    assert again.config.text_config.vocab_size == 128
    for (name, want), wider in zip(theirs.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(wider[: len(want)], want), name
