"""Stop strings: finding them while tokens are generated, and cutting the text there."""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.decoding.requests import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


class StopDetector:
    """Decodes one sequence token by token and looks for stop strings, also across tokens.

    Only the last few tokens are decoded again: a token's text may depend on the one before
    (SentencePiece's leading space), and a character may be spread over several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._context = self._read = 0  # tokens[:read] are decoded; decoding begins at context
        self._tail = ""  # the end of the text, shorter than the longest stop string
        self._keep = max(map(len, self._stops), default=1) - 1

    def push(self, token: int) -> bool:
        """Adds the next token; true once the text contains a stop string."""
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._context : self._read])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith(_INCOMPLETE) or len(text) <= len(known):
            return False
        fresh = self._tail + text[len(known) :]
        self._context, self._read = self._read, len(self._tokens)
        self._tail = fresh[-self._keep :] if self._keep else ""
        return any(stop in fresh for stop in self._stops)


def truncate(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string, or all of it."""
    ends = [text.find(stop) for stop in stops]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def tokens_of_text(tokens: Sequence[int], text: str, tokenizer: Tokenizer) -> int:
    r"""How many tokens, from the first, make a text that was cut at a stop string.

    A token counts if some of the text is in it: `.\n` counts where `\n` is the stop string.

    Args:
      tokens: the text and what follows it begin with the same tokens.
      text: as `truncate` gave it.
    """
    count = len(tokens)
    while count and tokenizer.decode(list(tokens[: count - 1])).startswith(text):
        count -= 1
    return count
