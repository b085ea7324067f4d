"""Sources and their pictures in prompts: what LLMReader and LLMReranker show a model alike.

A text is written with a mark where each picture goes; `as_prompt` makes of it a message with the
pictures in it, or a text that a model continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Source
from mmqa_jax.prompting.backends import Backend, Message, Picture
from mmqa_jax.prompting.llava_prompt import PLACEHOLDER as IMAGE

MARK = "\ufffc"  # the object replacement character stands where a picture goes, or IMAGE
MARKED = f" {MARK}"
Pictures = Literal["auto", "pixels", "captions"]


def prompt_text(source: Source) -> str:
    """A source as prompts quote it: its title, then its text or caption."""
    return ": ".join(filter(None, (source.title, source.text))).replace(MARK, " ")


def source_picture(corpus: Corpus, row: int, shown: bool) -> Picture | None:
    """A source's picture, if pictures are shown and it has one."""
    encoded = corpus.picture(row) if shown else None
    return None if encoded is None else Picture(encoded, corpus.sources[row].id)


def mark_of(picture: Picture | None) -> str:
    """What a template's field of a picture says: where it goes, or nothing."""
    return "" if picture is None else MARKED


def shows_pictures(llm: Backend, pictures: Pictures) -> bool:
    """Whether prompts show pictures; see LLMReaderOptions."""
    return pictures == "pixels" or (pictures == "auto" and llm.takes_pictures is True)


def is_chat(llm: Backend, chat: bool | None) -> bool:
    """Whether a prompt is a message; see LLMReaderOptions."""
    return llm.takes_messages if chat is None else chat


def without_places(text: str, pictures: Sequence[Picture]) -> str:
    """A text to be continued with pictures, none of whose places is an `<image>` of a source."""
    return text.replace(IMAGE, "< image>") if pictures else text


def as_prompt(
    marked: str, pictures: Sequence[Picture], *, chat: bool
) -> tuple[str | tuple[Message, ...], tuple[Picture, ...]]:
    """A query's prompt of a text with a mark for each picture, and the query's images.

    Returns:
      A user's message with the pictures in it, or a text with `<image>` in their places, whose
      images are apart.
    """
    if not chat:
        return without_places(marked, pictures).replace(MARK, IMAGE), tuple(pictures)
    first, *rest = marked.split(MARK)
    content: list[str | Picture] = [first]
    for picture, text in zip(pictures, rest, strict=True):
        content += [picture, text]
    return (Message("user", tuple(part for part in content if part != "")),), ()
