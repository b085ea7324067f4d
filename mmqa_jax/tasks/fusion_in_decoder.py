"""Fusion-in-Decoder (Izacard and Grave, EACL 2021): a T5 that reads many passages at once.

Each passage is encoded with the question by itself, the decoder attends over all of them. The texts
are those of facebookresearch/FiD; with KAT's knowledge in place of sources it is KAT's reader
(Gui et al., NAACL 2022; guilk/KAT).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.benchmarks.okvqa import KATKnowledge, question_texts, source_passage
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import RowCost, value_bytes
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.texts import PassagesSize, passage_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import cut_before_end
from mmqa_jax.decoding.t5_engine import beam_search
from mmqa_jax.evaluation.vqa import squad_exact_match
from mmqa_jax.inference.t5_readers import FusionReader
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5, Passages
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.base_llm import TextModelTask, base_loader, check_vocabulary, model_config
from mmqa_jax.tasks.seq2seq import Seq2SeqObjective, Seq2SeqSection
from mmqa_jax.weights.folder import load_converted


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnowledgeFiles:
    """The files of passages for questions."""

    rankings: str = ""  # file of rankings of the corpus's sources (`mmqa search`)
    # entities, answers: KAT's files, see benchmarks.okvqa. Without any of the three a question's
    # own gold sources are read, then its negatives.
    entities: str = ""
    answers: str = ""

    def check(self, section: str) -> None:
        """Refuses sources beside KAT's knowledge."""
        if self.rankings and (self.entities or self.answers):
            raise UserError(
                f"config key {section}.rankings={self.rankings}: works only without KAT's "
                f"entities and answers; leave one of them out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassagesSection:
    """The section `passages`."""

    # Passages of a question at most (FiD's n_context; KAT's with GPT-3's answers behind the
    # entities).
    count: int = at_least(1)
    # Tokens of a passage with its question (text_maxlength); what is longer is cut.
    length: int = at_least(2)
    entities: int = at_least(1, 40)  # KAT's entities of a question (its n_context)
    # Whether the end token closes each passage, as transformers' T5 tokenizer does from 3.1 on.
    # FiD's and KAT's own code runs with 3.0.2, which adds none.
    end_token: bool = False
    knowledge: KnowledgeFiles = KnowledgeFiles()  # of the training questions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageBatches(BatchesSection):
    """The section `batches`; `targets`: tokens of an answer, its end token included."""

    targets: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageServing(tasks.ServingSection):
    """The section `inference`: see decoding.t5_engine.beam_search; one beam is greedy."""

    num_beams: int = at_least(1, 1)
    max_new_tokens: int = at_least(1, 49)  # FiD's max_length=50 counts the decoder's first input
    length_penalty: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateAnswers:
    """The section `validate`: SQuAD's exact match with any answer."""

    split: str  # the questions', of those with answers
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    metric: Literal["exact_match"] = "exact_match"
    knowledge: KnowledgeFiles = KnowledgeFiles()  # of these questions


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionInDecoder(TextModelTask):
    """A T5, Flan-T5 or mT5 over many passages; it begins at any T5, FiD's and KAT's among them."""

    name: ClassVar[str] = "fusion_in_decoder"
    product: ClassVar[str] = "reader"
    program: ClassVar[str] = "answer"
    limits: ClassVar[tuple[str, ...]] = ("passages.length", "batches.targets")
    architecture: ClassVar[str] = "t5"

    data: tasks.DataSection
    model: Seq2SeqSection
    passages: PassagesSection
    batches: PassageBatches
    inference: PassageServing
    validate: ValidateAnswers | None = None

    @property
    def size(self) -> PassagesSize:
        """The size of a row."""
        return PassagesSize(self.passages.count, self.passages.length, self.batches.targets)

    def _check(self, files: bool) -> None:
        self.check_targets(self.batches.targets)
        self.check_trained()
        self.passages.knowledge.check("passages.knowledge")
        if self.validate is not None:
            self.validate.knowledge.check("validate.knowledge")
        model_config(self, tasks.ANY_VOCABULARY)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> Seq2SeqObjective:
        return Seq2SeqObjective(model_config(self, vocab_size), Passages, "questions")

    def batch(self) -> dict[str, Any]:
        rows, size = self.batches.batch_size, self.size
        return {
            "input_ids": tasks.ints(rows, size.count, size.length),
            "prompt_lengths": tasks.ints(rows, size.count),
            "target_ids": tasks.ints(rows, size.targets),
            "target_lengths": tasks.ints(rows),
        }

    def passage_of(self, source: Source) -> str:
        """A source as a passage; without its title where the section `data` leaves titles out."""
        return source_passage(source if self.data.titles else dataclasses.replace(source, title=""))

    def encoded(
        self, tokenizer: Any, question: str, passages: Sequence[str]
    ) -> tuple[list[Sequence[int]], int]:
        """The tokens of a question with each of its passages, cut to `passages.length`; and how
        many were cut."""
        section = self.passages
        texts = question_texts(question, passages[: section.count])
        whole = [tokenizer.encode_plain(tokenizer.shield(text)) for text in texts]
        if section.end_token:
            whole = [[*tokens, tokenizer.end_ids[0]] for tokens in whole]
            cut = [cut_before_end(tokens, section.length) for tokens in whole]
        else:
            cut = [tokens[: section.length] for tokens in whole]
        return cut, sum(map(len, whole)) - sum(map(len, cut))

    def passages_of(
        self, corpus: Corpus, questions: Sequence[Question], files: KnowledgeFiles
    ) -> Callable[[Question], list[str]]:
        """Returns a function from a question to its passages, best first."""
        if files.entities or files.answers:
            known = KATKnowledge(files.entities, files.answers)
            for question in questions:
                known.passages(question, 1)  # refused before a model is loaded
            return lambda question: known.passages(question, self.passages.entities)
        rows = {question.id: corpus.candidates(question) for question in questions}
        if files.rankings:
            ids = [question.id for question in questions]
            ranked = read_rankings(files.rankings, ids, corpus.row)
            rows = {
                ranking.question_id: [corpus.row[name] for name in ranking.sources]
                for ranking in ranked
            }
        count = self.passages.count

        def of_sources(question: Question) -> list[str]:
            return [self.passage_of(corpus.sources[row]) for row in rows[question.id][:count]]

        return of_sources

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_vocabulary(self, objective.config, tokenizer)
        chosen = [q for q in self.data.chosen(questions, corpus) if q.answers]
        if not chosen:
            raise UserError(
                f"config key data.split={self.data.split}: {self.data.dir} holds no such questions "
                "with answers; choose another split."
            )
        texts_of = self.passages_of(corpus, chosen, self.passages.knowledge)
        end = list(tokenizer.end_ids[:1])
        encode = tokenizer.encode_plain
        answers = [[[*encode(tokenizer.shield(a)), *end] for a in q.answers] for q in chosen]

        def passages(number: int) -> tuple[list[Sequence[int]], int]:
            question = chosen[number]
            return self.encoded(tokenizer, question.question, texts_of(question))

        batches = passage_batches(passages, answers, self.feed(), self.size)
        return tasks.Recipe(
            objective, batches, base_loader(self), metadata=self.metadata(tokenizer)
        )

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return ExactMatchEvaluation(self, corpus, tokenizer, model)

    def cost(self, config: T5Config) -> RowCost:
        """The cost of a question, with all its passages; `config` is the model's."""
        length, tokens = self.passages.length, self.passages.count * self.passages.length
        of_token = 8 * config.hidden + 3 * config.mlp + 2 * config.heads * length
        held = 2 * config.decoder_layers * config.heads * config.head_size
        bytes_ = tokens * (of_token + held) * value_bytes(config.dtype)
        return RowCost("questions", 4, 32, bytes_)

    def in_use(self) -> tasks.InUse:
        """Beam search; its loop is counted to `max_new_tokens`, the longest answer."""
        serving = self.inference

        config = model_config(self, self.vocabulary_size())

        def build() -> T5:
            return T5(config, rngs=nnx.Rngs())

        def inputs(rows: int) -> tuple[Passages]:
            size = self.size
            return (
                Passages(tasks.ints(rows, size.count, size.length), tasks.ints(rows, size.count)),
            )

        options = {
            "end_id": 1,  # any token: ids change no shape
            "num_beams": serving.num_beams,
            "max_new_tokens": serving.max_new_tokens,
            "length_penalty": serving.length_penalty,
        }
        make = functools.partial(tasks.OnGraph, beam_search)
        return tasks.InUse(self.cost(config), make, build, inputs, options)


class ExactMatchEvaluation:
    """Exact match of a reader's answers on the questions of the section `validate`."""

    def __init__(self, task: FusionInDecoder, corpus: Corpus, tokenizer: Any, model: nnx.Module):
        section = task.validate
        assert section is not None
        self.questions = tasks.scored_questions(task, corpus, lambda q: bool(q.answers), "answers")
        texts_of = task.passages_of(corpus, self.questions, section.knowledge)
        self._passages = [texts_of(question) for question in self.questions]
        self.reader = FusionReader(task, corpus, tokenizer, model)

    def __call__(self, model: nnx.Module) -> Mapping[str, float]:
        self.reader.use(model)
        predictions = self.reader.read(self.questions, self._passages)
        pairs = zip(predictions, self.questions, strict=True)
        matches = [
            squad_exact_match(prediction.answer, asked.answers) for prediction, asked in pairs
        ]
        return {"exact_match": float(np.mean(matches))}


def load_fusion_reader(
    folder: str | Path, corpus: Corpus, options: tasks.Options | None = None
) -> FusionReader:
    """The trained reader of a fusion_in_decoder run, with other `options` of its section
    `inference`.
    """
    task, tokenizer = tasks.read_run(folder, (FusionInDecoder,), options)
    model = load_converted(folder, mesh=task.serving_mesh())
    return FusionReader(task, corpus, tokenizer, model)
