"""MiniLM's vocabulary cut down to a corpus: same splits there, nothing lost elsewhere."""

import numpy as np
import pytest

from mmqa_jax.data import tokenizers
from mmqa_jax.data.atlas.factbook import load_countries
from tests.refusals import refuses

ODD_TEXTS = [
    'Côte d\'Ivoire (34°20′N): "naïve" façade - 0.2% of Åland!',
    "日本 means 'origin of the sun'; 서울 is the capital of 대한민국.",
    "pneumonoultramicroscopicsilicovolcanoconiosis " + "x" * 101 + " zyzzyva",
    "emoji 🙂 and \u4dff outside the vocabulary",
    "[SEP] [MASK] written in a text",
    "",
]


def factbook(country_slice: slice) -> list[str]:
    fields = [("Government", "Capital"), ("Introduction", "Background"), ("Geography", "Location")]
    return [country.raw(*field) for country in load_countries()[country_slice] for field in fields]


@pytest.fixture(scope="module")
def full():
    return tokenizers.minilm_tokenizer()


@pytest.fixture(scope="module")
def corpus():
    return factbook(slice(0, 120))


@pytest.fixture(scope="module")
def small(full, corpus):
    return tokenizers.restrict_vocabulary(full, corpus)


def spelled(tokenizer, text: str) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


def joined(pieces: list[str]) -> str:
    return "".join(piece.removeprefix("##") for piece in pieces)


def test_texts_of_the_corpus_are_split_as_before(full, small, corpus):
    assert sum(map(len, corpus)) > 50_000
    assert small.vocab_size < full.vocab_size / 2
    both = (tokenizer.encode_batch(corpus) for tokenizer in (small, full))
    for ours, theirs in zip(*both, strict=True):
        assert [small.token(i) for i in ours] == [full.token(i) for i in theirs]
        assert small.decode(ours) == full.decode(theirs)


def test_unseen_words_fall_into_pieces_and_lose_no_letter(full, small):
    texts = factbook(slice(120, 200)) + ODD_TEXTS
    resplit = 0
    for text in texts:
        ours, theirs = spelled(small, text), spelled(full, text)
        assert ours.count("[UNK]") == theirs.count("[UNK]")
        assert joined(ours) == joined(theirs)
        resplit += ours != theirs
    assert resplit > 20  # these texts do hold words that the small vocabulary lacks


def test_every_token_of_the_full_vocabulary_can_be_written(full, small):
    """No token of MiniLM needs a character that the restricted vocabulary lacks."""
    words = [full.token(i).removeprefix("##") for i in range(full.vocab_size)]
    # A rare sign is normalized away or split off; what MiniLM itself cannot read is not tested.
    for word, ours, theirs in zip(
        words, small.encode_batch(words), full.encode_batch(words), strict=True
    ):
        assert ours.count(small.unk_id) == theirs.count(full.unk_id), word


def test_special_tokens_stand_in_front_and_cannot_be_forged(small):
    assert [small.token(i) for i in range(5)] == list(tokenizers.SPECIAL_TOKENS)
    assert (small.pad_id, small.unk_id, small.cls_id, small.sep_id, small.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    assert not {2, 3, 4} & set(small.encode("a [SEP] b [MASK] c [CLS]"))


def test_rows_point_to_the_same_spelling(full, small):
    rows = tokenizers.vocabulary_rows(small, full)
    assert rows.shape == (small.vocab_size,)
    assert len(np.unique(rows)) == len(rows)
    assert [full.token(int(row)) for row in rows] == [small.token(i) for i in range(len(rows))]
    np.testing.assert_array_equal(
        tokenizers.vocabulary_rows(full, full), np.arange(full.vocab_size)
    )


def test_saved_and_loaded_it_is_the_same(small, corpus, tmp_path):
    small.save(tmp_path / "tokenizer.json")
    loaded = tokenizers.load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == small.fingerprint
    texts = corpus[:20] + ODD_TEXTS
    assert loaded.encode_batch(texts) == small.encode_batch(texts)


def test_it_depends_on_the_texts_alone(full, small, corpus):
    again = tokenizers.restrict_vocabulary(full, corpus[::-1])
    assert again.fingerprint == small.fingerprint
    assert small.fingerprint != full.fingerprint
    assert tokenizers.restrict_vocabulary(full, corpus[:3]).vocab_size < small.vocab_size
    assert full.vocab_size == 30_522  # the tokenizer it was made from is left alone


def test_words_of_the_first_texts_come_first(full, corpus):
    answers = ["yes", "red", "red", "no, red", "yes"]
    small = tokenizers.restrict_vocabulary(full, corpus, first=answers)
    words = [small.token(i) for i in range(small.vocab_size)]
    assert words[:9] == [*tokenizers.SPECIAL_TOKENS, "red", "yes", ",", "no"]
    plain = tokenizers.restrict_vocabulary(full, [*corpus, *answers])
    assert sorted(words) == sorted(plain.token(i) for i in range(plain.vocab_size))
    rest = [full.token_id(word) for word in words[9:]]
    assert rest == sorted(rest)
    assert small.encode("no, red") == [words.index(word) for word in ("no", ",", "red")]


def test_tokens_that_the_pretrained_vocabulary_lacks_are_named(full):
    other = tokenizers.train_wordpiece(["Ouagadougou Yamoussoukro " * 5], 60, lowercase=True)
    refuses(r"\d+ of its tokens are not in the pretrained", tokenizers.vocabulary_rows, other, full)
