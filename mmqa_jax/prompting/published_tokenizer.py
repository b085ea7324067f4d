"""Tokenizers that `tokenizers` cannot open by itself, built by transformers from published files.

transformers reads the vocabulary; where it splits a text otherwise than the original library, the
original's rule is put in its place. Importing it takes seconds, so that text_tokenizer opens a
tokenizer.json without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.tokenizers import split_as_sentencepiece

# llama.cpp's byte-level BPEs whose splitting transformers has -> whether a word that is a token
# stays whole whatever the merges say (llama.cpp src/llama-vocab.cpp, `ignore_merges`).
_BYTE_LEVEL = {"llama-bpe": True, "llama3": True, "llama-v3": True, "gpt-2": False}


class PublishedTokenizer(NamedTuple):
    """A tokenizer that transformers opened.

    Attributes:
      tokenizer: adds the special tokens that a prompt begins with.
      special: spelling of special tokens by name (`bos_token`, `eos_token`, ...).
    """

    tokenizer: Tokenizer
    special: dict[str, str]


def open_published(folder: Path) -> PublishedTokenizer:
    """Opens the tokenizer of a folder without tokenizer.json.

    A tokenizer.model is SentencePiece's, of LLaMA-2, Vicuna and LLaVA-1.5. Other files
    (vocab.json and merges.txt, ...) are opened as tokenizer_config.json names their class.

    Raises:
      UserError: neither is there, or the files are broken or of a kind that needs code of theirs.
    """
    config = folder / "tokenizer_config.json"
    settings = read_json(config) if config.is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{config}: is not an object; fetch the file again.")
    if not (folder / "tokenizer.model").is_file():
        if not settings.get("tokenizer_class"):
            raise UserError(
                f"{folder}: has neither tokenizer.json nor tokenizer.model, nor a "
                "tokenizer_config.json that names its tokenizer_class; name the folder or GGUF "
                "file with the tokenizer by --tokenizer."
            )
        return _published(_from_pretrained("AutoTokenizer", folder))
    # As LLaMA's own code, where tokenizer_config.json does not say otherwise.
    defaults = {} if "add_bos_token" in settings else {"add_bos_token": True}
    opened = _published(_from_pretrained("LlamaTokenizer", folder, **defaults))
    prefix = "first" if settings.get("legacy") is False else "always"
    if settings.get("add_prefix_space") is False:
        prefix = "never"
    split_as_sentencepiece(opened.tokenizer, prefix)
    return opened


def open_gguf(path: Path, kind: str, splitting: str, prefix_space: bool) -> PublishedTokenizer:
    """Opens the tokenizer in a GGUF file's metadata.

    Args:
      path: the file.
      kind: `tokenizer.ggml.model`.
      splitting: `tokenizer.ggml.pre`.
      prefix_space: `tokenizer.ggml.add_space_prefix`.

    Raises:
      UserError: of a kind that transformers would split otherwise than llama.cpp.
    """
    if kind != "llama" and (kind != "gpt2" or splitting not in _BYTE_LEVEL):
        raise UserError(
            f"{path}: its tokenizer is {kind!r} with pre-tokenizer {splitting!r}, but only 'llama' "
            f"(SentencePiece) and 'gpt2' with smollm, {', '.join(_BYTE_LEVEL)} are supported; name "
            "a folder with the model's tokenizer.json by --tokenizer."
        )
    opened = _published(
        _from_pretrained("PreTrainedTokenizerFast", path.parent, gguf_file=path.name)
    )
    if kind == "llama":
        split_as_sentencepiece(opened.tokenizer, "always" if prefix_space else "never")
    else:
        opened.tokenizer.model.ignore_merges = _BYTE_LEVEL[splitting]
    return opened


def _from_pretrained(name: str, folder: Path, **settings: Any) -> Any:
    """transformers' class of this name, opened from local files; code beside them is not run."""
    import transformers

    try:
        return getattr(transformers, name).from_pretrained(
            os.fspath(folder), local_files_only=True, trust_remote_code=False, **settings
        )
    except Exception as error:  # the library raises all kinds for broken files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"{folder}: transformers cannot open its tokenizer ({reason}); copy the files again, "
            "or name a folder with a tokenizer.json by --tokenizer."
        ) from error


def _published(opened: Any) -> PublishedTokenizer:
    if getattr(opened, "backend_tokenizer", None) is None:
        raise UserError(
            f"{opened.name_or_path}: its {type(opened).__name__} has no form of the tokenizers "
            "library; name a folder with a tokenizer.json by --tokenizer."
        )
    special = {key: str(token) for key, token in opened.special_tokens_map.items()}
    return PublishedTokenizer(opened.backend_tokenizer, special)
