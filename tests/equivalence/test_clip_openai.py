"""CLIP in OpenAI's own layout against a torch restatement of openai/CLIP, float32."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from clip_torch import TorchCLIP
from compare import WHOLE, compiled, randomize, reloaded
from flax import nnx

from mmqa_jax.cli import main
from mmqa_jax.models.two_towers import config as clip
from mmqa_jax.models.two_towers.config import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.models.two_towers.keys import clip_openai_config
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.weights.folder import load_converted

# No size is a published one; heads of 64 are all that OpenAI has.
CONFIG = CLIPConfig(
    VisionConfig(
        image_size=24, patch_size=6, width=128, layers=3, heads=2, mlp_width=512, embed_dim=28
    ),
    TextConfig(vocab_size=53, context=11, width=64, layers=2, heads=1, mlp_width=256, embed_dim=28),
)
# What OpenAI's archives keep beside the parameters.
SIZES = {
    "input_resolution": torch.tensor(24),
    "context_length": torch.tensor(11),
    "vocab_size": torch.tensor(53),
}
# Tracing warns of shapes that it takes for constants, and of its own age.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


class Made(NamedTuple):
    """A torch model and its folder of files."""

    theirs: TorchCLIP
    folder: Path


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Pictures [4, 24, 24, 3] and texts [4, 11] that end at several places, padded with 0."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(4, 24, 24, 3)).astype("f4")
    ids = rng.integers(1, 50, (4, 11))
    last = np.array([10, 1, 6, 3])
    ids[np.arange(11) > last[:, None]] = 0
    ids[np.arange(4), last] = 52
    return pixels, ids


def torch_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, ids = inputs()
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), torch.from_numpy(ids)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    theirs = randomize(TorchCLIP(CONFIG), 1, 0.05)
    with torch.no_grad():  # the published numbers are float16's
        for parameter in theirs.parameters():
            parameter.copy_(parameter.half())
    folder = tmp_path_factory.mktemp("clip")
    torch.save(theirs.state_dict(), folder / "float32.pt")
    halves = {name: tensor.half() for name, tensor in theirs.state_dict().items()}
    torch.save(halves | SIZES, folder / "float16.pt")
    whole = TorchCLIP(CONFIG).eval()
    for name, size in SIZES.items():
        whole.register_buffer(name, size)
    whole = torch.jit.trace(whole, torch_inputs(), check_trace=False)
    whole.load_state_dict(theirs.state_dict() | SIZES)
    for parameter in whole.parameters():
        parameter.data = parameter.data.half()
    torch.jit.save(whole, str(folder / "ViT-tiny.pt"))
    return Made(theirs, folder)


@pytest.fixture
def convert(monkeypatch, capsys):
    """Runs `mmqa convert --model=clip`: its JSON, or its sentence where it refuses."""
    monkeypatch.setenv("MMQA_PROGRESS", "off")

    def run(source: Path, *flags: str):
        code = main(["convert", "--model=clip", f"--source={source}", "--json", *flags])
        out, err = capsys.readouterr()
        assert code == (2 if err.startswith("mmqa:") else 0), err
        return err if code else json.loads(out.splitlines()[-1])

    return run


# OpenAI's constants, which a state dict without the archive's sizes does not show.
CONSTANTS = [
    "--set=vision.heads=2", "--set=text.heads=1",
    "--set=vision.activation=quick_gelu", "--set=text.activation=quick_gelu",
]  # fmt: skip


def outputs(model: TwoTowers, pixels: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    """One program for all files."""
    return model.vision(pixels), model.text(ids), model.logits(ids, pixels).T


@pytest.mark.parametrize("name", ["float32.pt", "float16.pt", "ViT-tiny.pt"])
def test_features_equal(name, made, convert, tmp_path):
    bare = name == "float32.pt"
    result = convert(made.folder / name, f"--out={tmp_path / 'out'}", *(CONSTANTS if bare else []))
    layout = "open_clip" if bare else "openai"
    assert (result["layout"], result["dtype"]) == (layout, "float32")
    assert result["parameters"] == sum(p.numel() for p in made.theirs.parameters())
    ours = load_converted(tmp_path / "out")
    assert ours.config == CONFIG
    pixels, ids = inputs()
    with torch.no_grad():
        image, text = torch_inputs()
        want = made.theirs.visual(image), made.theirs.encode_text(text), made.theirs(image, text)
    for got, wanted in zip(compiled(ours, outputs)(pixels, ids), want, strict=True):
        assert wanted.std(0).mean() > 0.1  # rows differ by more than the tolerance
        np.testing.assert_allclose(got, wanted, **WHOLE)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(ours))} == {jnp.dtype("float32")}


def test_transformers_reads_what_comes_out(made, convert, tmp_path):
    convert(made.folder / "ViT-tiny.pt", f"--out={tmp_path / 'hf'}", "--export=hf")
    again = reloaded(transformers.CLIPModel, tmp_path / "hf", attn_implementation="eager")
    image, text = torch_inputs()
    with torch.no_grad():
        got = again.eval()(input_ids=text, pixel_values=image).logits_per_image
        want = made.theirs(image, text)
    np.testing.assert_allclose(got, want, **WHOLE)


@pytest.mark.parametrize("name", ["vit_b_32", "vit_b_16", "vit_l_14", "vit_l_14_336"])
def test_shapes_tell_the_published_configs(name):
    config = getattr(clip, name)()
    with torch.device("meta"):
        tensors = TorchCLIP(config).state_dict()

    class Source:
        name = "published"

        @staticmethod
        def specs():
            return {k: jax.ShapeDtypeStruct(tuple(t.shape), "float16") for k, t in tensors.items()}

    assert clip_openai_config(Source()) == config


def test_what_does_not_fit_is_refused(made, convert, tmp_path):
    whole = torch.load(made.folder / "float32.pt")

    def refused(tensors, *parts: str) -> None:
        torch.save(tensors | SIZES, tmp_path / "odd.pt")
        message = convert(tmp_path / "odd.pt", f"--out={tmp_path / 'out'}")
        assert message.startswith(f"mmqa: {tmp_path / 'odd.pt'}: ")
        assert message.count("\n") == 1
        assert all(part in message for part in parts), message
        assert [path.name for path in tmp_path.iterdir()] == ["odd.pt"]

    def without(*starts: str):
        return {key: tensor for key, tensor in whole.items() if not key.startswith(starts)}

    bias = "visual.transformer.resblocks.1.attn.in_proj_bias"
    layers = "vision/layers/{}/bias, layers [1]".format
    refused(without(bias), "3 parameters without a tensor", *map(layers, "qkv"))
    refused(whole | {"visual.extra": torch.zeros(2)}, "1 keys without a rule: visual.extra")
    refused(whole | {bias: torch.zeros(5)}, f"1 keys without a rule: {bias}")
    refused(whole | {bias: torch.zeros(9)}, f"{bias}[k] (3,) (model: vision/layers/k/bias (128,)")
    refused(without("token_embedding"), "it lacks token_embedding.weight; give the .pt file")
    block = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    refused(whole | {block: torch.zeros(4)}, f"it lacks {block};")
    resnet = {"visual.layer1.0.conv1.weight": torch.zeros(2, 2, 1, 1)}
    refused(without("visual.") | resnet, "is a ResNet", "--model=modified_resnet")
