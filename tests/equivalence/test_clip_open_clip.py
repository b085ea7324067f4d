"""CLIP as open_clip publishes it: the config beside the tensors decides, and nothing is guessed."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, randomize, reloaded
from flax import nnx

from mmqa_jax.cli import main
from mmqa_jax.models.two_towers.config import (
    CLIPConfig,
    TextConfig,
    VisionConfig,
    vit_b_32,
    vit_l_14,
)
from mmqa_jax.models.two_towers.keys import open_clip_config, squashes, usual_constants
from mmqa_jax.models.two_towers.network import TwoTowers, VisionTower
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.registry import architecture
from tests.refusals import refuses

# Heads of 80 units, as ViT-H-14 has: width // 64 would be 5. MLPs of no multiple of the width.
PUBLISHED = {
    "model_cfg": {
        "embed_dim": 28,
        "vision_cfg": {
            "image_size": 24, "layers": 3, "width": 320, "head_width": 80, "patch_size": 6,
            "mlp_ratio": 0.4337, "norm_kwargs": {"eps": 0.01},
        },
        "text_cfg": {
            "context_length": 11, "vocab_size": 53, "width": 64, "heads": 4, "layers": 2,
            "norm_kwargs": {"eps": 0.001},
        },
    },
    "preprocess_cfg": {
        "size": [24, 24], "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711], "interpolation": "bicubic",
        "resize_mode": "shortest", "fill_color": 0,
    },
}  # fmt: skip
CONFIG = CLIPConfig(
    VisionConfig(
        image_size=24, patch_size=6, width=320, layers=3, heads=4, mlp_width=138, embed_dim=28,
        activation="gelu", eps=0.01,
    ),
    TextConfig(
        vocab_size=53, context=11, width=64, layers=2, heads=4, mlp_width=256, embed_dim=28,
        activation="gelu", eps=0.001,
    ),
)  # fmt: skip


def in_openais_layout(theirs: transformers.CLIPModel) -> dict[str, torch.Tensor]:
    """The tensors of transformers' model under OpenAI's and open_clip's names."""
    names = {
        "logit_scale": "logit_scale",
        "vision_model.embeddings.class_embedding": "visual.class_embedding",
        "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
        "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
    }
    parts = {
        "vision_model.pre_layrnorm.": "visual.ln_pre.",
        "vision_model.post_layernorm.": "visual.ln_post.",
        "text_model.final_layer_norm.": "ln_final.",
        "vision_model.encoder.layers.": "visual.transformer.resblocks.",
        "text_model.encoder.layers.": "transformer.resblocks.",
        "self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
        "layer_norm": "ln_",
    }  # fmt: skip
    found = {}
    for key, tensor in theirs.state_dict().items():
        if key in names:
            found[names[key]] = tensor
        elif key.endswith("al_projection.weight"):
            found["visual.proj"] = tensor.T.contiguous()
        elif key == "text_projection.weight":
            found["text_projection"] = tensor.T.contiguous()
        elif ".q_proj." in key:
            fused = torch.cat([theirs.state_dict()[key.replace("q_", f"{x}_")] for x in "qkv"])
            key = key.replace("self_attn.q_proj.", "attn.in_proj_")
            found[_renamed(key, parts)] = fused
        elif "position_ids" not in key and ".k_proj." not in key and ".v_proj." not in key:
            found[_renamed(key, parts)] = tensor
    return found


def _renamed(key: str, parts: dict[str, str]) -> str:
    for theirs, ours in parts.items():
        key = key.replace(theirs, ours)
    return key


@pytest.fixture(scope="module")
def theirs():
    sizes = {"projection_dim": 28}
    config = transformers.CLIPConfig(
        vision_config={
            "hidden_size": 320, "num_attention_heads": 4, "intermediate_size": 138,
            "num_hidden_layers": 3, "image_size": 24, "patch_size": 6, "hidden_act": "gelu",
            "layer_norm_eps": 0.01,
        },
        text_config={
            "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256,
            "num_hidden_layers": 2, "vocab_size": 53, "max_position_embeddings": 11,
            "hidden_act": "gelu", "layer_norm_eps": 0.001, "eos_token_id": 52,
            "bos_token_id": 51, "pad_token_id": 0,
        },
        **sizes,
        attn_implementation="eager",
    )  # fmt: skip
    return randomize(transformers.CLIPModel(config).eval(), 1, 0.05)


@pytest.fixture
def folder(theirs, tmp_path):
    """As the hub has it."""
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(in_openais_layout(theirs), folder / "open_clip_pytorch_model.bin")
    (folder / "open_clip_config.json").write_text(json.dumps(PUBLISHED))
    return folder


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 50, (3, 11))
    ids[np.arange(3), [10, 4, 7]] = 52
    return rng.normal(size=(3, 24, 24, 3)).astype("f4"), ids


@pytest.mark.parametrize("name", ["", "open_clip_pytorch_model.bin"])
def test_the_config_beside_decides(name, theirs, folder, inputs, tmp_path):
    out = tmp_path / "out"
    assert main(["convert", "--model=clip", f"--source={folder / name}", f"--out={out}"]) == 0
    assert read_record(out).record["layout"] == "open_clip"
    ours = load_converted(out)
    assert ours.config == CONFIG
    pixels, ids = inputs
    torch_pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        image = theirs.visual_projection(theirs.vision_model(torch_pixels).pooler_output)
        text = theirs.text_projection(theirs.text_model(torch.from_numpy(ids)).pooler_output)

    def run(model: TwoTowers, pixels, ids):
        return model.vision(pixels), model.text(ids)

    for got, wanted in zip(compiled(ours, run)(pixels, ids), (image, text), strict=True):
        assert wanted.std(0).mean() > 0.1
        np.testing.assert_allclose(got, wanted, **WHOLE)
    hf = tmp_path / "hf"
    main(["convert", "--model=clip", f"--source={out}", f"--out={hf}", "--export=hf"])
    again = reloaded(transformers.CLIPModel, hf, attn_implementation="eager").eval()
    with torch.no_grad():
        exported = again.visual_projection(again.vision_model(torch_pixels).pooler_output)
    np.testing.assert_array_equal(exported, image)


def test_without_a_config_nothing_is_guessed(folder, capsys, tmp_path):
    (folder / "open_clip_config.json").unlink()
    source = folder / "open_clip_pytorch_model.bin"
    command = ["convert", "--model=clip", f"--source={source}", f"--out={tmp_path / 'out'}"]
    flags = ["vision.heads=5", "text.heads=1", "vision.activation=gelu", "text.activation=gelu"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert f"`{' '.join(f'--set {flag}' for flag in flags)}`" in message
    assert "put the open_clip_config.json that it was published with beside it" in message
    # What is given is no longer asked for; what the message names is taken.
    assert main([*command, "--set=vision.heads=4", "--set=text.activation=gelu"]) == 2
    message = capsys.readouterr().err
    assert "`--set text.heads=1 --set vision.activation=gelu`" in message
    assert not (tmp_path / "out").exists()
    flags[:2] = "vision.heads=4", "text.heads=4"
    eps = ["vision.eps=0.01", "text.eps=0.001"]
    assert main([*command, *(f"--set={flag}" for flag in (*flags, *eps))]) == 0
    assert read_record(tmp_path / "out").config == CONFIG
    refuses(r"or open what `mmqa convert --model=clip .* --set", load_published, "clip", source)
    # OpenAI's own archives hold three integers; its constants are then known.
    own = torch.load(source) | {
        key: torch.tensor(7) for key in ("input_resolution", "context_length", "vocab_size")
    }
    torch.save(own, source)
    checkpoint = architecture("clip").open(source)
    assert (checkpoint.layout, checkpoint.unknown) == ("openai", {})
    assert checkpoint.config.vision.heads == 5
    assert checkpoint.config.text.activation == "quick_gelu"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("model_cfg.custom_text", True, "model_cfg: custom_text is True"),
        ("model_cfg.vision_cfg.no_ln_pre", True, "vision_cfg: no_ln_pre is True"),
        ("model_cfg.vision_cfg.pool_type", "avg", "pool_type is 'avg'"),
        ("model_cfg.vision_cfg.ls_init_value", 0.1, "ls_init_value is 0.1"),
        ("model_cfg.vision_cfg.act_kwargs", {"approximate": "tanh"}, "act_kwargs is {'approx"),
        ("model_cfg.vision_cfg.layers", [3, 4, 6, 3], "use|--model=modified_resnet"),
        ("model_cfg.vision_cfg.image_size", [24, 32], "only square pictures"),
        (
            "model_cfg.vision_cfg.image_size",
            "224",
            "pictures are of '224' pixels, expected a whole",
        ),
        ("model_cfg.vision_cfg.image_size", None, "pictures are of None pixels, expected a whole"),
        ("model_cfg.vision_cfg.norm_kwargs", {"bias": False}, "key 'bias'"),
        ("model_cfg.vision_cfg.new_trick", 2, "the key 'new_trick' \\(2\\) is not known here"),
        ("model_cfg.text_cfg.no_causal_mask", True, "no_causal_mask is True"),
        ("model_cfg.text_cfg.hf_model_name", "bert", "hf_model_name is 'bert'"),
        ("model_cfg.vision_cfg.timm_model_name", "vit_base_patch16_siglip_224", "--model=siglip"),
        ("preprocess_cfg.mean", [0.5, 0.5], r"mean is \[0.5, 0.5\], expected three numbers"),
        ("preprocess_cfg.std", [0.5, 0, 0.5], "std is .*expected three numbers"),
        ("preprocess_cfg.interpolation", "bilinear", "interpolation is 'bilinear'"),
        ("preprocess_cfg.resize_mode", "longest", "resize_mode is 'longest'"),
        ("preprocess_cfg.size", 32, "pictures of 32 pixels, the image tower reads 24"),
        ("preprocess_cfg.size", "24", "pictures are of '24' pixels, expected a whole"),
        ("preprocess_cfg", "openai", "preprocess_cfg is not an object"),
        ("model_cfg", {"embed_dim": 3}, "has no `model_cfg` with embed_dim"),
    ],
)
def test_what_clip_does_not_do_is_refused_by_name(place, value, message, tmp_path):
    content = copy.deepcopy(PUBLISHED)
    *path, last = place.split(".")
    part = content
    for key in path:
        part = part[key]
    part[last] = value
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    refuses(message, open_clip_config, tmp_path)


@pytest.mark.parametrize(
    ("vision", "heads"),
    [  # open_clip src/open_clip/model_configs: ViT-H-14, ViT-g-14, ViT-bigG-14
        ({"layers": 32, "width": 1280, "head_width": 80}, 16),
        ({"layers": 40, "width": 1408, "head_width": 88, "mlp_ratio": 4.3637}, 16),
        ({"layers": 48, "width": 1664, "head_width": 104, "mlp_ratio": 4.9231}, 16),
    ],
)
def test_laions_models(vision, heads, tmp_path):
    content = copy.deepcopy(PUBLISHED)
    del content["preprocess_cfg"]
    content["model_cfg"]["vision_cfg"] = vision
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    config = open_clip_config(tmp_path)
    assert (config.vision.heads, config.vision.activation) == (heads, "gelu")
    assert config.vision.mlp_width == {1280: 5120, 1408: 6144, 1664: 8192}[vision["width"]]
    assert usual_constants(config)["vision.heads"] == heads
    content["model_cfg"]["quick_gelu"] = True
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    assert open_clip_config(tmp_path).text.activation == "quick_gelu"


def test_pictures_are_prepared_as_the_config_says(folder, tmp_path):
    """DFN's ViT-H at 378 pixels squashes; some of LAION's have another mean and deviation."""
    content = copy.deepcopy(PUBLISHED)
    content["model_cfg"] |= {"quick_gelu": True}
    content["model_cfg"]["vision_cfg"]["patch_dropout"] = 0.5  # of training
    content["preprocess_cfg"] |= {"resize_mode": "squash", "mean": [0.5, 0.4, 0.3], "std": 0.25}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    assert main(["convert", "--model=clip", f"--source={folder}", f"--out={out}"]) == 0
    assert squashes(out)
    vision = read_record(out).config.vision
    assert (vision.pixel_mean, vision.activation) == ((0.5, 0.4, 0.3), "quick_gelu")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 24, 24, 3)).astype(np.uint8)
    tower = VisionTower(vision, rngs=nnx.Rngs())
    want = (pixels / 255 - [0.5, 0.4, 0.3]) / 0.25
    np.testing.assert_allclose(tower.normalize(pixels), want, atol=1e-6)


@pytest.mark.parametrize("config", [vit_b_32(), vit_l_14()])
def test_defaults_are_openais_sizes(config, tmp_path):
    assert usual_constants(config)["vision.heads"] == config.vision.heads


def test_transformers_dicts_take_precedence(theirs, tmp_path, inputs):
    """Early conversions on the hub: `*_config_dict` holds the true values."""
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for kind in ("vision", "text"):
        config[f"{kind}_config_dict"] = dict(config[f"{kind}_config"])
        config[f"{kind}_config"] |= {"hidden_act": "quick_gelu", "num_attention_heads": 2}
    del config["text_config_dict"]["num_hidden_layers"]  # 12 by default, in spite of text_config
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = transformers.CLIPConfig.from_pretrained(tmp_path)
    ours = architecture("clip").open(tmp_path).config
    for tower, want in ((ours.vision, read.vision_config), (ours.text, read.text_config)):
        assert tower.heads == want.num_attention_heads == 4
        assert tower.activation == want.hidden_act == "gelu"
        assert tower.layers == want.num_hidden_layers
    config["text_config_dict"]["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_published("clip", tmp_path)
    pixels, _ = inputs
    torch_pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    again = transformers.CLIPModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        want = again.visual_projection(again.vision_model(torch_pixels).pooler_output)
    got = compiled(model, lambda model, pixels: model.vision(pixels))(pixels)
    np.testing.assert_allclose(got, want, **WHOLE)
