"""A tiny tokenizer of bytes with Qwen's way of splitting texts."""

from collections.abc import Sequence

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
# Qwen's, of its tokenizer.json.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_tokenizer(*around: str, more: Sequence[str] = ()) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes that puts tokens around a text: `<s> $A </s>`; `more`: special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("y", "e"),
        ("ye", "s"),
        ("n", "o"),
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("Ċ", "Ċ"),
    ]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges))
    steps = [
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *more)])
    if around:
        ids = [(token, made.token_to_id(token)) for token in SPECIAL]
        template = processors.TemplateProcessing(single=" ".join(around), special_tokens=ids)
        made.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[0], model_max_length=2000
    )
