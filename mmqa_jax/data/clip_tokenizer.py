"""CLIP's byte-pair tokenizer, from the files published with its weights."""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, decode_text, read_json, read_text
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.question_words import QuestionWords, read_words
from mmqa_jax.data.tokenizers import WordPiece, load_tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
OPENAI_MERGES = "bpe_simple_vocab_16e6.txt.gz"
_OPENAI_TOKENS = 49_408  # of which 256 bytes, the same at a word's end, START and END
# openai/CLIP clip/simple_tokenizer.py: contractions, runs of letters, single digits, the rest.
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class ClipTokenizer:
    """CLIP's byte-level BPE, lower case; ids without the start and end tokens.

    As `clip.tokenize`: HTML entities are resolved (twice) and white space is collapsed. OpenAI's
    also repairs broken encodings with ftfy; repair such texts beforehand.

    Args:
      vocabulary: token -> id, END and START among them.
      merges: pairs in order of their rank.

    Attributes:
      cls_id, sep_id, pad_id: of START, END and the padding, which is always masked.
      vocab_size: number of tokens.
      fingerprint: 16 hex digits that change with vocabulary or merges.
    """

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]):
        self.cls_id, self.sep_id = vocabulary[START], vocabulary[END]
        self.pad_id, self.vocab_size = self.sep_id, len(vocabulary)
        self._tokenizer = Tokenizer(
            models.BPE(
                vocabulary, list(merges), end_of_word_suffix="</w>", unk_token=END, fuse_unk=False
            )
        )
        self._tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        parts = json.dumps([sorted(vocabulary.items()), [list(pair) for pair in merges]])
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without start and end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without start and end."""
        clean = [html.unescape(html.unescape(text)).strip() for text in texts]
        encodings = self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def save(self, path: str | os.PathLike) -> None:
        """Writes tokenizer.json, whole or not at all."""
        with atomic_write(path) as file:
            file.write(self._tokenizer.to_str())


def load_clip_tokenizer(folder: str | os.PathLike) -> ClipTokenizer:
    """Reads the files published with CLIP: vocab.json and merges.txt, tokenizer.json, or OpenAI's
    bpe_simple_vocab_16e6.txt.gz.

    Raises:
      UserError: there are none, or they are not those of a CLIP tokenizer.
    """
    folder = Path(folder)
    path = folder / "vocab.json"
    if path.is_file():
        vocabulary = read_json(path)
        merges = _merges(read_text(folder / "merges.txt"))
    elif (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer.json"
        model = read_json(path).get("model", {})
        vocabulary, merges = model.get("vocab"), model.get("merges", [])
        merges = [pair.split() if isinstance(pair, str) else pair for pair in merges]
    elif (folder / OPENAI_MERGES).is_file():
        return _from_openai(folder / OPENAI_MERGES)
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
    return ClipTokenizer(vocabulary, [tuple(pair) for pair in merges])


def _merges(text: str) -> list[list[str]]:
    return [line.split() for line in text.split("\n") if line and not line.startswith("#version")]


def _from_openai(path: Path) -> ClipTokenizer:
    """The tokenizer of openai/CLIP clip/simple_tokenizer.py; its ids follow from the merges."""
    try:
        with gzip.open(path) as file:
            # The first line is a title; the file has more merges than CLIP uses.
            lines = decode_text(file.read(), path).split("\n")[1:]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as gzip ({error}); fetch it again.") from None
    symbols = _byte_symbols()
    merges = _merges("\n".join(lines[: _OPENAI_TOKENS - 2 * len(symbols) - 2]))
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, merges), START, END]
    if len(tokens) != _OPENAI_TOKENS or any(len(pair) != 2 for pair in merges):
        raise UserError(
            f"{path}: does not hold CLIP's {_OPENAI_TOKENS - 514:,} merges; fetch OpenAI's file."
        )
    return ClipTokenizer(
        {token: row for row, token in enumerate(tokens)}, [(a, b) for a, b in merges]
    )


def _byte_symbols() -> list[str]:
    """The characters that stand for bytes in byte-level BPE, in the order of their ids: the
    printable ones of Latin-1 as themselves, then the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(code) for code in (*printable, *range(0x100, 0x100 + others))]


def open_tokenizer(path: str | os.PathLike) -> WordPiece | ClipTokenizer | QuestionWords:
    """Opens a tokenizer.json of any kind, or a folder with a CLIP tokenizer.

    Raises:
      UserError: it is none; see `load_tokenizer`, `load_clip_tokenizer` and `read_words`.
    """
    path = as_path(path)
    if path.is_dir():
        return load_clip_tokenizer(path)
    if path.is_file() and read_text(path).lstrip().startswith("["):
        return read_words(path)
    if path.name == "tokenizer.json" and path.is_file() and '"BPE"' in read_text(path):
        content = read_json(path)
        model = content.get("model") if isinstance(content, dict) else None
        if isinstance(model, dict) and model.get("type") == "BPE":
            return load_clip_tokenizer(path.parent)
    return load_tokenizer(path)
