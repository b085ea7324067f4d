"""Builds the parts of a config without weights: regions, packing, VLP's sizes.

Training and inference share this code, so that a model gets the same inputs in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import BrokenPictures
from mmqa_jax.data.packing import Packer, PackingConfig
from mmqa_jax.data.patch_regions import PatchRegions
from mmqa_jax.data.picture_features import PictureFeatures, open_features
from mmqa_jax.data.picture_store import PictureStore
from mmqa_jax.data.question_pictures import QuestionPictures
from mmqa_jax.data.regions import (
    BOX,
    FEATURES,
    FeatureRegions,
    VinVLFeatures,
    X101Features,
    feature_ids,
    read_class_names,
    read_id_map,
)
from mmqa_jax.data.schema import Source, source_text
from mmqa_jax.data.source_reader import SourceReader
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.data.vqa_inputs import (
    CaptionInputs,
    GridInputs,
    PatchInputs,
    RegionInputs,
    VQAInputs,
)
from mmqa_jax.models.presets import clip_vision, vlp_from_config
from mmqa_jax.models.two_sided_vlp import TwoSides
from mmqa_jax.models.vlp_extensions import ExtendedVLPConfig

# Frontend with precomputed detector features -> reader of its files.
READERS = {"x101": X101Features, "vinvl": VinVLFeatures}


class RegionSizes(NamedTuple):
    """Regions per picture, and the lengths of a region's feature and position vectors."""

    slots: int
    dim: int
    position_dim: int


def region_sizes(config: ConfigDict) -> RegionSizes:
    """Sizes of the regions that the config's VLP takes; opens no files."""
    reader = READERS.get(config.model.frontend)
    if reader is not None:
        return RegionSizes(config.features.get("slots", 100), FEATURES, BOX + reader.classes)
    regions = _patch_regions(config)
    return RegionSizes(regions.slots, regions.dim, regions.position_dim)


def make_regions(config: ConfigDict, corpus: Corpus) -> PatchRegions | FeatureRegions:
    """A picture's regions as the config's VLP takes them."""
    frontend = config.model.frontend
    if frontend not in READERS:
        return _patch_regions(config)
    section = config.features
    reader = (
        X101Features(section.root)
        if frontend == "x101"
        else VinVLFeatures({int(number): path for number, path in section.files.items()})
    )
    id_map = read_id_map(section.id_map) if section.get("id_map") else None
    ids = feature_ids(corpus.sources, id_map)
    names = read_class_names(section.names, reader) if section.get("names") else None
    missing = BrokenPictures(
        sum(number is not None for number in ids),
        section.get("max_missing"),
        "fetch their features or raise features.max_missing",
        "have no region features",
    )
    return FeatureRegions(
        reader, ids, slots=section.get("slots", 100), names=names, missing=missing
    )


def _patch_regions(config: ConfigDict) -> PatchRegions:
    model = config.model
    if model.frontend == "clip":  # the model computes the features itself
        return PatchRegions(config.pictures.size, clip_vision(model).patch_size)
    return PatchRegions(
        config.pictures.size,
        model.patch,
        whole=model.get("whole", False),
        colors=model.get("colors", False),
        where=model.get("where", False),
    )


def make_vlp_config(config: ConfigDict, vocab_size: int) -> ExtendedVLPConfig:
    """The config's VLP, with the position size of its regions and a tokenizer's words."""
    positions = region_sizes(config).position_dim
    return vlp_from_config({**config.model, "region_positions": positions}, vocab_size)


def make_packing(config: ConfigDict, *, inference: bool = False) -> PackingConfig:
    """Shapes of VLP sequences for the config's pictures and token limits.

    `inference` applies the overrides of the section `inference.packing`, if there is one.
    """
    regions = region_sizes(config)
    changes = config.inference.get("packing", {}) if inference else {}
    return PackingConfig(
        slots_per_picture=regions.slots,
        region_dim=regions.dim,
        position_dim=regions.position_dim,
        **{**config.packing.to_dict(), **changes},
    )


def make_packer(config: ConfigDict, tokenizer: WordPiece, *, inference: bool = False) -> Packer:
    """The packer of VLP sequences as the config describes them; see `make_packing`."""
    return Packer(tokenizer, make_packing(config, inference=inference))


def make_pictures(config: ConfigDict, corpus: Corpus) -> PictureStore:
    """The corpus's pictures as the config's model takes them."""
    section = config.pictures
    alpha = section.get("alpha", "white")
    scaled = section.get("scaled_decoding", False)
    return PictureStore(corpus, section.size, section.resize, alpha=alpha, scaled=scaled)


def make_source_reader(
    config: ConfigDict, corpus: Corpus, tokenizer: WordPiece, *, on_demand: bool = False
) -> SourceReader:
    """Tokens and pixels of the corpus's sources as the config's model takes them.

    `on_demand` tokenizes each source when it is first read (see SourceReader).
    """
    has_features = config.model.get("frontend") in READERS  # needs no pixels
    pictures = None if has_features else make_pictures(config, corpus)
    regions = None if config.task == "contrastive" else make_regions(config, corpus)
    tags = regions.tags if regions and config.model.get("tags", False) else None
    parts = (pictures, regions, text_of(config), tags)
    return SourceReader(corpus, tokenizer, *parts, on_demand=on_demand)


def text_of(config: ConfigDict) -> Callable[[Source], str]:
    """Source -> the text that the config's model takes, with or without the title."""
    return source_text if config.data.get("titles", True) else lambda source: source.text


def two_sides(
    model: Mapping[str, Any], packing: PackingConfig, config: ExtendedVLPConfig
) -> TwoSides | None:
    """How the config's model encodes question and source separately; None if it does not.

    Args:
      model: its section `model`; `joint_layers` and `match_type` are read here.
      packing, config: made from the same config.

    Raises:
      UserError: invalid layers or token types, or sources that depend on the question.
    """
    if model.get("joint_layers") is None:
        if model.get("match_type") is not None:
            raise UserError(
                f"config key model.match_type={model['match_type']}: marks the question's words "
                "only if model.joint_layers is set; set it too, or use packing.match_types."
            )
        return None
    if packing.match_types:
        raise UserError(
            f"config key packing.match_types={packing.match_types}: marks words of the source that "
            "occur in the question, so a source could not be encoded without its question; use "
            "model.match_type instead."
        )
    first, second = packing.segments
    if second in ((first, 2, 3) if packing.per_source else (first,)):
        raise UserError(
            f"config key packing.segments={packing.segments}: sources have tokens of type {second} "
            "too, but the question needs a token type of its own; use (4, 5)."
        )
    sides = TwoSides(model["joint_layers"], second, model.get("match_type"))
    sides.check(config)
    return sides


def make_vqa_features(
    config: ConfigDict, corpus: Corpus | None
) -> PictureFeatures | QuestionPictures | None:
    """The pictures of a VQA run, or their features; None where captions stand for them.

    Args:
      corpus: of the questions, from which a model on patches reads their pictures.
    """
    if config.model.image == "caption":
        return None
    if config.model.image == "patches":
        assert corpus is not None, "a model on patches reads the corpus's pictures"
        return QuestionPictures(make_pictures(config, corpus))
    return open_features(config.features, config.model)


def make_vqa_inputs(
    config: ConfigDict,
    tokenizer: Any,
    features: PictureFeatures | QuestionPictures | None,
    length: int,
) -> VQAInputs:
    """What the config's VQA model reads of questions, `length` tokens or words of each."""
    if isinstance(features, QuestionPictures):
        return PatchInputs(tokenizer, features, length, config.model.pictures)
    if features is None:
        return CaptionInputs(tokenizer, length)
    kind = GridInputs if config.model.image == "grid" else RegionInputs
    return kind(tokenizer, features, length)
