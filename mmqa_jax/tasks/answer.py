"""Answers in words (WebQA 6.2): VLP predicts the masked tokens of the answer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import RowCost, value_bytes
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.atlas.reader import AtlasMasking
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.source_reader import AnswerSampling, answer_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.webqa import has_keywords
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.evaluation.webqa import Normalizer, score_answers
from mmqa_jax.inference.reader import Reader
from mmqa_jax.models.vlp.network import VLPInputs
from mmqa_jax.retrieval.rankings import check_gold, gold_ranking
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks import vlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerData(tasks.DataSection):
    """The section `data`; `route_by_category`: see answer_batches."""

    route_by_category: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerBatches(BatchesSection, AnswerSampling):
    """The section `batches`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerServing(vlp.AtlasServing):
    """Beam search, see decoding.masked_lm.beam_search."""

    num_beams: int = at_least(1)
    max_new_tokens: int = at_least(1)
    length_penalty: float
    only_best: bool = False  # the other beams are not exact
    no_repeat_ngram: int = 0  # words that may not occur twice; 0: any may


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateAnswers:
    """The section `validate`."""

    split: str  # the questions', of those with keywords
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    metric: Literal["webqa_acc/no_lemma"]  # decides on the best step
    # 1 is greedy decoding; None: as `inference.num_beams`.
    num_beams: int | None = at_least(1, None)
    # `oracle` answers from the gold sources, `none` from the question alone.
    sources: Literal["oracle", "none"] = "oracle"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(vlp.AtlasVLPTask):
    """The reader."""

    name: ClassVar[str] = "answer"
    product: ClassVar[str] = "reader"
    program: ClassVar[str] = "answer"

    data: AnswerData
    masking: AtlasMasking
    batches: AnswerBatches
    inference: AnswerServing
    questions_per_mean: int | None = at_least(1, None)  # see AnswerObjective
    validate: ValidateAnswers | None = None

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> vlp.AnswerObjective:
        return vlp.AnswerObjective(self.vlp_config(vocab_size), self.questions_per_mean)

    def _check(self, files: bool) -> None:
        ngram, most = self.inference.no_repeat_ngram, self.inference.max_new_tokens
        if ngram and not 2 <= ngram <= most:
            raise UserError(
                f"config key inference.no_repeat_ngram={ngram}: 0 (words may repeat) or 2 to "
                f"inference.max_new_tokens = {most} was expected; change one of them."
            )
        super()._check(files)
        accumulate, together = self.loop.accumulate, self.questions_per_mean
        if together and self.batches.batch_size % (accumulate * together):
            raise UserError(
                f"config key questions_per_mean={together}: batches.batch_size="
                f"{self.batches.batch_size} in train.accumulate={accumulate} parts was expected to "
                "be a multiple of it; change one of them."
            )

    def batch(self) -> dict[str, Any]:
        rows, most = self.batches.batch_size, self.masking.max_pred
        return {
            "inputs": vlp.with_probes(self.vlp_inputs(rows), self.masking),
            "masked_ids": tasks.ints(rows, most),
            "masked_positions": tasks.ints(rows, most),
            "masked_weights": tasks.floats(rows, most),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        reader = self.source_reader(corpus, tokenizer)
        batches = answer_batches(
            reader,
            self.data.chosen(questions, corpus),
            self.packer(tokenizer),
            self.masking,
            self.feed(vlp.inputs_class(self.masking)),
            self.batches,
            route_by_category=self.data.route_by_category,
        )
        objective = self.objective(tokenizer.vocab_size)
        facts = self.regions_facts()
        return tasks.Recipe(objective, batches, self.loader(tokenizer), reader, metadata=facts)

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return AnswerEvaluation(self, corpus, tokenizer, model)

    def cost(self) -> RowCost:
        """The cost of a question, with its keys and values and its beams."""
        bert = self.vlp_config(tasks.ANY_VOCABULARY).bert
        columns = vlp.most_columns(self.packing_config(inference=True))
        cache = 2 * bert.layers * columns * bert.hidden * value_bytes(bert.dtype)
        beams = self.inference.num_beams * bert.vocab_size * 3 * 4
        return RowCost("questions", 64, 64, self.vlp_bytes() + cache + beams)

    def in_use(self) -> tasks.InUse:
        """Beam search; its loop is counted to `max_new_tokens`, the longest answer."""
        serving = self.inference
        options = {
            "mask_id": 103,  # any token: ids change no shape
            "sep_id": 102,
            "num_beams": serving.num_beams,
            "max_new_tokens": serving.max_new_tokens,
            "token_type": self.packing_config(inference=True).segments[1],
            "length_penalty": serving.length_penalty,
            "no_repeat_ngram": serving.no_repeat_ngram,
            "only_best": serving.only_best,
        }

        def inputs(rows: int) -> tuple[VLPInputs]:
            return (self.vlp_inputs(rows, inference=True),)

        make = functools.partial(tasks.OnGraph, beam_search)
        return tasks.InUse(self.cost(), make, self.planned_model, inputs, options)


class AnswerEvaluation:
    """WebQA's accuracy of a reader's answers from gold sources, or from none."""

    def __init__(self, task: Answer, corpus: Corpus, tokenizer: Tokenizer, model: nnx.Module):
        section = task.validate
        assert section is not None
        # That are judged.
        self.questions = tasks.scored_questions(task, corpus, has_keywords, "keywords")
        if section.sources == "oracle":
            check_gold(self.questions)
            self._cited = [gold_ranking(question) for question in self.questions]
        else:
            self._cited = [Ranking(question.id, (), ()) for question in self.questions]
        if section.num_beams is not None:
            serving = dataclasses.replace(task.inference, num_beams=section.num_beams)
            task = dataclasses.replace(task, inference=serving)
        gold = [row for question in self.questions for row in corpus.positive_rows(question)]
        self.reader = Reader(task, tasks.part_of(corpus, gold), tokenizer, model)  # answers them
        self._normalizer = Normalizer("none")

    def __call__(self, model: nnx.Module) -> Mapping[str, float]:
        self.reader.use(model)
        predictions = self.reader.answer(self.questions, self._cited)
        return score_answers(self.questions, predictions, lemmatizer=self._normalizer).scores


def load_reader(
    folder: str | Path,
    corpus: Corpus,
    options: tasks.Options | None = None,
    *,
    one_shape: bool = False,
) -> Reader:
    """The trained reader of an answer run.

    Args:
      options: of the section `inference`, in place of the run's own.
      one_shape: for a few questions, see VLPTask.in_one_shape.
    """
    task, tokenizer = tasks.read_run(folder, (Answer,), options)
    task = task.in_one_shape() if one_shape else task
    return Reader(task, corpus, tokenizer, task.open_vlp(folder, tokenizer, one_shape=one_shape))
