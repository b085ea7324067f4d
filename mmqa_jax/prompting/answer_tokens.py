"""Which of a server's reported tokens make the text of its answer.

Servers differ in what they report: some list the end token or a stop string's tokens, which the
text lacks, and some do not. What an answer's log-probability sums must not depend on that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BYTES = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)\Z")  # OpenAI's form of part of a character


def token_bytes(token: str) -> bytes:
    """The bytes of a reported token's text."""
    if found := _BYTES.match(token):
        return bytes.fromhex(found[1].replace("\\x", ""))
    return token.encode("utf-8", "surrogatepass")


def tokens_of_text(tokens: Sequence[bytes], text: str, stops: Sequence[str], finish: str) -> int:
    r"""How many of the reported tokens, from the first, make the text.

    A token counts if some of the text is in it: `.\n` counts where `\n` is a stop string, `\n\n`
    does not. decoding.requests.tokens_of_text is the same for the engine's tokens.

    Args:
      tokens: the text of each.
      text: of the answer, without stop string and end token.
      stops: the stop strings that were asked for.
      finish: the server's reason; "length": no end token follows the text.
    """
    joined, wanted = b"".join(tokens), text.encode("utf-8", "surrogatepass")
    if finish == "length" and not any(stop.encode() in joined for stop in stops):
        return len(tokens)
    if joined.startswith(wanted):
        return _starting_before(len(wanted), tokens)
    # Some servers strip the text, or the first token's leading space.
    bare = joined.lstrip()
    if bare.startswith(wanted.strip()):
        return _starting_before(len(joined) - len(bare) + len(wanted.strip()), tokens)
    # Tokens in another spelling than the text: only an end token can be told, as the last.
    alien = finish == "stop" and not (tokens[-1] and wanted.endswith(tokens[-1]))
    return len(tokens) - alien


def _starting_before(end: int, tokens: Sequence[bytes]) -> int:
    count = start = 0
    for token in tokens:
        if start >= end:
            break
        start += len(token)
        count += 1
    return count
