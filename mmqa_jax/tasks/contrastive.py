"""The dual encoder (WebQA 6.1, CLIP retrieval): CLIP's or SigLIP's loss, mined hard negatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.serving import RowCost
from mmqa_jax.core.typed import at_least, mapping
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.retriever import ContrastSampling, contrastive_batches
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus, evenly
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.models.encoders.dual_encoder import (
    DualEncoder,
    DualEncoderConfig,
    DualEncoderModel,
    with_logit_bias,
)
from mmqa_jax.models.two_towers.config import SiglipTextConfig, TextConfig
from mmqa_jax.retrieval.embedder import Embedder, dual_encoder_cost, make_encode_source
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.rankings import find_candidates
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.contrastive_losses import ContrastiveObjective, SigmoidObjective
from mmqa_jax.tasks.initial_weights import check_two_towers_init, dual_encoder_loader

GOLD_SOURCES = 8  # of one question, in a planned batch; WebQA's questions have fewer
RECALL_AT = (1, 2, 5, 10, 20, 100)
RetrievalMetric = Literal[
    "recall@1", "recall@2", "recall@5", "recall@10", "recall@20", "recall@100", "mrr"
]


# What the tasks on dual encoders have in common: contrastive and example_retrieval.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderServing(tasks.ServingSection):
    """The encoder in use; `buckets`: lengths in tokens, increasing."""

    buckets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualEncoderTask(tasks.Task):
    """Texts and pictures, of sources and questions, in one space of embeddings."""

    model: DualEncoderModel
    pictures: tasks.PicturesSection
    inference: EncoderServing

    def lengths(self) -> Mapping[str, int]:
        """Config key -> the longest text in tokens."""
        return {"inference.buckets": max(self.inference.buckets, default=0)}

    def config(self, vocab_size: int) -> DualEncoderConfig:
        """The model's sizes; `vocab_size`: of the tokenizer."""
        return self.model.config(vocab_size)

    def tokenizer_kind(self) -> tuple[str, str]:
        if self.model.clip:
            return "CLIP", "the folder of a converted CLIP"
        if self.model.siglip:
            return "SigLIP", "the folder of a converted SigLIP"
        return super().tokenizer_kind()

    def _check(self, files: bool) -> None:
        dual_encoder = self.config(tasks.ANY_VOCABULARY)
        if self.model.published and files:
            check_two_towers_init(self, dual_encoder)
        text = dual_encoder.text
        if isinstance(text, SiglipTextConfig):
            self._check_padded(text.length)
        else:
            self._check_buckets()
            self._check_lengths(text.context if isinstance(text, TextConfig) else text.positions)
        side = dual_encoder.vision.image_size
        if self.pictures.size != side:
            raise UserError(
                f"config key pictures.size={self.pictures.size}: the vision tower takes {side}; "
                "set pictures.size and model.vision.image_size to the same number."
            )

    def _check_padded(self, length: int) -> None:
        """SigLIP sees the padding of its texts."""
        for key, tokens in (
            *self.lengths().items(),
            ("inference.buckets", *self.inference.buckets[:1]),
        ):
            if tokens != length:
                raise UserError(
                    f"config key {key}: {tokens} tokens, but this text tower reads texts padded to "
                    f"{length}; set it to that alone."
                )

    def _check_buckets(self) -> None:
        """Checks buckets as the embedder needs them: it would refuse them after the training."""
        buckets = self.inference.buckets
        if not buckets or buckets[0] < 3 or sorted(set(buckets)) != list(buckets):
            raise UserError(
                f"config key inference.buckets={buckets}: increasing numbers of tokens from 3 "
                "were expected, such as (16, 32, 64); change them."
            )

    def _check_lengths(self, most: int) -> None:
        for key, length in self.lengths().items():
            if length > most:
                raise UserError(
                    f"config key {key}: {length} tokens, but the text tower reads at most {most}; "
                    "use fewer."
                )

    def planned_config(self) -> DualEncoderConfig:
        """The model's sizes with `vocabulary_size`."""
        return self.config(self.vocabulary_size())

    def planned_model(self) -> DualEncoder:
        """The model with `vocabulary_size`, of whose weights the shapes are meant."""
        return DualEncoder(self.planned_config(), rngs=nnx.Rngs())

    def cost(self) -> RowCost:
        """The cost of a source, or a text."""
        return dual_encoder_cost(self.config(tasks.ANY_VOCABULARY), max(self.inference.buckets))

    def embedder(self, tokenizer: Tokenizer, model: DualEncoder) -> Embedder:
        """The embedder of a run's model, which may be abstract (see Embedder.use)."""
        graphdef, state = nnx.split(model)
        return Embedder(
            graphdef,
            state,
            tokenizer,
            image_size=self.pictures.size,
            buckets=self.inference.buckets,
            batch_size=self.inference.batch_size,
            cost=self.cost(),
            text_of=self.data.text_of,
        )

    def open_pictures(self, corpus: Corpus) -> PictureStore:
        """The corpus's pictures as the model takes them."""
        return self.pictures.open(corpus)

    def in_one_shape(self) -> DualEncoderTask:
        """The task with each function traced and compiled once: see VLPTask.in_one_shape.

        Texts are encoded one by one.
        """
        serving = dataclasses.replace(
            self.inference, buckets=(max(self.inference.buckets),), batch_size=1
        )
        model = dataclasses.replace(self.model, changes={**self.model.changes, "unroll": 1})
        return dataclasses.replace(self, model=model, inference=serving)

    def open(
        self, folder: str | Path, tokenizer: Tokenizer, *, one_shape: bool = False
    ) -> Embedder:
        """The trained embedder of the run in a folder."""
        config = self.config(tokenizer.vocab_size)
        mesh = None if one_shape else self.serving_mesh()
        model = self.load(folder, DualEncoder, config, mesh)
        return self.embedder(tokenizer, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveBatches(BatchesSection, ContrastSampling):
    """The section `batches`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateRetrieval:
    """The section `validate`."""

    split: str  # the questions', of those with gold sources
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    # Further sources, evenly over the corpus, beside the questions' own gold sources and negatives;
    # 0: the whole collection.
    sources: int = at_least(0)
    metric: RetrievalMetric  # decides on the best step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(DualEncoderTask):
    """Questions against their gold sources, snippets and captioned pictures."""

    name: ClassVar[str] = "contrastive"
    product: ClassVar[str] = "retriever"
    program: ClassVar[str] = "embed"
    limits: ClassVar[tuple[str, ...]] = ("batches.query_length", "batches.source_lengths")

    data: tasks.MixedData
    batches: ContrastiveBatches
    # `softmax`, CLIP's over all sources of a batch, or `sigmoid`, SigLIP's.
    loss: Literal["softmax", "sigmoid"] = "softmax"
    tower_parts: int = at_least(1, 1)  # see ContrastiveObjective
    augment: Mapping[str, Any] = mapping(dict)  # `factory` and its arguments (tasks.task)
    validate: ValidateRetrieval | None = None

    def lengths(self) -> Mapping[str, int]:
        return {
            **super().lengths(),
            "batches.query_length": self.batches.query_length,
            "batches.source_lengths": max(self.batches.source_lengths, default=0),
        }

    def _check(self, files: bool) -> None:
        super()._check(files)
        if min(self.batches.source_lengths, default=0) < 3:
            raise UserError(
                f"config key batches.source_lengths={self.batches.source_lengths}: numbers of "
                "tokens from 3 were expected, such as (96,); change them."
            )
        accumulate = self.loop.accumulate
        if accumulate > 1:
            raise UserError(
                f"config key train.accumulate={accumulate}: the contrastive loss needs its whole "
                f"batch; leave it out and set tower_parts to {accumulate}."
            )
        if self.tower_parts > 1 and self.loop.offload == "parameters":
            raise UserError(  # JAX adds up no gradients on the host in a loop over parts
                "config key train.offload=parameters: layers do not come from the host for each of "
                f"tower_parts={self.tower_parts}; set it to optimizer, or tower_parts to 1."
            )

    def _parts(self) -> int:
        return self.tower_parts

    def config(self, vocab_size: int) -> DualEncoderConfig:
        config = super().config(vocab_size)
        if self.loss == "sigmoid" and config.logit_bias is None:
            return with_logit_bias(config)
        return config

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> ContrastiveObjective:
        kind = SigmoidObjective if self.loss == "sigmoid" else ContrastiveObjective
        return kind(self.config(vocab_size), mesh, self.tower_parts)

    def batch(self) -> dict[str, Any]:
        batches, side = self.batches, self.pictures.size
        rows = batches.batch_size
        sources, length = rows * (1 + batches.num_negatives), max(batches.source_lengths)
        return {
            "query_ids": tasks.ints(rows, batches.query_length),
            "query_mask": tasks.bools(rows, batches.query_length),
            "source_ids": tasks.ints(sources, length),
            "source_mask": tasks.bools(sources, length),
            "pixels": tasks.Struct((sources, side, side, 3), jnp.uint8),
            "has_image": tasks.bools(sources),
            "source_rows": tasks.ints(sources),
            "positive": tasks.ints(rows),
            "gold_rows": tasks.ints(rows, GOLD_SOURCES),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        pictures, text_of = self.open_pictures(corpus), self.data.text_of
        reader = SourceReader(corpus, tokenizer, pictures, None, text_of)
        questions = self.data.chosen(questions, corpus)
        members = self.data.members(questions)
        batches = contrastive_batches(reader, questions, self.feed(), self.batches, members)
        objective = self.objective(tokenizer.vocab_size, make_mesh(self.mesh))
        return tasks.Recipe(objective, batches, dual_encoder_loader(self, tokenizer), reader)

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return RetrievalEvaluation(self, corpus, tokenizer, model)

    def in_use(self) -> tasks.InUse:
        """Sources: captions with pictures."""
        length, side = max(self.inference.buckets), self.pictures.size

        def inputs(rows: int) -> tuple[tasks.Struct, ...]:
            pixels = tasks.Struct((rows, side, side, 3), jnp.uint8)
            return tasks.ints(rows, length), tasks.bools(rows, length), pixels, tasks.bools(rows)

        return tasks.InUse(self.cost(), make_encode_source, self.planned_model, inputs)


class RetrievalEvaluation:
    """recall@k and MRR of a retriever over a fixed pool of sources."""

    def __init__(self, task: Any, corpus: Corpus, tokenizer: Any, model: nnx.Module):
        """`task`: Contrastive or another one with the section `validate`, `open_pictures` and
        `embedder`."""
        assert task.validate is not None
        # That are judged.
        self.questions = tasks.scored_questions(
            task, corpus, lambda q: bool(q.positives), "gold sources"
        )
        sampled = evenly(range(len(corpus)), task.validate.sources)
        candidates = [row for question in self.questions for row in corpus.candidates(question)]
        self.pool = tasks.part_of(corpus, [*candidates, *sampled])  # the sources
        self.pictures = task.open_pictures(self.pool)  # theirs
        self.embedder = task.embedder(tokenizer, model)  # of both

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self.embedder.use(model)
        vectors = self.embedder.embed_rows(self.pool, self.pictures, range(len(self.pool)))
        index = ExactIndex(Embeddings(vectors, "", self.pool.fingerprint))
        from mmqa_jax.retrieval.late_interaction import dense_retriever  # of all kinds of encoders

        retriever = dense_retriever(self.pool, self.embedder, index, self.pictures)
        ranked = find_candidates(self.questions, retriever, max(RECALL_AT))
        gold = [question.positives for question in self.questions]
        scores = score_rankings(gold, [r.sources for r in ranked], RECALL_AT).scores
        return {name: x for name, x in scores.items() if name.startswith(("recall@", "mrr"))}
