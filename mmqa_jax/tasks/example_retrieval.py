"""The retriever of examples (ours): trained by what helped a language model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.retriever import example_retrieval_batches, judged_questions
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source, source_text
from mmqa_jax.prompting.examples.library import TEXTS
from mmqa_jax.retrieval.embedder import make_encode_text
from mmqa_jax.tasks.contrastive import DualEncoderTask
from mmqa_jax.tasks.contrastive_losses import DistillationObjective
from mmqa_jax.tasks.initial_weights import dual_encoder_loader
from mmqa_jax.tasks.task import InUse, Recipe, Struct, bools, floats, ints


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedData:
    """The section `data`."""

    dir: str  # folder of `mmqa prepare`
    split: str  # of the questions
    scores: str  # folder of `mmqa judge`
    # What is embedded of a question (prompting.examples.library.TEXTS).
    text: Literal["question", "question_and_choices", "question_and_caption"]

    def text_of(self, source: Source) -> str:
        """The text of a source as the encoder takes it."""
        return source_text(source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedBatches(BatchesSection):
    """The section `batches`; `length` and `candidates`: see example_retrieval_batches."""

    length: int = at_least(3)
    candidates: int = at_least(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateExampleRetrieval:
    """The section `validate`: which of a question's candidates is nearest."""

    split: str  # of the judged questions
    # Decides on the best step: the language model's mean score of the nearest candidate, or how
    # often that is the most helpful one.
    metric: Literal["score_of_nearest", "recall@1"] = "score_of_nearest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleRetrieval(DualEncoderTask):
    """Questions against the solved questions that a language model was shown.

    `pictures`: read by the row that uses the run; the vision tower is not trained.
    """

    name: ClassVar[str] = "example_retrieval"
    product: ClassVar[str] = "retriever of examples"
    program: ClassVar[str] = "embed"
    limits: ClassVar[tuple[str, ...]] = ("batches.length",)

    data: JudgedData
    batches: JudgedBatches
    target_temperature: float = at_least(1e-3)  # see DistillationObjective
    validate: ValidateExampleRetrieval | None = None

    def lengths(self) -> Mapping[str, int]:
        return {**super().lengths(), "batches.length": self.batches.length}

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> DistillationObjective:
        return DistillationObjective(self.config(vocab_size), self.target_temperature)

    def batch(self) -> dict[str, Any]:
        batches = self.batches
        rows, candidates, length = batches.batch_size, batches.candidates, batches.length
        return {
            "query_ids": ints(rows, length),
            "query_mask": bools(rows, length),
            "candidate_ids": ints(rows, candidates, length),
            "candidate_mask": bools(rows, candidates, length),
            "scores": floats(rows, candidates),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        batches = example_retrieval_batches(
            tokenizer,
            {question.id: question for question in corpus.questions()},
            judged_questions(self.data.scores, corpus, self.data.split),
            TEXTS[self.data.text],
            self.feed(),
            length=self.batches.length,
            candidates=self.batches.candidates,
        )
        objective = self.objective(tokenizer.vocab_size)
        return Recipe(objective, batches, dual_encoder_loader(self, tokenizer))

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        """Measures what a held-out question's nearest candidate is worth to the language model."""
        assert self.validate is not None
        rows = judged_questions(self.data.scores, corpus, self.validate.split)
        names = sorted({name for row in rows for name in (row.question_id, *row.candidates)})
        place = {name: i for i, name in enumerate(names)}
        questions = {question.id: question for question in corpus.questions()}
        texts = [TEXTS[self.data.text](questions[name]) for name in names]
        embedder = self.embedder(tokenizer, model)

        def evaluate(model: nnx.Module) -> dict[str, float]:
            embedder.use(model)
            vectors = embedder.embed_questions(texts)
            scores, best = [], []
            for row in rows:
                query = vectors[place[row.question_id]]
                near = vectors[[place[name] for name in row.candidates]] @ query
                scores.append(row.scores[int(near.argmax())])
                best.append(scores[-1] == max(row.scores))
            return {"score_of_nearest": float(np.mean(scores)), "recall@1": float(np.mean(best))}

        return evaluate

    def in_use(self) -> InUse:
        """Texts: it trains on texts alone."""
        length = max(self.inference.buckets)

        def inputs(rows: int) -> tuple[Struct, ...]:
            return ints(rows, length), bools(rows, length)

        return InUse(self.cost(), make_encode_text, self.planned_model, inputs)
