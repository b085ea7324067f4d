"""Prophet's answer heuristics in use: candidates for a prompt, and answer-aware examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.shots import ExampleLibrary, Shot, Similarity

ShotSelection = Literal["answer_aware"] | Similarity


@dataclasses.dataclass(frozen=True)
class AnswerHeuristics:
    """What a VQA model says of questions (prompting/candidates.py reads its files).

    Attributes:
      candidates: question id -> (answer, confidence), best first.
      examples: question id -> ids of the examples whose latent answers are most similar, nearest
        first; {}: there is no such file.
      checked: the files are known to be of the questions' split (`of_split`).
    """

    candidates: Mapping[str, Sequence[tuple[str, float]]]
    examples: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    checked: bool = False

    def of_split(self, questions: Sequence[Question]) -> AnswerHeuristics:
        """The same, for use with some of these questions at a time.

        Raises:
          UserError: none of them has candidates, or none has answer-aware examples.
        """
        self.check(questions)
        if self.examples and not any(question.id in self.examples for question in questions):
            raise _other_examples()
        return dataclasses.replace(self, checked=True)

    def listed(self, question: Question, count: int) -> str:
        """`elephant(0.99), trunk(0.70)`, the best `count`; "" where a question has none."""
        pairs = self.candidates.get(question.id, ())[:count]
        return ", ".join(f"{answer}({confidence:.2f})" for answer, confidence in pairs)

    def best(self, question: Question) -> str:
        """The first candidate; "" where a question has none."""
        pairs = self.candidates.get(question.id, ())
        return pairs[0][0] if pairs else ""

    def select(
        self,
        questions: Sequence[Question],
        library: ExampleLibrary,
        count: int,
        selection: ShotSelection,
        *,
        seed: int = 0,
    ) -> list[list[Shot]]:
        """The shots of every question, nearest first: answer-aware, or as the library's.

        A question without answer-aware examples has no shots.

        Raises:
          UserError: as `check`, or answer-aware examples that are not in the library.
        """
        self.check(questions)
        if selection != "answer_aware":
            return library.select(questions, count, selection, seed=seed)
        shots = [library.named(q, self.examples.get(q.id, ()), count) for q in questions]
        if count and not any(shots) and not (self.checked and self.examples):
            raise _other_examples()
        return shots

    def check(self, questions: Sequence[Question]) -> None:
        """Raises UserError if none of the questions has candidates: it is another split's file."""
        if self.checked or not questions:
            return
        if not any(self.candidates.get(question.id) for question in questions):
            raise UserError(
                f"config key parts.heuristics.candidates: no candidates for any of the "
                f"{len(questions):,} questions there, the first is {questions[0].id}; name the "
                "file of this split."
            )


def _other_examples() -> UserError:
    return UserError(
        "config key parts.heuristics.examples: none of the questions has an example there that is "
        "in the library; name the file of this split, and the split of its examples as "
        "parts.library.split."
    )
