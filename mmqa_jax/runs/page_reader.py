"""Pages that are pictures, read by a vision-language model in this process or on a server."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import cache_dir
from mmqa_jax.data.documents.ocr import PageReader, PageText
from mmqa_jax.decoding.requests import TooLong, Unanswerable
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Picture
from mmqa_jax.prompting.backends.cache import Cached
from mmqa_jax.prompting.backends.thinking import thoughts_apart
from mmqa_jax.runs.parts import LLMSpec, open_llm
from mmqa_jax.weights.registry import nouns

_SERVER = "openai:"
_PROMPT = "Write down all text of this page in its order, one paragraph a line, and nothing else."
_MOST_TOKENS = 2048  # of a page; a full one has some 1,200


def open_page_reader(name: str, flag: str = "--ocr") -> PageReader:
    """Opens a vision-language model as a reader of pages, with a cache of its answers.

    Args:
      name: as `mmqa prompt --model`, or openai:NAME of a server's.
      flag: that named it, for messages.
    """
    model = name.removeprefix(_SERVER)
    spec = LLMSpec(model, "engine" if model == name else "openai", thinking="off")

    def opened() -> contextlib.closing[Cached]:
        return contextlib.closing(open_llm(spec, cache_dir() / "responses", flag))

    with opened() as llm:
        if llm.takes_pictures is False or not llm.takes_messages:
            raise UserError(
                f"{flag}={name}: it cannot be asked about pictures; name a vision-language model "
                f"with a chat template ({nouns('sees')}), or {_SERVER}NAME of a server's."
            )
        parts = json.dumps([llm.fingerprint, _prompt(llm), _MOST_TOKENS])

    @contextlib.contextmanager
    def reading() -> Iterator[Callable[[Sequence[bytes]], list[PageText]]]:
        with opened() as llm:
            yield functools.partial(_read, llm)

    return PageReader(name, hashlib.sha256(parts.encode()).hexdigest(), reading)


def _prompt(llm: Cached) -> str:
    """What the model's authors ask it about a page, or ours."""
    return getattr(llm, "page_prompt", "") or _PROMPT


def _read(llm: Cached, pictures: Sequence[bytes]) -> list[PageText]:
    """Returns the text of each page, and the problem of each page that is cut off or unread."""
    texts = [PageText("")] * len(pictures)
    queries = []
    for number, picture in enumerate(pictures):
        try:
            queries.append(_query(llm, number, picture))
        except Unanswerable as error:
            texts[number] = PageText("", str(error))
    failed = len(llm.failures)
    for result in llm.answer(queries):
        best = thoughts_apart(result).candidates[0]
        is_cut = best.finish == "length"
        problem = f"its first {len(best.tokens):,} tokens alone are read" if is_cut else ""
        texts[result.id] = PageText(best.text or "", problem)
    for failure in llm.failures[failed:]:
        texts[failure.id] = PageText("", failure.reason)
    return texts


def _query(llm: Cached, number: int, picture: bytes) -> Chat:
    """The question about a page, with room for as long an answer as the model has."""
    messages = (Message("user", (Picture(picture, "a page"), _prompt(llm))),)
    query = Chat(number, messages, Decoding(max_new_tokens=_MOST_TOKENS))
    try:
        llm.check(query)
    except TooLong as error:
        if error.excess >= _MOST_TOKENS:
            raise
        query = Chat(number, messages, Decoding(max_new_tokens=_MOST_TOKENS - error.excess))
        llm.check(query)
    return query
