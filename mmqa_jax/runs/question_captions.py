"""`mmqa caption --data`: a vision-language model describes the pictures of questions.

Written as PromptCap's file, `{question id: caption}`, which `parts.captions` of PICa, Prophet and
MAVL reads. PromptCap (Hu et al. 2022) describes a picture for its question; another prompt without
`{question}` gives a caption of the picture alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import atomic_write, check_out
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import Unanswerable
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Picture
from mmqa_jax.prompting.backends.cache import Cached
from mmqa_jax.prompting.backends.thinking import answer_of

# github.com/Yushi-Hu/PromptCap, README.md
PROMPT = "please describe this image according to the given question: {question}"
QUESTION = "{question}"
_AT_ONCE = 128  # questions whose pictures are in memory
_NAMED = 3  # questions without a caption


def caption_questions(
    data: Path,
    out: Path,
    model: Cached,
    *,
    split: str | None = None,
    prompt: str = PROMPT,
    max_new_tokens: int = 64,
) -> dict[str, Any]:
    """Captions the pictures of questions; what was answered before is in the model's cache.

    Args:
      data: a prepared corpus.
      out: JSON to write, all or nothing.
      model: a language model that takes pictures.
      split: of the questions; None: all.
      prompt: to the model; in it QUESTION is replaced by a question's text.
      max_new_tokens: of a caption.

    Returns:
      Counts: `captions`, and `without_picture`, `failed`, of which there is none.

    Raises:
      RunError: no caption came of any question.
    """
    check_out(out)
    corpus = open_corpus(data)
    asked = corpus.questions(split)
    pictured = [question for question in asked if question.image is not None]
    if not pictured:
        where = "" if split is None else f" of split {split}"
        raise UserError(
            f"--data={data}: none of its {len(asked):,} questions{where} has a picture; name "
            "another split, or a corpus with pictures."
        )
    decoding = Decoding(max_new_tokens=max_new_tokens)
    captions: dict[str, str] = {}
    reasons: dict[str, str] = {}
    with Progress("Captioning", len(pictured), "pictures") as progress:
        for start in range(0, len(pictured), _AT_ONCE):
            chats = []
            for question in pictured[start : start + _AT_ONCE]:
                try:
                    chat = _chat(question, corpus.question_picture(question), prompt, decoding)
                    model.check(chat)
                    chats.append(chat)
                except Unanswerable as error:
                    reasons[question.id] = str(error)
            for answer in model.answer(chats):
                captions[answer.id] = answer_of(answer.candidates[0].text or "").strip()
            reasons |= {failure.id: failure.reason for failure in model.failures}
            progress.advance(min(_AT_ONCE, len(pictured) - start))
    failed = [question.id for question in pictured if question.id not in captions]
    if not captions:
        raise RunError(f"no picture was captioned; question {failed[0]}: {reasons[failed[0]]}")
    _warn(failed, reasons)
    with atomic_write(out) as file:
        json.dump({q.id: captions[q.id] for q in pictured if q.id in captions}, file, indent=1)
    counts = {"captions": len(captions), "without_picture": len(asked) - len(pictured)}
    return {"out": str(out), **counts, "failed": len(failed)}


def _chat(question: Question, picture: bytes | None, prompt: str, decoding: Decoding) -> Chat:
    if picture is None:
        raise Unanswerable(f"{question.image}: cannot be read")
    text = prompt.replace(QUESTION, question.question)
    shown = Picture(picture, question.image or "")
    return Chat(question.id, (Message("user", (shown, text)),), decoding)


def _warn(failed: Sequence[str], reasons: dict[str, str]) -> None:
    """Says which questions have no caption."""
    if not failed:
        return
    named = "; ".join(f"{name}: {reasons[name]}" for name in failed[:_NAMED])
    more = f"; and {len(failed) - _NAMED:,} more" if len(failed) > _NAMED else ""
    print(f"{len(failed):,} questions have no caption ({named}{more})", file=sys.stderr)
