"""T5's and mT5's SentencePiece models against sentencepiece and transformers."""

from __future__ import annotations

import pytest
import sentencepiece
import transformers
from tiny_t5 import EXTRA, write_spiece

from mmqa_jax.core.files import write_json
from mmqa_jax.prompting.text_tokenizer import open_tokenizer

TEXTS = (
    "Which red is the sun of blue? Answer: sun-red, 3.",
    "",
    "  two  spaces\nand a newline\ttab ",
    "ﬁne ① Ｆｕｌｌ　width — “quotes” … ½",
    "naïve café e\u0301 日本語 😀👍🏽 zero\u200bwidth soft\u00adhyphen",
    "▁low ▁ x",
    "e" * 60,
)
MARKED = ("red </s> blue<extra_id_0>green <extra_id_99>.", "<pad><unk> sea")  # special tokens


@pytest.fixture(scope="module", params=[False, True], ids=["T5", "mT5"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_spiece(folder / "spiece.model", in_bytes=request.param)
    write_json(folder / "config.json", {"model_type": "t5", "eos_token_id": 1})
    return folder


def test_ids_and_texts_are_sentencepieces(folder):
    ours = open_tokenizer(folder)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    assert ours.vocab_size == theirs.vocab_size() + EXTRA
    assert (ours.bos, ours.end_ids) == (None, (1,))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == [*ids, 1], text
        assert ours.encode_plain(text) == ids
        if 2 not in ids:  # sentencepiece spells unknown pieces otherwise
            assert ours.decode(ids) == theirs.decode(ids)


def test_ids_are_those_of_transformers(folder, tmp_path):
    """Where it has no bytes: those of mT5 it leaves unknown. Its tokenizer.json is read, too."""
    theirs = transformers.T5Tokenizer.from_pretrained(folder)
    theirs.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "t5", "eos_token_id": 1})
    saved, ours = open_tokenizer(tmp_path), open_tokenizer(folder)
    for text in (*TEXTS, *MARKED):
        ids = theirs(text).input_ids
        assert saved.encode(text) == ids, text
        if 2 not in ids:
            assert ours.encode(text) == ids, text
    in_bytes = ours.vocab_size > 256 + EXTRA
    assert (2 in ours.encode("日本語")) != in_bytes


def test_a_saved_tokenizer_opens_as_the_same(folder, tmp_path):
    ours = open_tokenizer(folder)
    ours.save(tmp_path)
    again = open_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint
    for text in (*TEXTS, *MARKED):
        assert again.encode(text) == ours.encode(text)
