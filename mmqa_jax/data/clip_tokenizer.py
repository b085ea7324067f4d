"""CLIP's byte-pair tokenizer, from the files published with its weights.

OpenAI's code and transformers' make other tokens of the same text: OpenAI's (and open_clip's, which
copied it) repairs broken encodings and curly quotes with ftfy and resolves HTML entities first. A
checkpoint follows the code that it was published with.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import ftfy
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import atomic_write, decode_text, read_json, read_text
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.question_words import QuestionWords, read_words
from mmqa_jax.data.siglip_tokenizer import (
    SiglipTokenizer,
    is_saved,
    load_siglip_tokenizer,
    read_saved,
)
from mmqa_jax.data.tokenizers import WordPiece, load_tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
OPENAI_MERGES = "bpe_simple_vocab_16e6.txt.gz"
_OPENAI_TOKENS = 49_408  # of which 256 bytes, the same at a word's end, START and END
_MOST_MERGES = 1 << 23  # bytes of the file, twice what OpenAI's has
# openai/CLIP clip/simple_tokenizer.py: contractions, runs of letters, single digits, the rest.
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


# Whose code prepares texts and pictures.
Preprocessing = Literal["openai", "transformers"]
_RECORD = "model.json"  # of a folder of `mmqa convert`
_NORMALIZERS = {
    "transformers": [
        normalizers.NFC(),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Lowercase(),
    ],
    # What is left of OpenAI's after `_clean`, whose ftfy composes characters. That it lacks NFC is
    # how a tokenizer.json that this class wrote is known.
    "openai": [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],
}


class ClipTokenizer:
    """CLIP's byte-level BPE, lower case; ids without the start and end tokens.

    Args:
      vocabulary: token -> id, END and START among them.
      merges: pairs in order of their rank.
      preprocessing: `openai`: as `clip.tokenize`, ftfy's repairs, HTML entities resolved (twice),
        white space collapsed; `transformers`: as its CLIPTokenizer, only white space collapsed.

    Attributes:
      cls_id, sep_id, pad_id: of START, END and the padding, which is always masked.
      vocab_size: number of tokens.
      fingerprint: 16 hex digits that change with vocabulary, merges or preprocessing.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        merges: Sequence[tuple[str, str]],
        preprocessing: Preprocessing,
    ):
        self.preprocessing = preprocessing
        self.cls_id, self.sep_id = vocabulary[START], vocabulary[END]
        self.pad_id, self.vocab_size = self.sep_id, len(vocabulary)
        self._tokenizer = Tokenizer(
            models.BPE(
                vocabulary, list(merges), end_of_word_suffix="</w>", unk_token=END, fuse_unk=False
            )
        )
        self._tokenizer.normalizer = normalizers.Sequence(_NORMALIZERS[preprocessing])
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        parts = json.dumps(
            [sorted(vocabulary.items()), [list(pair) for pair in merges], preprocessing]
        )
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without start and end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without start and end."""
        check_several(texts, "ClipTokenizer.encode_batch")
        if self.preprocessing == "openai":
            texts = [_clean(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def save(self, path: str | os.PathLike) -> None:
        """Writes tokenizer.json, whole or not at all."""
        with atomic_write(path) as file:
            file.write(self._tokenizer.to_str())


def _clean(text: str) -> str:
    """openai/CLIP clip/simple_tokenizer.py: basic_clean, whitespace_clean, lower."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip().lower()


def load_clip_tokenizer(
    folder: str | os.PathLike, preprocessing: Preprocessing | None = None
) -> ClipTokenizer:
    """Reads the files published with CLIP: vocab.json and merges.txt, tokenizer.json, or OpenAI's
    bpe_simple_vocab_16e6.txt.gz.

    Args:
      folder: of the files, as published or as `mmqa convert` or training wrote it.
      preprocessing: None takes what the folder's checkpoint was published with; in a folder
        without model.json, what the tokenizer's files were.
    """
    folder = Path(folder)
    preprocessing = preprocessing or published_preprocessing(folder)
    path = folder / "vocab.json"
    if path.is_file():
        vocabulary = read_json(path)
        merges = _merges(read_text(folder / "merges.txt"))
    elif (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer.json"
        content = read_json(path)
        model = content.get("model", {})
        vocabulary, merges = model.get("vocab"), model.get("merges", [])
        merges = [pair.split() if isinstance(pair, str) else pair for pair in merges]
        if '"NFC"' not in json.dumps(content.get("normalizer")):
            preprocessing = preprocessing or "openai"
    elif (folder / OPENAI_MERGES).is_file():
        return _from_openai(folder / OPENAI_MERGES, preprocessing or "openai")
    else:
        raise UserError(
            f"{folder}: has no tokenizer (vocab.json with merges.txt, tokenizer.json, or OpenAI's "
            f"{OPENAI_MERGES}); put the one published with the checkpoint there."
        )
    if not isinstance(vocabulary, dict) or not {START, END} <= vocabulary.keys():
        raise UserError(
            f"{path}: is not CLIP's vocabulary (it lacks {START} and {END}); put the tokenizer "
            "published with the checkpoint there."
        )
    merges = [tuple(pair) for pair in merges]
    return ClipTokenizer(vocabulary, merges, preprocessing or "transformers")


def published_preprocessing(folder: str | os.PathLike) -> Preprocessing | None:
    """Whose code prepared the inputs of the CLIP in a folder of `mmqa convert`; None: not said.

    The record of a conversion names it, or (of older versions) the layout of the source.
    """
    file = Path(folder) / _RECORD
    record = read_json(file) if file.is_file() else {}
    if not isinstance(record, dict) or "layout" not in record:  # not of a conversion
        return None
    usual = "transformers" if record["layout"] == "transformers" else "openai"
    found = record.get("preprocessing") or usual
    if found not in get_args(Preprocessing):
        raise UserError(
            f"{file}: preprocessing is {found!r}: expected one of "
            f"{', '.join(get_args(Preprocessing))}; correct it or convert the model again."
        )
    return found


def _merges(text: str) -> list[list[str]]:
    return [line.split() for line in text.split("\n") if line and not line.startswith("#version")]


def _from_openai(path: Path, preprocessing: Preprocessing) -> ClipTokenizer:
    """The tokenizer of openai/CLIP clip/simple_tokenizer.py; its ids follow from the merges."""
    try:
        with gzip.open(path) as file:
            # The first line is a title; the file has more merges than CLIP uses.
            lines = decode_text(file.read(_MOST_MERGES), path).split("\n")[1:]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as gzip ({error}); fetch it again.") from None
    symbols = _byte_symbols()
    merges = _merges("\n".join(lines[: _OPENAI_TOKENS - 2 * len(symbols) - 2]))
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, merges), START, END]
    vocabulary = {token: row for row, token in enumerate(tokens)}
    whole = len(vocabulary) == len(tokens) == _OPENAI_TOKENS
    if not whole or any(len(pair) != 2 for pair in merges):
        raise UserError(
            f"{path}: does not hold CLIP's {_OPENAI_TOKENS - 514:,} merges; fetch OpenAI's file."
        )
    return ClipTokenizer(vocabulary, [(a, b) for a, b in merges], preprocessing)


def _byte_symbols() -> list[str]:
    """The characters that stand for bytes in byte-level BPE, in the order of their ids: the
    printable ones of Latin-1 as themselves, then the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(code) for code in (*printable, *range(0x100, 0x100 + others))]


def open_tokenizer(
    path: str | os.PathLike,
) -> WordPiece | ClipTokenizer | SiglipTokenizer | QuestionWords:
    """Opens a tokenizer.json of any kind, or a folder with a tokenizer of CLIP or SigLIP."""
    path = as_path(path)
    if path.is_dir():
        return _of_folder(path)
    if path.is_file() and read_text(path).lstrip().startswith("["):
        return read_words(path)
    if path.is_file() and is_saved(read_text(path)):
        return read_saved(path)
    if path.name == "tokenizer.json" and path.is_file() and '"BPE"' in read_text(path):
        content = read_json(path)
        model = content.get("model") if isinstance(content, dict) else None
        if isinstance(model, dict) and model.get("type") == "BPE":
            return load_clip_tokenizer(path.parent)
    return load_tokenizer(path)


def _of_folder(folder: Path) -> ClipTokenizer | SiglipTokenizer:
    """The tokenizer beside converted weights."""
    file = folder / _RECORD
    record = read_json(file) if file.is_file() else {}
    if isinstance(record, dict) and record.get("model") == "siglip":
        return load_siglip_tokenizer(folder, record["config"]["text"]["vocab_size"])
    return load_clip_tokenizer(folder)
