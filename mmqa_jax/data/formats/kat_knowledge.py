"""KAT's knowledge of OK-VQA's questions, as its authors publish it (guilk/KAT, okvqa.zip), and the
passages that Fusion-in-Decoder encodes.

Explicit: `wikidata_okvqa_{train,val}2014_topentities.pkl`, picture -> [entities, ...], each entity
(name, description), best first. Implicit: `gpt3_okvqa_{train,val}2014_answers.pkl`,
`PICTURE#QUESTION` -> GPT-3's answers, each (candidate, evidence). A file of JSON with the same
content is read too. Pickles are read without running their code (`core.array_pickle`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.array_pickle import load_arrays
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.schema import Question, Source

Pairs = Sequence[tuple[str, str]]
_LAST_NUMBER = re.compile(r"(?<!\d)(\d{1,19})(?:\.\w+)?$")  # of COCO_val2014_000000297147.jpg, too


class KATKnowledge:
    """Passages of explicit (`entities`) and implicit knowledge (`answers`); a file may be ""."""

    def __init__(self, entities: str = "", answers: str = ""):
        if not entities and not answers:
            raise UserError(
                "config keys parts.facts.entities and parts.facts.answers: are both empty; name a "
                "file of KAT's knowledge in one of them, or in both."
            )
        self._entities_file, self._answers_file = entities, answers
        self._entities = _read(entities, _picture_of, lambda value: value[0]) if entities else None
        self._answers = _read(answers, _question_of, lambda value: value) if answers else None

    def passages(self, question: Question, entities: int) -> list[str]:
        """Returns the passages for a question: its picture's entities, then the answers of GPT-3.

        Fewer entities than `entities` are repeated from the first, as KAT does, so that all
        questions have as many.
        """
        passages: list[str] = []
        if self._entities is not None:
            picture = str(question.extra.get("image_id", ""))
            known = self._of(self._entities, picture, question, self._entities_file)
            repeated = itertools.islice(itertools.cycle(known), entities)
            passages += [entity_passage(*pair) for pair in repeated]
        if self._answers is not None:
            known = self._of(self._answers, question.id, question, self._answers_file)
            passages += [answer_passage(*pair) for pair in known]
        return passages

    def _of(self, known: Mapping[str, Pairs], key: str, question: Question, file: str) -> Pairs:
        if key not in known:
            raise UserError(
                f"{file}: has nothing on question {question.id!r} (picture "
                f"{question.extra.get('image_id')!r}); name the file of this split."
            )
        return known[key]


def _picture_of(key: str) -> str | None:
    """A picture's COCO id, by its id or file name."""
    match = _LAST_NUMBER.search(key)
    return str(int(match[1])) if match else None


def _question_of(key: str) -> str | None:
    """A question's id, behind its picture's."""
    _, _, question = key.rpartition("#")
    return question or None


def _pair(pair: Any) -> tuple[str, str]:
    """The first two texts; TypeError or ValueError where there are none."""
    first, second, *_ = pair
    if isinstance(pair, str) or not all(isinstance(text, str | None) for text in (first, second)):
        raise TypeError  # also of a text, which would be cut into its characters
    # Descriptions may be missing: None in Wikidata's dump is "None" in KAT's passages.
    return str(first), str(second)


def _read(
    path: str, name: Callable[[str], str | None], pairs_of: Callable[[Any], Any]
) -> dict[str, Pairs]:
    """A file's pairs of texts by the id that `name` reads out of its keys."""
    content = read_json(path) if Path(path).suffix == ".json" else load_arrays(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a mapping from ids to pairs; give a file of KAT's.")
    known: dict[str, Pairs] = {}
    for key, value in content.items():
        key_name = name(str(key))
        try:
            pairs = [_pair(pair) for pair in pairs_of(value)]
        except (TypeError, ValueError, LookupError):
            pairs = None
        if key_name is None or pairs is None:
            raise UserError(
                f"{path}, key {key!r}: expected an id with pairs of texts; give a file of KAT's."
            )
        known[key_name] = pairs
    return known


# The texts that Fusion-in-Decoder encodes: a question with one passage each.


def source_passage(source: Source, text: str = "") -> str:
    """A source as FiD's passage; `text` in place of its own."""
    return f"title: {source.title} context: {text or source.text}"


def entity_passage(name: str, description: str) -> str:
    """An entity of Wikidata as KAT's passage of explicit knowledge."""
    return f"title: {name} context: {name} is a {description}"


def answer_passage(candidate: str, evidence: str) -> str:
    """A language model's answer with its evidence as KAT's passage of implicit knowledge."""
    return f"candidate: {candidate} evidence: {evidence}"


def question_texts(question: str, passages: Sequence[str]) -> list[str]:
    """Returns the texts to encode: the question with each passage, or alone where there is none."""
    asked = f"question: {question}"
    return [f"{asked} {passage}" for passage in passages] or [asked]
