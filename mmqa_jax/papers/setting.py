"""A setting of a paper: its function, and its requirements on rows and questions."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.core.typed import parameters_of
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.prompting.examples.side_files import check_captions, check_no_tags
from mmqa_jax.prompting.multiple_choice import check_choices
from mmqa_jax.retrieval.rankings import check_gold

# What every setting may take besides its parts.
_GIVEN = ("questions", "corpus")
_Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a paper, by whose name rows ask for it (runs/row.py)."""

    # The function. It takes what it names: `questions`, `corpus`; parts of the row, its other
    # positional parameters; and options, its keyword-only ones.
    answer: Callable[..., Sequence[Prediction | Ranking]]
    # An answer depends on the other questions; they are not cut into chunks.
    needs_all: bool = False
    of_choices: bool = False  # it chooses among the choices that every question must have
    of_gold: bool = False  # it needs the gold sources of some questions
    # What the part `captions` describes: the pictures of questions, of which it must know some, and
    # without tags; or those of sources, of which it may know none.
    captions_of: Literal["questions", "sources"] = "sources"
    # (options, parts as they are described, unopened); raises UserError where they contradict each
    # other.
    rule_of_row: Callable[[_Options, Mapping[str, Any]], None] | None = None
    # (all questions of a row, options); raises UserError for those that cannot be answered, before
    # a model is loaded.
    rule_of_inputs: Callable[[Sequence[Question], _Options], None] | None = None
    # (questions, options) -> what a reader of the results has to know.
    write_notes: Callable[[Sequence[Question], _Options], list[str]] | None = None

    def parts(self) -> dict[str, bool]:
        """The names of the parts that it takes -> whether it needs them."""
        return {
            name: parameter.default is parameter.empty
            for name, parameter in parameters_of(self.answer).items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name not in _GIVEN
        }

    def options(self, changes: _Options) -> dict[str, Any]:
        """All its options, with the defaults of those that do not change; `changes` below, too."""
        parameters = parameters_of(self.answer).values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {**defaults, **changes}

    def check_row(self, changes: _Options, parts: Mapping[str, Any]) -> None:
        """Raises UserError for a row that contradicts itself, from its parts as they are described,
        before any is opened."""
        if self.captions_of == "questions" and "captions" in parts:
            check_no_tags(parts["captions"].tags)
        if self.rule_of_row is not None:
            self.rule_of_row(self.options(changes), parts)

    def check_questions(self, name: str, questions: Sequence[Question]) -> None:
        """Raises UserError for questions that the setting, which is called `name`, cannot answer,
        before anything is opened."""
        if self.of_choices:
            check_choices(name, questions)
        if self.of_gold:
            check_gold(questions)

    def check_inputs(
        self, questions: Sequence[Question], changes: _Options, parts: Mapping[str, Any]
    ) -> None:
        """Raises UserError for questions of the whole row, or opened parts that are files, that it
        cannot use, before models load."""
        if self.rule_of_inputs is not None:
            self.rule_of_inputs(questions, self.options(changes))
        if self.captions_of == "questions":
            check_captions(questions, parts.get("captions"))

    def notes(self, questions: Sequence[Question], changes: _Options) -> list[str]:
        """Returns notes on how it treated its questions, for a reader of the results."""
        return self.write_notes(questions, self.options(changes)) if self.write_notes else []

    def run(
        self,
        questions: Sequence[Question],
        corpus: Corpus,
        parts: Mapping[str, Any],
        options: _Options,
    ) -> list[Prediction]:
        """Answers questions by the opened parts that it needs, with the options that differ from
        their defaults: one Prediction per question, whose answer is "" if the setting only
        retrieves sources."""
        available = {"questions": questions, "corpus": corpus, **parts}
        parameters = parameters_of(self.answer)
        results = self.answer(**{k: v for k, v in available.items() if k in parameters}, **options)
        return [
            Prediction(x.question_id, "", x.sources, x.scores) if isinstance(x, Ranking) else x
            for x in results
        ]
