"""KAT (Gui et al., NAACL 2022): a T5 reads explicit and implicit knowledge at once.

Explicit knowledge are entities of Wikidata near the picture, implicit knowledge GPT-3's answers
with their evidence. Each is a passage that Fusion-in-Decoder encodes with the question by itself
(original: guilk/KAT).

  facts.passages(question, entities)    -> the passages of a question
  fusion_reader.read(questions, texts)  -> one Prediction per question
"""

from collections.abc import Sequence
from typing import Protocol

from mmqa_jax.benchmarks.okvqa import KATKnowledge
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.papers.setting import Setting


class PassageReader(Protocol):
    """Answers from given passages, as Fusion-in-Decoder does."""

    def read(
        self, questions: Sequence[Question], passages: Sequence[Sequence[str]]
    ) -> list[Prediction]:
        """One Prediction per question."""


def answer_kat(
    questions: Sequence[Question],
    facts: KATKnowledge,
    fusion_reader: PassageReader,
    *,
    entities: int = 40,
) -> list[Prediction]:
    """Sections 3.2 to 3.4: reads the `entities` of the picture (n_context of the authors' code) and
    GPT-3's answers at once."""
    passages = [facts.passages(question, entities) for question in questions]
    return fusion_reader.read(questions, passages)


SETTINGS = {"kat": Setting(answer_kat)}
