"""The tokenizer in a GGUF file's metadata, built without transformers.

What a file does not say, such as how a text is split before bytes are merged, llama.cpp knows by a
name (src/llama-vocab.cpp). Patterns are those of the tokenizer.json that each was taken from; the
tests compare with transformers. A name that is not known is refused: another splitting gives other
tokens than the model was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.tokenizer_files import SPACE, sentencepiece_decoder, split_as_sentencepiece
from mmqa_jax.weights.formats.gguf import GGUFSource

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's token types
_REMEDY = "name a folder with the model's tokenizer.json by --tokenizer"


class GGUFTokenizer(NamedTuple):
    """What a GGUF file says of its model's texts.

    Attributes:
      tokenizer: adds the tokens that a prompt begins with.
      special: spelling of special tokens by name (`bos_token`, ...).
      end_ids: tokens that end an answer.
      template: for conversations; "": none.
    """

    tokenizer: Tokenizer
    special: dict[str, str]
    end_ids: tuple[int, ...]
    template: str


def read_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """The tokenizer of a GGUF file; UserError where its kind or its splitting is not known."""
    file = GGUFSource(path)
    kind = file.metadata("tokenizer.ggml.model")
    tokens: list[str] = file.metadata("tokenizer.ggml.tokens")
    ids = {"bos": 1, "eos": 2} if kind == "llama" else {"eos": 1} if kind == "t5" else {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = file.metadata(f"tokenizer.ggml.{name}_token_id", -1)
        if 0 <= number < len(tokens):
            ids[name] = number
    if kind == "gpt2":
        tokenizer, begins = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(file, tokens, tokens[ids.get("unknown", 0)]), True
    elif kind == "t5":
        tokenizer, begins = _unigram(file, tokens), False
    else:
        raise UserError(
            f"{path}: its tokenizer is {kind!r}, expected 'gpt2' (bytes), 'llama' (SentencePiece) "
            f"or 't5'; {_REMEDY}."
        )
    if kind != "t5":
        types = file.metadata("tokenizer.ggml.token_type")
        tokenizer.add_tokens(list(_added(tokens, types, spaces=kind == "gpt2")))
        if file.metadata("tokenizer.ggml.add_bos_token", begins) and "bos" in ids:
            bos = tokens[ids["bos"]]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
            )
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{short}_token": tokens[ids[name]] for name, short in names.items() if name in ids}
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    turns = [number for number, token in enumerate(tokens) if token in _TURN_ENDS]
    if {"<|return|>", "<|call|>"} <= {tokens[number] for number in turns}:
        turns.remove(tokens.index("<|end|>"))  # of gpt-oss, which ends its thoughts by it
    template = file.metadata("tokenizer.chat_template", "")
    return GGUFTokenizer(tokenizer, special, tuple(dict.fromkeys([*named, *turns])), template)


# Texts that end a turn, whatever a file calls its end: many name only that of a document, and their
# models would go on with the next turn. llama.cpp's list, less those of documents.
_TURN_ENDS = frozenset(
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|flush|>", "<|calls|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[e~["),
    ]
)


def _added(tokens: Sequence[str], types: Sequence[int], *, spaces: bool) -> Iterator[AddedToken]:
    """Tokens that are found in a text before it is split, as a file marks them; with runs of spaces
    or without, which SentencePiece merges."""
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL or token in _TURN_ENDS:
            yield AddedToken(token, normalized=False, special=True)
        elif kind == _USER_DEFINED and (spaces or token.strip(f" {SPACE}")):
            yield AddedToken(token, normalized=False, special=False)


# Byte-level BPE: how texts are split before bytes are merged.


class _Splitting(NamedTuple):
    """A pre-tokenizer of llama.cpp.

    Attributes:
      patterns: each splits what the ones before it left, into its matches and what is between.
      composes: characters first, into their NFC.
      whole: a word that is a token stays whole whatever the merges say (`ignore_merges`).
      begins: a prompt begins with the token `bos` where the file does not say.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    whole: bool = False
    begins: bool = False


_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """GPT-4's pattern (cl100k) with its numbers and letters."""
    marks = letters.removeprefix(r"\p{L}")
    return (
        rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_REST}"
    )


def _cased(digits: str, contracted: str = "") -> str:
    """GPT-4o's pattern (o200k), which splits where capitals begin."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{contracted}|{before}{upper}+{lower}*{contracted}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


_THREE = r"\p{N}{1,3}"
_LLAMA3 = _Splitting((_words(_THREE),))
_GPT2 = _Splitting((_BYTES,))
_DIGITS = _Splitting((r"\p{N}", _BYTES))
_QWEN2 = _Splitting((_words(r"\p{N}"),), composes=True)
_GPT4O = _Splitting((_cased(_THREE, f"{_CONTRACTED}?"),))
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")
_DIGITS_NAMES = ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b")
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_SPLITTINGS: dict[str, _Splitting] = {
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3._replace(whole=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(_DIGITS_NAMES, _DIGITS),
    "command-r": _DIGITS._replace(composes=True),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "trillion"), _GPT2),
    "olmo": _GPT2._replace(composes=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    "qwen35": _Splitting((_words(r"\p{N}", r"\p{L}\p{M}"),), composes=True),
    "tekken": _Splitting((_cased(r"\p{N}"),), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "deepseek-coder": _Splitting(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "deepseek-v3": _Splitting(
        (
            *(_THREE, "[一-龥぀-ゟ゠-ヿ]+"),
            rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
        )
    ),
}


def _byte_level(file: GGUFSource, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether its prompts begin with `bos` where the file does not say."""
    name = file.metadata("tokenizer.ggml.pre", "default")
    if name not in _SPLITTINGS:
        raise UserError(
            f"{file.name}: its pre-tokenizer is {name!r}, expected one of "
            f"{', '.join(sorted(_SPLITTINGS))}; {_REMEDY}."
        )
    splitting = _SPLITTINGS[name]
    merges = [tuple(merge.split(" ")) for merge in file.metadata("tokenizer.ggml.merges")]
    tokenizer = _merging(file, tokens, merges, ignore_merges=splitting.whole)
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(form), "isolated") for form in splitting.patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begins


def _merging(
    file: GGUFSource, tokens: Sequence[str], merges: Sequence[tuple[str, ...]], **settings: object
) -> Tokenizer:
    try:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        return Tokenizer(models.BPE(vocabulary, merges, **settings))
    except Exception as error:  # the library raises all kinds for what does not fit together
        raise UserError(
            f"{file.name}: its merges are not of its tokens ({error}); fetch or convert it again."
        ) from error


# SentencePiece's BPE, whose merges follow from scores, and T5's unigrams.


def _sentencepiece(file: GGUFSource, tokens: Sequence[str], unknown: str) -> Tokenizer:
    """LLaMA's, Mistral's and Gemma's; Gemma's files spell runs of spaces as spaces."""
    pieces = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
    scores = file.metadata("tokenizer.ggml.scores")
    known, merges = set(pieces), []
    for score, place, piece in zip(scores, range(len(pieces)), pieces, strict=True):
        for cut in range(1, len(piece)):
            if piece[:cut] in known and piece[cut:] in known:
                merges.append((-score, place, -cut, piece))
    merges.sort()
    tokenizer = _merging(
        *(file, pieces, [(piece[:-cut], piece[-cut:]) for _, _, cut, piece in merges]),
        **{"unk_token": unknown, "fuse_unk": True, "byte_fallback": "<0x00>" in known},
    )
    prefix = "always" if file.metadata("tokenizer.ggml.add_space_prefix", True) else "never"
    split_as_sentencepiece(tokenizer, prefix)
    tokenizer.decoder = sentencepiece_decoder(prefix)
    return tokenizer


_T5_FIRST = ("<pad>", "</s>", "<unk>")
_T5_SENTINELS = 100


def _unigram(file: GGUFSource, tokens: Sequence[str]) -> Tokenizer:
    """T5's SentencePiece model (llama.cpp conversion/t5.py, set_vocab).

    Pieces are followed by rows of the model's table that no piece has, called `[PADn]`. The first
    100 of them are T5's sentinels, from `<extra_id_99>` down to `<extra_id_0>`, unless the file
    names some itself.
    """
    kinds = file.metadata("tokenizer.ggml.token_type")
    added = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _USER_DEFINED and not token.startswith("<extra_id_")
    ]
    off = [
        key
        for key in ("add_space_prefix", "remove_extra_whitespaces")
        if not file.metadata(f"tokenizer.ggml.{key}", False)
    ]
    if added or off or tuple(tokens[:3]) != _T5_FIRST:
        why = f"its first tokens are {', '.join(tokens[:3])}"
        why = f"tokenizer.ggml.{off[0]} is not true" if off else why
        why = f"has the added token {added[0]!r}" if added else why
        raise UserError(
            f"{file.name}: {why}, unlike a T5's tokenizer as it is read from GGUF; name a folder "
            "with the model's own by --tokenizer."
        )
    count = len(tokens)
    while tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    scores = file.metadata("tokenizer.ggml.scores")
    pieces = list(zip(tokens[:count], scores[:count], strict=True))
    sentinels = [token for token in tokens if "<extra_id_" in token]
    if not sentinels:
        numbers = reversed(range(min(_T5_SENTINELS, len(tokens) - count)))
        sentinels = [f"<extra_id_{number}>" for number in numbers]
        pieces += [(sentinel, 0.0) for sentinel in sentinels]
    in_bytes = "<0x00>" in tokens
    tokenizer = Tokenizer(models.Unigram(pieces, _UNKNOWN, byte_fallback=in_bytes))
    charsmap = file.metadata("tokenizer.ggml.precompiled_charsmap", [])
    if charsmap:
        tokenizer.normalizer = normalizers.Precompiled(bytes(value & 0xFF for value in charsmap))
    spaces = pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    steps = [decoders.ByteFallback()] if in_bytes else []
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Metaspace()])
    marks = [*_T5_FIRST, *sentinels]
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer
