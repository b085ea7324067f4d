"""ModernVBERT (Teiletche et al. 2025): an encoder that sees both ways, with a SigLIP in front.

A picture is cut into tiles as by Idefics3. The states of each square of patches become one token,
which stands among the table's rows. Original: transformers models/modernvbert.
Its checkpoints are read alone, or within ColModernVBertForRetrieval.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import Linear, normal_init
from mmqa_jax.models.llama.keys import apart
from mmqa_jax.models.llava.connectors import side_by_side
from mmqa_jax.models.llava.network import among_words
from mmqa_jax.models.llava.processor import with_split
from mmqa_jax.models.llava.tiles import RowTiles
from mmqa_jax.models.modernbert import keys
from mmqa_jax.models.modernbert.network import ModernBert, ModernBertConfig
from mmqa_jax.models.two_towers import keys as two_towers
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from mmqa_jax.models.two_towers.network import VisionTower
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule


@dataclasses.dataclass(frozen=True)
class ModernVBertConfig:
    """Tower and encoder."""

    vision: SiglipVisionConfig  # a tower without a head
    text: ModernBertConfig  # the encoder
    merge: int = 4  # side of the square of states that become one token
    image_token: int = 50407  # id of a picture's placeholder
    split: RowTiles = dataclasses.field(default_factory=RowTiles)  # how a picture is cut into tiles

    def __post_init__(self):
        if self.merge < 1 or self.vision.side % self.merge:
            raise UserError(
                f"model.merge is {self.merge}: expected a divisor of the {self.vision.side} "
                "patches of a square's side; change it or the tower's sizes."
            )

    @property
    def features(self) -> int:
        """The tokens of a square."""
        return (self.vision.side // self.merge) ** 2

    @property
    def most_squares(self) -> int:
        """How many squares a picture has at most."""
        return self.split.most_tiles(self.vision.image_size) + 1

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """The tokens of a square's pixels [S, S, 3]; 0 for another shape."""
        size = self.vision.image_size
        return self.features if tuple(shape) == (size, size, 3) else 0


class ModernVBert(nnx.Module):
    """Tower, connector and encoder."""

    def __init__(self, config: ModernVBertConfig, *, rngs: nnx.Rngs):
        self.vision = VisionTower(config.vision, rngs=rngs)
        self.projector = Linear(
            config.vision.width * config.merge**2,
            config.text.hidden,
            ("mlp", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=normal_init(config.text.init_stddev / math.sqrt(2 * config.text.layers)),
        )
        self.text = ModernBert(config.text, rngs=rngs)
        self.config, self.width = config, config.text.hidden

    def encode_images(self, pixels: jax.Array) -> jax.Array:
        """[N, S, S, 3] normalized pixels (the tower's `normalize`) -> [N, features, H]."""
        states = self.vision.ln_post(self.vision.states_of(pixels, -1))
        return self.projector(side_by_side(states, self.config.merge))

    def states(
        self, input_ids: jax.Array, mask: jax.Array, pictures: jax.Array | None = None
    ) -> jax.Array:
        """Right-padded prompts -> the normed states of their tokens [B, L, H].

        Args:
          input_ids: int [B, L], one placeholder for each token of a picture.
          mask: bool [B, L], true at real tokens.
          pictures: uint8 [B, K, S, S, 3], squares in the order of their placeholders; None: none.
        """
        placeholder = input_ids == self.config.image_token  # [B, L]
        tokens = self.text.tokens(input_ids)
        if pictures is not None:
            flat = pictures.reshape(-1, *pictures.shape[2:])  # [B * K, S, S, 3]
            features = self.encode_images(self.vision.normalize(flat))
            tokens = among_words(tokens, features, placeholder)
        return self.text.encode(self.text.normed(tokens), mask)


MODEL_TYPE = "modernvbert"
_READ = kinds(
    object="text_config vision_config", integer="image_token_id", size="pixel_shuffle_factor"
)
# Of training and of heads that make no vectors; copies of what the parts say.
_HARMLESS = (
    *("initializer_cutoff_factor", "classifier_pooling", "classifier_dropout", "classifier_bias"),
    *("tie_word_embeddings", "vocab_size", "hidden_size"),
)
_TEXT, _TOWER = "text_model.", "vision_model."


def modernvbert_config(
    published: Mapping[str, Any], where: str = "config.json"
) -> ModernVBertConfig:
    """Our config from transformers' config.json; absent values are its defaults."""
    check_keys(published, where, read=_READ, harmless=_HARMLESS)
    parts = {}
    for name, kind in (("text_config", "modernbert"), ("vision_config", "siglip_vision_model")):
        part = published.get(name) or {}
        if part.get("model_type", kind) != kind:
            raise UserError(
                f"{where}, {name}: model_type is {part['model_type']!r}, expected {kind!r}; use a "
                "checkpoint that transformers has written."
            )
        parts[name] = {key: value for key, value in part.items() if key != "model_type"}
    tower, place = parts["vision_config"], f"{where}, vision_config"
    vision = two_towers.siglip_vision_config(tower, place, may_lack_head=True)
    return ModernVBertConfig(
        vision=dataclasses.replace(vision, head=False),
        text=keys.modernbert_config(parts["text_config"], f"{where}, text_config"),
        merge=published.get("pixel_shuffle_factor", 4),
        image_token=published.get("image_token_id", 50407),
    )


def modernvbert_key_map(config: ModernVBertConfig) -> KeyMap:
    """Key map of the encoder, of a source with `modernbert_fused` apart; heads are ignored."""
    rules = two_towers.vision_rules(config.vision)
    return KeyMap(
        rules=[
            *(dataclasses.replace(rule, key=f"{_TOWER}{rule.key}") for rule in rules),
            Rule("connector.modality_projection.weight", "projector/kernel", TRANSPOSE),
            *keys.modernbert_rules(config.text, _TEXT, "text/"),
        ],
        rename=[
            (r"^model\.", ""),
            (r"^vision_model\.(embeddings|encoder|post_layernorm)\.", rf"{_TOWER}{_TOWER}\1."),
            *keys.renumbered(config.text, _TEXT),
        ],
        ignore=[r"^(lm_head|projection_head|head|classifier)\.", r"^vision_model\..*head\."],
    )


def open_modernvbert(
    folder: Path, published: Mapping[str, Any] | None = None
) -> layouts.Checkpoint:
    """Opens a checkpoint, reading headers only.

    Args:
      folder: of transformers.
      published: its config; None: that of config.json.
    """
    file = layouts.config_file(folder)
    if published is None:
        published = layouts.read_hf_config(folder, MODEL_TYPE)
    config = read_modernvbert_config(file.parent, published)
    source = apart(layouts.open_source(folder), keys.modernbert_fused(config.text))
    return layouts.Checkpoint(config, modernvbert_key_map, source, "transformers")


def read_modernvbert_config(folder: Path, published: Mapping[str, Any]) -> ModernVBertConfig:
    """Our config of transformers', with what the files of pictures in its folder say."""
    config = modernvbert_config(published, str(layouts.config_file(folder)))
    usual = RowTiles.usual(config.vision.image_size)
    return with_split(folder, dataclasses.replace(config, split=usual))
