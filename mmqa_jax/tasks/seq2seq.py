"""A T5 learns to answer: a question's text in, its answer out.

UnifiedQA is of this kind; the loss here is transformers' T5's, the mean over the tokens of a
batch's answers. KAT's and Multimodal-CoT's are other tasks'.

Prompts are those of the templates in papers/templates: `seq2seq.question` is the question alone,
`seq2seq.unifiedqa` UnifiedQA's, `rmr.rationale` ScienceQA's with the rationale in front of the
answer.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.typed import changes_of
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.packing import Packed
from mmqa_jax.data.batches.texts import PairSize, TokenExample, pair_batch, seq2seq_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.models.common.layers import split_key
from mmqa_jax.models.t5.config import MultimodalT5Config, T5Config
from mmqa_jax.models.t5.network import T5, MultimodalT5, Texts
from mmqa_jax.prompting.examples.training import encode_text
from mmqa_jax.tasks import solved_questions
from mmqa_jax.tasks.base_llm import base_loader, check_vocabulary, model_config
from mmqa_jax.tasks.language_model import mean_over_targets
from mmqa_jax.tasks.task import Recipe, ints
from mmqa_jax.training.state import OfLayers


@dataclasses.dataclass(frozen=True)
class Seq2SeqObjective(OfLayers):
    """Cross-entropy of an answer behind its prompt, as a mean over the global batch."""

    network: ClassVar[type[nnx.Module]] = T5

    config: T5Config
    inputs: type[Texts] = Texts  # of its encoder: Texts, Passages or PicturedTexts
    # What the mean is over. `tokens`: the tokens of all answers. `questions`: each question's mean
    # over the tokens of its answer; so it is where every GPU has one question and
    # DistributedDataParallel averages their gradients (FiD train_reader.py:52-62 and 194, KAT
    # train_KAT.py:50-60 and 213). `places`: the tokens of all answers and the padding behind them,
    # where labels hold the pad's id (mm-cot utils_data.py:222-230, model.py:458).
    mean: Literal["tokens", "questions", "places"] = "tokens"

    def loss(
        self, model: T5, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a batch of `data.batches.texts`, and its number of targets."""
        log_probs = answer_log_probs(model, batch, dropout_key, self.inputs)  # [B, T]
        targets = self._targets(batch)
        loss, metrics = mean_over_targets(log_probs, targets)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqSection:
    """The section `model`; `changes`: fields of T5Config that differ from the base's; from scratch,
    its sizes."""

    changes: Mapping[str, Any] = changes_of(T5Config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBatches(BatchesSection):
    """The section `batches`."""

    lengths: tuple[int, ...]  # of prompts, ascending: each is padded to the first that holds it
    targets: int  # tokens of an answer, its end token included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq(solved_questions.SolvedQuestions):
    """A T5, Flan-T5 or mT5 on solved questions, with options or without.

    It begins at any T5 that `mmqa prompt --model` takes, or at scratch.
    """

    name: ClassVar[str] = "seq2seq"
    product: ClassVar[str] = "encoder-decoder"
    architecture: ClassVar[str] = "t5"
    length_key: ClassVar[str] = "batches.lengths"
    unsolved: ClassVar[str] = "a known answer"

    model: Seq2SeqSection
    batches: PairBatches

    @property
    def size(self) -> PairSize:
        return PairSize(self.batches.lengths[-1], self.batches.targets)

    @staticmethod
    def is_solved(question: Question) -> bool:
        return question.answer_index is not None or bool(question.answers)

    def _check(self, files: bool) -> None:
        self.check_lengths(self.batches.lengths)
        self.check_targets(self.batches.targets)
        super()._check(files)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> Seq2SeqObjective:
        return Seq2SeqObjective(model_config(self, vocab_size))

    def batch(self) -> dict[str, Any]:
        rows, size = self.batches.batch_size, self.size
        return {
            "input_ids": ints(rows, size.length),
            "prompt_lengths": ints(rows),
            "target_ids": ints(rows, size.targets),
            "target_lengths": ints(rows),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_vocabulary(self, objective.config, tokenizer)
        examples = self.make_examples(
            corpus, self.data.chosen(questions, corpus), encode_text(tokenizer)
        )
        batches = seq2seq_batches(
            examples.versions,
            examples.shares,
            self.feed(),
            lengths=self.batches.lengths,
            targets=self.batches.targets,
            members=self.data.members(examples.questions),
        )
        return Recipe(objective, batches, base_loader(self), metadata=self.metadata(tokenizer))

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        def make_score(examples: Sequence[TokenExample]) -> solved_questions.Score:
            def pack(rows: solved_questions.Rows) -> tuple[Packed, np.ndarray]:
                members = [examples[i] for row in rows for i in row]
                batch = pair_batch(members, self.size, len(rows))
                places = np.arange(self.size.targets) < batch["target_lengths"][:, None]
                return batch, places.astype(np.int64)

            rows = [[number] for number in range(len(examples))]
            return solved_questions.row_scores(
                model, rows, self.inference.batch_size, pack, answer_log_probs
            )

        return solved_questions.OptionLikelihood(self, corpus, encode_text(tokenizer), make_score)
