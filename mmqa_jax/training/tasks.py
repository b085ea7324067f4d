"""Model and loss of every task as its config describes them: no data, only a vocabulary's size."""

from __future__ import annotations

from jax.sharding import Mesh
from ml_collections import ConfigDict

from mmqa_jax.inference.from_config import make_packing, make_vlp_config, two_sides
from mmqa_jax.models.presets import (
    dual_encoder_from_config,
    text_classifier_from_config,
    vqa_from_config,
)
from mmqa_jax.retrieval.modality import MODALITIES
from mmqa_jax.training.answer import AnswerTask
from mmqa_jax.training.contrastive import ContrastiveTask
from mmqa_jax.training.modality import ModalityTask
from mmqa_jax.training.rerank import RerankTask
from mmqa_jax.training.retriever_distillation import DistillationTask
from mmqa_jax.training.vqa import VQATask


def contrastive(config: ConfigDict, vocab_size: int, mesh: Mesh | None) -> ContrastiveTask:
    """`mesh`: over which the loss is split."""
    model = dual_encoder_from_config(config.model, vocab_size)
    return ContrastiveTask(model, mesh, config.get("tower_parts", 1))


def rerank(config: ConfigDict, vocab_size: int) -> RerankTask:
    """Source selection by VLP, or by a model that reads question and source apart."""
    model = make_vlp_config(config, vocab_size)
    return RerankTask(model, two_sides(config.model, make_packing(config), model))


def answer(config: ConfigDict, vocab_size: int) -> AnswerTask:
    """Answers by VLP."""
    return AnswerTask(make_vlp_config(config, vocab_size), config.get("questions_per_mean"))


def modality(config: ConfigDict, vocab_size: int) -> ModalityTask:
    """The modality that a question needs."""
    model = text_classifier_from_config(config.model, vocab_size, len(MODALITIES))
    return ModalityTask(model, config.model.frozen)


def vqa(config: ConfigDict, vocab_size: int, answers: int, new_answers: int = 0) -> VQATask:
    """`answers`, `new_answers`: as of models.presets.vqa_from_config."""
    return VQATask(vqa_from_config(config.model, vocab_size, answers, new_answers))


def example_retrieval(config: ConfigDict, vocab_size: int) -> DistillationTask:
    """The retriever of examples."""
    model = dual_encoder_from_config(config.model, vocab_size)
    return DistillationTask(model, config.target_temperature)
