"""SigLIP's tokenizers: SentencePiece over canonical texts, and SigLIP 2's, which is Gemma's.

Both put one token after a text and none before it. The model was trained on texts padded to its
whole length, and sees the padding.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import atomic_write, read_json
from mmqa_jax.data.tokenizers import (
    SETTINGS,
    MarkedTokenizer,
    check_any_text,
    read_tokenizer,
    tokenizer_of,
)

PIECES = "spiece.model"
_FILE = "tokenizer.json"
_KEY = "siglip"  # of a file that `save` wrote
_UNKNOWN, _SPACE = "<unk>", "▁"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PROBE = "a"


class SiglipTokenizer:
    """Token ids of texts, without the end token.

    A special token that is written in a text is read as plain characters.

    Args:
      saved: of `spiece` (base64) and `tokenizer` (a tokenizer.json) the one that there is;
        `lowercase`, whether SentencePiece's texts are put in lower case; `end` and `pad`, ids.

    Attributes:
      cls_id: None: nothing stands before a text.
      sep_id, pad_id: of the token after a text, and of padding.
      vocab_size: number of tokens.
      fingerprint: 16 hex digits that change with anything of it.
    """

    cls_id = None

    def __init__(self, saved: Mapping[str, Any]):
        self._saved = dict(saved)
        self.sep_id, self.pad_id = saved["end"], saved["pad"]
        text = json.dumps(self._saved, sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        if "spiece" in saved:
            self._pieces = _pieces(base64.b64decode(saved["spiece"]))
            self.vocab_size = self._pieces.get_piece_size()
            # Ids of what precedes each text, see `_from_pieces`.
            self._before = len(self._pieces.encode(_UNKNOWN))
            return
        self._pieces = None
        tokenizer = Tokenizer.from_str(saved["tokenizer"])
        self._prompts, self.vocab_size = MarkedTokenizer(tokenizer), tokenizer.get_vocab_size()

    def __reduce__(self) -> tuple[Any, ...]:
        return SiglipTokenizer, (self._saved,)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without the end token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without the end token."""
        check_several(texts, "SiglipTokenizer.encode_batch")
        if self._pieces is not None:
            return self._from_pieces(texts)
        return self._prompts.encode_batch(list(map(self._prompts.shield, texts)))

    def _from_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Joins pieces as transformers does: a first word behind a known one keeps its space."""
        lowercase = self._saved["lowercase"]
        known = [_UNKNOWN + canonical(_SPACE + t.replace(_SPACE, " "), lowercase) for t in texts]
        pieces = self._pieces
        split = pieces.encode(known, out_type=str)
        return [[pieces.piece_to_id(piece) for piece in row[self._before :]] for row in split]

    def save(self, path: str | os.PathLike) -> None:
        """Writes a file that `read_saved` opens, whole or not at all."""
        with atomic_write(path) as file:
            json.dump({_KEY: self._saved}, file)


def canonical(text: str, lowercase: bool = True) -> str:
    """big_vision's canonical form: lower case, no punctuation, single spaces."""
    text = text.lower() if lowercase else text
    return re.sub(r"\s+", " ", text.translate(_NO_PUNCTUATION)).strip()


def load_siglip_tokenizer(folder: str | os.PathLike, vocab_size: int) -> SiglipTokenizer:
    """Reads the files published with a SigLIP: spiece.model, or SigLIP 2's tokenizer.json.

    Args:
      folder: of the files, as published or as `mmqa convert` copied them.
      vocab_size: of the model, which no id may exceed.
    """
    folder = Path(folder)
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    settings = settings if isinstance(settings, dict) else {}
    for key in ("padding_side", "truncation_side"):
        if settings.get(key, "right") != "right":
            raise UserError(
                f"{folder / SETTINGS}: {key} is {settings[key]!r}, expected 'right', as SigLIP was "
                "trained; correct it."
            )
    if (folder / PIECES).is_file():
        tokenizer = SiglipTokenizer(_of_pieces(folder / PIECES, settings))
    elif (folder / _FILE).is_file():
        tokenizer = SiglipTokenizer(_of_json(folder / _FILE, settings))
    else:
        raise UserError(
            f"{folder}: has no tokenizer ({PIECES}, or SigLIP 2's {_FILE}); put the one published "
            "with the checkpoint there."
        )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model "
            f"{vocab_size:,}; put the checkpoint's own tokenizer there."
        )
    return tokenizer


def is_saved(text: str) -> bool:
    """Whether a file of this text is one that `SiglipTokenizer.save` wrote."""
    return text.startswith(f'{{"{_KEY}"')


def read_saved(path: str | os.PathLike) -> SiglipTokenizer:
    """The tokenizer that `SiglipTokenizer.save` wrote."""
    saved = read_json(path)[_KEY]
    if "tokenizer" in saved:
        tokenizer_of(saved["tokenizer"], str(path))
    return SiglipTokenizer(saved)


def _pieces(model: bytes) -> Any:
    import sentencepiece  # beside transformers' own files only

    pieces = sentencepiece.SentencePieceProcessor()
    pieces.LoadFromSerializedProto(model)  # an empty one, too, which the constructor takes for none
    return pieces


def _of_pieces(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    model = file.read_bytes()
    try:
        pieces = _pieces(model)
    except (RuntimeError, OSError) as error:
        raise UserError(f"{file}: not a SentencePiece model ({error}); fetch it again.") from None
    ends = {}
    for name, key in (("end", "eos_token"), ("pad", "pad_token")):
        token = _spelling(settings.get(key)) or "</s>"
        ends[name] = pieces.piece_to_id(token)
        if pieces.id_to_piece(ends[name]) != token:
            raise UserError(
                f"{file}: has no piece {token!r}, the {key}; put the checkpoint's own files there."
            )
    lowercase = settings.get("do_lower_case", True)
    if not isinstance(lowercase, bool):
        raise UserError(
            f"{file.parent / SETTINGS}: do_lower_case is {lowercase!r}, expected true or false; "
            "correct it."
        )
    return {"spiece": base64.b64encode(model).decode(), "lowercase": lowercase, **ends}


def _of_json(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = read_tokenizer(file)
    check_any_text(tokenizer, file)
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE).ids
    end = whole[len(plain) :]
    named = _spelling(settings.get("eos_token"))
    if not end and settings.get("add_eos_token") and named:
        end = [tokenizer.token_to_id(named)]
    if not plain or whole[: len(plain)] != plain or len(end) != 1 or end[0] is None:
        raise UserError(
            f"{file}: its template makes {tokenizer.encode(_PROBE).tokens} of {_PROBE!r}; one "
            "token after a text and none before it was expected, as SigLIP 2 has it; put the "
            "checkpoint's own tokenizer there."
        )
    pad = tokenizer.token_to_id(_spelling(settings.get("pad_token")) or "<pad>")
    if pad is None:
        raise UserError(
            f"{file}: no padding token is known; name one of its tokens as pad_token in {SETTINGS}."
        )
    # SigLIP 2 was trained on lower case (big_vision; transformers' Siglip2Tokenizer).
    steps = [normalizers.Lowercase()]
    steps += [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return {"tokenizer": tokenizer.to_str(), "end": end[0], "pad": pad}


def _spelling(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None
