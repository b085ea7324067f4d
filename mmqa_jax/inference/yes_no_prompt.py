"""What a decoder that reranks is asked of a pair: Qwen3-Reranker's prompt, or that of its files.

The model's card says how (Zhang et al. 2025, Qwen3 Embedding): a fixed prompt with the instruction,
the question and the text, an empty thought, and then the log-odds of `yes` against `no` as the next
token. A folder of sentence-transformers says the same with a chat template that has the roles
`query` and `document`, and the layer LogitScore; then these are what is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.chat_template import MARKS, TEMPLATE, rendered, template_source
from mmqa_jax.data.encoder_tokenizer import TextsTokenizer
from mmqa_jax.data.tokenizers import SETTINGS
from mmqa_jax.models.published_keys import check_keys, kinds
from mmqa_jax.weights.sentence_pooling import (
    PROMPTS,
    TRANSFORMER,
    check_logit_prompts,
    read_modules,
)

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_LONGEST = 8192  # tokens, the card's
_QUERY, _DOCUMENT = MARKS


@dataclasses.dataclass(frozen=True)
class YesNoPrompt:
    """The text around a question and a text, and the two tokens that are compared.

    Attributes:
      before, between, after: the text; special tokens spelled out in it are recognized.
      yes, no: ids of the tokens.
      longest: tokens of a whole prompt.
    """

    before: str
    between: str
    after: str
    yes: int
    no: int
    longest: int


class YesNoPairs:
    """Prompts of pairs of texts as token ids, with the methods that a reranker asks.

    Too long a prompt loses the end of its text, never what follows the text. Special tokens that
    are spelled out in question or text are plain characters.
    """

    def __init__(self, tokenizer: TextsTokenizer, prompt: YesNoPrompt):
        self._tokenizer = tokenizer
        self.pad_id = tokenizer.pad_id
        # The tokens of the last line run on into the question's.
        lines, newline, self._last_line = prompt.before.rpartition("\n")
        self._between = prompt.between
        self._first, self._last = tokenizer.encode_prompts([lines + newline, prompt.after])

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int]]]:
        """Token ids of what depends on a pair."""
        shield = self._tokenizer.shield
        prompts = [
            f"{self._last_line}{shield(first)}{self._between}{shield(second)}"
            for first, second in pairs
        ]
        return [(ids,) for ids in self._tokenizer.encode_prompts(prompts)]

    def pair(self, own: Sequence[int], length: int) -> tuple[list[int], list[int]]:
        """Ids and token types, all 0, of a prompt of at most `length` tokens."""
        room = length - len(self._first) - len(self._last)
        ids = [*self._first, *own[: max(room, 0)], *self._last]
        return ids, [0] * len(ids)

    def pair_length(self, own: int) -> int:
        """Tokens of a whole prompt."""
        return len(self._first) + own + len(self._last)


def read_yes_no(folder: Path, kind: str, tokenizer: TextsTokenizer) -> YesNoPrompt:
    """What a folder's decoder is asked.

    Args:
      kind: its `model_type`.
    """
    modules = dict(read_modules(folder))
    if "LogitScore" in modules:
        prompt = _by_files(folder, modules, tokenizer)
    elif kind == "qwen3":
        turn = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        before = f"{turn}<Instruct>: {_INSTRUCTION}\n<Query>: "
        after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        yes, no = (token_of(tokenizer, word, folder) for word in ("yes", "no"))
        prompt = YesNoPrompt(before, "\n<Document>: ", after, yes, no, _LONGEST)
        for special in ("<|im_start|>", "<|im_end|>"):
            token_of(tokenizer, special, folder)
    else:
        raise UserError(
            f"{folder}: holds a language model ({kind}) that is no reranker: a Qwen3-Reranker, or "
            "sentence-transformers' files with the layer LogitScore, was expected; give one, or a "
            "cross-encoder."
        )
    if not tokenizer.is_byte_level:
        raise UserError(
            f"{folder}: its tokenizer is not one of bytes, so that a prompt cannot be made of "
            "parts; use another reranker."
        )
    last = prompt.before.rpartition("\n")[2]
    if tokenizer.encode_prompts([last]) != tokenizer.encode_batch([last]):
        raise UserError(
            f"{folder}: its prompt has special tokens in the question's line ({last!r}), which is "
            "not done here; use another reranker."
        )
    return prompt


def _by_files(folder: Path, modules: Mapping[str, str], tokenizer: TextsTokenizer) -> YesNoPrompt:
    for kind, place in modules.items():
        if kind not in ("Transformer", "LogitScore") or (kind == "Transformer" and place):
            raise UserError(
                f"{folder / 'modules.json'}: holds the layer {kind!r} in {place!r}, which is not "
                "known of a reranker that is a decoder; use another checkpoint."
            )
    file = folder / modules["LogitScore"] / "config.json"
    score = read_json(file)
    read = kinds(integer="true_token_id false_token_id")
    check_keys(score, str(file), read=read, fixed={"module_input_name": ("causal_logits",)})
    ids = [score.get(name) for name in ("true_token_id", "false_token_id")]
    if not all(isinstance(one, int) and 0 <= one < tokenizer.vocab_size for one in ids):
        raise UserError(
            f"{file}: true_token_id and false_token_id are {ids}, two tokens were expected; use "
            "a checkpoint that compares two."
        )
    said, where = _object(folder / TRANSFORMER), str(folder / TRANSFORMER)
    check_keys(
        said,
        where,
        read=kinds(size_or_null="max_seq_length", object_or_null="processing_kwargs"),
        harmless=("modality_config", "unpad_inputs", "model_args", "tokenizer_args"),
        fixed={"transformer_task": ("text-generation",), "module_output_name": ("causal_logits",)},
    )
    given = said.get("processing_kwargs") or {}
    check_keys(given, f"{where}, processing_kwargs", read=("chat_template",))
    options = given.get("chat_template") or {}
    check_keys(
        options,
        f"{where}, processing_kwargs.chat_template",
        read=kinds(flag="add_generation_prompt"),
        fixed={"restore_suffix": (True,)},
    )
    instruction = check_logit_prompts(folder / PROMPTS)
    text = _rendered(folder, instruction, bool(options.get("add_generation_prompt")))
    before, query, rest = text.partition(_QUERY)
    between, document, after = rest.partition(_DOCUMENT)
    if not query or not document or _QUERY in rest or _DOCUMENT in after:
        raise UserError(
            f"{folder}: its chat template does not put a `query` and then a `document` into the "
            "prompt, each once; use a checkpoint that was published as a reranker."
        )
    longest = said.get("max_seq_length") or tokenizer.max_tokens or _LONGEST
    return YesNoPrompt(before, between, after, ids[0], ids[1], longest)


def _rendered(folder: Path, instruction: str, generation: bool) -> str:
    """The chat template's prompt of the two marks; their contents as texts or as lists of parts."""
    settings = _object(folder / SETTINGS)
    source = template_source(folder, settings)
    if source is None:
        raise UserError(
            f"{folder}: has no chat template ({TEMPLATE}) that makes a prompt of a pair; fetch "
            "the whole folder again."
        )
    roles = [("system", instruction)] if instruction else []
    roles += [("query", _QUERY), ("document", _DOCUMENT)]
    text, reason = "", "it lacks the two roles"
    for whole in (True, False):
        messages = [
            {"role": role, "content": content if whole else [{"type": "text", "text": content}]}
            for role, content in roles
        ]
        try:
            text = rendered(source, messages, settings, generation)
        except jinja2.TemplateError as error:
            reason = str(error)
            continue
        if _QUERY in text and _DOCUMENT in text and "'type'" not in text:
            return text
    if text:
        return text
    raise UserError(
        f"{folder}: its chat template makes no prompt of a `query` and a `document` ({reason}); "
        "use a checkpoint that was published as a reranker."
    )


def token_of(tokenizer: TextsTokenizer, text: str, folder: Path) -> int:
    """The id of a token that the prompt needs; UserError where the tokenizer lacks it."""
    found = tokenizer.token_id(text)
    if found is None:
        raise UserError(
            f"{folder}: its tokenizer has no token {text!r}, which the prompt of Qwen's rerankers "
            "needs; give that model's own tokenizer, or a reranker of another kind."
        )
    return found


def _object(file: Path) -> dict[str, Any]:
    content = read_json(file) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
