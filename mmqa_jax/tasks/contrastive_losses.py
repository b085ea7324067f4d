"""Losses of questions against sources: softmax and sigmoid, and what a teacher's scores say.

A side's vectors are one array [N, D] with a vector for each text, or for late interaction a pair of
tokens' vectors [N, L, D] and bool [N, L], which of them are scored.

The objectives of the tasks that train a dual encoder stand behind them. They need nothing but JAX,
Flax, Optax and the models, and so run on a bare accelerator image.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.mesh import batch_sharding
from mmqa_jax.models.common.layers import split_key
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.encoders.sentence_pooling import max_sim
from mmqa_jax.models.two_towers.network import l2_normalize
from mmqa_jax.training.state import OfLayers

# (p questions, q sources) -> scores float32 [p, q].
Similarity = Callable[[Any, Any], jax.Array]


def cosines(questions: jax.Array, sources: jax.Array) -> jax.Array:
    """Products of vectors of length 1, [p, D] and [q, D] -> [p, q]."""
    # An accelerator would round float32 to bfloat16 or TF32 otherwise.
    return jnp.matmul(questions, sources.T, precision=jax.lax.Precision.HIGHEST)


def max_sims(
    questions: tuple[jax.Array, jax.Array], sources: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """MaxSim of every question and source: of p and q texts, [p, q].

    One question after another is compared, and again in the backward pass, so that the products of
    tokens [p, q, Lq, Ls] are never in memory at once.
    """
    vectors, scored = sources

    def of_question(question: tuple[jax.Array, jax.Array]) -> jax.Array:
        def repeated(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (len(vectors), *x.shape))

        return max_sim(*map(repeated, question), vectors, scored)  # [q]

    return jax.lax.map(jax.checkpoint(of_question), questions)


def mean_max_sims(
    questions: tuple[jax.Array, jax.Array], sources: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """`max_sims` divided by the number of each question's tokens."""
    return max_sims(questions, sources) / questions[1].sum(1)[:, None]


def own_scores(similarity: Similarity, questions: Any, sources: Any) -> jax.Array:
    """Scores of B questions and their own G sources each, B * G in order: float32 [B, G]."""
    count = len(jax.tree.leaves(questions)[0])

    def apart(x: jax.Array, rows: int) -> jax.Array:  # [B * rows, ...] -> [B, rows, ...]
        return x.reshape(count, rows, *x.shape[1:])

    group = len(jax.tree.leaves(sources)[0]) // count
    one_each = jax.tree.map(lambda x: apart(x, 1), questions)
    of_each = jax.tree.map(lambda x: apart(x, group), sources)
    return jax.vmap(similarity)(one_each, of_each)[:, 0]


def shortened(vectors: Any, dim: int) -> Any:
    """The first `dim` values of every vector, scaled back to length 1 (Matryoshka)."""
    if isinstance(vectors, tuple):
        return l2_normalize(vectors[0][..., :dim]), vectors[1]
    return l2_normalize(vectors[..., :dim])


def margin_mse(scores: jax.Array, teacher: jax.Array) -> jax.Array:
    """Mean squared error of the margins between a question's first source and its others.

    Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture
    Knowledge Distillation", equation 6; sentence-transformers' MarginMSELoss.

    `scores`, `teacher`: [B, G].
    """
    margins, wanted = (x[:, :1] - x[:, 1:] for x in (scores, teacher))
    return jnp.square(margins - wanted).mean()


def teacher_divergence(
    scores: jax.Array, teacher: jax.Array, temperature: float = 1.0
) -> jax.Array:
    """KL(teacher || model) over a question's sources, the mean over the questions.

    Args:
      scores, teacher: [B, G], of which the softmax is taken.
      temperature: the teacher's scores are divided by it.
    """
    targets = jax.nn.log_softmax(teacher / temperature)
    predicted = jax.nn.log_softmax(scores)
    return (jnp.exp(targets) * (targets - predicted)).sum(axis=1).mean()


# The softmax loss (CLIP, Radford et al. 2021, figure 3; InfoNCE, van den Oord et al. 2018).


def contrastive_loss(
    queries: Any,
    sources: Any,
    scale: jax.Array | float,
    positive: jax.Array,
    source_rows: jax.Array,
    gold_rows: jax.Array,
    *,
    similarity: Similarity = cosines,
    symmetric: bool = True,
    margin: float | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy question -> source and gold source -> question; in-batch accuracy.

    On a mesh every device keeps the rows of its own questions: it gathers the embeddings (and
    row numbers) of all others, and computes its [B / n, S] and [B / n, B] blocks of the logits.
    Left to itself XLA splits the columns, moves whole blocks between the devices and makes the
    [B, B] mask on each of them. Loss and gradients are those of one device.

    Args:
      queries, sources: the vectors of B questions and S sources, of length 1.
      scale: factor on the scores.
      positive: [B], each question's gold source as a row of `sources`.
      source_rows: [S], row of each source in the corpus: another occurrence of the positive is
        not a negative.
      gold_rows: [B, G], corpus rows of all gold sources of a question, padded with -1: these
        are not negatives either.
      similarity: scores of questions and sources.
      symmetric: whether the direction gold source -> question is learned, too.
      margin: sources with more than the positive's score less this are not negatives
        (sentence-transformers' GISTEmbedLoss with the model as its own guide); None: all are.
      mesh: over whose batch axes B and S are split.
    """
    arrays = queries, sources, positive, source_rows, gold_rows
    options = {"similarity": similarity, "symmetric": symmetric, "margin": margin}
    if mesh is None:
        return _block(scale, *arrays, axes=(), **options)
    rows = batch_sharding(mesh).spec
    (axes,) = rows
    sharded = jax.shard_map(
        functools.partial(_block, axes=axes, **options),
        mesh=mesh,
        in_specs=(PartitionSpec(), *(rows,) * len(arrays)),
        out_specs=PartitionSpec(),
    )
    return sharded(jnp.asarray(scale, jnp.float32), *arrays)


def _block(
    scale: jax.Array | float,
    queries: Any,
    sources: Any,
    positive: jax.Array,
    source_rows: jax.Array,
    gold_rows: jax.Array,
    *,
    axes: Sequence[str],
    similarity: Similarity,
    symmetric: bool,
    margin: float | None,
) -> tuple[jax.Array, jax.Array]:
    """The loss from one device's b = B / n questions and S / n sources; the same on all."""

    def gather(vectors: Any) -> Any:
        if not axes:
            return vectors
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), vectors)

    def mean(x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x.mean(), axes) if axes else x.mean()

    all_sources, all_rows = gather(sources), gather(source_rows)  # [S, ...], [S]
    gold = _among(all_rows[None, :], gold_rows[:, None, :])  # [b, S]
    others = jnp.arange(all_rows.size)[None, :] != positive[:, None]
    scores = similarity(queries, all_sources)  # [b, S]
    left_out = gold & others
    if margin is not None:
        of_positive = jnp.take_along_axis(scores, positive[:, None], axis=1)
        left_out |= (scores > of_positive - margin) & others
    logits = jnp.where(left_out, -jnp.inf, scale * scores)
    forward = optax.softmax_cross_entropy_with_integer_labels(logits, positive)
    accuracy = mean((logits.argmax(axis=1) == positive).astype(jnp.float32))
    if not symmetric:
        return mean(forward), accuracy

    all_queries, all_golds = gather(queries), gather(gold_rows)  # [B, ...], [B, G]
    here = jnp.arange(positive.size)  # [b], these questions among all
    if axes:
        here = here + jax.lax.axis_index(axes) * positive.size
    targets = jax.tree.map(lambda x: x[positive], all_sources)  # [b, ...]
    shared = _among(all_rows[positive][:, None], all_golds[None, :, :])  # [b, B]
    shared &= jnp.arange(len(all_golds))[None, :] != here[:, None]
    scores = similarity(all_queries, targets).T  # [b, B]
    logits = jnp.where(shared, -jnp.inf, scale * scores)
    backward = optax.softmax_cross_entropy_with_integer_labels(logits, here)
    return (mean(forward) + mean(backward)) / 2, accuracy


def _among(rows: jax.Array, golds: jax.Array) -> jax.Array:
    """Whether rows [p, q] are among golds [p or 1, q or 1, G]: bool[p, q]."""
    return (rows[..., None] == golds).any(axis=-1)


# The sigmoid loss (SigLIP, Zhai et al. 2023, section 3): each pair is a decision of its own.
#
# No row or column is normalized, so that no device needs all logits: each keeps its sources, the
# questions go around the devices, and each meets them one chunk at a time (section 3.3, figure
# 1). A chunk's logits and their gradient are made together and forgotten: what a device holds
# beside the embeddings is one block [B / n, S / n]. The questions' gradient travels with them.

Vectors = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # queries, sources, scale, bias
Links = tuple[jax.Array, jax.Array, jax.Array]  # positive, source_rows, gold_rows


def sigmoid_loss(
    queries: jax.Array,
    sources: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    positive: jax.Array,
    source_rows: jax.Array,
    gold_rows: jax.Array,
    *,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum over the sources of -log sigmoid(z * (scale * cosine + bias)), mean over the questions.

    z is 1 for a question's positive and -1 for all other sources but its other gold ones, which
    count for nothing. Loss and gradients are those of one device. Of B questions with one source
    each, all different, it is SigLIP's loss.

    Args:
      queries, sources: [B, D] and [S, D] float32, of length 1.
      scale, bias: of the logits.
      positive, source_rows, gold_rows: as of `contrastive_loss`.
      mesh: over whose batch axes B and S are split.

    Returns:
      The loss, and how often the positive has the highest logit of its question.
    """
    return _loss((queries, sources, scale, bias), (positive, source_rows, gold_rows), mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _loss(vectors: Vectors, links: Links, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    return _around(vectors, links, mesh, gradient=False)[0]


def _forward(
    vectors: Vectors, links: Links, mesh: Mesh | None
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    return _around(vectors, links, mesh, gradient=True)


def _backward(mesh: Mesh | None, gradients: Any, cotangents: Any) -> tuple[Any, None]:
    return jax.tree.map(lambda x: cotangents[0] * x, gradients), None


_loss.defvjp(_forward, _backward)


def _around(
    vectors: Vectors, links: Links, mesh: Mesh | None, *, gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """(loss, accuracy) and, with `gradient`, the loss's gradient with respect to the vectors."""
    if mesh is None:
        return _ring(vectors, links, axes=(), parts=1, gradient=gradient)
    rows, whole = batch_sharding(mesh).spec, PartitionSpec()
    (axes,) = rows
    of_vectors = rows, rows, whole, whole
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    ring = functools.partial(_ring, axes=axes, parts=parts, gradient=gradient)
    return jax.shard_map(
        ring,
        mesh=mesh,
        in_specs=(of_vectors, (rows, rows, rows)),
        out_specs=((whole, whole), of_vectors if gradient else None),
        check_vma=False,  # what is the same on all devices is summed below, not by the types
    )(vectors, links)


def _ring(
    vectors: Vectors, links: Links, *, axes: tuple[str, ...], parts: int, gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """One device's b = B / n questions and s = S / n sources; sums are over all devices."""
    queries, sources, scale, bias = vectors
    positive, source_rows, gold_rows = links
    here = jax.lax.axis_index(axes) if axes else 0
    columns = here * len(sources) + jnp.arange(len(sources))  # of the sources here, among all
    onward = [(part, (part + 1) % parts) for part in range(parts)]

    def chunk(vectors: Vectors, positive: jax.Array, golds: jax.Array) -> tuple[jax.Array, Any]:
        return _chunk(vectors, positive, golds, source_rows, columns)

    def meet(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        (queries, positive, golds, best, d_queries), (total, d_others) = state
        at = (queries, sources, scale, bias), positive, golds
        if gradient:
            (loss, highest), (d_chunk, *d_here) = jax.value_and_grad(chunk, has_aux=True)(*at)
            d_queries = d_queries + d_chunk
            d_others = jax.tree.map(jnp.add, d_others, tuple(d_here))
        else:
            loss, highest = chunk(*at)
        best = jax.tree.map(jnp.maximum, best, highest)
        travelling = queries, positive, golds, best, d_queries
        if axes:
            travelling = jax.lax.ppermute(travelling, axes, onward)
        return travelling, (total + loss, d_others)

    lowest = jnp.full(len(queries), -jnp.inf)
    d_queries, d_others = jnp.zeros_like(queries), jax.tree.map(jnp.zeros_like, vectors[1:])
    state = (queries, positive, gold_rows, (lowest, lowest), d_queries), (0.0, d_others)
    # After as many steps as there are devices everything is where it began.
    travelled, (total, d_others) = jax.lax.fori_loop(0, parts, meet, state)
    (_, _, _, (of_positive, other), d_queries) = travelled

    def over_all(x: Any) -> Any:
        return jax.lax.psum(x, axes) if axes else x

    count = parts * len(queries)
    correct = (of_positive > other).astype(jnp.float32).sum()
    values = over_all(total) / count, over_all(correct) / count
    if not gradient:
        return values, None
    d_sources, *d_shared = d_others
    made = d_queries, d_sources, *over_all(d_shared)
    return values, jax.tree.map(lambda x: x / count, made)


def _chunk(
    vectors: Vectors,
    positive: jax.Array,
    gold_rows: jax.Array,
    source_rows: jax.Array,
    columns: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss of b questions against s sources; each one's positive and best other logit [b]."""
    queries, sources, scale, bias = vectors
    # An accelerator would round float32 to bfloat16 or TF32 otherwise.
    cosines = jnp.matmul(queries, sources.T, precision=jax.lax.Precision.HIGHEST)
    logits = scale * cosines + bias  # [b, s]
    is_positive = positive[:, None] == columns
    gold = (source_rows[None, :, None] == gold_rows[:, None, :]).any(axis=-1)
    is_negative = ~is_positive & ~gold
    likelihood = jax.nn.log_sigmoid(jnp.where(is_positive, logits, -logits))
    loss = -jnp.where(is_positive | is_negative, likelihood, 0.0).sum()
    of_positive, other = (
        jnp.where(those, logits, -jnp.inf).max(axis=1) for those in (is_positive, is_negative)
    )
    return loss, (of_positive, other)


@dataclasses.dataclass(frozen=True)
class ContrastiveObjective(OfLayers):
    """Questions against sources, one gold source each (CLIP, Radford et al. 2021, figure 3).

    Every question's negatives are its own hard ones and all sources of the other questions in
    the global batch, snippets and pictures alike: one space in which modality need not be known.
    The reverse direction, source to question, runs over the gold sources.
    """

    network: ClassVar[type[nnx.Module]] = DualEncoder

    config: DualEncoderConfig
    mesh: Mesh | None = None  # over which the batch is split; None computes the loss on one device
    # The towers run over the batch in this many parts, whose activations are recomputed for the
    # gradient, so that only one part's are in memory at a time. The loss is that of the whole
    # batch, and so is its gradient (GradCache, Gao et al. 2021, section 3).
    tower_parts: int = 1

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of the global batch, and the in-batch accuracy.

        The batch is `data.batches.retriever`'s: B questions, and S = B * (1 + n) sources.
        """

        queries, sources = self.vectors(model, batch, dropout_key)
        return self._compare(model, queries, sources, batch)

    def vectors(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[Any, Any]:
        """Those of the questions and of the sources, as `contrastive_losses` has them."""

        def encode_queries(key: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
            return model.encode_text(*inputs, dropout_key=key)

        def encode_sources(key: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
            return model.encode_source(*inputs, dropout_key=key)

        query_key, source_key = jax.random.split(dropout_key)
        queries = batch["query_ids"], batch["query_mask"]
        sources = tuple(
            batch[name] for name in ("source_ids", "source_mask", "pixels", "has_image")
        )
        queries = self._in_parts(encode_queries, query_key, queries)
        return queries, self._in_parts(encode_sources, source_key, sources)

    def _compare(
        self, model: DualEncoder, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of both directions."""
        scale = model.temperature()
        loss, accuracy = contrastive_loss(queries, sources, scale, *links(batch), mesh=self.mesh)
        return loss, {"accuracy": accuracy, "temperature": scale}

    def _in_parts(
        self, encode: Callable[[jax.Array, Any], jax.Array], key: jax.Array, inputs: Any
    ) -> jax.Array:
        """`encode(key, inputs)` -> [N, ...], `tower_parts` parts of the rows one after another."""
        if self.tower_parts == 1:
            return encode(key, inputs)

        # [N, ...] -> [k, N / k, ...]: part i is column i, so each device keeps its own rows.
        def columns(x: jax.Array) -> jax.Array:
            return x.reshape(-1, self.tower_parts, *x.shape[1:]).swapaxes(0, 1)

        keys = jax.random.split(key, self.tower_parts)
        encoded = jax.lax.map(
            jax.checkpoint(lambda part: encode(*part)), (keys, jax.tree.map(columns, inputs))
        )  # [k, N / k, ...]
        return encoded.swapaxes(0, 1).reshape(-1, *encoded.shape[2:])


class SigmoidObjective(ContrastiveObjective):
    """A ContrastiveObjective that decides each pair by itself (`sigmoid_loss`).

    The model has a learned bias (`dual_encoder.with_logit_bias`).
    """

    def _compare(
        self, model: DualEncoder, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Sum over the sources, mean over the questions."""
        scale, bias = model.temperature(), model.logit_bias[...]
        loss, accuracy = sigmoid_loss(queries, sources, scale, bias, *links(batch), mesh=self.mesh)
        return loss, {"accuracy": accuracy, "temperature": scale, "bias": bias}


def links(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Who belongs to whom in a batch, as the losses take it."""
    return batch["positive"], batch["source_rows"], batch["gold_rows"]


@dataclasses.dataclass(frozen=True)
class DistillationObjective(OfLayers):
    """KL(Q || P) over a question's candidates (REPLUG LSR, Shi et al. 2023, section 4).

    P is the softmax of their cosines with the question, times the model's factor (`temperature`);
    Q the softmax of the language model's scores over `target_temperature`. REPLUG has KL(P || Q);
    with Q first the gradient is that of cross-entropy with soft targets.
    """

    network: ClassVar[type[nnx.Module]] = DualEncoder

    # The dual encoder's; its text tower embeds questions and examples alike.
    config: DualEncoderConfig
    target_temperature: float = 1.0  # low trusts the most helpful candidate alone

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean KL of a batch of `data.batches.retriever`.

        `score_of_nearest` is the language model's mean score of the nearest candidate, `accuracy`
        how often that is the most helpful one.
        """
        length = batch["candidate_ids"].shape[-1]
        query_key, candidate_key = split_key(dropout_key, 2)
        queries = model.encode_text(batch["query_ids"], batch["query_mask"], dropout_key=query_key)
        flat = (batch[name].reshape(-1, length) for name in ("candidate_ids", "candidate_mask"))
        examples = model.encode_text(*flat, dropout_key=candidate_key)
        scores = own_scores(cosines, queries, examples)  # [B, m]
        scale = model.temperature()
        loss = teacher_divergence(scale * scores, batch["scores"], self.target_temperature)
        nearest = scores.argmax(axis=1)
        chosen = jnp.take_along_axis(batch["scores"], nearest[:, None], axis=1)
        best = batch["scores"].argmax(axis=1)
        return loss, {
            "score_of_nearest": chosen.mean(),
            "accuracy": (nearest == best).astype(jnp.float32).mean(),
            "temperature": scale,
        }
