"""CLIP's ModifiedResNet against a torch restatement of openai/CLIP clip/model.py, float32."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
import torch
from compare import LAYER, WHOLE, abstract, alone, compiled, forward, names_its_axes, with_config
from flax import nnx
from torch import nn

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.modified_resnet import network as modified_resnet
from mmqa_jax.models.modified_resnet.keys import publish_modified_resnet
from mmqa_jax.models.modified_resnet.network import ModifiedResNet, ModifiedResNetConfig
from mmqa_jax.weights.formats.safetensors import write_sharded
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

# Nothing at its default; the first stage has no block beside its first.
CONFIG = ModifiedResNetConfig(
    width=8, blocks=(1, 2, 3, 2), image_size=96, embed_dim=20, eps=1e-3, unroll=1
)
# Tracing warns of shapes that it takes for constants, and of its own age.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


class TorchBlock(nn.Module):
    def __init__(self, c_in: int, inner: int, stride: int, eps: float):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner, eps)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner, eps)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner, eps)
        self.stride = stride
        self.downsample = None
        if stride > 1 or c_in != 4 * inner:
            parts = [
                ("-1", nn.AvgPool2d(stride)),
                ("0", nn.Conv2d(c_in, 4 * inner, 1, bias=False)),
                ("1", nn.BatchNorm2d(4 * inner, eps)),
            ]
            self.downsample = nn.Sequential(collections.OrderedDict(parts))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(nn.functional.avg_pool2d(y, self.stride)))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class TorchPool(nn.Module):
    """torch's own multi-head attention, of all positions; the first is read."""

    def __init__(self, side: int, size: int, heads: int, out: int):
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.randn(side**2 + 1, size) / size**0.5)
        self.k_proj = nn.Linear(size, size)
        self.q_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.c_proj = nn.Linear(size, out)
        self.heads = heads

    def forward(self, x):
        x = x.flatten(2).permute(2, 0, 1)  # [H * W, B, C]
        x = torch.cat([x.mean(0, keepdim=True), x]) + self.positional_embedding[:, None]
        q, k, v = self.q_proj, self.k_proj, self.v_proj
        y, _ = nn.functional.multi_head_attention_forward(
            x,
            x,
            x,
            x.shape[-1],
            self.heads,
            None,
            torch.cat([q.bias, k.bias, v.bias]),
            None,
            None,
            False,
            0.0,
            self.c_proj.weight,
            self.c_proj.bias,
            use_separate_proj_weight=True,
            q_proj_weight=q.weight,
            k_proj_weight=k.weight,
            v_proj_weight=v.weight,
            need_weights=False,
            training=False,
        )
        return y[0]


class TorchResNet(nn.Module):
    def __init__(self, c: ModifiedResNetConfig):
        super().__init__()
        width = c.width
        self.conv1 = nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2, c.eps)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width // 2, c.eps)
        self.conv3 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width, c.eps)
        c_in = width
        for n, blocks in enumerate(c.blocks):
            inner = width * 2**n
            first = TorchBlock(c_in, inner, 1 if n == 0 else 2, c.eps)
            c_in = 4 * inner
            rest = [TorchBlock(c_in, inner, 1, c.eps) for _ in range(blocks - 1)]
            setattr(self, f"layer{n + 1}", nn.Sequential(first, *rest))
        self.attnpool = TorchPool(c.image_size // 32, c_in, width * 32 // 64, c.embed_dim)

    def stem(self, x):
        for n in (1, 2, 3):
            x = getattr(self, f"bn{n}")(getattr(self, f"conv{n}")(x)).relu()
        return nn.functional.avg_pool2d(x, 2)

    def grid(self, x):
        return self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))

    def forward(self, x):
        return self.attnpool(self.grid(x))


class TorchCLIP(nn.Module):
    """As much of a CLIP as shows that its text part is left out, by OpenAI's names."""

    def __init__(self, visual: nn.Module):
        super().__init__()
        self.visual = visual
        self.token_embedding = nn.Embedding(5, 4)
        self.ln_final = nn.LayerNorm(4)
        self.positional_embedding = nn.Parameter(torch.zeros(3, 4))
        self.text_projection = nn.Parameter(torch.zeros(4, 20))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        for name, size in {"input_resolution": 96, "context_length": 3, "vocab_size": 5}.items():
            self.register_buffer(name, torch.tensor(size))

    def forward(self, x):
        return self.visual(x)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(torch tower, our tower loaded from OpenAI's kind of file: a TorchScript archive)."""
    torch.manual_seed(0)
    theirs = TorchResNet(CONFIG).eval()
    with torch.no_grad():
        for module in theirs.modules():
            if isinstance(module, nn.Conv2d):  # keeps the signal's size
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2.0)
                module.weight.normal_(1, 0.2)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                module.bias.normal_(0, 0.2)
        for module in theirs.modules():
            if isinstance(module, TorchBlock):  # the residual sums stay of size 1
                module.bn3.weight.mul_(0.3)
                if module.downsample is not None:
                    module.downsample[2].weight.mul_(0.5)
    path = tmp_path_factory.mktemp("resnet") / "RNtiny.pt"
    # What `check_trace` would compare costs a second trace.
    picture = torch.zeros(1, 3, 96, 96)
    whole = torch.jit.trace(TorchCLIP(theirs).eval(), picture, check_trace=False)
    torch.jit.save(whole, str(path))
    ours = load_published("modified_resnet", path, eps=CONFIG.eps, unroll=1)
    assert ours.config == CONFIG
    return theirs, ours


def pictures(height: int, width: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(height).normal(size=(count, height, width, 3)).astype("f4")


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def nhwc(x: torch.Tensor) -> np.ndarray:
    return x.detach().permute(0, 2, 3, 1).numpy()


def test_blocks_grid_and_pooled_output_equal(pair):
    theirs, ours = pair
    square, wide = pictures(96, 96), pictures(64, 160, count=2)
    seen: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(4)]
    for n in range(4):
        for block in getattr(theirs, f"layer{n + 1}"):
            block.register_forward_hook(lambda _, x, y, n=n: seen[n].append((nhwc(x[0]), nhwc(y))))
    with torch.no_grad():
        pooled = theirs(nchw(square)).numpy()
        stages = [list(stage) for stage in seen]  # before other pictures come
        stem, grid = nhwc(theirs.stem(nchw(square))), nhwc(theirs.grid(nchw(square)))
        wide_grid = nhwc(theirs.grid(nchw(wide)))

    def run(model):
        return {
            "stem": model.stem(square),
            "first": [
                stage.first(pairs[0][0]) for stage, pairs in zip(model.stages, stages, strict=True)
            ],
            "rest": [
                alone(stage.rest, forward, np.stack([x for x, _ in pairs[1:]]))
                for stage, pairs in zip(model.stages[1:], stages[1:], strict=True)
            ],
            "grid": model.grid_features(square),
            "wide": model.grid_features(wide),
            "pool": model.pool(grid),
            "pooled": model(square),
        }

    got = compiled(ours, run)()
    np.testing.assert_allclose(got["stem"], stem, **LAYER)
    for n in range(4):
        np.testing.assert_allclose(got["first"][n], stages[n][0][1], **LAYER)
    for n in range(3):
        want = np.stack([y for _, y in stages[n + 1][1:]])
        np.testing.assert_allclose(got["rest"][n], want, **LAYER)
    np.testing.assert_allclose(got["pool"], pooled, **LAYER)
    assert got["grid"].shape == (3, 3, 3, 256)
    np.testing.assert_allclose(got["grid"], grid, **WHOLE)
    assert got["wide"].shape == (2, 2, 5, 256)  # other sizes than the pool's, as Prophet's 512
    np.testing.assert_allclose(got["wide"], wide_grid, **WHOLE)
    np.testing.assert_allclose(got["pooled"], pooled, **WHOLE)
    assert grid.std() > 0.2  # tolerances of 1e-4 say something
    assert pooled.std() > 0.1


def test_bfloat16_stays_near_float32(pair):
    theirs, ours = pair
    half = with_config(ours, dataclasses.replace(CONFIG, dtype="bfloat16"))
    x = pictures(96, 96)
    got = compiled(half, lambda model: model.grid_features(x))()
    with torch.no_grad():
        want = nhwc(theirs.grid(nchw(x)))
    assert got.dtype == "bfloat16"
    # 8 significant bits; 8 blocks and the stem round about 30 times.
    error = np.abs(np.asarray(got, "f4") - want)
    assert error.max() < 0.02 * np.abs(want).max()
    assert error.mean() < 0.015 * np.abs(want).mean()


def test_export_reloads_in_torch(pair, tmp_path):
    theirs, ours = pair
    source = publish_modified_resnet(CONFIG, nnx.state(ours)).source
    write_sharded(tmp_path, source)
    exported = {key: torch.from_numpy(source.read(key).copy()) for key in source.specs()}
    again = TorchResNet(CONFIG).eval()
    again.load_state_dict({k.removeprefix("visual."): v for k, v in exported.items()})
    for name, want in theirs.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(again.state_dict()[name], want), name
    back = load_published("modified_resnet", tmp_path / "model.safetensors", eps=1e-3, unroll=1)
    assert back.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, nnx.state(back), nnx.state(ours))


def test_half_precision_tower_alone_without_its_pool(pair, tmp_path):
    theirs, ours = pair
    # OpenAI keeps convolutions in float16; the tower's own keys lack `visual.`.
    tensors = {k: v.half() if "conv" in k else v for k, v in theirs.state_dict().items()}
    torch.save(tensors, tmp_path / "tower.pth")
    model = load_published("modified_resnet", tmp_path / "tower.pth", attention_pool=False)
    assert model.config.blocks == CONFIG.blocks
    kernel = model.stages[2].rest.conv2.kernel[...]
    assert kernel.dtype == "float32"
    np.testing.assert_array_equal(
        kernel[1].transpose(3, 2, 0, 1), tensors["layer3.2.conv2.weight"].float()
    )
    np.testing.assert_array_equal(
        model.stages[2].rest.bn3.variance[...], ours.stages[2].rest.bn3.variance[...]
    )
    with pytest.raises(UserError, match="built without its attention pool"):
        model(pictures(96, 96))


def test_trainable_parameters_leave_out_the_statistics(pair):
    _, ours = pair
    trained = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(ours, nnx.Param))}
    assert trained == {"kernel", "scale", "bias", "positions"}
    names_its_axes(ours, stacks=("rest",))


@pytest.mark.parametrize("name", ["rn50", "rn101", "rn50x4", "rn50x16", "rn50x64"])
def test_presets_have_the_published_sizes(name):
    """Sizes are of open_clip src/open_clip/model_configs; shapes, of the one whose sizes are not
    powers of two, those of torch's tower."""
    width, blocks, image_size, embed_dim, heads = {
        "rn50": (64, (3, 4, 6, 3), 224, 1024, 32),
        "rn101": (64, (3, 4, 23, 3), 224, 512, 32),
        "rn50x4": (80, (4, 6, 10, 6), 288, 640, 40),
        "rn50x16": (96, (6, 8, 18, 8), 384, 768, 48),
        "rn50x64": (128, (3, 15, 36, 10), 448, 1024, 64),
    }[name]
    config = getattr(modified_resnet, name)()
    assert config == ModifiedResNetConfig(width, blocks, image_size, embed_dim)
    assert (config.heads, config.features, config.eps) == (heads, 32 * width, 1e-5)
    if name != "rn50x4":
        return
    source = publish_modified_resnet(config, nnx.state(abstract(ModifiedResNet, config))).source
    ours = {key: spec.shape for key, spec in source.specs().items()}
    with torch.device("meta"):
        theirs = TorchResNet(config)
    assert ours == {
        f"visual.{key}": tuple(tensor.shape)
        for key, tensor in theirs.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }


def test_prophets_grid_of_512_pixels():
    model = abstract(
        ModifiedResNet, modified_resnet.rn50x64(attention_pool=False, dtype="bfloat16")
    )
    graphdef, state = nnx.split(model)
    grid = jax.eval_shape(
        lambda state, x: nnx.merge(graphdef, state).grid_features(x),
        state,
        jax.ShapeDtypeStruct((1, 512, 512, 3), "float32"),
    )
    assert grid.shape == (1, 16, 16, 4096)


def test_mistakes_are_named(pair, tmp_path):
    _, ours = pair
    with pytest.raises(UserError, match=r"takes \(96, 96, 3\)"):
        ours(pictures(64, 64))
    with pytest.raises(UserError, match="multiples of 32"):
        ours.grid_features(pictures(80, 96))
    refuses("image_size 100 is not a multiple of 32", dataclasses.replace, CONFIG, image_size=100)
    refuses("four numbers from 1 to 200", dataclasses.replace, CONFIG, blocks=(1, 2, 3))
    refuses("width 7 is odd", dataclasses.replace, CONFIG, width=7)
    torch.save({"visual.proj": torch.zeros(2)}, tmp_path / "vit.pt")
    with pytest.raises(UserError, match=r"vit\.pt: .* no CLIP with a ResNet; give OpenAI's"):
        load_published("modified_resnet", tmp_path / "vit.pt")
    source = publish_modified_resnet(CONFIG, nnx.state(ours)).source
    tensors = {key: torch.from_numpy(source.read(key).copy()) for key in source.specs()}
    del tensors["visual.layer3.1.bn2.running_var"]
    tensors["visual.layer3.1.se.weight"] = torch.zeros(2)
    torch.save(tensors, tmp_path / "odd.pt")
    # Parameters by our slice numbers, keys as they stand in the file.
    message = (
        r"without a rule: visual\.layer3\.1\.se\.weight; .*stages/2/rest/bn2/variance, layers \[0\]"
    )
    refuses(message, load_published, "modified_resnet", tmp_path / "odd.pt")
