"""The next question of a conversation: what is searched for, and what the reader sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message
from mmqa_jax.prompting.backends.thinking import split_thoughts

# Of a question behind earlier ones: joined with the last of these, rewritten by the reader into one
# that stands alone, or as it is.
WAYS = ("joined", "rewritten", "alone")
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


def searched(question: str, history: Sequence[Message], way: str, llm: Any) -> str:
    """What is searched for.

    Args:
      history: messages of user and assistant before the question.
      way: one of `WAYS`.
      llm: the reader, asked where the question is rewritten.
    """
    if not history or way == "alone":
        return question
    if way == "joined":
        return joined(question, history)
    query = rewriting(0, question, history, is_chat=llm.takes_messages)
    try:
        llm.check(query)
    except TooLong:
        return joined(question, history)
    text = "".join(answer.text or "" for answer in llm.answer([query]))
    return rewritten(text, question, history)
