"""Checkpoints of CLIP's ModifiedResNet: the image tower of OpenAI's RN50 to RN50x64."""

import re
from pathlib import Path

from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.modified_resnet.network import STRIDE, ModifiedResNetConfig
from mmqa_jax.models.two_towers.keys import head_width, open_clip_file
from mmqa_jax.weights import layouts
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import CONV, CONV_1X1, KeyMap, Rule, linear_rules, untied_source
from mmqa_jax.weights.output_folder import OPEN_CLIP_CONFIG

_TOWER = r"^(?=(?:conv\d|bn\d|layer\d|attnpool)\.)"  # keys of the image tower by itself
# The rest of a whole CLIP; the last three are sizes that OpenAI's archives keep.
_TEXT = (
    r"^(transformer|token_embedding|ln_final)\.",
    r"^(positional_embedding|text_projection|logit_scale)$",
    r"^(input_resolution|context_length|vocab_size)$",
)
_POOL = r"^visual\.attnpool\."
_FIRST_CONV = "visual.layer1.0.conv1.weight"
_POOL_POSITIONS = "visual.attnpool.positional_embedding"
_POOL_OUT = "visual.attnpool.c_proj.weight"


def modified_resnet_key_map(config: ModifiedResNetConfig) -> KeyMap:
    """Key map of the `visual` part of OpenAI's CLIP; keys may lack `visual.`."""
    rules = []
    for n in (1, 2, 3):
        rules.append(Rule(f"visual.conv{n}.weight", f"conv{n}/kernel", CONV))
        rules += _batch_norm_rules(f"visual.bn{n}", f"bn{n}")
    for stage in range(4):
        rules += _bottleneck_rules(f"stage{stage}.first.", f"stages/{stage}/first")
        rules += [
            Rule(f"stage{stage}.first.downsample.0.weight", _SHORTCUT.format(stage), CONV_1X1),
            *_batch_norm_rules(
                f"stage{stage}.first.downsample.1", f"stages/{stage}/first/shortcut_bn"
            ),
            *_bottleneck_rules(f"stage{stage}.rest.{{layer}}.", f"stages/{stage}/rest"),
        ]
    if config.attention_pool:
        rules.append(Rule(_POOL_POSITIONS, "pool/positions"))
        for theirs, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "c_proj": "out"}.items():
            rules += linear_rules(f"visual.attnpool.{theirs}", f"pool/{ours}")
    return KeyMap(
        rules=rules,
        rename=[(_TOWER, "visual."), *layouts.renames(_prefixes(config))],
        ignore=[r"\.num_batches_tracked$", *_TEXT, *([] if config.attention_pool else [_POOL])],
    )


def modified_resnet_config(source: TensorSource) -> ModifiedResNetConfig:
    """The config that the shapes of a CLIP or its image tower determine (OpenAI's build_model)."""
    shapes = layouts.shapes_of(source, [(_TOWER, "visual.")])
    for key in (_FIRST_CONV, _POOL_POSITIONS, _POOL_OUT):
        if key not in shapes:
            raise UserError(
                f"{source.name}: has no {key!r}, so it is no CLIP with a ResNet; give OpenAI's "
                "RN50, RN101, RN50x4, RN50x16 or RN50x64, with the attention pool."
            )
    numbers = [re.match(r"visual\.layer([1-4])\.(\d{1,4})\.", key) for key in shapes]
    blocks = [0, 0, 0, 0]
    for match in filter(None, numbers):
        stage = int(match[1]) - 1
        blocks[stage] = max(blocks[stage], int(match[2]) + 1)
    side = round((shapes[_POOL_POSITIONS][0] - 1) ** 0.5)
    return ModifiedResNetConfig(
        width=shapes[_FIRST_CONV][0],
        blocks=tuple(blocks),
        image_size=side * STRIDE,
        embed_dim=shapes[_POOL_OUT][0],
    )


def open_modified_resnet(path: Path) -> layouts.Checkpoint:
    """The image tower of a CLIP with a ResNet: OpenAI's archive, a state dict, or safetensors.

    The file may hold the whole CLIP or its image tower.
    """
    if path.is_dir():
        path = open_clip_file(path) or path
    source = layouts.open_source(path)
    config = layouts.read_own_config(ModifiedResNetConfig, path) or modified_resnet_config(source)

    def check_heads(_: TensorSource, config: ModifiedResNetConfig) -> None:
        units = head_width(path.parent)
        if config.attention_pool and units != config.features // config.heads:
            raise UserError(
                f"{path.parent / OPEN_CLIP_CONFIG}: head_width is {units}; only attention "
                "pools with heads of 64 units are supported, leave the pool out with "
                "`--set attention_pool=false`."
            )

    return layouts.Checkpoint(config, modified_resnet_key_map, source, "openai", check_heads)


def publish_modified_resnet(config: ModifiedResNetConfig, state: nnx.State) -> layouts.Published:
    """OpenAI's keys (`visual.*`)."""
    source = untied_source(state, modified_resnet_key_map(config))
    published_config = layouts.own_config("modified_resnet", config)
    return layouts.Published(layouts.with_prefixes(source, _prefixes(config)), published_config)


_SHORTCUT = "stages/{}/first/shortcut/kernel"


def _prefixes(config: ModifiedResNetConfig) -> dict[str, str]:
    """Block 0 of a stage is separate, block n is slice n - 1 of the stack."""
    table = {}
    for stage, blocks in enumerate(config.blocks):
        for block in range(blocks):
            ours = f"stage{stage}.rest.{block - 1}." if block else f"stage{stage}.first."
            table[f"visual.layer{stage + 1}.{block}."] = ours
    return table


def _bottleneck_rules(key: str, path: str) -> list[Rule]:
    rules = []
    for n, transform in ((1, CONV_1X1), (2, CONV), (3, CONV_1X1)):
        rules.append(Rule(f"{key}conv{n}.weight", f"{path}/conv{n}/kernel", transform))
        rules += _batch_norm_rules(f"{key}bn{n}", f"{path}/bn{n}")
    return rules


def _batch_norm_rules(key: str, path: str) -> list[Rule]:
    names = {
        "weight": "scale",
        "bias": "bias",
        "running_mean": "mean",
        "running_var": "variance",
    }
    return [Rule(f"{key}.{theirs}", f"{path}/{ours}") for theirs, ours in names.items()]
