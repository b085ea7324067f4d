"""Opens a tokenizer.json as it was published: in a box, with the tokens and settings beside it.

The `tokenizers` library calls the whole of normalizer, pre-tokenizer, model and post-processor a
Tokenizer; here it is a Pipeline.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from mmqa_jax.core.box import Box, Failed, OverBudget
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json, read_json, read_text
from mmqa_jax.core.paths import as_path

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPIECE = "spiece.model"  # of T5 and SigLIP
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
_RARE = "\U0002b820"  # a character that no vocabulary needs to have


@contextlib.contextmanager
def panics_refused() -> Iterator[None]:
    """Guards calls of the tokenizers library, whose Rust panics with something that is no
    Exception.

    Oniguruma does so where a regular expression backtracks too long, on a text that `tokenizer_of`
    did not try.
    """
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise UserError(
            f"a tokenizer cannot split a text ({error}): a regular expression of its "
            "tokenizer.json explodes; use the checkpoint as it was published."
        ) from error


def _is_panic(error: BaseException) -> bool:
    """Whether it is of a library in Rust; its class has no name that it could be caught by."""
    return type(error).__name__ == "PanicException"


def read_tokenizer(path: str | os.PathLike) -> Pipeline:
    """The tokenizer of a tokenizer.json, with the settings and tokens beside it."""
    tokenizer, folder = tokenizer_of(read_text(path), str(path)), as_path(path).parent
    _apply_settings(tokenizer, folder)
    _add_published_tokens(tokenizer, folder)
    return tokenizer


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file beside a tokenizer; {} where there is no file."""
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{file}: is not an object; fetch the file again.")
    return content


def spelling(token: Any) -> str | None:
    """The text of a special token, which settings name or describe by an object."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


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


def tokenizer_of(text: str, place: str) -> Pipeline:
    """The tokenizer of a tokenizer.json's text: the one place where one of others is opened.

    Its regular expressions and replacements are tried out in a box first. Messages name `place`.
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
        return Pipeline.from_str(text)
    except BaseException as error:  # plain Exception for every mistake; one in Rust is none
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise UserError(f"{place}: not a tokenizer ({error}); {remedy}.") from error


def _numbers(content: Mapping[str, Any]) -> Iterator[int]:
    """Yields the numbers of tokens in an unchecked tokenizer.json."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens")
    numbers = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    if isinstance(added, list):
        numbers += [token.get("id") for token in added if isinstance(token, dict)]
    return (number for number in numbers if isinstance(number, int))


def _kinds(part: Any) -> set[str]:
    """Yields the types of a part and of the parts within it."""
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


def check_any_text(tokenizer: Pipeline, where: str | os.PathLike) -> None:
    """UserError for a tokenizer that fails at characters that its vocabulary lacks."""
    try:
        with panics_refused():
            tokenizer.encode(_RARE)
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception for every mistake
        raise UserError(
            f"{where}: cannot split every text ({error}); put the checkpoint's own tokenizer there."
        ) from error


# Tokens that stand beside a tokenizer.json and not in it.
#
# transformers adds the tokens of tokenizer_config.json when it opens a folder; the tokenizers
# library alone would split them into pieces, and a chat model would not see where a turn ends.

_OLD = ("special_tokens_map.json", "added_tokens.json")  # read where SETTINGS has no decoder
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def _add_published_tokens(tokenizer: Pipeline, folder: Path) -> None:
    """Adds what the files beside a tokenizer.json hold, as transformers does.

    First the tokens of `added_tokens_decoder` by their numbers (in older folders, those of
    added_tokens.json), then the special tokens that the files name and nothing has added.
    """
    settings = read_object(folder / SETTINGS)
    numbered = settings.get("added_tokens_decoder")
    named = [settings]
    place = f"{folder / SETTINGS}, added_tokens_decoder"
    if numbered is None:
        place = str(folder / _OLD[1])
        named.append(read_object(folder / _OLD[0]))
        old = read_object(folder / _OLD[1])
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
    flags = {flag: value[flag] for flag in FLAGS if flag in value} if content else {}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise UserError(f"{where}: is {value!r}, not a token; fetch the file again.")
    return AddedToken(content, **flags)


def _named(files: list[dict[str, Any]]) -> Iterator[str]:
    """Spellings of the special tokens that files name."""
    for settings in files:
        for key, value in settings.items():
            if key in _LISTS:
                values = value.values() if isinstance(value, Mapping) else value or ()
            else:
                values = (value,) if key.endswith("_token") else ()
            yield from filter(None, map(spelling, values))


# Settings of tokenizer_config.json that take precedence over the tokenizer.json beside it.
#
# transformers' classes of LLaMA and BERT build the handling of texts anew from these settings, so
# that a tokenizer.json that says otherwise is not what a model was trained with. `add_bos_token`
# and `add_eos_token` are not among them: where there is a tokenizer.json, transformers 5 goes by
# that.

Prefix = Literal["always", "first", "never"]

SPACE = "▁"  # as SentencePiece spells it
# Models of which transformers does not believe that their tokenizer is LLaMA's.
_FILE_ALONE = ("llava", "llava_next", "vipllava")
_LIKE_BERT = ("", "BertTokenizer", "MPNetTokenizer")
# BERT's settings -> the normalizer's.
_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def _apply_settings(tokenizer: Pipeline, folder: Path) -> None:
    """Changes a tokenizer.json's tokenizer to what the tokenizer_config.json beside it says.

    LLaMA's `add_prefix_space` and `legacy`, and BERT's `do_lower_case`, `strip_accents` and
    `tokenize_chinese_chars`.
    """
    file = folder / SETTINGS
    settings = read_object(file)
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
        if isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
            for key, field in _BERT.items():
                if settings.get(key) is not None:
                    setattr(tokenizer.normalizer, field, settings[key])
    elif isinstance(tokenizer.model, models.BPE) and kind == "LlamaTokenizer":
        wanted: Prefix = "always" if settings.get("legacy") else "first"
        wanted = "never" if settings.get("add_prefix_space") is False else wanted
        if prefix_of(tokenizer) not in (None, wanted) and _model_type(folder) not in _FILE_ALONE:
            split_as_sentencepiece(tokenizer, wanted)
            tokenizer.decoder = sentencepiece_decoder(wanted)


def prefix_of(tokenizer: Pipeline) -> Prefix | None:
    """Returns where a tokenizer puts the prefix space; None: a tokenizer of bytes has none."""
    prefix: Prefix = "never"
    for step in (*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)):
        if step["type"] == "ByteLevel":
            return None
        if step["type"] == "Prepend":
            prefix = "always"
        elif step["type"] == "Metaspace":
            prefix = step["prepend_scheme"]
    return prefix


def byte_symbols() -> dict[str, int]:
    """The byte for which each character of byte-level BPE stands, in the order of their ids: the
    printable ones of Latin-1 stand for themselves, then others from U+0100 on for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


def split_as_sentencepiece(tokenizer: Pipeline, prefix: Prefix) -> None:
    """Puts the prefix space before a text that begins with a space as well, as SentencePiece does.

    transformers' own pre-tokenizer replaces spaces first and then adds no prefix to a text that
    begins with one, so that " a" and "a" become the same tokens. Here the spaces are gone when the
    prefix is added: `always` after each special token, too (LLaMA-2 as published), `first` only
    where the text begins (`legacy: false`), or `never`.
    """
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(" ", prefix, split=False),
            pre_tokenizers.Metaspace(SPACE, "never", split=False),
        ]
    )


def sentencepiece_decoder(prefix: Prefix) -> decoders.Decoder:
    """Spells SentencePiece's pieces, less the prefix space where there is one."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [] if prefix == "never" else [decoders.Strip(" ", 1, 0)]
    return decoders.Sequence([*steps, *strip])


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, of each step where it has several."""
    content = {} if part is None else json.loads(part.__getstate__())
    for step in content.get("normalizers") or content.get("pretokenizers") or [content]:
        if step:
            yield step


def _model_type(folder: Path) -> str | None:
    """Reads the model type in the config beside a tokenizer, or of `mmqa convert`'s model.json."""
    for name, key in (("config.json", "model_type"), ("model.json", "model")):
        named = read_object(folder / name).get(key)
        if isinstance(named, str):
            return named
    return None
