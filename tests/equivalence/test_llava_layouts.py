"""LLaVA-1.5 checkpoints in every published layout, their export, and what is refused."""

import dataclasses
import json
import re

import llava_pair as tiny
import numpy as np
import pytest
import torch
import transformers
from compare import LAYER, abstract, reloaded, same_parameters
from flax import nnx
from safetensors.torch import load_file, save_file

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama.network import unstack_layers
from mmqa_jax.models.llava.config import ORIGINAL_IMAGE_TOKEN, llava_1_5_7b, llava_1_5_13b
from mmqa_jax.models.llava.keys import (
    llava_config,
    llava_key_map,
    llava_to_hf,
    open_llava,
    original_config,
    publish_llava,
)
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.two_towers import config as clip
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from mmqa_jax.weights.keymap import model_source
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses

TOWER = "vision_tower.vision_model."
# config.json of liuhaotian/llava-v1.5-7b, what concerns the model.
PUBLISHED = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "image_aspect_ratio": "pad",
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "mm_hidden_size": 1024,
    "mm_projector_type": "mlp2x_gelu",
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "model_type": "llava",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "tokenizer_model_max_length": 2048,
    "tokenizer_padding_side": "right",
    "tune_mm_mlp_adapter": False,
    "unfreeze_mm_vision_tower": False,
    "use_mm_proj": True,
    "vocab_size": 32000,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    case = next(iter(tiny.CASES))
    return tiny.make_pair(case, tmp_path_factory.mktemp("llava"))


def tensors(pair):
    """The checkpoint under the keys of llava-hf/llava-1.5-7b-hf."""
    return tiny.published_tensors(pair.ours, pair.theirs.state_dict().items())


def renamed(found, *changes):
    """Keys changed by (regex, replacement), of which exactly one fits each key."""
    out = {}
    for key, tensor in found.items():
        hits = [(p, r) for p, r in changes if re.search(p, key)]
        assert len(hits) == 1, key
        out[re.sub(*hits[0], key)] = tensor.clone()
    return out


def original_tensors(pair, tower=True):
    """The checkpoint under haotian-liu/LLaVA's keys, with or without the vision tower."""
    found = renamed(
        tensors(pair),
        (r"^language_model\.model\.", "model."),
        (r"^language_model\.lm_head", "lm_head"),
        (r"^multi_modal_projector\.linear_1", "model.mm_projector.0"),
        (r"^multi_modal_projector\.linear_2", "model.mm_projector.2"),
        (r"^vision_tower\.", "model.vision_tower.vision_tower."),
    )
    return {key: tensor for key, tensor in found.items() if tower or "vision_tower" not in key}


def write_original(folder, found, **changes):
    """Torch files in two shards, as liuhaotian/llava-v1.5-7b is published."""
    folder.mkdir()
    text = tiny.TEXT | {"model_type": "llava_llama"}
    options = {key: value for key, value in PUBLISHED.items() if key.startswith("mm_")}
    config = text | options | {"mm_vision_tower": "local/tiny-clip", "mm_hidden_size": 40}
    (folder / "config.json").write_text(json.dumps(config | changes))
    keys = list(found)
    weight_map = {}
    for number, part in enumerate((keys[::2], keys[1::2]), start=1):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({key: found[key] for key in part}, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def write_clip(folder, pair):
    """A whole CLIPModel whose vision tower is the pair's."""
    config = transformers.CLIPConfig(
        vision_config=tiny.VISION,
        text_config={
            "vocab_size": 50,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 9,
        },
        projection_dim=28,
    )
    model = transformers.CLIPModel(config)
    model.vision_model.load_state_dict(pair.theirs.model.vision_tower.state_dict())
    model.save_pretrained(folder)
    return folder


LAYOUTS = {
    "transformers 4.36, published": [(r"^", "")],
    "transformers 4.52": [
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.lm_head", "lm_head"),
        (r"^multi_modal_projector", "model.multi_modal_projector"),
        (r"^vision_tower", "model.vision_tower"),
    ],
    "transformers 5, in memory": [
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.lm_head", "lm_head"),
        (r"^multi_modal_projector", "model.multi_modal_projector"),
        (r"^vision_tower\.vision_model", "model.vision_tower"),
    ],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_transformers_layouts_load_alike(layout, pair, tmp_path):
    found = renamed(tensors(pair), *LAYOUTS[layout])
    buffers = {"positions": torch.arange(101), "frequencies": torch.ones(4)}
    if layout == "transformers 4.36, published":  # its buffers were saved too
        found[f"{TOWER}embeddings.position_ids"] = buffers["positions"]
        name = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
        found[name] = buffers["frequencies"]
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((pair.folder / "config.json").read_text())
    model = load_published("llava", tmp_path, unroll=1)
    same_parameters(model, pair.ours)
    assert model.config == pair.ours.config


def test_original_layout_loads_alike(pair, tmp_path):
    """With the vision tower within, in a CLIPModel's folder, and in a CLIPVisionModel's."""
    clip_folder = write_clip(tmp_path / "clip", pair)
    tower_folder = tmp_path / "tower"
    pair.theirs.model.vision_tower.save_pretrained(tower_folder)
    whole = write_original(tmp_path / "whole", original_tensors(pair))
    bare = write_original(tmp_path / "bare", original_tensors(pair, tower=False))
    expected = dataclasses.replace(pair.ours.config, image_token=ORIGINAL_IMAGE_TOKEN)
    for folder, tower in ((whole, clip_folder), (bare, clip_folder), (bare, tower_folder)):
        model = load_published("llava", folder, clip=tower, unroll=1)
        same_parameters(model, pair.ours)
        assert model.config == expected
    found = original_tensors(pair, tower=False)
    named = write_original(tmp_path / "named", found, mm_vision_tower=str(tower_folder))
    same_parameters(load_published("llava", named, unroll=1), pair.ours)
    # A tower within the checkpoint goes before CLIP's.
    other = load_file(clip_folder / "model.safetensors")
    save_file({k: 0 * v for k, v in other.items()}, clip_folder / "model.safetensors")
    same_parameters(load_published("llava", whole, clip=clip_folder, unroll=1), pair.ours)
    known = {"mm_vision_tower": "openai/clip-vit-large-patch14-336", "mm_hidden_size": 1024}
    alone = write_original(tmp_path / "alone", found, **known)
    refuses("holds no vision tower; give the folder of the CLIP", load_published, "llava", alone)


def test_original_and_transformers_configs_are_the_presets():
    original = original_config(PUBLISHED, None)
    sizes = llava_1_5_7b()
    assert original == dataclasses.replace(
        sizes,
        llama=dataclasses.replace(sizes.llama, vocab_size=32000),
        image_token=ORIGINAL_IMAGE_TOKEN,
    )
    # config.json of llava-hf/llava-1.5-7b-hf, of its text only what differs from defaults.
    published = {
        "model_type": "llava",
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "text_config": {
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "vocab_size": 32064,
        },
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    assert llava_config(published) == sizes
    del published["vision_config"]  # transformers' default
    assert llava_config(published) == sizes
    assert llava_config(llava_to_hf(sizes)) == sizes


@pytest.mark.parametrize("name", ["llava_1_5_7b", "llava_1_5_13b"])
def test_presets_have_the_published_sizes(name):
    """Every parameter's shape is that of transformers' model with the published sizes."""
    config = {"llava_1_5_7b": llava_1_5_7b, "llava_1_5_13b": llava_1_5_13b}[name]()
    large = name.endswith("13b")
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    if large:
        text |= {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "num_hidden_layers": 40,
        }
    with torch.device("meta"):
        theirs = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(text_config=text)
        )
    model = abstract(Llava, config)
    specs = model_source(nnx.state(model), llava_key_map(config)).specs()
    wanted = tiny.published_tensors(model, theirs.named_parameters())
    assert {k: s.shape for k, s in specs.items()} == {k: tuple(p.shape) for k, p in wanted.items()}
    assert config.vision.patches == 576
    assert config.vision.heads == 16
    assert config.llama.heads == (40 if large else 32)


@pytest.mark.parametrize("case", list(tiny.CASES))
def test_export_reloads_in_transformers(case, tmp_path):
    theirs, ours, _ = tiny.make_pair(case, tmp_path / "theirs")
    published = publish_llava(ours.config, nnx.state(ours))
    write_published(tmp_path / "out", published, more={"eos_token_id": 5})
    again = reloaded(
        transformers.LlavaForConditionalGeneration, tmp_path / "out", attn_implementation="eager"
    )
    assert again.config.eos_token_id == 5
    assert again.dtype == torch.float32
    for name, want in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], want), name
    inputs = tiny.torch_inputs(tiny.prompts(ours))
    np.testing.assert_array_equal(
        tiny.torch_logits(again, inputs), tiny.torch_logits(theirs, inputs)
    )
    back = load_published("llava", tmp_path / "out", unroll=1)
    same_parameters(back, ours)
    assert back.config == ours.config
    unstack_layers(back.llama)
    with pytest.raises(UserError, match="layout does not have: llama/layers/0/"):
        publish_llava(back.config, nnx.state(back))


def test_the_original_is_exported_with_words_for_its_placeholder(pair, tmp_path):
    """transformers needs `<image>` in its word table: the other words' logits stay as they are."""
    whole = write_original(tmp_path / "original", original_tensors(pair))
    clip_folder = write_clip(tmp_path / "clip", pair)
    ours = load_published("llava", whole, clip=clip_folder, unroll=1)
    write_published(tmp_path / "out", publish_llava(ours.config, nnx.state(ours)))
    again = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert again.config.image_token_id == tiny.WORDS
    assert again.config.text_config.vocab_size == 128  # 97 + 2, padded to a multiple of 64
    inputs = tiny.torch_inputs(tiny.prompts(pair.ours))
    want = tiny.torch_logits(pair.theirs, inputs)
    ids = inputs["input_ids"]
    got = tiny.torch_logits(
        again, inputs | {"input_ids": torch.where(ids == tiny.IMAGE_TOKEN, tiny.WORDS, ids)}
    )
    np.testing.assert_allclose(got[..., : tiny.WORDS], want, **LAYER)
    mean = np.broadcast_to(want.mean(-1, keepdims=True), got[..., tiny.WORDS :].shape)
    np.testing.assert_allclose(got[..., tiny.WORDS :], mean, **LAYER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_projector_type": "linear"}, "mm_projector_type is 'linear', LLaVA-1.5's is 'mlp2x"),
        ({"mm_vision_select_feature": "cls_patch"}, "mm_vision_select_feature is 'cls_patch'"),
        ({"mm_patch_merge_type": "spatial_unpad"}, "mm_patch_merge_type is 'spatial_unpad'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end is True"),
        ({"s2": True}, "s2 is True"),
        ({"model_type": "llava_mpt"}, "model_type is 'llava_mpt', expected 'llava' or"),
        ({"mm_vision_tower": "google/siglip"}, "'google/siglip', whose sizes are not known here"),
        ({"mm_hidden_size": 768}, "mm_hidden_size is 768, the vision tower's width 1024"),
    ],
)
def test_originals_of_another_kind_are_refused(changes, message):
    refuses(re.escape(message), original_config, PUBLISHED | changes, None, "here/config.json")


def test_a_siglip_of_which_another_layer_is_read_is_refused():
    changes = {"mm_vision_tower": "google/siglip", "mm_vision_select_layer": -1}
    changes["mm_hidden_size"] = SiglipVisionConfig().width
    message = r"here: mm_vision_select_layer is -1, .* last layer but one \(-2\); correct the file"
    with pytest.raises(UserError, match=message):
        original_config(PUBLISHED | changes, SiglipVisionConfig(), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava_next"}, "model_type is 'llava_next', expected 'llava'"),
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer is [-2, -5], which is not"),
        ({"vision_feature_select_strategy": "cls"}, "model.select is 'cls'"),
        ({"projector_hidden_act": "tanh"}, "projector_activation is 'tanh'"),
        ({"text_config": {"model_type": "mamba"}}, "text_config: model_type is 'mamba'"),
        ({"vision_config": {"model_type": "siglip2"}}, "vision_config: model_type is 'siglip2'"),
    ],
)
def test_transformers_configs_of_another_kind_are_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        llava_config(llava_to_hf(llava_1_5_7b()) | changes, "here/config.json")


def test_checkpoints_that_do_not_fit_are_refused(pair, tmp_path):
    config = (pair.folder / "config.json").read_text()

    def refused(message, found, text=config):
        save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(text)
        refuses(message, load_published, "llava", tmp_path)

    whole = {key: tensor.clone() for key, tensor in tensors(pair).items()}

    def without(start):
        return {key: tensor for key, tensor in whole.items() if not key.startswith(start)}

    # What the model does not read is missed all the same: nothing is dropped in silence.
    refused(
        r"parameters without a tensor: vision/layers/mlp_in/bias, layers \[3\]",
        without(f"{TOWER}encoder.layers.3.mlp.fc1.bias"),
    )
    refused("2 parameters without a tensor: vision/ln_post", without(f"{TOWER}post_layernorm."))
    for key in ("vision_tower.visual_projection.weight", "model.image_newline"):
        refused(f"1 keys without a rule: {key}", whole | {key: torch.ones(2, 2)})
    first = "multi_modal_projector.linear_1.weight"
    refused(f"shapes that differ: {first}", whole | {first: torch.ones(48, 41)})
    refused("keys with one meaning", whole | {"model.mm_projector.0.weight": torch.ones(48, 40)})
    refused("give the folder of a LLaVA checkpoint", whole, json.dumps({"model_type": "llama"}))
    refuses(r"config\.json: no such file", open_llava, tmp_path / "absent")


def test_the_clip_folder_must_be_a_clip(pair, tmp_path):
    bare = write_original(tmp_path / "bare", original_tensors(pair, tower=False))
    refuses("model_type is 'llava', expected", load_published, "llava", bare, clip=pair.folder)
    larger = write_clip(tmp_path / "clip", pair)
    config = json.loads((larger / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 80
    (larger / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="mm_hidden_size is 40, the vision tower's width 80"):
        load_published("llava", bare, clip=larger)


def test_vision_tower_is_clip_l_336():
    assert llava_1_5_7b().vision == clip.vit_l_14_336().vision
