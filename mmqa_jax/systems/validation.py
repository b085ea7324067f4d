"""What a training run is validated by: systems' settings, or candidates, with current weights.

Each validation holds one inference part, built before the first step, and the few sources that it
reads. The part compiles at the first evaluation; after that only its parameters change. Parameters
stay on the run's mesh, over which batches are split: each process reads and computes its own rows,
and all gather the results (core.mesh.placement_of). A cached reranker's are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.splits import evenly, trains_on
from mmqa_jax.evaluation.candidates import score_candidates
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.source_selection import (
    SELECTIONS,
    tune_threshold,
)
from mmqa_jax.evaluation.vqa import has_answers
from mmqa_jax.evaluation.webqa import Normalizer, has_keywords, score_answers
from mmqa_jax.inference.from_config import make_pictures
from mmqa_jax.inference.loading import make_embedder
from mmqa_jax.inference.reader import Reader
from mmqa_jax.inference.vqa_model import VQAModel
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.exact import ExactIndex
from mmqa_jax.retrieval.modality import of_modality
from mmqa_jax.systems import webqa
from mmqa_jax.systems.extensions import similarity
from mmqa_jax.systems.extensions.example_judging import ExampleRetrievalValidation
from mmqa_jax.systems.extensions.trainable_rmr import LanguageModelValidation
from mmqa_jax.systems.parts import make_reranker
from mmqa_jax.training.pretrained_vqa import make_answers
from mmqa_jax.training.validation import (
    RECALL_AT,
    SECTIONS,
    ValidateAnswers,
    ValidateRetrieval,
    ValidateSelection,
    ValidateVQA,
    Validation,
)

_PAPERS_THRESHOLD = 0.2


def make_validation(
    config: ConfigDict, corpus: Corpus, tokenizer: Any, model: nnx.Module
) -> Validation:
    """The validation that the section `validate` of a training config describes.

    Args:
      model: of the run, possibly abstract (nnx.eval_shape).

    Raises:
      UserError: no questions of that split that can be scored.
    """
    makers = {
        "contrastive": _RetrievalValidation,
        "rerank": _SelectionValidation,
        "answer": _AnswerValidation,
        "vqa": _VQAValidation,
        "example_retrieval": ExampleRetrievalValidation,
        "language_model": LanguageModelValidation,
    }
    section = SECTIONS[config.task](**config.validate.to_dict())
    evaluate = makers[config.task](section, config, corpus, tokenizer, model)
    return Validation(evaluate, section.metric)


class _RetrievalValidation:
    """recall@k and MRR of a dual encoder over a fixed pool of sources."""

    def __init__(
        self,
        section: ValidateRetrieval,
        config: ConfigDict,
        corpus: Corpus,
        tokenizer: Any,
        model: nnx.Module,
    ):
        self._questions = _questions(section, config, corpus, _has_gold, "gold sources")
        everything = list(range(len(corpus)))
        sampled = evenly(everything, section.sources)
        own = [row for question in self._questions for row in corpus.candidates(question)]
        self._pool = _part_of(corpus, [*own, *sampled])
        self._pictures = make_pictures(config, self._pool)
        self._embedder = make_embedder(config, tokenizer, model)

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self._embedder.use(model)
        rows = range(len(self._pool))
        vectors = self._embedder.embed_rows(self._pool, self._pictures, rows)
        index = ExactIndex(Embeddings(vectors, "", self._pool.fingerprint))
        retriever = DenseRetriever(self._pool, self._embedder, index, self._pictures)
        depth = max(RECALL_AT)
        found = webqa.retrieve_full_scale(self._questions, retriever, cited=depth, top_k=depth)
        gold = [question.positives for question in self._questions]
        scores = score_rankings(gold, [r.sources for r in found], RECALL_AT).scores
        return {name: x for name, x in scores.items() if name.startswith(("recall@", "mrr"))}


class _SelectionValidation:
    """Source F1 of a source selector among each question's own candidates."""

    def __init__(
        self,
        section: ValidateSelection,
        config: ConfigDict,
        corpus: Corpus,
        tokenizer: Any,
        model: nnx.Module,
    ):
        self._section = section
        self._questions = _questions(section, config, corpus, _has_gold, "gold sources")
        own = [row for question in self._questions for row in corpus.candidates(question)]
        self._pool = _part_of(corpus, own)
        self._reranker = make_reranker(config, self._pool, tokenizer, model)

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self._reranker.use(model)
        evidence = similarity.read_restricted(
            self._questions, self._pool, self._reranker, self._section.cap
        )
        relevance = similarity.combine(evidence, 0.0)
        selection = SELECTIONS[self._section.select]
        threshold, sweep = tune_threshold(self._questions, relevance, selection)
        return {
            "source_f1": sweep[threshold],
            f"source_f1@{_PAPERS_THRESHOLD}": sweep[_PAPERS_THRESHOLD],
            "threshold": threshold,
        }


class _AnswerValidation:
    """WebQA's accuracy of a reader's answers from gold sources, or from none."""

    def __init__(
        self,
        section: ValidateAnswers,
        config: ConfigDict,
        corpus: Corpus,
        tokenizer: Any,
        model: nnx.Module,
    ):
        self._setting = {
            "oracle": webqa.answer_oracle,
            "none": webqa.answer_question_only,
        }[section.sources]
        self._questions = _questions(section, config, corpus, has_keywords, "keywords")
        if section.sources == "oracle":
            webqa.check_gold(self._questions)
        own = [row for question in self._questions for row in corpus.positive_rows(question)]
        if section.num_beams is not None:
            config = config.copy_and_resolve_references()
            config.inference.num_beams = section.num_beams
        self._reader = Reader(config, _part_of(corpus, own), tokenizer, model)
        self._normalizer = Normalizer("none")

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self._reader.use(model)
        predictions = self._setting(self._questions, self._reader)
        return score_answers(self._questions, predictions, lemmatizer=self._normalizer).scores


class _VQAValidation:
    """Accuracy of a VQA model's best answers, and recall of its candidates."""

    def __init__(
        self,
        section: ValidateVQA,
        config: ConfigDict,
        corpus: Corpus,
        tokenizer: Any,
        model: nnx.Module,
    ):
        held_out = Corpus(
            [], [q for q in corpus.questions(section.split) if not trains_on(config.data, q)]
        )
        self._questions = _questions(section, config, held_out, has_answers, "answers")
        # The answers are the run's own, which it wrote before.
        own = [q for q in corpus.questions() if q.answers and trains_on(config.data, q)]
        answers = make_answers(config.answers, own)
        self._model = VQAModel(config, tokenizer, answers, model, corpus)

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self._model.use(model)
        found = self._model.candidates(self._questions)
        return score_candidates(self._questions, found)


def _questions(
    section: Any,
    config: ConfigDict,
    corpus: Corpus,
    counts: Callable[[Question], bool],
    needed: str,
) -> list[Question]:
    """The section's questions that can be scored, of the modality that the model is for."""
    questions = [question for question in corpus.questions(section.split) if counts(question)]
    if not questions:
        raise UserError(
            f"config key validate.split={section.split}: {config.data.dir} holds no such questions "
            f"with {needed}; choose another split, or set train.evaluate_every to 0."
        )
    questions = of_modality(questions, corpus, config.data.get("modality"))
    return evenly(questions, section.questions)


def _has_gold(question: Question) -> bool:
    return bool(question.positives)


def _part_of(corpus: Corpus, rows: Iterable[int]) -> Corpus:
    """Some sources as a corpus of their own, in the order of the rows."""
    sources = [corpus.sources[row] for row in sorted(set(rows))]
    return Corpus(sources, read_picture=corpus.read_picture)
