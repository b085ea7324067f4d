"""Checks a training config before the run writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
from ml_collections import ConfigDict

from mmqa_jax.core.config import Key, check_section, optional, spec_of
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES, make_mesh
from mmqa_jax.core.serving import BatchSize
from mmqa_jax.data.batches.answer import answer_batches
from mmqa_jax.data.batches.contrastive import contrastive_batches
from mmqa_jax.data.batches.example_retrieval import example_retrieval_batches
from mmqa_jax.data.batches.language_model import language_model_batches
from mmqa_jax.data.batches.modality import modality_batches
from mmqa_jax.data.batches.rerank import rerank_batches
from mmqa_jax.data.batches.vqa import vqa_batches
from mmqa_jax.data.images import Alpha, Resize
from mmqa_jax.data.packing import MaskingConfig, PackingConfig
from mmqa_jax.data.schema import Modality
from mmqa_jax.inference.from_config import make_packing, region_sizes, two_sides
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.clip import TextConfig, VisionConfig
from mmqa_jax.models.config_checks import check_known
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.lora import LoraConfig
from mmqa_jax.models.mcan_layers import FusionConfig
from mmqa_jax.models.presets import (
    dual_encoder_from_config,
    text_classifier_from_config,
    vlp_from_config,
    vqa_from_config,
)
from mmqa_jax.prompting.shots import TEXTS
from mmqa_jax.prompting.training_examples import ExampleOptions
from mmqa_jax.training.augmentation import augmentation_factory
from mmqa_jax.training.base_llm import check_trainable, llama_of
from mmqa_jax.training.loop import check_batch_size, read_section
from mmqa_jax.training.pretrained import check_clip_frontend, check_clip_init
from mmqa_jax.training.recipes import DUAL_ENCODERS, FEED_SPEC
from mmqa_jax.training.validation import SECTIONS

_POSITIVE = Key(int, minimum=1)
# Of a model in use: examples of a call over all devices, and how these share the work.
_SERVING = {
    "batch_size": Key(BatchSize, minimum=1),
    "mesh": optional(dict.fromkeys(MESH_AXES, optional(int))),
}
_DATA = {
    "dir": str,
    "split": str,
    "negatives": optional(tuple[str, ...]),
    "titles": optional(bool),
    "modality": optional(Modality | None),
}
_PICTURES = {
    "size": int,
    "resize": Resize,
    "alpha": optional(Alpha),
    "scaled_decoding": optional(bool),
}
_CONFIG: dict[str, Any] = {
    "task": str,
    "seed": int,
    "tokenizer": str,
    "init": str,
    "data": _DATA,
    "mesh": dict.fromkeys(MESH_AXES, optional(int)),
    "model": dict,  # depends on the task, the frontend and whether there is a CLIP
    "train": dict,  # see training.loop.read_section
}
_SOURCES: dict[str, Any] = {  # of the tasks that read sources
    "pictures": _PICTURES,
    "augment": optional(dict),  # its factory's arguments
    "features": optional(
        {
            "files": optional(dict),
            **dict.fromkeys(("root", "id_map", "names"), optional(str)),
            **dict.fromkeys(("slots", "max_missing"), optional(int)),
        }
    ),
    "new_types": optional(tuple[int, ...]),
    "validate": optional(dict),  # see training.validation
}
_PACKING = ("slots_per_picture", "region_dim", "position_dim")  # follow from other sections
_VLP_INFERENCE = {
    **_SERVING,
    "always_truncate_tail": optional(bool),
    "packing": optional(spec_of(PackingConfig, *_PACKING, partial=True)),
}
_BATCHES = {
    "contrastive": contrastive_batches,
    "rerank": rerank_batches,
    "answer": answer_batches,
    "modality": modality_batches,
    "example_retrieval": example_retrieval_batches,
    "language_model": language_model_batches,
    "vqa": vqa_batches,
}
TASKS = tuple(_BATCHES)
_NOT_IN_BATCHES = (
    *("reader", "questions", "packer", "masking", "feed", "route_by_category", "tokenizer"),
    *("texts", "labels", "inputs", "vocabulary", "versions", "probabilities", "rows", "text_of"),
)
_OF_TASK: dict[str, dict[str, Any]] = {
    "contrastive": {
        **_SOURCES,
        "tower_parts": optional(int, minimum=1),
        "inference": {**_SERVING, "buckets": tuple[int, ...]},
    },
    "rerank": {
        **_SOURCES,
        "packing": spec_of(PackingConfig, *_PACKING),
        "inference": _VLP_INFERENCE,
    },
    "modality": {"inference": _SERVING},
    "vqa": {
        "data": {
            **_DATA,
            "folds": optional(int, minimum=1),
            "fold": optional(int, minimum=0),
            "more_splits": optional(tuple[str, ...]),
        },
        "answers": {"file": str, "base": str, "min_questions": _POSITIVE},
        "features": optional(
            {"root": str, "max_missing": optional(int), "slots": optional(int, minimum=1)}
        ),
        "pictures": optional(_PICTURES),
        "augment": optional(dict),  # its factory's arguments
        "inference": _SERVING,
        "validate": optional(dict),  # see training.validation
    },
    "example_retrieval": {
        "data": {"dir": str, "split": str, "scores": str, "text": Literal[tuple(TEXTS)]},
        "pictures": _PICTURES,
        "target_temperature": Key(float, minimum=1e-3),
        "inference": {**_SERVING, "buckets": tuple[int, ...]},
        "validate": optional(dict),
    },
    "language_model": {
        "examples": spec_of(ExampleOptions),
        "library": dict,  # see systems.prompted_parts.LibrarySpec
        "inference": {"batch_size": _POSITIVE},
        "validate": optional(dict),
    },
    "answer": {
        **_SOURCES,
        "data": {**_DATA, "route_by_category": optional(bool)},
        "packing": spec_of(PackingConfig, *_PACKING),
        "masking": spec_of(MaskingConfig),
        "questions_per_mean": optional(int, minimum=1),
        "inference": {
            **_VLP_INFERENCE,
            "num_beams": _POSITIVE,
            "max_new_tokens": _POSITIVE,
            "length_penalty": float,
            "only_best": optional(bool),
            "no_repeat_ngram": optional(int),
        },
    },
}
_VISION = optional(spec_of(VisionConfig, minimum=1, partial=True))
_DUAL_ENCODER = {"clip": optional(str), "vision": _VISION, "fusion": str, "picture_gate": float}
_VLP = {
    "trunk": str,
    "changes": optional(spec_of(BertConfig, minimum=1, partial=True)),
    "frontend": str,
    **dict.fromkeys(("whole", "where", "colors", "tags", "copy_head"), optional(bool)),
    "visual_hidden": optional(tuple[int, ...]),
    "vision": _VISION,
    "vision_layer": optional(int),
    "written_words": optional(int | None),
}
_CLASSIFIER = {
    "trunk": str,
    "changes": optional(spec_of(BertConfig, minimum=1, partial=True)),
    "pooling": str,
    "frozen": bool,
}
_VQA: dict[str, dict[str, Any]] = {  # model.image -> the section `model`
    "grid": {"grid": _POSITIVE, "image_features": _POSITIVE},
    "regions": {"word_features": _POSITIVE, "region_features": _POSITIVE},
    "caption": dict.fromkeys(("answer_embeddings", "frozen_text"), optional(bool)),
    "patches": {
        "vision": Key(spec_of(VisionConfig, minimum=1, partial=True)),
        "pictures": _POSITIVE,
        "answer_embeddings": optional(bool),
    },
}
_TWO_SIDES = {"joint_layers": optional(int), "match_type": optional(int | None)}
_FEATURES_KEY = {"x101": "root", "vinvl": "files", "clip": "root"}  # frontend -> what it needs
_ANY_VOCABULARY = 30_522  # not known yet; no other size depends on it


def check_config(
    config: ConfigDict, devices: Sequence[jax.Device] | None = None, *, files: bool = True
) -> None:
    """Refuses a config that cannot be trained, as far as the config alone can show it.

    Args:
      devices: that it is to run on, all of this machine's by default.
      files: whether the weights that it names are looked at, too; planning needs none.

    Raises:
      UserError: a key that is unknown or missing, a value of another type, sizes that do not fit
        together or the devices.
    """
    task = config.get("task")
    if task not in TASKS:
        raise UserError(f"config key task={task}: unknown; use one of {', '.join(TASKS)}.")
    batches = spec_of(_BATCHES[task], *_NOT_IN_BATCHES)
    check_section(config, "", {**_CONFIG, **_OF_TASK[task], "batches": {**FEED_SPEC, **batches}})
    if config.get("augment"):
        own = spec_of(augmentation_factory(config.augment))
        check_section(config.augment, "augment", {"factory": str, **own})
    _check_validation(config)
    ngram, most = config.inference.get("no_repeat_ngram", 0), config.inference.get("max_new_tokens")
    if ngram and not 2 <= ngram <= most:
        raise UserError(
            f"config key inference.no_repeat_ngram={ngram}: 0 (words may repeat) or 2 to "
            f"inference.max_new_tokens = {most} was expected; change one of them."
        )
    if task in DUAL_ENCODERS:
        _check_dual_encoder(config, files)
    elif task == "modality":
        _check_classifier(config)
    elif task == "vqa":
        _check_vqa(config)
    elif task == "language_model":
        _check_language_model(config)
    else:
        _check_vlp(config, files)
    accumulate = read_section(config.train).accumulate
    if task == "contrastive" and accumulate > 1:
        raise UserError(
            f"config key train.accumulate={accumulate}: the contrastive loss needs its whole "
            f"batch; leave it out and set tower_parts to {accumulate}."
        )
    together = config.get("questions_per_mean")
    if task == "answer" and accumulate > 1 and not together:
        raise UserError(
            f"config key train.accumulate={accumulate}: the reader's loss is the mean over the "
            "masked tokens of a batch, which the mean of its parts' means is not; leave it out, or "
            "set config.questions_per_mean in the file, as configs/webqa/vlp_qa.py does."
        )
    if together and config.batches.batch_size % (accumulate * together):
        raise UserError(
            f"config key questions_per_mean={together}: batches.batch_size="
            f"{config.batches.batch_size} in train.accumulate={accumulate} parts was expected to "
            "be a multiple of it; change one of them."
        )
    parts = accumulate * config.get("tower_parts", 1)
    check_batch_size(config.batches.batch_size, make_mesh(config.mesh.to_dict(), devices), parts)


def _check_validation(config: ConfigDict) -> None:
    every = config.train.get("evaluate_every", 0)
    if config.task not in SECTIONS:
        if "validate" in config or every:
            raise UserError(
                f"config task={config.task}: training of this task does not validate; leave out "
                "`validate` and set train.evaluate_every to 0."
            )
        return
    if "validate" in config:
        spec = spec_of(SECTIONS[config.task], minimum=0)
        if "num_beams" in spec:
            spec["num_beams"] = optional(int | None, minimum=1)
        check_section(config.validate, "validate", spec)
    elif every:
        raise UserError(
            f"config key validate is missing, but train.evaluate_every is {every}; add it, or set "
            "that to 0."
        )


def _check_dual_encoder(config: ConfigDict, files: bool) -> None:
    model = config.model
    is_clip = bool(model.get("clip"))
    changes = spec_of(TextConfig if is_clip else BertConfig, minimum=1, partial=True)
    own = {"trunk": Key(str, required=not is_clip), "changes": optional(changes)}
    check_section(model, "model", {**_DUAL_ENCODER, **own})
    dual_encoder = dual_encoder_from_config(model, _ANY_VOCABULARY)
    if is_clip and files:
        check_clip_init(config, dual_encoder)
    text = dual_encoder.text
    most = text.context if isinstance(text, TextConfig) else text.positions
    lengths = {"inference.buckets": max(config.inference.buckets, default=0)}
    if config.task == "contrastive":
        lengths["batches.query_length"] = config.batches.query_length
        lengths["batches.source_lengths"] = max(config.batches.source_lengths, default=0)
    else:
        lengths["batches.length"] = config.batches.length
    for key, length in lengths.items():
        if length > most:
            raise UserError(
                f"config key {key}: {length} tokens, but the text tower reads at most {most}; use "
                "fewer."
            )
    side = dual_encoder.vision.image_size
    if config.pictures.size != side:
        raise UserError(
            f"config key pictures.size={config.pictures.size}: the vision tower takes {side}; set "
            "pictures.size and model.vision.image_size to the same number."
        )


def _check_language_model(config: ConfigDict) -> None:
    spec = {"changes": spec_of(LlamaConfig, minimum=1, partial=True), "lora": Any}
    check_section(config.model, "model", spec)
    if config.model.lora is not None:
        check_section(config.model.lora, "model.lora", spec_of(LoraConfig, minimum=1))
    llama_of(config, _ANY_VOCABULARY)
    check_trainable(config)
    ExampleOptions(**config.examples.to_dict())
    length, targets = config.batches.length, config.batches.targets
    if not 0 < targets < length:
        raise UserError(
            f"config key batches.targets={targets}: 1 to batches.length - 1 = {length - 1} tokens "
            "of a row can be learned; change one of them."
        )


def _check_classifier(config: ConfigDict) -> None:
    check_section(config.model, "model", _CLASSIFIER)
    bert = text_classifier_from_config(config.model, _ANY_VOCABULARY, classes=2).bert
    if not 3 <= config.batches.length <= bert.positions:
        raise UserError(
            f"config key batches.length={config.batches.length}: 3 to {bert.positions} tokens were "
            "expected, which the model reads; change it."
        )
    optimizer = read_section(config.train).optimizer
    if config.model.frozen and optimizer.name != "adam" and optimizer.weight_decay != 0:
        raise UserError(
            "config key model.frozen=True: weight decay would change the frozen BERT; set "
            "train.optimizer.weight_decay to 0.0."
        )


def _check_vqa(config: ConfigDict) -> None:
    model = config.model
    image = model.get("image")
    check_known("config key model.image", image, _VQA)
    encoder = {} if image == "regions" else {key: _CLASSIFIER[key] for key in ("trunk", "changes")}
    fusion = spec_of(FusionConfig, minimum=1, partial=True)
    check_section(model, "model", {"image": str, "fusion": fusion, **encoder, **_VQA[image]})
    vqa = vqa_from_config(model, _ANY_VOCABULARY, answers=2)
    lengths = config.batches.lengths
    most = vqa.text.positions if image != "regions" else max(lengths, default=0)
    if not lengths or sorted(set(lengths)) != list(lengths) or not 3 <= lengths[0] <= most:
        raise UserError(
            f"config key batches.lengths={tuple(lengths)}: increasing numbers from 3 to {most} "
            "were expected, tokens that the model reads; change them."
        )
    wanted = {"features": image in ("grid", "regions"), "pictures": image == "patches"}
    for key, needed in wanted.items():
        if (key in config) != needed:
            what = "needs it; add it" if needed else "does not read them; leave it out"
            raise UserError(f"config key {key}: model.image={image} {what}.")
    if config.get("augment") and image != "patches":
        raise UserError(
            f"config key augment: changes pixels and questions together, but model.image={image} "
            "reads none; leave it out."
        )
    if image == "patches" and config.pictures.size != vqa.vision.image_size:
        raise UserError(
            f"config key pictures.size={config.pictures.size}: the vision tower takes "
            f"{vqa.vision.image_size}; set pictures.size and model.vision.image_size to the same "
            "number."
        )
    if model.get("frozen_text") and read_section(config.train).optimizer.name != "adam":
        raise UserError(
            "config key model.frozen_text=True: weight decay would change the frozen encoder; set "
            "train.optimizer.name to adam."
        )
    folds, fold = config.data.get("folds", 1), config.data.get("fold", 0)
    if fold >= folds:
        raise UserError(f"config key data.fold={fold}: 0 to data.folds - 1 = {folds - 1} is right.")


def _check_vlp(config: ConfigDict, files: bool) -> None:
    model = config.model
    frontend = model.get("frontend")
    spec = {
        **_VLP,
        **(_TWO_SIDES if config.task == "rerank" else {}),
        "patch": Key(int, required=frontend == "patches"),
        "clip": Key(str, required=frontend == "clip"),
    }
    check_section(model, "model", spec)
    if model.get("written_words") and not config.tokenizer.startswith(("minilm:corpus", "corpus:")):
        raise UserError(
            f"config key model.written_words={model.written_words}: writes the first words of the "
            f"vocabulary, but tokenizer {config.tokenizer} does not put common ones first; set "
            "tokenizer to minilm:corpus or leave model.written_words out."
        )
    vlp = vlp_from_config(model, _ANY_VOCABULARY)
    _check_features(config)
    if vlp.vision is not None:
        if config.pictures.size != vlp.vision.image_size:
            raise UserError(
                f"config key pictures.size={config.pictures.size}: model.clip={model.clip} takes "
                f"{vlp.vision.image_size}; set pictures.size to it, or model.clip to another CLIP."
            )
        if files:
            check_clip_frontend(config)
    given = region_sizes(config).dim
    if given != vlp.region_features:
        raise UserError(
            f"config key model.frontend={frontend}: takes regions of {vlp.region_features} values, "
            f"patches of side {model.patch} have {given}; use the frontend patches."
        )
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


def _check_features(config: ConfigDict) -> None:
    frontend = config.model.frontend
    if frontend not in _FEATURES_KEY:
        if "features" in config:
            raise UserError(
                f"config key features: model.frontend={frontend} reads pixels; set it to one of "
                f"{', '.join(_FEATURES_KEY)} or leave features out."
            )
        return
    needed = _FEATURES_KEY[frontend]
    if needed not in config.get("features", {}):
        raise UserError(f"config key features.{needed} is missing; add it.")
    for number in config.features.get("files", {}):
        if not number.isdecimal():
            raise UserError(
                f"config key features.files.{number}: a number was expected, image_id // "
                "10,000,000 of the pictures in that TSV; change the key."
            )


def _check_types(key: str, numbers: Iterable[int], count: int) -> None:
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong:
        raise UserError(
            f"config key {key}: the model has no token type {wrong[0]}; use 0 to {count - 1}."
        )
