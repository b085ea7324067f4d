"""Source selection (WebQA 6.1): is this source relevant to the question? VLP's source head."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import RowCost
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.atlas.reader import AtlasPackingConfig
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.source_reader import PairSampling, rerank_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.evaluation.webqa import CAPS, SELECTIONS, Cap, Select, tune_threshold
from mmqa_jax.inference.reranker import CachedReranker, Reranker, make_relevance
from mmqa_jax.models.vlp.atlas_reader import AtlasVLPModel
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from mmqa_jax.retrieval.rankings import restricted_candidates
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.vlp import AtlasVLPTask, RerankObjective
from mmqa_jax.weights.record import read_metadata

_PAPERS_THRESHOLD = 0.2


@dataclasses.dataclass(frozen=True)
class SelectorModel(AtlasVLPModel):
    """VLP, or a model that reads question and source apart (ours)."""

    joint_layers: int | None = None  # the last layers that see both; None: all, VLP itself
    # Token type of the question's words that occur in the source, with joint_layers.
    match_type: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankBatches(BatchesSection, PairSampling):
    """The section `batches`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateSelection:
    """The section `validate`: each question's own candidates."""

    split: str  # the questions', of those with gold sources
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    # Decides on the best step; `source_f1` is that of the best threshold.
    metric: Literal["source_f1", "source_f1@0.2"]
    cap: Cap = "none"  # on the number of candidates (evaluation.webqa.CAPS)
    select: Select = "best"  # limits on the number of cited sources (evaluation.webqa.SELECTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerank(AtlasVLPTask):
    """P(relevant) of one source at a time (WebQA equation 3)."""

    name: ClassVar[str] = "rerank"
    product: ClassVar[str] = "source selector"
    unit: ClassVar[str] = "pairs"
    program: ClassVar[str] = "rerank"

    data: tasks.MixedData
    model: SelectorModel
    batches: RerankBatches
    validate: ValidateSelection | None = None

    def sides(self, config: VLPConfig) -> TwoSides | None:
        """How the model encodes question and source separately; None if it does not."""
        model = self.model
        return two_sides(model.joint_layers, model.match_type, self.packing_config(), config)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> RerankObjective:
        config = self.vlp_config(vocab_size)
        return RerankObjective(config, self.sides(config))

    def _check(self, files: bool) -> None:
        super()._check(files)
        self.sides(self.vlp_config(self.vocabulary_size()))

    def batch(self) -> dict[str, Any]:
        rows = self.batches.batch_size
        return {
            "inputs": self.vlp_inputs(rows),
            "labels": tasks.ints(rows),
            "weights": tasks.floats(rows),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        reader = self.source_reader(corpus, tokenizer)
        questions = self.data.chosen(questions, corpus)
        batches = rerank_batches(
            reader,
            questions,
            self.packer(tokenizer),
            self.feed(VLPInputs),
            self.batches,
            self.data.members(questions),
        )
        objective = self.objective(tokenizer.vocab_size)
        facts = self.regions_facts()
        return tasks.Recipe(objective, batches, self.loader(tokenizer), reader, metadata=facts)

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return SelectionEvaluation(self, corpus, tokenizer, model)

    def cost(self) -> RowCost:
        """The cost of a pair of the bucket with the most columns."""
        return RowCost("pairs", 32, 128, self.vlp_bytes())

    def in_use(self) -> tasks.InUse:
        def inputs(rows: int) -> tuple[VLPInputs]:
            return (self.vlp_inputs(rows, inference=True),)

        return tasks.InUse(self.cost(), make_relevance, self.planned_model, inputs)

    def reranker(
        self, corpus: Corpus, tokenizer: Tokenizer, model: nnx.Module
    ) -> Reranker | CachedReranker:
        """The reranker of a run's model, which may be abstract: over pairs or cached sources."""
        kind = CachedReranker if isinstance(model, TwoSidedVLP) else Reranker
        return kind(self, corpus, tokenizer, model)


class SelectionEvaluation:
    """Source F1 of a selector among each question's own candidates."""

    def __init__(self, task: Rerank, corpus: Corpus, tokenizer: Tokenizer, model: nnx.Module):
        section = task.validate
        assert section is not None
        # That are judged.
        self.questions = tasks.scored_questions(
            task, corpus, lambda q: bool(q.positives), "gold sources"
        )
        candidates = [row for question in self.questions for row in corpus.candidates(question)]
        self.pool = tasks.part_of(corpus, candidates)  # their candidates
        self.reranker = task.reranker(self.pool, tokenizer, model)  # scores them
        self._candidates = restricted_candidates(self.questions, self.pool, CAPS[section.cap])
        self._selection = SELECTIONS[section.select]

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        self.reranker.use(model)
        relevance = self.reranker.score(self.questions, self._candidates)
        threshold, sweep = tune_threshold(self.questions, relevance, self._selection)
        return {
            "source_f1": sweep[threshold],
            f"source_f1@{_PAPERS_THRESHOLD}": sweep[_PAPERS_THRESHOLD],
            "threshold": threshold,
        }


def two_sides(
    joint_layers: int | None, match_type: int | None, packing: AtlasPackingConfig, config: VLPConfig
) -> TwoSides | None:
    """How a model encodes question and source separately; None if it does not.

    Args:
      joint_layers, match_type: see SelectorModel.
      packing, config: of the same task.
    """
    if joint_layers is None:
        if match_type is not None:
            raise UserError(
                f"config key model.match_type={match_type}: marks the question's words "
                "only if model.joint_layers is set; set it too, or use packing.match_types."
            )
        return None
    if packing.match_types:
        raise UserError(
            f"config key packing.match_types={packing.match_types}: marks words of the source that "
            "occur in the question, so a source could not be encoded without its question; use "
            "model.match_type instead."
        )
    first, second = packing.segments
    if second in ((first, 2, 3) if packing.per_source else (first,)):
        raise UserError(
            f"config key packing.segments={packing.segments}: sources have tokens of type {second} "
            "too, but the question needs a token type of its own; use (4, 5)."
        )
    sides = TwoSides(joint_layers, second, match_type)
    sides.check(config)
    return sides


def load_selector(
    folder: str | Path, options: tasks.Options | None = None, *, one_shape: bool = False
) -> tuple[Rerank, Tokenizer, VLP]:
    """Loads task, tokenizer and model of a rerank run; see `load_reranker` for the arguments."""
    task, tokenizer = tasks.read_run(folder, (Rerank,), options)
    task = task.in_one_shape() if one_shape else task
    return task, tokenizer, task.open_vlp(folder, tokenizer, one_shape=one_shape)


def load_reranker(
    folder: str | Path,
    corpus: Corpus,
    options: tasks.Options | None = None,
    *,
    one_shape: bool = False,
) -> Reranker | CachedReranker:
    """The reranker of a rerank run: over pairs or, with `joint_layers`, over cached sources.

    Args:
      options: of the section `inference`, in place of the run's own.
      one_shape: for a few pairs, see VLPTask.in_one_shape.
    """
    task, tokenizer, vlp = load_selector(folder, options, one_shape=one_shape)
    sides = task.sides(vlp.config)
    return task.reranker(corpus, tokenizer, vlp if sides is None else TwoSidedVLP.of(vlp, sides))


# Opens what selects sources: a run of a source head, or a published cross-encoder.


def open_reranker(model: str | Path, corpus: Corpus, options: tasks.Options | None = None) -> Any:
    """The reranker that a path or name means, over a corpus.

    Args:
      model: a run of rerank or reranker, or a published cross-encoder, Qwen3-Reranker or
        Qwen3-VL-Reranker: its folder, or ORG/NAME in the Hugging Face cache.
      options: `batch_size` and `mesh`, in place of those of the run's `inference`.
    """
    from mmqa_jax.models.encoders.text_encoders import published_folder

    if folder := published_folder(model):
        from mmqa_jax.inference.cross_encoder import open_cross_encoder

        return open_cross_encoder(folder, corpus, **(options or {}))
    from mmqa_jax.tasks.reranker import Reranker as PublishedReranker

    if read_metadata(model).get("task") == PublishedReranker.name:
        task, tokenizer = tasks.read_run(model, (PublishedReranker,), options)
        return task.open(Path(model), corpus, tokenizer)
    return load_reranker(model, corpus, options)
