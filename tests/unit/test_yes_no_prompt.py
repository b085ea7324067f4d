"""Rerankers that are decoders: tokenizers and chat templates that make no prompt of a pair."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.published_tokenizers import published_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer as TextsTokenizer
from mmqa_jax.inference.cross_encoder import read_yes_no
from tests.refusals import refuses

TURNS = ("<|im_start|>", "<|im_end|>")
ROLE = '{{ messages | selectattr("role", "eq", "%s") | map(attribute="content") | first }}'
ROLES = ROLE % "query" + "\n" + ROLE % "document"


def tokenizer(*words: str, of_bytes: bool = True) -> TextsTokenizer:
    """Of single characters, and of these words as special tokens."""
    letters = pre_tokenizers.ByteLevel.alphabet() if of_bytes else map(chr, range(32, 127))
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(False) if of_bytes else pre_tokenizers.Metaspace()
    made.add_special_tokens([AddedToken(word, special=True) for word in words])
    return published_tokenizer(made, {}, "tokenizer.json")


def write_reranker(folder, template: str | None) -> None:
    """sentence-transformers' files of one."""
    types = {"Transformer": "", "LogitScore": "1_LogitScore"}
    modules = [{"type": f"sentence_transformers.{x}", "path": path} for x, path in types.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    ids = {"true_token_id": 1, "false_token_id": 2}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize(
    ("words", "of_bytes", "message"),
    [
        (("no", *TURNS), True, "its tokenizer has no token 'yes', .*; give that model's own"),
        (("yes", "no", "<|im_end|>"), True, r"its tokenizer has no token '<\|im_start\|>'"),
        (("yes", "no", *TURNS), False, "its tokenizer is not one of bytes, .*use another reranker"),
    ],
)
def test_tokenizers_that_a_qwen_does_not_have(words, of_bytes, message, tmp_path):
    assert read_yes_no(tmp_path, "qwen3", tokenizer("yes", "no", *TURNS)).longest == 8192
    with pytest.raises(UserError, match=f"{tmp_path}: {message}"):
        read_yes_no(tmp_path, "qwen3", tokenizer(*words, of_bytes=of_bytes))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template .*; fetch the whole folder again"),
        ("", r"makes no prompt of .* \(it lacks the two roles\); use a checkpoint"),
        ("{{ raise_exception('only users') }}", "makes no prompt of .*only users.; use"),
        ("{{ messages.query.content }}", "no prompt of a `query` and a `document` .*no attrib"),
        (ROLE % "query", "does not put a `query` and then a `document` .*; use a checkpoint that"),
        (f"<|im_start|>{ROLES}", r"special tokens in the question's line \('<\|im_start\|>'\)"),
    ],
)
def test_chat_templates_that_make_no_prompt_of_a_pair(template, message, tmp_path):
    write_reranker(tmp_path, template)
    refuses(f"{tmp_path}: .*{message}", read_yes_no, tmp_path, "llama", tokenizer(*TURNS))


def test_a_chat_template_of_the_two_roles(tmp_path):
    write_reranker(tmp_path, f"<|im_start|>\n{ROLES}<|im_end|>")
    prompt = read_yes_no(tmp_path, "llama", tokenizer(*TURNS))
    assert (prompt.before, prompt.between, prompt.after) == ("<|im_start|>\n", "\n", "<|im_end|>")
