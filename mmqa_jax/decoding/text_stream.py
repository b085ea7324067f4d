"""The text of a sequence while its tokens are decoded."""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.decoding.requests import INCOMPLETE, Tokenizer, truncate


class TextStream:
    """Turns tokens into pieces of text that are final: joined, they are the candidate's text.

    Held back is what the next token may change or take away: the first bytes of a character, and
    what may be the beginning of a stop string.

    Args:
      stops: strings that end the text and are cut off.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._context = self._read = 0  # tokens[:read] are decoded; decoding begins at context
        self._held = ""

    def push(self, token: int, finish: str = "") -> str:
        """The text that is final once a token is added.

        Args:
          finish: how the sequence ended with it (Candidate.finish); "" if it goes on.
        """
        if finish != "end":  # an end token has no text
            self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._context : self._read])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if finish or not (text.endswith(INCOMPLETE) or len(text) <= len(known)):
            self._held += text[len(known) :]
            self._context, self._read = self._read, len(self._tokens)
        if finish:
            final, self._held = truncate(self._held, self._stops), ""
            return final
        final = self._held[: len(self._held) - self._begun()]
        self._held = self._held[len(final) :]
        return final

    def _begun(self) -> int:
        """How many characters at the end of the held text may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
