"""What tokenizer_config.json says of a tokenizer.json beside it, against transformers."""

import itertools
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from mmqa_jax.data.tokenizers import load_tokenizer
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from tests.refusals import refuses

TEXTS = ["a cab", "<s>[INST] a cab [/INST] b</s><s>a", "", "a  b"]
WORDS = ["Ärger in Köln 漢字", "[CLS] The café", "a"]
_PIECES = ["▁a", "▁c", "ab", "▁cab", "▁b", "▁▁"]
_MERGES = [("▁", "a"), ("▁", "c"), ("a", "b"), ("▁c", "ab"), ("▁", "b"), ("▁", "▁")]


def llama_folder(folder, settings, model_type="llama"):
    """A folder as LLaMA-2's: its tokenizer.json puts the prefix space after each special token."""
    folder.mkdir()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "c", *_PIECES]
    tokenizer = Tokenizer(
        models.BPE(
            {token: row for row, token in enumerate(tokens)},
            _MERGES,
            fuse_unk=True,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in names.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        ("LlamaTokenizer", "llama"),
        ("LlamaTokenizerFast", "llama"),
        ("LlamaTokenizer", "llava"),
        ("PreTrainedTokenizerFast", "llama"),
    ],
)
def test_llamas_settings_are_those_of_transformers(tmp_path, kind, model_type):
    from transformers import AutoTokenizer

    changes = [{}]
    for key in ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token"):
        changes += [{key: value} for value in (True, False, None)]
    changes += [{"add_prefix_space": False, "legacy": True}]
    for number, change in enumerate(changes):
        settings = {"tokenizer_class": kind, **change}
        folder = llama_folder(tmp_path / str(number), settings, model_type)
        theirs, ours = AutoTokenizer.from_pretrained(folder), open_text_tokenizer(folder)
        for text in TEXTS:
            assert ours.encode(text) == theirs(text).input_ids, (change, text)
            plain = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode_plain(text) == plain, (change, text)
            assert ours.decode(plain) == theirs.decode(plain), (change, text)


def test_settings_survive_a_tokenizer_that_is_saved(tmp_path):
    settings = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    opened = open_text_tokenizer(llama_folder(tmp_path / "published", settings))
    (tmp_path / "saved").mkdir()
    opened.save(tmp_path / "saved")
    again = open_text_tokenizer(tmp_path / "saved")
    for text in [*TEXTS, " a"]:
        assert again.encode(text) == opened.encode(text)
    assert again.fingerprint == opened.fingerprint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"legacy": "no"}, "legacy is 'no', expected true, false or null"),
        ({"split_special_tokens": True}, "split_special_tokens takes special tokens for plain"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path, change, said):
    refuses(said, open_text_tokenizer, llama_folder(tmp_path / "model", change))


def bert_folder(folder, settings, lowercase):
    folder.mkdir()
    letters = sorted({*"".join(WORDS), *"abcdefghijklmnopqrstuvwxyz"} - {" "})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    vocabulary = {token: row for row, token in enumerate(tokens)}
    from transformers import BertTokenizer

    BertTokenizer(vocab=vocabulary, do_lower_case=lowercase).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder


def test_berts_settings_are_those_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    kinds = ("BertTokenizer", "PreTrainedTokenizerFast")
    for number, (kind, lowercase, accents, chinese) in enumerate(
        itertools.product(kinds, (True, False), (True, False, None), (True, False))
    ):
        settings = {"tokenizer_class": kind, "do_lower_case": lowercase}
        settings |= {"strip_accents": accents, "tokenize_chinese_chars": chinese}
        folder = bert_folder(tmp_path / str(number), settings, not lowercase)
        theirs, ours = (
            AutoTokenizer.from_pretrained(folder),
            load_tokenizer(folder / "tokenizer.json"),
        )
        for text in [WORDS[0], WORDS[2]]:
            assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, settings
