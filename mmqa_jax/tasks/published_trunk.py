"""What the tasks `retriever` and `reranker` share: a published model, trained further."""

from __future__ import annotations

import abc
import dataclasses
import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches import retriever as rows
from mmqa_jax.data.batches.example_retrieval import FILE as JUDGED
from mmqa_jax.data.batches.example_retrieval import ExampleScores, read_example_scores
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.encoders.text_encoders import (
    FAMILIES,
    check_padding,
    published_folder,
    published_kind,
)
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.tasks import task as tasks
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.record import RECORD, RUN_FILES, is_converted, read_metadata

_COMPUTE = ("dtype", "remat", "attention", "unroll")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtData(tasks.MixedData):
    """The section `data`.

    Attributes:
      examples: file of questions with their sources, see data.batches.retriever.read_examples; "":
        the corpus's questions of `split`.
      teacher: file of `mmqa rerank` or `mmqa search` that ranks them, whose scores are learned; or
        folder of `mmqa judge`: then the sources are the solved questions that it judged.
    """

    examples: str = ""
    teacher: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenPictures:
    """The section `pictures`, of encoders that see them.

    Attributes:
      max_pixels: what larger pictures of a Qwen-VL are resized to, in training and in the trained
        model's use; 0: as `init` says.
    """

    max_pixels: int = at_least(0, 0)


AS_PUBLISHED = SeenPictures(max_pixels=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedTrunk(tasks.Task):
    """A task on a published model.

    Attributes:
      init: folder of a published model, ORG/NAME in the Hugging Face cache, or `minilm`.
      tokenizer: "": that of `init`.
      folder: of the run; "": its workdir.
    """

    data: TaughtData
    folder: str = ""

    @functools.cached_property
    def start(self) -> Path:
        """The folder that the model is made of."""
        path = minilm_path() if self.init == "minilm" else self.init
        folder = None if is_converted(path) else published_folder(path, "config key init")
        if folder is None:
            raise UserError(
                f"config key init={self.init}: a published encoder or reranker was "
                "expected, its folder, ORG/NAME in the Hugging Face cache, or minilm; name one."
            )
        return folder

    @property
    @abc.abstractmethod
    def record(self) -> Any:
        """The model: as the run's model.json describes it, or of `init` before that is written."""

    def described(self, key: str) -> Any:
        """What the run's model.json says under a key; None before the file is written."""
        there = self.folder and (Path(self.folder) / RECORD).is_file()
        return read_metadata(self.folder).get(key) if there else None

    def in_folder(self, folder: Any) -> Self:
        return self if self.folder else dataclasses.replace(self, folder=str(folder))

    @property
    def is_taught(self) -> bool:
        """Whether a teacher's scores are learned, where the loss asks for any."""
        return bool(self.data.teacher or self.data.examples)

    def check_changes(self) -> None:
        """Refuses changes of what the weights decide."""
        unknown = [name for name in self.model.changes if name not in _COMPUTE]
        if unknown:
            raise UserError(
                f"config key model.changes.{unknown[0]}: the weights of init={self.init} decide "
                f"it; change only {', '.join(_COMPUTE)}."
            )

    # --- Texts -------------------------------------------------------------------------------

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> Tokenizer:
        """The model's tokenizer, whose files are copied to the run's folder."""
        if self.tokenizer:
            raise UserError(
                f"config key tokenizer={self.tokenizer}: the model reads the tokens of "
                f"init={self.init}; set it to ''."
            )
        if jax.process_index() == 0 and not any((folder / name).exists() for name in RUN_FILES):
            folder.mkdir(parents=True, exist_ok=True)
            _copy_small(self.start, folder)
        distributed.barrier("tokenizer")
        tokenizer = self.open_tokenizer(folder)
        if published_kind(self.start) in FAMILIES:
            check_padding(self.start, tokenizer.pad_id)
        return tokenizer

    def tokenizer_kind(self) -> tuple[str, str]:
        return "published", "the model's own"

    @functools.cached_property
    def judged(self) -> list[ExampleScores] | None:
        """What a language model's scores are, where `data.teacher` is of `mmqa judge`."""
        file = Path(self.data.teacher)
        if not self.data.teacher or not (file.name == JUDGED or (file / JUDGED).is_file()):
            return None
        return read_example_scores(file)

    def recipe(self, corpus: Corpus, tokenizer: Any) -> tasks.Recipe:
        return super().recipe(self._with_examples(corpus), tokenizer)

    def _with_examples(self, corpus: Corpus) -> Corpus:
        """The corpus, whose sources are the solved questions that a teacher judged, if one did."""
        if self.judged is None:
            return corpus
        questions = {question.id: question for question in corpus.questions()}
        names = dict.fromkeys(name for row in self.judged for name in row.candidates)
        for name in (*names, *(row.question_id for row in self.judged)):
            if name not in questions:
                raise UserError(
                    f"config key data.teacher={self.data.teacher}: names the question {name!r}, "
                    f"which {self.place} does not hold; judge the examples of this data."
                )
        sources = [Source(name, "text", _solved(questions[name])) for name in names]
        return Corpus(sources, list(questions.values()), fingerprint=corpus.fingerprint)

    def training_questions(self, corpus: Corpus) -> list[Question]:
        if self.data.examples:
            return rows.read_examples(self.data.examples, corpus)
        questions = super().training_questions(corpus)
        if not self.data.teacher:
            return questions
        if self.judged is not None:
            scored = {row.question_id: dict(zip(row.candidates, row.scores, strict=True))
                      for row in self.judged}  # fmt: skip
            return [
                _taught(question, max(scores, key=scores.__getitem__), scores)
                for question in questions
                if (scores := scored.get(question.id))
            ]
        names = [question.id for question in questions]
        rankings = read_rankings(self.data.teacher, names, corpus.row)
        return [
            dataclasses.replace(
                question,
                negatives=tuple(x for x in ranking.sources if x not in question.positives),
                extra={rows.SCORES: dict(zip(ranking.sources, ranking.scores, strict=True))},
            )
            for question, ranking in zip(questions, rankings, strict=True)
        ]

    def examples(
        self, questions: Sequence[Question], corpus: Corpus, *, scored: bool
    ) -> dict[int, rows.RetrievalExample]:
        """The questions that can be learned from; `scored`: by a teacher's scores."""
        examples = rows.retrieval_examples(questions, corpus, scored=scored)
        if not examples:
            wanted = "a gold source and another one with scores" if scored else "a gold source"
            raise UserError(
                f"config key data: no question of {self.place} has {wanted}; check data.split, "
                "data.examples and data.teacher."
            )
        return examples

    # --- What was trained --------------------------------------------------------------------

    def trained_model(self, folder: Path, mesh: Mesh | None = None) -> Any:
        """The trained model of the run in a folder."""
        return self.load(folder, _build, self.in_folder(folder).record, mesh)

    def export(self, folder: Path, out: Path) -> None:
        """Writes the trained model of the run in a folder as it is published."""
        _copy_small(folder, out)
        self.in_folder(folder).record.write(out, self.trained_model(folder))


def _solved(question: Question) -> str:
    """What a solved question says: itself and its answer."""
    answer = question.answers[0] if question.answers else ""
    if question.answer_index is not None:
        answer = question.choices[question.answer_index]
    return f"{question.question} {answer}".strip()


def _taught(question: Question, best: str, scores: Mapping[str, float]) -> Question:
    """A question with a teacher's scores, by which its best source is the gold one."""
    negatives = tuple(name for name in scores if name != best)
    return dataclasses.replace(
        question, positives=(best,), negatives=negatives, extra={rows.SCORES: dict(scores)}
    )


def _build(record: Any, *, rngs: nnx.Rngs) -> Any:
    return record.build(rngs=rngs)


def _copy_small(source: Path, folder: Path) -> None:
    """Copies the files of a tokenizer, of prompts and of how pictures are prepared."""
    for name in RUN_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
