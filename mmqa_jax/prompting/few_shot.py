"""Prompts of solved examples and one open question, with as many examples as fit."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mmqa_jax.data.datasets.benchmark import CAPTION
from mmqa_jax.data.datasets.okvqa import SOFT_LABELS
from mmqa_jax.data.datasets.scienceqa import HAS_PICTURE
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import TooLong, Unanswerable
from mmqa_jax.evaluation.webqa import has_keywords
from mmqa_jax.prompting.backends import Query
from mmqa_jax.prompting.shots import Shot, shots_record
from mmqa_jax.prompting.templates import PromptTemplate
from mmqa_jax.retrieval.knowledge import Passage

Order = Literal["most_similar_first", "most_similar_last"]
NO_CONTEXT = "N/A"  # what a template's context says where there is none
# Key of Question.extra: a file of captions lacks this question, whose own caption stands in.
OWN_CAPTION = "own_caption"


class FewShot(NamedTuple):
    """A query to a language model that fits its context.

    Attributes:
      query: None where the model cannot take it, even without shots.
      text: of the prompt.
      shots: those in the prompt, most similar first.
      dropped: how many more were chosen.
      reason: why there is no query.
      too_long: whether that is its length.
      passages: those in the prompt's context, best first; None: there is no knowledge base.
      dropped_passages: how many more were found.
      lacking: what shots in the prompt lack -> how many; keys of a trace.
    """

    query: Query | None
    text: str
    shots: Sequence[Shot]
    dropped: int
    reason: str = ""
    too_long: bool = False
    passages: Sequence[Passage] | None = None
    dropped_passages: int = 0
    lacking: Mapping[str, int] = MappingProxyType({})


def few_shot(
    template: PromptTemplate,
    question: Question,
    shots: Sequence[Shot],
    fields: Callable[[Question], Mapping[str, str]],
    make: Callable[[str], Query],
    check: Callable[[Query], None],
    order: Order = "most_similar_first",
    passages: Sequence[Passage] | None = None,
) -> FewShot:
    """The prompt of a question with as many of its most similar shots as the context holds.

    Args:
      shots: most similar first; the last ones are dropped, but not before all passages.
      fields: the template's fields of a question, shot or query.
      make: the query of a prompt's text.
      check: a backend's `check`, which raises Unanswerable. A server's never raises TooLong: it
        knows no length.
      order: of the shots in the prompt.
      passages: knowledge that follows the question's own context, best first; the last ones are
        dropped. None: there is no knowledge base.
    """
    solved, asked, reason = [fields(shot.question) for shot in shots], fields(question), ""
    found, none = passages or (), None if passages is None else ()
    known = [(len(shots), read) for read in range(len(found), 0, -1)]
    for count, read in [*known, *((count, 0) for count in range(len(shots), -1, -1))]:
        shown = solved[:count] if order == "most_similar_first" else solved[:count][::-1]
        text = template.render(shown, _with_passages(asked, found[:read]))
        try:
            query = make(text)
            check(query)
        except TooLong as error:
            reason = str(error)
            continue
        except Unanswerable as error:
            return FewShot(None, text, (), 0, str(error), passages=none)
        return FewShot(
            query,
            text,
            shots[:count],
            len(shots) - count,
            passages=None if passages is None else found[:read],
            dropped_passages=len(found) - read,
            lacking=_lacking(asked, shots[:count], solved),
        )
    return FewShot(None, "", (), len(shots), reason, True, none, len(found))


def lacks_caption(question: Question) -> bool:
    """Whether nothing describes the picture of a question that has one."""
    return bool(question.extra.get(HAS_PICTURE, True)) and not question.extra.get(CAPTION)


def _lacking(
    asked: Mapping[str, str], shots: Sequence[Shot], solved: Sequence[Mapping[str, str]]
) -> dict[str, int]:
    """What shots lack that their prompt is to show, candidates only if the question has some."""
    found: collections.Counter[str] = collections.Counter()
    for shot, fields in zip(shots, solved, strict=False):
        if "context" in fields:
            found["shots_without_caption"] += lacks_caption(shot.question)
            found["shots_with_own_caption"] += OWN_CAPTION in shot.question.extra
        if asked.get("candidates"):
            found["shots_without_candidates"] += not fields["candidates"]
    return {name: count for name, count in found.items() if count}


def _with_passages(fields: Mapping[str, str], passages: Sequence[Passage]) -> Mapping[str, str]:
    """The fields with the passages behind the context."""
    if not passages:
        return fields
    own = fields["context"].strip()
    if own == NO_CONTEXT:
        own = ""
    elif own and own[-1] not in ".!?":
        own += "."
    return {**fields, "context": " ".join(filter(None, (own, *(p.text for p in passages))))}


def majority_answer(question: Question, *, last: bool = False) -> str:
    """The answer that most annotators gave; of equally frequent ones the first, or the last.

    Of soft labels the heaviest. Of a question without answers the correct option; where answers
    are sentences (WebQA, Atlas) their keywords.
    """
    if has_keywords(question):
        return question.keywords
    counts = collections.Counter(answer for answer in question.answers if answer)
    if counts:
        known = question.extra.get(SOFT_LABELS, counts)
        weights = {answer: known.get(answer, 0) for answer in counts}
        most = max(weights.values())
        tied = [answer for answer, weight in weights.items() if weight == most]
        return tied[-1 if last else 0]
    return "" if question.answer_index is None else question.choices[question.answer_index]


def prompts_record(prompts: Sequence[FewShot], failed: Iterable[str] = ()) -> dict[str, Any]:
    """What trace.jsonl keeps of a question's prompts.

    Args:
      failed: why requests were not answered; reasons of prompts that were not sent are added.
    """
    reasons = [p.reason for p in prompts if p.query is None and not p.too_long]
    reasons += failed
    record: dict[str, Any] = {
        "prompts": [p.text for p in prompts],
        "shots": [shots_record(p.shots) for p in prompts],
        "dropped_shots": sum(p.dropped for p in prompts),
        "too_long": [p.reason for p in prompts if p.too_long],
        **sum((collections.Counter(p.lacking) for p in prompts), collections.Counter()),
        **({"failed": reasons} if reasons else {}),
    }
    if any(p.passages is not None for p in prompts):
        record["knowledge"] = [passages_record(p.passages or ()) for p in prompts]
        record["dropped_passages"] = sum(p.dropped_passages for p in prompts)
    return record


def passages_record(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """What trace.jsonl keeps of passages."""
    return [{"id": one.id, "score": round(one.score, 6)} for one in passages]


def output_record(text: str, logprob: float) -> dict[str, Any]:
    """What trace.jsonl keeps of an output; a server may give no log-probability (NaN)."""
    return {"text": text, **({} if math.isnan(logprob) else {"logprob": logprob})}
