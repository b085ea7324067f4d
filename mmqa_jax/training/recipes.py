"""Builds the parts of a training run from its config: one recipe per task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from mmqa_jax.core import distributed
from mmqa_jax.core.config import optional
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import local_rows, make_mesh
from mmqa_jax.data.answer_vocabulary import AnswerVocabulary
from mmqa_jax.data.batches.answer import answer_batches
from mmqa_jax.data.batches.contrastive import contrastive_batches
from mmqa_jax.data.batches.example_retrieval import example_retrieval_batches
from mmqa_jax.data.batches.feed import FeedConfig
from mmqa_jax.data.batches.language_model import RowSize, language_model_batches
from mmqa_jax.data.batches.modality import modality_batches
from mmqa_jax.data.batches.reading import Batches
from mmqa_jax.data.batches.rerank import rerank_batches
from mmqa_jax.data.batches.vqa import vqa_batches
from mmqa_jax.data.clip_tokenizer import ClipTokenizer, open_tokenizer
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.example_scores import judged_questions
from mmqa_jax.data.packing import MaskingConfig
from mmqa_jax.data.picture_features import PictureFeatures
from mmqa_jax.data.question_pictures import QuestionPictures
from mmqa_jax.data.question_words import QuestionWords, make_words
from mmqa_jax.data.schema import Question
from mmqa_jax.data.source_reader import SourceReader
from mmqa_jax.data.splits import trains_on
from mmqa_jax.data.tokenizers import (
    WordPiece,
    minilm_tokenizer,
    restrict_vocabulary,
    train_wordpiece,
)
from mmqa_jax.inference.from_config import (
    make_packer,
    make_source_reader,
    make_vqa_features,
    make_vqa_inputs,
)
from mmqa_jax.models.vlp import VLPInputs
from mmqa_jax.prompting.shots import TEXTS
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.prompting.training_examples import TrainingExamples
from mmqa_jax.retrieval.modality import MODALITIES, labeled_questions, of_modality
from mmqa_jax.retrieval.rankings import with_mined_negatives
from mmqa_jax.training import tasks
from mmqa_jax.training.augmentation import make_augmentation
from mmqa_jax.training.base_llm import base_fingerprint, base_loader, lora_of, make_llama
from mmqa_jax.training.language_model import LanguageModelTask
from mmqa_jax.training.pretrained import (
    Loader,
    classifier_loader,
    dual_encoder_loader,
    vlp_loader,
)
from mmqa_jax.training.pretrained_vqa import make_answers, pretrained_answers, vqa_loader
from mmqa_jax.training.state import Task

Tokenizer = WordPiece | ClipTokenizer | QuestionWords | TextTokenizer

# (config, corpus, questions, tokenizer, row size) -> what a language model is trained on.
MakeExamples = Callable[
    [ConfigDict, Corpus, list[Question], TextTokenizer, RowSize], TrainingExamples
]
DUAL_ENCODERS = ("contrastive", "example_retrieval")  # tasks that train one
# The keys of the section `batches` that go to FeedConfig.
FEED_SPEC = {
    "batch_size": int,
    "slack": optional(int),
    "threads": optional(int, minimum=0),
    "workers": optional(int, minimum=0),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What `training.loop.train` needs of a task.

    Attributes:
      task: model and loss.
      batches: iterates over its batches.
      load_pretrained: puts pretrained weights into a freshly initialized model, in place; None
        to train from scratch.
      title: for the progress line.
      reader: of the sources or of pictures' features; it counts those that could not be read.
        None: none are read.
      answers: the answers that the model chooses among, if it does.
      finish: as of training.loop.train.
      metadata: further JSON values for model.json; a run resumes with equal ones alone.
    """

    task: Task
    batches: Batches
    load_pretrained: Loader | None
    title: str
    reader: SourceReader | PictureFeatures | QuestionPictures | None
    answers: AnswerVocabulary | None = None
    finish: Callable[[Any], Any] | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def make_recipe(
    config: ConfigDict,
    corpus: Corpus,
    tokenizer: Tokenizer,
    make_examples: MakeExamples | None = None,
) -> Recipe:
    """The recipe of a config that `check_config` accepts.

    Args:
      make_examples: systems.extensions.trainable_rmr.make_examples; a language model needs it.

    Raises:
      UserError: no questions, or a tokenizer or config section that does not fit.
    """
    recipes = {
        "contrastive": _contrastive,
        "rerank": _rerank,
        "answer": _answer,
        "modality": _modality,
        "vqa": _vqa,
        "example_retrieval": _example_retrieval,
        "language_model": functools.partial(_language_model, make_examples),
    }
    kind: type = WordPiece
    wanted = "a WordPiece tokenizer"
    if config.task in DUAL_ENCODERS and config.model.get("clip"):
        kind, wanted = ClipTokenizer, "the folder of a converted CLIP"
    elif config.task == "vqa" and config.model.image == "regions":
        kind, wanted = QuestionWords, "`words`, or openvqa's token_dict.json"
    elif config.task == "language_model":
        kind, wanted = TextTokenizer, "that of a language model"
    if not isinstance(tokenizer, kind):
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


def make_tokenizer(name: str, corpus: Corpus, folder: Path) -> Tokenizer:
    """The run's tokenizer, saved as tokenizer.json in its folder.

    Args:
      name: `minilm`; `minilm:corpus`, MiniLM's with only the tokens that the corpus and the
        training questions need, the answers' first; `corpus:N`, a WordPiece of N tokens trained
        on them; `words`, the words of all questions (openvqa); the path of a tokenizer.json; or
        the folder of a converted CLIP.
      corpus: what it is trained on.
      folder: of the run; a tokenizer that is already there is used.
    """
    kept = folder / "tokenizer.json"
    if jax.process_index() == 0 and not kept.exists():
        _new_tokenizer(name, corpus).save(kept)
    distributed.barrier("tokenizer")
    return open_tokenizer(kept)


def _new_tokenizer(name: str, corpus: Corpus) -> Tokenizer:
    if name == "minilm":
        return minilm_tokenizer()
    if name == "words":
        return make_words(question.question for question in corpus.questions())
    if name == "minilm:corpus":
        texts, answers = _all_texts(corpus), _answers(corpus)
        return restrict_vocabulary(minilm_tokenizer(), texts, first=answers)
    if name.startswith("corpus:"):
        size = name.removeprefix("corpus:")
        if not size.isdecimal():
            raise UserError(f"config key tokenizer={name}: write corpus:N with a number of tokens.")
        return train_wordpiece(_all_texts(corpus), int(size), lowercase=True)
    return open_tokenizer(name)


def _all_texts(corpus: Corpus) -> list[str]:
    texts = [f"{source.title} {source.text}" for source in corpus.sources]
    for question in corpus.questions("train"):
        texts += [question.question, *question.answers]
    return texts


def _answers(corpus: Corpus) -> list[str]:
    return [answer for question in corpus.questions("train") for answer in question.answers]


def _contrastive(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    reader = make_source_reader(config, corpus, tokenizer)
    batches = contrastive_batches(reader, questions, _feed(config), **_options(config))
    task = tasks.contrastive(config, tokenizer.vocab_size, make_mesh(config.mesh.to_dict()))
    loader = dual_encoder_loader(config, tokenizer)
    return Recipe(task, batches, loader, "Training the retriever", reader)


def _rerank(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    reader = make_source_reader(config, corpus, tokenizer)
    batches = rerank_batches(
        reader,
        questions,
        make_packer(config, tokenizer),
        _feed(config, inputs=VLPInputs),
        **_options(config),
    )
    task = tasks.rerank(config, tokenizer.vocab_size)
    loader = vlp_loader(config, tokenizer)
    return Recipe(task, batches, loader, "Training the source selector", reader)


def _answer(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    reader = make_source_reader(config, corpus, tokenizer)
    batches = answer_batches(
        reader,
        questions,
        make_packer(config, tokenizer),
        MaskingConfig(**config.masking.to_dict()),
        _feed(config, inputs=VLPInputs),
        route_by_category=config.data.get("route_by_category", False),
        **_options(config),
    )
    task = tasks.answer(config, tokenizer.vocab_size)
    loader = vlp_loader(config, tokenizer)
    return Recipe(task, batches, loader, "Training the reader", reader)


def _modality(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    texts, modalities = labeled_questions(questions, corpus)
    labels = [MODALITIES.index(modality) for modality in modalities]
    batches = modality_batches(tokenizer, texts, labels, _feed(config), **_options(config))
    loader = classifier_loader(config, tokenizer)
    task = tasks.modality(config, tokenizer.vocab_size)
    return Recipe(task, batches, loader, "Training the modality classifier", None)


def _vqa(config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
    del questions  # those of the config's fold and of further splits
    own = [q for q in corpus.questions() if q.answers and trains_on(config.data, q)]
    answers = make_answers(config.answers, own)
    old = pretrained_answers(config, answers)
    task = tasks.vqa(config, tokenizer.vocab_size, old, len(answers) - old)
    reader = make_vqa_features(config, corpus)
    lengths = config.batches.lengths
    inputs = [make_vqa_inputs(config, tokenizer, reader, length) for length in lengths]
    batches = vqa_batches(inputs, own, answers, _feed(config), **_options(config))
    loader = vqa_loader(config, tokenizer, answers)
    return Recipe(task, batches, loader, "Training the VQA model", reader, answers)


def _example_retrieval(
    config: ConfigDict, corpus: Corpus, questions: list[Question], tokenizer: WordPiece
) -> Recipe:
    rows = judged_questions(config.data.scores, corpus, config.data.split)
    batches = example_retrieval_batches(
        tokenizer,
        {question.id: question for question in corpus.questions()},
        rows,
        TEXTS[config.data.text],
        _feed(config),
        **_options(config),
    )
    task = tasks.example_retrieval(config, tokenizer.vocab_size)
    loader = dual_encoder_loader(config, tokenizer)
    return Recipe(task, batches, loader, "Training the retriever of examples", None)


def _language_model(
    make_examples: MakeExamples | None,
    config: ConfigDict,
    corpus: Corpus,
    questions: list[Question],
    tokenizer: TextTokenizer,
) -> Recipe:
    assert make_examples is not None, "this caller cannot render examples"
    model, lora = make_llama(config, tokenizer), lora_of(config)
    size = RowSize(config.batches.length, config.batches.targets)
    examples = make_examples(config, corpus, questions, tokenizer, size)
    batches = language_model_batches(
        examples.versions, examples.shares, _feed(config), **_options(config)
    )
    task = LanguageModelTask(model, lora)
    return Recipe(
        task,
        batches,
        base_loader(config),
        "Fine-tuning the language model",
        None,
        finish=task.finish,
        metadata={
            "base": base_fingerprint(config),
            "token_ids": {"eos_token_id": list(tokenizer.end_ids)},
        },
    )


def _feed(config: ConfigDict, inputs: Callable[..., Any] | None = None) -> FeedConfig:
    batch_size = config.batches.batch_size
    return FeedConfig(
        batch_size=batch_size,
        seed=config.seed,
        augment=make_augmentation(config.get("augment", {})),
        inputs=inputs,
        slack=config.batches.get("slack", 0),
        rows=local_rows(make_mesh(config.mesh.to_dict()), batch_size),
        threads=config.batches.get("threads", 2),
        workers=config.batches.get("workers", 0),
    )


def _options(config: ConfigDict) -> dict[str, Any]:
    """The keys of the section `batches` that go to the task's own pipeline."""
    return {key: value for key, value in config.batches.items() if key not in FEED_SPEC}
