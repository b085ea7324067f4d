"""What a setting of a paper is: its function, and what its rows and questions have to be."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.data.schema import Prediction, Question, Ranking

# What every setting may take besides its parts.
_GIVEN = ("questions", "corpus")
_Options = Mapping[str, Any]


def _accept_row(options: _Options, parts: Mapping[str, Any]) -> None:
    """Refuses nothing."""


def _accept_inputs(questions: Sequence[Question], options: _Options) -> None:
    """Refuses nothing."""


def _no_notes(questions: Sequence[Question], options: _Options) -> list[str]:
    return []


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a paper, by whose name rows ask for it (runs/settings.py).

    Attributes:
      answer: the function. It takes what it names: `questions`, `corpus`; parts of the row, its
        other positional parameters; and options, its keyword-only ones.
      needs_all: an answer depends on the other questions; they are not cut into chunks.
      of_choices: it chooses among the choices that every question must have.
      of_gold: it needs the gold sources of some questions.
      captions_of: what the part `captions` describes: the pictures of questions, of which it must
        know some, and without tags; or those of sources, of which it may know none.
      check_row: (options, parts as they are described, unopened); raises UserError where they
        contradict each other.
      check_inputs: (all questions of a row, options); raises UserError for those that cannot be
        answered, before a model is loaded.
      notes: what a reader of the results has to know.
    """

    answer: Callable[..., Sequence[Prediction | Ranking]]
    needs_all: bool = False
    of_choices: bool = False
    of_gold: bool = False
    captions_of: Literal["questions", "sources"] = "sources"
    check_row: Callable[[_Options, Mapping[str, Any]], None] = _accept_row
    check_inputs: Callable[[Sequence[Question], _Options], None] = _accept_inputs
    notes: Callable[[Sequence[Question], _Options], list[str]] = _no_notes

    def parts(self) -> dict[str, bool]:
        """The names of the parts that it takes -> whether it needs them."""
        return {
            name: parameter.default is parameter.empty
            for name, parameter in inspect.signature(self.answer).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name not in _GIVEN
        }

    def options(self, changes: _Options) -> dict[str, Any]:
        """All its options, with the defaults of those that do not change."""
        parameters = inspect.signature(self.answer).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {**defaults, **changes}
