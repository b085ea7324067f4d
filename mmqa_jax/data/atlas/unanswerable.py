"""Atlas with questions that no source answers, to count refusals: `prepare atlas --unanswerable`.

A third of the test split's entities are held out: none of their sources is in the collection, and
their questions are asked nevertheless. Beside them stand the questions of foreign.txt, general
knowledge of other kinds than Atlas's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources

from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.schema import ANSWERABLE, Question, Source

_PARTS = 3  # entities are dealt by the hash of their name into so many; the first is held out
_TOLD_BY_NEIGHBORS = "longest_border"  # in the names of templates whose answers other sources have
_NOT_ANSWERABLE = {ANSWERABLE: False}


def foreign_questions() -> list[Question]:
    """The 200 questions of foreign.txt; none of them is in strangers.txt."""
    text = (resources.files("mmqa_jax.data.atlas") / "foreign.txt").read_text("utf-8")
    return [
        Question(f"foreign{n}", "test", line, category="text", extra=_NOT_ANSWERABLE)
        for n, line in enumerate(text.splitlines())
    ]


def with_unanswerable(
    sources: Sequence[Source], questions: Sequence[Question]
) -> tuple[list[Source], list[Question]]:
    """Removes held-out entities' sources, and adds unanswerable questions.

    A question is held out if a gold source of it is gone; its other gold sources, which do not
    answer it, become negatives. Of borders a neighbor's sources tell as well: such questions of
    held-out entities are not asked.
    """
    title = {source.id: source.title for source in sources}
    tested = {title[name] for q in questions if q.split == "test" for name in q.positives}
    held_out = {entity for entity in tested if fold_of(entity, _PARTS) == 0}
    remaining = [source for source in sources if source.title not in held_out]
    known = {source.id for source in remaining}

    def told_elsewhere(question: Question) -> bool:
        is_whole = all(name in known for name in question.positives)
        return not is_whole and _TOLD_BY_NEIGHBORS in str(question.extra.get("template", ""))

    def in_collection(question: Question) -> Question:
        gold = tuple(name for name in question.positives if name in known)
        others = tuple(name for name in question.negatives if name in known)
        if gold == question.positives:
            return dataclasses.replace(question, negatives=others)
        extra = {**question.extra, **_NOT_ANSWERABLE}
        return dataclasses.replace(
            question, answers=(), keywords="", positives=(), negatives=(*gold, *others), extra=extra
        )

    asked = [in_collection(question) for question in questions if not told_elsewhere(question)]
    return remaining, [*asked, *foreign_questions()]


# Questions that a stranger may ask a demo, and that no source of Atlas answers.


def strangers() -> list[Question]:
    """The questions of strangers.txt: general knowledge, none about countries or pictures.

    On them `mmqa demo` chooses which questions `mmqa ask` refuses, so that they say nothing about
    how many it refuses: measure that on others.
    """
    text = (resources.files("mmqa_jax.data.atlas") / "strangers.txt").read_text("utf-8")
    return [Question(f"stranger{n}", "val", line) for n, line in enumerate(text.splitlines())]
