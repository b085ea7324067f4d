"""The reranker: a published cross-encoder, encoder, yes/no decoder or VLM, trained further."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from mmqa_jax.data.chat_template import PictureChat
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.inference import cross_encoder
from mmqa_jax.inference.cross_encoder import Side as PairSide
from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.models.encoders.text_encoders import FAMILY as VLM
from mmqa_jax.models.encoders.text_encoders import read_vlm_config
from mmqa_jax.models.encoders.trained import RerankerRecord, cross_encoder_record
from mmqa_jax.models.encoders.trained_pictured import SeeingReranker, read_seeing_reranker
from mmqa_jax.models.llama.lora import ADDED, LoraConfig
from mmqa_jax.retrieval.rankings import read_rankings, restricted_candidates
from mmqa_jax.retrieval.text_encoder import length_buckets
from mmqa_jax.retrieval.vlm_encoder import AROUND, PicturePrompt, Slots, prompt_arrays, slots_of
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.contrastive_losses import margin_mse, teacher_divergence
from mmqa_jax.tasks.published_trunk import AS_PUBLISHED, PublishedTrunk, SeenPictures
from mmqa_jax.weights.folder import weights_hash


def pointwise(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Binary cross-entropy of every pair; labels in 0..1."""
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def listwise(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """ListNet (Cao et al. 2007, section 4.3): cross-entropy with the softmax of the labels."""
    return optax.softmax_cross_entropy(logits, jax.nn.softmax(labels)).mean()


def lambda_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """LambdaLoss with the weights NDCG-Loss2++ (Wang et al. 2018, equation 17; mu is 10).

    As sentence-transformers computes it: the mean over the pairs of a better and a worse source, in
    bits.
    """
    order = jnp.argsort(-logits, axis=1)
    logits, true = (jnp.take_along_axis(x, order, axis=1) for x in (logits, labels))  # [B, G]
    places = jnp.arange(logits.shape[1])
    discount = jnp.log2(2.0 + places)  # [G]
    gains = 2 ** jnp.maximum(true, 0) - 1
    ideal = 2 ** jnp.maximum(-jnp.sort(-labels, axis=1), 0) - 1
    best = jnp.maximum((ideal / discount).sum(axis=1), 1e-10)
    gain = gains / best[:, None]

    def apart(x: jax.Array) -> jax.Array:  # [..., G] -> differences [..., G, G]
        return x[..., :, None] - x[..., None, :]

    distance = jnp.abs(apart(places))
    step = jnp.abs(1 / discount[distance - 1] - 1 / discount[distance])
    step = jnp.where(distance > 0, step, 0)
    weights = (10 * step + jnp.abs(apart(1 / discount))) * jnp.abs(apart(gain))
    counted = apart(true) > 0
    losses = weights * jax.nn.log_sigmoid(apart(logits)) / jnp.log(2.0)
    return -losses.sum(where=counted) / jnp.maximum(counted.sum(), 1)


# By the values of the config key `loss`.
RANKING_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "pointwise": pointwise,
    "listwise": listwise,
    "lambda": lambda_loss,
    "margin_mse": margin_mse,
}


_RECORD = "reranker"  # key of model.json


@dataclasses.dataclass(frozen=True)
class RerankerObjective:
    """The relevance of a question's sources, by one of RANKING_LOSSES."""

    config: RerankerRecord | SeeingReranker  # the reranker
    kind: str  # of the loss
    group: int  # sources of a question
    # Only these additions to a decoder are trained; None: everything.
    lora: LoraConfig | None = None
    dropout: bool = True  # a cross-encoder of BERT's kind has its published dropout
    temperature: float = 1.0  # of `divergence`, the teacher's scores are divided by it
    tower: bool = True  # the tower that sees pictures is trained, too

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model."""
        return self.config.build(rngs=nnx.Rngs(key), lora=self.lora)

    def outline(self) -> nnx.Module:
        """The model of zeros."""
        return self.init(None)

    @property
    def trained(self) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        if self.lora is not None:
            return ADDED + ("|^vision/" if self.tower and self.config.kind == "pages" else "")
        return None if self.tower else "^llama/"

    def finish(self, model: Any) -> Any:
        """The whole trained model, without additions."""
        return model if self.lora is None else self.config.finish(model)

    def loss(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of B questions with G sources each, and how often the best one is first."""
        logits = self.config.logits(model, batch, dropout_key if self.dropout else None)
        logits = logits.reshape(-1, self.group)
        labels = batch["labels"]  # [B, G]
        best = jnp.take_along_axis(labels, logits.argmax(axis=1)[:, None], axis=1)[:, 0]
        accuracy = (best == labels.max(axis=1)).astype(jnp.float32).mean()
        if self.kind == "divergence":
            return teacher_divergence(logits, labels, self.temperature), {"accuracy": accuracy}
        return RANKING_LOSSES[self.kind](logits, labels), {"accuracy": accuracy}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankerModel:
    """The section `model`; `lora`, `tower` and `changes`: see tasks.retriever.RetrieverModel."""

    lora: LoraConfig | None = None
    tower: Literal["trained", "frozen"] = "trained"
    # `published`: that of the config of `init`, of BERT kinds; `none`.
    dropout: Literal["published", "none"] = "published"
    changes: Mapping[str, Any] = mapping(dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankerBatches(BatchesSection):
    """The section `batches`; `batch_size` counts questions."""

    length: int = at_least(5)  # columns of a pair, special tokens included
    num_negatives: int = at_least(1, 7)  # sources of a question beside a gold one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateReranking:
    """The section `validate`: how a question's candidates are ranked."""

    split: str  # the questions', of those with gold sources
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    # File of `mmqa search` that ranks the questions of the split; "": the candidates are a
    # question's own gold and hard negative sources.
    rankings: str = ""
    top_k: int = at_least(1, 20)  # candidates of a question
    metric: Literal["mrr", "ndcg@10", "recall@1", "recall@10"] = "mrr"  # decides on the best step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reranker(PublishedTrunk):
    """Questions with a gold source and hard negatives each, read together."""

    name: ClassVar[str] = "reranker"
    product: ClassVar[str] = "reranker"
    limits: ClassVar[tuple[str, ...]] = ("batches.length",)

    model: RerankerModel
    batches: RerankerBatches
    inference: tasks.ServingSection
    # `pointwise` (binary cross-entropy), `listwise` (ListNet), `lambda` (LambdaLoss), `margin_mse`
    # or `divergence` (KL of a teacher's softmax). Labels are 1 of gold sources and 0 of others, or
    # the scores of `data.teacher` or `data.examples`.
    loss: Literal["pointwise", "listwise", "lambda", "margin_mse", "divergence"] = "pointwise"
    # The teacher's scores are divided by it, of `divergence`.
    teacher_temperature: float = at_least(1e-6, 1.0)
    pictures: SeenPictures = AS_PUBLISHED  # see tasks.retriever.SeenPictures
    validate: ValidateReranking | None = None

    @functools.cached_property
    def record(self) -> RerankerRecord | SeeingReranker:
        """The reranker: of the run if its weights are there, else of `init`."""
        most = self.pictures.max_pixels
        if (described := self.described(_RECORD)) and "kind" in described:
            record: Any = SeeingReranker.from_json(described, Path(self.folder))
        elif described:
            record = RerankerRecord.from_json(described)
        elif text_encoders.model_type_of(self.start) == VLM:
            size = read_vlm_config(self.start).llama.vocab_size
            tokenizer = load_encoder_tokenizer(self.start, size, pairs=False)
            ids = (cross_encoder.token_of(tokenizer, word, self.start) for word in ("yes", "no"))
            record = read_seeing_reranker(self.start, *ids, max_pixels=most)
        elif most or self.model.tower == "frozen":
            raise UserError(
                f"config keys pictures.max_pixels={most} and model.tower={self.model.tower}: "
                f"init={self.init} sees no pictures; leave both out."
            )
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
        return cross_encoder.read_yes_no(
            self.start, text_encoders.model_type_of(self.start), tokenizer
        )

    def _decoder_tokenizer(self) -> Tokenizer:
        size = text_encoders.read_decoder_config(self.start).vocab_size
        return load_encoder_tokenizer(self.start, size, pairs=False)

    def _check(self, files: bool) -> None:
        self.check_changes()
        config, length = self.record.config, self.batches.length
        positions = config.llama.positions if self.sees else config.positions
        if length > positions:
            raise UserError(
                f"config key batches.length={length}: the model reads at most {positions} tokens; "
                "use fewer."
            )
        if self.sees and length < (least := slots_of(config).bucket + AROUND):
            raise UserError(
                f"config key batches.length={length}: a picture and the prompt around it take "
                f"{least} tokens; use as many or more, or a smaller pictures.max_pixels."
            )
        if self.model.lora is not None and self.record.yes_no is None:
            raise UserError(
                "config key model.lora: only decoders take additions here; set it to none to train "
                "the whole model."
            )
        if self.loss in ("margin_mse", "divergence") and not self.is_taught:
            raise UserError(
                f"config key loss={self.loss}: learns a teacher's scores, but data.teacher and "
                "data.examples name none; name a file of `mmqa rerank`."
            )

    @property
    def sees(self) -> bool:
        """Whether the model sees pictures."""
        return isinstance(self.record, SeeingReranker)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> RerankerObjective:
        model = self.model
        return RerankerObjective(
            self.record,
            self.loss,
            1 + self.batches.num_negatives,
            model.lora,
            dropout=model.dropout == "published",
            temperature=self.teacher_temperature,
            tower=model.tower == "trained",
        )

    def batch(self) -> dict[str, Any]:
        batches = self.batches
        group = 1 + batches.num_negatives
        rows_of_batch, length = batches.batch_size * group, batches.length
        shapes = {"labels": tasks.floats(batches.batch_size, group)}
        if self.sees:
            of_pair = prompt_arrays([PicturePrompt(())], self.record.config, self._slots, length, 0)
            for key, x in of_pair.items():
                shapes[f"pair_{key}"] = tasks.Struct((rows_of_batch, *x.shape[1:]), x.dtype)
            return shapes
        ids = tasks.ints(rows_of_batch, length)
        mask = tasks.bools(rows_of_batch, length)
        return shapes | {"pair_ids": ids, "pair_mask": mask, "pair_types": ids}

    @property
    def _slots(self) -> Slots:
        """Room for a picture of the question, and one of the source."""
        one_picture = slots_of(self.record.config)
        return one_picture._replace(count=2 * one_picture.count)

    def read_pairs(self, tokenizer: Tokenizer) -> Tokenizer | cross_encoder.YesNoPairs:
        """What makes tokens of pairs."""
        if self.record.yes_no is None:
            return tokenizer
        return cross_encoder.YesNoPairs(tokenizer, self._prompt(tokenizer))

    def open_tokenizer(self, folder: Path) -> Tokenizer:
        task = self.in_folder(folder)
        record = task.record
        size = record.config.llama.vocab_size if task.sees else record.config.vocab_size
        return load_encoder_tokenizer(folder, size, pairs=record.yes_no is None)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        questions = self.data.chosen(questions, corpus)
        examples = self.examples(questions, corpus, scored=self.is_taught)
        lora, mesh, pictures = self.model.lora, make_mesh(self.mesh), None
        if self.sees:
            pictures = cross_encoder.reranked_pictures(corpus, self.record.config)
            chat = PictureChat(self.record.folder, tokenizer, self.record.config.image_token)
            pairs: Any = _SeenPairs(self, corpus, chat, tokenizer.pad_id, pictures)
        else:
            pairs = _TextPairs(self, corpus, self.read_pairs(tokenizer))
        made = _PairRows(self, len(corpus), questions, examples, pairs)
        objective = self.objective(tokenizer.vocab_size, mesh)
        return tasks.Recipe(
            objective,
            made.batches(self.data.members(questions)),
            functools.partial(self.record.load, folder=self.start, mesh=mesh, lora=lora),
            pictures,
            finish=None if objective.trained is None else objective.finish,
            metadata={_RECORD: self.record.as_json(), "base": weights_hash(self.start)},
        )

    def reranker(
        self, corpus: Corpus, tokenizer: Tokenizer, model: Any
    ) -> cross_encoder.CrossEncoderReranker | cross_encoder.VLMReranker:
        """The reranker of a run's model, which may be abstract, over a corpus."""
        size, longest = self.inference.batch_size, self.batches.length
        if not self.sees:
            pairs = self.read_pairs(tokenizer)
            return cross_encoder.CrossEncoderReranker(
                corpus, model, pairs, longest=longest, batch_size=size
            )
        record = self.record
        return cross_encoder.VLMReranker(
            corpus,
            model,
            PictureChat(record.folder, tokenizer, record.config.image_token),
            pad_token=tokenizer.pad_id,
            lengths=length_buckets(longest, longest),
            batch_size=size,
        )

    def open(
        self, folder: Path, corpus: Corpus, tokenizer: Tokenizer
    ) -> cross_encoder.CrossEncoderReranker | cross_encoder.VLMReranker:
        """The trained reranker of the run in a folder, over a corpus."""
        return self.reranker(corpus, tokenizer, self.trained_model(folder, self.serving_mesh()))

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return RerankingEvaluation(self, corpus, tokenizer, model)

    def export(self, folder: Path, out: Path) -> None:
        """Writes the trained model of the run in a folder as transformers has it."""
        super().export(folder, out)
        if self.record.yes_no is not None and not self.sees:  # what a decoder is asked
            for file in (*self.start.glob("*.json"), *self.start.glob("*.jinja")):
                if not (out / file.name).exists() and "index" not in file.name:
                    shutil.copyfile(file, out / file.name)


class RerankingEvaluation:
    """How a reranker orders the candidates of the section `validate`."""

    def __init__(self, task: Reranker, corpus: Corpus, tokenizer: Tokenizer, model: nnx.Module):
        section = task.validate
        assert section is not None
        # That are judged.
        self.questions = tasks.scored_questions(
            task, corpus, lambda q: bool(q.positives), "gold sources"
        )
        if section.rankings:
            split = [question.id for question in corpus.questions(section.split)]
            ranked = {x.question_id: x for x in read_rankings(section.rankings, split, corpus.row)}
            candidates = [ranked[question.id] for question in self.questions]
        else:
            candidates = restricted_candidates(self.questions, corpus)
        self._candidates = [
            Ranking(x.question_id, x.sources[: section.top_k], x.scores[: section.top_k])
            for x in candidates
        ]
        pool = [corpus.row[name] for x in self._candidates for name in x.sources]
        self.reranker = task.reranker(tasks.part_of(corpus, pool), tokenizer, model)  # scores them

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self.reranker.use(model)
        ranked = self.reranker.score(self.questions, self._candidates)
        gold = [question.positives for question in self.questions]
        scores = score_rankings(gold, [x.sources for x in ranked], (1, 10)).scores
        return {name: scores[name] for name in ("mrr", "ndcg@10", "recall@1", "recall@10")}


class _PairRows:
    """Makes batches of pairs: those of `pairs`, and labels float32 [B, G]; index and truncated as
    of `RetrieverRows`.

    Args:
      sources: how many there are.
      pairs: makes the arrays of pairs (question, row of the corpus), and counts tokens lost.
    """

    def __init__(
        self,
        task: Reranker,
        sources: int,
        questions: Sequence[Question],
        examples: Mapping[int, rows.RetrievalExample],
        pairs: _TextPairs | _SeenPairs,
    ):
        self._task, self._sources, self._questions = task, sources, questions
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
            rows.draw_sources(rng, self._examples[n], count, self._sources, scored=taught)
            for n in self._numbers
        ]
        buckets = np.zeros(len(drawn), np.int64)
        return {"question": self._numbers, "rows": np.stack(drawn), "bucket": buckets}

    def _make(self, planned: PlannedBatch, table: Table) -> Packed:
        count, group = table["rows"].shape
        asked = [self._questions[number] for number in table["question"] for _ in range(group)]
        arrays, lost = self._pairs.arrays(asked, table["rows"].ravel())
        labels = np.zeros((count, group), np.float32)
        for row, number in enumerate(table["question"]):
            example = self._examples[number]
            if self._task.is_taught:
                labels[row] = [example.scores[source] for source in table["rows"][row]]
            else:
                labels[row] = np.isin(table["rows"][row], example.golds)
        return {
            **{f"pair_{key}": array for key, array in arrays.items()},
            "labels": labels,
            "index": table["question"].astype(np.int32),
            "truncated": lost.reshape(count, group).sum(axis=1, dtype=np.int32),
        }


class _TextPairs:
    """Pairs of texts: ids and types int32, mask bool [N, L]."""

    def __init__(self, task: Reranker, corpus: Corpus, pairs: Tokenizer | cross_encoder.YesNoPairs):
        self._task, self._corpus, self._pairs = task, corpus, pairs

    def arrays(
        self, asked: Sequence[Question], sources: Sequence[int]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        data, length = self._task.data, self._task.batches.length
        texts = [
            (question.question, data.text_of(self._corpus.sources[row]))
            for question, row in zip(asked, sources, strict=True)
        ]
        ids = np.full((len(texts), length), self._pairs.pad_id, np.int32)
        mask, types = np.zeros((len(texts), length), bool), np.zeros((len(texts), length), np.int32)
        lost = np.zeros(len(texts), np.int32)
        for row, tokens in enumerate(self._pairs.encode_pairs(texts)):
            pair, of_type = self._pairs.pair(*tokens, length)
            ids[row, : len(pair)], mask[row, : len(pair)] = pair, True
            types[row, : len(pair)] = of_type
            lost[row] = self._pairs.pair_length(*map(len, tokens)) - len(pair)
        return {"ids": ids, "mask": mask, "types": types}, lost


@dataclasses.dataclass
class _SeenPairs:
    """Prompts of pairs with the pictures of both (`prompt_arrays`)."""

    task: Reranker
    corpus: Corpus
    chat: PictureChat
    pad: int
    pictures: PictureStore

    def arrays(
        self, asked: Sequence[Question], sources: Sequence[int]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        task, config = self.task, self.task.record.config
        length, text_of = task.batches.length, task.data.text_of
        self.pictures.look_ahead(sources)
        pairs = [
            (
                PairSide(question.question, self.pictures.question_pixels(question)),
                PairSide(text_of(self.corpus.sources[row]), self.pictures.pixels(row)),
            )
            for question, row in zip(asked, sources, strict=True)
        ]
        prompts, whole = (
            cross_encoder.pair_prompts(self.chat, config, pairs, longest=longest)
            for longest in (length, 1 << 30)
        )
        lost = [len(x.tokens) - len(y.tokens) for x, y in zip(whole, prompts, strict=True)]
        arrays = prompt_arrays(prompts, config, task._slots, length, self.pad)
        return arrays, np.array(lost, np.int32)
