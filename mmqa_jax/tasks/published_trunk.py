"""What the tasks `retriever` and `reranker` share: a published model of texts, trained further."""

from __future__ import annotations

import abc
import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.data.batches import retriever as rows
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizer_files import SETTINGS
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.encoders.text_encoders import check_padding, published_folder
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.tasks import task as tasks
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.record import RECORD, is_converted, read_metadata

_COMPUTE = ("dtype", "remat", "attention", "unroll")
_TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtData(tasks.MixedData):
    """The section `data`.

    Attributes:
      examples: file of questions with their sources, see data.batches.retriever.read_examples; "":
        the corpus's questions of `split`.
      teacher: file of `mmqa rerank` or `mmqa search` that ranks them, whose scores are learned.
    """

    examples: str = ""
    teacher: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedTrunk(tasks.Task):
    """A task on a published model of texts.

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
                f"config key init={self.init}: a published encoder or reranker of texts was "
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
        if jax.process_index() == 0 and not (folder / _TOKENIZER).exists():
            folder.mkdir(parents=True, exist_ok=True)
            _copy_tokenizer(self.start, folder)
        distributed.barrier("tokenizer")
        tokenizer = self.open_tokenizer(folder)
        check_padding(self.start, tokenizer.pad_id)
        return tokenizer

    def read_tokenizer(self, folder: Path, *, lowercase: bool, pairs: bool) -> Tokenizer:
        """The tokenizer in a folder; the arguments are those of `load_encoder_tokenizer`."""
        size = self.record.config.vocab_size
        return load_encoder_tokenizer(folder, size, lowercase=lowercase, pairs=pairs)

    def tokenizer_kind(self) -> tuple[str, str]:
        return "published", "the model's own"

    def training_questions(self, corpus: Corpus) -> list[Question]:
        if self.data.examples:
            return rows.read_examples(self.data.examples, corpus)
        questions = super().training_questions(corpus)
        if not self.data.teacher:
            return questions
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
        """Writes the trained model of the run in a folder as sentence-transformers has it."""
        self.in_folder(folder).record.write(out, self.trained_model(folder))
        _copy_tokenizer(folder, out)


def _build(record: Any, *, rngs: nnx.Rngs) -> Any:
    return record.build(rngs=rngs)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in (SETTINGS, _TOKENIZER):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
