"""The question under construction, and how its wordings are filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.datasets.atlas import templates
from mmqa_jax.data.datasets.atlas.flag_facts import FlagFacts
from mmqa_jax.data.datasets.atlas.pictures import Picture

SPLITS = ("train", "val", "test")


@dataclasses.dataclass(slots=True)
class Draft:
    """One question before its negatives are mined.

    Attributes:
      question: its text.
      answers: reference wordings, the main one first.
      keywords: the answer's key words.
      category: WebQA category.
      template: which template made it.
      topic: `flag`, `emoji`, or the fact's field of knowledge.
      positives: gold sources: ("t", snippet row) or ("i", picture row).
      group: the countries or pictures it is about; they fix its split.
      hops: gold sources that must be chained, 1 or 2.
      entities: strings in question, answer and sources that entity replacement may exchange;
        the country's names first.
      palette_safe: whether `permute_palette` keeps the answer true.
      banned: further sources that must not be its negatives, as they give the answer too.
      split: `train`, `val` or `test`.
    """

    question: str
    answers: list[str]
    keywords: str
    category: str
    template: str
    topic: str
    positives: list[tuple[str, int]]
    group: tuple[str, ...]
    hops: int = 1
    entities: list[str] = dataclasses.field(default_factory=list)
    palette_safe: bool = False
    banned: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    split: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A picture that questions are about: its row in the corpus and its group (see Draft).

    Only flags have `facts`.
    """

    row: int
    picture: Picture
    group: str
    facts: FlagFacts | None = None

    @property
    def name(self) -> str:
        return self.picture.name


def random_stream(seed: int, stage: int, name: str) -> np.random.Generator:
    """Random numbers for one kind of question; a change to one kind leaves the others alone."""
    return np.random.default_rng([seed, stage, *name.encode()])


def wordings(frames: Sequence[str], rng: np.random.Generator, **values: str) -> list[str]:
    """All frames filled in, in an order drawn from `rng`; each begins with a capital."""
    filled = [frame.format(**values) for frame in frames]
    return [filled[i][0].upper() + filled[i][1:] for i in rng.permutation(len(filled))]


def picture_draft(
    subjects: Sequence[Subject],
    rng: np.random.Generator,
    wording: str,
    keywords: str | bool,
    *,
    template: str = "",
    **values: str,
) -> Draft:
    """A question about one or two pictures.

    Args:
      wording: section of picture_questions.toml, which names the values.
      keywords: the answer; True and False are yes and no.
      template: the draft's, if not `wording`.
    """
    section = templates.load("picture_questions")[wording]
    if isinstance(keywords, bool):
        keywords = "yes" if keywords else "no"
        answers = [f"{keywords.capitalize()}, {text}" for text in section[keywords]]
    else:
        answers = section["answers"]
    names = [subject.name for subject in subjects]
    values |= {"X": names[0], "A": names[0], "B": names[-1], "k": keywords}
    topic = subjects[0].picture.kind
    answers = wordings(answers, rng, **values)
    return Draft(
        question=wordings(section["questions"], rng, **values)[0],
        answers=answers,
        keywords=keywords,
        category=section["category"],
        template=template or wording,
        topic=topic,
        positives=[("i", subject.row) for subject in subjects],
        group=tuple(subject.group for subject in subjects),
        entities=names if topic == "flag" else [],
        palette_safe=topic == "flag",
    )
