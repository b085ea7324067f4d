"""The objectives of the tasks: a model and its loss each.

They stand apart from the tasks since they need nothing but JAX, Flax, Optax and the models, and so
run on a bare accelerator image.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.mesh import (
    SEQUENCE,
    batch_axes,
    column_shards,
    share_words,
    split_rows,
)
from mmqa_jax.models.common.layers import split_key
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.encoders.heads import TextClassifier, TextClassifierConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.mcan.network import MCAN, MCANConfig, MCANOpenVQA, MCANOpenVQAConfig
from mmqa_jax.models.mcan.patches import CaptionMCAN, CaptionMCANConfig, PatchMCAN, PatchMCANConfig
from mmqa_jax.models.qwen_vl.network import PatchBatch, QwenVL, QwenVLConfig, spread
from mmqa_jax.models.t5.config import MultimodalT5Config, T5Config
from mmqa_jax.models.t5.network import T5, MultimodalT5, Texts
from mmqa_jax.models.vlp.network import VLP, VLPConfig
from mmqa_jax.tasks.contrastive_losses import (
    contrastive_loss,
    cosines,
    own_scores,
    sigmoid_loss,
    teacher_divergence,
)
from mmqa_jax.training.state import WEIGHT


class _OfLayers:
    """An objective whose model is of `models.common.layers`, where a parameter without a key is 0.

    Attributes:
      network: the model.
    """

    network: ClassVar[type[nnx.Module]]

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model; without a key, one of zeros."""
        return self.network(self.config, rngs=nnx.Rngs(key))

    def outline(self) -> nnx.Module:
        """The model of zeros; no initializer is traced."""
        return self.init(None)


_LOGITS_BYTES = 2**28  # of a device, from which on logits are made in parts

VQAConfig = MCANConfig | MCANOpenVQAConfig | CaptionMCANConfig | PatchMCANConfig


@dataclasses.dataclass(frozen=True)
class ContrastiveObjective(_OfLayers):
    """Questions against sources, one gold source each (CLIP, Radford et al. 2021, figure 3).

    Every question's negatives are its own hard ones and all sources of the other questions in
    the global batch, snippets and pictures alike: one space in which modality need not be known.
    The reverse direction, source to question, runs over the gold sources.

    Attributes:
      mesh: over which the batch is split; None computes the loss on one device.
      tower_parts: the towers run over the batch in this many parts, whose activations are
        recomputed for the gradient, so that only one part's are in memory at a time. The loss is
        that of the whole batch, and so is its gradient (GradCache, Gao et al. 2021, section 3).
    """

    network: ClassVar[type[nnx.Module]] = DualEncoder

    config: DualEncoderConfig
    mesh: Mesh | None = None
    tower_parts: int = 1

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of the global batch, and the in-batch accuracy.

        The batch is `data.batches.contrastive`'s: B questions, and S = B * (1 + n) sources.
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
class AnswerObjective(_OfLayers):
    """Cross-entropy over the masked answer tokens (VLP, equation 2; WebQA section 5.2).

    Normalized as in the original (modeling.py:1162-1190): summed over its micro-batch, divided by
    the number of masked tokens + 1e-5; where tokens have weights (MaskingConfig.weights),
    by their sum. Then the mean over the micro-batches of an update.

    Attributes:
      questions_per_mean: questions of such a micro-batch, a divisor of the batch; None: the batch.
    """

    config: VLPConfig
    questions_per_mean: int | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized VLP."""
        return self.config.build(rngs=nnx.Rngs(key))

    def loss(
        self, model: VLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean loss per masked token, and the share of tokens with a probability above
        0.5.

        Both weighted by the tokens' weights, the loss within `questions_per_mean` questions.
        """
        positions, ids = batch["masked_positions"], batch["masked_ids"]  # [B, P]
        log_probs, sayable = model.answer_log_probs(
            batch["inputs"], positions, ids, dropout_key=dropout_key
        )  # [B, P]
        # A model that only copies names cannot produce a name that is in no source.
        weights = batch["masked_weights"] * sayable
        rows, masks = weights.shape

        def sums(x: jax.Array) -> jax.Array:  # [B, P] -> [groups of questions]
            return x.reshape(-1, (self.questions_per_mean or rows) * masks).sum(axis=1)

        loss = -(sums(log_probs * weights) / (sums(weights) + 1e-5)).mean()
        correct = (log_probs > jnp.log(0.5)).astype(jnp.float32)
        metrics = {"accuracy": (correct * weights).sum() / (weights.sum() + 1e-5)}
        if self.questions_per_mean is None:
            metrics[WEIGHT] = weights.sum()
        return loss, metrics


@dataclasses.dataclass(frozen=True)
class ModalityObjective(_OfLayers):
    """Cross-entropy over the two modalities (WebQA_Baseline bert_classifier.py:113,290).

    Attributes:
      frozen: only the linear layer is trained.
    """

    network: ClassVar[type[nnx.Module]] = TextClassifier

    config: TextClassifierConfig
    frozen: bool = False

    def loss(
        self, model: TextClassifier, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of the batch of `data.batches.modality`, and its accuracy."""
        logits = model(
            batch["input_ids"], batch["mask"], frozen=self.frozen, dropout_key=dropout_key
        )  # [B, 2]
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": (logits.argmax(axis=1) == labels).astype(jnp.float32).mean()}


_MODELS: dict[type, type[nnx.Module]] = {
    MCANConfig: MCAN,
    MCANOpenVQAConfig: MCANOpenVQA,
    CaptionMCANConfig: CaptionMCAN,
    PatchMCANConfig: PatchMCAN,
}


@dataclasses.dataclass(frozen=True)
class VQAObjective(_OfLayers):
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


@dataclasses.dataclass(frozen=True)
class DistillationObjective(_OfLayers):
    """KL(Q || P) over a question's candidates (REPLUG LSR, Shi et al. 2023, section 4).

    P is the softmax of their cosines with the question, times the model's factor (`temperature`);
    Q the softmax of the language model's scores over `target_temperature`. REPLUG has KL(P || Q);
    with Q first the gradient is that of cross-entropy with soft targets.

    Attributes:
      config: the dual encoder's; its text tower embeds questions and examples alike.
      target_temperature: low trusts the most helpful candidate alone.
    """

    network: ClassVar[type[nnx.Module]] = DualEncoder

    config: DualEncoderConfig
    target_temperature: float = 1.0

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean KL of a batch of `data.batches.example_retrieval`.

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


@dataclasses.dataclass(frozen=True)
class LanguageModelObjective(_OfLayers):
    """Cross-entropy of the next token, the mean over the target tokens of the global batch.

    Attributes:
      lora: only these additions are trained; None: everything.
    """

    config: LlamaConfig
    lora: LoraConfig | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized LLaMA."""
        rngs = nnx.Rngs(key)
        model = Llama(self.config, rngs=rngs)
        if self.lora is not None:
            add_lora(model, self.lora, rngs=rngs)
        return model

    def loss(
        self, model: Llama, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a batch of `data.batches.language_model`, and its number of targets."""
        log_probs = self.log_probs(model, batch, dropout_key)  # [B, T]
        return _mean_over_targets(log_probs, batch["target_segments"] > 0)

    @property
    def trained(self) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        return None if self.lora is None else ADDED

    def log_probs(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Log-probability of every target, float32 [B, T]."""
        return target_log_probs(model, batch, dropout_key)

    def finish(self, model: Llama) -> Llama:
        """Keeps a plain LLaMA of the trained model."""
        return model if self.lora is None else merge_lora(model)


def _mean_over_targets(
    log_probs: jax.Array, is_target: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of log-probabilities [B, T]; the loss of no target (all pictures of a batch
    are broken) is 0."""
    count = is_target.sum().astype(jnp.float32)
    loss = -jnp.where(is_target, log_probs, 0.0).sum() / jnp.maximum(count, 1)
    return loss, {"targets": count, WEIGHT: count}


def target_log_probs(
    model: Llama,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Log-probability of every target of a packed batch, float32 [B, T].

    A token sees those before it in its own example; the output head runs on the targets alone.
    With a temperature other than 1 it is that of softmax(logits / temperature).
    """
    hidden = model.encode(
        model.embed(batch["input_ids"]),
        positions=batch["positions"],
        segments=batch["segments"],
        dropout_key=dropout_key,
    )  # [B, L, H]
    return _of_targets(model, hidden, batch, temperature)


def _of_targets(
    model: Llama, hidden: jax.Array, batch: dict[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
    """Log-probability of every target, float32 [B, T], of the last states [B, L, H].

    Where a device's share of the logits exceeds _LOGITS_BYTES, they are made for some targets of
    each row after another, and again in the backward pass: never for all at once.
    """
    before = states_at(hidden, batch["target_positions"])  # [B, T, H]
    ids = batch["target_ids"]

    def log_probs(states: jax.Array, ids: jax.Array, words: jax.Array | None = None) -> jax.Array:
        logits = model.logits(states, words)
        logits = logits if temperature == 1 else logits / temperature
        return -optax.softmax_cross_entropy_with_integer_labels(logits, ids)

    rows, targets = ids.shape
    mesh = jax.sharding.get_abstract_mesh()
    share = 4 * rows * targets * model.config.vocab_size // max(math.prod(mesh.shape.values()), 1)
    parts = min(-(-share // _LOGITS_BYTES), targets)
    if parts <= 1:
        return log_probs(before, ids)
    padding = -targets % (parts * mesh.shape.get(SEQUENCE, 1))

    # A part has every so manieth target, so that it has some of each device's.
    def apart(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [parts, B, T / parts, ...]
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, parts, *x.shape[2:]), 2, 0)

    words, split = share_words(*model.words, rows, (targets + padding) // parts)
    part = jax.checkpoint(lambda pair: split_rows(log_probs(split(pair[0]), pair[1], words)))
    made = jax.lax.map(part, (apart(before), apart(ids)))  # [parts, B, T / parts]
    return jnp.moveaxis(made, 0, 2).reshape(rows, -1)[:, :targets]


def states_at(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """States [B, L, H] at some columns of each row, int [B, T]: [B, T, H].

    Where `sequence` splits the columns, and divides T, a device sends the states that it has to
    those that have these targets.
    """
    shards = column_shards(hidden.shape[1])
    if shards == 1 or positions.shape[1] % shards:
        return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)

    def of_device(hidden: jax.Array, positions: jax.Array) -> jax.Array:
        columns = hidden.shape[1]
        column = positions - jax.lax.axis_index(SEQUENCE) * columns
        states = jnp.take_along_axis(hidden, jnp.clip(column, 0, columns - 1)[:, :, None], axis=1)
        states = jnp.where(((column >= 0) & (column < columns))[:, :, None], states, 0)
        return jax.lax.psum_scatter(states, SEQUENCE, scatter_dimension=1, tiled=True)

    rows = batch_axes(jax.sharding.get_abstract_mesh(), len(hidden))
    split = PartitionSpec(rows, SEQUENCE)
    return jax.shard_map(
        of_device, in_specs=(split, PartitionSpec(rows)), out_specs=split, check_vma=False
    )(hidden, positions)


@dataclasses.dataclass(frozen=True)
class VisionLanguageObjective(LanguageModelObjective):
    """The LanguageModelObjective of a Qwen-VL: one example a row, with its pictures.

    A batch is that of `tasks.vision_language`; one without pictures lacks their arrays.

    Attributes:
      lora: additions to the language model, whose rest is frozen; None: all of it is trained.
      tower: the tower with its mergers is trained, too.
    """

    config: QwenVLConfig
    tower: bool = False

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized Qwen-VL."""
        rngs = nnx.Rngs(key)
        model = QwenVL(self.config, rngs=rngs)
        if self.lora is not None:
            add_lora(model.llama, self.lora, rngs=rngs)
        return model

    @property
    def trained(self) -> str | None:
        """See LanguageModelObjective."""
        names = "^llama/" if self.lora is None else ADDED
        if not self.tower:
            return names
        return None if self.lora is None else f"{names}|^vision/"

    def log_probs(
        self, model: QwenVL, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """See LanguageModelObjective. What follows a row's example is seen by nothing in it."""
        ids = batch["input_ids"]
        picture = ids == self.config.image_token  # [B, L]
        embedded, deepstack = model.llama.embed(jnp.where(picture, 0, ids)), None
        if "patches" in batch:
            arrays = (batch[field.name] for field in dataclasses.fields(PatchBatch))
            features = model.encode_images(PatchBatch(*arrays))  # [B * M, U, features]
            features = features.reshape(len(ids), -1, features.shape[-1])
            rows = jnp.maximum(batch["rows"], 0)[..., None]  # of a row's own pictures
            of_tokens = split_rows(jnp.take_along_axis(features, rows, axis=1))  # [B, L, features]
            embedded, deepstack = spread(embedded, of_tokens, picture)
        hidden = model.llama.encode(
            embedded, None, batch["positions"], deepstack=deepstack, dropout_key=dropout_key
        )
        return _of_targets(model.llama, hidden, batch)

    def finish(self, model: QwenVL) -> QwenVL:
        """Keeps a plain Qwen-VL of the trained model."""
        if self.lora is not None:
            model.llama = merge_lora(model.llama)
        return model


@dataclasses.dataclass(frozen=True)
class Seq2SeqObjective(_OfLayers):
    """Cross-entropy of an answer behind its prompt, as a mean over the global batch.

    Attributes:
      inputs: of its encoder: Texts, Passages or PicturedTexts.
      mean: what the mean is over. `tokens`: the tokens of all answers. `questions`: each question's
        mean over the tokens of its answer; so it is where every GPU has one question and
        DistributedDataParallel averages their gradients (FiD train_reader.py:52-62 and 194, KAT
        train_KAT.py:50-60 and 213). `places`: the tokens of all answers and the padding behind
        them, where labels hold the pad's id (mm-cot utils_data.py:222-230, model.py:458).
    """

    network: ClassVar[type[nnx.Module]] = T5

    config: T5Config
    inputs: type[Texts] = Texts
    mean: Literal["tokens", "questions", "places"] = "tokens"

    def loss(
        self, model: T5, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a batch of `data.batches.seq2seq`, and its number of targets."""
        log_probs = answer_log_probs(model, batch, dropout_key, self.inputs)  # [B, T]
        targets = self._targets(batch)
        loss, metrics = _mean_over_targets(log_probs, targets)
        if self.mean != "questions":
            return loss, metrics
        loss = -log_probs.mean(axis=1, where=targets).mean()  # over the rows: a part counts by them
        return loss, {"targets": metrics["targets"]}

    def _targets(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Marks the places of `target_ids` that are learned: bool [B, T]."""
        places = jnp.arange(batch["target_ids"].shape[1])
        learned = places < batch["target_lengths"][:, None]
        return jnp.ones_like(learned) if self.mean == "places" else learned


@dataclasses.dataclass(frozen=True)
class MultimodalObjective(Seq2SeqObjective):
    """The objective of a T5 that sees pictures."""

    network: ClassVar[type[nnx.Module]] = MultimodalT5

    config: MultimodalT5Config


def answer_log_probs(
    model: T5,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
    inputs: type[Texts] = Texts,
) -> jax.Array:
    """Log-probability of every answer's tokens, float32 [B, T]; what lies behind means nothing."""
    first, second = split_key(dropout_key, 2)
    source, targets = inputs.of(batch).encode(model, first), batch["target_ids"]
    logits = model.encoded_target_logits(*source, targets, dropout_key=second)
    return -optax.softmax_cross_entropy_with_integer_labels(logits, batch["target_ids"])
