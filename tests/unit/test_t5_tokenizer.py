"""T5's and mT5's SentencePiece models against sentencepiece and transformers."""

import gguf
import pytest
import sentencepiece
import transformers
from tiny_t5 import EXTRA, add_spiece, write_spiece

from mmqa_jax.core.files import write_json
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from tests.refusals import refuses

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
    ours = open_text_tokenizer(folder)
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
    saved, ours = open_text_tokenizer(tmp_path), open_text_tokenizer(folder)
    for text in (*TEXTS, *MARKED):
        ids = theirs(text).input_ids
        assert saved.encode(text) == ids, text
        if 2 not in ids:
            assert ours.encode(text) == ids, text
    in_bytes = ours.vocab_size > 256 + EXTRA
    assert (2 in ours.encode("日本語")) != in_bytes


def test_a_saved_tokenizer_opens_as_the_same(folder, tmp_path):
    ours = open_text_tokenizer(folder)
    ours.save(tmp_path)
    again = open_text_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint
    for text in (*TEXTS, *MARKED):
        assert again.encode(text) == ours.encode(text)


def write_gguf(file, folder, count, change=lambda writer: None):
    """The folder's tokenizer in a GGUF file without tensors; `change` sets metadata otherwise."""
    writer = gguf.GGUFWriter(file, "t5")
    add_spiece(writer, folder / "spiece.model", count)
    change(writer.kv_data[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_files_tokenizer_is_that_of_the_folder(folder, tmp_path):
    """With more rows than pieces and sentinels, as a T5's table has."""
    of_folder = open_text_tokenizer(folder)
    ours = open_text_tokenizer(write_gguf(tmp_path / "a.gguf", folder, of_folder.vocab_size + 28))
    assert (ours.vocab_size, ours.end_ids) == (of_folder.vocab_size, (1,))
    for text in (*TEXTS, *MARKED):
        ids = of_folder.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == of_folder.decode(ids)


def test_a_gguf_files_own_sentinels_are_read(folder, tmp_path):
    """As from a folder with added_tokens.json."""
    of_folder = open_text_tokenizer(folder)
    size = of_folder.vocab_size

    def name_them(metadata):
        for number in range(EXTRA):
            place = size - 1 - number
            metadata["tokenizer.ggml.tokens"].value[place] = f"<extra_id_{number}>"
            metadata["tokenizer.ggml.scores"].value[place] = -1000.0
            metadata["tokenizer.ggml.token_type"].value[place] = gguf.TokenType.USER_DEFINED

    ours = open_text_tokenizer(write_gguf(tmp_path / "a.gguf", folder, size + 28, name_them))
    assert ours.vocab_size == size
    for text in (*TEXTS, *MARKED):
        assert ours.encode(text) == of_folder.encode(text), text


@pytest.mark.parametrize(
    ("key", "place", "value", "message"),
    [
        ("add_space_prefix", None, False, "add_space_prefix is not true"),
        ("remove_extra_whitespaces", None, False, "remove_extra_whitespaces is not true"),
        ("tokens", 2, "<unknown>", "first tokens are <pad>, </s>, <unknown>"),
        ("token_type", 7, gguf.TokenType.USER_DEFINED, "has the added token"),
    ],
)
def test_another_tokenizer_in_a_gguf_file_is_refused(key, place, value, message, folder, tmp_path):
    def change(metadata):
        # Written number by number, and not reached.
        metadata.pop("tokenizer.ggml.precompiled_charsmap")
        entry = metadata[f"tokenizer.ggml.{key}"]
        if place is None:
            entry.value = value
        else:
            entry.value[place] = value

    file = write_gguf(tmp_path / "a.gguf", folder, 200 + 256, change)
    refuses(f"{message}.*--tokenizer", open_text_tokenizer, file)
