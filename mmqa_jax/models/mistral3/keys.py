"""Mistral 3's checkpoints with pictures: transformers' layouts, and export to them.

Keys and config are LLaVA's (`models.llava.keys`, `models.llava.families`). Mistral's own files
(`consolidated.safetensors`, `params.json`) are refused: those of transformers lie beside them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.llama.keys import to_published_tensors, to_rule_tensors
from mmqa_jax.models.llava import keys
from mmqa_jax.models.llava.families import ALL
from mmqa_jax.models.llava.processor import colored, processor_of_sizes
from mmqa_jax.models.mistral3 import network as mistral3
from mmqa_jax.weights import layouts
from mmqa_jax.weights.keymap import untied_source

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


def open_mistral3(path: Path) -> layouts.Checkpoint:
    """Opens a checkpoint of Mistral 3 with pictures, reading headers only.

    `path`: transformers' folder.
    """
    file = layouts.config_file(path)
    published, source = layouts.open_hf(path, "mistral3")
    config = mistral3_config(published, str(file), keys.has_head(source))
    config = dataclasses.replace(
        config, vision=colored(file.parent, config), **_tokens(file.parent)
    )
    source = to_rule_tensors(source, config.llama)
    return layouts.Checkpoint(config, keys.llava_key_map, source, "transformers")


def _tokens(folder: Path) -> dict[str, int]:
    """The ids behind the rows of a picture, of which config.json says none."""
    file = folder / "tokenizer.json"
    added = read_json(file).get("added_tokens") if file.is_file() else None
    ids = {
        entry.get("content"): entry.get("id") for entry in added or () if isinstance(entry, dict)
    }
    if not ids:
        return {}
    if type(ids.get(_BREAK)) is not int or type(ids.get(_END)) is not int:
        raise UserError(
            f"{file}: lacks the tokens {_BREAK} and {_END}, which stand behind the rows of "
            "pictures; copy the model's own tokenizer beside its weights."
        )
    return {"break_token": ids[_BREAK], "end_token": ids[_END]}


def publish_mistral3(config: mistral3.Mistral3Config, state: nnx.State) -> layouts.Published:
    """Mistral3ForConditionalGeneration."""
    source = untied_source(state, keys.llava_key_map(config))
    source = to_published_tensors(source, config.llama, keys.LLAMA_PREFIX)
    return layouts.Published(source, keys.llava_to_hf(config), processor_of_sizes(config))


def mistral3_config(
    published: Mapping[str, Any], where: str = "config.json", has_head: bool = False
) -> mistral3.Mistral3Config:
    """Our config from transformers' `config.json`; absent values are transformers' defaults.

    has_head: see `keys.llava_config`.
    """
    layouts.check_model_type(published, where, "mistral3")
    family = ALL["mistral3"]
    keys.check_published(published, where, family)
    return mistral3.Mistral3Config(**keys.fields_from_hf(published, where, family, has_head))


# Beside transformers.


def _inputs(config: mistral3.Mistral3Config) -> dict[str, Any]:
    """Words around a picture of 5 x 7 units; transformers has other ids behind its rows."""
    units = config.units
    size = (*(count * units.unit for count in comparison.GRID), 3)
    picture = comparison.noise().integers(0, 256, size, np.uint8)
    tokens = config.picture_tokens(picture.shape)
    batch = mistral3.lay_out([picture], config, mistral3.bucket_of(picture.shape, config))
    row = comparison.around_a_picture(config, tokens)
    ids = np.repeat(row, np.where(np.equal(row, config.image_token), tokens, 1))[None]
    theirs = ids.copy()
    taken = batch.rows[0, :tokens]
    places = np.array([config.break_token, config.end_token, config.image_token])
    theirs[theirs == config.image_token] = places[np.minimum(taken, 2)]
    mean, std = np.float32(config.vision.pixel_mean), np.float32(config.vision.pixel_std)
    pixels = comparison.channels_first((picture[None].astype(np.float32) / 255 - mean) / std)
    return {
        "ids": ids,
        "batch": dataclasses.replace(batch, rows=batch.rows[:, :tokens]),
        "theirs": {
            "input_ids": theirs,
            "pixel_values": pixels,
            "image_sizes": np.array([size[:2]]),
        },
    }


def _run(model: mistral3.Mistral3, inputs: Mapping[str, Any]) -> comparison.Outputs:
    batch = inputs["batch"]
    outputs = keys.run_pictured(model, inputs["ids"], batch, model.vision.normalize(batch.pictures))
    return outputs._replace(stacks={"": outputs.stacks[""]})  # patches lie in another order


CHECK = comparison.Check(
    "Mistral3ForConditionalGeneration",
    _run,
    {"logits": "logits"},
    {"": keys.STACKS[""]},
    _inputs,
    lambda inputs: inputs["theirs"],
)
