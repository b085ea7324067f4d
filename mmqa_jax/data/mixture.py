"""Several prepared corpora as one, whose shares in training are given by weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Sequence

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.formats.chats import MESSAGES
from mmqa_jax.data.schema import Question, united

_ENDS = ":"  # of the number of its corpus, with which an id or a picture's name begins


def open_mixture(places: Sequence[str | os.PathLike]) -> Corpus:
    """Opens prepared corpora as one. The ids of sources and questions, and the names of pictures,
    begin with the number of their corpus.
    """
    corpora = [open_corpus(place) for place in places]
    for place, corpus in zip(places, corpora, strict=True):
        if corpus.on_disk:
            raise UserError(
                f"config key data.mixture: the sources of {place} stay on disk, and have no "
                "questions; leave it out."
            )
    sources, questions = [], []
    for number, corpus in enumerate(corpora):
        prefix = f"{number}{_ENDS}"
        for source in corpus.sources:
            image = None if source.image is None else prefix + source.image
            sources.append(dataclasses.replace(source, id=prefix + source.id, image=image))
        questions += [_renamed(question, prefix) for question in corpus.questions()]

    names = json.dumps([corpus.fingerprint for corpus in corpora])
    return Corpus(
        sources,
        questions,
        _Pictures(corpora),
        hashlib.sha256(names.encode()).hexdigest(),
        materials=united(*(corpus.materials for corpus in corpora)),
    )


def member_of(question: Question) -> int:
    """The number of the corpus in the mixture that a question is of."""
    return int(question.id.partition(_ENDS)[0])


class _Pictures:
    """Encoded pictures of all corpora by name."""

    def __init__(self, corpora: Sequence[Corpus]):
        self._corpora = corpora

    def __call__(self, name: str) -> bytes | None:
        number, _, name_in_corpus = name.partition(_ENDS)
        return self._corpora[int(number)].read_picture(name_in_corpus)

    def look_ahead(self, names: Collection[str]) -> None:
        parts = [name.partition(_ENDS) for name in names]
        for number, corpus in enumerate(self._corpora):
            corpus.look_ahead([part[2] for part in parts if part[0] == str(number)])


def _renamed(question: Question, prefix: str) -> Question:
    extra = dict(question.extra)
    if MESSAGES in extra:
        extra[MESSAGES] = [_renamed_message(message, prefix) for message in extra[MESSAGES]]
    return dataclasses.replace(
        question,
        id=prefix + question.id,
        image=None if question.image is None else prefix + question.image,
        more_images=tuple(prefix + name for name in question.more_images),
        positives=tuple(prefix + name for name in question.positives),
        negatives=tuple(prefix + name for name in question.negatives),
        extra=extra,
    )


def _renamed_message(message: dict, prefix: str) -> dict:
    if not isinstance(message["content"], list):
        return message
    parts = [
        {**part, "image": prefix + part["image"]} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}
