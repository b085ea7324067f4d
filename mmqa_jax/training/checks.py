"""What a config alone tells about a training run, checked before the run writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.config import check_section, parameters_of
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES, make_mesh
from mmqa_jax.data.images import Resize
from mmqa_jax.data.pipelines import answer_batches, contrastive_batches, rerank_batches
from mmqa_jax.data.schema import Modality
from mmqa_jax.data.sequences import MaskingConfig, PackingConfig
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.clip import TextConfig, VisionConfig
from mmqa_jax.models.presets import dual_encoder_from_config, vlp_from_config
from mmqa_jax.training.clip_weights import check_clip_frontend, check_clip_start
from mmqa_jax.training.loop import check_batch_size, read_section
from mmqa_jax.training.recipes import FEED_KEYS, make_packing, region_sizes
from mmqa_jax.training.rerank import two_sides

_BATCHES = {
    "contrastive": contrastive_batches,
    "rerank": rerank_batches,
    "answer": answer_batches,
}
# Key -> type, of what no dataclass or function describes.
_VALUES = {"task": str, "seed": int, "tokenizer": str, "init": str}
_DATA = {"dir": str, "split": str}
_MINED = {"negatives": tuple[str, ...]}
_SHOWN = {"titles": bool, "modality": Modality | None}
_PICTURES = {"size": int, "resize": Resize}
_AUGMENT = {"entities": float, "palette": float}
_FEATURES = {
    "root": str,
    "files": dict,
    "id_map": str,
    "names": str,
    "slots": int,
    "max_missing": int,
}
_DUAL_ENCODER = {
    "clip": str,
    "trunk": str,
    "changes": dict,
    "vision": dict,
    "fusion": str,
    "picture_gate": float,
}
_VLP = {
    "trunk": str,
    "changes": dict,
    "frontend": str,
    "patch": int,
    "whole": bool,
    "where": bool,
    "colors": bool,
    "tags": bool,
    "visual_hidden": tuple[int, ...],
    "clip": str,
    "vision": dict,
    "vision_layer": int,
    "copy_head": bool,
    "written_words": int | None,
}
_TWO_SIDES = {"joint_layers": int, "match_type": int | None}
_INFERENCE: dict[str, dict[str, Any]] = {
    "contrastive": {"batch_size": int, "buckets": tuple[int, ...]},
    "rerank": {"batch_size": int},
    "answer": {
        "batch_size": int,
        "num_beams": int,
        "max_new_tokens": int,
        "length_penalty": float,
    },
}
_ANY_VOCABULARY = 30_522  # the real one is not known yet, and no other size depends on it


def check_config(config: ConfigDict) -> None:
    """Refuses an experiment's config that cannot be trained, as far as the config tells.

    Raises:
      UserError: a key that is unknown or missing, a value of another type, sizes that do not fit
        together or the devices.
    """
    task = config.get("task")
    if task not in list(_BATCHES):
        raise UserError(f"config key task={task}: unknown; use one of {', '.join(_BATCHES)}.")
    sections = ["data", "mesh", "pictures", "model", "batches", "train", "inference"]
    sections += ["packing"] * (task != "contrastive") + ["masking"] * (task == "answer")
    known = {**_VALUES, **dict.fromkeys(sections, dict)}
    check_section(
        config,
        "",
        {**known, "augment": dict, "features": dict, "new_types": tuple[int, ...]}
        | ({"tower_parts": int} if task == "contrastive" else {}),
        known,
    )
    check_section(config.data, "data", {**_DATA, **_MINED, **_SHOWN}, _DATA)
    check_section(config.mesh, "mesh", dict.fromkeys(MESH_AXES, int))
    check_section(config.pictures, "pictures", _PICTURES, _PICTURES)
    check_section(config.get("augment", {}), "augment", _AUGMENT)
    known = _INFERENCE[task]
    optional = {"only_best": bool, "no_repeat_ngram": int} if task == "answer" else {}
    optional |= {"packing": dict} if task != "contrastive" else {}
    check_section(config.inference, "inference", {**known, **optional}, known)
    _check_positive(config.inference, "inference", known)
    ngram, most = config.inference.get("no_repeat_ngram", 0), config.inference.get("max_new_tokens")
    if ngram and not 2 <= ngram <= most:
        raise UserError(
            f"config key inference.no_repeat_ngram={ngram}: 0 (words may repeat) or 2 to "
            f"inference.max_new_tokens = {most} was expected; change one of them."
        )
    known, needed = parameters_of(
        _BATCHES[task], "reader", "questions", "packer", "masking", "feed"
    )
    check_section(config.batches, "batches", {**FEED_KEYS, **known}, ["batch_size", *needed])
    if task == "contrastive":
        _check_dual_encoder(config)
    else:
        _check_vlp(config)
    options = read_section(config.train)
    if task == "contrastive" and options.accumulate > 1:
        raise UserError(
            f"config key train.accumulate={options.accumulate}: the contrastive loss needs its "
            f"whole batch; leave it out and set tower_parts to {options.accumulate}."
        )
    _check_positive(config, "", {"tower_parts": int})
    parts = options.accumulate * config.get("tower_parts", 1)
    check_batch_size(config.batches.batch_size, make_mesh(config.mesh.to_dict()), parts)


def _check_dual_encoder(config: ConfigDict) -> None:
    model = config.model
    needed = ["fusion", "picture_gate"] + ["trunk"] * (not model.get("clip"))
    check_section(model, "model", _DUAL_ENCODER, needed)
    text_fields = TextConfig if model.get("clip") else BertConfig
    _check_sizes(model.get("changes", {}), "model.changes", text_fields)
    _check_sizes(model.get("vision", {}), "model.vision", VisionConfig)
    dual_encoder = dual_encoder_from_config(model, _ANY_VOCABULARY)
    if model.get("clip"):
        check_clip_start(config, dual_encoder)
    text = dual_encoder.text
    most = text.context if isinstance(text, TextConfig) else text.positions
    for key, length in (
        ("batches.query_length", config.batches.query_length),
        ("batches.source_lengths", max(config.batches.source_lengths, default=0)),
        ("inference.buckets", max(config.inference.buckets, default=0)),
    ):
        if length > most:
            raise UserError(
                f"config key {key}: {length} tokens, the text tower reads {most}; give no more."
            )
    side = dual_encoder.vision.image_size
    if config.pictures.size != side:
        raise UserError(
            f"config key pictures.size={config.pictures.size}: the vision tower takes {side}; set "
            "pictures.size and model.vision.image_size to the same number."
        )


def _check_vlp(config: ConfigDict) -> None:
    model = config.model
    own = {"patches": ["patch"], "clip": ["clip"]}.get(model.get("frontend"), [])
    known = {**_VLP, **(_TWO_SIDES if config.task == "rerank" else {})}
    check_section(model, "model", known, ["trunk", "frontend", *own])
    _check_sizes(model.get("changes", {}), "model.changes", BertConfig)
    _check_sizes(model.get("vision", {}), "model.vision", VisionConfig)
    if model.get("written_words") and not config.tokenizer.startswith(("minilm:corpus", "corpus:")):
        raise UserError(
            f"config key model.written_words={model.written_words}: writes the first words of the "
            f"vocabulary, but tokenizer {config.tokenizer} does not put common ones first; set "
            "tokenizer to minilm:corpus or leave model.written_words out."
        )
    vlp = vlp_from_config(model, _ANY_VOCABULARY)
    where = {"x101": "root", "vinvl": "files", "clip": "root"}
    if model.frontend not in where and "features" in config:
        raise UserError(
            f"config key features: model.frontend={model.frontend} reads pixels; set it to one of "
            f"{', '.join(where)} or leave features out."
        )
    if model.frontend in where:
        check_section(config.get("features", {}), "features", _FEATURES, [where[model.frontend]])
        for number in config.features.get("files", {}):
            if not number.isdigit():
                raise UserError(
                    f"config key features.files.{number}: a number was expected, image_id // "
                    "10,000,000 of the pictures in that TSV; change the key."
                )
    if vlp.vision is not None:
        if config.pictures.size != vlp.vision.image_size:
            raise UserError(
                f"config key pictures.size={config.pictures.size}: model.clip={model.clip} takes "
                f"{vlp.vision.image_size}; set pictures.size to it, or model.clip to another CLIP."
            )
        check_clip_frontend(config)
    given = region_sizes(config).dim
    if given != vlp.region_features:
        raise UserError(
            f"config key model.frontend={model.frontend}: takes regions of {vlp.region_features} "
            "values, "
            f"patches of side {model.patch} have {given}; use the frontend patches."
        )
    known, needed = parameters_of(PackingConfig, "slots_per_picture", "region_dim", "position_dim")
    check_section(config.packing, "packing", known, needed)
    check_section(config.inference.get("packing", {}), "inference.packing", known)
    packing = make_packing(config)
    for shapes in (packing, make_packing(config, inference=True)):
        if shapes.positions > vlp.bert.positions:
            raise UserError(
                f"config key packing.buckets: the longest sequence has {shapes.positions} "
                f"positions, the model {vlp.bert.positions}; use shorter buckets."
            )
    _check_types("packing.segments", packing.segments, vlp.bert.types)
    _check_types("packing.match_types", packing.match_types, vlp.bert.types)
    _check_types("new_types", config.get("new_types", ()), vlp.bert.types)
    two_sides(model, packing, vlp)
    if config.task == "answer":
        check_section(config.masking, "masking", *parameters_of(MaskingConfig))


def _check_types(key: str, numbers: Iterable[int], count: int) -> None:
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong:
        raise UserError(
            f"config key {key}: the model has no token type {wrong[0]}; use 0 to {count - 1}."
        )


def _check_sizes(section: Any, name: str, fields: type) -> None:
    known, _ = parameters_of(fields)
    check_section(section, name, known)
    _check_positive(section, name, known)


def _check_positive(section: Any, name: str, known: Mapping[str, Any]) -> None:
    """Every whole number of these sections is a size or a count."""
    for key, value in section.items():
        if known.get(key) is int and value < 1:
            place = f"{name}.{key}" if name else key
            raise UserError(
                f"config key {place}={value}: at least 1 was expected; give a larger number."
            )
