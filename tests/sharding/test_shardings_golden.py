"""Where every parameter of every model lies on the standard meshes, against shardings.txt.

A changed axis name, rule or shape shows as a changed line of that file. Write it anew with

    python tests/sharding/test_shardings_golden.py

and read its diff: a dimension that is no longer split costs memory on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from mmqa_jax.core.mesh import MESH_AXES, state_shardings
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.bart import network as bart
from mmqa_jax.models.bert import network as bert
from mmqa_jax.models.encoders import dual_encoder, heads
from mmqa_jax.models.llama import config as llama_config
from mmqa_jax.models.llama import lora
from mmqa_jax.models.llama import network as llama
from mmqa_jax.models.llava import network as llava
from mmqa_jax.models.llava.config import llava_1_5_13b
from mmqa_jax.models.mcan import network as mcan
from mmqa_jax.models.mcan import patches as patch_mcan
from mmqa_jax.models.mcan.network import FusionConfig
from mmqa_jax.models.modified_resnet import network as modified_resnet
from mmqa_jax.models.oscar import network as oscar
from mmqa_jax.models.t5 import config as t5_config
from mmqa_jax.models.t5 import network as t5
from mmqa_jax.models.two_towers import config as clip
from mmqa_jax.models.two_towers import network as two_towers
from mmqa_jax.models.vlp import atlas_reader
from mmqa_jax.models.vlp import network as vlp
from mmqa_jax.models.vlp import two_sided as two_sided_vlp

GOLDEN = Path(__file__).with_name("shardings.txt")
MESHES = {
    "data=8": (8, 1, 1),
    "fsdp=8": (1, 8, 1),
    "data=2,fsdp=2,tensor=2": (2, 2, 2),
    "tensor=8": (1, 1, 8),
}
_VLP = vlp.vlp_base_x101()


def _with_lora(rngs: nnx.Rngs) -> nnx.Module:
    model = llama.Llama(llama_config.llama2_7b(), rngs=rngs)
    lora.add_lora(model, lora.LoraConfig(), rngs=rngs)
    return model


def _of(model: type, *config: object) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: model(*config, rngs=rngs)


MODELS = {
    "bert_base_cased": _of(bert.Bert, bert.bert_base_cased(pooler=True)),
    "bert_large_uncased": _of(bert.Bert, bert.bert_large_uncased()),
    "minilm_l6": _of(bert.Bert, bert.minilm_l6()),
    "clip_vit_b_16": _of(two_towers.TwoTowers, clip.vit_b_16()),
    "clip_vit_l_14": _of(two_towers.TwoTowers, clip.vit_l_14()),
    "modified_resnet_50": _of(modified_resnet.ModifiedResNet, modified_resnet.rn50()),
    "dual_encoder_minilm": _of(
        dual_encoder.DualEncoder,
        dual_encoder.DualEncoderConfig(bert.minilm_l6(), clip.VisionConfig(embed_dim=384)),
    ),
    "text_classifier": _of(
        heads.TextClassifier,
        heads.TextClassifierConfig(bert.bert_base_cased(), 2, "pooler"),
    ),
    "vlp_x101": _of(vlp.VLP, _VLP),
    "vlp_vinvl": _of(vlp.VLP, vlp.vlp_base_vinvl()),
    "vlp_clip_patches": _of(
        vlp.VLP,
        vlp.vlp_clip(clip.vit_b_16().vision, bert=bert.bert_base_cased(types=6)),
    ),
    "vlp_patches_copy_head": _of(
        atlas_reader.AtlasVLP,
        atlas_reader.AtlasVLPConfig(**vars(vlp.vlp_patches(8)), copy_head=True),
    ),
    "two_sided_vlp": _of(two_sided_vlp.TwoSidedVLP, _VLP, two_sided_vlp.TwoSides(joint_layers=1)),
    "mcan_prophet": _of(mcan.MCAN, mcan.mcan_prophet(new_answers=477)),
    "mcan_openvqa_small": _of(mcan.MCANOpenVQA, mcan.mcan_small(18_405)),
    "caption_mcan": _of(
        patch_mcan.CaptionMCAN,
        patch_mcan.CaptionMCANConfig(bert.minilm_l6(), FusionConfig(), 1_000),
    ),
    "oscar_plus_base": _of(oscar.Oscar, oscar.oscar_plus_base()),
    "bart_large_cnn": _of(bart.Bart, bart.bart_large_cnn()),
    "llama2_7b": _of(llama.Llama, llama_config.llama2_7b()),
    "llama2_7b_lora": _with_lora,
    "llama2_70b": _of(llama.Llama, llama_config.llama2_70b()),
    "llama3_8b": _of(llama.Llama, llama_config.llama3_8b()),
    "qwen3_30b_a3b": _of(llama.Llama, llama_config.RELATIVES["qwen3_30b_a3b"]()),
    "smollm2_135m": _of(llama.Llama, llama_config.smollm2_135m()),
    "llava_1_5_13b": _of(llava.Llava, llava_1_5_13b()),
    "flan_t5_xl": _of(t5.T5, t5_config.PRESETS["flan_t5_xl"]()),
}


def described(name: str) -> list[str]:
    """A line per parameter: its name, its shape, and the mesh axes of each dimension per mesh."""
    state = nnx.state(nnx.eval_shape(lambda: MODELS[name](nnx.Rngs())), nnx.Param)
    shapes = {path: leaf.shape for path, leaf in flatten_named(state).items()}
    meshes = [AbstractMesh(sizes, MESH_AXES) for sizes in MESHES.values()]
    found = [flatten_named(state_shardings(state, mesh)) for mesh in meshes]
    lines = []
    for path, shape in shapes.items():
        specs = " ".join(_spec(sharding[path], len(shape)) for sharding in found)
        lines.append(f"{path} {list(shape)} {specs}".replace(", ", ","))
    return lines


def _spec(sharding: NamedSharding, dimensions: int) -> str:
    spec = (*sharding.spec, *(None,) * (dimensions - len(sharding.spec)))
    return f"({','.join('-' if axes is None else str(axes) for axes in spec)})"


def read() -> dict[str, list[str]]:
    """The golden file: model -> its lines."""
    models: dict[str, list[str]] = {}
    for line in GOLDEN.read_text().splitlines():
        if line.startswith("# "):
            lines = models[line.removeprefix("# ")] = []
        elif line and not line.startswith("//"):
            lines.append(line)
    return models


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_lies_where_it_did(name):
    assert described(name) == read()[name]


def test_no_model_is_left_out_of_the_file():
    assert list(read()) == list(MODELS)


def test_large_parameters_are_split_on_every_mesh_but_data():
    """What a device cannot hold whole: all matrices of the models that need more than one."""
    for name in ("llama2_7b", "llama2_70b", "qwen3_30b_a3b", "llava_1_5_13b", "flan_t5_xl"):
        for line in read()[name]:
            path, shape, *specs = line.split()
            size = 1
            for dimension in shape.strip("[]").split(","):
                size *= int(dimension)
            if size < 1 << 24:
                continue
            for mesh, spec in zip(MESHES, specs, strict=True):
                assert (mesh == "data=8") == (set(spec) <= set("(-,)")), (name, path, mesh)


def write() -> None:
    """Writes the golden file."""
    lines = [f"// parameter [shape] {' '.join(f'({mesh})' for mesh in MESHES)}"]
    lines.append("// python tests/sharding/test_shardings_golden.py")
    for name in MODELS:
        lines += ["", f"# {name}", *described(name)]
    GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
