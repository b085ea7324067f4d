"""Few-shot prompts that show the pictures of shots and query, each in front of its question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.examples.library import Shot
from mmqa_jax.prompting.few_shot import Fields, Order
from mmqa_jax.prompting.source_prompts import MARK


class ShotPictures:
    """The pictures of few-shot prompts: fields with a mark for each, and the pictures in order.

    Args:
      questions, shots: the queries and the shots of each, most similar first.
      of_queries: query id -> its pictures, none or one.
      read: the encoded picture of a shot's question; None where it has none.
      order: of the shots in the prompt.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        shots: Sequence[Sequence[Shot]],
        of_queries: Mapping[str, Sequence[Picture]],
        read: Callable[[Question], bytes | None],
        order: Order,
    ):
        self._order = order
        self._of_shots: dict[str, list[Picture]] = {}
        self._of_queries = of_queries
        # By object: an example of another corpus may have a query's id.
        self._with_picture = {id(q) for q in questions if of_queries[q.id]}
        for question, chosen in zip(questions, shots, strict=True):
            self._of_shots[question.id] = []
            for shot in chosen:
                encoded = read(shot.question)
                if encoded is not None:
                    self._with_picture.add(id(shot.question))
                    self._of_shots[question.id].append(Picture(encoded, shot.question.image or ""))

    def marked(self, fields: Fields) -> Fields:
        """Fields whose question has a mark in front where there is a picture."""

        def with_mark(question: Question) -> Mapping[str, str]:
            plain = {name: text.replace(MARK, " ") for name, text in fields(question).items()}
            if id(question) in self._with_picture:
                plain["question"] = f"{MARK} {plain['question']}"
            return plain

        return with_mark

    def of_prompt(self, question: Question, text: str) -> list[Picture]:
        """The pictures of a query's prompt in the order of their marks.

        Args:
          text: of the prompt, in which the least similar shots may have been dropped.
        """
        own = list(self._of_queries[question.id])
        of_shots = self._of_shots[question.id][: text.count(MARK) - len(own)]
        return [*(of_shots if self._order == "most_similar_first" else of_shots[::-1]), *own]
