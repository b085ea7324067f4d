"""The next question of a conversation: what is searched for, and what the reader sees of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mmqa_jax.data.schema import Ranking
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message
from mmqa_jax.prompting.backends.thinking import split_thoughts
from mmqa_jax.runs.ask_folder import ToRead

# Of a question behind earlier ones: joined with the last of these, as it is, both in turn, or
# rewritten by the reader into one that stands alone.
WAYS = ("both", "joined", "rewritten", "alone")
_SHOWN = 2_000  # characters of the conversation that the reader sees beside the sources
_LONGEST = 400  # characters of a rewritten question
_REWRITE = """Rewrite the last question so that it can be understood without the conversation.

Conversation:
User: Who wrote Hamlet?
Assistant: William Shakespeare.
Last question: When did he die?
Rewritten question: When did William Shakespeare die?

Conversation:
{conversation}
Last question: {question}
Rewritten question:"""


def recent(history: Sequence[Message]) -> tuple[Message, ...]:
    """The last messages of a conversation, from a question on, as many as the reader is shown."""
    left, begin = _SHOWN, len(history)
    for number in range(len(history) - 1, -1, -1):
        left -= len(history[number].text)
        if left < 0:
            break
        if history[number].role == "user":
            begin = number
    return tuple(history[begin:])


def joined(question: str, history: Sequence[Message]) -> str:
    """The question behind the one before it."""
    earlier = [message.text for message in history if message.role == "user"]
    return f"{earlier[-1][:_SHOWN]} {question}" if earlier else question


def rewriting(
    number: int, question: str, history: Sequence[Message], *, is_chat: bool
) -> Chat | Completion:
    """The query by which a model rewrites a question so that it stands alone."""
    names = {"user": "User", "assistant": "Assistant"}
    lines = [f"{names[message.role]}: {message.text}" for message in recent(history)]
    prompt = _REWRITE.format(conversation="\n".join(lines), question=question)
    decoding = Decoding(max_new_tokens=64, stop=("\n",))
    if is_chat:
        return Chat(number, (Message("user", (prompt,)),), decoding)
    return Completion(number, prompt, decoding)


def rewritten(answer: str, question: str, history: Sequence[Message]) -> str:
    """The question in what a model wrote for `rewriting`; `joined` where there is none."""
    text = split_thoughts(answer)[1].strip().strip('"')
    is_one = text.endswith("?") and len(text) <= _LONGEST
    return text if is_one else joined(question, history)


def searches(question: str, history: Sequence[Message], way: str, llm: Any) -> list[str]:
    """What is searched for: one text or two.

    Args:
      history: messages of user and assistant before the question.
      way: one of `WAYS`.
      llm: the reader, asked where the question is rewritten.
    """
    if not history or way == "alone":
        return [question]
    together = joined(question, history)
    if way != "rewritten":
        return [together, question] if way == "both" else [together]
    query = rewriting(0, question, history, is_chat=llm.takes_messages)
    try:
        llm.check(query)
    except TooLong:
        return [together]
    text = "".join(answer.text or "" for answer in llm.answer([query]))
    return [rewritten(text, question, history)]


def merged(results: Sequence[ToRead]) -> ToRead:
    """The passages of several searches in turn, as many as one of them has; those of a refused
    search only where all are refused."""
    results = [result for result in results if not result.is_refused] or results[:1]
    first, *others = results
    if not others:
        return first
    rankings = [result.passages for result in results]
    pairs = [zip(ranking.sources, ranking.scores, strict=True) for ranking in rankings]
    in_turn = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*pairs)))
    scores: dict[str, float] = {}
    for name, score in in_turn:
        scores.setdefault(name, score)
    best = list(scores.items())[: max(len(ranking.sources) for ranking in rankings)]
    names, values = zip(*best, strict=True) if best else ((), ())
    return first._replace(passages=Ranking(first.passages.question_id, names, values))
