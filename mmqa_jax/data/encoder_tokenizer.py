"""Tokenizers of published encoders: WordPiece, SentencePiece or bytes, from a tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import read_json
from mmqa_jax.data.tokenizers import (
    SETTINGS,
    MarkedTokenizer,
    check_any_text,
    prefix_of,
    read_tokenizer,
)

FILE = "tokenizer.json"
_PADDING = ("[PAD]", "<pad>")
_PROBE = "a"


class TextsTokenizer:
    """Token ids of texts, and the special tokens that the file's template puts around one.

    A special token that is written in a text is read as plain characters, as in WordPiece.

    Attributes:
      before, after: ids of the tokens around a text.
      pad_id: of padding.
      max_tokens: the longest input, special tokens included, by tokenizer_config.json; None: not
        said.
      vocab_size: the number of tokens, or one more than the highest id where ids have gaps.
      fingerprint: 16 hex digits that change with anything of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, settings: dict[str, Any], where: str, lowercase: bool = False
    ):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if lowercase:
            steps = [normalizers.Lowercase()]
            steps += [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = normalizers.Sequence(steps)
        self._tokenizer, self._prompts = tokenizer, MarkedTokenizer(tokenizer)
        self.shield = self._prompts.shield
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self.before, self.after = _around(tokenizer, where)
        self.pad_id = self._padding(settings, where)
        if settings.get("truncation_side", "right") != "right":
            raise UserError(
                f"{where}: truncation_side {settings['truncation_side']!r} cuts the beginning of "
                "long texts, which is not done here; take the key out."
            )
        longest = settings.get("model_max_length")
        is_length = isinstance(longest, int | float) and 0 < longest < 1 << 30  # 1e30: not said
        self.max_tokens = int(longest) if is_length else None
        content = json.loads(tokenizer.to_str())
        parts = [content[name] for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
        digest = hashlib.sha256(json.dumps([*parts, self._ends()]).encode())
        self.fingerprint = digest.hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, without special tokens."""
        check_several(texts, f"{type(self).__name__}.encode_batch")
        return self.encode_prompts([self.shield(text) for text in texts])

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts of a model's own, in which special tokens are recognized but in
        shielded texts (`shield`)."""
        return self._prompts.encode_batch(prompts)

    def cut(self, prompt: str) -> list[int | str]:
        """A prompt of a model's own, cut at its special tokens: their ids, and the text between.

        Each part has the tokens that it has in the whole: texts are split at special tokens first.
        """
        marks = self._prompts.marks
        if not marks:
            return [prompt]
        longest_first = sorted(map(re.escape, marks), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", prompt)
        return [marks.get(part, part) for part in parts if part]

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    @property
    def is_byte_level(self) -> bool:
        """Whether texts are split as bytes: parts of lines have the tokens of the whole then."""
        return prefix_of(self._tokenizer) is None

    def _ends(self) -> list[Any]:
        """What of the special tokens is part of the fingerprint."""
        return [self.before, self.after, self.pad_id]

    def _padding(self, settings: dict[str, Any], where: str) -> int:
        # Nothing sees what is behind a text: any token will do where a decoder names none.
        found = _named_padding(self._tokenizer, settings)
        return 0 if found is None else found


class EncoderTokenizer(TextsTokenizer):
    """A tokenizer that puts one token on each side of a text, and knows pairs of texts.

    Attributes:
      cls_id, sep_id: of the tokens before and after a text.
      between: ids between the texts of a pair: BERT's [SEP], RoBERTa's `</s></s>`.
      second_type: token type of a pair's second text and of what follows it.
    """

    def __init__(
        self, tokenizer: Tokenizer, settings: dict[str, Any], where: str, lowercase: bool = False
    ):
        self.cls_id, self.sep_id, self.between, self.second_type = _template(tokenizer, where)
        super().__init__(tokenizer, settings, where, lowercase)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Token ids of both texts of pairs; a text that recurs is split once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids = dict(zip(texts, self.encode_batch(texts), strict=True))
        return [(ids[question], ids[text]) for question, text in pairs]

    def pair(
        self, first: Sequence[int], second: Sequence[int], length: int
    ) -> tuple[list[int], list[int]]:
        """Ids and token types of a pair of at most `length` tokens.

        The longer text is cut first, as transformers' `longest_first` does.
        """
        first, second = cut_longest(first, second, length - 2 - len(self.between))
        ids = [self.cls_id, *first, *self.between, *second, self.sep_id]
        before = 1 + len(first) + min(len(self.between), 1)  # [SEP] belongs to the first text
        return ids, [0] * before + [self.second_type] * (len(ids) - before)

    def pair_length(self, first: int, second: int) -> int:
        """Tokens of a whole pair of texts of so many tokens."""
        return first + second + 2 + len(self.between)

    def _ends(self) -> list[Any]:
        return [self.cls_id, self.sep_id, self.pad_id, *self.between, self.second_type]

    def _padding(self, settings: dict[str, Any], where: str) -> int:
        found = _named_padding(self._tokenizer, settings)
        if found is None:
            raise UserError(
                f"{where}: no padding token is known; name one of its tokens as pad_token in "
                f"{SETTINGS}."
            )
        return found


def cut_longest(
    first: Sequence[int], second: Sequence[int], room: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Two texts cut at their ends to `room` tokens together, the longer one first.

    Of two that are both longer than half of it the second keeps an odd token.
    """
    if len(first) + len(second) <= room:
        return first, second
    swapped = len(first) > len(second)
    short, long = sorted((len(first), len(second)))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    kept = (long, short) if swapped else (short, long)
    return first[: kept[0]], second[: kept[1]]


def load_encoder_tokenizer(
    folder: str | os.PathLike, vocab_size: int, *, lowercase: bool = False, pairs: bool = True
) -> Any:
    """The tokenizer of a published encoder's folder, an EncoderTokenizer.

    Args:
      vocab_size: of the model, which no id may exceed.
      lowercase: put texts in lower case first.
      pairs: False: of a decoder, a TextsTokenizer with any tokens around a text, or none.
    """
    folder = Path(folder)
    file = folder / FILE
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; save it with transformers' "
            "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`."
        )
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    settings = settings if isinstance(settings, dict) else {}
    kind = EncoderTokenizer if pairs else TextsTokenizer
    read = read_tokenizer(file)
    check_any_text(read, file)
    tokenizer = kind(read, settings, str(file), lowercase)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{file}: has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}; put the "
            "checkpoint's own tokenizer there."
        )
    return tokenizer


def _template(tokenizer: Tokenizer, where: str) -> tuple[int, int, list[int], int]:
    """What the post-processor puts before, after and between texts, and the second one's type."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE).ids
    pair = tokenizer.encode(_PROBE, _PROBE)
    size = len(plain)
    between = pair.ids[1 + size : len(pair.ids) - size - 1]
    if (
        not size
        or whole[1:-1] != plain
        or pair.ids != [whole[0], *plain, *between, *plain, whole[-1]]
        or not between
    ):
        raise UserError(
            f"{where}: its template makes {tokenizer.encode(_PROBE).tokens} of {_PROBE!r}; one "
            "token before and one after a text were expected, as BERT and RoBERTa have; use "
            "another checkpoint."
        )
    return whole[0], whole[-1], between, pair.type_ids[-1]


def _around(tokenizer: Tokenizer, where: str) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE).ids
    for first in range(len(whole) - len(plain) + 1):
        last = first + len(plain)
        if plain and whole[first:last] == plain:
            return whole[:first], whole[last:]
    raise UserError(
        f"{where}: its template makes {tokenizer.encode(_PROBE).tokens} of {_PROBE!r}, which lacks "
        "the text's own tokens; put the checkpoint's own tokenizer there."
    )


def _named_padding(tokenizer: Tokenizer, settings: dict[str, Any]) -> int | None:
    named = settings.get("pad_token")
    named = named.get("content") if isinstance(named, dict) else named
    for token in (named, *_PADDING):
        if isinstance(token, str) and (found := tokenizer.token_to_id(token)) is not None:
            return found
    return None
