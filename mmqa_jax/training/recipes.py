"""From an experiment's config to a task with its data: one recipe per task."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.clip_tokenizer import ClipTokenizer, open_tokenizer
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.examples import Augment, PatchRegions, SourceReader
from mmqa_jax.data.feed import FeedConfig
from mmqa_jax.data.images import BrokenPictures, PictureStore
from mmqa_jax.data.pipelines import answer_batches, contrastive_batches, rerank_batches
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
from mmqa_jax.data.schema import Modality, Question, Source
from mmqa_jax.data.sequences import MaskingConfig, Packer, PackingConfig
from mmqa_jax.data.tokenizers import (
    WordPiece,
    minilm_tokenizer,
    restrict_vocabulary,
    train_wordpiece,
    vocabulary_rows,
)
from mmqa_jax.models.presets import clip_vision, dual_encoder_from_config, vlp_from_config
from mmqa_jax.models.vlp import VLPConfig, VLPInputs
from mmqa_jax.retrieval.bm25 import source_text
from mmqa_jax.retrieval.modality import gold_modality
from mmqa_jax.retrieval.rankings import with_mined_negatives
from mmqa_jax.training.answer import AnswerTask
from mmqa_jax.training.clip_weights import fill_dual_encoder, fill_frontend
from mmqa_jax.training.contrastive import ContrastiveTask
from mmqa_jax.training.rerank import RerankTask, two_sides
from mmqa_jax.training.state import Task
from mmqa_jax.weights.bert import fill_bert, minilm_path
from mmqa_jax.weights.vlp import init_vlp_from_bert, start_vlp

# Frontends whose regions a detector found beforehand -> what reads its files.
READERS = {"x101": X101Features, "vinvl": VinVLFeatures}
# Of the section `batches`, what goes to FeedConfig: key -> type.
FEED_KEYS = {"batch_size": int, "slack": int, "threads": int}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What `training.loop.train` needs of a task.

    Attributes:
      task: model and loss.
      batches: Grain iterator of its batches.
      fill: fills a freshly made model with pretrained weights, in place.
      title: for the progress line.
      reader: of the sources, which knows what of them could not be read.
    """

    task: Task
    batches: Any
    fill: Callable[[nnx.Module], None] | None
    title: str
    reader: SourceReader


def make_recipe(config: ConfigDict, corpus: Corpus, tokenizer: WordPiece | ClipTokenizer) -> Recipe:
    """The recipe of `config.task`.

    Raises:
      UserError: an unknown task, or a config section that does not fit it.
    """
    recipes = {"contrastive": _contrastive, "rerank": _rerank, "answer": _answer}
    if config.task not in recipes:
        raise UserError(f"config key task={config.task}: unknown; use one of {', '.join(recipes)}.")
    is_clip = config.task == "contrastive" and bool(config.model.get("clip"))
    if isinstance(tokenizer, ClipTokenizer) != is_clip:
        wanted = "the folder of a converted CLIP" if is_clip else "a WordPiece tokenizer"
        raise UserError(
            f"config key tokenizer={config.tokenizer}: the model reads another kind of tokens; "
            f"name {wanted}."
        )
    questions = corpus.questions(config.data.split)
    if not questions:
        raise UserError(
            f"config key data.split={config.data.split}: {config.data.dir} holds no such "
            "questions; choose a split that `mmqa prepare` wrote."
        )
    questions = with_mined_negatives(questions, config.data.get("negatives", ()), corpus.row)
    questions = of_modality(questions, corpus, config.data.get("modality"))
    return recipes[config.task](config, corpus, questions, tokenizer)


def of_modality(
    questions: Sequence[Question], corpus: Corpus, modality: Modality | None
) -> list[Question]:
    """The questions whose gold sources are of one modality (VLP_I, VLP_T); None: all.

    Raises:
      UserError: there are none.
    """
    if modality is None:
        return list(questions)
    kept = [question for question in questions if gold_modality(question, corpus) == modality]
    if not kept:
        raise UserError(
            f"config key data.modality={modality}: none of the {len(questions)} questions needs "
            "such sources; leave it out or choose the other one."
        )
    return kept


def make_tokenizer(name: str, corpus: Corpus, folder: Path) -> WordPiece | ClipTokenizer:
    """The run's tokenizer, kept as tokenizer.json in its folder.

    Args:
      name: `minilm`; `minilm:corpus`, of its tokens those that the corpus and the training
        questions need, the answers' words first; `corpus:N`, a WordPiece of N tokens trained on
        them; the path of a tokenizer.json; or the folder of a converted CLIP.
      corpus: what it is trained on.
      folder: of the run; a tokenizer that is already there is taken.
    """
    kept = folder / "tokenizer.json"
    if kept.exists():
        return open_tokenizer(kept)
    if name == "minilm":
        tokenizer = minilm_tokenizer()
    elif name == "minilm:corpus":
        texts, answers = _all_texts(corpus), _answers(corpus)
        tokenizer = restrict_vocabulary(minilm_tokenizer(), texts, first=answers)
    elif name.startswith("corpus:"):
        size = name.removeprefix("corpus:")
        if not size.isdigit():
            raise UserError(f"config key tokenizer={name}: write corpus:N with a number of tokens.")
        tokenizer = train_wordpiece(_all_texts(corpus), int(size), lowercase=True)
    else:
        tokenizer = open_tokenizer(name)
    tokenizer.save(kept)
    return tokenizer


def _all_texts(corpus: Corpus) -> list[str]:
    texts = [f"{source.title} {source.text}" for source in corpus.sources]
    for question in corpus.questions("train"):
        texts += [question.question, *question.answers]
    return texts


def _answers(corpus: Corpus) -> list[str]:
    return [answer for question in corpus.questions("train") for answer in question.answers]


class RegionSizes(NamedTuple):
    """Regions of a picture, values of a region and of its place."""

    slots: int
    dim: int
    position_dim: int


def region_sizes(config: ConfigDict) -> RegionSizes:
    """What the config's VLP reads of a picture; no file is opened."""
    reader = READERS.get(config.model.frontend)
    if reader is not None:
        return RegionSizes(config.features.get("slots", 100), FEATURES, BOX + reader.classes)
    regions = _patch_regions(config)
    return RegionSizes(regions.slots, regions.dim, regions.position_dim)


def make_regions(config: ConfigDict, corpus: Corpus) -> PatchRegions | FeatureRegions:
    """A picture's regions as the config's VLP reads them."""
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
    if model.frontend == "clip":  # the model itself makes its features of them
        return PatchRegions(config.pictures.size, clip_vision(model).patch_size)
    return PatchRegions(
        config.pictures.size,
        model.patch,
        whole=model.get("whole", False),
        colors=model.get("colors", False),
        where=model.get("where", False),
    )


def make_vlp_config(config: ConfigDict, tokenizer: WordPiece) -> VLPConfig:
    """The config's VLP, with as many places per region as its regions have."""
    positions = region_sizes(config).position_dim
    return vlp_from_config({**config.model, "region_positions": positions}, tokenizer.vocab_size)


def make_packing(config: ConfigDict, *, inference: bool = False) -> PackingConfig:
    """Shapes of VLP sequences for the config's pictures and token budgets.

    `inference`: with what the section `inference.packing` says otherwise, if there is one.
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


def make_source_reader(config: ConfigDict, corpus: Corpus, tokenizer: WordPiece) -> SourceReader:
    """Tokens and pixels of the corpus's sources as the config's model reads them."""
    by_features = config.model.get("frontend") in READERS  # pixels are not looked at
    pictures = (
        None if by_features else PictureStore(corpus, config.pictures.size, config.pictures.resize)
    )
    regions = None if config.task == "contrastive" else make_regions(config, corpus)
    tags = regions.tags if regions and config.model.get("tags", False) else None
    return SourceReader(corpus, tokenizer, pictures, regions, text_of(config), tags)


def text_of(config: ConfigDict) -> Callable[[Source], str]:
    """What the config's model reads of a source's words: with its title, or without."""
    return source_text if config.data.get("titles", True) else lambda source: source.text


def _contrastive(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    model = dual_encoder_from_config(config.model, tokenizer.vocab_size)
    reader = make_source_reader(config, corpus, tokenizer)
    batches = contrastive_batches(
        reader,
        questions,
        _feed(config),
        **_options(config),
    )

    def fill(dual_encoder: Any) -> None:
        if config.model.get("clip"):
            return fill_dual_encoder(dual_encoder, config.init)
        rows = _word_rows(config, tokenizer)
        fill_bert(dual_encoder.text, _bert_folder(config), num_layers=model.text.layers, rows=rows)

    start = None if config.init == "scratch" else fill
    task = ContrastiveTask(model, make_mesh(config.mesh.to_dict()), config.get("tower_parts", 1))
    return Recipe(task, batches, start, "Training the retriever", reader)


def _rerank(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    model = make_vlp_config(config, tokenizer)
    reader = make_source_reader(config, corpus, tokenizer)
    batches = rerank_batches(
        reader,
        questions,
        make_packer(config, tokenizer),
        _feed(config, inputs=VLPInputs),
        **_options(config),
    )
    task = RerankTask(model, two_sides(config.model, make_packing(config), model))
    fill = _vlp_fill(config, tokenizer)
    return Recipe(task, batches, fill, "Training the source selector", reader)


def _answer(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    model = make_vlp_config(config, tokenizer)
    reader = make_source_reader(config, corpus, tokenizer)
    batches = answer_batches(
        reader,
        questions,
        make_packer(config, tokenizer),
        MaskingConfig(**config.masking.to_dict()),
        _feed(config, inputs=VLPInputs),
        **_options(config),
    )
    fill = _vlp_fill(config, tokenizer)
    return Recipe(AnswerTask(model), batches, fill, "Training the reader", reader)


def _vlp_fill(config: ConfigDict, tokenizer: WordPiece) -> Callable[[Any], None] | None:
    by_clip = config.model.frontend == "clip"
    if config.init == "scratch" and not by_clip:
        return None

    def fill(vlp: Any) -> None:
        if config.init.endswith(".bin") or config.init.endswith(".safetensors"):
            start_vlp(config.init, vlp)
        elif config.init != "scratch":
            rows, layers = _word_rows(config, tokenizer), vlp.config.bert.layers
            init_vlp_from_bert(
                vlp,
                _bert_folder(config),
                num_layers=layers,
                rows=rows,
                new_types=config.get("new_types", ()),
            )
        if by_clip:
            fill_frontend(vlp, config.features.root)

    return fill


def _bert_folder(config: ConfigDict) -> str | os.PathLike:
    return minilm_path() if config.init == "minilm" else config.init


def _word_rows(config: ConfigDict, tokenizer: WordPiece) -> np.ndarray | None:
    """Rows of MiniLM's word table for a smaller vocabulary, None for its own."""
    if config.tokenizer != "minilm:corpus":
        return None
    return vocabulary_rows(tokenizer, minilm_tokenizer())


def _feed(config: ConfigDict, inputs: Callable[..., Any] | None = None) -> FeedConfig:
    return FeedConfig(
        batch_size=config.batches.batch_size,
        seed=config.seed,
        augment=_augmentation(config.get("augment", {})),
        inputs=inputs,
        slack=config.batches.get("slack", 0),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        threads=config.batches.get("threads", 2),
    )


def _augmentation(section: Mapping[str, Any]) -> Augment | None:
    if not section or not any(section.values()):
        return None
    from mmqa_jax.data.datasets.atlas.example_augment import AtlasAugment

    return AtlasAugment(**section)


def _options(config: ConfigDict) -> dict[str, Any]:
    """Of the section `batches`, what goes to the task's own pipeline."""
    return {key: value for key, value in config.batches.items() if key not in FEED_KEYS}
