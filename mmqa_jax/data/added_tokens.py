"""Tokens that stand beside a tokenizer.json and not in it.

transformers adds the tokens of tokenizer_config.json when it opens a folder; the tokenizers library
alone would split them into pieces, and a chat model would not see where a turn ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json

SETTINGS = "tokenizer_config.json"
_OLD = ("special_tokens_map.json", "added_tokens.json")  # read where SETTINGS has no decoder
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def add_published_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Adds what the files beside a tokenizer.json hold, as transformers does.

    First the tokens of `added_tokens_decoder` by their numbers (in older folders, those of
    added_tokens.json), then the special tokens that the files name and nothing has added.

    Raises:
      UserError: a token is not described as transformers does it, or its number is not the next.
    """
    settings = _object(folder / SETTINGS)
    numbered = settings.get("added_tokens_decoder")
    named = [settings]
    if numbered is None:
        named.append(_object(folder / _OLD[0]))
        old = _object(folder / _OLD[1])
        special = set(_named(named))
        numbered = {
            number: {"content": token, "special": token in special} for token, number in old.items()
        }
    file = folder / SETTINGS
    if not isinstance(numbered, Mapping):
        raise UserError(f"{file}, added_tokens_decoder: is not an object; fetch the file again.")
    for number, token in sorted((_number(key, file), value) for key, value in numbered.items()):
        added = _token(token, f"{file}, added_tokens_decoder {number}")
        tokenizer.add_tokens([added])
        found = tokenizer.token_to_id(added.content)
        if found != number:
            raise UserError(
                f"{file}: the token {added.content!r} is number {number} there, and {found} in "
                "tokenizer.json; fetch both files of one version."
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in dict.fromkeys(_named(named)):
        # A name without a number would be a row that the model's table may lack.
        if content not in known and tokenizer.token_to_id(content) is not None:
            tokenizer.add_tokens([AddedToken(content, special=True)])


def _number(key: Any, file: Path) -> int:
    try:
        return int(key)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{file}, added_tokens_decoder: {key!r} is no token's number; fetch the file again."
        ) from error


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
