"""Loads trained models from the workdirs of training runs."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import on_shardings, state_shardings
from mmqa_jax.core.serving import loading_mesh
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.answer_vocabulary import FILE as ANSWERS
from mmqa_jax.data.answer_vocabulary import read_vocabulary
from mmqa_jax.data.clip_tokenizer import ClipTokenizer, open_tokenizer
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.inference.from_config import make_packing, make_vlp_config, text_of, two_sides
from mmqa_jax.inference.question_classifier import QuestionClassifier
from mmqa_jax.inference.reader import Reader
from mmqa_jax.inference.row_costs import embed_cost
from mmqa_jax.inference.vqa_model import VQAModel
from mmqa_jax.models.dual_encoder import DualEncoder
from mmqa_jax.models.presets import dual_encoder_from_config, text_classifier_from_config
from mmqa_jax.models.text_classifier import TextClassifier
from mmqa_jax.models.two_sided_vlp import TwoSides
from mmqa_jax.models.vlp_extensions import ExtendedVLP
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.modality import MODALITIES
from mmqa_jax.weights.folder import load_converted, load_weights, read_metadata, read_record

Options = Mapping[str, Any]  # of the section `inference`, in place of the run's own


def load_embedder(
    folder: str | os.PathLike, options: Options | None = None, *, one_shape: bool = False
) -> tuple[Embedder, ConfigDict]:
    """The trained dual encoder of a contrastive or example-retrieval run, and the run's config.

    Args:
      options: here and below, of the section `inference`, in place of the run's own.
      one_shape: for a few texts, see `_one_shape`.
    """
    config, tokenizer = _read_run(folder, ("contrastive", "example_retrieval"), options)
    if one_shape:
        _one_shape(config)
    model_config = dual_encoder_from_config(config.model, tokenizer.vocab_size)
    mesh = None if one_shape else _mesh(config)
    model = _load(folder, lambda: DualEncoder(model_config, rngs=nnx.Rngs()), mesh)
    return make_embedder(config, tokenizer, model), config


def make_embedder(
    config: ConfigDict, tokenizer: WordPiece | ClipTokenizer, model: DualEncoder
) -> Embedder:
    """The embedder of a contrastive run's model, which may be abstract (see Embedder.use)."""
    graphdef, state = nnx.split(model)
    return Embedder(
        graphdef,
        state,
        tokenizer,
        image_size=config.pictures.size,
        buckets=tuple(config.inference.buckets),
        batch_size=config.inference.batch_size,
        cost=embed_cost(config),
        text_of=text_of(config),
    )


class SourceHead(NamedTuple):
    """The trained source selector of a rerank run.

    Attributes:
      sides: how it encodes question and source separately; None: it encodes pairs.
    """

    config: ConfigDict
    tokenizer: WordPiece
    model: ExtendedVLP
    sides: TwoSides | None


def load_source_head(
    folder: str | os.PathLike, options: Options | None = None, *, one_shape: bool = False
) -> SourceHead:
    """The source selector of a rerank run; `one_shape`: for a few pairs, see `_one_shape`."""
    config, tokenizer, vlp = _load_vlp(folder, "rerank", options, one_shape)
    sides = two_sides(config.model, make_packing(config), vlp.config)
    return SourceHead(config, tokenizer, vlp, sides)


def load_reader(
    folder: str | os.PathLike,
    corpus: Corpus,
    options: Options | None = None,
    *,
    one_shape: bool = False,
) -> Reader:
    """The trained reader of an answer run; the arguments are those of `load_source_head`."""
    config, tokenizer, vlp = _load_vlp(folder, "answer", options, one_shape)
    return Reader(config, corpus, tokenizer, vlp)


def reader_modality(folder: str | os.PathLike) -> Modality | None:
    """The modality of the sources that the reader of an answer run was trained on, if only one.

    Raises:
      UserError: another task's run.
    """
    return _read_run(folder, ("answer",))[0].data.get("modality")


def load_question_classifier(folder: str | os.PathLike) -> QuestionClassifier:
    """The trained modality classifier of a modality run."""
    config, tokenizer = _read_run(folder, ("modality",))
    model_config = text_classifier_from_config(config.model, tokenizer.vocab_size, len(MODALITIES))
    mesh = _mesh(config)
    model = _load(folder, lambda: TextClassifier(model_config, rngs=nnx.Rngs()), mesh)
    return QuestionClassifier(config, model, tokenizer)


def load_vqa_model(
    folder: str | os.PathLike, corpus: Corpus | None = None, options: Options | None = None
) -> VQAModel:
    """The trained MCAN of a VQA run.

    Args:
      corpus: of the questions; only a model on patches needs it.

    Raises:
      UserError: another task's run, or answers.json is not that of the weights.
    """
    config, tokenizer = _read_run(folder, ("vqa",), options)
    answers = read_vocabulary(folder)
    heads = _answer_heads(read_record(folder).config)
    if heads != len(answers):
        raise UserError(
            f"{Path(folder) / ANSWERS}: {len(answers)} answers, but the weights beside it have "
            f"{heads}; copy both from the same run."
        )
    model = load_converted(folder, mesh=_mesh(config))
    return VQAModel(config, tokenizer, answers, model, corpus)


def load_prophets_mcan(
    folder: str | os.PathLike, config: ConfigDict, options: Options | None = None
) -> VQAModel:
    """A checkpoint of Prophet's authors that `mmqa convert` wrote.

    Args:
      config: of a VQA run on grids, for what weights do not tell: `tokenizer`, `answers.file`,
        `features`, `batches.lengths`, `inference.batch_size`. Its sizes give way to the weights'.

    Raises:
      UserError: another model, or answers or a tokenizer of other sizes.
    """
    record = read_record(folder)
    if record.architecture.name != "mcan" or config.model.image != "grid":
        raise UserError(
            f"--model {folder}: a converted `mcan` and a config of model.image=grid belong "
            f"together, found {record.architecture.name!r} and {config.model.image!r}; name others."
        )
    if not config.answers.file:
        raise UserError(
            "config key answers.file: is empty, and a converted checkpoint has no answers of its "
            "own; give the list that it was trained with."
        )
    answers, tokenizer = read_vocabulary(config.answers.file), open_tokenizer(config.tokenizer)
    sizes = record.config
    for key, given, count, expected in (
        ("answers.file", config.answers.file, len(answers), _answer_heads(sizes)),
        ("tokenizer", config.tokenizer, tokenizer.vocab_size, sizes.text.vocab_size),
    ):
        if count != expected:
            raise UserError(
                f"config key {key}={given}: has {count:,} entries, the weights in {folder} have "
                f"{expected:,}; give the file that they were trained with."
            )
    config = copy.deepcopy(config)
    _change(config, options)
    config.model.update({"grid": sizes.grid, "image_features": sizes.image_features})
    config.model.fusion.flat_out = sizes.fusion.flat_out
    return VQAModel(config, tokenizer, answers, load_converted(folder, mesh=_mesh(config)))


def _answer_heads(sizes: Any) -> int:
    """Answers of a VQA model, those that finetuning appended included."""
    return sizes.answers + getattr(sizes, "new_answers", 0)


def _load_vlp(
    folder: str | os.PathLike, task: str, options: Options | None, one_shape: bool = False
) -> tuple[ConfigDict, WordPiece, ExtendedVLP]:
    config, tokenizer = _read_run(folder, (task,), options)
    if one_shape:
        _one_shape(config)
    model_config = make_vlp_config(config, tokenizer.vocab_size)
    mesh = None if one_shape else _mesh(config)
    model = _load(folder, lambda: ExtendedVLP(model_config, rngs=nnx.Rngs()), mesh)
    return config, tokenizer, model


def _read_run(
    folder: str | os.PathLike, tasks: tuple[str, ...], options: Options | None = None
) -> tuple[ConfigDict, WordPiece | ClipTokenizer]:
    folder = Path(folder)
    metadata = read_metadata(folder)
    if metadata.get("task") not in tasks:
        raise UserError(
            f"{folder}: holds a model of task {metadata.get('task')!r}, {' or '.join(tasks)} was "
            "expected; name the workdir of such a training run."
        )
    config = read_config(folder)
    if config.get("task") != metadata["task"]:
        raise UserError(
            f"{folder / 'config.json'}: belongs to another run than model.json; copy the run "
            "again, or train it again in a new --workdir."
        )
    _change(config, options)
    return config, open_tokenizer(folder / "tokenizer.json")


def _change(config: ConfigDict, options: Options | None) -> None:
    with config.inference.unlocked(), config.inference.ignore_type():
        config.inference.update(options or {})


def _one_shape(config: ConfigDict) -> None:
    """Changes a run's config so that each of its functions is traced and compiled once, quickly.

    All inputs have the longest bucket's shape, texts of an encoder are encoded one by one, and the
    layers run in a loop, on one device. That suits a process that answers a few questions, most of
    whose time would go into tracing.
    """
    config.model.changes = {**config.model.get("changes", {}), "unroll": 1}
    if config.task in ("contrastive", "example_retrieval"):
        _change(config, {"buckets": (max(config.inference.buckets),), "batch_size": 1})
        return
    changes = config.inference.get("packing", {})
    buckets = changes.get("buckets", config.packing.buckets)
    longest = max(pictures for pictures, _ in buckets), max(text for _, text in buckets)
    config.inference.packing = {**changes, "buckets": (longest,)}


def _load(folder: str | os.PathLike, build: Any, mesh: Mesh | None) -> Any:
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    if mesh is not None:
        abstract = on_shardings(abstract, state_shardings(abstract, mesh))
    return nnx.merge(graphdef, load_weights(folder, abstract))


def _mesh(config: ConfigDict) -> Mesh | None:
    """Where the model of a run is used."""
    return loading_mesh(config.inference.get("mesh"))
