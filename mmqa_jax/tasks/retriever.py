"""The retriever: any published encoder, with one vector or many, trained further.

The negatives may be the sources that the model itself finds in the corpus, found anew while it is
trained (ANCE, Xiong et al. 2020, "Approximate Nearest Neighbor Negative Contrastive Learning").
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.serving import RowCost
from mmqa_jax.core.typed import at_least, mapping
from mmqa_jax.data.batches import retriever as rows
from mmqa_jax.data.batches.feed import Batches
from mmqa_jax.data.batches.packing import Packed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.encoders.sentence_pooling import Prompts
from mmqa_jax.models.encoders.trained import EncoderRecord, Vectors, read_encoder_record
from mmqa_jax.models.encoders.trained_pictured import PicturedRecord, read_pictured_record
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.late_interaction import dense_retriever
from mmqa_jax.retrieval.rankings import find_candidates
from mmqa_jax.tasks import published_trunk
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.contrastive import GOLD_SOURCES, RetrievalEvaluation, ValidateRetrieval
from mmqa_jax.tasks.contrastive_losses import (
    ContrastiveObjective,
    contrastive_loss,
    cosines,
    links,
    margin_mse,
    max_sims,
    mean_max_sims,
    own_scores,
    shortened,
    teacher_divergence,
)
from mmqa_jax.weights.folder import weights_hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverLoss:
    """The section `loss`."""

    # `softmax`, cross-entropy over all sources of the global batch (InfoNCE); `margin_mse` and
    # `divergence` learn a teacher's scores of a question's own sources.
    kind: Literal["softmax", "margin_mse", "divergence"] = "softmax"
    scale: float = at_least(1e-6, 20.0)  # factor on the scores; 1 / temperature
    symmetric: bool = False  # `softmax` has the direction from sources to questions, too
    margin: float | None = None  # see contrastive_loss; None: every source is a negative
    # Scores of late interaction are divided by the number of a question's tokens (colpali_engine's
    # ColbertLoss).
    mean: bool = False
    # The loss is a sum of those of the first so many values of every vector (Kusupati et al. 2022);
    # empty: of the whole vectors.
    matryoshka: tuple[int, ...] = ()
    # The teacher's scores are divided by it, of `divergence`.
    teacher_temperature: float = at_least(1e-6, 1.0)


@dataclasses.dataclass(frozen=True)
class RetrieverObjective(ContrastiveObjective):
    """A ContrastiveObjective of a published encoder, by sentence-transformers' losses.

    A batch is that of `data.batches.retriever`.
    """

    config: EncoderRecord | PicturedRecord  # the encoder
    losses: RetrieverLoss = RetrieverLoss()  # what is learned
    # Only these additions to a decoder are trained; None: everything.
    lora: LoraConfig | None = None
    tower: bool = True  # the tower that sees pictures is trained, too

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized encoder."""
        return self.config.build(rngs=nnx.Rngs(key), lora=self.lora)

    @property
    def trained(self) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        return self.config.trained(self.lora, self.tower)

    def finish(self, model: Any) -> Any:
        """The whole trained model, without additions."""
        return model if self.lora is None else self.config.finish(model)

    def vectors(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[Any, Any]:
        """See ContrastiveObjective; there is no dropout."""

        def encode(key: jax.Array, inputs: dict[str, jax.Array]) -> jax.Array:
            return self.config.encode(model, inputs)

        key = jax.random.key(0) if dropout_key is None else dropout_key

        def of_side(name: str) -> Any:
            inputs = {
                key.removeprefix(name): array
                for key, array in batch.items()
                if key.startswith(name) and key != "source_rows"
            }
            scored = inputs.pop("scored")
            vectors = self._in_parts(encode, key, inputs)
            return (vectors, scored) if vectors.ndim == 3 else vectors

        return of_side("query_"), of_side("source_")

    def _compare(
        self, model: Any, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum of the losses of all sizes of vectors; the accuracy is of the largest."""
        total, values = jnp.zeros(()), {}
        for dim in sorted(self.losses.matryoshka) or [None]:
            sides = queries, sources
            if dim is not None:
                sides = tuple(shortened(vectors, dim) for vectors in sides)
            loss, accuracy = self._loss(*sides, batch)
            total, values = total + loss, {"accuracy": accuracy}
        return total, values

    def _loss(
        self, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        losses = self.losses
        similarity: Any = cosines
        if self.config.vectors == "token":
            similarity = mean_max_sims if losses.mean else max_sims
        if losses.kind == "softmax":
            return contrastive_loss(
                queries,
                sources,
                losses.scale,
                *links(batch),
                similarity=similarity,
                symmetric=losses.symmetric,
                margin=losses.margin,
                mesh=self.mesh,
            )
        scores = losses.scale * own_scores(similarity, queries, sources)  # [B, G]
        teacher = batch["scores"]
        accuracy = (scores.argmax(axis=1) == teacher.argmax(axis=1)).astype(jnp.float32).mean()
        if losses.kind == "margin_mse":
            return margin_mse(scores, teacher), accuracy
        divergence = teacher_divergence(scores, teacher, losses.teacher_temperature)
        # As sentence-transformers' DistillKLDivLoss with the student's temperature 1 / scale.
        return divergence / losses.scale**2, accuracy


_RECORD = "encoder"  # key of model.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverModel:
    """The section `model`."""

    # `text`, one vector of a text or page, `token`, one of each token (late interaction), or empty,
    # as `init` has them.
    vectors: Literal["", "text", "token"] = ""
    # Values of a token's vector, by a new linear layer; 0: as `init` has them.
    dim: int = at_least(0, 0)
    # Before a question and before a source, such as the task's instruction; (): those of `init`. Of
    # a Qwen3-VL-Embedding, its instructions.
    prompts: tuple[str, ...] = ()
    # Additions to a decoder, of which alone (and of a new linear layer) it is trained; None: all
    # is.
    lora: LoraConfig | None = None
    # Whether the tower that sees pictures is trained, too; of LoRA's runs as well.
    tower: Literal["trained", "frozen"] = "trained"
    # Of how the encoder is computed: dtype, remat, attention, unroll.
    changes: Mapping[str, Any] = mapping(dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningSection:
    """The section `mining`: hard negatives that the model finds in the corpus meanwhile."""

    # Steps after which they are found anew; 0: never, the negatives are the data's.
    every: int = at_least(0, 0)
    # Sources that are found for a question; those that are not gold are its negatives.
    top_k: int = at_least(1, 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retriever(published_trunk.PublishedTrunk):
    """Questions against their gold sources."""

    name: ClassVar[str] = "retriever"
    product: ClassVar[str] = "retriever"
    program: ClassVar[str] = "embed"
    limits: ClassVar[tuple[str, ...]] = ("batches.query_length", "batches.source_lengths")

    model: RetrieverModel
    batches: rows.RetrieverBatches
    pictures: published_trunk.SeenPictures = published_trunk.AS_PUBLISHED  # see SeenPictures
    inference: tasks.ServingSection
    loss: RetrieverLoss  # see RetrieverLoss
    tower_parts: int = at_least(1, 1)  # see ContrastiveObjective
    mining: MiningSection = MiningSection(every=0, top_k=20)  # see MiningSection
    validate: ValidateRetrieval | None = None

    # --- The encoder -------------------------------------------------------------------------

    @functools.cached_property
    def record(self) -> EncoderRecord | PicturedRecord:
        """The encoder: of the run if its weights are there, else of `init`."""
        if described := self.described(_RECORD):
            record = published_trunk.record_from_json(described, Path(self.folder))
            return dataclasses.replace(record, changes=tuple(sorted(self.model.changes.items())))
        prompts = self.model.prompts
        if len(prompts) not in (0, 2):
            raise UserError(
                f"config key model.prompts={prompts}: two texts were expected, before a question "
                "and before a source; give both, or ()."
            )
        options: dict[str, Any] = {
            "dim": self.model.dim or None,
            "prompts": Prompts(*prompts) if prompts else None,
            "changes": self.model.changes,
        }
        vectors: Vectors | None = self.model.vectors or None
        most = self.pictures.max_pixels
        seen = read_pictured_record(self.start, vectors, max_pixels=most, **options)
        if seen is None and (most or self.model.tower == "frozen"):
            raise UserError(
                f"config keys pictures.max_pixels={most} and model.tower={self.model.tower}: "
                f"init={self.init} sees no pictures; leave both out."
            )
        return seen or read_encoder_record(self.start, vectors, **options)

    @functools.cached_property
    def trunk(self) -> published_trunk.Trunk:
        """The encoder's kind."""
        return published_trunk.trunk_of(self.record)

    def _check(self, files: bool) -> None:
        self.check_changes()
        record, batches = self.record, self.batches
        if self.trunk.sees and len(self.batches.source_lengths) > 1:
            raise UserError(
                f"config key batches.source_lengths={self.batches.source_lengths}: an encoder that "
                "sees pictures has batches of one length; give one."
            )
        self.trunk.check(batches.query_length, max(batches.source_lengths, default=0))
        loss, dims = self.loss, self.loss.matryoshka
        if dims and not (min(dims) >= 1 and max(dims) <= record.dim):
            raise UserError(
                f"config key loss.matryoshka={dims}: the encoder's vectors have {record.dim} "
                "values; name sizes from 1 to that."
            )
        if self.model.lora is not None and not self.trunk.takes_lora:
            raise UserError(
                "config key model.lora: only decoders take additions here; set it to none to train "
                "the whole encoder."
            )
        if loss.kind == "softmax" and self.data.teacher:
            raise UserError(
                f"config key data.teacher={self.data.teacher}: the loss softmax learns no scores; "
                "set loss.kind to margin_mse or divergence, or leave it out."
            )
        if loss.kind != "softmax" and not self.is_taught:
            raise UserError(
                f"config key loss.kind={loss.kind}: learns a teacher's scores, but data.teacher "
                "and data.examples name none; name a file of `mmqa rerank`."
            )
        if loss.kind != "softmax" and not self.batches.num_negatives:
            raise UserError(
                f"config key batches.num_negatives=0: loss.kind={loss.kind} compares a question's "
                "sources; give 1 or more."
            )
        if loss.kind != "softmax" and self.mining.every:
            raise UserError(
                f"config key mining.every={self.mining.every}: mined negatives have no scores that "
                f"loss.kind={loss.kind} could learn; set it to 0."
            )
        accumulate = self.loop.accumulate
        if accumulate > 1:
            raise UserError(
                f"config key train.accumulate={accumulate}: the loss needs its whole batch; leave "
                f"it out and set tower_parts to {accumulate}."
            )

    def _parts(self) -> int:
        return self.tower_parts

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> RetrieverObjective:
        model = self.model
        tower = model.tower == "trained"
        options = {"losses": self.loss, "lora": model.lora, "tower": tower}
        return RetrieverObjective(self.record, mesh, self.tower_parts, **options)

    def batch(self) -> dict[str, Any]:
        batches = self.batches
        count, group = batches.batch_size, 1 + batches.num_negatives
        arrays = {
            "source_rows": tasks.ints(count * group),
            "positive": tasks.ints(count),
            "gold_rows": tasks.ints(count, GOLD_SOURCES),
        }
        sides = {"query": ("query", count, batches.query_length)}
        sides["source"] = "document", count * group, max(batches.source_lengths)
        for name, side in sides.items():
            arrays |= {f"{name}_{key}": x for key, x in self.trunk.shapes(*side).items()}
        if self.loss.kind != "softmax":
            arrays["scores"] = tasks.floats(count, group)
        return arrays

    # --- On data -----------------------------------------------------------------------------

    def open_tokenizer(self, folder: Path) -> Tokenizer:
        return self.in_folder(folder).trunk.open_tokenizer(folder)

    def tokenizer_kind(self) -> tuple[str, str]:
        return self.trunk.tokenizer_kind, "the model's own"

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        scored = self.loss.kind != "softmax"
        questions = self.data.chosen(questions, corpus)
        examples = self.examples(questions, corpus, scored=scored)
        trunk, batches_section = self.trunk, self.batches
        pictures = self.open_pictures(corpus) if trunk.sees else None
        texts = list(map(trunk.text_of(self.data.text_of), corpus.sources))
        asked = [question.question for question in questions]
        made = rows.RetrieverRows(
            examples,
            trunk.side(tokenizer, "query", asked, batches_section.query_length),
            trunk.side(tokenizer, "document", texts, max(batches_section.source_lengths), pictures),
            batches_section,
            scored=scored,
        )
        members, feed = self.data.members(questions), self.feed()
        if self.mining.every:
            numbers = rows.question_batches(made.numbers, feed, members)
            find = _Finder(self, corpus, tokenizer, questions, made)
            batches: Batches = MinedBatches(
                numbers, made, find, Path(self.folder) / "negatives", self.mining.every, self.seed
            )
        else:
            batches = rows.retriever_batches(made, feed, members)
        mesh, lora = make_mesh(self.mesh), self.model.lora
        objective = self.objective(tokenizer.vocab_size, mesh)
        return tasks.Recipe(
            objective,
            batches,
            functools.partial(self.record.load, folder=self.start, mesh=mesh, lora=lora),
            pictures,
            finish=None if objective.trained is None else objective.finish,
            metadata={_RECORD: self.record.as_json(), "base": weights_hash(self.start)},
        )

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return RetrievalEvaluation(self, corpus, tokenizer, model)

    # --- In use ------------------------------------------------------------------------------

    def open_pictures(self, corpus: Corpus) -> PictureStore:
        return self.trunk.open_pictures(corpus, self.open_tokenizer(Path(self.folder)))

    def embedder(self, tokenizer: Tokenizer, model: Any, devices: Mesh | None = None) -> Embedder:
        """The embedder of a run's model, which may be abstract (see Embedder.use)."""
        return self.trunk.embedder(tokenizer, model, devices, self.inference.batch_size)

    def open(self, folder: Path, tokenizer: Tokenizer) -> Embedder:
        """The trained embedder of the run in a folder."""
        mesh = self.serving_mesh()
        return self.embedder(tokenizer, self.trained_model(folder, mesh), mesh)

    def cost(self) -> RowCost:
        """The cost of a source."""
        return self.trunk.cost(max(self.batches.source_lengths))

    def planned_model(self) -> Any:
        """The encoder, of whose weights the shapes are meant."""
        return self.record.build(rngs=nnx.Rngs())

    def in_use(self) -> tasks.InUse:
        """Sources."""
        length = max(self.batches.source_lengths)

        def inputs(count: int) -> tuple[Any, ...]:
            arrays = self.trunk.shapes("document", count, length)
            del arrays["scored"]
            return (arrays,)

        def make(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
            encode = self.record.encode
            return jax.jit(lambda state, arrays: encode(nnx.merge(graphdef, state), arrays))

        return tasks.InUse(self.cost(), make, self.planned_model, inputs)


class _Finder:
    """Finds hard negatives for every example by an index of the current model's vectors."""

    def __init__(
        self,
        task: Retriever,
        corpus: Corpus,
        tokenizer: Tokenizer,
        questions: Sequence[Question],
        made: rows.RetrieverRows,
    ):
        self._task, self._corpus, self._tokenizer = task, corpus, tokenizer
        self._asked = [questions[number] for number in made.numbers]
        self._golds = [made.examples[number].golds for number in made.numbers]
        self._embedder: Embedder | None = None

    def __call__(self, model: nnx.Module) -> np.ndarray:
        """Rows int32 [examples, top_k] of what is found and not gold, -1 behind them."""
        if self._embedder is None:
            graphdef, state = nnx.split(model)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
            self._embedder = self._task.embedder(self._tokenizer, nnx.merge(graphdef, shapes))
        self._embedder.use(model)
        pictures = self._task.open_pictures(self._corpus)
        vectors = self._embedder.embed_rows(self._corpus, pictures, range(len(self._corpus)))
        index = ExactIndex(Embeddings(vectors, "", self._corpus.fingerprint))
        retriever = dense_retriever(self._corpus, self._embedder, index, pictures)
        top_k = self._task.mining.top_k
        most = min(top_k + max(map(len, self._golds)), len(self._corpus))
        rankings = find_candidates(self._asked, retriever, most)
        negatives = np.full((len(self._asked), top_k), -1, np.int32)
        for row, (ranking, golds) in enumerate(zip(rankings, self._golds, strict=True)):
            places = [self._corpus.row[name] for name in ranking.sources]
            others = [place for place in places if place not in golds][:top_k]
            negatives[row, : len(others)] = others
        return negatives


class MinedBatches:
    """Batches whose hard negatives the model finds anew every so many steps (`ModelBatches`).

    What was found at a step is kept in a file of the run: a run that goes on from a checkpoint
    reads what an earlier model found, and draws the same negatives.

    Args:
      numbers: batches of the numbers of questions.
      made: makes the arrays.
      find: model -> negatives of every example, in the order of `made.numbers`.
      folder: of the files.
      every: steps.
      seed: of the run.
    """

    def __init__(
        self,
        numbers: Batches,
        made: rows.RetrieverRows,
        find: Callable[[Any], np.ndarray],
        folder: Path,
        every: int,
        seed: int,
    ):
        self._numbers, self._made, self._find = numbers, made, find
        self._folder, self._every, self._seed = folder, every, seed
        self._place = {int(number): place for place, number in enumerate(made.numbers)}
        self._step, self._mined_at = 0, -1
        self._negatives = np.zeros((0, 0), np.int32)

    def use(self, model: nnx.Module) -> None:
        """Finds negatives by the current model where the step asks for it."""
        at = self._step - self._step % self._every
        if at == self._mined_at:
            return
        file = self._folder / f"{at:08d}.npy"
        if at == self._step:
            negatives = self._find(model)  # all processes embed their share
            if jax.process_index() == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(file, "wb") as out:
                    np.save(out, negatives)
            distributed.barrier("negatives are mined")
        self._negatives = _read_negatives(file, len(self._place))  # the same bytes everywhere
        self._mined_at = at

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Packed:
        planned = next(self._numbers)
        drawn = []
        for number, first in zip(planned["question"], planned["rows"], strict=True):
            rng = np.random.default_rng((32, self._seed, self._step, int(first)))
            mined = self._negatives[self._place[int(number)]]
            drawn.append(self._made.draw(rng, int(number), mined[mined >= 0]))
        self._step += 1
        length = self._made.lengths[-1]  # of every process
        return self._made.batch(planned["question"], np.stack(drawn), length, planned["rows"])

    def get_state(self) -> dict[str, Any]:
        return {"numbers": self._numbers.get_state(), "step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        self._numbers.set_state(state["numbers"])
        self._step, self._mined_at = int(state["step"]), -1

    def close(self) -> None:
        """Ends what makes the numbers."""
        if hasattr(self._numbers, "close"):
            self._numbers.close()


def _read_negatives(file: Path, count: int) -> np.ndarray:
    remedy = "copy the run again with its folder negatives, or train it again in a new --workdir"
    try:
        negatives = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: mined negatives cannot be read ({error}); {remedy}.") from error
    if negatives.ndim != 2 or len(negatives) != count:
        raise UserError(f"{file}: holds {negatives.shape} negatives, not {count} rows; {remedy}.")
    return negatives
