"""Visual question answering by the MCANs (MAVL, Prophet's stage 1): one class for each answer.

A trained one gives answer candidates, and the latents by which examples are chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import RowCost, ServedModel, layer_bytes
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.typed import at_least, changes_of, chosen_by, mapping
from mmqa_jax.data.answers import FILE, AnswerVocabulary, make_vocabulary, read_vocabulary
from mmqa_jax.data.answers import FILE as ANSWERS
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.vqa import (
    CaptionInputs,
    GridInputs,
    PatchInputs,
    QuestionPictures,
    RegionInputs,
    VQAInputs,
    vqa_batches,
)
from mmqa_jax.data.corpus import Corpus, trains_on
from mmqa_jax.data.published_tokenizers import QuestionWords, open_tokenizer, read_glove
from mmqa_jax.data.records.grid_records import PictureFeatures, open_features
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import has_answers, score_candidates
from mmqa_jax.models.bert.keys import fill_bert
from mmqa_jax.models.bert.network import BertConfig, minilm_l6, trunk_config
from mmqa_jax.models.common.config_checks import check_known, with_fields
from mmqa_jax.models.mcan.network import (
    MCAN,
    FusionConfig,
    MCANConfig,
    MCANOpenVQA,
    MCANOpenVQAConfig,
)
from mmqa_jax.models.mcan.patches import CaptionMCAN, CaptionMCANConfig, PatchMCAN, PatchMCANConfig
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.initial_weights import Loader, bert_folder, bert_rows
from mmqa_jax.training.state import OfLayers
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.record import is_weights_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fused:
    """What the MCANs have in common."""

    kind: ClassVar[str]
    remat_keys: ClassVar[tuple[str, ...]] = ("model.changes.remat",)
    frozen_text: ClassVar[bool] = False
    answer_embeddings: ClassVar[bool] = False
    image: str  # what they see of a picture
    fusion: Mapping[str, Any] = changes_of(FusionConfig)  # fields of FusionConfig that differ

    def fusion_config(self) -> FusionConfig:
        """The fusion's sizes."""
        return with_fields(FusionConfig(), self.fusion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnText(_Fused):
    """MCANs whose questions a BERT encodes, as VLPModel's `trunk` and `changes` say."""

    trunk: str
    changes: Mapping[str, Any] = changes_of(BertConfig)

    def _text(self, vocab_size: int) -> BertConfig:
        return trunk_config(self.trunk, self.changes, vocab_size, types=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridModel(_OnText):
    """Prophet's MCAN on CLIP's grid features."""

    kind: ClassVar[str] = "mcan"
    grid: int = at_least(1)  # cells of a side
    image_features: int = at_least(1)  # values of a cell

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> MCANConfig:
        """The model's sizes.

        Args:
          vocab_size: of the tokenizer.
          answers: size of the answer vocabulary, that of the pretraining where it is extended.
          new_answers: by which it is extended.
        """
        return MCANConfig(
            self._text(vocab_size),
            self.fusion_config(),
            image_features=self.image_features,
            grid=self.grid,
            answers=answers,
            new_answers=new_answers,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionsModel(_Fused):
    """openvqa's MCAN: GloVe words and a detector's regions, of `region_features` values each."""

    kind: ClassVar[str] = "mcan_openvqa"
    remat_keys: ClassVar[tuple[str, ...]] = ()
    word_features: int = at_least(1)
    region_features: int = at_least(1)

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> MCANOpenVQAConfig:
        """The model's sizes; see GridModel. Its answers cannot be extended."""
        sizes = self.word_features, self.region_features
        return MCANOpenVQAConfig(vocab_size, self.fusion_config(), *sizes, answers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionModel(_OnText):
    """Ours: a caption stands for the picture."""

    kind: ClassVar[str] = "caption_mcan"
    frozen_text: bool = False  # the question encoder is not trained
    answer_embeddings: bool = False  # the head starts from the answers' embeddings

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> CaptionMCANConfig:
        """The model's sizes; see GridModel. Its answers cannot be extended."""
        text = self._text(vocab_size)
        return CaptionMCANConfig(text, self.fusion_config(), answers, self.frozen_text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchesModel(_OnText):
    """Ours: an MCAN on the patches of pictures."""

    kind: ClassVar[str] = "patch_mcan"
    remat_keys: ClassVar[tuple[str, ...]] = ("model.changes.remat", "model.vision.remat")
    pictures: int = at_least(1)  # of a question at most
    vision: Mapping[str, Any] = changes_of(VisionConfig)  # fields of VisionConfig that differ
    answer_embeddings: bool = False  # see CaptionModel

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> PatchMCANConfig:
        """The model's sizes; see GridModel. Its answers cannot be extended."""
        vision = with_fields(VisionConfig(), self.vision)
        text = self._text(vocab_size)
        return PatchMCANConfig(text, vision, self.fusion_config(), answers, self.pictures)


VQAModelSection = GridModel | RegionsModel | CaptionModel | PatchesModel
_VQA = {
    "grid": GridModel,
    "regions": RegionsModel,
    "caption": CaptionModel,
    "patches": PatchesModel,
}


def vqa_model(section: Mapping[str, Any]) -> type[VQAModelSection]:
    """The dataclass of a VQA run's section `model`, by its `image`."""
    image = section.get("image")
    check_known("config key model.image", image, _VQA)
    return _VQA[image]


CANDIDATES = 10  # Prophet's CANDIDATE_NUM


@functools.lru_cache(maxsize=8)  # models of one config share their programs
def make_answer_scores(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted MCAN: (state, question_ids, image) -> the answers' scores [B, V], latents."""

    def run(state: Any, question_ids: jax.Array, image: Any) -> tuple[jax.Array, ...]:
        module = nnx.merge(graphdef, state)
        latent = module.latent(question_ids, image)
        return jax.nn.sigmoid(module.answer_logits(latent).astype(jnp.float32)), latent

    return jax.jit(run)


class VQAModel(ServedModel):
    """Holds the parameters and the jitted function; all batches have one size and one length.

    Args:
      task: tasks.vqa.VQA, of the run.
      tokenizer: of the run.
      answers: of the run.
      corpus: of the questions; only a model on patches needs it.
    """

    def __init__(
        self,
        task: Any,
        tokenizer: Any,
        answers: AnswerVocabulary,
        model: nnx.Module,
        corpus: Corpus | None = None,
    ):
        self.task, self.answers = task, answers
        self.features = task.open_pictures(corpus)
        longest = max(task.batches.lengths)
        self._inputs = task.inputs(tokenizer, self.features, longest)
        super().__init__(model, task.inference.batch_size, task.cost())
        self._run = make_answer_scores(self._graphdef)

    def candidates(
        self, questions: Sequence[Question], count: int = CANDIDATES
    ) -> dict[str, list[tuple[str, float]]]:
        """question_id -> the `count` answers with the highest scores, best first."""
        return self.candidates_and_latents(questions, count)[0]

    def candidates_and_latents(
        self, questions: Sequence[Question], count: int = CANDIDATES
    ) -> tuple[dict[str, list[tuple[str, float]]], Float32[np.ndarray, "n D"]]:
        """Returns what `candidates` does, and the fused feature of every question."""
        candidates: dict[str, list[tuple[str, float]]] = {}
        latents = [np.zeros((0, self.latent_size), np.float32)]
        with Progress("Answer candidates", len(questions), "questions") as progress:
            for batch, scores, latent in self._batches(questions):
                for question, row in zip(batch, scores, strict=True):
                    best = np.argsort(-row, kind="stable")[:count]
                    candidates[question.id] = [
                        (self.answers.answers[i], float(row[i])) for i in best
                    ]
                latents.append(latent)
                progress.advance(len(batch))
        return candidates, np.concatenate(latents)

    @property
    def latent_size(self) -> int:
        """Values of a latent."""
        return self.task.model.fusion_config().flat_out

    def _batches(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[Sequence[Question], np.ndarray, np.ndarray]]:
        placement, size = self.serving.placement, self.serving.batch_size
        rows = placement.rows(size)
        for start in range(0, len(questions), size):
            batch = questions[start : start + size]
            filled = [*batch, *[batch[-1]] * (size - len(batch))]
            arrays = self._inputs([filled[row] for row in rows])
            inputs = placement.put((arrays["question_ids"], arrays["image"]))
            scores, latents = map(fetch, placement.call(self._run, self._state, *inputs))
            yield batch, scores[: len(batch)], latents[: len(batch)]


PLANNED_ANSWERS = 3_129  # of openvqa's and Prophet's answer vocabularies for VQA v2
PLANNED_WORDS = 20_572  # of openvqa's token_dict.json for VQA v2


VQAConfig = MCANConfig | MCANOpenVQAConfig | CaptionMCANConfig | PatchMCANConfig
_MODELS: dict[type, type[nnx.Module]] = {
    MCANConfig: MCAN,
    MCANOpenVQAConfig: MCANOpenVQA,
    CaptionMCANConfig: CaptionMCAN,
    PatchMCANConfig: PatchMCAN,
}


@dataclasses.dataclass(frozen=True)
class VQAObjective(OfLayers):
    """Binary cross-entropy of every answer, summed over answers.

    Both originals sum over the batch too (BCEWithLogitsLoss, reduction `sum`; Prophet
    stage1/pretrain.py, openvqa utils/train_engine.py). Here it is the mean over the batch, so that
    `train.accumulate` changes nothing; with the originals' clipping and eps divided by their batch
    size an update is theirs.
    """

    config: VQAConfig

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model."""
        return _MODELS[type(self.config)](self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a question of the batch of `data.batches.vqa`.

        `accuracy`: the mean target of the answers with the highest scores.
        """
        latent = model.latent(batch["question_ids"], batch["image"], dropout_key=dropout_key)
        logits, targets = model.answer_logits(latent), batch["targets"]  # [B, V]
        loss = optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()
        best = logits.argmax(axis=1, keepdims=True)
        return loss, {"accuracy": jnp.take_along_axis(targets, best, axis=1).mean()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedData(tasks.DataSection):
    """The section `data`."""

    # folds, fold: of the split only the part `fold` of `folds` (data.corpus.fold_of).
    folds: int = at_least(1, 1)
    fold: int = at_least(0, 0)
    more_splits: tuple[str, ...] = ()  # further splits, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswersSection:
    """The answers that the model chooses among."""

    file: str  # a whole vocabulary; "": made of the training questions' answers
    base: str  # a file or run whose answers come first; "": none
    min_questions: int = at_least(1)  # that must have an answer for it to be taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureFeaturesSection:
    """Features of pictures."""

    root: str  # folder of npz files, of `mmqa embed` or of `mmqa features`
    # Pictures without features that a run tolerates; None: see BrokenPictures.
    max_missing: int | None = None
    slots: int = at_least(1, 100)  # regions of a picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQABatches(BatchesSection):
    """The section `batches`; `lengths` of the questions, increasing, one static shape each."""

    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateVQA:
    """The section `validate`: questions of the split that the run does not train on."""

    split: str  # the questions', of those with answers
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    metric: Literal["accuracy", "recall@10"]  # decides on the best step (evaluation.vqa)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQA(tasks.Task):
    """Questions on pictures."""

    name: ClassVar[str] = "vqa"
    product: ClassVar[str] = "VQA model"
    program: ClassVar[str] = "candidates"
    limits: ClassVar[tuple[str, ...]] = ("batches.lengths",)

    data: FoldedData
    model: VQAModelSection = chosen_by(vqa_model)
    answers: AnswersSection
    batches: VQABatches
    inference: tasks.ServingSection
    features: PictureFeaturesSection | None = None  # of pictures, for grids and regions
    pictures: tasks.PicturesSection | None = None  # pixels, for patches
    # `factory` and its arguments (tasks.task), for patches.
    augment: Mapping[str, Any] = mapping(dict)
    validate: ValidateVQA | None = None

    def tokenizer_kind(self) -> tuple[str, str]:
        if self.model.image == "regions":
            return QuestionWords.kind, "`words`, or openvqa's token_dict.json"
        return super().tokenizer_kind()

    def vocabulary_size(self) -> int:
        return PLANNED_WORDS if self.tokenizer == "words" else super().vocabulary_size()

    def remat_keys(self) -> tuple[str, ...]:
        return self.model.remat_keys

    def _check(self, files: bool) -> None:
        model, image, lengths = self.model, self.model.image, self.batches.lengths
        vqa = model.config(tasks.ANY_VOCABULARY, answers=2)
        most = max(lengths, default=0) if image == "regions" else vqa.text.positions
        rising = bool(lengths) and sorted(set(lengths)) == list(lengths)
        if not rising or lengths[0] < 3 or lengths[-1] > most:
            raise UserError(
                f"config key batches.lengths={lengths}: increasing numbers from 3 to {most} "
                "were expected, tokens that the model reads; change them."
            )
        needs = {"features": image in ("grid", "regions"), "pictures": image == "patches"}
        for key, needed in needs.items():
            if (getattr(self, key) is not None) != needed:
                what = "needs it; add it" if needed else "does not read them; leave it out"
                raise UserError(f"config key {key}: model.image={image} {what}.")
        if self.augment and image != "patches":
            raise UserError(
                f"config key augment: changes pixels and questions together, but model.image="
                f"{image} reads none; leave it out."
            )
        if self.pictures is not None and self.pictures.size != vqa.vision.image_size:
            raise UserError(
                f"config key pictures.size={self.pictures.size}: the vision tower takes "
                f"{vqa.vision.image_size}; set pictures.size and model.vision.image_size to the "
                "same number."
            )
        if model.frozen_text and self.loop.optimizer.name != "adam":
            raise UserError(
                "config key model.frozen_text=True: weight decay would change the frozen encoder; "
                "set train.optimizer.name to adam."
            )
        width = minilm_l6().hidden
        if self.init != "scratch" and model.answer_embeddings and vqa.fusion.flat_out != width:
            raise UserError(
                f"config key model.fusion.flat_out={vqa.fusion.flat_out}: with "
                f"model.answer_embeddings the head starts as MiniLM's vectors of {width} values; "
                "set it to that, or leave the embeddings out."
            )
        folds, fold = self.data.folds, self.data.fold
        if fold >= folds:
            raise UserError(
                f"config key data.fold={fold}: 0 to data.folds - 1 = {folds - 1} is right."
            )

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> VQAObjective:
        """Makes the objective with as many answers as the published vocabularies have."""
        return VQAObjective(self.model.config(vocab_size, PLANNED_ANSWERS))

    def planned_inputs(self, rows: int) -> tuple[tasks.Struct, Any]:
        """Shapes of `question_ids` and `image` of the longest questions."""
        model, length = self.model, max(self.batches.lengths)
        if model.image == "caption":
            return tasks.ints(rows, length), tasks.bools(rows, length)
        if isinstance(model, GridModel):
            return tasks.ints(rows, length), tasks.floats(rows, model.grid**2, model.image_features)
        if self.pictures is not None:
            side, pictures = self.pictures.size, model.pictures
            pixels = tasks.Struct((rows, pictures, side, side, 3), jnp.uint8)
            return tasks.ints(rows, length), {
                "pixels": pixels,
                "shown": tasks.bools(rows, pictures),
            }
        assert self.features is not None
        return tasks.ints(rows, length), tasks.floats(
            rows, self.features.slots, model.region_features
        )

    def batch(self) -> dict[str, Any]:
        rows = self.batches.batch_size
        question_ids, image = self.planned_inputs(rows)
        return {
            "question_ids": question_ids,
            "image": image,
            "targets": tasks.floats(rows, PLANNED_ANSWERS),
        }

    def open_pictures(self, corpus: Corpus | None) -> PictureFeatures | QuestionPictures | None:
        """The pictures, or their features; None where captions stand for them.

        A model on patches reads the pictures of the questions' corpus.
        """
        if self.model.image == "caption":
            return None
        if self.pictures is not None:
            assert corpus is not None, "a model on patches reads the corpus's pictures"
            return QuestionPictures(self.pictures.open(corpus))
        return open_features(self.features, self.model)

    def inputs(
        self, tokenizer: Any, pictures: PictureFeatures | QuestionPictures | None, length: int
    ) -> VQAInputs:
        """Makes the model's inputs from questions, `length` tokens or words of each."""
        if isinstance(pictures, QuestionPictures):
            return PatchInputs(tokenizer, pictures, length, self.model.pictures)
        if pictures is None:
            return CaptionInputs(tokenizer, length)
        kind = GridInputs if self.model.image == "grid" else RegionInputs
        return kind(tokenizer, pictures, length)

    def trained_questions(self, corpus: Corpus) -> list[Question]:
        """Returns questions with answers, of the config's fold and of further splits."""
        return [q for q in corpus.questions() if q.answers and trains_on(self.data, q)]

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        del questions  # of the split alone
        questions = self.trained_questions(corpus)
        answers = make_answers(self.answers, questions)
        old = pretrained_answers(self, answers)
        config = self.model.config(tokenizer.vocab_size, old, len(answers) - old)
        pictures, lengths = self.open_pictures(corpus), self.batches.lengths
        inputs = [self.inputs(tokenizer, pictures, length) for length in lengths]
        batches = vqa_batches(inputs, questions, answers, self.feed(), lengths=lengths)
        loader = vqa_loader(self, tokenizer, answers)
        return tasks.Recipe(VQAObjective(config), batches, loader, pictures, answers)

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        """Accuracy of the best answers, and recall of the candidates."""
        assert self.validate is not None
        split = corpus.questions(self.validate.split)
        held_out = Corpus([], [q for q in split if not trains_on(self.data, q)])
        questions = tasks.scored_questions(self, held_out, has_answers, "answers")
        # The answers are the run's own, which it wrote before.
        answers = make_answers(self.answers, self.trained_questions(corpus))
        vqa = VQAModel(self, tokenizer, answers, model, corpus)

        def evaluate(model: nnx.Module) -> Mapping[str, float]:
            vqa.use(model)
            return score_candidates(questions, vqa.candidates(questions))

        return evaluate

    def cost(self) -> RowCost:
        """The cost of a question with its picture."""
        model, length = self.model, max(self.batches.lengths)
        config = model.config(tasks.ANY_VOCABULARY, answers=1)
        fusion = config.fusion
        if model.image == "grid":
            columns, features = model.grid**2, model.image_features
        elif model.image == "regions":
            assert self.features is not None
            columns, features = self.features.slots, model.region_features
        elif model.image == "patches":
            columns = model.pictures * config.vision.patches
            features = config.vision.patch_size**2 * 3
        else:
            columns, features = length, 0
        longest = max(columns, length)
        attended = layer_bytes(longest, fusion.hidden, fusion.heads, fusion.mlp, fusion.dtype)
        return RowCost("questions", 64, 128, attended + 2 * 4.0 * columns * features)

    def in_use(self) -> tasks.InUse:
        objective = self.objective(self.vocabulary_size())

        return tasks.InUse(self.cost(), make_answer_scores, objective.outline, self.planned_inputs)


def load_vqa_model(
    folder: str | Path, corpus: Corpus | None = None, options: tasks.Options | None = None
) -> VQAModel:
    """The trained MCAN of a VQA run.

    Args:
      corpus: of the questions; only a model on patches needs it.
      options: of the section `inference`, in place of the run's own.
    """
    task, tokenizer = tasks.read_run(folder, (VQA,), options)
    answers = read_vocabulary(folder)
    heads = _answer_heads(read_record(folder).config)
    if heads != len(answers):
        raise UserError(
            f"{Path(folder) / ANSWERS}: {len(answers)} answers, but the weights beside it have "
            f"{heads}; copy both from the same run."
        )
    model = load_converted(folder, mesh=task.serving_mesh())
    return VQAModel(task, tokenizer, answers, model, corpus)


def load_prophets_mcan(
    folder: str | Path, task: VQA, options: tasks.Options | None = None
) -> VQAModel:
    """Opens a checkpoint of Prophet's authors that `mmqa convert` wrote.

    The task, on grids, says what weights do not tell: `tokenizer`, `answers.file`, `features`,
    `batches.lengths`, `inference.batch_size`. Its sizes give way to the weights'.
    """
    record = read_record(folder)
    if record.architecture.name != "mcan" or not isinstance(task.model, GridModel):
        raise UserError(
            f"--model {folder}: a converted `mcan` and a config of model.image=grid belong "
            f"together, found {record.architecture.name!r} and {task.model.image!r}; name others."
        )
    if not task.answers.file:
        raise UserError(
            "config key answers.file: is empty, and a converted checkpoint has no answers of its "
            "own; give the list that it was trained with."
        )
    answers, tokenizer = read_vocabulary(task.answers.file), open_tokenizer(task.tokenizer)
    sizes = record.config
    for key, named, count, expected in (
        ("answers.file", task.answers.file, len(answers), _answer_heads(sizes)),
        ("tokenizer", task.tokenizer, tokenizer.vocab_size, sizes.text.vocab_size),
    ):
        if count != expected:
            raise UserError(
                f"config key {key}={named}: has {count:,} entries, the weights in {folder} have "
                f"{expected:,}; give the file that they were trained with."
            )
    model = dataclasses.replace(
        task.model,
        grid=sizes.grid,
        image_features=sizes.image_features,
        fusion={**task.model.fusion, "flat_out": sizes.fusion.flat_out},
    )
    task = dataclasses.replace(tasks.with_options(task, options), model=model)
    weights = load_converted(folder, mesh=task.serving_mesh())
    return VQAModel(task, tokenizer, answers, weights)


def _answer_heads(sizes: Any) -> int:
    """Returns a VQA model's answers, with those that finetuning appended."""
    return sizes.answers + getattr(sizes, "new_answers", 0)


# What a VQA run starts from: its answer vocabulary, and weights.
#
# `init` is `scratch`; `minilm` or the folder of a BERT (the question encoder alone); GloVe's text
# file (openvqa's words); or the workdir of another VQA run, or a converted MCAN, whose answers
# the run's may extend (Prophet stage1/model/mcan_for_finetune.py).


def make_answers(section: Any, questions: Sequence[Question]) -> AnswerVocabulary:
    """The answers of a section `answers` for these training questions."""
    if section.file:
        return read_vocabulary(section.file)
    base = read_vocabulary(section.base).answers if section.base else ()
    return make_vocabulary(questions, section.min_questions, base)


def keep_vocabulary(answers: AnswerVocabulary, folder: Path) -> None:
    """Writes answers.json of a run; of a run that resumes, compares it."""
    file = folder / FILE
    if file.exists() and read_vocabulary(file).answers != answers.answers:
        raise UserError(
            f"{file}: this run began with other answers than the config and data give now; put "
            "the data back, or name another --workdir."
        )
    if jax.process_index() == 0 and not file.exists():
        answers.save(file)
    distributed.barrier("answers")


def pretrained_answers(task: Any, answers: AnswerVocabulary) -> int:
    """Counts the answers of the model's first head: those of the weights in `init`."""
    if not is_weights_folder(task.init):
        return len(answers)
    record = read_record(task.init)
    wanted = task.model.kind
    if record.architecture.name == "bert":
        return len(answers)
    place = f"config key init={task.init}"
    if record.architecture.name != wanted:
        raise UserError(
            f"{place}: holds a model of kind {record.architecture.name!r}, {wanted} was expected "
            f"for model.image={task.model.image}; name another."
        )
    old, new = record.config.answers, getattr(record.config, "new_answers", 0)
    known = Path(task.init) / FILE
    theirs = read_vocabulary(known).answers if known.exists() else answers.answers[: old + new]
    if len(theirs) != old + new or answers.answers[: old + new] != theirs:
        raise UserError(
            f"{place}: its head has {old + new} answers, and the first {old + new} of the run's "
            f"{len(answers)} are not the same; set answers.base to the vocabulary that it was "
            "trained with."
        )
    if wanted != "mcan" and len(answers) != old:
        raise UserError(
            f"{place}: its head has {old} answers, the run has {len(answers)}; only "
            "model.image=grid can be extended, so set answers.file to its vocabulary."
        )
    return old


def vqa_loader(task: Any, tokenizer: Any, answers: AnswerVocabulary) -> Loader | None:
    """Loads what `init` names; see this file's beginning."""
    if task.init == "scratch":
        return None

    def load(model: Any) -> None:
        if is_weights_folder(task.init) and read_record(task.init).architecture.name != "bert":
            _extend(model, load_converted(task.init, param_dtype="float32"), task.init)
        elif isinstance(tokenizer, QuestionWords):
            vectors = read_glove(task.init, tokenizer)
            if vectors.shape != model.words.table.shape:
                raise UserError(
                    f"config key init={task.init}: vectors of {vectors.shape[1]} values, the "
                    f"model has {model.words.table.shape[1]}; set model.word_features."
                )
            model.words.table.set_value(vectors.astype(model.words.table.dtype))
        else:
            layers = model.bert.config.layers
            rows = bert_rows(task, tokenizer)
            fill_bert(model.bert, bert_folder(task), num_layers=layers, rows=rows)
        if task.model.answer_embeddings:
            _start_head(model.head, answers)

    return load


def _extend(model: Any, pretrained: nnx.Module, init: str) -> None:
    """Takes all parameters; answers that are new start as in mcan_for_finetune.py.

    Their weights are 0, their biases the mean of the others'.
    """
    theirs = flatten_named(nnx.state(pretrained))
    ours = flatten_named(nnx.state(model))
    differing = [
        f"{name} {list(theirs[name].shape)} (config: {list(leaf.shape)})"
        for name, leaf in ours.items()
        if name in theirs and theirs[name].shape != leaf.shape
    ]
    missing = [n for n in ours if n not in theirs and not n.startswith("new_head/")]
    if differing or missing:
        raise UserError(
            f"config key init={init}: its model differs in {', '.join((differing + missing)[:3])}; "
            "set the section model to its sizes."
        )
    nnx.update(model, nnx.state(pretrained))
    if getattr(model, "new_head", None) is not None and "new_head/kernel" not in theirs:
        kernel, bias = model.new_head.kernel, model.new_head.bias
        kernel.set_value(np.zeros(kernel.shape, kernel.dtype))
        bias.set_value(np.full(bias.shape, model.head.bias[...].mean(), bias.dtype))


def _start_head(head: Any, answers: AnswerVocabulary) -> None:
    """Starts each answer's weights as its MiniLM embedding (ours), and all biases low.

    So answers of few questions are scored by those of like meaning.
    """
    from mmqa_jax.retrieval.text_encoder import load_minilm_embedder

    vectors = load_minilm_embedder().embed_questions(list(answers.answers))  # [V, 384]
    # The latent has unit variance: its product with a vector of length 1 too.
    head.kernel.set_value(vectors.T.astype(head.kernel.dtype))
    head.bias.set_value(np.full(head.bias.shape, -np.log(len(answers)), head.bias.dtype))
