"""Prompts of solved examples and one open question, with as many examples as fit."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import TooLong, Unanswerable
from mmqa_jax.prompting.backends import Query
from mmqa_jax.prompting.shots import Shot, shots_record
from mmqa_jax.prompting.templates import PromptTemplate

Order = Literal["most_similar_first", "most_similar_last"]


class FewShot(NamedTuple):
    """A query to a language model that fits its context.

    Attributes:
      query: None where the model cannot take it, even without shots.
      text: of the prompt.
      shots: those in the prompt, most similar first.
      dropped: how many more were chosen.
      reason: why there is no query.
      too_long: whether that is its length.
    """

    query: Query | None
    text: str
    shots: Sequence[Shot]
    dropped: int
    reason: str = ""
    too_long: bool = False


def few_shot(
    template: PromptTemplate,
    question: Question,
    shots: Sequence[Shot],
    fields: Callable[[Question], Mapping[str, str]],
    make: Callable[[str], Query],
    check: Callable[[Query], None],
    order: Order = "most_similar_first",
) -> FewShot:
    """The prompt of a question with as many of its most similar shots as the context holds.

    Args:
      shots: most similar first; the last ones are dropped.
      fields: the template's fields of a question, shot or query.
      make: the query of a prompt's text.
      check: a backend's `check`, which raises Unanswerable. A server's never raises TooLong: it
        knows no length.
      order: of the shots in the prompt.
    """
    solved, reason = [fields(shot.question) for shot in shots], ""
    for count in range(len(shots), -1, -1):
        shown = solved[:count] if order == "most_similar_first" else solved[:count][::-1]
        text = template.render(shown, fields(question))
        try:
            query = make(text)
            check(query)
        except TooLong as error:
            reason = str(error)
            continue
        except Unanswerable as error:
            return FewShot(None, text, (), 0, str(error))
        return FewShot(query, text, shots[:count], len(shots) - count)
    return FewShot(None, "", (), len(shots), reason, too_long=True)


def majority_answer(question: Question) -> str:
    """The answer that most annotators gave; of equally frequent ones the first.

    Answers from soft labels are listed by falling weight. Of a question without answers the
    correct option.
    """
    counts = collections.Counter(answer for answer in question.answers if answer)
    if counts:
        return counts.most_common(1)[0][0]
    return "" if question.answer_index is None else question.choices[question.answer_index]


def prompts_record(prompts: Sequence[FewShot], failed: Iterable[str] = ()) -> dict[str, Any]:
    """What trace.jsonl keeps of a question's prompts.

    Args:
      failed: why requests were not answered; reasons of prompts that were not sent are added.
    """
    reasons = [p.reason for p in prompts if p.query is None and not p.too_long]
    reasons += failed
    return {
        "prompts": [p.text for p in prompts],
        "shots": [shots_record(p.shots) for p in prompts],
        "dropped_shots": sum(p.dropped for p in prompts),
        "too_long": [p.reason for p in prompts if p.too_long],
        **({"failed": reasons} if reasons else {}),
    }


def output_record(text: str, logprob: float) -> dict[str, Any]:
    """What trace.jsonl keeps of an output; a server may give no log-probability (NaN)."""
    return {"text": text, **({} if math.isnan(logprob) else {"logprob": logprob})}
