"""Settings of tokenizer_config.json that take precedence over the tokenizer.json beside it.

transformers' classes of LLaMA and BERT build the handling of texts anew from these settings, so
that a tokenizer.json that says otherwise is not what a model was trained with. `add_bos_token` and
`add_eos_token` are not among them: where there is a tokenizer.json, transformers 5 goes by that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.added_tokens import SETTINGS

Prefix = Literal["always", "first", "never"]

_SPACE = "▁"  # as SentencePiece spells it
# Models of which transformers does not believe that their tokenizer is LLaMA's.
_FILE_ALONE = ("llava", "llava_next", "vipllava")
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

    Raises:
      UserError: one of these that is neither true, false nor null, or `split_special_tokens`.
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
    if isinstance(tokenizer.model, models.WordPiece) and kind in ("", "BertTokenizer"):
        _normalize_as_bert(tokenizer, settings)
    elif isinstance(tokenizer.model, models.BPE) and kind == "LlamaTokenizer":
        found = prefix_of(tokenizer)
        wanted = llama_prefix(settings)
        if found not in (None, wanted) and _model_type(folder) not in _FILE_ALONE:
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
    found: Prefix = "never"
    for step in (*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)):
        if step["type"] == "ByteLevel":
            return None
        if step["type"] == "Prepend":
            found = "always"
        elif step["type"] == "Metaspace":
            found = step["prepend_scheme"]
    return found


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
