"""The reranker of texts: a published cross-encoder, encoder or yes/no decoder, trained further."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.typed import at_least, mapping
from mmqa_jax.data.batches import retriever as rows
from mmqa_jax.data.batches.feed import (
    Batches,
    BatchesSection,
    PlannedBatch,
    Table,
    feed_batches,
    mixed,
)
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.inference.cross_encoder import CrossEncoderReranker, YesNoPairs, read_yes_no
from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.models.encoders.trained_reranker import RerankerRecord, cross_encoder_record
from mmqa_jax.models.llama.lora import ADDED, LoraConfig
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.published_trunk import PublishedTrunk
from mmqa_jax.tasks.ranking_losses import RANKING_LOSSES
from mmqa_jax.weights.folder import weights_hash

_RECORD = "reranker"  # key of model.json


@dataclasses.dataclass(frozen=True)
class RerankerObjective:
    """The relevance of a question's sources, by a loss of `ranking_losses`.

    Attributes:
      config: the reranker.
      kind: of the loss.
      group: sources of a question.
      lora: only these additions to a decoder are trained; None: everything.
    """

    config: RerankerRecord
    kind: str
    group: int
    lora: LoraConfig | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model."""
        return self.config.build(rngs=nnx.Rngs(key), lora=self.lora)

    def outline(self) -> nnx.Module:
        """The model of zeros."""
        return self.init(None)

    @property
    def trained(self) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        return None if self.lora is None else ADDED

    def loss(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of B questions with G sources each, and how often the best one is first."""
        logits = model(batch["pair_ids"], batch["pair_mask"], batch["pair_types"]).reshape(
            -1, self.group
        )
        labels = batch["labels"]  # [B, G]
        best = jnp.take_along_axis(labels, logits.argmax(axis=1)[:, None], axis=1)[:, 0]
        accuracy = (best == labels.max(axis=1)).astype(jnp.float32).mean()
        return RANKING_LOSSES[self.kind](logits, labels), {"accuracy": accuracy}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankerModel:
    """The section `model`; `lora` and `changes`: see tasks.retriever.RetrieverModel."""

    lora: LoraConfig | None = None
    changes: Mapping[str, Any] = mapping(dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankerBatches(BatchesSection):
    """The section `batches`; `batch_size` counts questions.

    Attributes:
      length: columns of a pair, special tokens included.
      num_negatives: sources of a question beside a gold one.
    """

    length: int = at_least(5)
    num_negatives: int = at_least(1, 7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reranker(PublishedTrunk):
    """Questions with a gold source and hard negatives each, read together.

    Attributes:
      loss: `pointwise` (binary cross-entropy), `listwise` (ListNet), `lambda` (LambdaLoss) or
        `margin_mse`. Labels are 1 of gold sources and 0 of others, or the scores of `data.teacher`
        or `data.examples`.
    """

    name: ClassVar[str] = "reranker"
    product: ClassVar[str] = "reranker"
    limits: ClassVar[tuple[str, ...]] = ("batches.length",)

    model: RerankerModel
    batches: RerankerBatches
    inference: tasks.ServingSection
    loss: Literal["pointwise", "listwise", "lambda", "margin_mse"] = "pointwise"

    @functools.cached_property
    def record(self) -> RerankerRecord:
        """The reranker: of the run if its weights are there, else of `init`."""
        if described := self.described(_RECORD):
            record = RerankerRecord.from_json(described)
        elif self._is_decoder:
            prompt = self._prompt(self._decoder_tokenizer())
            published = (self.start / text_encoders.CONFIG).read_text(encoding="utf-8")
            record = RerankerRecord(published, (prompt.yes, prompt.no))
        else:
            record = cross_encoder_record(self.start)
        return dataclasses.replace(record, changes=tuple(sorted(self.model.changes.items())))

    @property
    def _is_decoder(self) -> bool:
        kind = text_encoders.model_type_of(self.start)
        return kind in text_encoders.DECODERS and not text_encoders.is_classifier(self.start)

    def _prompt(self, tokenizer: Tokenizer) -> Any:
        return read_yes_no(self.start, text_encoders.model_type_of(self.start), tokenizer)

    def _decoder_tokenizer(self) -> Tokenizer:
        size = text_encoders.read_decoder_config(self.start).vocab_size
        return load_encoder_tokenizer(self.start, size, pairs=False)

    def _check(self, files: bool) -> None:
        self.check_changes()
        config = self.record.config
        if self.batches.length > config.positions:
            raise UserError(
                f"config key batches.length={self.batches.length}: the model reads at most "
                f"{config.positions} tokens; use fewer."
            )
        if self.model.lora is not None and self.record.yes_no is None:
            raise UserError(
                "config key model.lora: only decoders take additions here; set it to none to train "
                "the whole model."
            )
        if self.loss == "margin_mse" and not self.is_taught:
            raise UserError(
                "config key loss=margin_mse: learns a teacher's scores, but data.teacher and "
                "data.examples name none; name a file of `mmqa rerank`."
            )

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> RerankerObjective:
        group = 1 + self.batches.num_negatives
        return RerankerObjective(self.record, self.loss, group, self.model.lora)

    def batch(self) -> dict[str, Any]:
        batches = self.batches
        group = 1 + batches.num_negatives
        shape = batches.batch_size * group, batches.length
        return {
            "pair_ids": tasks.ints(*shape),
            "pair_mask": tasks.bools(*shape),
            "pair_types": tasks.ints(*shape),
            "labels": tasks.floats(batches.batch_size, group),
        }

    def read_pairs(self, tokenizer: Tokenizer) -> Tokenizer | YesNoPairs:
        """What makes tokens of pairs."""
        if self.record.yes_no is None:
            return tokenizer
        return YesNoPairs(tokenizer, self._prompt(tokenizer))

    def open_tokenizer(self, folder: Path) -> Tokenizer:
        task = self.in_folder(folder)
        return task.read_tokenizer(folder, lowercase=False, pairs=task.record.yes_no is None)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        questions = self.data.chosen(questions, corpus)
        examples = self.examples(questions, corpus, scored=self.is_taught)
        pairs, lora = self.read_pairs(tokenizer), self.model.lora
        made = _PairRows(self, corpus, questions, examples, pairs)
        mesh = make_mesh(self.mesh)
        return tasks.Recipe(
            self.objective(tokenizer.vocab_size, mesh),
            made.batches(self.data.members(questions)),
            functools.partial(self.record.load, folder=self.start, mesh=mesh, lora=lora),
            finish=self.record.finish if lora is not None else None,
            metadata={_RECORD: self.record.as_json(), "base": weights_hash(self.start)},
        )

    def open(self, folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> CrossEncoderReranker:
        """The trained reranker of the run in a folder, over a corpus."""
        model = self.trained_model(folder, self.serving_mesh())
        size = self.inference.batch_size
        pairs = self.read_pairs(tokenizer)
        return CrossEncoderReranker(
            corpus, model, pairs, longest=self.batches.length, batch_size=size
        )

    def export(self, folder: Path, out: Path) -> None:
        """Writes the trained model of the run in a folder as transformers has it."""
        super().export(folder, out)
        if self.record.yes_no is not None:  # what a decoder is asked
            for file in (*self.start.glob("*.json"), *self.start.glob("*.jinja")):
                if not (out / file.name).exists() and "index" not in file.name:
                    shutil.copyfile(file, out / file.name)


class _PairRows:
    """Makes batches of pairs: pair_ids and pair_types int32, pair_mask bool [B * G, L], labels
    float32 [B, G]; index and truncated as of `RetrieverRows`."""

    def __init__(
        self,
        task: Reranker,
        corpus: Corpus,
        questions: Sequence[Question],
        examples: Mapping[int, rows.RetrievalExample],
        pairs: Tokenizer | YesNoPairs,
    ):
        self._task, self._corpus, self._questions = task, corpus, questions
        self._examples, self._pairs = examples, pairs
        self._numbers = np.array(list(examples))

    def batches(self, members: Sequence[int]) -> Batches:
        """The batches of the run."""
        feed, shapes = self._task.feed(), [Bucket(0, self._task.batches.length)]
        return feed_batches(mixed(self._sample, members, feed), shapes, self._make, feed)

    def _sample(self, epoch: int) -> Table:
        rng = np.random.default_rng((33, self._task.seed, epoch))
        count, taught = self._task.batches.num_negatives, self._task.is_taught
        drawn = [
            rows.draw_sources(rng, self._examples[n], count, len(self._corpus), scored=taught)
            for n in self._numbers
        ]
        buckets = np.zeros(len(drawn), np.int64)
        return {"question": self._numbers, "rows": np.stack(drawn), "bucket": buckets}

    def _make(self, planned: PlannedBatch, table: Table) -> Packed:
        data, length = self._task.data, self._task.batches.length
        count, group = table["rows"].shape
        texts = [
            (self._questions[number].question, data.text_of(self._corpus.sources[row]))
            for number, of_question in zip(table["question"], table["rows"], strict=True)
            for row in of_question
        ]
        ids = np.full((len(texts), length), self._pairs.pad_id, np.int32)
        mask, types = np.zeros((len(texts), length), bool), np.zeros((len(texts), length), np.int32)
        lost = np.zeros(len(texts), np.int32)
        for row, tokens in enumerate(self._pairs.encode_pairs(texts)):
            pair, of_type = self._pairs.pair(*tokens, length)
            ids[row, : len(pair)], mask[row, : len(pair)] = pair, True
            types[row, : len(pair)] = of_type
            lost[row] = self._pairs.pair_length(*map(len, tokens)) - len(pair)
        labels = np.zeros((count, group), np.float32)
        for row, number in enumerate(table["question"]):
            example = self._examples[number]
            if self._task.is_taught:
                labels[row] = [example.scores[source] for source in table["rows"][row]]
            else:
                labels[row] = np.isin(table["rows"][row], example.golds)
        return {
            "pair_ids": ids,
            "pair_mask": mask,
            "pair_types": types,
            "labels": labels,
            "index": table["question"].astype(np.int32),
            "truncated": lost.reshape(count, group).sum(axis=1, dtype=np.int32),
        }
