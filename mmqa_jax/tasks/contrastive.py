"""The dual encoder (WebQA 6.1, CLIP retrieval): CLIP's loss with mined hard negatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import batch_sharding, make_mesh
from mmqa_jax.core.typed import at_least, mapping
from mmqa_jax.data.batches.contrastive import ContrastSampling, contrastive_batches
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.source_reader import SourceReader
from mmqa_jax.data.splits import evenly
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.models.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embedder import make_encode_source
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.exact import ExactIndex
from mmqa_jax.retrieval.rankings import find_candidates
from mmqa_jax.tasks.dual_encoder import DualEncoderTask
from mmqa_jax.tasks.pretrained import dual_encoder_loader
from mmqa_jax.tasks.task import (
    DataSection,
    InUse,
    Recipe,
    Struct,
    bools,
    ints,
    mined,
    part_of,
    scored_questions,
)

GOLD_SOURCES = 8  # of one question, in a planned batch; WebQA's questions have fewer
RECALL_AT = (1, 2, 5, 10, 20, 100)
RetrievalMetric = Literal[
    "recall@1", "recall@2", "recall@5", "recall@10", "recall@20", "recall@100", "mrr"
]


@dataclasses.dataclass(frozen=True)
class ContrastiveObjective:
    """Questions against sources, one gold source each (CLIP, Radford et al. 2021, figure 3).

    Every question's negatives are its own hard ones and all sources of the other questions in
    the global batch, snippets and pictures alike: one space in which modality need not be known.
    The reverse direction, source to question, runs over the gold sources.

    Attributes:
      config: the model's.
      mesh: over which the batch is split; None computes the loss on one device.
      tower_parts: the towers run over the batch in this many parts, whose activations are
        recomputed for the gradient, so that only one part's are in memory at a time. The loss is
        that of the whole batch, and so is its gradient (GradCache, Gao et al. 2021, section 3).
    """

    config: DualEncoderConfig
    mesh: Mesh | None = None
    tower_parts: int = 1

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialised dual encoder."""
        return DualEncoder(self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of both directions, and the in-batch accuracy.

        The batch is `data.batches.contrastive`'s: B questions, and S = B * (1 + n) sources.
        """

        def encode_queries(key: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
            return model.encode_text(*inputs, dropout_key=key)

        def encode_sources(key: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
            return model.encode_source(*inputs, dropout_key=key)

        query_key, source_key = jax.random.split(dropout_key)
        queries = batch["query_ids"], batch["query_mask"]
        sources = tuple(
            batch[name] for name in ("source_ids", "source_mask", "pixels", "has_image")
        )
        scale = model.temperature()
        loss, accuracy = contrastive_loss(
            self._in_parts(encode_queries, query_key, queries),
            self._in_parts(encode_sources, source_key, sources),
            scale,
            batch["positive"],
            batch["source_rows"],
            batch["gold_rows"],
            mesh=self.mesh,
        )
        return loss, {"accuracy": accuracy, "temperature": scale}

    def _in_parts(
        self, encode: Callable[[jax.Array, Any], jax.Array], key: jax.Array, inputs: Any
    ) -> jax.Array:
        """`encode(key, inputs)` -> [N, D], `tower_parts` parts of the rows one after another."""
        if self.tower_parts == 1:
            return encode(key, inputs)

        # [N, ...] -> [k, N / k, ...]: part i is column i, so each device keeps its own rows.
        def columns(x: jax.Array) -> jax.Array:
            return x.reshape(-1, self.tower_parts, *x.shape[1:]).swapaxes(0, 1)

        keys = jax.random.split(key, self.tower_parts)
        encoded = jax.lax.map(
            jax.checkpoint(lambda part: encode(*part)), (keys, jax.tree.map(columns, inputs))
        )  # [k, N / k, D]
        return encoded.swapaxes(0, 1).reshape(-1, encoded.shape[-1])


def contrastive_loss(
    queries: jax.Array,
    sources: jax.Array,
    scale: jax.Array,
    positive: jax.Array,
    source_rows: jax.Array,
    gold_rows: jax.Array,
    *,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy question -> source and gold source -> question; in-batch accuracy.

    On a mesh every device keeps the rows of its own questions: it gathers the embeddings (and
    row numbers) of all others, and computes its [B / n, S] and [B / n, B] blocks of the logits.
    Left to itself XLA splits the columns, moves whole blocks between the devices and makes the
    [B, B] mask on each of them. Loss and gradients are those of one device.

    Args:
      queries, sources: [B, D] and [S, D] float32, of length 1.
      scale: factor on the cosines.
      positive: [B], each question's gold source as a row of `sources`.
      source_rows: [S], row of each source in the corpus: another occurrence of the positive is
        not a negative.
      gold_rows: [B, G], corpus rows of all gold sources of a question, padded with -1: these
        are not negatives either.
      mesh: over whose batch axes B and S are split.
    """
    arrays = queries, sources, positive, source_rows, gold_rows
    if mesh is None:
        return _block(scale, *arrays, axes=())
    rows = batch_sharding(mesh).spec
    (axes,) = rows
    sharded = jax.shard_map(
        functools.partial(_block, axes=axes),
        mesh=mesh,
        in_specs=(PartitionSpec(), *(rows,) * len(arrays)),
        out_specs=PartitionSpec(),
    )
    return sharded(scale, *arrays)


def _block(
    scale: jax.Array,
    queries: jax.Array,
    sources: jax.Array,
    positive: jax.Array,
    source_rows: jax.Array,
    gold_rows: jax.Array,
    *,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """The loss from one device's b = B / n questions and S / n sources; the same on all."""

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axes, tiled=True) if axes else x

    def mean(x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x.mean(), axes) if axes else x.mean()

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        # An accelerator would round float32 to bfloat16 or TF32 otherwise.
        return scale * jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)

    all_sources, all_rows = gather(sources), gather(source_rows)  # [S, D], [S]
    all_queries, all_golds = gather(queries), gather(gold_rows)  # [B, D], [B, G]
    gold = _among(all_rows[None, :], gold_rows[:, None, :])  # [b, S]
    others = gold & (jnp.arange(all_rows.size)[None, :] != positive[:, None])
    logits = jnp.where(others, -jnp.inf, product(queries, all_sources))  # [b, S]
    forward = optax.softmax_cross_entropy_with_integer_labels(logits, positive)
    accuracy = mean((logits.argmax(axis=1) == positive).astype(jnp.float32))

    own = jnp.arange(positive.size)  # [b], these questions among all
    if axes:
        own = own + jax.lax.axis_index(axes) * positive.size
    targets = all_sources[positive]  # [b, D]
    shared = _among(all_rows[positive][:, None], all_golds[None, :, :])  # [b, B]
    shared &= jnp.arange(all_queries.shape[0])[None, :] != own[:, None]
    logits = jnp.where(shared, -jnp.inf, product(targets, all_queries))  # [b, B]
    backward = optax.softmax_cross_entropy_with_integer_labels(logits, own)
    return (mean(forward) + mean(backward)) / 2, accuracy


def _among(rows: jax.Array, golds: jax.Array) -> jax.Array:
    """Whether rows [p, q] are among golds [p or 1, q or 1, G]: bool[p, q]."""
    return (rows[..., None] == golds).any(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveBatches(BatchesSection, ContrastSampling):
    """The section `batches`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateRetrieval:
    """The section `validate`.

    Attributes:
      split: the questions', of those with gold sources.
      questions: how many, evenly over the split; 0: all.
      sources: further sources, evenly over the corpus, beside the questions' own gold sources and
        negatives; 0: the whole collection.
      metric: decides on the best step.
    """

    split: str
    questions: int = at_least(0)
    sources: int = at_least(0)
    metric: RetrievalMetric


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(DualEncoderTask):
    """Questions against their gold sources, snippets and captioned pictures.

    Attributes:
      tower_parts: see ContrastiveObjective.
      augment: `factory` and its arguments (tasks.augmentation).
    """

    name: ClassVar[str] = "contrastive"
    product: ClassVar[str] = "retriever"
    title: ClassVar[str] = "Training the retriever"
    program: ClassVar[str] = "embed"

    data: DataSection
    batches: ContrastiveBatches
    tower_parts: int = at_least(1, 1)
    augment: Mapping[str, Any] = mapping(dict)
    validate: ValidateRetrieval | None = None

    def lengths(self) -> Mapping[str, int]:
        return {
            **super().lengths(),
            "batches.query_length": self.batches.query_length,
            "batches.source_lengths": max(self.batches.source_lengths, default=0),
        }

    def _check(self, files: bool) -> None:
        super()._check(files)
        accumulate = self.loop.accumulate
        if accumulate > 1:
            raise UserError(
                f"config key train.accumulate={accumulate}: the contrastive loss needs its whole "
                f"batch; leave it out and set tower_parts to {accumulate}."
            )

    def _parts(self) -> int:
        return self.tower_parts

    def planned_objective(self, mesh: Mesh | None) -> ContrastiveObjective:
        return ContrastiveObjective(self.planned_config(), mesh, self.tower_parts)

    def batch(self) -> dict[str, Any]:
        batches, side = self.batches, self.pictures.size
        rows = batches.batch_size
        sources, length = rows * (1 + batches.num_negatives), max(batches.source_lengths)
        return {
            "query_ids": ints(rows, batches.query_length),
            "query_mask": bools(rows, batches.query_length),
            "source_ids": ints(sources, length),
            "source_mask": bools(sources, length),
            "pixels": Struct((sources, side, side, 3), jnp.uint8),
            "has_image": bools(sources),
            "source_rows": ints(sources),
            "positive": ints(rows),
            "gold_rows": ints(rows, GOLD_SOURCES),
            "truncated": ints(rows),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        pictures, text_of = self.pictures.open(corpus), self.data.text_of
        reader = SourceReader(corpus, tokenizer, pictures, None, text_of, None)
        questions = mined(self.data, questions, corpus)
        batches = contrastive_batches(reader, questions, self.feed(), self.batches)
        config, mesh = self.model.config(tokenizer.vocab_size), make_mesh(self.mesh)
        objective = ContrastiveObjective(config, mesh, self.tower_parts)
        return Recipe(objective, batches, dual_encoder_loader(self, tokenizer), reader)

    def evaluation(
        self, section: ValidateRetrieval, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        """recall@k and MRR over a fixed pool of sources."""
        return RetrievalEvaluation(self, section, corpus, tokenizer, model)

    def in_use(self) -> InUse:
        """Sources: captions with pictures."""
        length, side = max(self.inference.buckets), self.pictures.size

        def inputs(rows: int) -> tuple[Struct, ...]:
            pixels = Struct((rows, side, side, 3), jnp.uint8)
            return ints(rows, length), bools(rows, length), pixels, bools(rows)

        return InUse(self.cost(), make_encode_source, self.planned_model, inputs)


class RetrievalEvaluation:
    """recall@k and MRR of a dual encoder over a fixed pool of sources.

    Attributes:
      questions: that are judged.
      pool: the sources.
      pictures: theirs.
      embedder: of both.
    """

    def __init__(
        self,
        task: Contrastive,
        section: ValidateRetrieval,
        corpus: Corpus,
        tokenizer: Any,
        model: nnx.Module,
    ):
        self.questions = scored_questions(
            task, section, corpus, lambda q: bool(q.positives), "gold sources"
        )
        sampled = evenly(range(len(corpus)), section.sources)
        own = [row for question in self.questions for row in corpus.candidates(question)]
        self.pool = part_of(corpus, [*own, *sampled])
        self.pictures = task.pictures.open(self.pool)
        self.embedder = task.embedder(tokenizer, model)

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self.embedder.use(model)
        vectors = self.embedder.embed_rows(self.pool, self.pictures, range(len(self.pool)))
        index = ExactIndex(Embeddings(vectors, "", self.pool.fingerprint))
        retriever = DenseRetriever(self.pool, self.embedder, index, self.pictures)
        ranked = find_candidates(self.questions, retriever, max(RECALL_AT))
        gold = [question.positives for question in self.questions]
        scores = score_rankings(gold, [r.sources for r in ranked], RECALL_AT).scores
        return {name: x for name, x in scores.items() if name.startswith(("recall@", "mrr"))}
