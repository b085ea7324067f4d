"""The child of `core.box` that tries out tokenizers; it imports nothing of mmqa_jax."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_LENGTH = 4096  # characters of the parts that are looked at, and of the longest texts
_RUNS = (30, 50, _LENGTH)
_ANY = "aA0 \n\t.,_-'/é中▁\u0301\u200b😀"
_GROWS = 64  # times a text's length, far more than any normal form or byte-level alphabet makes
_ALWAYS = 1024


class Grows(Exception):
    """A short text becomes a long one."""


def try_out(parts: dict[str, Any]) -> None:
    """Splits and joins texts that make regular expressions backtrack.

    `parts`: `normalizer`, `pre_tokenizer`, `post_processor` and `decoder` of a tokenizer.json.

    Raises:
      Exception: a part is none, or does not take a text.
      Grows: it makes far more of a text than the text is.
    """
    model = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    tokenizer = Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts})
    )
    for text in _texts(json.dumps(parts, ensure_ascii=False)):
        most = _GROWS * len(text) + _ALWAYS
        made = [] if tokenizer.normalizer is None else [tokenizer.normalizer.normalize_str(text)]
        made.append(tokenizer.encode(text).ids)
        if tokenizer.decoder is not None:
            made += [tokenizer.decoder.decode([text]), tokenizer.decoder.decode(list(text))]
        for longer in made:
            if len(longer) > most:
                raise Grows(f"it makes {len(longer):,} characters or tokens of {len(text):,}")


def _texts(written: str) -> Iterator[str]:
    """Runs of each character and word that the parts name, and of usual ones.

    Behind a run come another character, at which a match of the run fails, and all those named: the
    library does not begin to match where a text lacks what the expression needs.
    """
    yield ""
    named = written[:_LENGTH]
    words = dict.fromkeys([*_ANY, *named, *re.findall(r"[^\W_]{2,8}", named)])
    letters = "".join(dict.fromkeys(named))
    yield "".join(words)
    for word in words:
        for length in _RUNS:
            run = word * (length // len(word))
            yield run
            yield run + ("!" if word != "!" else "a") + letters
