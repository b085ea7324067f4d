"""The base of all training tasks.

A task is a typed config: its fields are the sections of a config file of `mmqa train`, and every
default is written there alone. It makes its objective (model and loss), its batches and their
shapes, its validation and the weights that it starts from; it opens what was trained, and knows the
program that uses it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core import mesh as meshes
from mmqa_jax.core.errors import UserError, decimal_number
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.serving import BatchSize, RowCost, loading_mesh
from mmqa_jax.core.typed import at_least, check_section, mapping, optional, read_typed, spec_of
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data import tokenizers
from mmqa_jax.data.answers import AnswerVocabulary
from mmqa_jax.data.batches.feed import Batches, BatchesSection, FeedConfig
from mmqa_jax.data.batches.packing import Augment
from mmqa_jax.data.corpus import Corpus, evenly, member_of, open_corpus, open_mixture
from mmqa_jax.data.pictures.decode import Alpha
from mmqa_jax.data.pictures.resize import Resize
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import QuestionWords, make_words, open_tokenizer
from mmqa_jax.data.schema import Modality, Question, Source, source_text
from mmqa_jax.models.bert.network import TRUNKS
from mmqa_jax.retrieval.modality import of_modality
from mmqa_jax.retrieval.rankings import with_mined_negatives
from mmqa_jax.training.options import LoopOptions, check_batch_size, read_section
from mmqa_jax.training.state import Objective, Validation
from mmqa_jax.weights.folder import load_weights
from mmqa_jax.weights.keymap import traced_model
from mmqa_jax.weights.record import read_metadata

if TYPE_CHECKING:
    from mmqa_jax.prompting.text_tokenizer import TextTokenizer
    from mmqa_jax.tasks.initial_weights import Loader

    AnyTokenizer = tokenizers.Tokenizer | QuestionWords | TextTokenizer
Struct = jax.ShapeDtypeStruct

ANY_VOCABULARY = 30_522  # of the published BERTs: where it is not known, and no size depends on it
_AXES = dict.fromkeys(meshes.MESH_AXES, optional(int))
_TRAINING_AXES = dict.fromkeys(
    (*meshes.MESH_AXES, meshes.SEQUENCE, *meshes.DCN_AXES), optional(int)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection:
    """The questions that a run is trained on."""

    dir: str  # folder of `mmqa prepare`
    split: str  # of the questions
    # Files of rankings (`mmqa search`) whose sources are further hard negatives.
    negatives: tuple[str, ...] = ()
    titles: bool = True  # sources are read with their titles
    modality: Modality | None = None  # only questions that need sources of this one; None: all

    def text_of(self, source: Source) -> str:
        """The text of a source as the model takes it."""
        return source_text(source) if self.titles else source.text

    def chosen(self, questions: list[Question], corpus: Corpus) -> list[Question]:
        """Chooses the questions of its modality, with the negatives that it names."""
        questions = with_mined_negatives(questions, self.negatives, corpus.row)
        return of_modality(questions, corpus, self.modality)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedData(DataSection):
    """The data of tasks that are trained on several corpora at once."""

    # Folders of `mmqa prepare` with their weights, in place of `dir`; an epoch shows each one's
    # examples in proportion to its weight.
    mixture: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        places, weights = [place for place, _ in self.mixture], self.weights
        twice = len(set(places)) < len(places)
        if self.mixture and self.dir:
            raise UserError(
                f"config keys data.dir={self.dir} and data.mixture: give one of them; set the "
                "other to '' or ()."
            )
        if twice or any(not math.isfinite(weight) or weight < 0 for weight in weights):
            what = "each folder once" if twice else "weights from 0"
            raise UserError(
                f"config key data.mixture={self.mixture}: {what} was expected, such as "
                "(('data/a', 2), ('data/b', 1)); change it."
            )
        if self.mixture and not sum(weights):
            raise UserError(
                f"config key data.mixture={self.mixture}: the weights sum to 0, so that nothing is "
                "trained on; give a larger one."
            )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the mixture's corpora."""
        return tuple(weight for _, weight in self.mixture)

    def members(self, questions: Sequence[Question]) -> list[int]:
        """The number of each question's corpus in the mixture; [] without one."""
        return list(map(member_of, questions)) if self.mixture else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesSection:
    """How pictures are made square for the model; see data/pictures/resize.py."""

    size: int  # side in pixels
    resize: Resize
    alpha: Alpha = "white"
    # JPEGs are decoded at a fraction of their size where that is enough.
    scaled_decoding: bool = False

    def open(self, corpus: Corpus) -> PictureStore:
        """The corpus's pictures as the model takes them."""
        return PictureStore(
            corpus, self.size, self.resize, alpha=self.alpha, scaled=self.scaled_decoding
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSection:
    """The trained model in use."""

    batch_size: BatchSize = at_least(1)  # examples of a call over all devices
    # How the devices of the process share the work; empty: a copy of the model on each.
    mesh: Mapping[str, int] = mapping(_AXES)


@dataclasses.dataclass(frozen=True)
class InUse:
    """The program of a trained model in use, without weights."""

    cost: RowCost  # of an example, for the batch size
    make: Callable[[nnx.GraphDef], Any]  # graphdef -> the jitted function (state, *inputs)
    build: Callable[[], nnx.Module]  # the model
    inputs: Callable[[int], tuple[Any, ...]]  # examples of a call -> their shapes
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # static arguments


class Reader(Protocol):
    """A reader of sources, of pictures or of their features."""

    def warn_missing(self) -> None:
        """Says on stderr what could not be read."""


class OnGraph:
    """A jitted function (graphdef, state, *inputs) on the graph of one model; only to be traced."""

    def __init__(self, function: Any, graphdef: nnx.GraphDef):
        self._function, self._graphdef = function, graphdef

    def trace(self, *arguments: Any, **options: Any) -> jax.stages.Traced:
        """The function of (state, *inputs), traced."""
        return self._function.trace(self._graphdef, *arguments, **options)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The inputs of `training.loop.train` from a task on a corpus."""

    objective: Objective  # model and loss
    batches: Batches  # iterates over its batches
    # Puts pretrained weights into a model of shapes, in place; None to train from scratch.
    load_pretrained: Loader | None
    # Of the sources or of pictures' features; it counts those that could not be read. None: none
    # are read.
    reader: Reader | None = None
    answers: AnswerVocabulary | None = None  # the answers that the model chooses among, if it does
    finish: Callable[[Any], Any] | None = None  # as of training.loop.train
    # Further JSON values for model.json; a run resumes with equal ones alone.
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A training task as its config describes it."""

    name: ClassVar[str]  # of the task, as in the key `task` of a config
    product: ClassVar[str]  # what is trained, in words
    unit: ClassVar[str] = "questions"  # of a batch's examples
    # The program that uses what is trained (`mmqa plan`), if one does.
    program: ClassVar[str | None] = None
    # The config keys by which tokens of its examples are cut.
    limits: ClassVar[tuple[str, ...]] = ()
    # `factory` and its arguments (tasks.task), of tasks that have such a section.
    augment: ClassVar[Mapping[str, Any]] = {}
    validate: ClassVar[Any] = None  # the section `validate`, of tasks that validate

    task: str  # its `name`
    seed: int  # of initialization, sampling and dropout
    tokenizer: str  # see tasks.task
    init: str  # what the weights start from: `scratch`, `minilm`, or a folder or file of weights
    data: Any
    model: Any
    batches: Any
    inference: Any
    # Size of each mesh axis, and how it crosses slices (core.mesh.make_mesh).
    mesh: Mapping[str, int] = mapping(_TRAINING_AXES, required=True)
    train: Mapping[str, Any] = mapping(dict, required=True)  # see training.options.LoopOptions

    # --- What the config alone tells ---------------------------------------------------------

    @classmethod
    def validates(cls) -> bool:
        """Whether its config may have a section `validate`."""
        return any(field.name == "validate" for field in dataclasses.fields(cls))

    @property
    def title(self) -> str:
        """The title of the progress line."""
        return f"Training the {self.product}"

    @functools.cached_property
    def loop(self) -> LoopOptions:
        """The section `train`."""
        return read_section(self.train)

    def check(self, devices: Sequence[jax.Device] | None = None, *, files: bool = True) -> None:
        """Refuses what cannot be trained, as far as the config alone can show it.

        Args:
          devices: that it is to run on, all of this machine's by default.
          files: whether the weights that it names are looked at, too; planning needs none.
        """
        self.check_sizes(files=files)
        parts, mesh = self.loop.accumulate * self._parts(), meshes.make_mesh(self.mesh, devices)
        check_batch_size(self.batches.batch_size, mesh, parts)
        shards, length = mesh.shape.get(meshes.SEQUENCE, 1), self.row_length
        if shards > 1 and length is None:
            raise UserError(
                f"config key mesh.{meshes.SEQUENCE}={shards}: task={self.task} has no rows of a "
                "decoder that could be split; set it to 1."
            )
        if shards > 1 and length % shards:
            raise UserError(
                f"config key mesh.{meshes.SEQUENCE}={shards}: does not divide a row of {length} "
                "tokens; make batches.length a multiple of it."
            )

    def check_sizes(self, *, files: bool = True) -> None:
        """Checks what `check` does, whatever the devices are."""
        if self.augment:
            arguments = spec_of(augmentation_factory(self.augment))
            check_section(self.augment, "augment", {"factory": str, **arguments})
        every = self.loop.evaluate_every
        if every and not self.validates():
            raise UserError(
                f"config task={self.task}: training of this task does not validate; set "
                "train.evaluate_every to 0."
            )
        if every and self.validate is None:
            raise UserError(
                f"config key validate is missing, but train.evaluate_every is {every}; add it, or "
                "set that to 0."
            )
        self._check(files)

    @abc.abstractmethod
    def _check(self, files: bool) -> None:
        """The task's own part of `check`."""

    @property
    def row_length(self) -> int | None:
        """Tokens of a row, of tasks whose rows the mesh axis `sequence` can split."""
        return None

    def _parts(self) -> int:
        """Parts into which the model splits a batch by itself."""
        return 1

    def vocabulary_size(self) -> int:
        """Tokens of the tokenizer, which need not be there: of a published one, if it is not."""
        size = self.tokenizer.removeprefix("corpus:")
        if self.tokenizer.startswith("corpus:") and (rows := decimal_number(size)) is not None:
            return rows
        trunk = getattr(self.model, "trunk", None)
        if self.tokenizer.startswith("minilm") or trunk not in TRUNKS:
            return ANY_VOCABULARY
        return TRUNKS[trunk]().vocab_size

    def remat_keys(self) -> tuple[str, ...]:
        """The config keys that say what the model computes again in the backward pass."""
        keys = ("model.changes.remat",) if hasattr(self.model, "changes") else ()
        towers = (getattr(self.model, key, None) for key in ("clip", "siglip", "vision"))
        if any(towers):
            return (*keys, "model.vision.remat")
        return keys

    @abc.abstractmethod
    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> Objective:
        """Model and loss.

        Args:
          vocab_size: of the tokenizer; `vocabulary_size` where there is none yet.
          mesh: that the batch is split over; None: as on one device.
        """

    @abc.abstractmethod
    def batch(self) -> dict[str, Any]:
        """Shapes of a global batch as the jitted step gets it.

        Where the config leaves a size to the data, its largest is taken: of several buckets the one
        with the most columns; of a vocabulary that is not at hand the published one.
        """

    def part(self) -> Self:
        """The task whose batch is one of the parts of an update (`train.accumulate`)."""
        size = self.batches.batch_size // self.loop.accumulate
        batches = dataclasses.replace(self.batches, batch_size=size)
        return dataclasses.replace(self, batches=batches)

    def in_use(self) -> InUse:
        """The program that uses the trained model, for tasks with `program`."""
        raise NotImplementedError

    def in_folder(self, folder: str | os.PathLike) -> Self:
        """The task of the run in a folder, with the places that by default lie there."""
        return self

    # --- On data -----------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The place of its questions, for messages."""
        return ", ".join(self._mixed) or self.data.dir

    @property
    def _mixed(self) -> list[str]:
        return [place for place, _ in getattr(self.data, "mixture", ())]

    def open_corpus(self) -> Corpus:
        """Opens the corpus of the section `data`."""
        if self._mixed:
            return open_mixture(self._mixed)
        if not self.data.dir:
            raise UserError("config key data.dir is empty: name the folder of `mmqa prepare`.")
        return open_corpus(self.data.dir)

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> AnyTokenizer:
        """The run's tokenizer, saved in its folder; one that is already there is used."""
        return make_tokenizer(self.tokenizer, corpus, folder)

    def open_tokenizer(self, folder: Path) -> AnyTokenizer:
        """The tokenizer of the run in a folder; UserError if it is damaged."""
        return open_tokenizer(folder / "tokenizer.json")

    def tokenizer_kind(self) -> tuple[str, str]:
        """The kind of tokenizers that the model reads, and what to name in the config."""
        return "WordPiece", "a WordPiece tokenizer"

    def recipe(self, corpus: Corpus, tokenizer: AnyTokenizer) -> Recipe:
        """Prepares a run on a corpus."""
        kind, wanted = self.tokenizer_kind()
        if tokenizer.kind != kind:
            raise UserError(
                f"config key tokenizer={self.tokenizer}: the model reads another kind of tokens; "
                f"name {wanted}."
            )
        questions = self.training_questions(corpus)
        if not questions:
            raise UserError(
                f"config key data.split={self.data.split}: {self.place} holds no such "
                "questions; choose a split that `mmqa prepare` wrote."
            )
        return self._recipe(corpus, questions, tokenizer)

    def training_questions(self, corpus: Corpus) -> list[Question]:
        """The questions that the run is trained on."""
        return corpus.questions(self.data.split)

    @abc.abstractmethod
    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        """`questions`: of the split."""

    def validation(self, corpus: Corpus, tokenizer: Any, model: nnx.Module) -> Validation | None:
        """Makes the validation of the section `validate` from the run's model; None without one."""
        if self.validate is None:
            return None
        return Validation(self.evaluation(corpus, tokenizer, model), self.validate.metric)

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        """model -> values by name, on the questions of the section `validate`."""
        raise NotImplementedError

    def feed(self, inputs: Callable[..., Any] | None = None) -> FeedConfig:
        """The section `batches` with seed, augmentation and this process's rows."""
        section: BatchesSection = self.part().batches
        return FeedConfig(
            batch_size=section.batch_size,
            seed=self.seed,
            augment=make_augmentation(self.augment),
            inputs=inputs,
            slack=section.slack,
            rows=meshes.local_rows(meshes.make_mesh(self.mesh), section.batch_size),
            threads=section.threads,
            workers=section.workers,
            mixture=self.data.weights if isinstance(self.data, MixedData) else (),
        )

    # --- What was trained --------------------------------------------------------------------

    def serving_mesh(self) -> Mesh | None:
        """The mesh on which the trained model is used, or None for one device."""
        return loading_mesh(self.inference.mesh)

    def load(
        self, folder: Any, model: Callable[..., nnx.Module], config: Any, mesh: Mesh | None
    ) -> Any:
        """The trained model of the run in a folder, as `model(config, rngs=...)` makes it."""
        graphdef, abstract = traced_model(model, config)
        if mesh is not None:
            abstract = meshes.on_shardings(abstract, meshes.state_shardings(abstract, mesh))
        return nnx.merge(graphdef, load_weights(folder, abstract))


def scored_questions(
    task: Task, corpus: Corpus, counts: Callable[[Question], bool], needed: str
) -> list[Question]:
    """The questions of the section `validate` that can be scored, of the model's modality.

    Args:
      counts: whether a question can be scored.
      needed: what it lacks otherwise, for the message.
    """
    section = task.validate
    questions = [question for question in corpus.questions(section.split) if counts(question)]
    if not questions:
        raise UserError(
            f"config key validate.split={section.split}: {task.place} holds no such questions "
            f"with {needed}; choose another split, or set train.evaluate_every to 0."
        )
    questions = of_modality(questions, corpus, getattr(task.data, "modality", None))
    return evenly(questions, section.questions)


def part_of(corpus: Corpus, rows: Sequence[int]) -> Corpus:
    """Some sources as a corpus of their own, in the order of the rows."""
    sources = [corpus.sources[row] for row in sorted(set(rows))]
    return Corpus(sources, read_picture=corpus.read_picture)


def ints(*shape: int) -> Struct:
    """Shape of an int32 array."""
    return Struct(shape, np.int32)


def floats(*shape: int) -> Struct:
    """Shape of a float32 array."""
    return Struct(shape, np.float32)


def bools(*shape: int) -> Struct:
    """Shape of a boolean array."""
    return Struct(shape, np.bool_)


# The augmentation of training examples that a config's section `augment` names.
#
# `augment.factory` is `package.module:Class`; the section's other values are its arguments.


# Modules of runs that were trained when they had another name.
_FORMER = {"data.datasets.atlas.augment": "data.atlas.augment"}


def augmentation_factory(section: Mapping[str, Any]) -> Callable[..., Augment]:
    """Finds the class or function of this package that `augment.factory` names."""
    named = section.get("factory", "")
    module, _, name = str(named).partition(":")
    factory = None
    if module.startswith("mmqa_jax."):
        inside = module.removeprefix("mmqa_jax.")
        module = f"mmqa_jax.{_FORMER.get(inside, inside)}"
        try:
            factory = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "-"):
                raise
    if not callable(factory):
        raise UserError(
            f"config key augment.factory={named!r}: a class of mmqa_jax was expected as "
            "package.module:Class; correct it or leave augment out."
        )
    return factory


def make_augmentation(section: Mapping[str, Any]) -> Augment | None:
    """The augmentation, None where the section is missing or its probabilities are all 0."""
    options = {key: value for key, value in section.items() if key != "factory"}
    return augmentation_factory(section)(**options) if any(options.values()) else None


# The task of a training run, read again from the run's folder.

T = TypeVar("T", bound=Task)
Options = Mapping[str, Any]  # of the section `inference`, in place of the run's own


def read_run(
    folder: str | os.PathLike, kinds: tuple[type[T], ...], options: Options | None = None
) -> tuple[T, Any]:
    """The task of a run, and the run's tokenizer.

    Args:
      kinds: the tasks whose runs are expected.
      options: of the section `inference`, in place of the run's own.
    """
    folder = Path(folder)
    named = {kind.name: kind for kind in kinds}
    trained = read_metadata(folder).get("task")
    if trained not in named:
        raise UserError(
            f"{folder}: holds a model of task {trained!r}, {' or '.join(named)} was "
            "expected; name the workdir of such a training run."
        )
    config = read_config(folder)
    if config.get("task") != trained:
        raise UserError(
            f"{folder / 'config.json'}: belongs to another run than model.json; copy the run "
            "again, or train it again in a new --workdir."
        )
    task = read_typed(named[trained], config)
    return with_options(task, options).in_folder(folder), task.open_tokenizer(folder)


def with_options(task: T, options: Options | None) -> T:
    """The task with other values in its section `inference`."""
    if not options:
        return task
    return dataclasses.replace(task, inference=dataclasses.replace(task.inference, **options))


# The tokenizer of a run: a published one, one that is trained on the corpus, or a file.


def make_tokenizer(name: str, corpus: Corpus, folder: Path) -> tokenizers.Tokenizer | QuestionWords:
    """The run's tokenizer, saved as tokenizer.json in its folder.

    Args:
      name: `minilm`; `minilm:corpus`, MiniLM's with only the tokens that the corpus and the
        training questions need, the answers' first; `corpus:N`, a WordPiece of N tokens trained
        on them; `words`, the words of all questions (openvqa); the path of a tokenizer.json; or
        the folder of a converted CLIP or SigLIP.
      corpus: what it is trained on.
      folder: of the run; a tokenizer that is already there is used.
    """
    path = folder / "tokenizer.json"
    if jax.process_index() == 0 and not path.exists():
        _new_tokenizer(name, corpus).save(path)
    distributed.barrier("tokenizer")
    return open_tokenizer(path)


def _new_tokenizer(name: str, corpus: Corpus) -> tokenizers.Tokenizer | QuestionWords:
    if name == "minilm":
        return tokenizers.minilm_tokenizer()
    if name == "words":
        return make_words(question.question for question in corpus.questions())
    if name == "minilm:corpus":
        texts, answers = _all_texts(corpus), _answers(corpus)
        return tokenizers.restrict_vocabulary(tokenizers.minilm_tokenizer(), texts, first=answers)
    if name.startswith("corpus:"):
        size = name.removeprefix("corpus:")
        if not size.isdecimal() or len(size) > 9:
            raise UserError(f"config key tokenizer={name}: write corpus:N with a number of tokens.")
        return tokenizers.train_wordpiece(_all_texts(corpus), int(size), lowercase=True)
    return open_tokenizer(name)


def _all_texts(corpus: Corpus) -> list[str]:
    texts = [f"{source.title} {source.text}" for source in corpus.sources]
    for question in corpus.questions("train"):
        texts += [question.question, *question.answers]
    return texts


def _answers(corpus: Corpus) -> list[str]:
    return [answer for question in corpus.questions("train") for answer in question.answers]
